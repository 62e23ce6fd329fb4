"""Perform the steps of a dispatch on the connections of an async client, in one event loop.

It decides nothing, and works like the sync one. The single calls of our own clients share a connection
(`multiplexed`); everything else takes one from the client's pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from onefold._concurrency.generators import run_async
from onefold._concurrency.interrupts import replied
from onefold._model import Claim
from onefold.stores.redis.connections.multiplexed import CALL_MAX, Multiplexer
from onefold.stores.redis.records import ScriptCall, packed
from onefold.stores.redis.routing import Alone, Cluster, Exchange, NodeBatch, Pause, Step, dispatch, errors_of
from onefold.stores.redis.sender import named
from onefold.stores.reserved import connecting

# A thousand tasks may call at the same time. This many connections serve them, and the others wait for their turn.
CONNECTIONS_MAX: Final = 50

# An ending waits for a connection of the client's for an eighth of its lease, as on SQL databases.
MOMENTS_PER_LEASE: Final = 8


class AsyncSender(Alone):
    """A client of one server, or of the primary that Sentinel names."""

    def __init__(self, client: Any, connections_max: int, *, ours: bool = False) -> None:
        self.client = client
        self.errors = errors_of(client)
        self._room = asyncio.Semaphore(connections_max)
        # A caller's own client has limits, which a connection beside its pool would exceed.
        self._multiplexer = Multiplexer(self.errors) if ours else None

    async def begin(self) -> None:
        """Prepare the client for a dispatch."""

    async def call(self, call: ScriptCall, claim: Claim | None = None) -> Any:
        """Send one call, which may end `claim`, on a fast path; on error, retry through the full dispatcher."""
        if self._multiplexer is not None:
            command = call.packed()
            try:
                node = self.node_of(call.key)
                if len(command) <= CALL_MAX:
                    connection = self._multiplexer.open_to(node) or await self._multiplexer.opened_to(node)
                    try:
                        return await connection.call(command)
                    except self.errors.NoScriptError:
                        # All tasks may meet it at once, after a failover. They need not open connections for it.
                        return await connection.call(packed([call.by_text()]))
            except (self.errors.ConnectionError, self.errors.ResponseError, self.errors.SlotNotCoveredError) as error:
                if isinstance(error, self.errors.ReadOnlyError):
                    # A primary until its failover.
                    self._multiplexer.retire(node)
        return (await run_async(dispatch(self, [call]), self if claim is None else self.soon([claim])))[0]

    async def close(self) -> None:
        """Close the connections that the client does not know."""
        if self._multiplexer is not None:
            await self._multiplexer.close()

    def soon(self, claims: Sequence[Claim]) -> Soon:
        """Return this sender for a dispatch that ends these claims, with a short bound on the wait for a connection."""
        return Soon(self, min((claim.lease for claim in claims), default=1.0) / MOMENTS_PER_LEASE)

    async def send(self, step: Step, patience: float | None = None) -> Any:
        """Perform one step of a dispatch; `patience` bounds the wait for a connection of the client's."""
        if isinstance(step, Exchange):
            if len(step.batches) == 1:
                return [await self._batch(step.batches[0], patience)]
            return await asyncio.gather(*(self._batch(batch, patience) for batch in step.batches))
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return await self._refresh()

    async def _batch(self, batch: NodeBatch, patience: float | None) -> Any:
        async with self._room:
            try:
                # Closing its connection would not keep the server from executing a command.
                return await replied(self._exchange(batch, patience))
            except (self.errors.ConnectionError, self.errors.TimeoutError) as error:
                return error

    async def _exchange(self, batch: NodeBatch, patience: float | None) -> list[Any]:
        pool = batch.node
        with connecting():
            connection = await self._taken(pool, patience)
        try:
            return await self._spoken(connection, batch)
        finally:
            await pool.release(connection)

    async def _taken(self, pool: Any, patience: float | None) -> Any:
        if patience is None:
            return await pool.get_connection(*named(pool.__class__))
        try:
            async with asyncio.timeout(patience) as bound:
                return await pool.get_connection(*named(pool.__class__))
        except TimeoutError:
            if not bound.expired():
                raise
            raise self.errors.MaxConnectionsError("no connection was free in time") from None

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


class Soon(NamedTuple):
    """A sender that waits for a connection only so long: the leases of the claims to be ended are running."""

    sender: AsyncSender
    seconds: float

    async def send(self, step: Step) -> Any:
        return await self.sender.send(step, self.seconds)


class AsyncClusterSender(Cluster, AsyncSender):
    """A client of a cluster.

    Its nodes can send what belongs together by themselves. Not all versions of the libraries give the connection back
    if that is cancelled, and a node lends only so many.
    """

    async def begin(self) -> None:
        await self.client.initialize()

    async def call(self, call: ScriptCall, claim: Claim | None = None) -> Any:
        await self.begin()
        return await super().call(call, claim)

    async def _exchange(self, batch: NodeBatch, patience: float | None) -> list[Any]:  # noqa: ARG002 - it never waits
        node = batch.node
        with connecting():
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
        if self._multiplexer is not None:
            self._multiplexer.retire_all()
        await self.client.nodes_manager.initialize()
