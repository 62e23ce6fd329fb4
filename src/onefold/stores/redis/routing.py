"""Route calls to the servers: which are sent where, and which are sent again.

Written once, as generators of steps (`_concurrency.generators`); `sender` and `async_sender` perform them. No I/O, no
clock.

Every call may be sent twice, because every operation is idempotent by its token. So a call whose connection was lost is
sent again, at once and then after a pause. One that timed out is not: it has had all the time that it may take.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from onefold.durations import as_text
from onefold.errors import StoreUnavailable
from onefold.stores.redis.records import Command, ScriptCall

T = TypeVar("T")

# What one call can meet in turn: an unknown script, a slot that has moved, another that is moving, two lost
# connections. A cluster that has more to say is not well.
ROUNDS_MAX: Final = 6

# An idle connection may be dead, and a server that restarts is back soon; one that is gone is not.
LOST_MAX: Final = 2
PAUSE: Final = 0.1

# A larger batch is split, so that neither side has to hold all of it in one buffer.
BATCH_BYTES: Final = 4 * 2**20

ASKING: Final = (b"ASKING",)


class NodeBatch(NamedTuple):
    """Commands for one node, sent together on one connection. Each has one reply.

    `after` follows on the same connection, and has the last reply, if one of the others says that it has written.
    """

    node: Any
    commands: list[Command]
    after: Command | None = None

    def goes_on(self, replies: list[Any]) -> bool:
        """Return whether `after` is to be sent: a call that has only read need not wait for anything."""
        return any(is_written(reply) for reply in replies)


def is_written(reply: Any) -> bool:
    return type(reply) is int and reply == 1


class Exchange(NamedTuple):
    """Send these legs at the same time.

    The answer of each is the list of its replies, including errors of the server; or the error of its connection.
    """

    batches: list[NodeBatch]


class Refresh(NamedTuple):
    """Reload which server of the cluster has which slots."""


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
        """Return the node that a redirection has named; None if it is unknown."""

    def nodes(self) -> list[Any]:
        """Return the nodes of all primaries."""


class Wait(NamedTuple):
    """How many replicas have to have a write before it counts, and how long they may take."""

    replicas: int
    seconds: float
    # Whether WAIT goes with the calls, in one message. A claim may find that it has nothing to write: then it follows.
    at_once: bool = True

    def command(self) -> Command:
        return (b"WAIT", b"%d" % self.replicas, b"%d" % max(round(self.seconds * 1000), 1))

    def check(self, confirmed: int) -> None:
        if confirmed < self.replicas:
            raise StoreUnavailable(
                f"the write is on the primary, but {confirmed} of {self.replicas} replicas have confirmed it within "
                f"{as_text(self.seconds)}: a fail-over could lose it. Look at the replicas, or lower wait_replicas"
            )


def dispatch(topology: Topology, calls: Sequence[ScriptCall], wait: Wait | None = None) -> RedisFlow[list[Any]]:
    """Return the replies, in the order of the calls. Raises what the client library raises, or `StoreUnavailable`."""
    replies: list[Any] = []
    for part in _parts_of(calls):
        replies += yield from Dispatch(topology, part, wait).dispatch()
    return replies


def send_to(node: Any, command: Command) -> RedisFlow[Any]:
    """Return the reply of one command at one node, which is not sent again."""
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
    """Some calls in progress: what is answered, and what has to be done before the others are sent again."""

    def __init__(self, topology: Topology, calls: Sequence[ScriptCall], wait: Wait | None) -> None:
        self._topology = topology
        self._calls = calls
        self._wait = wait
        self._replies: list[Any] = [None] * len(calls)
        # Calls whose script the server does not know, and calls that go to another server.
        self._by_text: set[int] = set()
        self._elsewhere: dict[int, Any] = {}
        self._lost = 0
        # Of one round: its errors, and what they require.
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
        raise self._failure or AssertionError("a flight without rounds")

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
        # The reply to what followed a written call comes last.
        for (number, _), reply in zip(parts, answer[: len(parts)], strict=True):
            if isinstance(reply, Exception):
                self._redirected(number, reply)
                if number is not None:
                    again.append(number)
            elif number is not None:
                self._replies[number] = reply
                written = written or is_written(reply)
        # A call that was not written need not be replicated.
        if self._wait is not None and written:
            if isinstance(answer[-1], Exception):
                raise answer[-1]
            self._wait.check(answer[-1])
        return again

    def _met(self, error: Exception) -> None:
        """Handle the error of a connection. Only a lost one is worth another attempt, and not forever."""
        if type(error) is not self._topology.errors.ConnectionError or self._lost == LOST_MAX:
            raise error
        self._failure, self._refresh, self._pause = error, True, self._lost > 0

    def _redirected(self, number: int | None, error: Any) -> None:
        """Handle an error reply. It is raised, unless it only says how to ask."""
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
