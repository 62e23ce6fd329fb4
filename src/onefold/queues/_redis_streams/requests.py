"""The requests of a worker to its server, as calls without arguments: the same for sync and async clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, Final, NamedTuple

from redis import exceptions

from onefold.queues._redis_streams.consumer import BEGINNING, Fields, Rules

Call = Callable[[], Any]

# Bodies are bytes, whatever the client does with other replies.
RAW: Final[Mapping[str, Any]] = {"NEVER_DECODE": True}

# The first entry that a scan looks at, the word that it is over, and where a new one begins.
SCAN_FROM: Final = "0-0"

# What is over in a moment, or when somebody has seen to it. Each derives from an error that is not.
TEMPORARY: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.TryAgainError,
    exceptions.OutOfMemoryError,
    OSError,
)
# A login that was refused is an error of a connection, too.
FOR_GOOD: Final = (exceptions.AuthenticationError, exceptions.AuthorizationError)
# Answers without a class of their own.
TEMPORARY_CODES: Final = ("LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "BUSY ", "TRYAGAIN")
# The group is not there: with its stream, or alone. The second is said to whoever waits for the stream, before 7.2.
GONE_CODES: Final = ("NOGROUP", "UNBLOCKED")

# What any of our requests can end in.
ERRORS: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)


def is_temporary(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, FOR_GOOD):
        return False
    return isinstance(error, TEMPORARY) or str(error).startswith(TEMPORARY_CODES)


def is_without_group(error: BaseException) -> bool:
    """Return whether somebody has deleted the stream or its group."""
    return isinstance(error, exceptions.ResponseError) and str(error).startswith(GONE_CODES)


class Entry(NamedTuple):
    id: bytes
    fields: Fields
    times_delivered: int


class Taken(NamedTuple):
    """What a scan has found, where it goes on, and the ids of entries that were deleted before they were done."""

    goes_on: str
    entries: list[Entry]
    gone: list[bytes]


class Requests:
    """The requests of one consumer of a group."""

    def __init__(self, client: Any, rules: Rules, consumer: str) -> None:
        self._client = client
        self._rules = rules
        self._consumer = consumer
        # In a cluster, a script cannot write both if they are on different nodes.
        self.has_one_slot = not hasattr(client, "keyslot") or (
            client.keyslot(rules.stream) == client.keyslot(rules.dead_letter)
        )

    def create_group(self, start: str = BEGINNING) -> Call:
        rules = self._rules
        return self._call("XGROUP", "CREATE", rules.stream, rules.group, start, "MKSTREAM")

    def read(self, count: int, block: float) -> Call:
        """Read new entries, and wait for one if there is none."""
        rules = self._rules
        milliseconds = max(1, int(block * 1000))
        command = ("XREADGROUP", "GROUP", rules.group, self._consumer, "COUNT", count, "BLOCK", milliseconds)
        return self._call(*command, "STREAMS", rules.stream, ">")

    def claim(self, count: int, start: str, known: Sequence[bytes]) -> Call:
        """Take entries that nobody has kept for `min_idle`."""
        return self._script(TAKE, count, start, int(self._rules.min_idle * 1000), *known)

    def own(self, count: int, start: str, known: Sequence[bytes]) -> Call:
        """Take entries that this consumer has, and does not know of."""
        return self._script(TAKE, count, start, "", *known)

    def keep(self, ids: Iterable[bytes], *, is_counted: bool = False) -> Call:
        return self._script(KEEP, int(is_counted), *ids)

    def give_back(self, entries: Iterable[tuple[bytes, float, int]]) -> Call:
        """Let others take entries: each with for how long nobody has had it, and how many deliveries do not count."""
        return self._script(GIVE_BACK, *(part for one, idle, less in entries for part in (one, int(idle * 1000), less)))

    def ack(self, ids: Iterable[bytes]) -> Call:
        return self._call("XACK", self._rules.stream, self._rules.group, *ids)

    def bury(self, entry_id: bytes, dead: Sequence[str | bytes]) -> Call:
        """Write a dead letter and acknowledge its entry, in one step."""
        return self._script(BURY, entry_id, *dead, keys=(self._rules.stream, self._rules.dead_letter))

    def add_dead(self, dead: Sequence[str | bytes]) -> Call:
        return self._call("XADD", self._rules.dead_letter, "*", *dead)

    def leave(self) -> Call:
        return self._script(LEAVE)

    def _script(self, text: str, *arguments: Any, keys: tuple[str, ...] = ()) -> Call:
        names = keys or (self._rules.stream,)
        return self._call("EVAL", text, len(names), *names, self._rules.group, self._consumer, *arguments)

    def _call(self, *command: Any) -> Call:
        return partial(self._client.execute_command, *command, **RAW)


def read_entries(reply: Any) -> Iterator[Entry]:
    """Return the entries of a reply to XREADGROUP, in each of the forms that redis-py has for it."""
    if not reply:
        return
    found = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    if found and isinstance(found[0], list):
        (found,) = found
    for entry_id, fields in found:
        yield Entry(entry_id, fields or {}, 1)


def taken(reply: Any) -> Taken:
    """Return the entries of a reply to the script that takes them."""
    goes_on, found, gone = reply
    entries = [
        Entry(entry_id, dict(zip(fields[::2], fields[1::2], strict=True)), times) for entry_id, times, fields in found
    ]
    return Taken(goes_on.decode(), entries, gone)


def _text(name: str) -> str:
    return (files("onefold.queues._redis_streams") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


TAKE: Final = _text("take")
KEEP: Final = _text("keep")
GIVE_BACK: Final = _text("give_back")
BURY: Final = _text("bury")
LEAVE: Final = _text("leave")
