"""SQLite's dialect: the tables of one file, and the statements that differ."""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from onefold._model import Claim
from onefold.stores.sql.dialect import Dialect, SqlFlow, SqlRequest
from onefold.stores.sql.records import ADDRESS, ALIVE, AT, TABLE, WRITTEN, put
from onefold.stores.sql.statements import assigned, columns, values

if TYPE_CHECKING:
    from onefold.stores.samples.table import TableSampler
    from onefold.stores.sql.connection import Database
    from onefold.stores.sql.foreign_tables import Catalog
    from onefold.stores.sql.own_column import Rows
    from onefold.transactions import RecordColumn

# Ordered for people: who and what on the left, bytes on the right. Times are seconds since 1970. BINARY compares bytes:
# `Key`, `KEY` and `key ` are three keys. No type here has a converter in Python's sqlite3.
_RECORDS = f"""
CREATE TABLE IF NOT EXISTS {TABLE} (
    scope TEXT NOT NULL COLLATE BINARY,
    operation TEXT NOT NULL COLLATE BINARY,
    key TEXT NOT NULL COLLATE BINARY,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    began REAL NOT NULL,
    changed REAL NOT NULL,
    lease_until REAL NOT NULL,
    expires REAL,
    bypasses INTEGER NOT NULL,
    remark TEXT NOT NULL,
    revision INTEGER NOT NULL,
    token BLOB NOT NULL,
    fingerprint BLOB,
    notes BLOB,
    omitted INTEGER NOT NULL,
    result BLOB,
    PRIMARY KEY (scope, operation, key)
)
"""

# An expired record is replaced.
_AT_ADDRESS: Final = ", ".join(ADDRESS)
UNLESS_ALIVE: Final = f"ON CONFLICT ({_AT_ADDRESS}) DO UPDATE SET {assigned(WRITTEN)} WHERE {TABLE}.expires <= :now"

MARK: Final = "onefold_record"


class Sqlite(Dialect):
    name = "SQLite"
    form = "sqlite"
    has_server = False

    versions = (
        (
            _RECORDS,
            f"CREATE INDEX IF NOT EXISTS {TABLE}_expires ON {TABLE} (expires) WHERE expires IS NOT NULL",
            "CREATE TABLE IF NOT EXISTS onefold_schema (version INTEGER NOT NULL, usable_from INTEGER NOT NULL)",
            "INSERT INTO onefold_schema SELECT 1, 1 WHERE NOT EXISTS (SELECT 1 FROM onefold_schema)",
        ),
        # `onefold held` looks for a few records among millions.
        (
            f"CREATE INDEX IF NOT EXISTS {TABLE}_held ON {TABLE} ({_AT_ADDRESS}) WHERE state = 'held'",
            "UPDATE onefold_schema SET version = 2 WHERE version < 2",
        ),
    )

    count_tables = f"SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('{TABLE}', 'onefold_schema')"

    insert = f"INSERT INTO {TABLE} ({columns()}) VALUES ({values()}) {UNLESS_ALIVE}"

    # By the rowid, which is in every index.
    remove_expired = (
        f"DELETE FROM {TABLE} WHERE rowid IN "
        f"(SELECT rowid FROM {TABLE} WHERE expires <= :now ORDER BY expires LIMIT :limit)"
    )

    def impatient_purge(self, limit: int, path: str | None = None) -> SqlFlow[int]:
        del path
        yield SqlRequest("PRAGMA busy_timeout = 0", {}, rows=True)
        return (yield from self.background_purge(limit))

    def facts(self, database: Database) -> SqlFlow[dict[str, Any]]:
        from onefold.stores.sqlite.facts import facts

        return facts(database)

    def sampler(self) -> TableSampler:
        from onefold.stores.samples.sqlite_file import SqliteSampler

        return SqliteSampler(self)

    @property
    def foreign(self) -> Catalog:
        from onefold.stores.sqlite.table_reader import SqliteCatalog

        return SqliteCatalog()

    def rows_of(self, column: RecordColumn) -> Rows:
        from onefold.stores.sqlite.own_column import SqliteRows

        return SqliteRows(column)

    def mark_of(self, claim: Claim) -> str:
        # Among several savepoints with one name SQLite takes the last; and a constant statement need not be prepared
        # each time.
        del claim
        return MARK

    def lacks_savepoint(self, error: BaseException) -> bool:
        # The error has no code of its own. A library in between may have wrapped it.
        return "no such savepoint" in str(error)


SQLITE: Final = Sqlite()


def _numbered(statement: str, names: Sequence[str], literals: Mapping[str, str] = {}) -> str:
    """Return a statement whose values are numbered, in the order of these names, or written into it.

    Python's sqlite3 looks each named value up in a dictionary, and looks for an adapter for each None.
    """
    return put(statement, lambda name: literals.get(name) or f"?{names.index(name) + 1}")


# Python 3.12 to 3.12.3 takes numbered values for named ones, and warns of each.
TAKES_NUMBERS: Final = not (3, 12) <= sys.version_info < (3, 12, 4)

# The statements of nearly every delivery, each with the order of its values: they look an address up, claim it, and end
# the claim.
_AT_A_TIME: Final = ("now", *ADDRESS)
LOOK: Final = _numbered(SQLITE.look, _AT_A_TIME)

# What a replay needs of a record that is done and has no notes: the fields of `DoneRow`.
LOOK_DONE: Final = _numbered(
    f"SELECT attempt, fingerprint, result, omitted, remark FROM {TABLE} "
    f"WHERE {AT} AND state = 'done' AND notes IS NULL AND {ALIVE}",
    _AT_A_TIME,
)

# The claim of an address for the first time. What its entry does not say is as in a new `Entry`.
INSERT_NEW: Final = _numbered(
    SQLITE.insert,
    (*_AT_A_TIME, "token", "lease", "ttl", "fingerprint"),
    {
        "state": "'running'",
        "attempt": "1",
        "age": "0",
        "bypasses": "0",
        "notes": "NULL",
        "result": "NULL",
        "omitted": "0",
        "remark": "''",
        "revision": "1",
    },
)

# The end of a run that has returned: with its result, or without one.
_DONE: Final = {"state": "'done'", "omitted": "0", "notes": "NULL", "remark": "''"}
END_WITH_RESULT: Final = _numbered(SQLITE.end, (*_AT_A_TIME, "token", "ttl", "result"), _DONE)
END_WITHOUT_RESULT: Final = _numbered(SQLITE.end, (*_AT_A_TIME, "token", "ttl"), _DONE | {"result": "NULL"})
