"""The renewal of many claims on MySQL and MariaDB, which waits for nobody's row but for a moment.

A transaction that has met a running key keeps its row locked until it ends, and InnoDB would wait for that for 50 s.
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

# A row that was locked may be free, and another locked, by the time that it is written.
ROUNDS_MAX: Final = 3

# InnoDB counts its waits in whole seconds.
WAIT_LEAST: Final = WAIT_SECONDS

# InnoDB locks whatever it looks at, and of a small table a server would rather look at everything.
_BY_KEY: Final = "FORCE INDEX (PRIMARY)"

_WANTED: Final = (*ADDRESS, "lease", "ttl")

# LIMIT, because a server would merge what has none into the statement around it, and the lock would be forgotten.
_HELD_FAST: Final = Many(
    f"SELECT {', '.join(f':{name} AS free_{name}' for name in _WANTED)} FROM",
    render(f"{_BY_KEY} WHERE {LIVE}") + " LIMIT 1000000 FOR UPDATE NOWAIT",
)
# Many at once are renewed without notes.
_RENEWED: Final = put(
    render(assigned({name: value for name, value in RENEWED.items() if name != "notes"})), lambda name: f"free_{name}"
)
_HELD_NOW: Final = render(f"SELECT 1 FROM {TABLE} {_BY_KEY} WHERE {AT} FOR UPDATE NOWAIT")
_FREE: Final = Many("SELECT :number FROM", render(f"{_BY_KEY} WHERE {LIVE} FOR UPDATE SKIP LOCKED"))


_AT_FREE: Final = render(at("free_"))


def _renewing(free: str) -> str:
    """Return the statement that renews the records which this one has locked."""
    return f"UPDATE ({free}) AS free STRAIGHT_JOIN {TABLE} {_BY_KEY} SET {_RENEWED} WHERE {_AT_FREE}"


class Renews(Protocol):
    """What a dialect has for it."""

    renew: str
    look_many: Many

    def waiting(self, request: SqlRequest, seconds: int) -> SqlFlow[Reply]: ...


def extend_all(sql: Renews, claims: Sequence[Claim], shortest: float) -> SqlFlow[list[bool | None]]:
    """Renew all in one statement. Where a row is locked, those that are not, and then each of the others by itself."""
    everyone = sorted(range(len(claims)), key=lambda settings: claims[settings].address.parts)
    written = yield from _renewed(claims, everyone)
    if written == len(claims):
        return [True] * len(claims)
    if written is not None:
        ours = yield from _still_ours(sql, claims, everyone)
        return [settings in ours for settings in range(len(claims))]
    free = yield from _renewed_apart(claims, everyone)
    answers: list[bool | None] = [settings in free for settings in range(len(claims))]
    locked = yield from _still_ours(sql, claims, [settings for settings in everyone if settings not in free])
    for settings in locked:
        answers[settings] = None
    chosen, seconds = turns(claims, locked, WAIT_LEAST, shortest)
    for settings in chosen:
        answers[settings] = yield from _renewed_in_turn(sql, claims[settings], int(seconds))
    # Most locks last for a moment: of duplicates that have met the key.
    for settings in (yield from _renewed_apart(claims, [settings for settings in locked if answers[settings] is None])):
        answers[settings] = True
    return answers


def _renewed(claims: Sequence[Claim], places: Iterable[int]) -> SqlFlow[int | None]:
    """Renew those of these that are ours; how many they are, or None: one of them is locked."""
    rows = [of_claim(claims[settings]) for settings in places]
    written = 0
    # One by one, and not in one transaction: each statement is good by itself.
    for free in many(_HELD_FAST, rows) if rows else ():
        try:
            reply: Reply = yield SqlRequest(_renewing(free.statement), {})
        except Exception as error:
            if number_of(error) not in LOCKED:
                raise
            return None
        written += reply.written
    return written


def _renewed_apart(claims: Sequence[Claim], places: Sequence[int]) -> SqlFlow[set[int]]:
    """Renew those that are ours and that nobody has locked; which they are."""
    for _ in range(ROUNDS_MAX if places else 0):
        rows: list[Parameters] = [of_claim(claims[settings]) | {"number": settings} for settings in places]
        free: set[int] = set()
        for request in many(_FREE, rows, back=True):
            reply: Reply = yield request
            free |= {int(row[0]) for row in reply.rows}
        written = yield from _renewed(claims, [settings for settings in places if settings in free])
        if written == len(free):
            return free
    return set()


def _still_ours(sql: Renews, claims: Sequence[Claim], places: Sequence[int]) -> SqlFlow[list[int]]:
    """Which of these are ours still, by a read that waits for nobody."""
    found: dict[Address, Record] = {}
    requests = (
        many(sql.look_many, [of_address(claims[settings].address) for settings in places], back=True) if places else []
    )
    for request in requests:
        reply: Reply = yield request
        found |= {one.address: one for one in records(map(as_read, reply.rows))}

    def is_ours(address: Address, token: bytes) -> bool:
        one = found.get(address)
        return one is not None and one.token == token and one.is_renewable

    return [settings for settings in places if is_ours(claims[settings].address, claims[settings].token)]


def at_once(sql: Renews, request: SqlRequest, claim: Claim) -> SqlFlow[Reply]:
    """Write one record without waiting for its row: it is looked at before, as InnoDB's shortest wait is a second."""
    try:
        yield SqlRequest(_HELD_NOW, of_address(claim.address), rows=True)
        # Somebody may lock it in between.
        return (yield from sql.waiting(request, int(WAIT_LEAST)))
    except Exception as error:
        if number_of(error) not in LOCKED:
            raise
        raise RowHeld.of(claim) from error


def _renewed_in_turn(sql: Renews, claim: Claim, seconds: int) -> SqlFlow[bool | None]:
    """Renew one that is locked; None: it is locked still."""
    try:
        reply: Reply = yield from sql.waiting(SqlRequest(sql.renew, of_claim(claim) | of_notes(None)), seconds)
    except Exception as error:
        if number_of(error) not in LOCKED:
            raise
        return None
    return reply.written == 1
