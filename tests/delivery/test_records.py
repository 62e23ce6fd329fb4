"""Records by hand: resolved, forgotten, bypassed; and the keys for the systems downstream."""

from __future__ import annotations

import asyncio
import itertools
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from onefold import (
    FOREVER,
    AsyncGuard,
    ClaimLost,
    Done,
    Failed,
    Guard,
    Held,
    InProgress,
    MissingKey,
    NotDone,
    OutcomeUnknown,
    Policy,
    Record,
    RememberedFailure,
    Rerun,
    State,
    UsageError,
    current,
)
from onefold._model.remarks import HISTORY_MAX, LEFT_OUT, SIGNED_MAX
from onefold.events import Event, Kind
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from tests.support import Clock, Handler, Heard, die_running, elsewhere

CHARGE = address("charge", "pay_1")

HOLD = Policy(after_crash="hold", keep=FOREVER)

WHO: dict[str, Any] = {"by": "ada", "reason": "asked the bank"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def record(store: MemoryStore) -> Record:
    found = store.read(CHARGE)
    assert found is not None
    return found


def charge(guard: Guard, call: Callable[[], Any] = lambda: "ok", **options: Any) -> Any:
    return guard.run("charge", "pay_1", call, **options)


def put_held(store: MemoryStore, policy: Policy = HOLD) -> Guard:
    """A guard on this store, where a charge has ended in a doubt."""
    guard = Guard(store, policy=policy)
    with pytest.raises(OutcomeUnknown):
        charge(guard, Handler(error=OutcomeUnknown("no answer")))
    assert record(store).state is State.HELD
    return guard


# Resolved.


def signed(found: Record) -> list[str]:
    """What was said of a record, the newest first, each without its time, which has to be there."""
    said = [re.subn(r" at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: ", ": ", one) for one in found.history]
    assert all(timed == one.startswith("resolved as ") for one, timed in said)
    return [one for one, _ in said]


def test_a_resolution_keeps_the_age_and_the_attempts_unless_it_begins_anew(clock: Clock, store: MemoryStore) -> None:
    guard = put_held(store)
    clock.advance(600)

    guard.resolve("charge", "pay_1", Done("receipt"), **WHO)
    settled = record(store)
    guard.resolve("charge", "pay_1", Rerun(), **WHO)

    assert (settled.age, settled.attempt) == (600, 1)
    assert (record(store).age, record(store).attempt) == (0, 0)


def test_a_reason_cannot_be_mistaken_for_an_earlier_remark(store: MemoryStore) -> None:
    guard = put_held(store)

    guard.resolve("charge", "pay_1", Rerun(), by="eve", reason="x | before: resolved as done by ada: yes")

    assert len(record(store).history) == 2


def test_the_history_of_a_record_is_bounded_and_its_latest_remark_is_whole(store: MemoryStore) -> None:
    guard = put_held(store)

    for number in range(200):
        guard.resolve("charge", "pay_1", Done(number), by="ada", reason=f"{'x' * 100}{number}")

    *resolutions, left_out, first = record(store).history
    latest = range(199, 199 - len(resolutions), -1)
    assert [one.endswith(f"{'x' * 100}{number}") for one, number in zip(resolutions, latest, strict=True)] == [
        True
    ] * 25
    assert (left_out, first) == (LEFT_OUT, "attempt 1 ended in OutcomeUnknown")
    assert len(record(store).remark) < HISTORY_MAX + 300


def test_the_longest_reasons_are_whole_in_the_history_and_longer_ones_refused(store: MemoryStore) -> None:
    guard = put_held(store)
    reason = "x" * (SIGNED_MAX - 3)

    for number in range(9):
        guard.resolve("charge", "pay_1", Done(number), by="ada", reason=reason)
    with pytest.raises(UsageError, match="at most 1,000 characters together"):
        guard.resolve("charge", "pay_1", Rerun(), by="ada", reason=f"{reason}x")

    *resolutions, left_out, first = record(store).history
    assert [one.endswith(f": {reason}") for one in resolutions] == [True] * 4
    assert (left_out, first) == (LEFT_OUT, "attempt 1 ended in OutcomeUnknown")


def test_only_the_record_that_was_read_is_resolved(store: MemoryStore) -> None:
    guard = put_held(store)
    read = record(store)
    guard.resolve("charge", "pay_1", Done("receipt"), by="ada", reason="on the statement")

    with pytest.raises(UsageError, match="has changed in the meantime, and was left as it is now"):
        guard.resolve("charge", "pay_1", Rerun(), by="bob", reason="no trace", only=read)
    guard.resolve("charge", "pay_1", Rerun(), by="bob", reason="no trace", only=record(store))

    by_bob, by_ada = "resolved as rerun by bob: no trace", "resolved as done by ada: on the statement"
    assert signed(record(store))[:2] == [by_bob, by_ada]


BY_ADA = "resolved as rerun by ada: asked the bank"
FIRST = "attempt 1 ended in OutcomeUnknown"


def test_a_later_run_keeps_who_let_it_run_and_why(store: MemoryStore) -> None:
    guard = put_held(store)

    guard.resolve("charge", "pay_1", Rerun(), **WHO)
    seen: list[Record] = []

    def timing_out() -> None:
        seen.append(record(store))
        raise OutcomeUnknown("again")

    with pytest.raises(OutcomeUnknown):
        charge(guard, timing_out)
    held = record(store)
    with pytest.raises(Held) as refused:
        charge(guard)
    guard.resolve("charge", "pay_1", Rerun(), **WHO)
    outcome = charge(guard)
    duplicate = charge(guard, pytest.fail)

    assert signed(seen[0]) == [BY_ADA, FIRST]
    assert signed(held) == [FIRST, BY_ADA, FIRST]
    assert refused.value.remark == FIRST
    assert signed(record(store)) == [BY_ADA, FIRST, BY_ADA, FIRST]
    # It has run since: nobody may correct what a handler has answered.
    assert (outcome.remark, duplicate.remark, record(store).latest_remark) == ("", "", "")
    assert not record(store).was_resolved
    with pytest.raises(UsageError, match="it is done, not held"):
        guard.resolve("charge", "pay_1", Rerun(), **WHO)


def test_a_crash_a_release_and_a_bypass_keep_it_too(clock: Clock, store: MemoryStore) -> None:
    guard = put_held(store, Policy(after_crash="hold", max_attempts=9))
    guard.resolve("charge", "pay_1", Rerun(), **WHO)
    other = Guard(store, policy=Policy(after_crash="rerun"))

    with pytest.raises(KeyboardInterrupt):
        charge(other, Handler(error=KeyboardInterrupt()))
    released = record(store)
    with pytest.raises(SystemExit):
        charge(guard, Handler(error=SystemExit()))
    clock.advance(999)
    with pytest.raises(Held):
        charge(guard)
    abandoned = record(store)
    guard.resolve("charge", "pay_1", Done("receipt"), **WHO)
    guard.run("charge", "pay_1", lambda: "again", bypass=True)

    by_ada = "resolved as done by ada: asked the bank"
    assert signed(released) == ["released: KeyboardInterrupt", BY_ADA, FIRST]
    gone = "attempt 2 was abandoned: its lease ended without an answer"
    assert signed(abandoned) == [gone, BY_ADA, FIRST]
    assert signed(record(store)) == [by_ada, gone, BY_ADA, FIRST]
    assert not record(store).was_resolved


def test_the_event_of_a_resolution_tells_of_this_one_only(store: MemoryStore) -> None:
    guard, events = put_held(store), list[Event]()
    guard.resolve("charge", "pay_1", Rerun(), **WHO)

    with_listener = Guard(store, on_event=events.append)
    with_listener.resolve("charge", "pay_1", Done(1), by="bob", reason="a typo")

    (event,) = [one for one in events if one.kind is Kind.RESOLVED]
    assert event.detail.startswith("resolved as done by bob at ")
    assert "ada" not in event.detail


def test_resolved_as_done_every_duplicate_gets_the_value_and_the_record_says_who_and_why(store: MemoryStore) -> None:
    guard = put_held(store)

    before = guard.resolve("charge", "pay_1", Done("receipt"), **WHO)
    outcome = charge(guard, pytest.fail)

    assert before.state is State.HELD
    assert (outcome.value, outcome.replayed) == ("receipt", True)
    assert record(store).latest_remark == outcome.remark
    assert signed(record(store)) == ["resolved as done by ada: asked the bank", "attempt 1 ended in OutcomeUnknown"]


def test_resolved_as_failed_every_duplicate_gets_the_error(store: MemoryStore) -> None:
    guard = put_held(store, HOLD.replace(final_errors=(ValueError,)))
    guard.resolve("charge", "pay_1", Failed(ValueError("refused")), **WHO)

    with pytest.raises(ValueError, match="refused"):
        charge(guard, pytest.fail)
    with pytest.raises(RememberedFailure, match="ValueError: refused"):
        charge(Guard(store), pytest.fail)

    assert record(store).state is State.FAILED


def test_resolved_as_rerun_the_next_delivery_runs_with_the_same_downstream_key(store: MemoryStore) -> None:
    guard = Guard(store, policy=HOLD)
    keys: list[str] = []

    def handler() -> int:
        keys.append(current().key_for("bank"))
        if len(keys) == 1:
            raise OutcomeUnknown
        return current().attempt

    with pytest.raises(OutcomeUnknown):
        charge(guard, handler)
    guard.resolve("charge", "pay_1", Rerun(), **WHO)
    remark, _ = signed(record(store))
    outcome = charge(guard, handler)

    assert (outcome.value, outcome.replayed) == (1, False)
    assert keys[0] == keys[1]
    assert remark == "resolved as rerun by ada: asked the bank"


@pytest.mark.parametrize("resolution", [Done("receipt"), Failed(ValueError("refused")), Rerun()])
def test_after_a_resolution_the_late_owner_is_refused(clock: Clock, store: MemoryStore, resolution: Any) -> None:
    guard = Guard(store, policy=HOLD)
    resolved: list[Record] = []

    def slow() -> str:
        clock.advance(31)
        elsewhere(lambda: guard.resolve("charge", "pay_1", resolution, **WHO))
        resolved.append(record(store))
        return "late"

    with pytest.raises(ClaimLost) as lost:
        charge(guard, slow)

    assert lost.value.value == "late"
    assert record(store) == resolved[0]


def test_only_what_is_in_doubt_can_be_resolved(store: MemoryStore) -> None:
    guard = Guard(store, policy=HOLD)
    charge(guard)
    die_running(store, "charge", "running", HOLD)

    with pytest.raises(UsageError, match="it is done, not held"):
        guard.resolve("charge", "pay_1", Rerun(), **WHO)
    with pytest.raises(InProgress):
        guard.resolve("charge", "running", Rerun(), **WHO)


@pytest.mark.parametrize("first", [Done("recipt"), Failed(ValueError("refused")), Rerun()])
@pytest.mark.parametrize("second", [Done("receipt"), Failed(KeyError("gone")), Rerun()])
def test_what_was_resolved_by_hand_can_be_corrected_by_hand(store: MemoryStore, first: Any, second: Any) -> None:
    guard = put_held(store)

    guard.resolve("charge", "pay_1", first, **WHO)
    before = guard.resolve("charge", "pay_1", second, by="bob", reason="a typo")

    name = type(second).__name__.lower()
    was = f"resolved as {type(first).__name__.lower()} by ada: asked the bank"
    earlier = [was, "attempt 1 ended in OutcomeUnknown"]
    assert signed(before) == earlier
    assert signed(record(store)) == [f"resolved as {name} by bob: a typo", *earlier]
    expected = {"done": State.DONE, "failed": State.FAILED, "rerun": State.OPEN}
    assert record(store).state is expected[name]


def test_a_value_that_a_person_gives_is_of_its_own_type_unless_told(store: MemoryStore) -> None:
    guard = put_held(store)
    paid = Decimal("4.20")

    with pytest.raises(UsageError, match=r"Done\(object\) cannot be stored: .*Pass returns="):
        guard.resolve("charge", "pay_1", Done(object()), **WHO)
    guard.resolve("charge", "pay_1", Done(paid), **WHO)

    assert charge(guard, pytest.fail, returns=Decimal).value == paid


def test_what_ran_after_a_resolution_is_not_corrected(store: MemoryStore) -> None:
    guard = put_held(store)
    guard.resolve("charge", "pay_1", Rerun(), **WHO)
    charge(guard)

    with pytest.raises(UsageError, match="it is done, not held"):
        guard.resolve("charge", "pay_1", Rerun(), **WHO)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("done", "a str"),
        (Done, "Done without parentheses"),
        (Rerun, "Rerun without parentheses"),
        (None, "a NoneType"),
        (True, "a bool"),
        (NotDone(), "a NotDone"),
    ],
    ids=repr,
)
def test_what_is_no_resolution_is_refused_and_changes_nothing(store: MemoryStore, wrong: Any, named: str) -> None:
    guard = put_held(store)
    before = record(store)

    with pytest.raises(
        UsageError, match=rf"Done\(value\), Failed\(error\) or Rerun\(\), not {named}\. Nothing was changed"
    ):
        guard.resolve("charge", "pay_1", wrong, **WHO)

    assert record(store) == before


