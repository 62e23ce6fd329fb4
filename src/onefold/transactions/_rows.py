"""`Column` over any link: the caller's own row is the record. It is there, or it is not; the handler writes it.

That a row is there after the handler proves nothing: a handler that writes it by `INSERT ... ON CONFLICT DO NOTHING`
goes on beside the row of another delivery. So deliveries of one key run one after the other, and the later one looks
when the row of the one before can be seen. Where the database can tell, the row is proven to be of this transaction.

Talks, as those of a dialect, so that they are written once for every driver and both colours.
"""

# ruff: noqa: S608 - the names in the statements were checked by `Column`, and are never values
# ruff: noqa: ARG002 - a row of the caller's has no leases, no memories and no place for a result

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

from onefold._model import Address, Claim, Ending, Entry, Gone, Memory, Record, State
from onefold.errors import InProgress, UsageError
from onefold.stores._mysql_errors import DUPLICATE, NO_SAVEPOINT, number_of
from onefold.stores._sql_dialect import Ask, Dialect, Reply, Talk
from onefold.stores._sql_postgres import OF_THIS_TRANSACTION
from onefold.stores._sql_sqlite import SQLITE as SQLITE_DIALECT
from onefold.transactions import Column, not_unique


class Catalog(NamedTuple):
    """How a database is asked for unique indexes, and how it wants names and values."""

    # One row for each column of each unique index: the index, the column (NULL: an expression), the column's type.
    unique: str
    # One row for each column of the table.
    columns: str
    quote: str
    # A key is text, and the column may have another type.
    equal: str = "{column} = :{name}"
    # Whether `Number` and `number` are the same column.
    folds_case: bool = True


# The primary key besides, because INTEGER PRIMARY KEY has no index.
SQLITE: Final = Catalog(
    "SELECT one.name, part.name, '' FROM pragma_index_list(:table) AS one, pragma_index_info(one.name) AS part "
    'WHERE one."unique" AND NOT one.partial '
    "UNION ALL SELECT '', name, '' FROM pragma_table_info(:table) WHERE pk",
    columns="SELECT name FROM pragma_table_info(:table)",
    quote='"',
)

# The type without its length (-1): a cast to char(3) would make `abcd` an `abc`.
POSTGRES: Final = Catalog(
    "SELECT CAST((SELECT relname FROM pg_class WHERE oid = one.indexrelid) AS text), CAST(part.attname AS text), "
    "format_type(part.atttypid, -1) "
    "FROM pg_index AS one CROSS JOIN LATERAL unnest(one.indkey) WITH ORDINALITY AS place (number, nth) "
    "LEFT JOIN pg_attribute AS part ON part.attrelid = one.indrelid AND part.attnum = place.number "
    "WHERE one.indrelid = to_regclass(quote_ident(CAST(:table AS text))) "
    "AND one.indisunique AND one.indisvalid AND one.indpred IS NULL AND place.nth <= one.indnkeyatts",
    columns="SELECT CAST(attname AS text) FROM pg_attribute WHERE attnum > 0 AND NOT attisdropped "
    "AND attrelid = to_regclass(quote_ident(CAST(:table AS text)))",
    quote='"',
    equal="{column} = CAST(CAST(:{name} AS text) AS {type})",
    folds_case=False,
)

# By the column's own collation, so that its index is used; then byte by byte, because a collation may take `Key` for
# `KEY`: there the handler's own INSERT fails, and nothing is taken for done that is not.
MYSQL: Final = Catalog(
    "SELECT index_name, column_name, '' FROM information_schema.statistics "
    "WHERE table_schema = DATABASE() AND table_name = _utf8mb4 :table AND non_unique = 0",
    columns="SELECT column_name FROM information_schema.columns "
    "WHERE table_schema = DATABASE() AND table_name = _utf8mb4 :table",
    quote="`",
    equal="{column} = _utf8mb4 :{name} AND CAST(CONVERT({column} USING utf8mb4) AS BINARY) = :{name}",
)

