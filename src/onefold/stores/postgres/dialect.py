"""PostgreSQL's dialect: one table, and every store operation, also on many addresses, as one statement.

A duplicate only reads: it writes no row, takes no lock and leaves nothing to vacuum.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec.structs import replace

from onefold._model import GONE, Address, Claim, Close, Ending, Entry, Gone, Record, Released, State
from onefold.stores.postgres.errors import LOCKED, code_of
from onefold.stores.postgres.statements import batch as many
from onefold.stores.postgres.statements import usual
from onefold.stores.postgres.statements.fragments import (
    AT_ADDRESS,
    DUE_SECONDS,
    ENDED,
    INTO,
    LEFT_OPEN,
    READ,
    RENEWED,
    SELECTED,
    UNLESS_ALIVE,
    VALUES,
    WRITTEN,
    typed,
)
from onefold.stores.sql.dialect import GONE_MARK, Dialect, Reply, SqlFlow, SqlRequest
from onefold.stores.sql.locked import RowHeld
from onefold.stores.sql.records import ALIVE, AT, OF_TOKEN, TABLE, of_address, of_claim, of_entry, record

if TYPE_CHECKING:
    from onefold.stores.samples.table import TableSampler
    from onefold.stores.sql.connection import Database
    from onefold.stores.sql.foreign_tables import Catalog
    from onefold.stores.sql.own_column import Rows
    from onefold.transactions import RecordColumn

FAILED_TRANSACTION: Final = "25P02"

# Taken while the tables are created, so that one of many starting processes creates them. It ends with the transaction,
# also behind a pooler. The number is the bytes of "onefold".
LOCK: Final = "SELECT pg_advisory_xact_lock(31365104204213348)"

# The widest columns first, because of alignment. The C collation compares bytes: `Key`, `KEY` and `key ` are three
# keys. Times are seconds since 1970; `due` and `held` are for the indexes. Freed space is reused, but not returned to
# the disk: that would take a vacuum that locks the whole table.
_RECORDS: Final = f"""
CREATE TABLE IF NOT EXISTS {TABLE} (
    began double precision NOT NULL,
    changed double precision NOT NULL,
    lease_until double precision,
    expires double precision,
    due integer,
    attempt integer NOT NULL,
    revision integer NOT NULL,
    bypasses integer,
    omitted smallint,
    held boolean,
    scope text COLLATE "C" NOT NULL,
    operation text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    token bytea NOT NULL,
    remark text NOT NULL,
    fingerprint bytea,
    notes bytea,
    result bytea,
    PRIMARY KEY (scope, operation, key)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05, vacuum_truncate = off)
