"""Route calls to the servers: where each is sent, and which are sent again.

Written once, as generators of steps (`_concurrency.generators`); `sender` and `async_sender` perform them. No I/O, no
clock.

Every call may be sent twice, because every operation is idempotent by its token. So a call whose connection was lost is
sent again, at once and then after a pause. A call that timed out is not: it has used up its time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from onefold.durations import as_text
from onefold.errors import StoreUnavailable
from onefold.stores.redis.errors import NONE_FREE
from onefold.stores.redis.records import Command, ScriptCall

T = TypeVar("T")

# What one call can meet in turn: an unknown script, a slot that has moved, another that is moving, two lost
# connections. A cluster that needs more rounds is unhealthy.
ROUNDS_MAX: Final = 6

# An idle connection may be dead, and a restarting server is back soon; one that is gone is not.
LOST_MAX: Final = 2
PAUSE: Final = 0.1

# A larger batch is split, so that neither side has to buffer all of it.
BATCH_BYTES: Final = 4 * 2**20

ASKING: Final = (b"ASKING",)


class NodeBatch(NamedTuple):
    """Commands for one node, sent together on one connection. Each has one reply.

    `after` follows on the same connection if one of the other replies reports a write; its reply is the last.
    """

    node: Any
    commands: list[Command]
    after: Command | None = None

    def goes_on(self, replies: list[Any]) -> bool:
        """Return whether to send `after`: a call that has only read need not wait for replicas."""
        return any(is_written(reply) for reply in replies)


def is_written(reply: Any) -> bool:
    return type(reply) is int and reply == 1


class Exchange(NamedTuple):
    """Send these batches concurrently.

    The answer to each is the list of its replies, including server errors; or the error of its connection.
    """

    batches: list[NodeBatch]


class Refresh(NamedTuple):
    """Reload the cluster's assignment of slots to servers."""


class Pause(NamedTuple):
    seconds: float


Step = Exchange | Refresh | Pause
RedisFlow = Generator[Step, Any, T]


class Topology(Protocol):
    """The servers as a dispatch sees them."""

    # The client library's exceptions: `redis.exceptions`, or those of Valkey's library.
    errors: ModuleType
    clustered: bool

    def node_of(self, key: bytes) -> Any:
        """Return the node of the primary that has this key."""

    def node_at(self, host: str, port: int) -> Any:
        """Return the node named by a redirection; None if it is unknown."""

    def nodes(self) -> list[Any]:
        """Return the nodes of all primaries."""


class Alone:
    """One server, or the primary that Sentinel names: its node is the client's pool."""

    client: Any
    clustered = False

    def node_of(self, _key: bytes) -> Any:
        return self.client.connection_pool

    def node_at(self, _host: str, _port: int) -> Any:
        return None

    def nodes(self) -> list[Any]:
        return [self.client.connection_pool]


class Cluster:
    """Many servers: the nodes are the client's."""

    client: Any
    clustered = True

    def node_of(self, key: bytes) -> Any:
        return self.client.get_node_from_key(key)

    def node_at(self, host: str, port: int) -> Any:
        return self.client.get_node(host=host, port=port)

    def nodes(self) -> list[Any]:
        return list(self.client.get_primaries())


def library_of(client: Any) -> str:
    """Return the client's package: redis, or valkey, which was forked from redis and has the same names."""
    roots = (kind.__module__.partition(".")[0] for kind in type(client).__mro__)
    return next((root for root in roots if root in ("redis", "valkey")), "redis")


def errors_of(client: Any) -> ModuleType:
    return import_module(f"{library_of(client)}.exceptions")


def was_none_free(error: Exception) -> bool:
    """Return whether a pool has waited for a connection in vain. Asking it again would wait as long once more."""
    return str(error) == NONE_FREE


class Wait(NamedTuple):
    """How many replicas must confirm a write before it counts, and how long they may take."""

    replicas: int
    seconds: float
    # Whether WAIT goes with the calls, in one message. A claim may write nothing: then WAIT follows only if it wrote.
    at_once: bool = True

    def command(self) -> Command:
        return (b"WAIT", b"%d" % self.replicas, b"%d" % max(round(self.seconds * 1000), 1))

    def check(self, confirmed: int) -> None:
        if confirmed < self.replicas:
            raise StoreUnavailable(
                f"the write is on the primary, but only {confirmed} of {self.replicas} replicas confirmed it within "
                f"{as_text(self.seconds)}: a failover could lose it. Look at the replicas, or lower wait_replicas"
            )


def dispatch(topology: Topology, calls: Sequence[ScriptCall], wait: Wait | None = None) -> RedisFlow[list[Any]]:
    """Return the replies in the order of the calls. Raise the client library's errors, or `StoreUnavailable`."""
    replies: list[Any] = []
    for part in _parts_of(calls):
        replies += yield from Dispatch(topology, part, wait).dispatch()
    return replies


def send_to(node: Any, command: Command) -> RedisFlow[Any]:
    """Return the reply to one command at one node, without retrying."""
    (answer,) = yield Exchange([NodeBatch(node, [command])])
    if isinstance(answer, Exception):
        raise answer
    (reply,) = answer
    if isinstance(reply, Exception):
        raise reply
    return reply


