"""The renewal of many claims on MySQL and MariaDB, with only a short wait for locked rows.

A transaction that has met a running key keeps its row locked until it ends, and InnoDB would wait 50 s for that.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, and of values as hexadecimal digits

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from onefold._model import Address, Claim, Record
from onefold.stores.mysql.errors import LOCKED, number_of
from onefold.stores.mysql.statements.fragments import render
from onefold.stores.mysql.statements.literals import Many, as_read, many
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.locked import WAIT_SECONDS, RowHeld, turns
from onefold.stores.sql.records import ADDRESS, AT, TABLE, Parameters, at, of_address, of_claim, of_notes, put, records
from onefold.stores.sql.statements import LIVE, RENEWED, assigned

# By the time of the write, a locked row may be free, and another locked.
ROUNDS_MAX: Final = 3

# InnoDB counts its waits in whole seconds.
WAIT_LEAST: Final = WAIT_SECONDS

# InnoDB locks every row that it scans, and would rather scan a small table completely.
_BY_KEY: Final = "FORCE INDEX (PRIMARY)"

_WANTED: Final = (*ADDRESS, "lease", "ttl")

# LIMIT, because without it the server merges the subquery into the outer statement and drops its lock.
_HELD_FAST: Final = Many(
    f"SELECT {', '.join(f':{name} AS free_{name}' for name in _WANTED)} FROM",
    render(f"{_BY_KEY} WHERE {LIVE}") + " LIMIT 1000000 FOR UPDATE NOWAIT",
)
# A batch renews without notes.
_RENEWED: Final = put(
    render(assigned({name: value for name, value in RENEWED.items() if name != "notes"})), lambda name: f"free_{name}"
)
_HELD_NOW: Final = render(f"SELECT 1 FROM {TABLE} {_BY_KEY} WHERE {AT} FOR UPDATE NOWAIT")
_FREE: Final = Many("SELECT :number FROM", render(f"{_BY_KEY} WHERE {LIVE} FOR UPDATE SKIP LOCKED"))


_AT_FREE: Final = render(at("free_"))


def _renewing(free: str) -> str:
    """Return the statement that renews the records locked by this subquery."""
    return f"UPDATE ({free}) AS free STRAIGHT_JOIN {TABLE} {_BY_KEY} SET {_RENEWED} WHERE {_AT_FREE}"


class Renews(Protocol):
    """The parts of a dialect that a renewal needs."""

    renew: str
    look_many: Many

    def waiting(self, request: SqlRequest, seconds: int) -> SqlFlow[Reply]: ...


def extend_all(sql: Renews, claims: Sequence[Claim], shortest: float) -> SqlFlow[list[bool | None]]:
    """Renew all in one statement. If a row is locked, renew the unlocked ones, then each of the others by itself."""
    everyone = sorted(range(len(claims)), key=lambda index: claims[index].address.parts)
    written = yield from _renewed(claims, everyone)
    if written == len(claims):
        return [True] * len(claims)
    if written is not None:
        ours = yield from _still_ours(sql, claims, everyone)
        return [index in ours for index in range(len(claims))]
    free = yield from _renewed_apart(claims, everyone)
    answers: list[bool | None] = [index in free for index in range(len(claims))]
    locked = yield from _still_ours(sql, claims, [index for index in everyone if index not in free])
    for index in locked:
        answers[index] = None
    chosen, seconds = turns(claims, locked, WAIT_LEAST, shortest)
    for index in chosen:
        answers[index] = yield from _renewed_in_turn(sql, claims[index], int(seconds))
    # Most locks are brief: those of duplicates that have met the key.
    for index in (yield from _renewed_apart(claims, [index for index in locked if answers[index] is None])):
        answers[index] = True
    return answers


def _renewed(claims: Sequence[Claim], indexes: Iterable[int]) -> SqlFlow[int | None]:
    """Renew those of these that are ours; return how many, or None if one of them is locked."""
    rows = [of_claim(claims[index]) for index in indexes]
    written = 0
    # Sent separately, not in one transaction: each statement is valid by itself.
    for free in many(_HELD_FAST, rows) if rows else ():
        try:
            reply: Reply = yield SqlRequest(_renewing(free.statement), {})
        except Exception as error:
            if number_of(error) not in LOCKED:
                raise
            return None
        written += reply.written
    return written


def _renewed_apart(claims: Sequence[Claim], indexes: Sequence[int]) -> SqlFlow[set[int]]:
    """Renew those that are ours and unlocked; return which they are."""
    for _ in range(ROUNDS_MAX if indexes else 0):
        rows: list[Parameters] = [of_claim(claims[index]) | {"number": index} for index in indexes]
        free: set[int] = set()
        for request in many(_FREE, rows, back=True):
            reply: Reply = yield request
            free |= {int(row[0]) for row in reply.rows}
        written = yield from _renewed(claims, [index for index in indexes if index in free])
        if written == len(free):
            return free
    return set()


def _still_ours(sql: Renews, claims: Sequence[Claim], indexes: Sequence[int]) -> SqlFlow[list[int]]:
    """Return which of these claims are still ours, by a read that takes no lock."""
    found: dict[Address, Record] = {}
    requests = (
        many(sql.look_many, [of_address(claims[index].address) for index in indexes], back=True) if indexes else []
    )
    for request in requests:
        reply: Reply = yield request
        found |= {one.address: one for one in records(map(as_read, reply.rows))}

    def is_ours(address: Address, token: bytes) -> bool:
        one = found.get(address)
        return one is not None and one.token == token and one.is_renewable

    return [index for index in indexes if is_ours(claims[index].address, claims[index].token)]


def at_once(sql: Renews, request: SqlRequest, claim: Claim) -> SqlFlow[Reply]:
    """Write one record without waiting for its row; test the lock first, as InnoDB's shortest wait is a second."""
    try:
        yield SqlRequest(_HELD_NOW, of_address(claim.address), rows=True)
        # Another transaction may lock it in between.
        return (yield from sql.waiting(request, int(WAIT_LEAST)))
    except Exception as error:
        if number_of(error) not in LOCKED:
            raise
        raise RowHeld.of(claim) from error


def _renewed_in_turn(sql: Renews, claim: Claim, seconds: int) -> SqlFlow[bool | None]:
    """Renew a locked claim; return None if it is still locked."""
    try:
        reply: Reply = yield from sql.waiting(SqlRequest(sql.renew, of_claim(claim) | of_notes(None)), seconds)
    except Exception as error:
        if number_of(error) not in LOCKED:
            raise
        return None
    return reply.written == 1
