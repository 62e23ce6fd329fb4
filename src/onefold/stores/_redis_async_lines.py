"""The awaited sender: it performs the steps of a flight on the connections of an async client, in one event loop.

It decides nothing, and it is the same as the blocking one, but that a cluster's nodes send by themselves.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any, Final, TypeVar

from onefold.stores._redis_flights import Exchange, Flight, Leg, Pause, Step
from onefold.stores._redis_lines import named
from onefold.stores._redis_places import Alone, Cluster, errors_of, library_of
from onefold.stores._redis_records import packed

T = TypeVar("T")

# A thousand tasks may ask at the same moment. So many connections serve them, and the others wait for their turn.
CONNECTIONS_MAX: Final = 50


class AsyncLine(Alone):
    """A client of one server, or of the primary that Sentinel names."""

    def __init__(self, client: Any, connections_max: int) -> None:
        self.client = client
        self.errors = errors_of(client)
        self._room = asyncio.Semaphore(connections_max)

    async def begin(self) -> None:
        """Before a flight: what a client has to know."""

    async def fly(self, flight: Flight[T]) -> T:
        reply: Any = None
        while True:
            try:
                step = flight.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = await self._perform(step)

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Exchange):
            if len(step.legs) == 1:
                return [await self._leg(step.legs[0])]
            return await asyncio.gather(*(self._leg(leg) for leg in step.legs))
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return await self._refresh()

    async def _leg(self, leg: Leg) -> Any:
        async with self._room:
            try:
                return await self._talk(leg)
            except self.errors.ConnectionError as error:
                return error

    async def _talk(self, leg: Leg) -> list[Any]:
        pool = leg.place
        connection = await pool.get_connection(*named(pool.__class__))
        try:
            await connection.send_packed_command(packed(leg.commands))
            return [await self._heard(connection) for _ in leg.commands]
        except BaseException:
            # A reply that nobody has read would be taken for that of the next flight.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)

    async def _heard(self, connection: Any) -> Any:
        try:
            return await connection.read_response(disable_decoding=True)
        except self.errors.ResponseError as error:
            return error

    async def _refresh(self) -> None:
        raise AssertionError("one server has no slots to learn")


class AsyncClusterLine(Cluster, AsyncLine):
    """A client of a cluster. Its nodes lend no connections, but they send what belongs together."""

    def __init__(self, client: Any, connections_max: int) -> None:
        super().__init__(client, connections_max)
        self._command = import_module(f"{library_of(client)}.asyncio.cluster").PipelineCommand

    async def begin(self) -> None:
        await self.client.initialize()

    async def _talk(self, leg: Leg) -> list[Any]:
        node = leg.place
        commands = [self._command(number, *words, NEVER_DECODE=True) for number, words in enumerate(leg.commands)]
        await node.execute_pipeline(commands)
        for command in commands:
            if isinstance(command.result, Exception) and not isinstance(command.result, self.errors.ResponseError):
                # Where one connection is dead, those that were idle are too.
                if hasattr(node, "disconnect_free_connections"):
                    await node.disconnect_free_connections()
                raise command.result
        return [command.result for command in commands]

    async def _refresh(self) -> None:
        await self.client.nodes_manager.initialize()