# A command to send, and the index of its call; ASKING and WAIT have none.
Part = tuple[int | None, Command]


class Dispatch:
    """Calls in progress: their replies, and what has to be done before the others are sent again."""

    def __init__(self, topology: Topology, calls: Sequence[ScriptCall], wait: Wait | None) -> None:
        self._topology = topology
        self._calls = calls
        self._wait = wait
        self._replies: list[Any] = [None] * len(calls)
        # Calls whose script the server does not know, and calls that go to another server.
        self._by_text: set[int] = set()
        self._elsewhere: dict[int, Any] = {}
        self._lost = 0
        # For one round: its last error, and what the errors require.
        self._failure: Exception | None = None
        self._refresh = self._pause = False

    def dispatch(self) -> RedisFlow[list[Any]]:
        waiting: Iterable[int] = range(len(self._calls))
        for _ in range(ROUNDS_MAX):
            self._failure, self._refresh, self._pause = None, False, False
            waiting = yield from self._round(waiting)
            if self._failure is None:
                return self._replies
            if self._pause:
                yield Pause(PAUSE)
            if self._refresh and self._topology.clustered:
                yield Refresh()
        raise self._failure or AssertionError("a dispatch without rounds")

    def _round(self, waiting: Iterable[int]) -> RedisFlow[Iterable[int]]:
        """Send these calls; return the indexes of those that have to be sent again."""
        try:
            batches = self._batches(waiting)
        except self._topology.errors.SlotNotCoveredError as error:
            self._failure, self._refresh, self._pause = error, True, True
            return waiting
        after = None if self._wait is None or self._wait.at_once else self._wait.command()
        answers = yield Exchange([NodeBatch(node, [command for _, command in parts], after) for node, parts in batches])
        again: list[int] = []
        for (_, parts), answer in zip(batches, answers, strict=True):
            if isinstance(answer, Exception):
                self._met(answer)
                again += [number for number, _ in parts if number is not None]
            else:
                again += self._sorted(parts, answer)
        self._lost += isinstance(self._failure, self._topology.errors.ConnectionError)
        return again

    def _batches(self, waiting: Iterable[int]) -> list[tuple[Any, list[Part]]]:
        """Return the calls by their nodes, in order."""
        batches: dict[int, tuple[Any, list[Part]]] = {}
        for number in waiting:
            call = self._calls[number]
            named = self._elsewhere.pop(number, None)
            node = self._topology.node_of(call.key) if named is None else named
            parts = batches.setdefault(id(node), (node, []))[1]
            if named is not None:
                parts.append((None, ASKING))
            parts.append((number, call.by_text() if number in self._by_text else call.by_hash()))
        if self._wait is not None and self._wait.at_once:
            for _, parts in batches.values():
                parts.append((None, self._wait.command()))
        return list(batches.values())

    def _sorted(self, parts: list[Part], answer: list[Any]) -> list[int]:
        """Keep the replies of one batch; return the indexes of the calls that have to be sent again."""
        again, written = [], False
        # The reply to `after`, if it was sent, comes last.
        for (number, _), reply in zip(parts, answer[: len(parts)], strict=True):
            if isinstance(reply, Exception):
                self._redirected(number, reply)
                if number is not None:
                    again.append(number)
            elif number is not None:
                self._replies[number] = reply
                written = written or is_written(reply)
        # A call that wrote nothing need not be replicated.
        if self._wait is not None and written:
            if isinstance(answer[-1], Exception):
                raise answer[-1]
            self._wait.check(answer[-1])
        return again

    def _met(self, error: Exception) -> None:
        """Handle the error of a connection. Only a lost connection is retried, and not forever."""
        lost = type(error) is self._topology.errors.ConnectionError and not was_none_free(error)
        if not lost or self._lost == LOST_MAX:
            raise error
        self._failure, self._refresh, self._pause = error, True, self._lost > 0

    def _redirected(self, number: int | None, error: Any) -> None:
        """Handle an error reply: raise it, unless it only redirects."""
        errors = self._topology.errors
        if number is None:
            raise error
        if isinstance(error, errors.NoScriptError):
            self._by_text.add(number)
        elif not self._topology.clustered:
            raise error
        elif isinstance(error, errors.MovedError):
            self._refresh = True
        elif isinstance(error, errors.AskError):
            self._elsewhere[number] = self._topology.node_at(error.host, error.port)
            self._refresh = self._refresh or self._elsewhere[number] is None
        elif isinstance(error, (errors.ClusterDownError, errors.TryAgainError)):
            self._refresh = self._pause = True
        else:
            raise error
        self._failure = error


def _parts_of(calls: Sequence[ScriptCall]) -> Iterator[Sequence[ScriptCall]]:
    begin = size = 0
    for number, call in enumerate(calls):
        weight = len(call.key) + sum(map(len, call.arguments))
        if size + weight > BATCH_BYTES and number > begin:
            yield calls[begin:number]
            begin, size = number, 0
        size += weight
    yield calls[begin:]
