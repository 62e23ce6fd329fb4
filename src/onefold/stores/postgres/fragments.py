"""The words of which PostgreSQL's statements are made: its clock, its types, and what only its tables have."""

from __future__ import annotations

from typing import Final

from onefold.stores.sql import records as sql
from onefold.stores.sql import statements
from onefold.stores.sql.records import ADDRESS, COLUMNS, TABLE, put

# The clock at that moment, never `now()`: that is the beginning of the transaction, which may be long ago.
NOW: Final = "date_part('epoch', clock_timestamp())"

# What purge finds records by. An update is cheap for the server (a "heap only tuple") where it changes no column that
# has an index, and every heartbeat and every finish changes `expires`; but few change the ten minutes in which it lies.
# More would make a purge look at more records that have not expired yet.
DUE_SECONDS: Final = 600

# It ends with the numbers that fit: what stays for 30,000 years is never due. Not a generated column, which would cost
# every write a third of its time.
DUE: Final = f"CASE WHEN :ttl < 1e12 THEN floor((:now + :ttl) / {DUE_SECONDS})::integer END"

# True or nothing. For the same reason: an index on held records must not depend on the state, which a finish changes.
HELD: Final = "CASE WHEN :state = 'held' THEN true END"

_TYPES_OF_KINDS: Final = {
    "text": "text",
    "integer": "integer",
    "seconds": "double precision",
    "bytes": "bytea",
    "flag": "smallint",
}

# Of the values that a claim writes.
TYPES: Final = {
    **dict.fromkeys(ADDRESS, "text"),
    **{column.name: _TYPES_OF_KINDS[column.kind] for column in COLUMNS if column.written == f":{column.name}"},
    **dict.fromkeys(("age", "lease", "ttl"), "double precision"),
}

AT_ADDRESS: Final = ", ".join(ADDRESS)

_OMITTED: Final = "NULLIF(:omitted, 0)"

# What a record has none of is NULL, which takes no space.
WRITTEN: Final = sql.WRITTEN | {
    "lease_until": "CASE WHEN :state = 'running' THEN :now + :lease END",
    "bypasses": "NULLIF(:bypasses, 0)",
    "omitted": _OMITTED,
    "due": DUE,
    "held": HELD,
}

READ: Final = sql.READ | {
    "lease_left": "COALESCE(lease_until - :now, 0)",
    "bypasses": "COALESCE(bypasses, 0)",
}

RENEWED: Final = statements.RENEWED | {"due": f"CASE state WHEN 'running' THEN {DUE} ELSE due END"}

ENDED: Final = statements.ENDED | {"lease_until": "NULL", "omitted": _OMITTED, "due": DUE, "held": HELD}

LEFT_OPEN: Final = statements.LEFT_OPEN | {"lease_until": "NULL", "due": DUE, "held": "NULL"}

SELECTED: Final = ", ".join(READ.values())
INTO: Final = statements.columns(WRITTEN)
VALUES: Final = statements.values(WRITTEN)

# What has expired gives way. A record that came while we waited for its transaction does not, and is not seen by
# the same statement either: then nothing comes back, and it is asked again.
UNLESS_ALIVE: Final = (
    f"ON CONFLICT ({AT_ADDRESS}) DO UPDATE SET {', '.join(f'{name} = EXCLUDED.{name}' for name in WRITTEN)} "
    f"WHERE {TABLE}.expires <= :now"
)

_TYPED: Final = {"now": NOW} | {name: f":{name}::{type_}" for name, type_ in TYPES.items()}


def typed(statement: str) -> str:
    """With the clock, and with the type of each value: in a SELECT the server could not tell."""
    return put(statement, lambda name: _TYPED.get(name, f":{name}"))


def from_asked(statement: str) -> str:
    """Take each value from a column of the table `asked`, which is sent along."""
    return put(statement, lambda name: NOW if name == "now" else f"asked_{name}")