CATALOGS: Final = {"mariadb": MYSQL, "mysql": MYSQL, "postgresql": POSTGRES, "sqlite": SQLITE}


class Found(NamedTuple):
    """A column that was found to be unique: the condition that finds a row, and the indexes that make it so."""

    condition: str
    indexes: frozenset[str]


# For one database.
Known = dict[Column, Found]

# How long a delivery waits for another one of the same key, where the database has no lock that ends with a
# transaction. Whoever waits for longer is told to come again.
WAIT_SECONDS: Final = 10

# When to come again, if another delivery of the same key is in the way.
RETRY_AFTER: Final = 1.0

UNIQUE_VIOLATION: Final = "23505"

# So many keys a connection marks as written and perhaps not committed yet. More of them in one transaction are rare,
# and a mark too many costs a duplicate no more than another kind of read.
MARKS: Final = 64


def rows_of(column: Column, catalog: Catalog, known: Known) -> Rows:
    """The operations of a store on rows of the caller's, as this database needs them."""
    return _KINDS.get(catalog, Rows)(column, catalog, known)


class Rows(Dialect):
    """The operations of a store, on rows of the caller's. This is for SQLite, which has one writer at a time."""

    def __init__(self, column: Column, catalog: Catalog, known: Known) -> None:
        self._column = column
        self._catalog = catalog
        self._known = known

    def claim(self, entry: Entry, replacing: Record | None = None) -> Talk[Record | Gone | None]:
        address, table = entry.address, self._column.table
        if replacing is not None:
            raise UsageError(
                f"{address.operation} [key {address.digest}]: bypass=True cannot run it again, because its row in "
                f"{table} is there. Nothing ran. Delete the row before"
            )
        self._check_scope(address)
        if not (yield from self._was_written(address)):
            return None
        return Record(
            address=address,
            token=b"",
            revision=1,
            state=State.DONE,
            attempt=1,
            lease_left=0.0,
            stay_left=math.inf,
            age=0.0,
            omitted=True,
            remark=f"the record is the row in {table}",
        )

    def finish_joined(self, claim: Claim, ending: Ending) -> Talk[bool]:
        if not (yield from self.unmark(claim)):
            return False
        if not (yield from self._look(claim.address, "1")):
            raise self._unwritten(claim.address)
        return True

    def release(self, claim: Claim, memory: Memory | None = None) -> Talk[bool]:
        yield from ()
        return True

    def lacks_savepoint(self, error: BaseException) -> bool:
        return SQLITE_DIALECT.lacks_savepoint(error)

    def _was_written(self, address: Address) -> Talk[bool]:
        """Whether the row was there before. When this has ended, no other delivery of the key is let in."""
        return bool((yield from self._look(address, "1")))

    def _look(self, address: Address, what: str, after: str = "") -> Talk[Sequence[Any]]:
        """What there is of the row, if there is one."""
        found = yield from self._found()
        statement = f"SELECT {what} FROM {self._quoted(self._column.table)} WHERE {found.condition}{after}"
        reply: Reply = yield Ask(statement, self._values(address), rows=True)
        return reply.rows[0] if reply.rows else ()

    def _values(self, address: Address) -> dict[str, str]:
        return {"key": address.key} | ({"scope": address.scope} if self._column.scope else {})

    def _unwritten(self, address: Address) -> UsageError:
        column = self._column
        return UsageError(
            f"{address.operation} [key {address.digest}]: the handler has to write the row whose "
            f"{column.table}.{column.name} is the key, and it did not. Roll back, and deliver it again"
        )

    def _written_by_another(self, address: Address) -> InProgress:
        column, error = self._column, InProgress.about(address, retry_after=RETRY_AFTER)
        words = (
            f"{address.operation} [key {address.digest}]: the row in {column.table} whose {column.name} is the key was "
            "written by another transaction meanwhile, and not by this handler. Roll back, and deliver it again: then "
            "it is replayed"
        )
        error.args = (words,)
        return error

    def _check_scope(self, address: Address) -> None:
        column = self._column
        if bool(address.scope) != (column.scope is not None):
            raise UsageError(
                f"record={column!r} and a delivery with {'a' if address.scope else 'no'} scope: both "
                "have one, or neither. Name the tenant's column with Column(..., scope=...), and the tenant with scope="
            )

    def _digest(self, address: Address) -> bytes:
        """Of the row. Two of one digest wait for each other without need, and that is all."""
        parts = (*self._column, address.scope, address.key)
        return sha256(b"\0".join(str(part).encode() for part in parts)).digest()

    def _found(self) -> Talk[Found]:
        """How a row is found, once the index is: nothing else keeps two writers apart."""
        known = self._known.get(self._column)
        if known is None:
            known = self._known[self._column] = yield from self._looked_up()
        return known

    def _looked_up(self) -> Talk[Found]:
        column, catalog = self._column, self._catalog
        reply: Reply = yield Ask(catalog.unique, {"table": column.table}, rows=True)
        wanted = {self._fold(name): name for name in (column.name, column.scope) if name}
        unique: dict[str, set[str | None]] = {}
        types: dict[str, str] = {}
        for index, name, type_ in reply.rows:
            unique.setdefault(index, set()).add(name and self._fold(name))
            types[self._fold(name or "")] = type_
        indexes = frozenset(index for index, columns in unique.items() if columns == set(wanted))
        if not indexes:
            there: Reply = yield Ask(catalog.columns, {"table": column.table}, rows=True)
            raise not_unique(column, wanted, {self._fold(name) for (name,) in there.rows})
        names = {"key": column.name} | ({"scope": column.scope} if column.scope else {})
        conditions = (
            catalog.equal.format(column=self._quoted(part), name=name, type=types[self._fold(part)])
            for name, part in names.items()
        )
        return Found(" AND ".join(conditions), indexes)

    def _quoted(self, name: str) -> str:
        # In quotes, because a table may be called `order`.
        return f"{self._catalog.quote}{name}{self._catalog.quote}"

    def _fold(self, name: str) -> str:
        return name.lower() if self._catalog.folds_case else name


