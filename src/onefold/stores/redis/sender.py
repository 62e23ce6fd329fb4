"""Perform the steps of a dispatch on the connections of a sync client.

It decides nothing. It uses the client's own pools, so that its limits, its TLS and its Sentinel apply; but it writes
commands to a connection itself: redis-py's own way costs more than the server's reply.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

from onefold._concurrency.generators import run
from onefold.stores.redis.records import ScriptCall, packed
from onefold.stores.redis.routing import (
    Alone,
    Cluster,
    Exchange,
    NodeBatch,
    Pause,
    Step,
    dispatch,
    errors_of,
    library_of,
    was_none_free,
)
from onefold.stores.reserved import mark_unsent


class ConnectionPool:
    """Connections of a caller's client: taken from its pool and returned at once, as the client itself does.

    A connection that is neither used nor returned would be lost to the caller. So an interrupt must not be noticed on
    the way from the pool to whoever returns it: no context manager is left, and no argument list is unpacked.
    """

    # Whether connections are returned by the methods below. Otherwise whoever took one calls the pool's own `release`:
    # an interrupt at the beginning of a function of ours would lose it.
    keeps = False

    def take(self, pool: Any) -> Any:
        try:
            return pool.get_connection("EVALSHA") if named(pool.__class__) else pool.get_connection()
        except Exception as error:
            mark_unsent(error)
            raise

    def give_back(self, pool: Any, connection: Any) -> None:
        pool.release(connection)

    def discard(self, pool: Any, connection: Any) -> None:
        """Close a connection: an unread reply must not be taken for that of the next dispatch."""
        connection.disconnect()
        pool.release(connection)

    def drop_idle(self) -> None:
        """Drop idle connections after one was lost: they may be dead too."""

    def drop_idle_of(self, pool: Any) -> None:
        """Drop the idle connections of one pool: other servers may be healthy."""

    def close(self) -> None:
        """Close: calls in progress return their connections to the pool."""


class ConnectionCache(ConnectionPool):
    """Caches connections of our own client: taking one from a pool and returning it costs as much as a call.

    The client's pool does not know them. So one that an interrupt loses is garbage, and thus closed.
    """

    keeps = True

    def __init__(self) -> None:
        self._idle: dict[Any, list[Any]] = {}
        self._pid = os.getpid()
        self._closed = False

    def take(self, pool: Any) -> Any:
        self._leave_the_parents()
        try:
            connection = self._idle[pool].pop()
        except LookupError:
            connection = None
        # Not where that error is handled: a server that is down would be told as its consequence.
        return self._opened(pool) if connection is None else connection

    def _opened(self, pool: Any) -> Any:
        connection = new_connection(pool)
        try:
            connection.connect()
        except Exception as error:
            mark_unsent(error)
            raise
        return connection

    def _leave_the_parents(self) -> None:
        if self._pid != os.getpid():
            # The parent's connections are not ours to use; dropping them here does not affect them.
            self._idle, self._pid = {}, os.getpid()

    def give_back(self, pool: Any, connection: Any) -> None:
        self._idle.setdefault(pool, []).append(connection)
        if self._closed:
            self.drop_idle()

    def discard(self, pool: Any, connection: Any) -> None:  # noqa: ARG002 - the pool has not lent it
        connection.disconnect()

    def drop_idle(self) -> None:
        idle, self._idle = self._idle, {}
        for pool, connections in idle.items():
            while connections:
                self.discard(pool, connections.pop())

    def drop_idle_of(self, pool: Any) -> None:
        connections = self._idle.pop(pool, [])
        while connections:
            self.discard(pool, connections.pop())

    def close(self) -> None:
        self._closed = True
        self.drop_idle()


class Sender(Alone):
    """A client of one server, or of the primary that Sentinel names."""

    def __init__(self, client: Any, connections: ConnectionPool) -> None:
        self.client = client
        self.errors = errors_of(client)
        self.connections = connections

    def call(self, call: ScriptCall) -> Any:
        """Send one call on a fast path; on error, retry through the full dispatcher."""
        try:
            pool = self._pool(self.node_of(call.key))
            connection = self.connections.take(pool)
            unread = True
            try:
                connection.send_packed_command((call.packed(),))
                reply = connection.read_response(disable_decoding=True)
                unread = False
            except self.errors.ResponseError:
                unread = False
                raise
            finally:
                if unread:
                    connection.disconnect()
                if not self.connections.keeps:
                    pool.release(connection)
                elif unread:
                    self.connections.discard(pool, connection)
                else:
                    self.connections.give_back(pool, connection)
            return reply
        except (self.errors.ConnectionError, self.errors.ResponseError, self.errors.SlotNotCoveredError) as error:
            if was_none_free(error):
                raise
            return run(dispatch(self, [call]), self)[0]

    def send(self, step: Step) -> Any:
        """Perform one step of a dispatch."""
        if isinstance(step, Exchange):
            return self._exchange(step.batches)
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        return self._refresh()

    def _exchange(self, batches: list[NodeBatch]) -> list[Any]:
        """Send everything, then read everything, so that the servers work concurrently."""
        answers: list[Any] = [None] * len(batches)
        under_way: list[tuple[int, Any, Any]] = []
        left = iter(under_way)
        try:
            for number, batch in enumerate(batches):
                try:
                    pool = self._pool(batch.node)
                    under_way.append((number, pool, self.connections.take(pool)))
                    under_way[-1][2].send_packed_command((packed(batch.commands),))
                except (self.errors.ConnectionError, self.errors.TimeoutError) as error:
                    # An unresponsive server must not keep the others from being asked.
                    answers[number] = error
            if under_way:
                # Whatever error one batch has met, something was sent.
                _mark_as_sent(answers)
            for number, _, connection in under_way:
                if answers[number] is None:
                    answers[number] = self._replies(batches[number], connection)
            self._return(left, answers)
        except BaseException:
            # An interrupt may have come while they were returned: the rest is left.
            self._return(left, answers)
            raise
        return answers

    def _return(self, left: Iterator[tuple[int, Any, Any]], answers: list[Any]) -> None:
        """Return connections: those on which something may be unread are closed."""
        for number, pool, connection in left:
            # Compared without a call, after which an interrupt could be noticed.
            unread = answers[number].__class__ is not list
            if unread:
                connection.disconnect()
            if not self.connections.keeps:
                pool.release(connection)
            elif unread:
                self.connections.discard(pool, connection)
                self.connections.drop_idle_of(pool)
            else:
                self.connections.give_back(pool, connection)

    def _replies(self, batch: NodeBatch, connection: Any) -> Any:
        """Return the replies to a batch, and to `after`; or the error of the connection."""
        try:
            replies = [self._heard(connection) for _ in batch.commands]
            if batch.after is not None and batch.goes_on(replies):
                connection.send_packed_command((packed([batch.after]),))
                replies.append(self._heard(connection))
        except (self.errors.ConnectionError, self.errors.TimeoutError) as error:
            return error
        return replies

    def _heard(self, connection: Any) -> Any:
        try:
            # Bytes, however the client decodes its own replies.
            return connection.read_response(disable_decoding=True)
        except self.errors.ResponseError as error:
            return error

    def _pool(self, node: Any) -> Any:
        return node

    def _refresh(self) -> None:
        raise AssertionError("one server has no slots to learn")


class ClusterSender(Cluster, Sender):
    """A client of a cluster."""

    def __init__(self, client: Any, connections: ConnectionPool) -> None:
        super().__init__(client, connections)
        self._client_of = getattr(client, f"get_{library_of(client)}_connection")

    def _pool(self, node: Any) -> Any:
        return self._client_of(node).connection_pool

    def _refresh(self) -> None:
        self.connections.drop_idle()
        self.client.nodes_manager.initialize()


def new_connection(node: Any) -> Any:
    """Return a connection to this node, not opened yet. A pool and an async cluster node have the same attributes."""
    return node.connection_class(**node.connection_kwargs)


def node_name(node: Any) -> object:
    """Return the identity of a node: a cluster node is not hashable, but has a name; a pool has none."""
    return getattr(node, "name", None) or id(node)


def _mark_as_sent(answers: list[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            answer.on_the_way = False  # type: ignore[attr-defined]


@cache
def named(pool: Any) -> tuple[str, ...]:
    """Return the arguments for `get_connection` of this pool class: older ones ask for the command's name."""
    asked = inspect.signature(pool.get_connection).parameters.get("command_name")
    return ("EVALSHA",) if asked is not None and asked.default is asked.empty else ()