def test_an_async_guard_resolves_only_the_record_that_was_read() -> None:
    guard = AsyncGuard("memory:", policy=HOLD)

    async def doubtful() -> int:
        raise OutcomeUnknown

    async def story() -> Record | None:
        with pytest.raises(OutcomeUnknown):
            await guard.run("charge", "pay_1", doubtful)
        read = await guard.read("charge", "pay_1")
        await guard.resolve("charge", "pay_1", Rerun(), **WHO, only=read)
        with pytest.raises(UsageError, match="has changed in the meantime"):
            await guard.resolve("charge", "pay_1", Done(7), **WHO, only=read)
        return await guard.read("charge", "pay_1")

    found = asyncio.run(story())
    assert found is not None
    assert found.state is State.OPEN


def test_an_async_guard_resolves_and_forgets_too() -> None:
    guard = AsyncGuard("memory:", policy=HOLD)

    async def doubtful() -> int:
        raise OutcomeUnknown

    async def story() -> tuple[int, list[bool], Record | None]:
        with pytest.raises(OutcomeUnknown):
            await guard.run("charge", "pay_1", doubtful)
        await guard.resolve("charge", "pay_1", Done(7), **WHO)
        replayed = await guard.run("charge", "pay_1", doubtful)
        forgotten = [await guard.forget("charge", "pay_1") for _ in range(2)]
        return replayed.value, forgotten, await guard.read("charge", "pay_1")

    assert asyncio.run(story()) == (7, [True, False], None)


