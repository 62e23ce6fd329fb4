"""Listen for the ends of records in an event loop, over either driver: one connection for each loop of a store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from onefold._concurrency.generators import run_async
from onefold._model import Address
from onefold.stores.postgres import wakeups
from onefold.stores.postgres.wakeups import Marks


class Line(Protocol):
    """A connection that listens. Messages go to `heard`, and `lost` is called if it ends by itself."""

    async def listen(self, heard: Callable[[str], None], lost: Callable[[], None]) -> bool:
        """Listen from now on. Return False if a pooler is in between."""

    async def ask(self, statement: str) -> Any:
        """Return the only value of a statement."""

    async def close(self) -> None: ...


class AsyncListener:
    """Opens a session in a loop when somebody waits there, and closes it when nobody has waited for a while."""

    def __init__(self, open_line: Callable[[], Awaitable[Line]], name: str) -> None:
        self._open = open_line
        self._name = name
        self._sessions: dict[asyncio.AbstractEventLoop, AsyncSession] = {}
        self._is_pooled = False
        self._pid = os.getpid()

    async def listen(self, address: Address) -> bool:
        """Mark a record, so that its end is told. Return False if nobody will tell of it."""
        if self._pid != os.getpid():
            self._sessions, self._pid = {}, os.getpid()
        if self._is_pooled:
            return False
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            # Loops that were closed abruptly: the garbage collector closes their connections.
            for other in [other for other in self._sessions if other.is_closed()]:
                self._sessions.pop(other, None)
            session = self._sessions[loop] = AsyncSession(self._forget)
        try:
            async with asyncio.timeout(wakeups.MARK_SECONDS):
                marked = await session.mark(address, self._open)
        except Exception as error:  # noqa: BLE001 - whatever it is, looking by itself is the answer
            wakeups.tell_failed(self._name, error)
            return False
        if marked is None and not self._is_pooled:
            self._is_pooled = True
            wakeups.tell_pooled(self._name)
        return bool(marked)

    def _forget(self, session: AsyncSession, loop: asyncio.AbstractEventLoop) -> None:
        # Another may have taken its place: one that was lost is collected later.
        if self._sessions.get(loop) is session:
            del self._sessions[loop]

    def unlisten(self, address: Address) -> None:
        for session in list(self._sessions.values()):
            session.forget(address)

    async def close(self) -> None:
        """Close the session of the running loop. Those of others are closed with their loops."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


class AsyncSession:
    """The marks of one loop, and the connection that holds them."""

    def __init__(self, ended: Callable[[AsyncSession, asyncio.AbstractEventLoop], None]) -> None:
        self._marks = Marks()
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._line: Line | None = None
        self._kept: AsyncGenerator[None, None] | None = None
        self._ended = ended
        # Whether it had a connection, and has lost or closed it: the next one is for another session.
        self._is_over = False

    async def mark(self, address: Address, open_line: Callable[[], Awaitable[Line]]) -> bool | None:
        """Return whether the record is marked; None if a pooler is in between."""
        async with self._turn:
            if self._is_over:
                raise ConnectionError("the session was lost meanwhile")
            if self._line is None and not await self._open(open_line):
                return None
            assert self._line is not None
            return await run_async(self._marks.set(address, self._line.ask))

    def forget(self, address: Address) -> None:
        self._marks.forget(address)
        if not self._marks.wanted and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.call_later, wakeups.IDLE_SECONDS, self._close_if_idle)

    async def close(self) -> None:
        if self._kept is not None:
            await self._kept.aclose()

    async def _open(self, open_line: Callable[[], Awaitable[Line]]) -> bool:
        line = await open_line()
        try:
            is_direct = await line.listen(self._marks.heard, self._lost)
        except BaseException:
            await line.close()
            raise
        if not is_direct:
            await line.close()
            return False
        self._line = line
        self._kept = self._open_until_the_end(line)
        # A loop that ends closes the async generators started in it, and so this connection.
        await anext(self._kept)
        return True

    async def _open_until_the_end(self, line: Line) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._end()
            await line.close()
            self._marks.lost()

    def _lost(self) -> None:
        self._end()
        self._marks.lost()

    def _end(self) -> None:
        self._line, self._is_over = None, True
        self._ended(self, self._loop)

    def _close_if_idle(self) -> None:
        if not self._marks.wanted and self._kept is not None:
            self._closing = self._loop.create_task(self.close())
