"""`count_duplicates=True`: a finished record counts what it answers, and nothing else about it changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from onefold import (
    TX,
    AsyncGuard,
    Done,
    Event,
    Guard,
    Held,
    InProgress,
    KeyReused,
    Record,
    RecordColumn,
    State,
    UsageError,
    current,
)
from onefold._delivery.claim import COUNT_ROUNDS_MAX
from onefold.events import Kind
from onefold.keys import address
from onefold.stores.base import Claim, Ending
from onefold.stores.memory import MemoryStore
from tests.support import AsyncProxyStore, BatchingProxyStore, Clock, Died, ProxyStore

ADDRESS = address("charge", "k")
_ENDING = Ending(state=State.DONE, ttl=60.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ProxyStore:
    return ProxyStore(MemoryStore(clock=clock))


@pytest.fixture
def guard(store: ProxyStore) -> Guard:
    return Guard(store, count_duplicates=True)


def charge(guard: Guard, times: int = 1, **options: Any) -> list[Any]:
    return [guard.run("charge", "k", lambda: "paid", **options) for _ in range(times)]


def found(store: ProxyStore) -> Record:
    record = store.inner.read(ADDRESS)
    assert record is not None
    return record


def test_every_duplicate_that_a_finished_record_answers_is_counted(guard: Guard) -> None:
    charge(guard)
    first = guard.read("charge", "k")

    outcomes = charge(guard, 3)

    record = guard.read("charge", "k")
    assert first is not None
    assert record is not None
    assert [(outcome.value, outcome.replayed) for outcome in outcomes] == [("paid", True)] * 3
    assert (first.duplicates, record.duplicates) == (0, 3)


def test_a_count_changes_neither_the_token_nor_the_result_nor_the_end(
    guard: Guard, store: ProxyStore, clock: Clock
) -> None:
    charge(guard)
    before = store.inner._rows[ADDRESS]
    clock.advance(100)
    store.after["claim"] = lambda: clock.advance(50)  # between the answer and the count

    charge(guard, 2)

    after = store.inner._rows[ADDRESS]
    assert after == replace(before, notes=after.notes, revision=before.revision + 2)
    assert found(store).duplicates == 2


def test_a_record_expires_when_it_would_have_however_often_it_is_counted(guard: Guard, clock: Clock) -> None:
    charge(guard, keep="1h")
    for _ in range(59):
        clock.advance(60)
        assert charge(guard, keep="1h")[0].replayed

    clock.advance(60)

    assert not charge(guard, keep="1h")[0].replayed


def test_without_it_nothing_is_written_for_a_duplicate(store: ProxyStore) -> None:
    guard = Guard(store)
    charge(guard)
    before = found(store)
    store.calls.clear()

    charge(guard, 3)

    assert store.calls == {"claim": 3}
    assert (found(store).revision, found(store).notes) == (before.revision, None)


def test_a_counted_duplicate_costs_one_more_request(guard: Guard, store: ProxyStore) -> None:
    charge(guard)
    store.calls.clear()

    charge(guard, 3)

    assert store.calls == {"claim": 3, "annotate": 3}


def test_what_is_refused_is_not_counted(guard: Guard, store: ProxyStore) -> None:
    charge(guard, payload=1)
    with pytest.raises(KeyReused):
        charge(guard, payload=2)

    other = ProxyStore(store.inner)

    def inside() -> None:
        with pytest.raises(InProgress):
            Guard(other, count_duplicates=True).run("charge", "running", lambda: None)

    guard.run("charge", "running", inside)

    assert (store.calls["annotate"], other.calls["annotate"]) == (0, 0)


def test_a_remembered_failure_is_counted(guard: Guard, store: ProxyStore) -> None:
    def fail() -> None:
        raise ValueError("no funds")

    for _ in range(3):
        with pytest.raises(ValueError, match="no funds"):
            guard.run("charge", "k", fail, final_errors=(ValueError,))

    assert (found(store).state, found(store).duplicates) == (State.FAILED, 2)


def test_seen_mode_counts_as_well(store: ProxyStore) -> None:
    guard = Guard(store, mode="seen", count_duplicates=True)

    charge(guard, 3)

    assert found(store).duplicates == 2


def test_an_async_guard_counts_as_well() -> None:
    async def story() -> int:
        async def paid() -> str:
            return "paid"

        async with AsyncGuard(AsyncProxyStore(), count_duplicates=True) as guard:
            for _ in range(3):
                assert (await guard.run("charge", "k", paid)).value == "paid"
            record = await guard.read("charge", "k")
        assert record is not None
        return record.duplicates

    assert asyncio.run(story()) == 2


@pytest.mark.parametrize("proxy", [ProxyStore, BatchingProxyStore])
def test_a_batch_counts_what_a_record_answers_and_not_what_the_batch_repeats(proxy: type[ProxyStore]) -> None:
    guard = Guard(proxy(), count_duplicates=True)
    guard.run("charge", "old", lambda: "paid")

    results = guard.run_batch("charge", ["old", "new", "new", "old"], key=str, handler=lambda _: "paid")

    assert [getattr(one, "replayed", one) for one in results] == [True, False, True, True]
    counts = {key: getattr(guard.read("charge", key), "duplicates", None) for key in ("old", "new")}
    assert counts == {"old": 1, "new": 0}


def test_a_duplicate_that_waited_for_the_first_is_counted(store: ProxyStore) -> None:
    guard = Guard(store, count_duplicates=True, wait="1s")
    owner = ProxyStore(store.inner)
    charge(Guard(owner))
    ended = found(store)
    running = replace(ended, state=State.RUNNING, result=None, lease_left=30.0).as_entry(ended.token)
    store.inner._rows.clear()
    assert store.inner.claim(running) is None

    def finish() -> None:
        ending = msgspec.structs.replace(_ENDING, result=ended.result)
        assert store.inner.finish(running.as_claim(), ending)

    store.after["claim"] = finish

    (outcome,) = charge(guard)

    assert (outcome.replayed, found(store).duplicates) == (True, 1)


def test_a_store_that_fails_to_count_does_not_cost_the_answer(
    store: ProxyStore, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    guard = Guard(store, count_duplicates=True, on_event=events.append)
    charge(guard)
    store.down.add("annotate")

    with caplog.at_level(logging.WARNING, "onefold"):
        outcomes = charge(guard, 2)

    assert [outcome.value for outcome in outcomes] == ["paid", "paid"]
    assert (store.calls["annotate"], found(store).duplicates) == (2, 0)
    failed = [event for event in events if event.kind is Kind.STORE_FAILED]
    assert [event.detail for event in failed] == ["count", "count"]
    assert caplog.text.count("could not be counted") == 1
    assert "k" not in [word for record in caplog.records for word in record.getMessage().split()]


def test_a_count_whose_answer_got_lost_is_not_repeated(guard: Guard, store: ProxyStore) -> None:
    charge(guard)
    store.reply_lost.add("annotate")

    charge(guard)

    assert (store.calls["annotate"], found(store).duplicates) == (1, 1)


def test_a_count_that_the_client_library_sends_twice_counts_once(guard: Guard, store: ProxyStore) -> None:
    charge(guard)
    store.twice = True

    charge(guard, 2)

    assert found(store).duplicates == 2


def test_an_interrupted_count_is_sent_again_and_counts_once(guard: Guard, store: ProxyStore) -> None:
    charge(guard)

    def interrupt() -> None:
        raise KeyboardInterrupt

    store.after["annotate"] = interrupt

    with pytest.raises(KeyboardInterrupt):
        charge(guard)

    assert (store.calls["annotate"], found(store).duplicates) == (2, 1)


def test_two_that_race_are_both_counted(guard: Guard, store: ProxyStore) -> None:
    charge(guard)
    store.before["annotate"] = lambda: charge(Guard(store.inner, count_duplicates=True))

    charge(guard)

    assert (store.calls["annotate"], found(store).duplicates) == (2, 2)


def test_a_count_that_loses_every_race_gives_up(guard: Guard, store: ProxyStore) -> None:
    charge(guard)

    def overtake() -> None:
        charge(Guard(store.inner, count_duplicates=True))
        store.before["annotate"] = overtake

    store.before["annotate"] = overtake

    (outcome,) = charge(guard)

    assert outcome.value == "paid"
    assert (store.calls["annotate"], found(store).duplicates) == (COUNT_ROUNDS_MAX, COUNT_ROUNDS_MAX)


def test_what_is_forgotten_before_it_is_counted_stays_forgotten(guard: Guard, store: ProxyStore) -> None:
    charge(guard)
    store.before["annotate"] = lambda: Guard(store.inner).forget("charge", "k")

    (outcome,) = charge(guard)

    assert (outcome.value, store.inner.read(ADDRESS)) == ("paid", None)


def test_what_expires_or_is_purged_before_it_is_counted_stays_away(
    guard: Guard, store: ProxyStore, clock: Clock
) -> None:
    charge(guard)

    def pass_a_day() -> None:
        clock.advance(86_400)
        store.purge(10)

    store.before["annotate"] = pass_a_day

    (outcome,) = charge(guard)

    assert (outcome.value, len(store.inner)) == ("paid", 0)


def test_what_runs_again_before_it_is_counted_is_not_touched(guard: Guard, store: ProxyStore) -> None:
    charge(guard)
    started = []

    def run_again() -> None:
        with contextlib.suppress(Died):
            Guard(store.inner).run("charge", "k", dies, bypass=True)

    def dies() -> None:
        started.append(found(store))
        raise Died

    store.before["annotate"] = run_again

    (outcome,) = charge(guard)

    assert outcome.value == "paid"
    assert len(started) == 1
    assert (found(store).state, found(store).duplicates) == (State.DONE, 1)


def test_while_a_bypass_runs_or_has_died_its_log_is_left_alone(store: ProxyStore, clock: Clock) -> None:
    guard = Guard(store, count_duplicates=True)
    charge(guard)
    charge(guard)
    dying = ProxyStore(store.inner)

    def die() -> None:
        dying.die()
        raise Died

    with contextlib.suppress(Died):
        Guard(dying).run("charge", "k", die, bypass=True)
    clock.advance(60)
    before = found(store)
    store.calls.clear()

    (outcome,) = charge(guard)

    assert (before.state, outcome.value, outcome.replayed) == (State.RUNNING, "paid", True)
    assert store.calls["annotate"] == 0
    assert (found(store).revision, found(store).duplicates) == (before.revision, 1)


def test_a_bypass_that_fails_keeps_the_count_and_one_that_succeeds_begins_anew(guard: Guard, store: ProxyStore) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    charge(guard, 3)
    with pytest.raises(ZeroDivisionError):
        guard.run("charge", "k", fail, bypass=True)
    kept = found(store).duplicates

    charge(guard, bypass=True)

    assert (kept, found(store).duplicates) == (2, 0)


def test_it_is_kept_beside_what_the_handler_notes(guard: Guard, store: ProxyStore) -> None:
    def handler() -> None:
        current().step("reserve", lambda: 1)
        current().note(amount=42)

    for _ in range(3):
        guard.run("charge", "k", handler)

    assert (found(store).noted, found(store).steps, found(store).duplicates) == ({"amount": 42}, (), 2)


@pytest.mark.parametrize("notes", [b"\xc1", b"plain text", b"\x93\x01\x02\x03"])
def test_notes_of_others_are_left_alone(guard: Guard, store: ProxyStore, notes: bytes) -> None:
    charge(guard)
    store.inner._rows[ADDRESS] = replace(store.inner._rows[ADDRESS], notes=notes)

    assert charge(guard)[0].replayed

    assert (found(store).notes, found(store).duplicates) == (notes, 0)


def test_a_person_can_still_forget_what_was_counted_since_they_looked(guard: Guard, store: ProxyStore) -> None:
    charge(guard)
    seen = guard.read("charge", "k")
    charge(guard)

    assert guard.forget("charge", "k", only=seen)
    charge(guard)
    assert not guard.forget("charge", "k", only=seen)
    assert found(store).state is State.DONE


def test_what_a_person_resolves_is_counted_from_then_on(guard: Guard, store: ProxyStore) -> None:
    def time_out() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        guard.run("charge", "k", time_out, after_crash="hold")
    with pytest.raises(Held):
        charge(guard)
    guard.resolve("charge", "k", Done("paid"), by="ada", reason="asked the bank")

    charge(guard, 2)

    assert found(store).duplicates == 2


def test_a_record_that_moves_takes_its_count_along(store: ProxyStore) -> None:
    charge(Guard(store, count_duplicates=True), 3)
    new = Guard(ProxyStore(), migrate_from=store, count_duplicates=True)

    charge(new)

    record = new.read("charge", "k")
    assert record is not None
    assert record.duplicates == 3


class Six:
    """A store of somebody else's, with the six operations and no more."""

    def __init__(self) -> None:
        inner = MemoryStore()
        self.claim, self.extend, self.finish = inner.claim, inner.extend, inner.finish
        self.release, self.read, self.purge = inner.release, inner.read, inner.purge


