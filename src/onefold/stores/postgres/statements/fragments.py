"""The fragments of PostgreSQL's statements: its clock, its types, and the columns that only its tables have."""

from __future__ import annotations

from typing import Final

from onefold.stores.sql import records as sql
from onefold.stores.sql import statements
from onefold.stores.sql.records import ADDRESS, COLUMNS, TABLE, put

# The current time, never `now()`: that is the start of the transaction, which may be long ago.
NOW: Final = "date_part('epoch', clock_timestamp())"

# The column by which purge finds records. An update is cheap for the server (a "heap only tuple") if it changes no
# indexed column, and every heartbeat and every finish changes `expires`; but few move it to another ten minutes. A
# longer period would make a purge look at more records that have not expired yet.
DUE_SECONDS: Final = 600

# Limited to numbers that fit: a record kept for 30,000 years is never due. Not a generated column, which would slow
# down every write by a third.
DUE: Final = f"CASE WHEN :ttl < 1e12 THEN floor((:now + :ttl) / {DUE_SECONDS})::integer END"

# True or NULL, for the same reason: an index on held records must not depend on the state, which a finish changes.
HELD: Final = "CASE WHEN :state = 'held' THEN true END"

_TYPES_OF_KINDS: Final = {
    "text": "text",
    "integer": "integer",
    "seconds": "double precision",
    "bytes": "bytea",
    "flag": "smallint",
}

# The types of the values that a claim writes.
TYPES: Final = {
    **dict.fromkeys(ADDRESS, "text"),
    **{column.name: _TYPES_OF_KINDS[column.kind] for column in COLUMNS if column.written == f":{column.name}"},
    **dict.fromkeys(("age", "lease", "ttl"), "double precision"),
}

AT_ADDRESS: Final = ", ".join(ADDRESS)

_OMITTED: Final = "NULLIF(:omitted, 0)"

# Absent values are NULL, which takes no space.
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

# An expired record is replaced. A record that was written while we waited for its transaction is neither replaced nor
# visible to the same statement: then no row is returned, and the statement is sent again.
UNLESS_ALIVE: Final = (
    f"ON CONFLICT ({AT_ADDRESS}) DO UPDATE SET {', '.join(f'{name} = EXCLUDED.{name}' for name in WRITTEN)} "
    f"WHERE {TABLE}.expires <= :now"
)

_TYPED: Final = {"now": NOW} | {name: f":{name}::{type_}" for name, type_ in TYPES.items()}


def typed(statement: str) -> str:
    """Render the clock and the type of each value, which the server could not infer in a SELECT."""
    return put(statement, lambda name: _TYPED.get(name, f":{name}"))


def from_asked(statement: str) -> str:
    """Take each value from a column of the table `asked`, which is sent along."""
    return put(statement, lambda name: NOW if name == "now" else f"asked_{name}")
