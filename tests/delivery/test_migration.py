"""`Guard(new, migrate_from=old)`: changing the store forgets nothing, and the simulator finds what would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Done, Guard, Held, InProgress, Policy, Record, StoreUnavailable, UsageError, keys
from onefold._concurrency.generators import Flow
from onefold._delivery import migration
from onefold._delivery.steps import Claiming, Elsewhere, Reading, Releasing
from onefold._model import Claim, Entry, State
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from onefold.testing import use
from onefold.testing.simulate import Scenario, search
from onefold.transactions import RecordColumn
from tests.support import Clock

ADDRESS = keys.address("charge", "pay_7f3a")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def old(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def new(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def guard(new: MemoryStore, old: MemoryStore) -> Guard:
    return Guard(new, migrate_from=old)


def charge() -> int:
    return 4200


def must_not_run() -> int:
    raise AssertionError("it ran a second time")


def test_what_was_done_in_the_old_store_is_replayed_and_comes_over(
    guard: Guard, new: MemoryStore, old: MemoryStore
) -> None:
    Guard(old).run("charge", "pay_7f3a", charge)

    outcome = guard.run("charge", "pay_7f3a", must_not_run)

    assert (outcome.value, outcome.replayed) == (4200, True)
    assert old.read(ADDRESS) is None
    assert Guard(new).run("charge", "pay_7f3a", must_not_run).value == 4200


def test_what_comes_over_stays_as_long_as_it_would_have(guard: Guard, old: MemoryStore, clock: Clock) -> None:
    Guard(old, policy=Policy(keep=100)).run("charge", "pay_7f3a", charge)
    clock.advance(60)
    guard.run("charge", "pay_7f3a", must_not_run)

    clock.advance(39)
    assert guard.run("charge", "pay_7f3a", must_not_run).replayed
    clock.advance(2)
    assert not guard.run("charge", "pay_7f3a", charge).replayed


def test_what_nobody_knows_runs_in_the_new_store(guard: Guard, new: MemoryStore, old: MemoryStore) -> None:
    assert not guard.run("charge", "pay_7f3a", charge).replayed

    assert old.read(ADDRESS) is None
    assert new.read(ADDRESS) is not None


def test_what_runs_in_the_old_store_is_refused_and_leaves_nothing_in_the_new(
    guard: Guard, new: MemoryStore, old: MemoryStore
) -> None:
    old.claim(Entry(address=ADDRESS, token=b"t", lease=30.0))

    with pytest.raises(InProgress):
        guard.run("charge", "pay_7f3a", must_not_run)

    assert new.read(ADDRESS) is None
    assert old.finish(Claim(ADDRESS, b"t"), ending_done())


def ending_done() -> Any:
    from onefold._model import Ending

    return Ending(state=State.DONE, ttl=100.0)


def test_the_owner_of_what_was_taken_over_is_refused_in_the_old_store(
    guard: Guard, old: MemoryStore, clock: Clock
) -> None:
    old.claim(Entry(address=ADDRESS, token=b"zombie", lease=30.0))
    clock.advance(31)

    assert guard.run("charge", "pay_7f3a", charge, policy=Policy(after_crash="rerun")).attempt == 2

    assert old.finish(Claim(ADDRESS, b"zombie"), ending_done()) is False


def test_what_is_held_in_the_old_store_is_resolved_in_the_new(guard: Guard, old: MemoryStore, clock: Clock) -> None:
    old.claim(Entry(address=ADDRESS, token=b"dead", lease=30.0))
    clock.advance(31)
    with pytest.raises(Held):
        guard.run("charge", "pay_7f3a", must_not_run, policy=Policy(after_crash="hold"))

    guard.resolve("charge", "pay_7f3a", Done(4200), by="maria", reason="looked it up")

    assert guard.run("charge", "pay_7f3a", must_not_run).value == 4200


def test_a_held_record_that_nobody_has_asked_for_yet_is_resolved_too(guard: Guard, old: MemoryStore) -> None:
    old.claim(Entry(address=ADDRESS, token=b"dead", state=State.HELD))

    guard.resolve("charge", "pay_7f3a", Done(4200), by="maria", reason="looked it up")

    assert guard.run("charge", "pay_7f3a", must_not_run).value == 4200


def test_what_is_forgotten_does_not_come_back(guard: Guard, old: MemoryStore) -> None:
    Guard(old).run("charge", "pay_7f3a", charge)

    assert guard.forget("charge", "pay_7f3a")

    assert not guard.run("charge", "pay_7f3a", charge).replayed


def test_it_can_be_read_and_is_seen(guard: Guard, old: MemoryStore) -> None:
    Guard(old).run("charge", "pay_7f3a", charge)

    record = guard.read("charge", "pay_7f3a")

    assert isinstance(record, Record)
    assert record.state == "done"
    assert guard.run("charge", "pay_7f3a", must_not_run, policy=Policy(mode="seen")).replayed


def test_a_batch_knows_it_message_by_message(guard: Guard, old: MemoryStore) -> None:
    Guard(old).run("charge", "a", charge)
    ran: list[str] = []

    outcomes: Any = guard.run_batch("charge", ["a", "b"], key=str, handler=ran.append)

    assert ran == ["b"]
    assert [outcome.replayed for outcome in outcomes] == [True, False]


def test_without_the_old_store_nothing_runs(new: MemoryStore) -> None:
    class Down(MemoryStore):
        def read(self, address: Any) -> Any:
            raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable):
        Guard(new, migrate_from=Down()).run("charge", "pay_7f3a", must_not_run)

    assert new.read(ADDRESS) is None


def test_an_async_guard_does_the_same() -> None:
    async def main() -> None:
        old, new = AsyncMemoryStore(), AsyncMemoryStore()

        async def pay() -> int:
            return 4200

        async def pay_twice() -> int:
            return must_not_run()

        await AsyncGuard(old).run("charge", "pay_7f3a", pay)
        async with AsyncGuard(new, migrate_from=old) as guard:
            assert (await guard.run("charge", "pay_7f3a", pay_twice)).value == 4200
            assert not (await guard.run("charge", "pay_7f3b", pay)).replayed

    asyncio.run(main())


def test_from_one_file_to_another_and_both_are_closed(tmp_path: Path) -> None:
    before, after = (f"sqlite:///{tmp_path}/{name}.db" for name in ("before", "after"))
    with Guard(before) as guard:
        guard.run("charge", "pay_7f3a", charge)

    with Guard(after, migrate_from=before) as guard:
        assert guard.run("charge", "pay_7f3a", must_not_run).value == 4200

    with Guard(after) as guard:
        assert guard.run("charge", "pay_7f3a", must_not_run).value == 4200


def test_use_reads_nothing_else(guard: Guard, old: MemoryStore) -> None:
    Guard(old).run("charge", "pay_7f3a", charge)

    with use(guard, MemoryStore()):
        assert not guard.run("charge", "pay_7f3a", charge).replayed
    assert guard.run("charge", "pay_7f3a", must_not_run).replayed


# Transactions.


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Guard, Guard]]:
    before = Guard(f"sqlite:///{tmp_path}/before.db")
    after = Guard(f"sqlite:///{tmp_path}/after.db?busy_timeout=100ms", migrate_from=f"sqlite:///{tmp_path}/before.db")
    with before, after:
        yield before, after


def test_a_transactional_handler_does_not_run_for_what_the_old_store_knows(files: tuple[Guard, Guard]) -> None:
    before, after = files
    before.run("charge", "pay_7f3a", charge)

    @after.transactional("charge", key="key")
    def pay(key: str, *, tx: Any) -> int:
        return must_not_run() if key == "pay_7f3a" else 1

    assert pay("pay_7f3a") == 4200  # type: ignore[call-arg]
    assert pay("pay_7f3b") == 1  # type: ignore[call-arg]


def test_fresh_leaves_out_what_the_old_store_knows(files: tuple[Guard, Guard], tmp_path: Path) -> None:
    import sqlite3

    before, after = files
    before.run("charge", "a", charge)
    assert after.store is not None

    with closing(sqlite3.connect(tmp_path / "after.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable):
            # What comes over is written beside the transaction, and SQLite has one writer.
            after.within(connection).fresh("charge", ["a", "b"], key=str)
        connection.execute("ROLLBACK")


def test_fresh_leaves_out_what_the_old_store_knows_on_postgresql(postgres_url: str, old: MemoryStore) -> None:
    import psycopg

    Guard(old).run("charge", "a", charge)
    old.claim(Entry(address=keys.address("charge", "c"), token=b"t", lease=30.0))
    with Guard(postgres_url, migrate_from=old) as guard, psycopg.connect(postgres_url) as connection:
        assert guard.store is not None
        fresh = guard.within(connection).fresh("charge", ["a", "b", "c"], key=str)

        assert (fresh.new, fresh.seen, fresh.unsettled) == (["b"], ["a"], ["c"])
        assert guard.within(connection).run("charge", "a", must_not_run).replayed
        with pytest.raises(InProgress):
            guard.within(connection).run("charge", "c", must_not_run)
        Guard(old).run("charge", "d", charge)
        assert guard.within(connection).run("charge", "d", must_not_run).value == 4200


# What is refused.


@pytest.mark.parametrize(
    "make",
    [
        lambda: Guard("memory:", migrate_from="memory:"),
        lambda: Guard("memory:", migrate_from=3),  # type: ignore[arg-type]
        lambda: Guard("memory:", migrate_from="sqlite:///x.db").within(None, record=RecordColumn("t", "c", "k")),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


# What the simulator finds.


def story(**scenario: Any) -> str:
    found = search(Scenario(beats=0, faults=1, **scenario)).story
    assert found is not None, "nothing was found"
    return found.violation


def test_looking_before_claiming_runs_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = migration._claim

    def look_first(step: Claiming, old: Any, moved: list[Record]) -> Flow[Any]:
        left = yield Elsewhere(old, Reading(step.entry.address))
        return (yield from claim(step, old, moved)) if migration._counts(left) else (yield step)

    monkeypatch.setattr(migration, "_claim", look_first)

    assert story(after_crash="hold", migrating="nothing").startswith(("2", "3"))


def test_removing_before_writing_forgets_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def removed_first(ours: Record, left: Record, old: Any, _moved: list[Record]) -> Flow[bool]:
        yield Elsewhere(old, Releasing(Claim(left.address, left.token)))
        return (yield Claiming(left.as_moved(), ours)) is None

    monkeypatch.setattr(migration, "_replace", removed_first)

    assert story(after_crash="hold", migrating="done").startswith("4")


def test_giving_a_take_over_back_without_what_it_replaced_forgets_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    unless_known = migration._unless_known

    def forgetful(step: Claiming, old: Any, moved: list[Record]) -> Flow[Any]:
        return unless_known(Claiming(step.entry), old, moved)

    monkeypatch.setattr(migration, "_unless_known", forgetful)

    assert story(after_crash="probe", migrating="abandoned").startswith("2")


def test_an_abandoned_claim_hides_what_the_old_store_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(found: Record, _old: Any, _moved: list[Record]) -> Flow[Any]:
        return found
        yield

    monkeypatch.setattr(migration, "_instead_of_abandoned", nothing)

    assert story(after_crash="hold", migrating="done").startswith("8")


@pytest.mark.parametrize("server", ["postgres_url", "mysql_url", "redis_url", "dynamodb_url"])
def test_it_comes_over_into_every_store(server: str, request: pytest.FixtureRequest, old: MemoryStore) -> None:
    Guard(old).run("charge", "done", charge)
    old.claim(Entry(address=keys.address("charge", "held"), token=b"t" * 16, state=State.HELD))
    with Guard(request.getfixturevalue(server), migrate_from=old) as guard:
        assert guard.run("charge", "done", must_not_run).value == 4200
        with pytest.raises(Held):
            guard.run("charge", "held", must_not_run)
        assert not guard.run("charge", "new", charge).replayed

        assert old.read(keys.address("charge", "done")) is None
        assert guard.run("charge", "done", must_not_run).replayed
