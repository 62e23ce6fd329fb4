"""Records as SQL: the table, and the conversion of our types to parameters and of rows to records.

Pure: no driver, no I/O, no clock. `statements` and `dialect` build statements and flows of it, and drivers send them.

Parameters are named (`:token`). Durations go in and come out, and `:now` is the store's clock: no timestamp is sent or
returned. An infinite duration is NULL, and stays NULL whatever is added to it, so that NULL means forever.
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

# The version of the tables that this code creates. It works on the previous version, too, and on a newer one whose
# `usable_from` is not above it: so two versions of the library share one table during a rolling deploy.
VERSION: Final = 2

Parameters = dict[str, Any]

ADDRESS: Final = ("scope", "operation", "key")


class Column(NamedTuple):
    """A column of the table besides the address: its kind, how a claim writes it, and how it is read."""

    name: str
    # "text", "integer", "seconds", "bytes" or "flag": each database has its own types for these.
    kind: str
    written: str
    # The field of the record, and the expression that reads it. No field: nobody reads the column.
    field: str = ""
    read: str = ""

    @classmethod
    def plain(cls, name: str, kind: str) -> Column:
        """Make a column that stores the field of the same name."""
        return cls(name, kind, f":{name}", name, name)


# All fields of a record. A new field goes into `_model`, here, and into each database's schema.
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

# The columns that a claim writes besides the address: a whole record.
WRITTEN: Final = {column.name: column.written for column in COLUMNS}

# What is read, in the order of the record's fields, and of which kind it is.
_COLUMNS_READ: Final = sorted(
    (column for column in COLUMNS if column.field), key=lambda column: Record.__struct_fields__.index(column.field)
)
READ: Final = {column.field: column.read for column in _COLUMNS_READ}
KINDS_READ: Final = tuple(column.kind for column in _COLUMNS_READ)

_STATE, _TTL_LEFT, _OMITTED = map(list(READ).index, ("state", "ttl_left", "omitted"))
_STATES: Final = {state.value: state for state in State}


def at(prefix: str = ":") -> str:
    """Return the condition for one address, compared with `:scope` etc. or, with another prefix, with columns."""
    return " AND ".join(f"{name} = {prefix}{name}" for name in ADDRESS)


# A record that never expires has no end: NULL. But as long as it runs or is held, its end is 28,000 years away: so the
# index for purges finds the few of them among millions that are finished and kept forever. PostgreSQL's `due` has room
# for this number.
IN_DOUBT_SECONDS: Final = 9e11
# Longer than that is forever, when it is read.
IN_DOUBT_SECONDS_MIN: Final = 8e11

AT: Final = at()
ALIVE: Final = "(expires IS NULL OR expires > :now)"
OF_TOKEN: Final = f"{AT} AND token = :token"
OURS: Final = f"{OF_TOKEN} AND {ALIVE}"


def of_address(address: Address) -> Parameters:
    return {"scope": address.scope, "operation": address.operation, "key": address.key}


def of_entry(entry: Entry, replacing: Record | None = None) -> Parameters:
    """Return the parameters of a claim. The revision increases only if the token stays, as in marking held."""
    values = asdict(entry)
    values |= of_address(values.pop("address"))
    values["state"] = entry.state.value
    values["ttl"] = stored_ttl(entry.ttl, entry.state)
    values["omitted"] = int(entry.omitted)
    values["revision"] = entry.revision_after(replacing)
    return values if replacing is None else values | of_seen(replacing)


def of_seen(record: Record) -> Parameters:
    """Return the parameters that name a record as it was read."""
    return {"seen_token": record.token, "seen_revision": record.revision}


def of_claim(claim: Claim) -> Parameters:
    return of_address(claim.address) | {
        "token": claim.token,
        "lease": claim.lease,
        "ttl": stored_ttl(claim.ttl, State.RUNNING),
    }


def of_notes(notes: bytes | None) -> Parameters:
    """Return the parameters of a renewal. Notes never get shorter: a log only grows, so a shorter one is outdated."""
    return {"notes": notes, "notes_length": None if notes is None else len(notes)}


def of_ending(ending: Ending) -> Parameters:
    values = asdict(ending)
    values["state"] = ending.state.value
    values["ttl"] = stored_ttl(ending.ttl, ending.state)
    values["omitted"] = int(ending.omitted)
    return values


def of_released(released: Released) -> Parameters:
    values = asdict(released)
    values["ttl"] = stored_ttl(released.ttl, State.OPEN)
    return values


def record(address: Address, row: Sequence[Any]) -> Record:
    """Return the record of a row whose columns are those of `READ`. By position: by name takes three times as long."""
    values = list(row)
    values[_STATE] = _STATES[values[_STATE]]
    values[_OMITTED] = bool(values[_OMITTED])
    if values[_TTL_LEFT] is None or values[_TTL_LEFT] > IN_DOUBT_SECONDS_MIN:
        values[_TTL_LEFT] = math.inf
    return Record(address, *values)


_READ_AS: Final[dict[str, Callable[[Any], Any]]] = {
    "text": lambda cell: cell if isinstance(cell, str) else bytes(cell).decode(),
    "integer": int,
    "seconds": float,
    "bytes": bytes,
    "flag": int,
}
_KIND_OF: Final = dict.fromkeys(ADDRESS, "text") | {column.name: column.kind for column in COLUMNS}


def as_stored(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return a row by its columns, each in the type that is stored, whatever converters the connection has."""
    cells = zip(names, row, strict=False)
    return {
        name: cell if cell is None or name not in _KIND_OF else _READ_AS[_KIND_OF[name]](cell) for name, cell in cells
    }


def records(rows: Iterable[Sequence[Any]]) -> list[Record]:
    """Return the records of rows that begin with their address."""
    return [record(Address(*row[:3]), row[3:]) for row in rows]


def stored_ttl(ttl: float, state: State) -> float | None:
    """Return the duration as it is stored: NULL for forever, or a very long time while it runs or is held."""
    if not math.isinf(ttl):
        return ttl
    return IN_DOUBT_SECONDS if state in (State.RUNNING, State.HELD) else None


# Our tables by name, including inside a string (`to_regclass('…')`).
_TABLES: Final = re.compile(rf"('?)\b({TABLE}|onefold_schema)\b")


def located(statement: str, where: str) -> str:
    """Return the statement with our tables qualified by `where`, a quoted database or schema and a dot.

    A handler may change its session's default (`USE other`, `SET search_path`), and a record has to stay where it is.
    """
    if not where:
        return statement
    in_text = where.replace("'", "''")
    return _TABLES.sub(lambda found: f"{found[1]}{in_text if found[1] else where}{found[2]}", statement)


# Matches neither a cast (`::text`) nor a part of a word.
PLACEHOLDER: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")


def put(statement: str, form: Callable[[str], str]) -> str:
    """Return the statement with `form(name)` in place of each placeholder. Raise `ValueError` if it has none."""
    written, count = PLACEHOLDER.subn(lambda found: form(found[1]), statement)
    if not count:
        raise ValueError(f"there is no placeholder in {statement!r}")
    return written


# Bounded, because each savepoint has its own name.
@lru_cache(maxsize=256)
def with_names(statement: str) -> str:
    """Return the statement for a driver that takes `%(name)s`."""
    return PLACEHOLDER.sub(r"%(\1)s", statement.replace("%", "%%"))


@cache
def in_numbers(statement: str, where: str = "") -> tuple[str, tuple[str, ...]]:
    """Return the statement for a driver that takes `$1`, and the names in order; `where` is as in `located`."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return located(PLACEHOLDER.sub(number, statement), where), tuple(names)
