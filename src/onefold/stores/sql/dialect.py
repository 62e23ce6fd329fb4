"""Compose a database's statements, and the operations of a store as flows: each yields statements and gets replies.

Pure, and so written once for every driver, sync and async: `run` and `run_async` (`_concurrency.generators`) drive a
flow over any connection that sends statements. A flow begins and ends no transaction. A driver's error is raised inside
the flow and propagates, unless the dialect recognizes it as an answer.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from msgspec import Struct

from onefold._model import GONE, Address, Claim, Close, Ending, Entry, Gone, Record, Released
from onefold.errors import StoreUnavailable
from onefold.stores.base import Query, StoredRecord
from onefold.stores.sql.records import (
    ADDRESS,
    ALIVE,
    AT,
    TABLE,
    VERSION,
    Parameters,
    as_stored,
    of_address,
    of_claim,
    of_ending,
    of_entry,
    of_notes,
    of_released,
    of_seen,
    record,
    records,
)
from onefold.stores.sql.statements import Statements

if TYPE_CHECKING:
    from onefold.stores.samples.table import TableSampler
    from onefold.stores.sql.connection import Database
    from onefold.stores.sql.foreign_tables import Catalog
    from onefold.stores.sql.own_column import Rows
    from onefold.transactions import RecordColumn

T = TypeVar("T")

# A conflicting record can be released before it is read; each such race is one round.
ROUNDS_MAX: Final = 8


# The text that a failing statement of `checking` makes the server quote in its error message, in any language.
GONE_MARK: Final = "onefold: gone"


# Structs, which are created without a Python frame: each delivery creates some.


class SqlRequest(Struct, frozen=True, gc=False):
    """A statement with its named values; `rows` says that rows come back."""

    statement: str
    values: Parameters
    rows: bool = False


class Reply(Struct, frozen=True, gc=False):
    """How many rows a statement wrote, and the rows that it gave back."""

    written: int
    rows: Sequence[Sequence[Any]] = ()


# A list of statements goes into one network message where the driver supports it, and gets a list of replies.
SqlFlow = Generator[SqlRequest | list[SqlRequest], Any, T]


class Sends(Protocol):
    """A sender of statements over one connection, blocking."""

    def send(self, request: SqlRequest) -> Reply: ...
    def send_all(self, requests: list[SqlRequest]) -> list[Reply]: ...


class Dialect(Statements):
    """The defaults shared by all databases. Each database adds its own statements and overrides where it differs."""

    # The database's name, for people and errors.
    name: str
    # The name of its tables' form in `docs/record-format.md`.
    form: str
    # The statements that migrate from nothing to version 1, from 1 to 2, and so on; each is a no-op where its work is
    # already done. The previous version of the code has to be able to use the newer tables.
    versions: tuple[tuple[str, ...], ...]
    # Counts how many of our two tables exist.
    count_tables: str
    # Writes if the address is free, or if its record has expired.
    insert: str
    # Whether `insert` returns the record that exists afterwards (ours, or the conflicting one) as a row of `READ`. It
    # may return no row where that record was written while it waited; then it is sent again. Where it never returns
    # one, the number of rows written tells whether the claim succeeded.
    insert_returns: bool = False

    # Whether its connections lead to a server. Those to a file belong to one thread, and must not be open at a fork.
    has_server: bool = True

    # Whether `close_all` sends one statement at a time, not a list of them.
    closes_in_one: bool = False

    # Whether the schema in which our tables are looked up depends on the session.
    searches_schemas: bool = False

    which_version: str = "SELECT version, usable_from FROM onefold_schema"

    # Each database finds the oldest few records in its own way.
    remove_expired: str

    def page(self, query: Query, limit: int) -> tuple[str, Parameters]:
        """Return the statement for one page, in the order of the primary key."""
        wanted: Parameters = {"scope": query.scope, "operation": query.operation, "key": query.key}
        values = {name: value for name, value in wanted.items() if value is not None}
        conditions = [ALIVE, *(f"{name} = :{name}" for name in values)]
        if query.state is not None:
            conditions.append(self.in_state(query.state))
        if query.after is not None:
            conditions.append(self.after)
            values |= {f"after_{name}": getattr(query.after, name) for name in ADDRESS}
        statement = (
            f"SELECT {', '.join(ADDRESS)}, {self.selected()} FROM {TABLE} "
            f"WHERE {' AND '.join(conditions)} ORDER BY {', '.join(ADDRESS)} LIMIT :limit"
        )
        return self.in_dialect(statement), values | {"limit": max(limit, 0)}

    def schema_version(self) -> SqlFlow[int]:
        """Return the version of the tables, or 0 if there are none. Raise `StoreUnavailable` where they are too new."""
        there: Reply = yield SqlRequest(self.count_tables, {}, rows=True)
        if there.rows[0][0] != 2:
            return 0
        marked: Reply = yield SqlRequest(self.which_version, {}, rows=True)
        for version, usable_from in marked.rows:
            if usable_from > VERSION:
                raise StoreUnavailable(
                    f"Onefold's tables in this database are of version {version}, but this Onefold only knows version "
                    f"{VERSION}. Nothing ran. Upgrade Onefold"
                )
            return int(version)
        return 0

    def upgrade(self, version: int) -> SqlFlow[None]:
        """Migrate the tables from this version to ours."""
        for statements in self.versions[version:]:
            for statement in statements:
                yield SqlRequest(statement, {})

    def begin_making(self) -> SqlFlow[None]:
        """Let the transaction that makes the tables see what another has made, for whose lock it has waited."""
        yield from ()

    def is_laid_out(self) -> SqlFlow[bool]:
        """Return whether existing tables have the layout that this store was asked for."""
        yield from ()
        return True

    def lay_out(self) -> SqlFlow[None]:
        """Give existing tables that layout."""
        yield from ()

    def script(self) -> str:
        """Return all versions of the tables as SQL text for people."""
        return "\n\n".join(f"{statement.strip()};" for statements in self.versions for statement in statements) + "\n"

    def insert_all(self, entries: Sequence[Entry]) -> SqlRequest:
        """Return one statement for many claims; if it returns rows, each begins with its address."""
        raise NotImplementedError(f"{type(self).__name__} writes one record at a time")

    def read_all(self, addresses: Sequence[Address]) -> SqlRequest:
        """Return one statement that reads many conflicting records, each row beginning with its address."""
        raise NotImplementedError(f"{type(self).__name__} reads one record at a time")

    def claim(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        # Write first, and read only when refused: in a caller's transaction a read before the write would begin a
        # snapshot, and some databases refuse to write from an old one.
        if replacing is not None:
            return (yield from self._replace(entry, replacing))
        request = SqlRequest(self.insert, of_entry(entry), rows=self.insert_returns)
        for _ in range(ROUNDS_MAX):
            reply: Reply = yield request
            if self.insert_returns:
                found = record(entry.address, reply.rows[0]) if reply.rows else None
            elif reply.written == 1:
                return None
            else:
                found = yield from self._in_the_way(entry.address)
            if found is not None:
                return None if entry.is_own(found.token) else found
        raise contended(entry.address)

    # Most claims are one statement. Whoever sends that one by itself saves the work of a flow.

    def asking(self, entry: Entry) -> SqlRequest | None:
        """Return the statement that is enough for nearly every claim; None: only the flow of `claim` will do."""
        del entry
        return None

    def answered(self, entry: Entry, reply: Reply) -> Record | Gone | None:
        """Return what `claim` returns, from the reply to `asking`; GONE: go on with `claim_again`."""
        raise NotImplementedError(f"{type(self).__name__} has no statement to ask at once")

    def claim_again(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        """Claim by the statements for any record."""
        return Dialect.claim(self, entry, replacing)

    def claim_joined(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        """Claim in the transaction of the work. Nearly every record is new there, so that case has to be cheap."""
        return self.claim(entry, replacing)

    # A joined record has to exist after the handler, in the transaction that wrote it. A savepoint proves it: it ends
    # with its transaction, however that ends, together with everything written before it.

    def claim_marked(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        """Claim in the transaction of the work and mark that transaction, in one message where the database can."""
        found = yield from self.claim_joined(entry, replacing)
        if found is None:
            yield from self.mark(Claim(entry.address, entry.token))
        return found

    def mark(self, claim: Claim) -> SqlFlow[None]:
        """Mark the transaction that has just written the record of this claim."""
        yield SqlRequest(f"SAVEPOINT {self.mark_of(claim)}", {})

    def unmark(self, claim: Claim) -> SqlFlow[bool]:
        """Remove the mark; return whether its transaction is still open, with everything written before the mark."""
        try:
            yield SqlRequest(f"RELEASE SAVEPOINT {self.mark_of(claim)}", {})
        except Exception as error:
            if not self.lacks_savepoint(error):
                raise
            return False
        return True

    def mark_of(self, claim: Claim) -> str:
        """Return the savepoint's name, unique per claim because joined deliveries can be nested."""
        return f"onefold_{claim.token.hex()[:16]}"

    def lacks_savepoint(self, error: BaseException) -> bool:
        """Return whether an error says that the savepoint does not exist."""
        raise NotImplementedError(f"{type(self).__name__} has savepoints, or another way to know its transactions")

    def still_there(self, claim: Claim) -> SqlFlow[bool]:
        """Return whether the record still exists, in the transaction that wrote it."""
        return self.unmark(claim)

    def finish_joined(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        """Finish the record; return False if it no longer exists, or if another transaction is open."""
        if not (yield from self.unmark(claim)):
            return False
        return (yield from self.end_unmarked(claim, ending))

    def finish_marked(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        """Finish after `claim_marked`, in one message where the database can."""
        return self.finish_joined(claim, ending)

    def end_unmarked(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        reply: Reply = yield SqlRequest(self.end_joined, of_claim(claim) | of_ending(ending))
        return reply.written == 1

    # Hooks for other modules, so that they need not know which database it is. Each imports what it needs on use.

    def facts(self, database: Database) -> SqlFlow[dict[str, Any]]:
        """Ask the database for the facts that the doctor reports."""
        raise NotImplementedError(f"{type(self).__name__} reports no facts about its server")

    def sampler(self) -> TableSampler:
        """Return how to read a bounded part of the table."""
        raise NotImplementedError(f"{type(self).__name__} draws no samples")

    def rows_of(self, column: RecordColumn) -> Rows:
        """Return the operations of a store on the caller's own rows."""
        raise NotImplementedError(f"{type(self).__name__} has no records in rows of the caller's")

    @property
    def foreign(self) -> Catalog:
        """Return how to look rows up in tables that are not ours."""
        raise NotImplementedError(f"{type(self).__name__} reads no tables but ours")

    def missing_in(self) -> SqlFlow[str | None]:
        """Return the search path in which the tables are missing, or None if they exist. See `searches_schemas`."""
        raise NotImplementedError(f"{type(self).__name__} has its tables in one place")

    def search_path(self) -> SqlFlow[str]:
        """Return the schemas that the session searches. See `searches_schemas`."""
        raise NotImplementedError(f"{type(self).__name__} has its tables in one place")

    def searching(self, path: str) -> SqlRequest:
        """Return the statement that sets the session's search path until its transaction ends."""
        raise NotImplementedError(f"{type(self).__name__} has its tables in one place")

    def was_given_up(self, error: BaseException) -> bool:
        """Return whether an error says that the transaction was aborted by an earlier statement."""
        del error
        return False

    def judge(self, claim: Claim, error: BaseException) -> SqlFlow[None]:
        """Raise `InProgress` where a handler's error is caused by another delivery's row."""
        del claim, error
        yield from ()

    def checking(self, claim: Claim) -> str | None:
        """Return a statement, sent with the COMMIT, that fails unless the record still exists; None: there is none."""
        del claim
        return None

    def says_gone(self, error: BaseException) -> bool:
        """Return whether the statement of `checking` failed because the record is not in that transaction."""
        del error
        return False

    def _replace(self, entry: Entry, seen: Record) -> SqlFlow[Record | Gone | None]:
        reply: Reply = yield SqlRequest(self.replace, of_entry(entry, seen))
        if reply.written == 1:
            return None
        found = yield from self._in_the_way(entry.address)
        if found is None:
            return GONE
        return None if entry.is_own(found.token, seen) else found

    def _in_the_way(self, address: Address) -> SqlFlow[Record | None]:
        reply: Reply = yield SqlRequest(self.read_in_the_way, of_address(address), rows=True)
        return record(address, reply.rows[0]) if reply.rows else None

    def claim_all(self, entries: Sequence[Entry]) -> SqlFlow[list[Record | Gone | None]]:
        """Claim all in one statement and in one order, so that two overlapping batches do not deadlock."""
        left: dict[Address, Entry] = {}
        for entry in sorted(entries, key=lambda entry: entry.address.parts):
            left.setdefault(entry.address, entry)
        found: dict[Address, Record] = {}
        for _ in range(ROUNDS_MAX):
            if not left:
                answers = ((found[entry.address], entry) for entry in entries)
                return [None if entry.is_own(one.token) else one for one, entry in answers]
            reply: Reply = yield self.insert_all(list(left.values()))
            if not self.insert_returns:
                reply = yield self.read_all(list(left))
            for one in records(reply.rows):
                found[one.address] = one
                left.pop(one.address, None)
        raise contended(next(iter(left)))

    def extend(self, claim: Claim, notes: bytes | None = None) -> SqlFlow[bool]:
        reply: Reply = yield SqlRequest(self.renew, of_claim(claim) | of_notes(notes))
        return reply.written == 1

    def extend_all(self, claims: Sequence[Claim], shortest: float = math.inf) -> SqlFlow[list[bool | None]]:
        """Renew many claims. None: neither renewed nor lost, because another transaction has locked the record.

        `shortest` is the shortest lease renewed on this connection, which bounds the wait for a locked record.
        """
        del shortest
        replies: list[Reply] = yield [SqlRequest(self.renew, of_claim(claim) | of_notes(None)) for claim in claims]
        return [reply.written == 1 for reply in replies]

    def finish(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        reply: Reply = yield self.closing(claim, ending)
        return reply.written == 1

    def release(self, claim: Claim, released: Released | None = None) -> SqlFlow[bool]:
        reply: Reply = yield self.closing(claim, released)
        return reply.written == 1 or (yield from self.read(claim.address)) is None

    def close_all(self, closes: Sequence[Close]) -> SqlFlow[list[bool]]:
        """Send finishes and releases in one message, then look up each released record that was not found."""
        replies: list[Reply] = yield [self.closing(close.claim, close.by) for close in closes]
        closed = [reply.written == 1 for reply in replies]
        for at, close in enumerate(closes):
            if not closed[at] and not isinstance(close.by, Ending):
                closed[at] = (yield from self.read(close.claim.address)) is None
        return closed

    def closing(self, claim: Claim, by: Ending | Released | None) -> SqlRequest:
        """Return the statement that ends a claim."""
        if isinstance(by, Ending):
            return SqlRequest(self.end, of_claim(claim) | of_ending(by))
        if isinstance(by, Released):
            return SqlRequest(self.leave_open, of_claim(claim) | of_released(by))
        return SqlRequest(self.forget, of_claim(claim))

    def at_once(self, request: SqlRequest, claim: Claim) -> SqlFlow[Reply]:
        """Write the record of this claim without waiting for its row; raise `RowHeld` if another transaction locks it.

        This default suits a database that locks everything instead of rows, and bounds that wait itself.
        """
        del claim
        reply: Reply = yield request
        return reply

    def annotate(self, seen: Record, notes: bytes) -> SqlFlow[Record | Gone | None]:
        """Write the notes if the record is unchanged since it was read, without waiting for its row."""
        values = of_address(seen.address) | of_seen(seen) | {"notes": notes}
        reply: Reply = yield from self.at_once(SqlRequest(self.annotation, values), Claim(seen.address, seen.token))
        if reply.written == 1:
            return None
        found = yield from self.read(seen.address)
        if found is None:
            return GONE
        return None if found.is_annotated(seen, notes) else found

    def read(self, address: Address) -> SqlFlow[Record | None]:
        reply: Reply = yield SqlRequest(self.look, of_address(address), rows=True)
        return record(address, reply.rows[0]) if reply.rows else None

    def stored(self, address: Address) -> SqlFlow[StoredRecord | None]:
        names = (*ADDRESS, *self.written)
        statement = self.in_dialect(f"SELECT {', '.join(names)} FROM {TABLE} WHERE {AT}")
        reply: Reply = yield SqlRequest(statement, of_address(address), rows=True)
        return StoredRecord(self.form, as_stored(names, reply.rows[0])) if reply.rows else None

    def browse(self, query: Query, limit: int) -> SqlFlow[list[Record]]:
        statement, values = self.page(query, limit)
        reply: Reply = yield SqlRequest(statement, values, rows=True)
        return records(reply.rows)

    def purge(self, limit: int) -> SqlFlow[int]:
        reply: Reply = yield SqlRequest(self.remove_expired, {"limit": max(limit, 0)})
        return reply.written

    def background_purge(self, limit: int) -> SqlFlow[int]:
        """Purge alongside the work; it must be cheap even if there is nothing to remove."""
        return self.purge(limit)

    def impatient_purge(self, limit: int, path: str | None = None) -> SqlFlow[int]:
        """Purge on a connection that is closed afterwards, without waiting for anybody's lock.

        The thread that purges may hold it itself, in another transaction. `path` are the schemas that a caller's
        session has searched, where `searches_schemas`.
        """
        del path
        return self.background_purge(limit)


def contended(address: Address) -> StoreUnavailable:
    return StoreUnavailable(
        f"{address.operation} [key {address.digest}]: its record came and went {ROUNDS_MAX} times during one claim. "
        "Deliver it again"
    )
