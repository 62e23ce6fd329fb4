"""Records as SQL: the table, and the way from our words to parameters and from rows to records.

Pure: no driver, no I/O, no clock. `statements` and `dialect` make statements and flows of it, and drivers send them.

Parameters are named (`:token`). Durations go in and come out, and `:now` is the store's clock: a moment never crosses
the seam. A duration without an end is NULL, and stays NULL whatever is added to it, so that NULL is forever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from msgspec.structs import asdict

from onefold._model import Address, Claim, Ending, Entry, Record, Released, State

TABLE: Final = "onefold_records"

# The form of the tables that this code makes. It works on the form before, too, and on a newer one whose `usable_from`
# is not above it: so two versions of the library work on one table during a rolling deploy.
VERSION: Final = 2

Parameters = dict[str, Any]

ADDRESS: Final = ("scope", "operation", "key")


class Column(NamedTuple):
    """A column of the table besides the address: of what kind, how a claim writes it, and how it is read."""

    name: str
    # "text", "integer", "seconds", "bytes" or "flag": each database has its own types for these.
    kind: str
    written: str
    # The field of the record, and the expression that gives it. No field: nobody reads the column.
    field: str = ""
    read: str = ""

    @classmethod
    def plain(cls, name: str, kind: str) -> Column:
        """Make a column that holds what the entry and the record have under its name."""
        return cls(name, kind, f":{name}", name, name)


# All that a record has. A new field is in `_model`, here, and in each database's schema.
COLUMNS: Final = (
    Column.plain("state", "text"),
    Column.plain("attempt", "integer"),
    Column("began", "seconds", ":now - :age", "age", ":now - began"),
    Column("changed", "seconds", ":now"),
    Column("lease_until", "seconds", ":now + :lease", "lease_left", "lease_until - :now"),
    Column("expires", "seconds", ":now + :ttl", "ttl_left", "expires - :now"),
    Column.plain("bypasses", "integer"),
    Column.plain("remark", "text"),
    Column.plain("revision", "integer"),
    Column.plain("token", "bytes"),
    Column.plain("fingerprint", "bytes"),
    Column.plain("notes", "bytes"),
    Column.plain("omitted", "flag"),
    Column.plain("result", "bytes"),
)

# What a claim writes besides the address: a whole record.
WRITTEN: Final = {column.name: column.written for column in COLUMNS}

# What is read, by the record's fields, and of which kind it is.
READ: Final = {column.field: column.read for column in COLUMNS if column.field}
KINDS_READ: Final = tuple(column.kind for column in COLUMNS if column.field)

_FIELDS: Final = tuple(READ)
_STATES: Final = {state.value: state for state in State}


def at(place: str = ":") -> str:
    """Return the condition for one address, whose values stand at `:scope` or, with another prefix, in columns."""
    return " AND ".join(f"{name} = {place}{name}" for name in ADDRESS)


AT: Final = at()
ALIVE: Final = "(expires IS NULL OR expires > :now)"
OF_TOKEN: Final = f"{AT} AND token = :token"
OURS: Final = f"{OF_TOKEN} AND {ALIVE}"


def of_address(address: Address) -> Parameters:
    return {"scope": address.scope, "operation": address.operation, "key": address.key}


def of_entry(entry: Entry, replacing: Record | None = None) -> Parameters:
    """What a claim writes. The revision goes on only where the token stays, as it does when a record is marked held."""
    values = asdict(entry)
    values |= of_address(values.pop("address"))
    values["state"] = entry.state.value
    values["ttl"] = _or_null(entry.ttl)
    values["omitted"] = int(entry.omitted)
    values["revision"] = 1
    if replacing is not None:
        values |= {"seen_token": replacing.token, "seen_revision": replacing.revision}
        if replacing.token == entry.token:
            values["revision"] = replacing.revision + 1
    return values


def of_claim(claim: Claim) -> Parameters:
    return of_address(claim.address) | {"token": claim.token, "lease": claim.lease, "ttl": _or_null(claim.ttl)}


def of_notes(notes: bytes | None) -> Parameters:
    """What a renewal writes. Notes never become shorter: a log only grows, and what comes late is an older one."""
    return {"notes": notes, "notes_length": None if notes is None else len(notes)}


def of_ending(ending: Ending) -> Parameters:
    values = asdict(ending)
    values["state"] = ending.state.value
    values["ttl"] = _or_null(ending.ttl)
    values["omitted"] = int(ending.omitted)
    return values


def of_released(released: Released) -> Parameters:
    values = asdict(released)
    values["ttl"] = _or_null(released.ttl)
    return values


def record(address: Address, row: Sequence[Any]) -> Record:
    """The record of a row whose columns are those of `READ`."""
    fields = dict(zip(_FIELDS, row, strict=True))
    fields["address"] = address
    fields["state"] = _STATES[fields["state"]]
    fields["omitted"] = bool(fields["omitted"])
    if fields["ttl_left"] is None:
        fields["ttl_left"] = math.inf
    return Record(**fields)


def records(rows: Iterable[Sequence[Any]]) -> list[Record]:
    """The records of rows that begin with their address."""
    return [record(Address(*row[:3]), row[3:]) for row in rows]


def is_own(found: Record, entry: Entry, replacing: Record | None = None) -> bool:
    """Whether this claim was written before, and only its answer got lost. Marking held borrows a token."""
    borrowed = replacing is not None and entry.token == replacing.token
    return found.token == entry.token and not borrowed


def _or_null(ttl: float) -> float | None:
    return None if math.isinf(ttl) else ttl


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


def put(statement: str, form: Callable[[str], str]) -> str:
    """Return the statement with `form(name)` at the place of each value. Raise where it has no such place."""
    written, places = PLACE.subn(lambda place: form(place[1]), statement)
    if not places:
        raise ValueError(f"there is no place for a value in {statement!r}")
    return written


# Bounded, because savepoints have a name of their own each.
@lru_cache(maxsize=256)
def with_names(statement: str) -> str:
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
