"""Records as SQL: the table, the statements, and the way from our words to parameters and from rows to records.

Pure: no driver, no I/O, no clock. Each store sends the statements in its own way.

Parameters are named (`:token`). Durations go in and come out, and `:now` is the store's clock: a moment never crosses
the seam. A duration without an end is NULL, and stays NULL whatever is added to it, so that NULL is forever.
"""

# ruff: noqa: S608 - statements are made of the names in this file, never of values

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from onefold._model import Address, Claim, Ending, Entry, Memory, Record, State
from onefold.stores.base import Query

TABLE: Final = "onefold_records"

# The form of the tables that this code writes. A newer form whose `usable_from` is not above it is usable too:
# so two versions of the library work on one table during a rolling deploy.
VERSION: Final = 1

Parameters = dict[str, Any]

ADDRESS: Final = ("scope", "operation", "key")

# What a claim writes besides the address: a whole record.
WRITTEN: Final = {
    "state": ":state",
    "attempt": ":attempt",
    "began": ":now - :age",
    "changed": ":now",
    "lease_until": ":now + :lease",
    "expires": ":now + :stay",
    "bypasses": ":bypasses",
    "remark": ":remark",
    "revision": ":revision",
    "token": ":token",
    "fingerprint": ":fingerprint",
    "notes": ":notes",
    "omitted": ":omitted",
    "result": ":result",
}

REWRITTEN: Final = ", ".join(f"{column} = {value}" for column, value in WRITTEN.items())

# In the order in which `record` takes them.
READ: Final = (
    "token, revision, state, attempt, lease_until - :now, expires - :now, :now - began, "
    "bypasses, fingerprint, notes, result, omitted, remark"
)

AT: Final = "scope = :scope AND operation = :operation AND key = :key"
ALIVE: Final = "(expires IS NULL OR expires > :now)"
OURS: Final = f"{AT} AND token = :token AND {ALIVE}"


class Dialect(NamedTuple):
    """The statements of one database. The first fields are its own, the others are the same everywhere."""

    # Each does nothing where its work is done already.
    create: tuple[str, ...]
    # How many of the tables are there.
    count_tables: str
    # Writes if the address is free, or if its record is past its stay.
    insert: str

    version: str = "SELECT version, usable_from FROM onefold_schema"

    read: str = f"SELECT {READ} FROM {TABLE} WHERE {AT} AND {ALIVE}"

    # Writes if the record is still what its finder saw: neither token nor revision alone would be enough.
    replace: str = (
        f"UPDATE {TABLE} SET {REWRITTEN} WHERE {AT} AND token = :seen_token AND revision = :seen_revision AND {ALIVE}"
    )

    # A late heartbeat must not give an end to what is held.
    extend: str = (
        f"UPDATE {TABLE} SET revision = revision + 1, changed = :now, notes = COALESCE(:notes, notes), "
        "lease_until = CASE state WHEN 'running' THEN :now + :lease ELSE lease_until END, "
        "expires = CASE state WHEN 'running' THEN :now + :stay ELSE expires END "
        f"WHERE {OURS} AND state IN ('running', 'held')"
    )

    finish: str = (
        f"UPDATE {TABLE} SET revision = revision + 1, changed = :now, lease_until = :now, expires = :now + :stay, "
        "state = :state, notes = :notes, result = :result, omitted = :omitted, remark = :remark "
        f"WHERE {OURS}"
    )

    leave_open: str = (
        f"UPDATE {TABLE} SET revision = revision + 1, changed = :now, lease_until = :now, expires = :now + :stay, "
        "state = 'open', attempt = :attempt, notes = :notes, remark = :remark "
        f"WHERE {OURS}"
    )

    forget: str = f"DELETE FROM {TABLE} WHERE {OURS}"

    purge: str = (
        f"DELETE FROM {TABLE} WHERE (scope, operation, key) IN "
        f"(SELECT scope, operation, key FROM {TABLE} WHERE expires <= :now ORDER BY expires LIMIT :limit)"
    )

    def browse(self, query: Query, limit: int) -> tuple[str, Parameters]:
        """The statement for one page, in the order of the primary key."""
        wanted: Parameters = {"scope": query.scope, "operation": query.operation, "key": query.key}
        wanted["state"] = None if query.state is None else query.state.value
        values = {name: value for name, value in wanted.items() if value is not None}
        conditions = [ALIVE, *(f"{name} = :{name}" for name in values)]
        if query.after is not None:
            conditions.append("(scope, operation, key) > (:after_scope, :after_operation, :after_key)")
            values |= {f"after_{name}": getattr(query.after, name) for name in ADDRESS}
        statement = (
            f"SELECT {', '.join(ADDRESS)}, {READ} FROM {TABLE} "
            f"WHERE {' AND '.join(conditions)} ORDER BY {', '.join(ADDRESS)} LIMIT :limit"
        )
        return statement, values | {"limit": max(limit, 0)}


