"""The data types: no behaviour, no I/O, no clock.

Durations are seconds, and `math.inf` is forever. A store measures them by its own clock: an operation passes only "how
long from now", never a time of day.
"""

from __future__ import annotations

import enum
import hashlib
import math
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from onefold._checks import at_least, error_classes, error_kinds, finite, one_of, positive
from onefold.durations import Duration, seconds
from onefold.errors import OutcomeUnknown, UsageError

T = TypeVar("T")

# In bytes of UTF-8. Together with their length prefixes they stay below 767 bytes, the smallest
# limit on an indexed column among the databases that we support.
KEY_MAX: Final = 255
OPERATION_MAX: Final = 128
SCOPE_MAX: Final = 255

TOKEN_BYTES: Final = 16


class State(enum.StrEnum):
    """The states of a record."""

    RUNNING = "running"
    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    HELD = "held"


class Gone(enum.Enum):
    """The record that a claim wanted to replace is gone; nothing was written."""

    GONE = "gone"


GONE: Final = Gone.GONE


class Commit(enum.Enum):
    """The outcome of a COMMIT, as far as it is known."""

    DONE = "done"
    # A serialization failure or a deadlock: nothing was written, retry.
    CONFLICT = "conflict"
    # The connection was lost before the answer came.
    UNKNOWN = "unknown"


class Address(msgspec.Struct, frozen=True, gc=False):
    """Whose key (scope), for what (operation), which (key). Created by `keys.address`, which checks it."""

    scope: str
    operation: str
    key: str

    @property
    def parts(self) -> tuple[str, str, str]:
        """Return the sort key: in the order of the bytes, which is that of an index over three columns."""
        return (self.scope, self.operation, self.key)

    @property
    def packed(self) -> bytes:
        """Return the three as length-prefixed UTF-8: no separator can be confused."""
        parts = (self.scope.encode(), self.operation.encode(), self.key.encode())
        return b"".join(len(part).to_bytes(2) + part for part in parts)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that stand for the key in logs and messages."""
        return hashlib.sha256(self.packed).hexdigest()[:12]


def downstream(address: Address, name: str, bypasses: int) -> str:
    """Derive the key for a system downstream: the same on each attempt, machine and rerun; a new one after a bypass.

    It has the form of a UUID (version 8), which every provider accepts.
    """
    named = name.encode()
    seed = b"onefold key_for 1" + address.packed + len(named).to_bytes(2) + named + bypasses.to_bytes(4)
    number = int.from_bytes(hashlib.sha256(seed).digest()[:16])
    version_and_variant = (8 << 76) | (0b10 << 62)
    return str(uuid.UUID(int=number & ~((0xF << 76) | (0b11 << 62)) | version_and_variant))


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The right to run now: the token proves it, the lease limits it, `ttl` is the record's expiry."""

    address: Address
    token: bytes
    lease: float = 0.0
    ttl: float = math.inf


