"""Define the record, what is written to it, and what callers get: data without I/O or a clock.

Durations are seconds, and `math.inf` is forever. A store measures them by its own clock: an operation passes only "how
long from now", never a time of day.
"""

from __future__ import annotations

import enum
import hashlib
import math
import uuid
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from onefold._model.notes import RESERVED, duplicates_in, log_of, noted_in
from onefold._model.remarks import BEFORE, RESOLVED, latest_of
from onefold.errors import ResultNotKept, UsageError

T = TypeVar("T")
D = TypeVar("D")

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
    if not name:
        raise UsageError(f"key_for({name!r}): name the system downstream, such as key_for('gateway')")
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

    def as_claim(self) -> Claim:
        """Return the claim that this entry makes."""
        return Claim(self.address, self.token, self.lease, self.ttl)

    def as_record(self) -> Record:
        """Return the record that this entry is, once it is written."""
        fields = {name: getattr(self, name) for name in _COPIED}
        return Record(token=self.token, revision=1, lease_left=self.lease, ttl_left=self.ttl, **fields)

    def is_own(self, token: bytes, replacing: Record | None = None) -> bool:
        """Return whether a record found with this token is this very claim: it was written, and its reply was lost."""
        return token == self.token and not self.borrows_token(replacing)

    def borrows_token(self, replacing: Record | None) -> bool:
        """Return whether the record that it replaces has the same token: it marks that one as held."""
        return replacing is not None and replacing.token == self.token

    def revision_after(self, replacing: Record | None) -> int:
        """Return the revision to write. It continues only if the token stays."""
        return replacing.revision + 1 if replacing is not None and self.borrows_token(replacing) else 1


class Record(msgspec.Struct, frozen=True, gc=False):
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
        """Whether a worker is running it now: its lease is not over."""
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
        return tuple(one for one in self.remark.split(BEFORE) if one)

    @property
    def latest_remark(self) -> str:
        """The remark without earlier ones: why it is held, who resolved it; empty after a run that needs no remark."""
        return latest_of(self.remark)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the steps that its handler has finished; see `current().step`."""
        return tuple(str(name) for name in log_of(self.notes) if name not in RESERVED)

    @property
    def noted(self) -> dict[str, Any]:
        """What its handler has noted by `current().note(…)`."""
        return noted_in(self.notes) if self.notes else {}

    @property
    def duplicates(self) -> int:
        """How many duplicates were answered from it since it was finished, under `count_duplicates=True`."""
        return duplicates_in(self.notes) if self.notes else 0

    @property
    def was_rerun(self) -> bool:
        """Whether a person has let it run again, with all its attempts: attempts and age count from there."""
        return any(one.startswith(f"{RESOLVED}rerun") for one in self.history)

    def key_for(self, name: str) -> str:
        """Return what `current().key_for(name)` gave the run of this record: the other side knows it by this key."""
        return downstream(self.address, name, self.bypasses)

    def is_annotated(self, seen: Record, notes: bytes) -> bool:
        """Return whether it is `seen` with these notes and nothing else since: they were written before."""
        return self.token == seen.token and self.revision == seen.revision + 1 and self.notes == notes

    def as_entry(self, token: bytes) -> Entry:
        """Return an entry that writes this record again unchanged, under this token."""
        fields = {name: getattr(self, name) for name in _COPIED}
        # A lease says nothing unless the record is running.
        return Entry(token=token, lease=self.lease_left if self.is_live else 0.0, ttl=self.ttl_left, **fields)

    def as_moved(self) -> Entry:
        """Return an entry that writes it to another store, under a token derived from its own.

        The owner is refused from then on, and two workers that move the same record write the same one.
        """
        return self.as_entry(hashlib.sha256(b"moved" + self.token).digest()[:TOKEN_BYTES])


class DoneRecord(Protocol):
    """What a replay needs of a record that is done. Its state, lease and expiry are known."""

    @property
    def attempt(self) -> int: ...
    @property
    def fingerprint(self) -> bytes | None: ...
    @property
    def result(self) -> bytes | None: ...
    @property
    def omitted(self) -> bool: ...
    @property
    def remark(self) -> str: ...


# The fields that an entry and a record have in common.
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
    """What a release keeps in an open record: the attempts and the finished steps."""

    ttl: float
    attempt: int
    notes: bytes | None = None
    remark: str = ""


class Close(msgspec.Struct, frozen=True, gc=False):
    """One of many endings in a batch: an `Ending` finishes, a `Released` releases, and None forgets."""

    claim: Claim
    by: Ending | Released | None = None


class DeliveryRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to deliver: run this address, with this payload."""

    address: Address
    fingerprint: bytes | None = None
    # Run it although it is finished; under a name, unless it has run to its end under that name before.
    bypass: bool | str = False


class NotKept(msgspec.Struct, frozen=True, gc=False):
    """Stands for the result of a finished delivery that was not kept."""

    address: Address

    def __repr__(self) -> str:
        # An outcome may be logged, where a key does not belong.
        return f"NotKept({self.address.operation!r}, digest={self.address.digest!r})"


class Outcome(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The outcome of one delivery that did not end in an error."""

    # What the handler returned, if that was kept: read `value`.
    kept: T | NotKept
    # The value comes from the record; nothing ran.
    replayed: bool = False
    # Which start of the handler this was, or was replayed from.
    attempt: int = 1
    # Done, but the result was not kept: reading `value` raises `ResultNotKept`, unless the handler returns None.
    omitted: bool = False
    # False: it ran, but the store could not record it. A duplicate may run it again.
    recorded: bool = True
    # False: it ran without a claim, because the store was down and the policy said "run".
    protected: bool = True
    # For people: why a result was left out, who resolved it.
    remark: str = ""

    @property
    def value(self) -> T:
        """What the handler returned. Raises `ResultNotKept` if that was not kept."""
        kept = self.kept
        if isinstance(kept, NotKept):
            raise ResultNotKept.about(kept.address, remark=self.remark)
        return kept

    def value_or(self, default: D) -> T | D:
        """Return what the handler returned; `default` if that was not kept."""
        return default if isinstance(self.kept, NotKept) else self.kept


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
        raise UsageError(f'Failed() takes an exception or a text, as in Failed("declined"), not {kind}')


class Rerun(msgspec.Struct, frozen=True):
    """A resolution: the next delivery may run it."""


class NotDone(msgspec.Struct, frozen=True):
    """A probe's answer: the effect did not happen."""


class Unknown(msgspec.Struct, frozen=True):
    """A probe's answer: the other side cannot say."""


ProbeAnswer = Done | NotDone | Unknown
Resolution = Done | Failed | Rerun
