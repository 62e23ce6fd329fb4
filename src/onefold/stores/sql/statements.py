"""The statements that every database has, composed of clauses: the assignments of each write, and its conditions.

A database that stores something differently supplies another clause, as in `ENDED | {"lease_until": "NULL"}`. It never
edits the text of a statement: a replacement that matches nothing would silently change nothing.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onefold._model import State
from onefold.stores.sql.records import ADDRESS, ALIVE, AT, OF_TOKEN, OURS, READ, TABLE, WRITTEN

# The value that a write assigns, by column.
Assignments = Mapping[str, str]

_CHANGED: Final = {"revision": "revision + 1", "changed": ":now"}

# A late heartbeat must not make a held record expire.
RENEWED: Final = _CHANGED | {
    "notes": "CASE WHEN :notes_length >= COALESCE(LENGTH(notes), 0) THEN :notes ELSE notes END",
    "lease_until": "CASE state WHEN 'running' THEN :now + :lease ELSE lease_until END",
    "expires": "CASE state WHEN 'running' THEN :now + :ttl ELSE expires END",
}

_OVER: Final = _CHANGED | {"lease_until": ":now", "expires": ":now + :ttl"}

ENDED: Final = _OVER | {
    "state": ":state",
    "notes": ":notes",
    "result": ":result",
    "omitted": ":omitted",
    "remark": ":remark",
}

LEFT_OPEN: Final = _OVER | {"state": "'open'", "attempt": ":attempt", "notes": ":notes", "remark": ":remark"}

ANNOTATED: Final = _CHANGED | {"notes": ":notes"}

LIVE: Final = f"{OURS} AND state IN ('running', 'held')"


def assigned(columns: Assignments) -> str:
    """Return the assignments after SET."""
    return ", ".join(f"{column} = {value}" for column, value in columns.items())


def settled(ended: Assignments) -> dict[str, str]:
    """Return one clause for both endings and remembered releases, for batches of both: an open record keeps more."""
    kept = {name: f"CASE :state WHEN 'open' THEN {name} ELSE {ended[name]} END" for name in ("result", "omitted")}
    return {**ended, **kept, "attempt": "COALESCE(:attempt, attempt)"}


class Statements:
    """The texts of one database. `:now` stands for its clock; `in_dialect` or the sender fills it in."""

    # The clauses; a database overrides those that it stores differently.
    written: Assignments = WRITTEN
    read_as: Assignments = READ
    renewed: Assignments = RENEWED
    ended: Assignments = ENDED
    left_open: Assignments = LEFT_OPEN
    # Makes a read after a refused write a locking one, where plain reads show an old snapshot.
    locking: str = ""
    # Proves that a record was written in this transaction, where a condition can.
    written_here: str = ""
    # Addresses after a given one, in the order of the primary key.
    after: str = "(scope, operation, key) > (:after_scope, :after_operation, :after_key)"

    # Composed of the clauses for each database.
    look: str
    # Reads after a refused write.
    read_in_the_way: str
    # Writes if the record is unchanged since it was read: neither token nor revision alone would be enough.
    replace: str
    annotation: str
    renew: str
    end: str
    # `end` in the transaction that wrote the record, even if expired: a handler may take longer than it is kept.
    end_joined: str
    leave_open: str
    forget: str

    def __init_subclass__(cls) -> None:
        for name, statement in _composed(cls).items():
            setattr(cls, name, cls.in_dialect(statement))

    @classmethod
    def in_dialect(cls, statement: str) -> str:
        """Render one of our statements for this database."""
        return statement

    @classmethod
    def selected(cls) -> str:
        """Return the expressions after SELECT for a record."""
        return ", ".join(cls.read_as.values())

    def in_state(self, state: State) -> str:
        """Return the condition for records in this state."""
        # One of our own five words; as a parameter, it would keep the planner from the index on held records.
        return f"state = '{state.value}'"


def columns(written: Assignments = WRITTEN) -> str:
    """Return the columns that a claim writes, the address first."""
    return ", ".join((*ADDRESS, *written))


def values(written: Assignments = WRITTEN) -> str:
    """Return the values of those columns."""
    return ", ".join((*(f":{name}" for name in ADDRESS), *written.values()))


def _composed(sql: type[Statements]) -> dict[str, str]:
    look = f"SELECT {sql.selected()} FROM {TABLE} WHERE {AT} AND {ALIVE}"
    seen = f"{AT} AND token = :seen_token AND revision = :seen_revision AND {ALIVE}"
    here = f" AND {sql.written_here}" if sql.written_here else ""
    update = f"UPDATE {TABLE} SET"
    return {
        "look": look,
        "read_in_the_way": f"{look} {sql.locking}".rstrip(),
        "replace": f"{update} {assigned(sql.written)} WHERE {seen}",
        "annotation": f"{update} {assigned(ANNOTATED)} WHERE {seen}",
        "renew": f"{update} {assigned(sql.renewed)} WHERE {LIVE}",
        "end": f"{update} {assigned(sql.ended)} WHERE {OURS}",
        "end_joined": f"{update} {assigned(sql.ended)} WHERE {OF_TOKEN}{here}",
        "leave_open": f"{update} {assigned(sql.left_open)} WHERE {OURS}",
        "forget": f"DELETE FROM {TABLE} WHERE {OURS}",
    }