class PostgresRows(Rows):
    """A lock that ends with the transaction lets deliveries of one key in, and the row tells which one wrote it."""

    # Of the transaction in which the claim was made: another one has begun at another moment.
    _began: str = ""

    def _was_written(self, address: Address) -> Talk[bool]:
        condition = (yield from self._found()).condition
        number = int.from_bytes(self._digest(address)[:8], signed=True)
        # A snapshot that is kept does not show what was committed while it was waited for: there nobody waits.
        locking = (
            "SELECT CASE WHEN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') "
            "THEN pg_advisory_xact_lock(CAST(:number AS bigint)) IS NOT NULL "
            "ELSE pg_try_advisory_xact_lock(CAST(:number AS bigint)) END"
        )
        let_in, found = yield [
            Ask(locking, {"number": number}, rows=True),
            Ask(self._telling(condition), self._values(address), rows=True),
        ]
        self._began, ours = found.rows[0]
        if ours is None and not let_in.rows[0][0]:
            raise InProgress.about(address, retry_after=RETRY_AFTER)
        return ours is not None

    def finish_joined(self, claim: Claim, ending: Ending) -> Talk[bool]:
        condition = (yield from self._found()).condition
        reply: Reply = yield Ask(self._telling(condition), self._values(claim.address), rows=True)
        began, ours = reply.rows[0]
        if began != self._began:
            return False
        if ours is None:
            raise self._unwritten(claim.address)
        if not ours:
            raise self._written_by_another(claim.address)
        return True

    def mark(self, claim: Claim) -> Talk[None]:
        yield from ()

    def unmark(self, claim: Claim) -> Talk[bool]:
        yield from ()
        return True

    def judge(self, claim: Claim, error: BaseException) -> Talk[None]:
        # The transaction was given up, and cannot be asked: the error has to tell. A unique violation of this very
        # index comes where a snapshot hides the row of the other.
        found = self._known.get(self._column)
        for seen in causes(error) if found else ():
            # asyncpg has it on the error, psycopg beside it.
            told: Any = getattr(seen, "diag", seen)
            code = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
            table, index = getattr(told, "table_name", None), getattr(told, "constraint_name", None)
            if code == UNIQUE_VIOLATION and table == self._column.table and found and index in found.indexes:
                raise self._written_by_another(claim.address) from error
        yield from ()

    def _telling(self, condition: str) -> str:
        """When the transaction began, and whether it has written the row (NULL: there is none)."""
        table = self._quoted(self._column.table)
        return f"SELECT CAST(now() AS text), (SELECT {OF_THIS_TRANSACTION} FROM {table} WHERE {condition})"