# Forgotten.


def test_what_is_forgotten_runs_again_and_what_runs_is_not_forgotten(store: MemoryStore) -> None:
    guard, handler = Guard(store), Handler()
    charge(guard, handler)

    forgotten = [guard.forget("charge", "pay_1") for _ in range(2)]
    again = charge(guard, handler)
    die_running(store, "charge", "running")

    assert forgotten == [True, False]
    assert (again.replayed, handler.starts) == (False, 2)
    with pytest.raises(InProgress):
        guard.forget("charge", "running")


# Bypassed, and the keys for others.


@pytest.mark.parametrize("mode", ["claim", "seen"])
def test_a_bypass_runs_what_is_finished_once_more_and_the_record_says_so(store: MemoryStore, mode: Any) -> None:
    heard = Heard()
    guard = Guard(store, policy=Policy(mode=mode), on_event=heard)
    keys = [charge(guard, lambda: current().key_for("bank")).value for _ in range(2)]

    bypassed = charge(guard, lambda: current().key_for("bank"), bypass=True)
    replayed = charge(guard, pytest.fail)

    assert keys[0] == keys[1] != bypassed.value
    assert (bypassed.replayed, replayed.value) == (False, bypassed.value)
    assert record(store).bypasses == 1
    assert "bypassed" in heard.kinds


