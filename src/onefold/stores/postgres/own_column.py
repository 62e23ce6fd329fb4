"""`RecordColumn` on PostgreSQL: an advisory lock admits one delivery of a key; the row shows whose it is.

Both end by themselves with the transaction, or with a savepoint that is rolled back.
"""

# ruff: noqa: S608 - the names in the statements were checked by `RecordColumn`, and are never values
# ruff: noqa: ARG002 - a row of the caller's has no leases and no memories

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

from onefold._model import Address, Claim, Ending, Entry
from onefold.errors import InProgress
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.own_column import RETRY_AFTER, Rows, causes
from onefold.stores.sql.row_values import Catalog, Row

# The type for a cast is without its length (-1): a cast to char(3) would turn `abcd` into `abc`.
CATALOG: Final = Catalog(
    "SELECT CAST(space.nspname AS text), CAST(own.relname AS text), CAST(part.attname AS text), "
    "format_type(part.atttypid, -1) "
    "FROM pg_index AS one JOIN pg_class AS own ON own.oid = one.indexrelid "
    "JOIN pg_class AS main ON main.oid = one.indrelid JOIN pg_namespace AS space ON space.oid = main.relnamespace "
    "CROSS JOIN LATERAL unnest(one.indkey) WITH ORDINALITY AS place (number, nth) "
    "LEFT JOIN pg_attribute AS part ON part.attrelid = one.indrelid AND part.attnum = place.number "
    "WHERE one.indrelid = to_regclass(quote_ident(CAST(:table AS text))) "
    "AND one.indisunique AND one.indisvalid AND one.indpred IS NULL AND place.nth <= one.indnkeyatts",
    columns="SELECT CAST(attname AS text), format_type(atttypid, atttypmod) FROM pg_attribute "
    "WHERE attnum > 0 AND NOT attisdropped AND attrelid = to_regclass(quote_ident(CAST(:table AS text)))",
    unfilled="SELECT CAST(attname AS text) FROM pg_attribute WHERE attnum > 0 AND NOT attisdropped AND NOT atthasdef "
    "AND attidentity = '' "
    "AND attrelid = to_regclass(quote_ident(CAST(:schema AS text)) || '.' || quote_ident(CAST(:table AS text)))",
    quote='"',
    equal="{column} = CAST(CAST(:{name} AS text) AS {type})",
    exact='CAST({column} AS text) COLLATE "C" = CAST(:{name} AS text)',
    value="CAST(CAST(:{name} AS text) AS {type})",
    read="CAST({column} AS text)",
    # Without a cast to the type itself, which would cut a text that is too long.
    write="CAST(:{name} AS text)",
    write_json="CAST(CAST(:{name} AS text) AS {type})",
    write_bytes="CAST(:{name} AS bytea)",
    unless_there=" ON CONFLICT DO NOTHING",
    folds_case=False,
)

# Types that return a value unchanged.
KEEPING: Final = ("text", "character varying")

UNIQUE_VIOLATION: Final = "23505"

# A value that is too long or of another form, and one that a CHECK refuses.
UNFIT: Final = ("22", "23514")

# A column that the database generates; ON CONFLICT on a table with rules, or with a DEFERRABLE constraint.
UNWRITABLE: Final = ("428C9", "0A000", "55000")

# A setting that ends with the transaction, or is undone with a savepoint, holds the marks of the open claims.
CLAIMS: Final = "coalesce(current_setting('onefold.claims', true), '')"

# A kept snapshot does not show what was committed during the wait for the lock: there, do not wait.
LOCKING: Final = (
    "SELECT CASE WHEN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') "
    "THEN pg_advisory_xact_lock(CAST(:number AS bigint)) IS NOT NULL "
    "ELSE pg_try_advisory_xact_lock(CAST(:number AS bigint)) END, "
    f"set_config('onefold.claims', {CLAIMS} || CAST(:mark AS text), true)"
)

# Whether the claim's mark exists; also removes it.
UNMARKING: Final = (
    "position(CAST(:mark AS text) IN onefold_claims) > 0, "
    "set_config('onefold.claims', replace(onefold_claims, CAST(:mark AS text), ''), true)"
)

# Whether this transaction, or a subtransaction of it, wrote the row. The writer of any other visible row has committed.
# `xmin` is the lower half of the transaction number, and ours are not below the transaction's own: a lower one belongs
# to another transaction, perhaps too old to be asked about.
_AFTER: Final = "((CAST(CAST(onefold_row.xmin AS text) AS bigint) - txid_current_if_assigned()) & 4294967295)"
OWN: Final = (
    f"CASE WHEN {_AFTER} < 2147483648 THEN txid_status(txid_current_if_assigned() + {_AFTER}) = 'in progress' "
    "ELSE false END"
)