# For people first: who and what on the left, bytes on the right. Times are seconds since 1970.
# BINARY compares bytes: `Key`, `KEY` and `key ` are three keys. No type here has a converter in Python's sqlite3.
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

SQLITE: Final = Dialect(
    create=(
        _RECORDS,
        f"CREATE INDEX IF NOT EXISTS {TABLE}_expires ON {TABLE} (expires) WHERE expires IS NOT NULL",
        "CREATE TABLE IF NOT EXISTS onefold_schema (version INTEGER NOT NULL, usable_from INTEGER NOT NULL)",
        f"INSERT INTO onefold_schema SELECT {VERSION}, {VERSION} WHERE NOT EXISTS (SELECT 1 FROM onefold_schema)",
    ),
    count_tables=f"SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('{TABLE}', 'onefold_schema')",
    insert=(
        f"INSERT INTO {TABLE} ({', '.join((*ADDRESS, *WRITTEN))}) "
        f"VALUES (:scope, :operation, :key, {', '.join(WRITTEN.values())}) "
        f"ON CONFLICT ({', '.join(ADDRESS)}) DO UPDATE SET {REWRITTEN} WHERE {TABLE}.expires <= :now"
    ),
    # By the row's number, which is in every index.
    purge=(
        f"DELETE FROM {TABLE} WHERE rowid IN "
        f"(SELECT rowid FROM {TABLE} WHERE expires <= :now ORDER BY expires LIMIT :limit)"
    ),
)


def of_address(address: Address) -> Parameters:
    return {"scope": address.scope, "operation": address.operation, "key": address.key}


def of_entry(entry: Entry, replacing: Record | None = None) -> Parameters:
    """What a claim writes. The revision goes on only where the token stays, as it does when a record is marked held."""
    values = of_address(entry.address) | {
        "state": entry.state.value,
        "attempt": entry.attempt,
        "age": entry.age,
        "lease": entry.lease,
        "stay": _or_null(entry.stay),
        "bypasses": entry.bypasses,
        "remark": entry.remark,
        "revision": 1,
        "token": entry.token,
        "fingerprint": entry.fingerprint,
        "notes": entry.notes,
        "omitted": int(entry.omitted),
        "result": entry.result,
    }
    if replacing is not None:
        values |= {"seen_token": replacing.token, "seen_revision": replacing.revision}
        if replacing.token == entry.token:
            values["revision"] = replacing.revision + 1
    return values


def of_claim(claim: Claim) -> Parameters:
    return of_address(claim.address) | {"token": claim.token, "lease": claim.lease, "stay": _or_null(claim.stay)}


def of_ending(ending: Ending) -> Parameters:
    return {
        "state": ending.state.value,
        "stay": _or_null(ending.stay),
        "notes": ending.notes,
        "result": ending.result,
        "omitted": int(ending.omitted),
        "remark": ending.remark,
    }


def of_memory(memory: Memory) -> Parameters:
    return {
        "stay": _or_null(memory.stay),
        "attempt": memory.attempt,
        "notes": memory.notes,
        "remark": memory.remark,
    }


def record(address: Address, row: Sequence[Any]) -> Record:
    """The record of a row whose columns are those of `READ`."""
    token, revision, state, attempt, lease_left, stay_left, age, bypasses, *contents = row
    fingerprint, notes, result, omitted, remark = contents
    return Record(
        address=address,
        token=token,
        revision=revision,
        state=State(state),
        attempt=attempt,
        lease_left=lease_left,
        stay_left=math.inf if stay_left is None else stay_left,
        age=age,
        bypasses=bypasses,
        fingerprint=fingerprint,
        notes=notes,
        result=result,
        omitted=bool(omitted),
        remark=remark,
    )


def is_own(found: Record, entry: Entry, replacing: Record | None = None) -> bool:
    """Whether this claim was written before, and only its answer got lost. Marking held borrows a token."""
    borrowed = replacing is not None and entry.token == replacing.token
    return found.token == entry.token and not borrowed


def _or_null(stay: float) -> float | None:
    return None if math.isinf(stay) else stay