"""

# A condition that is always true and is evaluated before any row. The setting ends with the statement.
_AT_ONCE: Final = f"(SELECT set_config('lock_timeout', '{round(many.WAIT_LEAST * 1000)}ms', true)) IS NOT NULL"

# A row's `xmin` is the transaction or subtransaction (after a savepoint) that wrote it, and `age` counts from the open
# transaction: rows that an earlier transaction of this connection wrote are older.
OF_THIS_TRANSACTION: Final = "age(xmin) <= 0"


class Postgres(Dialect):
    name = "PostgreSQL"
    form = "postgresql"
    insert_returns = True
    closes_in_one = True
    searches_schemas = True

    written = WRITTEN
    read_as = READ
    renewed = RENEWED
    ended = ENDED
    left_open = LEFT_OPEN
    written_here = OF_THIS_TRANSACTION

    versions = (
        (
            _RECORDS,
            f"CREATE INDEX IF NOT EXISTS {TABLE}_due ON {TABLE} (due) WHERE due IS NOT NULL",
            "CREATE TABLE IF NOT EXISTS onefold_schema (version integer NOT NULL, usable_from integer NOT NULL)",
            "INSERT INTO onefold_schema SELECT 1, 1 WHERE NOT EXISTS (SELECT 1 FROM onefold_schema)",
        ),
        # `onefold held` looks for a few records among millions.
        (
            f"CREATE INDEX IF NOT EXISTS {TABLE}_held ON {TABLE} ({AT_ADDRESS}) WHERE held",
            "UPDATE onefold_schema SET version = 2 WHERE version < 2",
        ),
    )

    count_tables = (
        f"SELECT (to_regclass('{TABLE}') IS NOT NULL)::integer + (to_regclass('onefold_schema') IS NOT NULL)::integer"
    )

    insert = typed(
        f"WITH found AS MATERIALIZED (SELECT {SELECTED} FROM {TABLE} WHERE {AT} AND {ALIVE}), "
        f"written AS (INSERT INTO {TABLE} ({INTO}) SELECT {VALUES} WHERE NOT EXISTS (SELECT 1 FROM found) "
        f"{UNLESS_ALIVE} RETURNING {SELECTED}) "
        "SELECT * FROM found UNION ALL SELECT * FROM written"
    )

    # For a record that is probably new, in the transaction of the work. See `usual.inserting`.
    insert_new: ClassVar[str] = typed(
        f"INSERT INTO {TABLE} ({INTO}) VALUES ({VALUES}) ON CONFLICT ({AT_ADDRESS}) DO NOTHING"
    )

    # With the process that answers: behind a pooler it is not the one that the connection was told of.
    look_joined: ClassVar[str] = typed(
        f"SELECT pg_backend_pid() FROM {TABLE} WHERE {OF_TOKEN} AND {OF_THIS_TRANSACTION}"
    )

    # The clock in a subselect, because a volatile function is evaluated for each row and cannot use an index. Rows that
    # others have locked are skipped. The condition is repeated outside because a `ctid` is unique in one table only: in
    # another partition it may be the place of a record that is still needed.
    remove_expired = typed(
        f"DELETE FROM {TABLE} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {TABLE} "
        f"WHERE due <= (SELECT floor(:now / {DUE_SECONDS})::integer) AND expires <= :now "
        "ORDER BY due LIMIT :limit FOR UPDATE SKIP LOCKED)) AND expires <= :now"
    )

    # The ten minutes that `due` counts in may hold a million records that expire soon, and a background purge has no
    # time to look at them all: it looks at the first few.
    remove_near: ClassVar[str] = typed(
        f"DELETE FROM {TABLE} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {TABLE} WHERE ctid = ANY (ARRAY("
        f"SELECT ctid FROM {TABLE} WHERE due <= (SELECT floor(:now / {DUE_SECONDS})::integer) ORDER BY due LIMIT :limit"
        ")) AND expires <= :now FOR UPDATE SKIP LOCKED)) AND expires <= :now"
    )

    @classmethod
    def in_dialect(cls, statement: str) -> str:
        return typed(statement)

    def in_state(self, state: State) -> str:
        return "held" if state is State.HELD else super().in_state(state)

    def claim(
        self, entry: Entry, replacing: Record | None = None, mark: int | None = None
    ) -> SqlFlow[Record | Gone | None]:
        request = usual.writing(entry, mark) if replacing is None else None
        if request is not None:
            found = self.answered(entry, (yield request))
            if found is not GONE:
                return found
        return (yield from self.claim_again(entry, replacing))

    def asking(self, entry: Entry) -> SqlRequest | None:
        return usual.writing(entry)

    def answered(self, entry: Entry, reply: Reply) -> Record | Gone | None:
        if not reply.rows:
            return None
        row = reply.rows[0]
        if row[0] is not None:
            found = record(entry.address, row)
            if found.ttl_left > 0:
                return None if entry.is_own(found.token) else found
        # A record that has expired is replaced; and one that a transaction has just written, for which the statement
        # has waited, is visible to the next statement.
        return GONE

    def claim_joined(
        self, entry: Entry, replacing: Record | None = None, mark: int | None = None
    ) -> SqlFlow[Record | Gone | None]:
        """Claim in the transaction of the work; `mark` may be set with the record (`marks`), and need not be."""
        if replacing is None and not usual.is_usual(entry):
            reply: Reply = yield SqlRequest(self.insert_new, of_entry(entry))
            if reply.written == 1:
                return None
        return (yield from self.claim(entry, replacing, mark))

    def closing(self, claim: Claim, by: Ending | Released | None) -> SqlRequest:
        if isinstance(by, Ending) and usual.is_plain(by):
            return usual.closing(claim, by)
        return super().closing(claim, by)

    # No savepoint: each would be a subtransaction with a number of its own.

    def mark(self, claim: Claim) -> SqlFlow[None]:
        del claim
        yield from ()

    def unmark(self, claim: Claim) -> SqlFlow[bool]:
        del claim
        yield from ()
        return True

    def still_there(self, claim: Claim) -> SqlFlow[bool]:
        return (yield from self.backend_of(claim)) is not None

    def backend_of(self, claim: Claim) -> SqlFlow[int | None]:
        """Return the process behind the open transaction if that wrote the record, and the record is still there."""
        reply: Reply = yield SqlRequest(self.look_joined, of_claim(claim), rows=True)
        return int(reply.rows[0][0]) if reply.rows else None

    def finish_joined(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        return self.end_unmarked(claim, ending)

    def checking(self, claim: Claim) -> str:
        # Hexadecimal only: nothing depends on the session's settings.
        address = (f"{name} = {_text(value)}" for name, value in of_address(claim.address).items())
        conditions = " AND ".join((*address, f"token = decode('{claim.token.hex()}', 'hex')", OF_THIS_TRANSACTION))
        failing = f"CAST('{GONE_MARK} ' || count(*) AS integer)"
        return f"SELECT CASE count(*) WHEN 1 THEN 1 ELSE {failing} END FROM {TABLE} WHERE {conditions}"

    def says_gone(self, error: BaseException) -> bool:
        return f'"{GONE_MARK} ' in str(error)

    def background_purge(self, limit: int) -> SqlFlow[int]:
        reply: Reply = yield SqlRequest(self.remove_near, {"limit": limit})
        return reply.written

    def impatient_purge(self, limit: int, path: str | None = None) -> SqlFlow[int]:
        # For this transaction only: behind a pooler the next client gets the same session.
        before = [SqlRequest("SELECT set_config('lock_timeout', '100ms', true)", {}, rows=True)]
        if path is not None:
            before.append(self.searching(path))
        replies: list[Reply] = yield [*before, SqlRequest(self.remove_near, {"limit": limit})]
        return replies[-1].written

    def begin_making(self) -> SqlFlow[None]:
        # The level may be the default of a role or a database.
        yield SqlRequest("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", {})

    def facts(self, database: Database) -> SqlFlow[dict[str, Any]]:
        from onefold.stores.postgres.facts import facts

        return facts(database)

    def sampler(self) -> TableSampler:
        from onefold.stores.samples.postgres_table import PostgresSampler

        return PostgresSampler(self)

    @property
    def foreign(self) -> Catalog:
        from onefold.stores.postgres.table_reader import PostgresCatalog

        return PostgresCatalog()

    def rows_of(self, column: RecordColumn) -> Rows:
        from onefold.stores.postgres.own_column import PostgresRows

        return PostgresRows(column)

    def missing_in(self) -> SqlFlow[str | None]:
        if (yield from self.schema_version()) > 0:
            return None
        return (yield from self.search_path())

    def search_path(self) -> SqlFlow[str]:
        reply: Reply = yield SqlRequest("SELECT current_setting('search_path')", {}, rows=True)
        return str(reply.rows[0][0])

    def searching(self, path: str) -> SqlRequest:
        return SqlRequest("SELECT set_config('search_path', :path::text, true)", {"path": path}, rows=True)

    def was_given_up(self, error: BaseException) -> bool:
        # psycopg and asyncpg have the code under another name than psycopg2.
        return FAILED_TRANSACTION in (getattr(error, "sqlstate", None), getattr(error, "pgcode", None))

    def claim_all(self, entries: Sequence[Entry]) -> SqlFlow[list[Record | Gone | None]]:
        asked = {entry.address: entry for entry in sorted(entries, key=_parts)}
        request = usual.writing_all(list(asked.values())) if len(asked) == len(entries) > 0 else None
        if request is None:
            return (yield from super().claim_all(entries))
        reply: Reply = yield request
        if not reply.rows:
            return [None] * len(entries)
        addresses, found, left = list(asked), dict[Address, Record | Gone | None](), list[Entry]()
        for number, *row in reply.rows:
            address = addresses[number - 1]
            known = None if row[0] is None else record(address, row)
            if known is None or known.ttl_left <= 0:
                # As in `claim`.
                left.append(asked[address])
            else:
                found[address] = None if asked[address].is_own(known.token) else known
        answers = yield from super().claim_all(left)
        found |= {entry.address: answer for entry, answer in zip(left, answers, strict=True)}
        return [found.get(entry.address) for entry in entries]

    def insert_all(self, entries: Sequence[Entry]) -> SqlRequest:
        return many.inserting(entries)

    def read_all(self, addresses: Sequence[Address]) -> SqlRequest:
        return many.reading(addresses)

    def extend_all(self, claims: Sequence[Claim], shortest: float = math.inf) -> SqlFlow[list[bool | None]]:
        return many.extend_all(claims, shortest)

    def close_all(self, closes: Sequence[Close]) -> SqlFlow[list[bool]]:
        return many.close_all(closes)

    def at_once(self, request: SqlRequest, claim: Claim) -> SqlFlow[Reply]:
        try:
            reply: Reply = yield replace(request, statement=f"{request.statement} AND {_AT_ONCE}")
        except Exception as error:
            if code_of(error) != LOCKED:
                raise
            raise RowHeld.of(claim) from error
        return reply


# The order of `Address.parts`, without a frame for each of them.
_parts: Final = attrgetter("address.scope", "address.operation", "address.key")


def _text(value: str) -> str:
    return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"


POSTGRES: Final = Postgres()