class PostgresRows(Rows):
    """The operations of a store on the caller's own rows in PostgreSQL."""

    catalog = CATALOG

    def _was_written(self, entry: Entry) -> SqlFlow[Row | None]:
        address = entry.address
        locking = SqlRequest(LOCKING, {"number": self._number(address), "mark": _mark(entry.token)}, rows=True)
        locked, *found = yield [locking, *self._finding()]
        yield from self._take(*found)
        yield from self._check_kept(address)
        # In a statement of its own: it sees what was committed during the wait for the lock.
        there = yield from self._is_there(address)
        if there is None and not locked.rows[0][0]:
            raise InProgress.about(address, retry_after=RETRY_AFTER)
        return there

    def _check_kept(self, address: Address) -> SqlFlow[None]:
        """Refuse a key that the column's type would change."""
        changing = {name: type_ for name, type_ in self._found.types.items() if type_ not in KEEPING}
        if not changing:
            return
        kept = " AND ".join(
            f"CAST(CAST(CAST(:{name} AS text) AS {type_}) AS text) = CAST(:{name} AS text)"
            for name, type_ in changing.items()
        )
        values = self._values(address)
        try:
            reply: Reply = yield SqlRequest(f"SELECT {kept}", {name: values[name] for name in changing}, rows=True)
        except Exception as error:
            if not any(self._refuses_value(seen) for seen in causes(error)):
                raise
            # Without the server's words, which quote the key.
            raise self._unsuited(address, changing) from None
        if not reply.rows[0][0]:
            yield from self._refuse_merged(address)

    def finish_joined(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        found, values = self._found, self._values(claim.address) | {"mark": _mark(claim.token)}
        statement = (
            f"WITH before AS MATERIALIZED (SELECT {CLAIMS} AS onefold_claims) "
            f"SELECT {UNMARKING}, {found.exact}, {OWN} "
            f"FROM before LEFT JOIN {found.table} AS onefold_row ON {found.condition}"
        )
        reply: Reply = yield SqlRequest(statement, values, rows=True)
        inside, _, exact, _ = reply.rows[0]
        if not inside:
            return False
        if exact is None:
            yield from self._write(claim.address, ending)
            return True
        # Until a DEFERRABLE constraint is checked there can be two rows.
        if not all(row[2] for row in reply.rows):
            yield from self._refuse_merged(claim.address)
        if not all(row[3] for row in reply.rows):
            raise self._written_by_another(claim.address)
        yield from self._fill(claim.address, ending)
        return True

    def _is_own(self, address: Address) -> SqlFlow[bool]:
        # A trigger may have written it into a child table, and told the INSERT to do nothing.
        found = self._found
        statement = f"SELECT {OWN} FROM {found.table} AS onefold_row WHERE {found.condition}"
        reply: Reply = yield SqlRequest(statement, self._values(address), rows=True)
        return all(own for (own,) in reply.rows)

    def _refuses_value(self, error: BaseException) -> bool:
        return (_code(error) or "").startswith(UNFIT)

    def _refuses_column(self, error: BaseException) -> bool:
        return _code(error) in UNWRITABLE

    # No savepoint: each would be a subtransaction with a number of its own.

    def mark(self, claim: Claim) -> SqlFlow[None]:
        yield from ()

    def unmark(self, claim: Claim) -> SqlFlow[bool]:
        yield from ()
        return True

    def judge(self, claim: Claim, error: BaseException) -> SqlFlow[None]:
        # The transaction was aborted and cannot be queried: the error has to tell. A unique violation of this very
        # index occurs if a snapshot hides the other delivery's row.
        for seen in causes(error):
            # asyncpg has the attributes on the error itself, psycopg on its `diag`.
            told: Any = getattr(seen, "diag", seen)
            table, index = getattr(told, "table_name", None), getattr(told, "constraint_name", None)
            if _code(seen) == UNIQUE_VIOLATION and table == self._column.table and index in self._found.indexes:
                raise self._written_by_another(claim.address) from error
        yield from ()

    def _number(self, address: Address) -> int:
        """Return the number of the lock. Two keys with one number only wait for each other needlessly."""
        column = self._column
        parts = (column.table, column.name, column.scope, address.scope, address.key)
        return int.from_bytes(sha256(b"\0".join(str(part).encode() for part in parts)).digest()[:8], signed=True)


def _code(error: BaseException) -> str | None:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def _mark(token: bytes) -> str:
    return f" {token.hex()}"
