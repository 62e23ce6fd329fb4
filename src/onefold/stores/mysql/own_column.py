"""`RecordColumn` on MySQL and MariaDB: a record of ours beside the row admits one delivery of a key at a time.

There is no other lock that ends with the transaction. A named one (`GET_LOCK`) belongs to the connection, and outlives
commit and rollback. A locking read of a missing row locks the gap, so that neighbours wait for each other; at READ
COMMITTED it locks nothing.

The record is written first, and any other delivery that writes it waits for the end of the transaction. It stays for a
day: a transaction with an older snapshot does not see a row committed since, but is refused by the record, and then
looks at the row itself. Only the row tells what is done.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, NoReturn

from onefold._model import OPERATION_MAX, Address, Claim, Ending, Entry, Record, State
from onefold.errors import InProgress, OnefoldError, UsageError
from onefold.stores.mysql.errors import DUPLICATE, NO_SAVEPOINT, number_of
from onefold.stores.sql.dialect import Dialect, Reply, SqlFlow
from onefold.stores.sql.own_column import RETRY_AFTER, Rows, causes
from onefold.stores.sql.row_values import Catalog, Kept, Row
from onefold.transactions import RecordColumn

CATALOG: Final = Catalog(
    # An index on the first characters of a column is none on the column. Types need no cast here: in their place is
    # whether the table's engine has transactions.
    "SELECT table_schema, index_name, CASE WHEN sub_part IS NULL THEN column_name END, "
    "(SELECT transactions FROM information_schema.engines WHERE engine = (SELECT engine "
    "FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = _utf8mb4 :table)) "
    "FROM information_schema.statistics "
    "WHERE table_schema = DATABASE() AND table_name = _utf8mb4 :table AND non_unique = 0",
    columns="SELECT column_name, CONCAT(column_type, COALESCE(CONCAT(' COLLATE ', collation_name), '')) "
    "FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = _utf8mb4 :table",
    # MariaDB shows the default of a column that may be NULL as a word.
    unfilled="SELECT column_name FROM information_schema.columns "
    "WHERE table_schema = _utf8mb4 :schema AND table_name = _utf8mb4 :table "
    "AND COALESCE(column_default, 'NULL') = 'NULL' "
    "AND INSTR(extra, 'auto_increment') = 0 AND INSTR(extra, 'GENERATED') = 0",
    quote="`",
    equal="{column} = _utf8mb4 :{name}",
    exact="CAST(CONVERT({column} USING utf8mb4) AS BINARY) = :{name}",
    value="_utf8mb4 :{name}",
    read="CAST(CONVERT({column} USING utf8mb4) AS BINARY)",
    # An introducer does not stand before NULL.
    write="CONVERT(:{name} USING utf8mb4)",
    write_json="CONVERT(:{name} USING utf8mb4)",
    write_bytes=":{name}",
    counts_matched=False,
)

# Longer than any transaction that may have an older snapshot.
TTL: Final = 86_400.0

# The other transaction took longer than innodb_lock_wait_timeout.
WAITED: Final = 1205

# Too long, out of range, of another form, no JSON, a CHECK of MySQL and of MariaDB.
UNFIT: Final = frozenset({1264, 1265, 1366, 1406, 3140, 3819, 4025})

# A column that the database generates, on MySQL and on MariaDB.
GENERATED: Final = frozenset({3105, 1906})

# The key has characters that the column's character set does not have.
MIXED: Final = 1267

# Reads committed rows, whatever the transaction's snapshot shows.
SHARED: Final = " LOCK IN SHARE MODE"


# How many bytes a column without a declared length takes.
ROOM: Final = {"tiny": 255, "medium": 2**24 - 1, "long": 2**32 - 1, "": 2**16 - 1}
_TYPE: Final = re.compile(r"(?:var)?(?:char|binary)\((?P<length>\d+)\)|(?P<size>tiny|medium|long|)(?:text|blob)")


class Unclear(OnefoldError):
    """The row is there, and nobody can tell whether the handler has written it."""


class MysqlRows(Rows):
    """The operations of a store on the caller's own rows in MySQL and MariaDB."""

    catalog = CATALOG
    needs_tables = True

    def __init__(self, column: RecordColumn, records: Dialect) -> None:
        super().__init__(column)
        self._records = records

    def schema_version(self) -> SqlFlow[int]:
        return self._records.schema_version()

    def upgrade(self, version: int) -> SqlFlow[None]:
        return self._records.upgrade(version)

    def _was_written(self, entry: Entry) -> SqlFlow[Row | None]:
        # Before the lock: at REPEATABLE READ the first read of a table fixes the snapshot for all later ones, and this
        # read does not.
        yield from self._find()
        try:
            return (yield from self._locked(entry))
        except Exception as error:
            if number_of(error) == MIXED:
                described = yield from self._columns()
                types = {role: described[self._fold(name)] for role, name in self._names.items()}
                raise self._unsuited(entry.address, types) from None
            if number_of(error) != WAITED:
                raise
            raise InProgress.about(entry.address, retry_after=RETRY_AFTER) from error

    def _locked(self, entry: Entry) -> SqlFlow[Row | None]:
        ours = Entry(address=self._address_of_ours(entry.address), token=entry.token, state=State.DONE, ttl=TTL)
        found = yield from self._records.claim_joined(ours)
        if found is None:
            return (yield from self._is_there(entry.address))
        # Another delivery has left its record, and perhaps no row.
        row = yield from self._is_there(entry.address, SHARED)
        if row is not None:
            return row
        replacing = found if isinstance(found, Record) else None
        if (yield from self._records.claim_joined(ours, replacing)) is not None:
            raise InProgress.about(entry.address, retry_after=RETRY_AFTER)
        return None

    def _take(self, reply: Reply, described: Reply | None = None) -> SqlFlow[None]:
        if any(transactions != "YES" for *_, transactions in reply.rows):
            raise UsageError(
                f"record={self._column!r}: the engine of {self._column.table} has no transactions: the row of a "
                "handler that fails would stay, and count as done. Nothing ran. Use InnoDB"
            )
        yield from super()._take(reply, described)

    def _refuse_unwritten(self, address: Address, unfilled: list[str]) -> SqlFlow[NoReturn]:
        # A snapshot may hide another delivery's row.
        if (yield from self._is_there(address, SHARED)) is not None:
            raise self._written_by_another(address)
        yield from super()._refuse_unwritten(address, unfilled)
        raise AssertionError("it was refused")

    def _filled(self, address: Address, ending: Ending) -> dict[str, Any]:
        # Outside its strict mode, the server cuts what is too long: a duplicate would get another result.
        filled = super()._filled(address, ending)
        for kept, value in zip(self._found.kept.values(), filled.values(), strict=True):
            if value is not None and len(_measured(value, kept)) > _room(kept):
                raise self._unfit(address, {})
        return filled

    def _is_duplicate(self, error: BaseException) -> bool:
        return number_of(error) == DUPLICATE

    def _refuses_value(self, error: BaseException) -> bool:
        return number_of(error) in UNFIT

    def _refuses_column(self, error: BaseException) -> bool:
        return number_of(error) in GENERATED

    def lacks_savepoint(self, error: BaseException) -> bool:
        return number_of(error) == NO_SAVEPOINT

    def judge(self, claim: Claim, error: BaseException) -> SqlFlow[None]:
        # A duplicate may be another delivery's row, hidden by a snapshot, or the handler's own mistake.
        if not any(number_of(seen) == DUPLICATE for seen in causes(error)):
            return
        if (yield from self._is_there(claim.address)) is not None:
            raise Unclear(self._column.table)
        if (yield from self._is_there(claim.address, SHARED)) is not None:
            raise self._written_by_another(claim.address) from error

    def _address_of_ours(self, address: Address) -> Address:
        """Return the address of our record: the same for every operation on the column."""
        column = self._column
        return Address(address.scope, f"record={column.table}.{column.name}".lower()[:OPERATION_MAX], address.key)


def _room(kept: Kept) -> float:
    """Return how much a column takes: characters, if its type has a length of them, or else bytes."""
    found = _TYPE.match(kept.type.lower())
    if found is None:
        return math.inf
    return int(found["length"]) if found["length"] else ROOM[found["size"]]


def _measured(value: str | bytes, kept: Kept) -> str | bytes:
    """Return a value as the column counts it."""
    return value if isinstance(value, bytes) or "char(" in kept.type.lower() else value.encode()
