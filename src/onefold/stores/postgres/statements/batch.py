"""Many addresses in one PostgreSQL statement: their values are sent as a table, one array for each column."""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from onefold._model import Address, Claim, Close, Ending, Entry, Released, State
from onefold.stores.postgres.errors import LOCKED, code_of
from onefold.stores.postgres.statements.fragments import (
    AT_ADDRESS,
    ENDED,
    INTO,
    RENEWED,
    SELECTED,
    TYPES,
    UNLESS_ALIVE,
    VALUES,
    from_asked,
)
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.locked import turns
from onefold.stores.sql.records import (
    ADDRESS,
    ALIVE,
    AT,
    OURS,
    TABLE,
    Parameters,
    at,
    of_address,
    of_claim,
    of_ending,
    of_entry,
    of_released,
    records,
)
from onefold.stores.sql.statements import LIVE, assigned, settled

# The limit for one message of a batch: results may be large, and the server accepts no value above 1 GB.
BATCH_BYTES: Final = 64 * 1024 * 1024

# The shortest wait for a locked row: shorter locks are gone by then.
WAIT_LEAST: Final = 0.05

_ENTRY: Final = tuple(TYPES)
_CLAIM: Final = (*ADDRESS, "token", "lease", "ttl")
_CLOSE: Final = (*ADDRESS, "token", "state", "ttl", "attempt", "notes", "result", "omitted", "remark")


def _asked(names: Sequence[str]) -> str:
    arrays = ", ".join(f":{name}::{TYPES.get(name, 'text')}[]" for name in names)
    columns = ", ".join(f"asked_{name}" for name in names)
    return f"asked AS (SELECT * FROM unnest({arrays}) WITH ORDINALITY AS asked ({columns}, asked_number))"


_THERE: Final = from_asked(
    f"SELECT {AT_ADDRESS}, {SELECTED} FROM {TABLE} WHERE ({AT_ADDRESS}) IN "
    f"(SELECT asked_scope, asked_operation, asked_key FROM asked) AND {ALIVE}"
)

_READ_ALL: Final = f"WITH {_asked(ADDRESS)} {_THERE}"

_WRITTEN: Final = from_asked(
    f"INSERT INTO {TABLE} ({INTO}) SELECT {VALUES} FROM asked "
    f"WHERE NOT EXISTS (SELECT 1 FROM found WHERE {AT}) ORDER BY asked_number "
    f"{UNLESS_ALIVE} RETURNING {AT_ADDRESS}, {SELECTED}"
)

# In the order of the addresses, which is the order of locking.
_INSERT_ALL: Final = (
    f"WITH {_asked(_ENTRY)}, found AS MATERIALIZED ({_THERE}), written AS ({_WRITTEN}) "
    "SELECT * FROM found UNION ALL SELECT * FROM written"
)

# A batch renews without notes.
_RENEWED: Final = from_asked(
    f"UPDATE {TABLE} SET {assigned({name: value for name, value in RENEWED.items() if name != 'notes'})}"
)
_LIVE: Final = from_asked(LIVE)

# Skips rows that others have locked: the renewal of one claim must not wait for the row of another.
_EXTEND_ALL: Final = (
    f"WITH {_asked(_CLAIM)}, free AS MATERIALIZED (SELECT asked.* FROM {TABLE} AS kept, asked WHERE {_LIVE} "
    "FOR NO KEY UPDATE OF kept SKIP LOCKED) "
    f"{_RENEWED} FROM free WHERE {at('asked_')} RETURNING asked_number"
)

# For one locked row. The setting ends with the statement: nothing may be left in a session behind a pooler.
_EXTEND_WAITING: Final = (
    f"WITH {_asked((*_CLAIM, 'wait'))}, "
    "patient AS MATERIALIZED (SELECT asked.*, set_config('lock_timeout', asked_wait, true) FROM asked) "
    f"{_RENEWED} FROM patient WHERE {_LIVE} RETURNING asked_number"
)

# A state means that the record stays: ended, or open with its attempts and steps.
_SETTLED: Final = from_asked(
    f"UPDATE {TABLE} SET {assigned(settled(ENDED))} FROM asked WHERE {OURS} AND asked_state IS NOT NULL"
)
_FORGOTTEN: Final = from_asked(f"DELETE FROM {TABLE} USING asked WHERE {OURS} AND asked_state IS NULL")
_CLOSE_ALL: Final = (
    f"WITH {_asked(_CLOSE)}, settled AS ({_SETTLED} RETURNING asked_number), "
    f"forgotten AS ({_FORGOTTEN} RETURNING asked_number) "
    "SELECT asked_number FROM settled UNION ALL SELECT asked_number FROM forgotten"
)


