"""Records as SQL: the table, and the way from our words to parameters and from rows to records.

Pure: no driver, no I/O, no clock. `_sql_dialect` makes statements and talks of it, and each driver sends them.

Parameters are named (`:token`). Durations go in and come out, and `:now` is the store's clock: a moment never crosses
the seam. A duration without an end is NULL, and stays NULL whatever is added to it, so that NULL is forever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Final

from onefold._model import Address, Claim, Ending, Entry, Memory, Record, State

TABLE: Final = "onefold_records"

# The form of the tables that this code makes. It works on the form before, too, and on a newer one whose `usable_from`
# is not above it: so two versions of the library work on one table during a rolling deploy.
VERSION: Final = 2

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


def of_notes(notes: bytes | None) -> Parameters:
    """What a renewal writes. Notes never become shorter: a log only grows, and what comes late is an older one."""
    return {"notes": notes, "notes_length": None if notes is None else len(notes)}


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


def records(rows: Iterable[Sequence[Any]]) -> list[Record]:
    """The records of rows that begin with their address."""
    return [record(Address(*row[:3]), row[3:]) for row in rows]


def is_own(found: Record, entry: Entry, replacing: Record | None = None) -> bool:
    """Whether this claim was written before, and only its answer got lost. Marking held borrows a token."""
    borrowed = replacing is not None and entry.token == replacing.token
    return found.token == entry.token and not borrowed


def _or_null(stay: float) -> float | None:
    return None if math.isinf(stay) else stay


# Our tables by name, also where a server is asked for one (`to_regclass('…')`).
_TABLES: Final = re.compile(rf"('?)\b({TABLE}|onefold_schema)\b")


def located(statement: str, where: str) -> str:
    """Return the statement with `where`, a quoted database or schema and a dot, in front of our tables.

    A handler may leave its session anywhere (`USE other`, `SET search_path`), and a record has to stay where it is.
    """
    if not where:
        return statement
    in_text = where.replace("'", "''")
    return _TABLES.sub(lambda found: f"{found[1]}{in_text if found[1] else where}{found[2]}", statement)


# Not a cast (`::text`), and no part of a word.
PLACE: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")


# Bounded, because savepoints have a name of their own each.
@lru_cache(maxsize=256)
def in_words(statement: str) -> str:
    """The statement for a driver that takes `%(name)s`."""
    return PLACE.sub(r"%(\1)s", statement.replace("%", "%%"))


@cache
def in_numbers(statement: str, where: str = "") -> tuple[str, tuple[str, ...]]:
    """The statement for a driver that takes `$1`, and the names in their order; `where` is as in `located`."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return located(PLACE.sub(number, statement), where), tuple(names)
