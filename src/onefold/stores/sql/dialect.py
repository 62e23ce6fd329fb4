"""Compose a database's statements, and the operations of a store as flows: each yields statements and gets replies.

Pure, and so written once for every driver, sync and async: `run` and `run_async` (`_concurrency.generators`) bring a
flow to its end over whatever connection sends statements. A flow begins and ends no transaction. A driver's error is
raised inside the flow, and goes right through it, unless the dialect knows it for an answer.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from onefold._model import GONE, Address, Claim, Close, Ending, Entry, Gone, Record, Released
from onefold.errors import StoreUnavailable
from onefold.stores.base import Query
from onefold.stores.sql.records import (
    ADDRESS,
    ALIVE,
    TABLE,
    VERSION,
    Parameters,
    is_own,
    of_address,
    of_claim,
    of_ending,
    of_entry,
    of_notes,
    of_released,
    record,
    records,
)
from onefold.stores.sql.statements import Statements

if TYPE_CHECKING:
    from onefold.stores.sql.connection import Database
    from onefold.stores.sql.own_column import Rows
    from onefold.transactions import Column

T = TypeVar("T")

# A record that is in the way of a claim can be released before it is read; each such race is one round.
ROUNDS_MAX: Final = 8


# What a statement of `checking` makes the server say, in whatever language: its message quotes the value.
GONE_MARK: Final = "onefold: gone"


class SqlRequest(NamedTuple):
    """A statement with its named values; `rows` says that rows come back."""

    statement: str
    values: Parameters
    rows: bool = False


class Reply(NamedTuple):
    """How many rows a statement wrote, and the rows that it gave back."""

    written: int
    rows: Sequence[Sequence[Any]] = ()


# A list of statements is for one network message where the driver can, and gets a list of replies.
SqlFlow = Generator[SqlRequest | list[SqlRequest], Any, T]


class Sends(Protocol):
    """What sends statements over one connection, blocking."""

    def send(self, request: SqlRequest) -> Reply: ...
    def send_all(self, requests: list[SqlRequest]) -> list[Reply]: ...


class Dialect(Statements):
    """What is the same everywhere. Each database adds its own statements, and overrides what it does in another way."""

    # For people and errors.
    name: str
    # From nothing to version 1, from 1 to 2, and so on: statements that do nothing where their work is done already.
    # A newer form has to be usable by the code of the version before.
    versions: tuple[tuple[str, ...], ...]
    # How many of the two tables are there.
    count_tables: str
    # Writes if the address is free, or if its record has expired.
    insert: str
    # Whether `insert` gives back the record that is there afterwards (ours, or the one in the way) as a row of `READ`.
    # It may give none where that record came while it was waiting; then it is asked again. Where it never gives one,
    # the number of rows says whether it has written.
    answers: bool = False

    # Whether `close_all` sends one statement at a time, and not a list of them.
    closes_in_one: bool = False

    # Whether each session chooses the schema in which our tables are looked for.
    searches_schemas: bool = False

    which_version: str = "SELECT version, usable_from FROM onefold_schema"

    # Each database has a way of its own to find the oldest few.
    remove_expired: str

    def page(self, query: Query, limit: int) -> tuple[str, Parameters]:
        """The statement for one page, in the order of the primary key."""
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
        return self.spell(statement), values | {"limit": max(limit, 0)}

    def form(self) -> SqlFlow[int]:
        """Of which version the tables are; 0: there are none. Raises `StoreUnavailable` where they are too new."""
        there: Reply = yield SqlRequest(self.count_tables, {}, rows=True)
        if there.rows[0][0] != 2:
            return 0
        marked: Reply = yield SqlRequest(self.which_version, {}, rows=True)
        for version, usable_from in marked.rows:
            if usable_from > VERSION:
                raise StoreUnavailable(
                    f"the tables of Onefold in this database are of version {version}, and this Onefold knows version "
                    f"{VERSION}. Nothing ran. Upgrade Onefold"
                )
            return int(version)
        return 0

    def upgrade(self, version: int) -> SqlFlow[None]:
        """Bring the tables from this version to ours."""
        for statements in self.versions[version:]:
            for statement in statements:
                yield SqlRequest(statement, {})

    def script(self) -> str:
        """All versions of the tables as a text for people."""
        return "\n\n".join(f"{statement.strip()};" for statements in self.versions for statement in statements) + "\n"

    def insert_all(self, entries: Sequence[Entry]) -> SqlRequest:
        """Many claims in one statement; where it answers, each row begins with its address."""
        raise NotImplementedError(f"{type(self).__name__} writes one record at a time")

    def read_all(self, addresses: Sequence[Address]) -> SqlRequest:
        """Many records in the way, each row beginning with its address."""
        raise NotImplementedError(f"{type(self).__name__} reads one record at a time")

    def claim(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        # It writes first and reads only when refused: in a caller's transaction a read before the write would begin a
        # snapshot, and some databases refuse to write from an old one.
        if replacing is not None:
            return (yield from self._replace(entry, replacing))
        request = SqlRequest(self.insert, of_entry(entry), rows=self.answers)
        for _ in range(ROUNDS_MAX):
            reply: Reply = yield request
            if self.answers:
                found = record(entry.address, reply.rows[0]) if reply.rows else None
            elif reply.written == 1:
                return None
            else:
                found = yield from self._in_the_way(entry.address)
            if found is not None:
                return None if is_own(found, entry) else found
        raise contended(entry.address)

    def claim_joined(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        """The same in a transaction with the work, where nearly every record is new: that has to be cheap."""
        return self.claim(entry, replacing)

    # A joined record has to be there after the handler, in the transaction that wrote it. A savepoint proves it: it
    # ends with its transaction, however that ends, and with whatever was written before it.

    def claim_marked(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        """Claim in a transaction with the work, and mark that transaction; in one message where the database can."""
        found = yield from self.claim_joined(entry, replacing)
        if found is None:
            yield from self.mark(Claim(entry.address, entry.token))
        return found

    def mark(self, claim: Claim) -> SqlFlow[None]:
        """Mark the transaction that has just written the record of this claim."""
        yield SqlRequest(f"SAVEPOINT {self.mark_of(claim)}", {})

    def unmark(self, claim: Claim) -> SqlFlow[bool]:
        """Whether the marked transaction is still open, with what was written before the mark; it has none then."""
        try:
            yield SqlRequest(f"RELEASE SAVEPOINT {self.mark_of(claim)}", {})
        except Exception as error:
            if not self.lacks_savepoint(error):
                raise
            return False
        return True

    def mark_of(self, claim: Claim) -> str:
        """The name of the savepoint. Joined deliveries can be nested, and a name may stand for one savepoint only."""
        return f"onefold_{claim.token.hex()[:16]}"

    def lacks_savepoint(self, error: BaseException) -> bool:
        """Whether an error says that there is no such savepoint."""
        raise NotImplementedError(f"{type(self).__name__} has savepoints, or another way to know its transactions")

    def still_there(self, claim: Claim) -> SqlFlow[bool]:
        """Whether the record is still there, in the transaction that wrote it."""
        return self.unmark(claim)

    def finish_joined(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        """End the record; False: it is not there any more, or another transaction is open."""
        if not (yield from self.unmark(claim)):
            return False
        return (yield from self.end_unmarked(claim, ending))

    def finish_marked(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        """The same after `claim_marked`; in one message where the database can."""
        return self.finish_joined(claim, ending)

    def end_unmarked(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        reply: Reply = yield SqlRequest(self.end_joined, of_claim(claim) | of_ending(ending))
        return reply.written == 1

    # What others ask a dialect for, so that they need not know which database it is. Each imports what it needs on use.

    def facts(self, database: Database) -> SqlFlow[dict[str, Any]]:
        """Ask the database what the doctor wants to know."""
        raise NotImplementedError(f"{type(self).__name__} tells nothing about its server")

    def rows_of(self, column: Column) -> Rows:
        """Return the operations of a store on rows of the caller's."""
        raise NotImplementedError(f"{type(self).__name__} has no records in rows of the caller's")

    def missing_in(self) -> SqlFlow[str | None]:
        """Where this session would make the tables; None: they are there. Only with `searches_schemas`."""
        raise NotImplementedError(f"{type(self).__name__} has its tables in one place")

    def searching(self, path: str) -> SqlRequest:
        """Return the statement that makes a session look there, until its transaction ends."""
        raise NotImplementedError(f"{type(self).__name__} has its tables in one place")

    def was_given_up(self, error: BaseException) -> bool:
        """Whether an error says that a statement failed before, and that the transaction takes no more of them."""
        del error
        return False

    def judge(self, claim: Claim, error: BaseException) -> SqlFlow[None]:
        """Raise `InProgress` where a handler's error comes from a row of another delivery."""
        del claim, error
        yield from ()

    def checking(self, claim: Claim) -> str | None:
        """A statement that fails unless the record is still there, to be sent with a COMMIT; None: there is none."""
        del claim
        return None

    def says_gone(self, error: BaseException) -> bool:
        """Whether the statement of `checking` has failed: the record is not in that transaction."""
        del error
        return False

    def _replace(self, entry: Entry, seen: Record) -> SqlFlow[Record | Gone | None]:
        reply: Reply = yield SqlRequest(self.replace, of_entry(entry, seen))
        if reply.written == 1:
            return None
        found = yield from self._in_the_way(entry.address)
        if found is None:
            return GONE
        return None if is_own(found, entry, seen) else found

    def _in_the_way(self, address: Address) -> SqlFlow[Record | None]:
        reply: Reply = yield SqlRequest(self.read_in_the_way, of_address(address), rows=True)
        return record(address, reply.rows[0]) if reply.rows else None

    def claim_all(self, entries: Sequence[Entry]) -> SqlFlow[list[Record | Gone | None]]:
        """All in one statement and in one order, so that two batches that overlap do not wait for each other."""
        left: dict[Address, Entry] = {}
        for entry in sorted(entries, key=lambda entry: entry.address.parts):
            left.setdefault(entry.address, entry)
        found: dict[Address, Record] = {}
        for _ in range(ROUNDS_MAX):
            if not left:
                answers = ((found[entry.address], entry) for entry in entries)
                return [None if is_own(one, entry) else one for one, entry in answers]
            reply: Reply = yield self.insert_all(list(left.values()))
            if not self.answers:
                reply = yield self.read_all(list(left))
            for one in records(reply.rows):
                found[one.address] = one
                left.pop(one.address, None)
        raise contended(next(iter(left)))

    def extend(self, claim: Claim, notes: bytes | None = None) -> SqlFlow[bool]:
        reply: Reply = yield SqlRequest(self.renew, of_claim(claim) | of_notes(notes))
        return reply.written == 1

    def extend_all(self, claims: Sequence[Claim], shortest: float = math.inf) -> SqlFlow[list[bool | None]]:
        """Renew many. None: not renewed, and not lost either, because somebody has locked the record.

        `shortest` is the shortest lease that is renewed on this connection, which bounds the wait for such a record.
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
        """Finishes and releases in one message; a release of what is not there is asked about afterwards."""
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
        """Write the record of this claim without waiting for its row; raise `RowHeld` where somebody holds it.

        A database that locks no rows, but everything, has a bound for that.
        """
        del claim
        reply: Reply = yield request
        return reply

    def read(self, address: Address) -> SqlFlow[Record | None]:
        reply: Reply = yield SqlRequest(self.look, of_address(address), rows=True)
        return record(address, reply.rows[0]) if reply.rows else None

    def browse(self, query: Query, limit: int) -> SqlFlow[list[Record]]:
        statement, values = self.page(query, limit)
        reply: Reply = yield SqlRequest(statement, values, rows=True)
        return records(reply.rows)

    def purge(self, limit: int) -> SqlFlow[int]:
        reply: Reply = yield SqlRequest(self.remove_expired, {"limit": max(limit, 0)})
        return reply.written

    def background_purge(self, limit: int) -> SqlFlow[int]:
        """A purge beside the work: it must be cheap also where there is nothing to remove."""
        return self.purge(limit)


def contended(address: Address) -> StoreUnavailable:
    return StoreUnavailable(
        f"{address.operation} [key {address.digest}]: its record came and went {ROUNDS_MAX} times during one claim. "
        "Deliver it again"
    )
