"""The rules for one guard, each a check of its declaration. Pure: no file, no store, no printing.

A rule that lacks the data to judge reports nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from onefold.config.declared import DeclaredGuard, DeclaredStore
from onefold.config.fields import CONTENTS, POSITIONS
from onefold.config.wording import above, below, said, spelled
from onefold.lint.ambiguous_errors import is_doubt
from onefold.lint.store_identity import is_volatile
from onefold.lint.unstable_keys import changes, is_of_a_try
from onefold.stores.kinds import kind_of

# The floor: a replay may itself be late, and be replayed.
TWICE: Final = 2

# The default is five. With more attempts than this, the hold that calls a person comes too late.
ATTEMPTS_MANY: Final = 100

FIX_KEY: Final = "Use a key that the sender mints once and keeps: header:idempotency-key, field:id or message_id"


FIX_BEFORE: Final = "Move its records first, with `onefold copy`, and leave migrate_from out"


class Said(NamedTuple):
    """A finding without its location: the field that it points at, the problem, and the fix."""

    field: str
    says: str
    fix: str


def floor(guard: DeclaredGuard) -> float:
    """Return the least `keep`: twice the largest of the summed duplicates, visibility timeout and longest replay.

    A queue redelivers a finished but unacknowledged message when the visibility timeout ends.
    """
    return TWICE * max(_late(guard), max(guard.replays.values(), default=0.0))


def _late(guard: DeclaredGuard) -> float:
    """Return how late a duplicate can be."""
    return max(sum(guard.duplicates.values()), guard.visibility_timeout or 0.0)


def keep_below_floor(guard: DeclaredGuard) -> Iterator[Said]:
    least, keep = floor(guard), guard.policy.keep
    # 100 ms and 200 ms are slightly more than 300 ms in binary.
    if keep >= least or math.isclose(keep, least):
        return
    late = _late(guard)
    source = max(guard.replays, key=guard.replays.__getitem__, default="")
    if source and guard.replays[source] >= late:
        why = f"{source} replays what is up to {spelled(guard.replays[source])} old"
    elif late > sum(guard.duplicates.values()):
        why = f"the queue redelivers after {spelled(late)} ({guard.visibility_from or 'visibility_timeout'})"
    else:
        why = f"duplicates can be {spelled(late)} late ({' + '.join(guard.duplicates)})"
    yield Said(
        "keep",
        f"keep is {spelled(keep)}, but {why}, so the floor is {spelled(least)}: twice that. "
        "A duplicate that comes after keep runs again",
        f"Set keep: {said(above(least))}",
    )


def money_by_default(guard: DeclaredGuard) -> Iterator[Said]:
    """Report money with a default `keep`; with `keep`, or sources of duplicates, the floor judges the numbers."""
    if guard.money and not (guard.keep_said or guard.duplicates or guard.replays):
        yield Said(
            "keep",
            f"money without keep, duplicates or replays: it is kept for {said(guard.policy.keep)} by default, and "
            "nothing rules out a later duplicate, which would pay again",
            "Set keep: forever, or declare where duplicates come from",
        )


def lease_not_shorter_than_keep(guard: DeclaredGuard) -> Iterator[Said]:
    lease, keep = guard.policy.lease, guard.policy.keep
    if lease >= keep:
        yield Said(
            "lease",
            f"lease is {spelled(lease)} and keep is {spelled(keep)}: a finished record would be forgotten before a "
            "crashed one is given up",
            f"Set lease below {spelled(keep)}, or keep well above {spelled(lease)}",
        )


def delivered_again_too_soon(guard: DeclaredGuard) -> Iterator[Said]:
    handler, visibility = guard.handler_time, guard.visibility_timeout
    if handler is not None and visibility is not None and visibility < handler:
        enough = said(above(TWICE * handler))
        yield Said(
            "settings" if guard.visibility_from else "visibility_timeout",
            f"{guard.visibility_from or 'visibility_timeout'} is {spelled(visibility)}, but the handler takes up to "
            f"{spelled(handler)}: the queue redelivers a message that is still running, and counts it as failed",
            f"Set it to {enough} there" if guard.visibility_from else f"Set visibility_timeout: {enough}",
        )


def _stores(guard: DeclaredGuard) -> Iterator[tuple[str, DeclaredStore]]:
    """Yield the fields that name a store of this guard. The previous one answers for deliveries before the move."""
    yield "store", guard.store
    if guard.migrate_from is not None:
        yield "migrate_from", guard.migrate_from


def money_on_what_evicts(guard: DeclaredGuard) -> Iterator[Said]:
    for field, store in _stores(guard) if guard.money else ():
        yield from _evicts(field, store)


def _evicts(field: str, store: DeclaredStore) -> Iterator[Said]:
    if store.evicts:
        yield Said(
            field,
            f"money is kept in the store {store.name!r}, which evicts: a full server forgets payments that are done, "
            "and their duplicates run again",
            FIX_BEFORE
            if field == "migrate_from"
            else "Use a store that does not evict: a database, or a Redis of its own with maxmemory-policy noeviction",
        )
    elif store.evicts is None and kind_of(store.kind).may_evict:
        yield Said(
            field,
            f"money is kept in the store {store.name!r}, and nothing says that this {store.kind} does not evict: with "
            "any maxmemory-policy but noeviction a full server forgets payments that are done",
            f"Ask `onefold doctor`, set maxmemory-policy noeviction, and declare evicts: false in stores.{store.name}",
        )


def money_with_a_crash_window(guard: DeclaredGuard) -> Iterator[Said]:
    if not guard.money or guard.mode == "transactional":
        return
    crash = guard.policy.after_crash
    if guard.mode == "seen":
        says = "money in mode seen: a crash between the effect and its record runs it again, and so do two deliveries"
        field, says = "mode", f"{says} at the same time"
    elif crash == "skip":
        field = "after_crash"
        says = (
            "money with after_crash skip: a payment that a crash interrupted counts as done, but may not have happened"
        )
    elif crash == "rerun" and guard.provider_memory is None:
        field = "after_crash"
        says = (
            "money in mode claim with after_crash rerun: a crash between the effect and its record runs it again, and "
            "nothing says that the other side knows the key"
        )
    else:
        return
    fix = "Set mode: transactional if the effect is rows in your own database; otherwise after_crash: hold, or a probe"
    if crash == "rerun" and guard.mode == "claim":
        fix += "; or pass on current().key_for(), and declare provider_memory"
    yield Said(field, says, fix)


def rerun_past_the_provider(guard: DeclaredGuard) -> Iterator[Said]:
    memory, policy = guard.provider_memory, guard.policy
    if memory is None or math.isinf(memory) or guard.mode != "claim" or policy.after_crash != "rerun":
        return
    # A rerun begins before rerun_within, and may call the other side as late as its handler's end.
    handler = guard.handler_time or 0.0
    if policy.rerun_within + handler < memory:
        return
    until = "without an end" if math.isinf(policy.rerun_within) else f"for {spelled(policy.rerun_within)}"
    spent = f" plus {spelled(handler)} in the handler" if handler and not math.isinf(policy.rerun_within) else ""
    shorter = below(memory - handler) if memory > handler else None
    yield Said(
        "rerun_within",
        f"a crashed run may be run again {until}{spent}, but the provider forgets the key after {spelled(memory)}: a "
        "rerun after that is a second effect",
        "Set after_crash: hold" if shorter is None else f"Set rerun_within: {said(shorter)}",
    )


def key_of_the_receiver(guard: DeclaredGuard) -> Iterator[Said]:
    if guard.key in POSITIONS:
        says = f"the key is {guard.key}, which is the position of this copy: a producer that retries makes another one"
        yield Said("key", f"{says}, and both run", FIX_KEY)
    elif guard.key in CONTENTS:
        says = f"the key is {guard.key}: two equal orders become one, and an order that gains a field becomes two"
        yield Said("key", says, FIX_KEY)
    elif guard.key is not None and is_of_a_try(guard.key):
        says = (
            f"the key is {guard.key}, which is made for each try, or shared by several operations: a retry has another"
        )
        yield Said("key", f"{says} and runs again, and of two operations that share it the second never runs", FIX_KEY)
    elif guard.key is not None and changes(guard.key):
        says = f"the key is {guard.key}, which changes with each delivery: a retry has another key, and runs again"
        yield Said("key", says, FIX_KEY)


def money_without_a_key(guard: DeclaredGuard) -> Iterator[Said]:
    if guard.money and guard.key is None:
        yield Said(
            "key",
            "money without a declared key: nothing says who mints it, and a task id, an offset or a request id in its "
            "place pays again on every retry",
            "Declare the key: header:idempotency-key, field:payment_id, argument:payment_id or message_id",
        )


def no_documented_floor(guard: DeclaredGuard) -> Iterator[Said]:
    """Report a guard that says nothing of late duplicates. What is kept forever needs no floor."""
    if not (guard.duplicates or guard.replays or math.isinf(guard.policy.keep)):
        yield Said(
            "keep",
            f"keep is {said(guard.policy.keep)}, but neither duplicates nor replays is declared: without a documented "
            "floor nobody can tell whether that is long enough",
            "Declare duplicates and replays, name the settings that have them (settings: kafka.properties), or set "
            "keep: forever",
        )


def number_that_drifted(guard: DeclaredGuard) -> Iterator[Said]:
    for one in guard.drifted:
        yield Said(
            one.field,
            f"{one.name} is {spelled(one.said)} here, but {spelled(one.found)} where it is set: {one.where}",
            f"Leave {one.name} out: it is read from the settings",
        )


def money_in_memory(guard: DeclaredGuard) -> Iterator[Said]:
    for field, store in _stores(guard) if guard.money else ():
        if kind_of(store.kind).in_process:
            yield Said(
                field,
                f"money is kept in the store {store.name!r}, which lives in the memory of one process: a restart "
                "forgets every payment, and a second worker never sees them",
                FIX_BEFORE
                if field == "migrate_from"
                else "Use a store that lasts, such as the database of the payments",
            )


def sqlite_in_memory(guard: DeclaredGuard) -> Iterator[Said]:
    for field, store in _stores(guard):
        if store.url is not None and is_volatile(str(store.url)):
            yield Said(
                field,
                f"the store {store.name!r} is SQLite in the memory of one connection, which no other could see: the "
                "store refuses to open it, and no delivery runs",
                "Name a file, sqlite:///onefold.db; for records in memory write memory:",
            )


def money_that_remembers_doubt(guard: DeclaredGuard) -> Iterator[Said]:
    for name in guard.final_errors if guard.money else ():
        if is_doubt(name):
            yield Said(
                "final_errors",
                f"money that remembers {name} as its final answer: after it nobody knows whether the payment happened, "
                "and every retry gets that failure",
                "Remember only what the other side has said for good, such as a declined card",
            )


def money_that_takes_doubt_for_no(guard: DeclaredGuard) -> Iterator[Said]:
    """Report money whose `ambiguous_errors` omits timeouts.

    Under rerun it has no meaning, and in a transaction nothing is unknown.
    """
    if not guard.money or guard.mode != "claim" or guard.policy.after_crash == "rerun":
        return
    missing = [
        kind.__name__ for kind in (TimeoutError, ConnectionError) if not _is_named(kind, guard.policy.ambiguous_errors)
    ]
    if missing:
        yield Said(
            "ambiguous_errors",
            f"money with ambiguous_errors that leave out {' and '.join(missing)}: they replace the usual ones, so that "
            "a payment which timed out, or lost its connection, counts as one that did not happen, and every retry "
            "pays again",
            f"Leave ambiguous_errors out, or add {' and '.join(f'builtins.{name}' for name in missing)}",
        )


def _is_named(kind: type[Exception], ambiguous: tuple[type[BaseException] | str, ...]) -> bool:
    """Return whether such an error counts as ambiguous: by its class, or by the dotted name of one of its classes."""
    names = {f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__}
    return any(one in names if isinstance(one, str) else issubclass(kind, one) for one in ambiguous)


def probe_that_knows_nothing(guard: DeclaredGuard) -> Iterator[Said]:
    module = (guard.probe or "").partition(":")[0].partition(".")[0]
    if module == "onefold" or module in sys.stdlib_module_names:
        whose = "Onefold itself" if module == "onefold" else "Python's own library"
        yield Said(
            "after_crash",
            f"the probe {guard.probe} is a function of {whose}: it cannot know what happened to this effect, and "
            "answers neither Done() nor NotDone()",
            "Name a function of yours that asks the other side, or set after_crash: hold",
        )


def attempts_without_an_end(guard: DeclaredGuard) -> Iterator[Said]:
    if guard.policy.max_attempts > ATTEMPTS_MANY:
        yield Said(
            "max_attempts",
            f"max_attempts is {guard.policy.max_attempts:,}: a message that kills its worker kills {ATTEMPTS_MANY} "
            "of them and continues, and nobody is alerted",
            "Leave max_attempts out (5), or set a number after which somebody should look at the message",
        )


def transactions_that_are_not_there(guard: DeclaredGuard) -> Iterator[Said]:
    if guard.mode == "transactional" and kind_of(guard.store.kind).has_transactions is False:
        yield Said(
            "mode",
            f"mode is transactional, but the store {guard.store.name!r} is {guard.store.kind}, which shares no "
            "transaction with your rows: the record and the work cannot commit together",
            "Use the database of the rows as the store, or mode: claim with after_crash: hold",
        )


def money_unprotected(guard: DeclaredGuard) -> Iterator[Said]:
    # In a transaction nothing runs without its store.
    if guard.money and guard.mode != "transactional" and guard.policy.store_down == "run":
        yield Said(
            "store_down",
            "money with store_down run: while the store is down every duplicate runs",
            "Set store_down: refuse",
        )