def test_a_bypass_of_a_decorated_function_runs_it_and_is_refused_while_it_runs_or_is_held(store: MemoryStore) -> None:
    guard, handler = Guard(store, policy=HOLD), Handler()
    decorated = guard.idempotent("charge", key="number")(lambda number: handler())
    decorated(1)

    assert decorated.bypass(1).replayed is False
    assert handler.starts == 2
    die_running(store, "charge", "running", HOLD)
    put_held(store)
    with pytest.raises(InProgress):
        guard.run("charge", "running", pytest.fail, bypass=True)
    with pytest.raises(Held):
        charge(guard, pytest.fail, bypass=True)


def test_the_address_of_a_key_is_that_of_its_record_in_the_guards_scope(store: MemoryStore) -> None:
    guard = Guard(store, scope="acme")
    guard.run("charge", 7, lambda: "ok")
    guard.run("charge", 7, lambda: "ok", scope="bakery")

    found = [guard.address("charge", 7), AsyncGuard("memory:").address("charge", "7", scope="bakery")]

    assert [store.read(one) is not None for one in found] == [True, True]
    assert [one.scope for one in found] == ["acme", "bakery"]
    with pytest.raises(MissingKey):
        guard.address("charge", "")


def test_the_key_for_others_is_the_same_on_every_attempt_machine_and_rerun(clock: Clock) -> None:
    keys: list[str] = []

    def handler() -> None:
        keys.append(current().key_for("bank"))
        raise TimeoutError

    for store in (MemoryStore(clock=clock), MemoryStore(clock=clock)):
        die_running(store, "charge", "pay_1")
        clock.advance(31)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                charge(Guard(store), handler)

    assert len(keys) == 4
    assert len(set(keys)) == 1
    assert uuid.UUID(keys[0]).version == 8


