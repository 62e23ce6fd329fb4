"""The statements for a usual record, as nearly all are: a first attempt, and an ending without a result.

They have fewer values than those for any record, and are less work for the server. A record in the way is read by the
statement that was refused, so that a duplicate is one statement, too.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Final

from msgspec.structs import fields

from onefold._model import Claim, Ending, Entry, State
from onefold.stores.postgres.marks import MARKING
from onefold.stores.postgres.statements.fragments import AT_ADDRESS, DUE, ENDED, SELECTED, typed
from onefold.stores.sql.dialect import SqlRequest
from onefold.stores.sql.records import AT, OURS, TABLE, Parameters, put, stored_ttl
from onefold.stores.sql.statements import assigned

# On Python 3.11 accessing an enum's members is slow.
_RUNNING: Final = State.RUNNING
_DONE: Final = State.DONE

_WRITTEN: Final = {
    "scope": ":scope",
    "operation": ":operation",
    "key": ":key",
    "attempt": "1",
    "began": ":now",
    "changed": ":now",
    "expires": ":now + :ttl",
    "due": DUE,
    "remark": "''",
    "revision": "1",
    "token": ":token",
    "fingerprint": ":fingerprint",
}


def inserting(written: Mapping[str, str], returning: str = "1") -> str:
    """Return the statement that writes a record, and returns no row; or the record in the way, which may have expired.

    A refused insert has waited for the other transaction, if it was open, and holds no lock. If that transaction has
    written the record meanwhile, the statement does not see it: then it returns a row of NULLs. Where the record was
    written, nothing is read of the table: at SERIALIZABLE each read is a possible conflict.
    """
    columns, values = ", ".join(written), ", ".join(written.values())
    return typed(
        f"WITH written AS (INSERT INTO {TABLE} ({columns}) VALUES ({values}) "
        f"ON CONFLICT ({AT_ADDRESS}) DO NOTHING RETURNING {returning}) "
        f"SELECT {SELECTED} FROM (SELECT WHERE NOT EXISTS (SELECT 1 FROM written)) refused LEFT JOIN {TABLE} ON {AT}"
    )


INSERT_RUNNING: Final = inserting(_WRITTEN | {"state": "'running'", "lease_until": ":now + :lease"})
_DONE_AT_ONCE: Final = _WRITTEN | {"state": "'done'"}
INSERT_DONE: Final = inserting(_DONE_AT_ONCE)
INSERT_MARKED: Final = inserting(_DONE_AT_ONCE, MARKING)

# Many that share all but key, token and fingerprint, written in the order of the keys, which is that of locking. A row
# is returned for each that was refused: as in `inserting`, with its number.
_APART: Final = ("key", "token", "fingerprint")


def _inserting_all(written: Mapping[str, str]) -> str:
    values = (
        put(value, lambda name: f"asked_{name}" if name in _APART else f":{name}") if ":" in value else value
        for value in written.values()
    )
    at_asked = "scope = :scope AND operation = :operation AND key = asked_key"
    return typed(
        "WITH asked AS (SELECT * FROM unnest(:keys::text[], :tokens::bytea[], :fingerprints::bytea[]) "
        "WITH ORDINALITY AS asked (asked_key, asked_token, asked_fingerprint, asked_number)), "
        f"written AS (INSERT INTO {TABLE} ({', '.join(written)}) SELECT {', '.join(values)} FROM asked "
        f"ORDER BY asked_number ON CONFLICT ({AT_ADDRESS}) DO NOTHING RETURNING key AS written_key) "
        # With OFFSET, each is looked up by itself: the planner does not know how few they are.
        f"SELECT asked_number, there.* FROM asked "
        f"LEFT JOIN LATERAL (SELECT {SELECTED} FROM {TABLE} WHERE {at_asked} OFFSET 0) AS there ON true "
        # Nearly always all were written: then nothing is looked up.
        "WHERE (SELECT count(*) FROM written) < cardinality(:keys::text[]) "
        "AND asked_key NOT IN (SELECT written_key FROM written)"
    )


_INSERT_ALL: Final = {
    _RUNNING: _inserting_all(_WRITTEN | {"state": "'running'", "lease_until": ":now + :lease"}),
    _DONE: _inserting_all(_DONE_AT_ONCE),
}

_WITHOUT_RESULT: Final = {"state": "'done'", "notes": "NULL", "result": "NULL", "omitted": "NULL", "remark": "''"}

END: Final = typed(f"UPDATE {TABLE} SET {assigned(ENDED | _WITHOUT_RESULT | {'held': 'NULL'})} WHERE {OURS}")

# The statements store these of an entry, and every other field at its default. Only a running record has a lease.
_STORED: Final = ("address", "token", "state", "lease", "ttl", "fingerprint")
_OTHERS: Final = [field for field in fields(Entry) if field.name not in _STORED]
_others: Final = attrgetter(*(field.name for field in _OTHERS))
_DEFAULTS: Final = tuple(field.default for field in _OTHERS)


def is_usual(entry: Entry) -> bool:
    """Return whether the entry is a first attempt, running or done at once, with nothing else to store."""
    return (entry.state is _RUNNING or entry.state is _DONE) and bool(_others(entry) == _DEFAULTS)


def writing(entry: Entry, mark: int | None = None) -> SqlRequest | None:
    """Return the statement for a usual entry, or None for any other.

    No row: it was written. A row without a token: see `inserting`. An entry that is done at once may be marked
    (`marks`).
    """
    state = entry.state
    # `is_usual`, without calling it: every delivery comes here.
    if (state is not _RUNNING and state is not _DONE) or _others(entry) != _DEFAULTS:
        return None
    values = of_usual(entry)
    if state is _RUNNING:
        return SqlRequest(INSERT_RUNNING, values, rows=True)
    if mark is None:
        return SqlRequest(INSERT_DONE, values, rows=True)
    values["mark"] = str(mark)
    return SqlRequest(INSERT_MARKED, values, rows=True)


def of_usual(entry: Entry) -> Parameters:
    address, ttl = entry.address, entry.ttl
    return {
        "scope": address.scope,
        "operation": address.operation,
        "key": address.key,
        "lease": entry.lease,
        "ttl": ttl if ttl < inf else stored_ttl(ttl, entry.state),
        "token": entry.token,
        "fingerprint": entry.fingerprint,
    }


def writing_all(entries: Sequence[Entry]) -> SqlRequest | None:
    """Return the statement for many usual entries, whose addresses differ; None if they share too little."""
    first = entries[0]
    kind = _kind(first)
    # Without a frame for each of them.
    if not (
        is_usual(first)
        and all(map(kind.__eq__, map(_kind, entries)))
        and all(map(_DEFAULTS.__eq__, map(_others, entries)))
    ):
        return None
    values = of_usual(first) | {
        "keys": [entry.address.key for entry in entries],
        "tokens": [entry.token for entry in entries],
        "fingerprints": [entry.fingerprint for entry in entries],
    }
    return SqlRequest(_INSERT_ALL[first.state], values, rows=True)


_kind: Final = attrgetter("address.scope", "address.operation", "state", "lease", "ttl")


_ENDED_AS: Final = ("state", "notes", "result", "omitted", "remark")
_ended_as: Final = attrgetter(*_ENDED_AS)
_USUALLY: Final = (_DONE, None, None, False, "")


def is_plain(ending: Ending) -> bool:
    """Return whether an ending is done and stores nothing."""
    return bool(_ended_as(ending) == _USUALLY)


def closing(claim: Claim, ending: Ending) -> SqlRequest:
    """Return the statement for a plain ending."""
    address = claim.address
    values: Parameters = {
        "scope": address.scope,
        "operation": address.operation,
        "key": address.key,
        "token": claim.token,
        "ttl": stored_ttl(ending.ttl, _DONE),
    }
    return SqlRequest(END, values)
