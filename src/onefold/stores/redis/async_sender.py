"""Perform the steps of a dispatch on the connections of an async client, in one event loop.

It decides nothing, and works like the sync one.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from onefold.stores.redis.records import packed
from onefold.stores.redis.routing import Alone, Cluster, Exchange, NodeBatch, Pause, Step, errors_of
from onefold.stores.redis.sender import named
from onefold.stores.reserved import connecting

# A thousand tasks may call at the same time. This many connections serve them, and the others wait for their turn.
CONNECTIONS_MAX: Final = 50


class AsyncSender(Alone):
    """A client of one server, or of the primary that Sentinel names."""

    def __init__(self, client: Any, connections_max: int) -> None:
        self.client = client
        self.errors = errors_of(client)
        self._room = asyncio.Semaphore(connections_max)

    async def begin(self) -> None:
        """Prepare the client for a dispatch."""

    async def send(self, step: Step) -> Any:
        """Perform one step of a dispatch."""
        if isinstance(step, Exchange):
            if len(step.batches) == 1:
                return [await self._batch(step.batches[0])]
            return await asyncio.gather(*(self._batch(batch) for batch in step.batches))
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return await self._refresh()

    async def _batch(self, batch: NodeBatch) -> Any:
        async with self._room:
            try:
                return await self._exchange(batch)
            except (self.errors.ConnectionError, self.errors.TimeoutError) as error:
                return error

    async def _exchange(self, batch: NodeBatch) -> list[Any]:
        pool = batch.node
        with connecting():
            connection = await pool.get_connection(*named(pool.__class__))
        try:
            return await self._spoken(connection, batch)
        finally:
            await pool.release(connection)

    async def _spoken(self, connection: Any, batch: NodeBatch) -> list[Any]:
        """Return the replies to a batch, and to the command that follows on the same connection."""
        try:
            await connection.send_packed_command(packed(batch.commands))
            replies = [await self._heard(connection) for _ in batch.commands]
            if batch.after is not None and batch.goes_on(replies):
                await connection.send_packed_command(packed([batch.after]))
                replies.append(await self._heard(connection))
            return replies
        except BaseException:
            # An unread reply would be taken for that of the next dispatch.
            await connection.disconnect(nowait=True)
            raise

    async def _heard(self, connection: Any) -> Any:
        try:
            return await connection.read_response(disable_decoding=True)
        except self.errors.ResponseError as error:
            return error

    async def _refresh(self) -> None:
        raise AssertionError("one server has no slots to learn")


class AsyncClusterSender(Cluster, AsyncSender):
    """A client of a cluster.

    Its nodes can send what belongs together by themselves. Not all versions of the libraries give the connection back
    if that is cancelled, and a node lends only so many.
    """

    async def begin(self) -> None:
        await self.client.initialize()

    async def _exchange(self, batch: NodeBatch) -> list[Any]:
        node = batch.node
        connection = node.acquire_connection()
        try:
            return await self._spoken(connection, batch)
        except (self.errors.ConnectionError, self.errors.TimeoutError):
            # If one connection is dead, those that were idle are too.
            if hasattr(node, "disconnect_free_connections"):
                await node.disconnect_free_connections()
            raise
        finally:
            (getattr(node, "release", None) or node._free.append)(connection)

    async def _refresh(self) -> None:
        await self.client.nodes_manager.initialize()