def test_the_key_for_others_depends_on_scope_operation_key_and_name(store: MemoryStore) -> None:
    guard = Guard(store)

    pairs = [
        guard.run(operation, key, lambda: [current().key_for("bank"), current().key_for("post")], scope=scope).value
        for scope, operation, key in itertools.product((None, "acme"), ("charge", "mail"), ("1", "2"))
    ]

    assert len({key for pair in pairs for key in pair}) == 16


def test_words_that_not_every_store_can_keep_are_written_out() -> None:
    class Unstorable(Exception):
        """Its words hold what PostgreSQL refuses, and what UTF-8 cannot say."""

    class Codec:
        def check(self, _type: Any) -> None: ...

        def encode(self, _value: Any, _type: Any) -> bytes:
            raise Unstorable("nul \0, half \ud800")

        def decode(self, _stored: bytes, _type: Any) -> Any: ...

    with Guard("memory:", codec=Codec()) as guard:
        guard.run("charge", "pay_1", lambda: "receipt")
        kept = guard.read("charge", "pay_1")
    with Guard("memory:", policy=HOLD) as guard:
        with pytest.raises(TimeoutError):
            guard.run("charge", "pay_1", Handler(error=TimeoutError()))
        guard.resolve("charge", "pay_1", Done(), by="ada\0", reason="why \udfff")
        resolved = guard.read("charge", "pay_1")

    assert kept is not None
    assert resolved is not None
    assert kept.remark == "nul \\0, half \\ud800"
    assert signed(resolved)[0].endswith("by ada\\0: why \\udfff")


def test_forgetting_only_what_was_read_leaves_what_was_written_since() -> None:
    guard = Guard("memory:")
    guard.run("charge", "order-1", lambda: 1)
    read = guard.read("charge", "order-1")
    guard.forget("charge", "order-1")
    guard.run("charge", "order-1", lambda: 2)

    assert not guard.forget("charge", "order-1", only=read)
    assert guard.run("charge", "order-1", lambda: 3).value == 2
    assert guard.forget("charge", "order-1", only=guard.read("charge", "order-1"))
    assert guard.read("charge", "order-1") is None


@pytest.mark.parametrize("key", ["pay_1", "nobody's"])
def test_only_has_to_be_the_record_of_this_key(store: MemoryStore, key: str) -> None:
    guard = put_held(store)
    guard.run("charge", "pay_2", lambda: 1)
    for only in ("a token", CHARGE, guard.read("charge", "pay_2")):
        wrong: Any = only
        with pytest.raises(UsageError, match=r"only= is .*, and has to be the record of this key"):
            guard.resolve("charge", key, Rerun(), **WHO, only=wrong)
        with pytest.raises(UsageError, match=r"only= is .*, and has to be the record of this key"):
            guard.forget("charge", key, only=wrong)

    assert record(store).state is State.HELD


@pytest.mark.parametrize("signed", [{"by": "", "reason": "asked"}, {"by": "ada", "reason": " "}])
def test_a_resolution_says_who_and_why(store: MemoryStore, signed: dict[str, Any]) -> None:
    with pytest.raises(TimeoutError):
        Guard(store, policy=HOLD).run("charge", "pay_1", Handler(error=TimeoutError()))

    with pytest.raises(UsageError, match="neither is empty"):
        Guard(store).resolve("charge", "pay_1", Done(), **signed)

    assert record(store).state is State.HELD
