"""The connections on which a store in Redis renews its claims: one to each primary, outside the client's pools.

Handlers may exhaust a client's pool. They cannot take these connections, which are opened here with the pool's own
settings. While a pool has none to lend, claims are ended on them, too.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from onefold.stores.redis.async_sender import AsyncClusterSender, AsyncSender
from onefold.stores.redis.routing import NodeBatch
from onefold.stores.redis.sender import ConnectionCache, Sender, new_connection, node_name


class Reserve(ConnectionCache):
    """Lends one connection for each pool, unknown to the pool."""

    def take(self, pool: Any) -> Any:
        self._leave_the_parents()
        try:
            connection = self._idle[pool].pop()
        except LookupError:
            connection = None
        if connection is None:
            connection = new_connection(pool)
            connection.connect()
        return connection

    def drop_idle_of(self, pool: Any) -> None:
        """Do nothing: there is one connection for each pool, and it was discarded."""

    def give_back(self, pool: Any, connection: Any) -> None:
        if self._closed or self._idle.get(pool):
            connection.disconnect()
        else:
            self._idle[pool] = [connection]


class Renewals:
    """The sender for renewals through a client: separate, and opened before the first claim depends on it."""

    def __init__(self, sender: Sender) -> None:
        self.sender = type(sender)(sender.client, Reserve())
        self._opened_in = 0

    @property
    def is_held(self) -> bool:
        """Return whether they were opened in this process. If they were lost since, dispatches reopen them."""
        return self._opened_in == os.getpid()

    def hold(self) -> None:
        """Open the connections, unless they were opened."""
        if self.is_held:
            return
        for node in self.sender.nodes():
            pool = self.sender._pool(node)
            self.sender.connections.give_back(pool, self.sender.connections.take(pool))
        self._opened_in = os.getpid()

    def close(self) -> None:
        self._opened_in = 0
        self.sender.connections.drop_idle()


class AsyncReservedSender(AsyncSender):
    """The async sender for renewals: one connection for each node, unknown to the client."""

    def __init__(self, client: Any) -> None:
        super().__init__(client, 1)
        self._connections: dict[object, Any] = {}
        # One dispatch at a time on each connection: an unresponsive node does not delay the others.
        self._turns: dict[object, asyncio.Lock] = {}
        self._held = False

    @property
    def is_held(self) -> bool:
        """Return whether the connections were opened. If they were lost since, dispatches reopen them."""
        return self._held

    async def hold(self) -> None:
        """Open the connections, unless they are open."""
        if self._held:
            return
        await self.begin()
        async with self._room:
            for node in self.nodes():
                await self._connected(node)
            self._held = True

    async def close(self) -> None:
        self._held = False
        while self._connections:
            _, connection = self._connections.popitem()
            await connection.disconnect()

    async def _connected(self, node: Any) -> Any:
        connection = self._connections.get(node_name(node))
        if connection is None:
            connection = new_connection(node)
            await connection.connect()
            self._connections[node_name(node)] = connection
        return connection

    async def _batch(self, batch: NodeBatch, patience: float | None) -> Any:
        async with self._turns.setdefault(node_name(batch.node), asyncio.Lock()):
            try:
                return await self._exchange(batch, patience)
            except (self.errors.ConnectionError, self.errors.TimeoutError) as error:
                return error

    async def _exchange(self, batch: NodeBatch, patience: float | None) -> list[Any]:  # noqa: ARG002 - for the client's
        connection = await self._connected(batch.node)
        try:
            return await self._spoken(connection, batch)
        except BaseException:
            if self._connections.get(node_name(batch.node)) is connection:
                del self._connections[node_name(batch.node)]
            raise


class AsyncReservedClusterSender(AsyncReservedSender, AsyncClusterSender):
    """The async sender for renewals in a cluster."""
