"""The store protocol, and the optional capabilities of a store.

A store compares and swaps. It never decides anything from a lease or a fingerprint. Its promises:

- `token` answers "is it still mine?", token and revision together answer "is it still what I saw?".
- Every operation is idempotent by token: a reply may get lost, and the client library sends the request again.
- Operations pass durations, and the store measures them by its own clock.
- An expired record counts as free; a store may return it or not.
- Every field is kept in every state: a running bypass carries the result that it has found. A fingerprint has at most
  128 bytes.

`onefold.testing.StoreContract` is the definition; a store that passes all of it is a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from onefold._concurrency.interrupts import When
from onefold._model import GONE, Address, Claim, Close, Commit, Ending, Entry, Gone, Record, Released, State
from onefold.errors import StoreUnavailable

# The types of the protocol are exported with it: a store of your own needs no other import.
__all__ = [
    "GONE",
    "Address",
    "Annotating",
    "AsyncAnnotating",
    "AsyncBatching",
    "AsyncBrowsable",
    "AsyncStore",
    "Batching",
    "Browsable",
    "Claim",
    "Close",
    "Commit",
    "Ending",
    "Entry",
    "Gone",
    "HasSchema",
    "Indexed",
    "Inspectable",
    "Joinable",
    "PartlyRenewed",
    "Query",
    "Record",
    "Released",
    "RowJoinable",
    "Sample",
    "Sampling",
    "ShowsStored",
    "State",
    "Store",
    "StoredRecord",
    "Transaction",
    "Untold",
]


@runtime_checkable
class Store(Protocol):
    """Six atomic operations. A store that cannot be reached raises `StoreUnavailable`.

    A store may have `knows(error)`, which returns whether an error is its own. Any other error out of an operation
    counts as an interrupt, like one raised by a signal handler: the operation is sent again, and then the interrupt
    propagates.
    """

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        """Write the entry, or return what is in the way.

        Without `replacing`: write if the address is free. With it: write if the record still has the token *and* the
        revision of `replacing`; if it is gone the answer is `GONE`, because a decision about it must not be written
        over nothing. `None` means written. A claim that finds the token of its own entry has succeeded before (unless
        it keeps the token of `replacing`, as marking a record held does).
        """

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        """Renew the lease and the TTL of a running record; on a held one keep only the notes. False: not ours.

        A lease of zero ends it: the next delivery finds it abandoned. Notes never become shorter under one token: a log
        only grows, and an abandoned write may land late.
        """

    def finish(self, claim: Claim, ending: Ending) -> bool:
        """End the record. True if it is ours, even if this token has ended it before. False: not ours."""

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        """Forget the record, or leave it open. True if it was ours or is gone. False: another's."""

    def read(self, address: Address) -> Record | None:
        """Return the record, from the primary."""

    def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records; return how many were removed."""


@runtime_checkable
class AsyncStore(Protocol):
    """The async counterpart of `Store`."""

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None: ...
    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool: ...
    async def finish(self, claim: Claim, ending: Ending) -> bool: ...
    async def release(self, claim: Claim, released: Released | None = None) -> bool: ...
    async def read(self, address: Address) -> Record | None: ...
    async def purge(self, limit: int) -> int: ...


@runtime_checkable
class Batching(Protocol):
    """Many addresses in one round trip; answers come in the order of the arguments."""

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]: ...
    def extend_all(self, claims: Sequence[Claim]) -> list[bool]: ...
    def close_all(self, closes: Sequence[Close]) -> list[bool]: ...


@runtime_checkable
class AsyncBatching(Protocol):
    """The async counterpart of `Batching`."""

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]: ...
    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]: ...
    async def close_all(self, closes: Sequence[Close]) -> list[bool]: ...


@runtime_checkable
class Annotating(Protocol):
    """Change the notes of a record and nothing else, such as its expiry; for `count_duplicates=True`."""

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        """Write the notes if the record still has this token *and* revision; the revision goes up by one.

        `None` means written, now or before. Otherwise return the record in the way, or `GONE`: it is never written
        anew. Do not wait for a lock of somebody else's: raise `StoreUnavailable` instead.
        """


@runtime_checkable
class AsyncAnnotating(Protocol):
    """The async counterpart of `Annotating`."""

    async def annotate(self, record: Record, notes: bytes) -> Record | Gone | None: ...


class PartlyRenewed(StoreUnavailable):
    """Raised by `extend_all` if some leases could not be renewed now, but are not known to be lost.

    `answers` has the known answers, in the order of the claims: None is unknown. One claim must never depend on
    another.
    """

    def __init__(self, answers: Sequence[bool | None], why: str) -> None:
        super().__init__(why)
        self.answers = list(answers)


class Transaction(Protocol):
    """A store inside a transaction of its own: records written here commit with the work, or not at all."""

    # Passed to the handler as `tx`: the connection, session or cursor to work on.
    tx: Any

    def begin(self) -> None: ...
    def save(self) -> None: ...
    def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` unless the record of this claim is still there, in the transaction that wrote it.

        A handler can end a transaction in many ways, and continue in another one.
        """

    def commit(self) -> Commit: ...
    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        """Undo everything, or what followed `save`. True: the database asks to retry in a new transaction."""

    def spoil(self, when: When) -> None:
        """Handle an interrupt (KeyboardInterrupt, a cancellation): nothing that was written here may be committed.

        `When.INSIDE`: the interrupt came in a handler. The outermost delivery's transaction was rolled back before; if
        the transaction is still open, the interrupt was in a nested delivery, and the outer handler may catch it and
        continue. An async transaction also has a sync method `abandon()`, which closes the connection at once, without
        waiting for the server. A transaction may have `knows(error)`, which returns whether an error is the database's
        own: any other error out of an operation is an interrupt, too, like one raised by a signal handler.
        """

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None: ...
    def finish(self, claim: Claim, ending: Ending) -> bool: ...
    def release(self, claim: Claim, released: Released | None = None) -> bool: ...
    def read(self, address: Address) -> Record | None: ...