def inserting(entries: Sequence[Entry]) -> SqlRequest:
    return SqlRequest(_INSERT_ALL, _arrays(_ENTRY, map(of_entry, entries)), rows=True)


def reading(addresses: Sequence[Address]) -> SqlRequest:
    return SqlRequest(_READ_ALL, _arrays(ADDRESS, map(of_address, addresses)), rows=True)


def extend_all(claims: Sequence[Claim], shortest: float) -> SqlFlow[list[bool | None]]:
    """Renew all unlocked rows in one statement, then the locked ones one by one."""
    answers: list[bool | None] = [False] * len(claims)
    for indexes in _rounds([claim.address for claim in claims]):
        values = _arrays(_CLAIM, (of_claim(claims[index]) for index in indexes))
        reply: Reply = yield SqlRequest(_EXTEND_ALL, values, rows=True)
        for (number,) in reply.rows:
            answers[indexes[number - 1]] = True
    missing = [index for index, answer in enumerate(answers) if not answer]
    if not missing:
        return answers
    locked = yield from _still_ours(claims, missing)
    for index in locked:
        answers[index] = None
    chosen, seconds = turns(claims, locked, WAIT_LEAST, shortest)
    for index in chosen:
        answers[index] = yield from _renewed_in_turn(claims[index], seconds)
    return answers


def _still_ours(claims: Sequence[Claim], indexes: Sequence[int]) -> SqlFlow[list[int]]:
    """Return which of these claims are still ours, by a read that takes no lock."""
    there: Reply = yield reading([claims[index].address for index in indexes])
    found = {one.address: one for one in records(there.rows)}

    def is_ours(claim: Claim) -> bool:
        one = found.get(claim.address)
        return one is not None and one.token == claim.token and one.is_renewable

    return [index for index in indexes if is_ours(claims[index])]


def _renewed_in_turn(claim: Claim, seconds: float) -> SqlFlow[bool | None]:
    """Renew a locked claim; return None if it is still locked."""
    values = _arrays((*_CLAIM, "wait"), [of_claim(claim) | {"wait": f"{round(seconds * 1000)}ms"}])
    try:
        reply: Reply = yield SqlRequest(_EXTEND_WAITING, values, rows=True)
    except Exception as error:
        if code_of(error) != LOCKED:
            raise
        return None
    return bool(reply.rows)


def close_all(closes: Sequence[Close]) -> SqlFlow[list[bool]]:
    """Finish and release in one statement, then count releases of missing records as successful."""
    closed = [False] * len(closes)
    for indexes in _rounds([close.claim.address for close in closes]):
        for part in _batches(indexes, closes):
            values = _arrays(_CLOSE, (_closing(closes[index]) for index in part))
            reply: Reply = yield SqlRequest(_CLOSE_ALL, values, rows=True)
            for (number,) in reply.rows:
                closed[part[number - 1]] = True
    doubtful = [at for at, close in enumerate(closes) if not closed[at] and not isinstance(close.by, Ending)]
    if doubtful:
        there: Reply = yield reading([closes[at].claim.address for at in doubtful])
        known = {Address(*row[:3]) for row in there.rows}
        for at in doubtful:
            closed[at] = closes[at].claim.address not in known
    return closed


def _closing(close: Close) -> Parameters:
    if isinstance(close.by, Ending):
        return of_claim(close.claim) | of_ending(close.by)
    if isinstance(close.by, Released):
        return of_claim(close.claim) | of_released(close.by) | {"state": State.OPEN.value}
    return of_claim(close.claim) | {"ttl": None}


def _arrays(names: Sequence[str], rows: Iterable[Parameters]) -> Parameters:
    """Return one list for each name, in the order of the rows."""
    kept = list(rows)
    arrays: dict[str, list[Any]] = {name: [row.get(name) for row in kept] for name in names}
    return arrays


def _rounds(addresses: Sequence[Address]) -> list[list[int]]:
    """Return the indexes of these addresses, sorted by address, in rounds.

    An address that occurs twice is in two rounds: no statement can change a record twice.
    """
    rounds: list[list[int]] = []
    seen: dict[Address, int] = {}
    for index in sorted(range(len(addresses)), key=lambda index: addresses[index].parts):
        number = seen.get(addresses[index], 0)
        seen[addresses[index]] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds


def _batches(indexes: Sequence[int], closes: Sequence[Close]) -> Iterator[list[int]]:
    """Yield these indexes in parts, each small enough for one message."""
    part: list[int] = []
    size = 0
    for index in indexes:
        by = closes[index].by
        more = len(getattr(by, "result", None) or b"") + len(getattr(by, "notes", None) or b"")
        if part and size + more > BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append(index)
        size += more
    if part:
        yield part
