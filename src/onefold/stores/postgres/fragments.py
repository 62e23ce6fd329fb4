"""The words of which PostgreSQL's statements are made: its clock, its types, and what only its tables have."""

from __future__ import annotations

from typing import Final

from onefold.stores.sql.records import ADDRESS, PLACE, READ, TABLE, WRITTEN

# The clock at that moment, never `now()`: that is the beginning of the transaction, which may be long ago.
NOW: Final = "date_part('epoch', clock_timestamp())"

# What purge finds records by. An update is cheap for the server (a "heap only tuple") where it changes no column that
# has an index, and every heartbeat and every finish changes `expires`; but few change the ten minutes in which it lies.
# More would make a purge look at more records that are not past their stay yet.
DUE_SECONDS: Final = 600

# It ends with the numbers that fit: what stays for 30,000 years is never due. Not a generated column, which would cost
# every write a third of its time.
DUE: Final = f"CASE WHEN :stay < 1e12 THEN floor((:now + :stay) / {DUE_SECONDS})::integer END"

# True or nothing. For the same reason: an index on held records must not depend on the state, which a finish changes.
HELD: Final = "CASE WHEN :state = 'held' THEN true END"

TYPES: Final = {
    **dict.fromkeys(("scope", "operation", "key", "state", "remark"), "text"),
    **dict.fromkeys(("attempt", "bypasses", "revision"), "integer"),
    **dict.fromkeys(("age", "lease", "stay"), "double precision"),
    **dict.fromkeys(("token", "fingerprint", "notes", "result"), "bytea"),
    "omitted": "smallint",
}

AT_ADDRESS: Final = ", ".join(ADDRESS)

# What a record has none of is NULL, which takes no space.
STORED: Final = WRITTEN | {
    "lease_until": "CASE WHEN :state = 'running' THEN :now + :lease END",
    "bypasses": "NULLIF(:bypasses, 0)",
    "omitted": "NULLIF(:omitted, 0)",
    "due": DUE,
    "held": HELD,
}

COLUMNS: Final = ", ".join((*ADDRESS, *STORED))
VALUES: Final = ", ".join((*(f":{name}" for name in ADDRESS), *STORED.values()))

READ_STORED: Final = READ.replace("lease_until - :now", "COALESCE(lease_until - :now, 0)").replace(
    "bypasses", "COALESCE(bypasses, 0)"
)

# What is past its stay gives way. A record that came while we waited for its transaction does not, and is not seen by
# the same statement either: then nothing comes back, and it is asked again.
UNLESS_ALIVE: Final = (
    f"ON CONFLICT ({AT_ADDRESS}) DO UPDATE SET {', '.join(f'{name} = EXCLUDED.{name}' for name in STORED)} "
    f"WHERE {TABLE}.expires <= :now"
)

_LATER: Final = "expires = CASE state WHEN 'running' THEN :now + :stay ELSE expires END"

# How what is the same everywhere is written here.
_SPELLED: Final = {
    READ: READ_STORED,
    "lease_until = :now,": "lease_until = NULL,",
    "omitted = :omitted": "omitted = NULLIF(:omitted, 0)",
    "expires = :now + :stay,": f"expires = :now + :stay, due = {DUE},",
    _LATER: f"{_LATER}, due = CASE state WHEN 'running' THEN {DUE} ELSE due END",
    "state = :state,": f"state = :state, held = {HELD},",
    "state = 'open',": "state = 'open', held = NULL,",
}


def spelled(statement: str) -> str:
    """A statement of `_sql_dialect`, for these tables."""
    for usual, ours in _SPELLED.items():
        statement = statement.replace(usual, ours)
    return typed(statement)


def typed(statement: str) -> str:
    """With the clock, and with the type of each value: in a SELECT the server could not tell."""
    told = PLACE.sub(lambda place: f"{place[0]}::{TYPES[place[1]]}" if place[1] in TYPES else place[0], statement)
    return told.replace(":now", NOW)
