"""Find, before the first delivery, what would make every delivery fail or lose its record: for `guard.check()`.

The judgements are the doctor's. What the doctor marks red counts here, except for what only matters after a crash, or
has passed: that is logged. In contrast to the doctor, a trial may create tables, where the guard would.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from onefold._concurrency.generators import Flow
from onefold.errors import OnefoldError, StoreUnavailable, UsageError
from onefold.health.examine import CONTRACT, judge_of, kind_of_facts
from onefold.health.report import Check, Grade, red
from onefold.health.trial import LEASE, OPERATION, RESULT, TTL
from onefold.stores.base import Address, Claim, Ending, Entry, Inspectable, State

log = logging.getLogger("onefold")

# Red for the doctor, and no reason to stop: they matter after a crash, or have happened, or pass.
AFTER_A_CRASH: Final = frozenset({"durability", "persistence"})
NOT_NOW: Final = AFTER_A_CRASH | {"evicted keys", "memory"}

# The state of servers rather than of their settings: waiting helps.
PASSING: Final = frozenset({"cluster"})

# What a store that is only read has to have.
TO_READ: Final = frozenset({"tables", "table"})


class StoreProblems(UsageError):
    """The store cannot be used as it is set up, or loses records. Each problem is in the message, with its fix."""

    # Whether deliveries work all the same: the server evicts records, say.
    works: bool = False


class Found(NamedTuple):
    """The problems of one store, and whether deliveries work all the same."""

    problems: tuple[Check, ...] = ()
    works: bool = True


def check(name: str, store: Any, old: Any = None, *, old_is_table: bool = False) -> Flow[None]:
    """Raise `StoreProblems` or `StoreUnavailable`, with everything that was found about both stores of a guard.

    `name` is the guard, for the message; `old` is what it migrates from, if anything: a store, or the lookup of a
    hand-made table.
    """
    found = yield from _problems_of(name, store)
    look = _problems_of_table if old_is_table else _problems_of_old
    earlier = Found() if old is None else (yield from look(old))
    problems = (*found.problems, *earlier.problems)
    if not problems:
        return
    message = f"{name}: {'; '.join(map(_line, problems))}"
    if all(problem.name in PASSING for problem in problems):
        raise StoreUnavailable(message)
    error = StoreProblems(message)
    error.works = found.works and earlier.works
    raise error


def _line(problem: Check) -> str:
    return f"{problem.name}: {problem.reason}. {problem.fix}" if problem.fix else f"{problem.name}: {problem.reason}"


def _problems_of(name: str, store: Any) -> Flow[Found]:
    facts = yield from _facts_of(store)
    if kind_of_facts(facts).in_process:
        return Found()
    judge = judge_of(facts)
    reds = [] if judge is None else [check for check in judge.judge(facts) if check.grade is Grade.RED]
    for check in reds:
        if check.name in NOT_NOW:
            log.warning("%s: %s", name, _line(check))
    problems = tuple(check for check in reds if check.name not in NOT_NOW)
    if problems and judge is not None and judge.hindrance(facts) is not None:
        return Found(problems, works=False)
    refusal = yield from _tried(store, reached=bool(facts))
    return Found(problems) if refusal is None else Found((*problems, refusal), works=False)


def _problems_of_old(store: Any) -> Flow[Found]:
    """Look at the store that records are taken over from: it has to be readable."""
    facts = yield from _facts_of(store)
    judge = judge_of(facts)
    judged = [] if judge is None else judge.judge(facts)
    problems = [check for check in judged if check.grade is Grade.RED and check.name in TO_READ]
    if not problems:
        try:
            yield partial(store.read, _address())
        except OnefoldError as error:
            problems = [_refused(error, reached=bool(facts))]
    return Found(tuple(check._replace(name=f"migrate_from: {check.name}") for check in problems), works=not problems)


def _problems_of_table(lookup: Any) -> Flow[Found]:
    """Look at a hand-made table that is read in place of an old store."""
    try:
        yield lookup.check
    except StoreUnavailable:
        raise
    except OnefoldError as error:
        return Found((red("migrate_from", str(error).removesuffix("."), ""),), works=False)
    return Found()


def _facts_of(store: Any) -> Flow[Mapping[str, Any]]:
    if not isinstance(store, Inspectable):
        return {}
    try:
        return (yield store.facts)  # type: ignore[no-any-return]
    except OnefoldError:
        raise
    except Exception:  # noqa: BLE001 - a third-party store may raise anything; it is tried out all the same
        return {}


def _tried(store: Any, *, reached: bool) -> Flow[Check | None]:
    """Write a record, read it and remove it, as each delivery has to. Return the problem; None if there is none."""
    entry = Entry(address=_address(), token=secrets.token_bytes(16), lease=LEASE, ttl=TTL)
    claim = Claim(entry.address, entry.token, LEASE, TTL)
    ending = Ending(state=State.DONE, ttl=TTL, result=RESULT)
    try:
        refused = yield partial(store.claim, entry)
        finished = yield partial(store.finish, claim, ending)
        found = yield partial(store.read, entry.address)
        removed = yield partial(store.release, claim)
    except OnefoldError as error:
        with suppress(Exception):
            yield partial(store.release, claim)
        return _refused(error, reached=reached)
    if refused is None and finished and found is not None and removed:
        return None
    return red("trial", "the store breaks its contract: a new record was not written, read and removed", CONTRACT)


def _refused(error: OnefoldError, *, reached: bool) -> Check:
    """Return the problem behind an error. A server that does not answer is none: raise it again."""
    if isinstance(error, StoreUnavailable) and not (reached and error.reached):
        raise error
    return red("trial", str(error).removesuffix("."), "")


def _address() -> Address:
    return Address("", OPERATION, secrets.token_hex(16))
