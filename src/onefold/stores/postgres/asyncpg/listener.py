"""A connection of asyncpg's that listens for the ends of records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from onefold.stores.postgres import wakeups
from onefold.stores.postgres.wakeups.async_listener import Line


def opens(open_connection: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Line]]:
    async def opened() -> Line:
        return AsyncpgLine((await open_connection()).connection)

    return opened


class AsyncpgLine:
    """asyncpg hands messages over as they come."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def listen(self, heard: Callable[[str], None], lost: Callable[[], None]) -> bool:
        if wakeups.is_pooled(self._connection.get_server_pid(), await self.ask(wakeups.PROCESS)):
            return False
        await self._connection.add_listener(wakeups.CHANNEL, lambda *message: heard(message[3]))
        self._connection.add_termination_listener(lambda _connection: lost())
        return True

    async def ask(self, statement: str) -> Any:
        return await self._connection.fetchval(statement)

    async def close(self) -> None:
        self._connection.terminate()
