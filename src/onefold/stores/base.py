"""The seam: what a store can do, and what a store may be able to do besides.

A store compares and swaps. It never looks at a lease or a fingerprint to decide something. Its promises:

- `token` answers "is it still mine?", token and revision together answer "is it still what I saw?".
- Every operation is idempotent by token: a reply may get lost, and the client library sends it again.
- Durations cross the seam and are counted by the store's own clock.
- A record past its stay counts as free; a store may return it or not.
- Every field is kept in every state: a running bypass carries the result that it has found. A fingerprint has at most
  128 bytes.

`onefold.testing.StoreContract` is the definition; a store that passes all of it is a store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from onefold._interrupts import When
from onefold._model import GONE, Address, Claim, Close, Commit, Ending, Entry, Gone, Memory, Record, State
from onefold.errors import StoreUnavailable

# The words of the seam come with it: a store of your own needs no other import.
__all__ = [
    "GONE",
    "Address",
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
    "Inspectable",
    "Joinable",
    "Memory",
    "PartlyRenewed",
    "Query",
    "Record",
    "State",
    "Store",
    "Transaction",
    "Untold",
]


@runtime_checkable
class Store(Protocol):
    """Six atomic operations. A store that cannot be reached raises `StoreUnavailable`.

    One that has `knows(error)` says by it whether an error is its own. Any other that comes out of an operation counts
    as an interrupt, as what a signal's handler raises: the operation is asked again, and then the interrupt goes on.
    """

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        """Write the entry, or say what is in the way.

        Without `replacing`: if the address is free. With it: if the record still has the token *and* the revision
        of `replacing`; where it is not there any more the answer is `GONE`, because what was decided about it
        must not be written over nothing. `None` means written. A claim that finds the token of its entry has
        succeeded before (unless it keeps the token of `replacing`, as marking a record held does).
        """

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        """Renew the lease and the stay of a running record; on a held one keep only the notes. False: not ours.

        A lease of zero ends it: whoever comes next finds it abandoned. Notes never become shorter under one token: a
        log only grows, and a write that was given up may land late.
        """

    def finish(self, claim: Claim, ending: Ending) -> bool:
        """End the record. True if it is ours, also if this token ended it before. False: not ours."""

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        """Forget the record, or leave it open. True if it was ours or is not there. False: another's."""

    def read(self, address: Address) -> Record | None:
        """The record, from the primary."""

    def purge(self, limit: int) -> int:
        """Remove up to `limit` records past their stay; how many were removed."""


@runtime_checkable
class AsyncStore(Protocol):
    """The same six, awaited."""

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None: ...
    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool: ...
    async def finish(self, claim: Claim, ending: Ending) -> bool: ...
    async def release(self, claim: Claim, memory: Memory | None = None) -> bool: ...
    async def read(self, address: Address) -> Record | None: ...
    async def purge(self, limit: int) -> int: ...


@runtime_checkable
class Batching(Protocol):
    """Many addresses in one round trip; answers come in the order of the questions."""

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]: ...
    def extend_all(self, claims: Sequence[Claim]) -> list[bool]: ...
    def close_all(self, closes: Sequence[Close]) -> list[bool]: ...


@runtime_checkable
class AsyncBatching(Protocol):
    """Many addresses in one round trip, awaited."""

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]: ...
    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]: ...
    async def close_all(self, closes: Sequence[Close]) -> list[bool]: ...


class PartlyRenewed(StoreUnavailable):
    """Raised by `extend_all` where some leases could not be renewed now, and nobody has said that they are lost.

    `answers` says what is known, in the order of the claims: None is nothing. One claim must never depend on another.
    """

    def __init__(self, answers: Sequence[bool | None], why: str) -> None:
        super().__init__(why)
        self.answers = list(answers)


class Transaction(Protocol):
    """A store inside a transaction of its own: what is written here commits with the work, or not at all."""

    # What the handler gets as `tx`: the connection, session or cursor to work on.
    tx: Any

    def begin(self) -> None: ...
    def save(self) -> None: ...
    def check_open(self, claim: Claim) -> None:
        """Raise `UsageError` unless the record of this claim is still there, in the transaction that wrote it.

        A handler can end a transaction in many ways, and go on in another one.
        """

    def commit(self) -> Commit: ...
    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        """Undo all, or what followed `save`. True: the database asks to try it again in a new transaction."""

    def spoil(self, when: When) -> None:
        """After an interrupt (KeyboardInterrupt, a cancellation): nothing that was written here may be committed.

        `When.INSIDE`: the interrupt came in a handler. That of the outermost delivery was rolled back before; if the
        transaction is still open, it was a nested delivery's, and the handler around it may catch it and go on.
        An async transaction has `abandon()` besides, which is not awaited: it closes the connection at once, without
        waiting for the server. One that has `knows(error)` says by it whether an error is the database's own: any other
        that comes out of an operation is an interrupt, too, as what a signal's handler raises.
        """

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None: ...
    def finish(self, claim: Claim, ending: Ending) -> bool: ...
    def release(self, claim: Claim, memory: Memory | None = None) -> bool: ...
    def read(self, address: Address) -> Record | None: ...


@runtime_checkable
class Joinable(Protocol):
    """Transactions in which the record is written beside the work. An async store gives an async context manager."""

    def transaction(self) -> Any:
        """A context manager around a `Transaction` that is not begun yet; it gives the connection back."""


class Query(NamedTuple):
    """Which records to list; `None` is any. `after` is the last address of the page before."""

    scope: str | None = None
    operation: str | None = None
    key: str | None = None
    state: State | None = None
    after: Address | None = None


@runtime_checkable
class Browsable(Protocol):
    """For tools: list records by scope, operation and key, byte for byte."""

    def browse(self, query: Query, limit: int) -> list[Record]: ...


@runtime_checkable
class AsyncBrowsable(Protocol):
    """For tools, awaited."""

    async def browse(self, query: Query, limit: int) -> list[Record]: ...


@runtime_checkable
class HasSchema(Protocol):
    """A store whose tables have to exist before it can be read: a tool that only looks must not create them."""

    # Whether the store creates missing tables on first use, and upgrades older ones. A tool turns it off.
    auto_schema: bool

    def schema_exists(self) -> bool:
        """Return whether the tables exist. Create and change nothing, not even a file."""


class Untold(NamedTuple):
    """In the place of a fact that the server did not tell: why not, in words for a person."""

    why: str


@runtime_checkable
class Inspectable(Protocol):
    """For `onefold doctor`: what a server says of itself."""

    def facts(self) -> Mapping[str, Any]:
        """Raw facts, by name; `kind` says what they are about. It judges nothing, and makes or changes nothing.

        What the server refuses to tell is `Untold`. `clock`, where there is one, is the machine's time before the
        question, the store's time, and the machine's time after the answer. No fact holds a key or a password.
        """