@runtime_checkable
class Joinable(Protocol):
    """Transactions in which the record is written with the work. An async store returns an async context manager."""

    def transaction(self) -> Any:
        """Return a context manager for a `Transaction` that has not begun yet; on exit it gives the connection back."""


@runtime_checkable
class RowJoinable(Protocol):
    """Transactions whose records are rows of the caller's own. An async store returns an async context manager."""

    def row_transaction(self, record: Any) -> Any:
        """Return what `Joinable.transaction` returns, for records in the column that this `RecordColumn` names."""


class Query(NamedTuple):
    """Which records to list; `None` is any. `after` is the last address of the previous page."""

    scope: str | None = None
    operation: str | None = None
    key: str | None = None
    state: State | None = None
    after: Address | None = None


@runtime_checkable
class Browsable(Protocol):
    """List records by scope, operation and key, in byte order; for tools."""

    def browse(self, query: Query, limit: int) -> list[Record]: ...


@runtime_checkable
class AsyncBrowsable(Protocol):
    """The async counterpart of `Browsable`."""

    async def browse(self, query: Query, limit: int) -> list[Record]: ...


class Sample(NamedTuple):
    """Some records of a store, perhaps without their results and notes, and how many records each stands for."""

    records: Sequence[Record]
    weights: Sequence[float]
    # Whether these are all that match the query.
    complete: bool

    @classmethod
    def of(cls, drawn: Iterable[tuple[Record, float]], query: Query, *, complete: bool) -> Sample:
        """Return those of the records that match the query and have not expired."""
        chosen = [(record, weight) for record, weight in drawn if _is_meant(record, query)]
        return cls([record for record, _ in chosen], [weight for _, weight in chosen], complete)


def _is_meant(record: Record, query: Query) -> bool:
    asked = zip((query.scope, query.operation, query.key), record.address.parts, strict=True)
    return not record.is_expired and query.state in (None, record.state) and all(one in (None, it) for one, it in asked)


@runtime_checkable
class Sampling(Protocol):
    """Estimate what a store of any size has, in bounded time; for tools."""

    def sample(self, query: Query, limit: int) -> Sample:
        """Read about `limit` records: all of the store or of the scope, or else some from all over the store."""


@runtime_checkable
class Indexed(Protocol):
    """A store that finds what is unsettled, and what is new, without reading the rest; for tools."""

    def unsettled(self, limit: int) -> list[Record]:
        """Return up to `limit` records, those that are kept longest first.

        Those that are running or held and never expire come before all others. Finished ones that are kept forever are
        left out. If there are fewer than `limit`, every running or held record is among them.
        """

    def newest(self, limit: int) -> list[Record]:
        """Return about `limit` of the newest records; none where the store does not know which these are."""


@runtime_checkable
class HasSchema(Protocol):
    """A store whose tables have to exist before it can be read: a tool that only reads must not create them."""

    # Whether the store creates missing tables on first use, and upgrades older ones. A tool turns it off.
    auto_schema: bool

    def schema_exists(self) -> bool:
        """Return whether the tables exist. Create and change nothing, not even a file."""


class StoredRecord(NamedTuple):
    """A record as its store keeps it, which `docs/record-format.md` describes for programs in other languages."""

    # Which of the forms of that page it is: "postgresql", "mysql", "sqlite", "redis" or "dynamodb".
    form: str
    # The columns or attributes by name. On Redis: the key and the value, and the server's times in milliseconds.
    columns: Mapping[str, Any]


@runtime_checkable
class ShowsStored(Protocol):
    """Show a record byte by byte; for `onefold show --raw`."""

    def stored(self, address: Address) -> StoredRecord | None:
        """Return what is stored for this address, even if it has expired. Change nothing."""


class Untold(NamedTuple):
    """Stands for a fact that the server did not report, with the reason for a person to read."""

    why: str


@runtime_checkable
class Inspectable(Protocol):
    """Facts that a server reports about itself; for `onefold doctor`."""

    def facts(self) -> Mapping[str, Any]:
        """Return raw facts by name; `kind` says what they are about. Judge nothing, and create or change nothing.

        A fact that the server refuses to report is `Untold`. `clock`, if present, is the machine's time before the
        request, the store's time, and the machine's time after the answer. No fact holds a key or a password.
        """