class MysqlRows(Rows):
    """Named locks let deliveries of one key in, because there are none that end with a transaction.

    One is held while a handler runs. It is given up before the caller commits; so a second one marks the key as
    written, and whoever finds that mark looks by a locking read, which waits for the other's transaction. (It is not
    the usual way to look: where there is no row it locks the gap, and neighbours would wait for each other.)
    """

    holds_locks = True

    def _was_written(self, address: Address) -> Talk[bool]:
        running, written = self._names(address)
        yield from self._found()
        reply: Reply = yield Ask(
            f"SELECT GET_LOCK('{running}', {WAIT_SECONDS}), IS_USED_LOCK('{written}') <> CONNECTION_ID()", {}, rows=True
        )
        let_in, marked = (int(cell or 0) for cell in reply.rows[0])
        found = yield from self._look(address, "1", "" if let_in and not marked else SHARED)
        if found and let_in:
            yield from self._leave(address)
        if not found and not let_in:
            raise InProgress.about(address, retry_after=RETRY_AFTER)
        return bool(found)

    def finish_joined(self, claim: Claim, ending: Ending) -> Talk[bool]:
        address = claim.address
        inside = yield from self.unmark(claim)
        found = inside and (yield from self._look(address, "1"))
        if found:
            yield from self._leave_mark(address)
            return True
        # A snapshot does not show the row of another.
        others = inside and (yield from self._look(address, "1", SHARED))
        yield from self._leave(address)
        if inside:
            raise self._written_by_another(address) if others else self._unwritten(address)
        return False

    def release(self, claim: Claim, memory: Memory | None = None) -> Talk[bool]:
        yield from self._leave(claim.address)
        return True

    def lacks_savepoint(self, error: BaseException) -> bool:
        return number_of(error) == NO_SAVEPOINT

    def judge(self, claim: Claim, error: BaseException) -> Talk[None]:
        # A duplicate may be another one's row, which a snapshot hides; or the handler's own mistake.
        if not any(number_of(seen) == DUPLICATE for seen in causes(error)):
            return
        if (yield from self._look(claim.address, "1")):
            return
        if (yield from self._look(claim.address, "1", SHARED)):
            raise self._written_by_another(claim.address) from error

    def _leave(self, address: Address) -> Talk[None]:
        running, _ = self._names(address)
        yield Ask(f"SELECT RELEASE_LOCK('{running}')", {}, rows=True)

    def _leave_mark(self, address: Address) -> Talk[None]:
        """Let the next one in, who finds the mark. It takes the place of an older one of this connection."""
        running, written = self._names(address)
        place = f"@onefold_written_{self._digest(address)[0] % MARKS}"
        yield Ask(
            f"SET @onefold_left = GET_LOCK('{written}', 0), @onefold_left = RELEASE_LOCK('{running}'), "
            f"@onefold_left = RELEASE_LOCK(COALESCE({place}, '-')), {place} = '{written}'",
            {},
        )

    def _names(self, address: Address) -> tuple[str, str]:
        digest = self._digest(address).hex()[:40]
        return f"onefold.runs.{digest}", f"onefold.written.{digest}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it was made of by the libraries between."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


SHARED: Final = " LOCK IN SHARE MODE"

_KINDS: Final[dict[Catalog, type[Rows]]] = {POSTGRES: PostgresRows, MYSQL: MysqlRows}