@pytest.mark.parametrize(
    "deliver",
    [
        lambda guard, call: guard.run("charge", "k", call),
        lambda guard, call: guard.run_batch("charge", ["k"], key=str, handler=lambda _: call()),
    ],
)
def test_a_store_that_cannot_count_is_refused_before_anything_runs(deliver: Callable[[Guard, Any], Any]) -> None:
    ran: list[None] = []

    with pytest.raises(UsageError, match=r"Six cannot count duplicates .* Nothing ran"):
        deliver(Guard(Six(), count_duplicates=True), lambda: ran.append(None))

    assert ran == []


def test_a_transaction_does_not_count_and_says_so(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path}/onefold.db", count_duplicates=True)
    row = RecordColumn("payments", "id")

    with pytest.raises(UsageError, match=r"transactional\(\) cannot count duplicates"):

        @guard.transactional("credit", key="id")
        def credit(id: str, *, tx: Any = TX) -> None: ...  # noqa: A002 - the name of the key

    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for within in (guard.within(connection), guard.within(connection, record=row)):
            with pytest.raises(UsageError, match=r"within\(\) cannot count duplicates"):
                within.run("credit", "k", lambda: None)
        with pytest.raises(UsageError, match=r"within\(\) cannot count duplicates"):
            guard.within(connection).fresh("credit", ["k"], key=str)
        assert guard.within(connection).run("credit", "k", lambda: 1, count_duplicates=False).value == 1
    guard.close()


def test_a_late_owner_that_repeats_its_finish_is_still_the_owner(guard: Guard, store: ProxyStore) -> None:
    charge(guard, 3)
    record = found(store)

    assert store.inner.finish(Claim(ADDRESS, record.token), replace(_ENDING, result=record.result))
