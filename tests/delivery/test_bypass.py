"""A bypass that does not succeed leaves what was there: done stays done, and duplicates replay the earlier finish."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import (
    AsyncGuard,
    ClaimLost,
    Done,
    Guard,
    Held,
    NotDone,
    OutcomeUnknown,
    Policy,
    Record,
    RememberedFailure,
    Rerun,
    State,
    Unknown,
    UsageError,
    current,
)
from onefold._model.remarks import HISTORY_MAX
from onefold.cli._common.record_text import steps
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import AsyncProxyStore, Clock, Heard, ProxyStore

CHARGE = address("charge", "pay_1")

# Every way in which a bypass can end without a result.
ERRORS: list[BaseException] = [ValueError("no"), TimeoutError(), OutcomeUnknown("?"), KeyError("final"), SystemExit(3)]

WAYS: dict[str, Any] = {
    "rerun": "rerun",
    "hold": "hold",
    "skip": "skip",
    "a probe that does not know": lambda _current: Unknown(),
    "a probe that says no": lambda _current: NotDone(),
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ProxyStore:
    return ProxyStore(MemoryStore(clock=clock))


def record(store: Any) -> Record:
    found = store.read(CHARGE)
    assert isinstance(found, Record)
    return found


def policy(way: str = "rerun", **fields: Any) -> Policy:
    return Policy(after_crash=WAYS[way], final_errors=(KeyError,), keep=1000, **fields)


def fail(error: BaseException) -> Callable[[], Any]:
    def handler() -> Any:
        raise error

    return handler


def facts(found: Record) -> tuple[Any, ...]:
    """What a failed bypass must not change."""
    kept = (found.state, found.result, found.omitted, found.ttl_left, found.age)
    return (*kept, found.attempt, found.bypasses, found.fingerprint)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_after_a_failed_bypass_every_duplicate_replays_the_earlier_finish(
    store: ProxyStore, clock: Clock, way: str, error: BaseException
) -> None:
    guard = Guard(store, policy=policy(way))
    guard.run("charge", "pay_1", lambda: "the receipt", payload=42)
    clock.advance(10)
    before = record(store)

    with pytest.raises(type(error)):
        guard.run("charge", "pay_1", fail(error), payload=42, bypass=True)
    again = guard.run("charge", "pay_1", pytest.fail, payload=42)

    assert (again.value, again.replayed, again.attempt) == ("the receipt", True, 1)
    assert facts(record(store)) == facts(before)
    assert record(store).remark == f"bypass failed: {type(error).__name__}"


def test_a_failed_bypass_of_a_remembered_failure_leaves_the_failure(store: ProxyStore) -> None:
    guard = Guard(store, policy=policy())
    with pytest.raises(KeyError):
        guard.run("charge", "pay_1", fail(KeyError("declined")))

    with pytest.raises(ValueError, match="no"):
        guard.run("charge", "pay_1", fail(ValueError("no")), bypass=True)

    with pytest.raises(KeyError, match="declined"):
        guard.run("charge", "pay_1", pytest.fail)
    with pytest.raises(RememberedFailure):
        guard.run("charge", "pay_1", pytest.fail, policy=Policy())


@pytest.mark.parametrize("way", WAYS)
def test_a_bypass_that_dies_leaves_what_was_there(store: ProxyStore, clock: Clock, way: str) -> None:
    guard = Guard(store, policy=policy(way, lease=5))
    guard.run("charge", "pay_1", lambda: "the receipt")
    clock.advance(10)
    with pytest.raises(ValueError, match="died"):
        guard.run("charge", "pay_1", dying(store), bypass=True)
    store.down.clear()
    assert record(store).state is State.RUNNING
    clock.advance(6)

    seen = [guard.run("charge", "pay_1", pytest.fail) for _ in range(2)]
    batch: list[Any] = guard.run_batch("charge", ["pay_1"], key=str, handler=pytest.fail)
    looked = guard.run("charge", "pay_1", pytest.fail, policy=Policy(mode="seen"))

    assert [(one.value, one.replayed) for one in (*seen, *batch, looked)] == [("the receipt", True)] * 4


def dying(store: ProxyStore) -> Callable[[], Any]:
    """A handler whose worker does not reach the store any more."""

    def handler() -> None:
        store.die()
        raise ValueError("died")

    return handler


def test_what_a_dead_bypass_left_expires_with_what_it_found(store: ProxyStore, clock: Clock) -> None:
    guard = Guard(store, policy=policy(lease=5))
    guard.run("charge", "pay_1", lambda: "the receipt")
    clock.advance(990)
    with pytest.raises(ValueError, match="died"):
        guard.run("charge", "pay_1", dying(store), bypass=True)
    store.down.clear()

    clock.advance(9)
    still = guard.run("charge", "pay_1", pytest.fail)
    clock.advance(2)
    again = guard.run("charge", "pay_1", lambda: "anew")

    assert (still.value, again.value, again.replayed) == ("the receipt", "anew", False)


def test_what_a_dead_bypass_left_stays_as_long_as_what_it_found(store: ProxyStore, clock: Clock) -> None:
    guard = Guard(store, policy=policy())
    guard.run("charge", "pay_1", lambda: "the receipt")
    with pytest.raises(ValueError, match="died"):
        guard.run("charge", "pay_1", dying(store), bypass=True, policy=Policy(keep=1, lease=5))
    store.down.clear()
    clock.advance(900)

    assert guard.run("charge", "pay_1", pytest.fail).value == "the receipt"


@pytest.mark.parametrize(
    ("way", "error", "state"),
    [
        ("rerun", ValueError("no"), State.OPEN),
        ("hold", TimeoutError(), State.HELD),
        ("skip", TimeoutError(), State.DONE),
        ("rerun", KeyError("final"), State.FAILED),
        ("a probe that does not know", TimeoutError(), State.HELD),
        ("a probe that says no", TimeoutError(), State.OPEN),
    ],
)
def test_a_bypass_that_outlives_what_it_found_is_a_run_like_any_other(
    store: ProxyStore, clock: Clock, way: str, error: Exception, state: State
) -> None:
    guard = Guard(store, policy=policy(way, lease=600))
    guard.run("charge", "pay_1", lambda: "the receipt")
    clock.advance(999)

    def outlives() -> None:
        clock.advance(2)
        raise error

    with pytest.raises(type(error)):
        guard.run("charge", "pay_1", outlives, bypass=True)

    assert (record(store).state, record(store).bypasses, steps(record(store))) == (state, 1, None)
    assert record(store).result != b"the receipt"


def test_a_dead_bypass_that_outlived_what_it_found_is_held_like_any_other(store: ProxyStore, clock: Clock) -> None:
    guard = Guard(store, policy=policy("hold", lease=5))
    guard.run("charge", "pay_1", lambda: "the receipt")
    clock.advance(999)
    with pytest.raises(ValueError, match="died"):
        guard.run("charge", "pay_1", dying(store), bypass=True)
    store.down.clear()
    clock.advance(6)

    with pytest.raises(Held):
        guard.run("charge", "pay_1", pytest.fail)

    assert record(store).notes is None


def test_a_dead_bypass_that_a_person_lets_run_again_forgets_what_it_found(store: ProxyStore, clock: Clock) -> None:
    guard, sent = Guard(store, policy=policy("hold", lease=5)), []
    guard.run("charge", "pay_1", lambda: "the receipt")

    def dies() -> None:
        current().step("reserve", lambda: None)
        sent.append(current().key_for("bank"))
        dying(store)()

    with pytest.raises(ValueError, match="died"):
        guard.run("charge", "pay_1", dies, bypass=True)
    store.down.clear()
    clock.advance(6)
    assert steps(record(store)) == ["reserve"]
    guard.resolve("charge", "pay_1", Rerun(), by="ada", reason="the bank knows nothing of it")
    with pytest.raises(ValueError, match="no"):
        guard.run("charge", "pay_1", fail(ValueError("no")))
    assert record(store).state is State.OPEN
    guard.run("charge", "pay_1", lambda: sent.append(current().key_for("bank")))

    assert sent[0] == sent[1]
    assert (record(store).state, record(store).notes) == (State.DONE, None)


def test_a_slow_bypass_that_succeeds_after_its_lease_still_counts(store: ProxyStore, clock: Clock) -> None:
    guard = Guard(store, policy=policy(lease=5))
    guard.run("charge", "pay_1", lambda: "the receipt")

    def slow() -> str:
        clock.advance(6)
        assert Guard(store.inner).run("charge", "pay_1", pytest.fail).value == "the receipt"
        return "another receipt"

    guard.run("charge", "pay_1", slow, bypass=True)

    assert guard.run("charge", "pay_1", pytest.fail).value == "another receipt"


def test_a_bypass_that_is_tried_again_sends_the_same_key_downstream_and_keeps_its_steps(
    store: ProxyStore, clock: Clock
) -> None:
    guard, sent, taken = Guard(store, policy=policy(lease=5)), [], []

    def handler(end: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            sent.append(current().key_for("gateway"))
            current().step("reserve", lambda: taken.append("reserved"))
            return end()

        return run

    guard.run("charge", "pay_1", lambda: sent.append(current().key_for("gateway")))
    for end in (fail(TimeoutError()), dying(store)):
        with pytest.raises((TimeoutError, ValueError)):
            guard.run("charge", "pay_1", handler(end), bypass=True)
        store.down.clear()
        clock.advance(6)
    outcome = guard.run("charge", "pay_1", handler(lambda: "done at last"), bypass=True)
    guard.run("charge", "pay_1", handler(lambda: "once more"), bypass=True)

    assert outcome.value == "done at last"
    assert sent[0] != sent[1] == sent[2] == sent[3] != sent[4]
    assert taken == ["reserved", "reserved"]
    assert (record(store).bypasses, record(store).notes, record(store).remark) == (2, None, "")


def test_a_probe_that_knows_ends_the_bypass(store: ProxyStore) -> None:
    guard = Guard(store, policy=Policy(after_crash=lambda _current: Done("from the bank")))
    guard.run("charge", "pay_1", lambda: "the receipt")

    outcome = guard.run("charge", "pay_1", fail(TimeoutError()), bypass=True)

    assert outcome.value == "from the bank"
    assert guard.run("charge", "pay_1", pytest.fail).value == "from the bank"


@pytest.mark.parametrize(
    ("answer", "names"), [(Done("from the bank"), ()), (NotDone(), ("bypassed as ticket 1",))], ids=["done", "not done"]
)
def test_a_name_is_used_up_by_a_run_and_not_by_a_probe_that_answers_for_it(
    store: ProxyStore, clock: Clock, answer: Any, names: tuple[str, ...]
) -> None:
    abandon(store, clock)

    with Guard(store, policy=Policy(after_crash=lambda _current: answer)) as guard:
        guard.run("charge", "pay_1", lambda: "by the ticket", bypass="ticket 1")
        assert record(store).history == names
        assert guard.run("charge", "pay_1", lambda: "by the ticket", bypass="ticket 1").value == "by the ticket"
        assert guard.run("charge", "pay_1", pytest.fail, bypass="ticket 1").value == "by the ticket"


@pytest.mark.parametrize("bypass", [True, "ticket 1"])
def test_a_bypass_runs_what_was_abandoned_and_counts_as_done(
    store: ProxyStore, clock: Clock, bypass: bool | str
) -> None:
    """Whether an ordinary delivery has come between, and written that it is done, makes no difference to it."""
    abandon(store, clock)
    heard = Heard()
    with Guard(store, policy=policy("skip", lease=5), on_event=heard) as guard:
        outcome = guard.run("charge", "pay_1", lambda: "on purpose", bypass=bypass)

        assert (outcome.value, outcome.replayed) == ("on purpose", False)
        assert guard.run("charge", "pay_1", pytest.fail).value == "on purpose"
    assert (record(store).state, record(store).bypasses) == (State.DONE, 1)
    assert heard.kinds[:3] == ["skipped", "bypassed", "started"]


def test_a_bypass_of_what_was_abandoned_leaves_it_done_if_it_fails(store: ProxyStore, clock: Clock) -> None:
    abandon(store, clock)
    with Guard(store, policy=policy("skip", lease=5)) as guard:
        with pytest.raises(ValueError, match="no"):
            guard.run("charge", "pay_1", fail(ValueError("no")), bypass=True)

        assert guard.run("charge", "pay_1", pytest.fail).replayed
    assert (record(store).state, record(store).omitted, record(store).bypasses) == (State.DONE, True, 0)


def abandon(store: ProxyStore, clock: Clock) -> None:
    """Let a run die, and its lease end."""
    with pytest.raises(ValueError, match="died"):
        Guard(store, policy=policy(lease=5)).run("charge", "pay_1", dying(store))
    store.down.clear()
    clock.advance(6)


@pytest.mark.parametrize("operation", ["read", "take_over"])
@pytest.mark.parametrize("how", ["down", "reply_lost"])
def test_a_store_that_fails_while_it_is_put_back_changes_nothing(
    store: ProxyStore, clock: Clock, operation: str, how: str
) -> None:
    heard = Heard()
    guard = Guard(store, policy=policy(lease=5), on_event=heard)
    guard.run("charge", "pay_1", lambda: "the receipt")

    def handler() -> None:
        getattr(store, how).add(operation)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        guard.run("charge", "pay_1", handler, bypass=True)
    getattr(store, how).clear()
    clock.advance(6)

    assert guard.run("charge", "pay_1", pytest.fail).value == "the receipt"
    assert "store_failed" in heard.kinds


def test_each_request_sent_twice_puts_it_back_once(store: ProxyStore) -> None:
    heard = Heard()
    guard = Guard(store, policy=policy(), on_event=heard)
    guard.run("charge", "pay_1", lambda: "the receipt")
    store.twice = True

    with pytest.raises(ValueError, match="no"):
        guard.run("charge", "pay_1", fail(ValueError("no")), bypass=True)

    assert (record(store).state, record(store).bypasses) == (State.DONE, 0)
    assert heard.kinds[-1] == "released"


@pytest.mark.parametrize("way", ["rerun", "hold"])
def test_a_bypass_that_is_cancelled_leaves_what_was_there(clock: Clock, way: str) -> None:
    async def main() -> Any:
        guard = AsyncGuard(AsyncProxyStore(AsyncMemoryStore(clock=clock)), policy=policy(way))
        await guard.run("charge", "pay_1", receipt)
        started = asyncio.Event()

        async def waits() -> None:
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(guard.run("charge", "pay_1", waits, bypass=True))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await guard.run("charge", "pay_1", never)

    assert asyncio.run(main()).value == "the receipt"


async def receipt() -> str:
    return "the receipt"


async def never() -> str:
    raise AssertionError("it is done")


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("final")])
def test_seen_mode_keeps_what_was_seen(store: ProxyStore, error: Exception) -> None:
    guard = Guard(store, policy=Policy(mode="seen", final_errors=(KeyError,)))
    guard.run("charge", "pay_1", lambda: "the receipt")
    before = record(store)

    with pytest.raises(type(error)):
        guard.run("charge", "pay_1", fail(error), bypass=True)

    assert record(store) == before
    assert guard.run("charge", "pay_1", pytest.fail).value == "the receipt"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(tmp_path / "app.db", isolation_level=None)
    yield opened
    opened.close()


def test_a_caller_who_catches_the_error_and_commits_keeps_what_was_done(
    connection: sqlite3.Connection, tmp_path: Path
) -> None:
    with Guard(f"sqlite:///{tmp_path}/app.db") as guard:
        guard.run("charge", "pay_1", lambda: "the receipt", payload=42)
        before = guard.read("charge", "pay_1")
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(ValueError, match="no"):
            guard.within(connection).run("charge", "pay_1", fail(ValueError("no")), payload=42, bypass=True)
        connection.execute("COMMIT")

        after = guard.read("charge", "pay_1")

        assert before is not None
        assert after is not None
        assert (after.state, after.result, after.bypasses) == (State.DONE, before.result, 0)
        assert guard.run("charge", "pay_1", pytest.fail, payload=42).value == "the receipt"


def test_a_bypass_in_a_transaction_does_not_keep_the_old_result(connection: sqlite3.Connection, tmp_path: Path) -> None:
    with Guard(f"sqlite:///{tmp_path}/app.db") as guard:
        guard.run("charge", "pay_1", lambda: "the receipt")
        connection.execute("BEGIN IMMEDIATE")
        guard.within(connection).run("charge", "pay_1", lambda: None, bypass=True)
        connection.execute("COMMIT")

        assert guard.run("charge", "pay_1", pytest.fail).value is None


@pytest.mark.parametrize("mode", ["claim", "seen"])
def test_a_bypass_with_a_name_runs_once_under_that_name_and_the_history_has_it(store: ProxyStore, mode: Any) -> None:
    runs = iter(range(10))
    with Guard(store, policy=Policy(mode=mode)) as guard:
        guard.run("charge", "pay_1", lambda: next(runs))

        first = guard.run("charge", "pay_1", lambda: next(runs), bypass="ticket 1")
        redelivered = guard.run("charge", "pay_1", lambda: next(runs), bypass="ticket 1")
        second = guard.run("charge", "pay_1", lambda: next(runs), bypass="ticket 2")
        late = guard.run("charge", "pay_1", lambda: next(runs), bypass="ticket 1")

    assert [(one.value, one.replayed) for one in (first, redelivered, second, late)] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert record(store).history == ("bypassed as ticket 2", "bypassed as ticket 1")
    assert record(store).bypasses == 2


def test_a_bypass_with_a_name_that_fails_may_run_again_under_it(store: ProxyStore) -> None:
    with Guard(store) as guard:
        guard.run("charge", "pay_1", lambda: "first")
        with pytest.raises(ZeroDivisionError):
            guard.run("charge", "pay_1", lambda: 1 / 0, bypass="ticket 1")
        assert guard.run("charge", "pay_1", lambda: "?").value == "first"

        assert guard.run("charge", "pay_1", lambda: "second", bypass="ticket 1").value == "second"
        assert guard.run("charge", "pay_1", lambda: "?", bypass="ticket 1").value == "second"

    assert record(store).history == ("bypassed as ticket 1",)


@pytest.mark.parametrize("name", ["ticket 1", "bypass failed: 1"])
def test_a_failed_bypass_does_not_let_those_before_it_run_again(store: ProxyStore, name: str) -> None:
    runs = iter(range(9))
    with Guard(store, policy=policy()) as guard:
        guard.run("charge", "pay_1", lambda: next(runs))
        guard.run("charge", "pay_1", lambda: next(runs), bypass=name)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                guard.run("charge", "pay_1", lambda: 1 / 0, bypass="ticket 2")
        redelivered = guard.run("charge", "pay_1", lambda: next(runs), bypass=name)

    assert (redelivered.value, redelivered.replayed) == (1, True)
    assert record(store).history == ("bypass failed: ZeroDivisionError", f"bypassed as {name}")


def test_a_bypass_with_a_name_that_died_runs_again_under_it_and_is_named_once(store: ProxyStore, clock: Clock) -> None:
    with Guard(store) as guard:
        guard.run("charge", "pay_1", lambda: "first")
        finish, store.finish = store.finish, lambda *_: False  # type: ignore[method-assign]
        with pytest.raises(ClaimLost):
            guard.run("charge", "pay_1", lambda: "died", bypass="ticket 1")
        store.finish = finish  # type: ignore[method-assign]
        clock.advance(60)

        assert guard.run("charge", "pay_1", lambda: "second", bypass="ticket 1").value == "second"

    assert record(store).history == ("bypassed as ticket 1",)


def test_a_bypass_with_a_name_that_finds_no_record_is_named_too(store: ProxyStore) -> None:
    with Guard(store) as guard:
        assert not guard.run("charge", "pay_1", lambda: "first", bypass="ticket 1").replayed
        assert guard.run("charge", "pay_1", lambda: "?", bypass="ticket 1").replayed

    assert record(store).history == ("bypassed as ticket 1",)


def test_a_bypass_with_a_name_in_a_transaction_is_in_the_history(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    with Guard(f"sqlite:///{tmp_path}/shop.db") as guard:
        outcomes = []
        numbers = iter(range(3))
        for name in ("", "ticket 1", "ticket 1"):
            connection.execute("BEGIN IMMEDIATE")
            within = guard.within(connection)
            outcomes.append(within.run("charge", "pay_1", lambda: next(numbers), bypass=name or False))
            connection.execute("COMMIT")
        found = guard.read("charge", "pay_1")
    connection.close()

    assert [outcome.value for outcome in outcomes] == [0, 1, 1]
    assert found is not None
    assert found.history == ("bypassed as ticket 1",)


def test_names_of_bypasses_cannot_fill_a_record(store: ProxyStore) -> None:
    with Guard(store) as guard:
        for number in range(60):
            guard.run("charge", "pay_1", lambda: None, bypass=f"{number} {'x' * 190}")

    assert len(record(store).remark) < HISTORY_MAX + 300
    assert record(store).history[0].startswith("bypassed as 59 ")


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\0", "x" * 201])
def test_a_name_of_a_bypass_that_nobody_can_read_is_refused(store: ProxyStore, name: str) -> None:
    with Guard(store) as guard, pytest.raises(UsageError, match="bypass= takes True, or a name"):
        guard.run("charge", "pay_1", lambda: pytest.fail("it ran"), bypass=name)