class Entry(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A whole record, as a claim writes it."""

    address: Address
    token: bytes
    state: State = State.RUNNING
    attempt: int = 1
    lease: float = 0.0
    ttl: float = math.inf
    age: float = 0.0
    bypasses: int = 0
    fingerprint: bytes | None = None
    notes: bytes | None = None
    result: bytes | None = None
    omitted: bool = False
    remark: str = ""


# The first words of the remark of a record that was resolved by hand, and the separator before earlier remarks.
RESOLVED: Final = "resolved as "
BEFORE: Final = " | before: "


class Record(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The record of one address, as it was when it was read."""

    address: Address
    token: bytes
    # Counts every write under this token, from 1.
    revision: int
    state: State
    # Handler starts so far, including the one that this claim is for.
    attempt: int
    # Zero or less: over. Meaningless unless running.
    lease_left: float
    # Zero or less: the record may disappear at any moment.
    ttl_left: float
    # Since the first claim of this address (or its last bypass, or its last resolution as a rerun).
    age: float
    bypasses: int = 0
    fingerprint: bytes | None = None
    # The log of finished steps; see `current().step`.
    notes: bytes | None = None
    result: bytes | None = None
    omitted: bool = False
    # For people: why it is held, who resolved it, why there is no result.
    remark: str = ""

    @property
    def is_live(self) -> bool:
        """Whether a worker runs it now: its lease is not over."""
        return self.state is State.RUNNING and self.lease_left > 0

    @property
    def is_abandoned(self) -> bool:
        """Whether a worker ran it whose lease is over: it died, or is stuck."""
        return self.state is State.RUNNING and self.lease_left <= 0

    @property
    def is_renewable(self) -> bool:
        """Whether its owner may still write to it: it runs, or is held while it does."""
        return self.state is State.RUNNING or self.state is State.HELD

    @property
    def is_expired(self) -> bool:
        """Whether it has expired: the address counts as free."""
        return self.ttl_left <= 0

    @property
    def was_resolved(self) -> bool:
        """Whether the record was resolved by hand, and can be corrected by hand."""
        return self.remark.startswith(RESOLVED)

    @property
    def history(self) -> tuple[str, ...]:
        """The remark, then earlier ones: who resolved the record, when and why, and why it was held at first."""
        return tuple(self.remark.split(BEFORE)) if self.was_resolved else (self.remark,) * bool(self.remark)

    def key_for(self, name: str) -> str:
        """Return what `current().key_for(name)` gave the run of this record: the other side knows it by this key."""
        return downstream(self.address, name, self.bypasses)

    def as_entry(self, token: bytes) -> Entry:
        """Return what writes this record again as it is, under this token."""
        fields = {name: getattr(self, name) for name in _COPIED}
        # A lease says nothing unless the record is running.
        return Entry(token=token, lease=self.lease_left if self.is_live else 0.0, ttl=self.ttl_left, **fields)

    def as_moved(self) -> Entry:
        """Return what writes it to another store, under a token that follows from its own.

        Whoever owned it is refused from then on, and two who move the same record meet in one.
        """
        return self.as_entry(hashlib.sha256(b"moved" + self.token).digest()[:TOKEN_BYTES])


# What an entry and a record have alike.
_COPIED: Final = tuple(name for name in Entry.__struct_fields__ if name in Record.__struct_fields__ and name != "token")


class Ending(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How a claim ends: done, failed or held."""

    state: Literal[State.DONE, State.FAILED, State.HELD]
    ttl: float
    result: bytes | None = None
    omitted: bool = False
    notes: bytes | None = None
    remark: str = ""


class Released(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The memory of an open record after a release: the attempts and the finished steps."""

    ttl: float
    attempt: int
    notes: bytes | None = None
    remark: str = ""


class Close(msgspec.Struct, frozen=True, gc=False):
    """One of many endings in a batch: finish with an ending, release with a memory, or (None) forget."""

    claim: Claim
    by: Ending | Released | None = None


class DeliveryRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to deliver: run this address, with this payload."""

    address: Address
    fingerprint: bytes | None = None
    # Run it although it is finished.
    bypass: bool = False


class Outcome(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The outcome of one delivery that did not end in an error."""

    value: T
    # The value comes from the record; nothing ran.
    replayed: bool = False
    # Which start of the handler this was, or was replayed from.
    attempt: int = 1
    # Done, but the result was not kept: `value` is meaningless.
    omitted: bool = False
    # False: it ran, but the store could not record it. A duplicate may run it again.
    remembered: bool = True
    # False: it ran without a claim, because the store was down and the policy said "run".
    protected: bool = True
    # For people: why a result was left out, who resolved it.
    remark: str = ""


class Fresh(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A sorted batch: the messages of each kind in the order in which they came."""

    # Recorded as done in the transaction: process them, and commit.
    new: list[T]
    # Done before, or a repetition of a new one in this batch: acknowledge them once the transaction is committed.
    seen: list[T]
    # Neither: running elsewhere, held, refused or without a usable key. They must not be acknowledged as done.
    unsettled: list[T]
    # The reason for each of the unsettled.
    problems: list[Exception]


class Done(msgspec.Struct, frozen=True):
    """A probe's answer or a resolution: the effect happened."""

    value: Any = None


class Failed(msgspec.Struct, frozen=True):
    """A resolution: it failed for good; every duplicate gets this error, or a `RememberedFailure` with this text."""

    error: Exception | str

    def __post_init__(self) -> None:
        given: object = self.error
        if isinstance(given, Exception) or (isinstance(given, str) and given):
            return
        kind = "an empty text" if given == "" else getattr(given, "__name__", type(given).__name__)
        raise UsageError(f'failed() takes an exception or a text, as in failed("declined"), not {kind}')


class Rerun(msgspec.Struct, frozen=True):
    """A resolution: the next delivery may run it."""


class NotDone(msgspec.Struct, frozen=True):
    """A probe's answer: the effect did not happen."""


class Unknown(msgspec.Struct, frozen=True):
    """A probe's answer: the other side cannot say."""


# The names that users write: `return done(receipt)`.
done = Done
failed = Failed
rerun = Rerun
not_done = NotDone
unknown = Unknown

Answer = Done | NotDone | Unknown
Resolution = Done | Failed | Rerun

AFTER_CRASH: Final = ("rerun", "hold", "skip")
AfterCrash = Literal["rerun", "hold", "skip"] | Callable[..., Any]

# A class, or the dotted name of one, so that a client library need not be imported to be named.
ErrorKinds = tuple[type[BaseException] | str, ...]

# After these errors nobody knows whether the other side did it. The names are those of the most common clients.
TIMEOUTS_AND_CONNECTION_ERRORS: Final[ErrorKinds] = (
    TimeoutError,
    ConnectionError,
    OutcomeUnknown,
    "httpx.TransportError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "urllib3.exceptions.HTTPError",
    "aiohttp.client_exceptions.ClientConnectionError",
    "botocore.exceptions.HTTPClientError",
)


class Policy:
    """How deliveries are treated: frozen data, checked when it is created. `docs/concepts.md` explains each field."""

    # Written by hand rather than as a dataclass: it takes durations as strings, holds them as seconds, and importing
    # dataclasses alone would cost a third of the import of onefold.
    __slots__ = (
        "after_crash",
        "attempts_max",
        "cancel_when_lost",
        "keep",
        "keep_result",
        "lease",
        "mode",
        "remember",
        "rerun_within",
        "result_bytes_max",
        "store_down",
        "unknown",
        "wait",
    )

    keep: float
    lease: float
    wait: float
    after_crash: AfterCrash
    rerun_within: float
    attempts_max: int
    unknown: ErrorKinds
    remember: tuple[type[Exception], ...]
    store_down: Literal["refuse", "run"]
    result_bytes_max: int
    keep_result: bool
    cancel_when_lost: bool
    mode: Literal["claim", "seen"]

    def __init__(
        self,
        *,
        keep: Duration = "24h",
        lease: Duration = "30s",
        wait: Duration = 0.0,
        after_crash: AfterCrash = "rerun",
        rerun_within: Duration | None = None,
        attempts_max: int = 5,
        unknown: Sequence[type[BaseException] | str] = TIMEOUTS_AND_CONNECTION_ERRORS,
        remember: Sequence[type[Exception]] = (),
        store_down: Literal["refuse", "run"] = "refuse",
        result_bytes_max: int = 1_048_576,
        keep_result: bool = True,
        cancel_when_lost: bool = False,
        mode: Literal["claim", "seen"] = "claim",
    ) -> None:
        put = partial(object.__setattr__, self)
        put("keep", positive(keep, "keep"))
        put("lease", finite(positive(lease, "lease"), "lease"))
        put("wait", finite(seconds(wait, "wait"), "wait"))
        put("after_crash", after_crash if callable(after_crash) else one_of(after_crash, AFTER_CRASH, "after_crash"))
        put("rerun_within", math.inf if rerun_within is None else positive(rerun_within, "rerun_within"))
        put("attempts_max", at_least(1, attempts_max, "attempts_max"))
        put("unknown", error_kinds(unknown, "unknown"))
        put("remember", error_classes(remember, "remember"))
        put("store_down", one_of(store_down, ("refuse", "run"), "store_down"))
        put("result_bytes_max", at_least(0, result_bytes_max, "result_bytes_max"))
        put("keep_result", keep_result)
        put("cancel_when_lost", cancel_when_lost)
        put("mode", one_of(mode, ("claim", "seen"), "mode"))
        if rerun_within is not None and after_crash != "rerun":
            raise UsageError('rerun_within= limits after_crash="rerun"; with another after_crash it has no meaning')
        if mode == "seen" and after_crash != "rerun":
            raise UsageError('mode="seen" has no claim that a crash could leave behind: leave after_crash= out')

    def but(self, **changes: Any) -> Policy:
        """Return the policy with some fields changed: `guard.policy.but(keep="7d")`."""
        asked = self._fields()
        if asked["rerun_within"] == math.inf:
            asked["rerun_within"] = None
        return Policy(**(asked | changes))

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Policy is frozen: write policy.but({name}={value!r})")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(tuple(self._fields().values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _policy_of, (self._fields(),)

    def __repr__(self) -> str:
        usual = Policy()
        changed = (name for name in self.__slots__ if getattr(self, name) != getattr(usual, name))
        return f"Policy({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


def _policy_of(fields: dict[str, Any]) -> Policy:
    return Policy().but(
        **fields | {"rerun_within": None if math.isinf(fields["rerun_within"]) else fields["rerun_within"]}
    )
