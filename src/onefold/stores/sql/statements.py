"""The statements that every database has, composed of clauses: what each write assigns, and on what conditions.

A database that stores something in its own way gives another clause, as in `ENDED | {"lease_until": "NULL"}`, and never
edits the text of a statement: a rule that is missed there would change nothing, and nobody would know.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onefold._model import State
from onefold.stores.sql.records import ADDRESS, ALIVE, AT, OF_TOKEN, OURS, READ, TABLE, WRITTEN

# By column, the value that a write gives it.
Assignments = Mapping[str, str]

_CHANGED: Final = {"revision": "revision + 1", "changed": ":now"}

# A late heartbeat must not give an end to what is held.
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

LIVE: Final = f"{OURS} AND state IN ('running', 'held')"


def assigned(columns: Assignments) -> str:
    """Return what stands after SET."""
    return ", ".join(f"{column} = {value}" for column, value in columns.items())


def settled(ended: Assignments) -> dict[str, str]:
    """Return an ending and a release with a memory in one, for batches that have both: an open record keeps more."""
    kept = {name: f"CASE :state WHEN 'open' THEN {name} ELSE {ended[name]} END" for name in ("result", "omitted")}
    return {**ended, **kept, "attempt": "COALESCE(:attempt, attempt)"}


class Statements:
    """The texts of one database. They have `:now` for its clock, which whoever sends them gives, or `spell` does."""

    # The clauses; a database gives its own where it stores something in another way.
    written: Assignments = WRITTEN
    read_as: Assignments = READ
    renewed: Assignments = RENEWED
    ended: Assignments = ENDED
    left_open: Assignments = LEFT_OPEN
    # What makes a read after a refused write a locking one, where reads show an old snapshot.
    locking: str = ""
    # What proves that a record was written in this transaction, where a statement can.
    written_here: str = ""
    # What comes after an address, in the order of the primary key.
    after: str = "(scope, operation, key) > (:after_scope, :after_operation, :after_key)"

    # Composed of them for each database.
    look: str
    # After a refused write.
    read_in_the_way: str
    # Writes if the record is still what its finder saw: neither token nor revision alone would be enough.
    replace: str
    renew: str
    end: str
    # The same in the transaction that wrote the record, also expired: a handler may take longer than it is kept.
    end_joined: str
    leave_open: str
    forget: str

    def __init_subclass__(cls) -> None:
        for name, statement in _composed(cls).items():
            setattr(cls, name, cls.spell(statement))

    @classmethod
    def spell(cls, statement: str) -> str:
        """A statement of ours as this database wants it."""
        return statement

    @classmethod
    def selected(cls) -> str:
        """Return what stands after SELECT for a record."""
        return ", ".join(cls.read_as.values())

    def in_state(self, state: State) -> str:
        """Return the condition for records in this state."""
        # One of five words of ours; as a value, it would hide from the index on held records.
        return f"state = '{state.value}'"


def columns(written: Assignments = WRITTEN) -> str:
    """Return the columns that a claim writes, the address first."""
    return ", ".join((*ADDRESS, *written))


def values(written: Assignments = WRITTEN) -> str:
    """Return their values."""
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
        "renew": f"{update} {assigned(sql.renewed)} WHERE {LIVE}",
        "end": f"{update} {assigned(sql.ended)} WHERE {OURS}",
        "end_joined": f"{update} {assigned(sql.ended)} WHERE {OF_TOKEN}{here}",
        "leave_open": f"{update} {assigned(sql.left_open)} WHERE {OURS}",
        "forget": f"DELETE FROM {TABLE} WHERE {OURS}",
    }
