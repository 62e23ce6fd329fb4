"""The loop of `onefold purge`: bounded batches with rests between, shared by several purgers, and easily ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onefold import Guard, Policy, StoreUnavailable, UsageError
from onefold.maintenance import purge as purging
from onefold.maintenance.purge import passes, purge
from onefold.stores.sqlite import SqliteStore
from onefold.testing import Clock
from tests.maintenance.test_background_purge import BOUNDED, connected, leave, rows
from tests.support import PATIENCE


class Counted:
    """A store with so many expired records; a purge of it is noted, and takes no time."""

    def __init__(self, expired: int) -> None:
        self.expired = expired
        self.asked: list[int] = []

    def purge(self, limit: int) -> int:
        self.asked.append(limit)
        removed = min(limit, self.expired)
        self.expired -= removed
        return removed


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it has rested each time; nobody waits for it."""
    found: list[float] = []
    here, wait = threading.current_thread(), threading.Event.wait

    def rest(event: threading.Event, seconds: float | None = None) -> bool:
        if threading.current_thread() is not here or seconds is None:
            return wait(event, seconds)
        found.append(seconds)
        return event.is_set()

    monkeypatch.setattr(threading.Event, "wait", rest)
    return found


def of(store: Counted, **options: Any) -> purging.Purged:
    return purge(store, **options)  # type: ignore[arg-type]


def test_it_goes_on_batch_by_batch_until_nothing_is_left(rests: list[float]) -> None:
    store, told = Counted(250), list[int]()

    done = of(store, batch=100, on_batch=told.append)

    assert (done.removed, done.batches, done.finished) == (250, 3, True)
    assert store.asked == [100, 100, 100]
    assert told == [100, 200, 250]
    assert len(rests) == 2
    assert min(rests) >= purging.PAUSE_MIN


def test_a_table_that_divides_evenly_is_asked_once_more(rests: list[float]) -> None:
    store = Counted(200)

    assert of(store, batch=100).finished
    assert store.asked == [100, 100, 100]


def test_it_removes_no_more_than_its_limit(rests: list[float]) -> None:
    store = Counted(1_000)

    done = of(store, batch=100, limit=250)

    assert (done.removed, done.finished) == (250, False)
    assert store.asked == [100, 100, 50]


def test_it_rests_in_proportion_to_its_work(rests: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0)
    monkeypatch.setattr(time, "monotonic", clock)
    store = Counted(150)
    quick = store.purge

    def slow(limit: int) -> int:
        clock.advance(0.5)
        return quick(limit)

    monkeypatch.setattr(store, "purge", slow)

    of(store, batch=100)

    assert rests == [0.5 * purging.REST]


def test_it_ends_with_the_batch_under_way() -> None:
    store, stop = Counted(1_000), threading.Event()

    done = of(store, batch=100, stop=stop, on_batch=lambda removed: stop.set() if removed == 300 else None)

    assert (done.removed, done.finished) == (300, False)


def test_what_the_store_raises_is_not_hidden() -> None:
    class Down(Counted):
        def purge(self, limit: int) -> int:
            raise StoreUnavailable("the server is gone")

    with pytest.raises(StoreUnavailable, match="the server is gone"):
        of(Down(1))


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 50_001}, {"limit": 0}])
def test_numbers_that_mean_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="has to be"):
        of(Counted(1), **options)


def test_passes_begin_at_their_time_however_long_one_takes(rests: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stop = Clock(0.0), threading.Event()
    monkeypatch.setattr(time, "monotonic", clock)

    for number in passes(60.0, stop):
        clock.advance(20.0 * number)
        if number == 4:
            stop.set()

    assert rests == [40.0, 20.0, 0.0, 0.0]
    assert list(passes(None, threading.Event())) == [1]


# On real tables.


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/records.db?sync=normal"
    else:
        yield str(request.getfixturevalue(f"{request.param}_url"))


def test_several_purgers_share_the_work(url: str) -> None:
    leave_many(url, 2_000)
    with Guard(url) as guard:
        guard.run("charge", "needed", lambda: None)

        def work(_number: int) -> int:
            return purge(guard.store, batch=100).removed

        with ThreadPoolExecutor(3) as threads:
            removed = list(threads.map(work, range(3)))

    assert sum(removed) == 2_000
    assert rows(url) == 1


def leave_many(url: str, count: int) -> None:
    with Guard(f"{url}{'&' if '?' in url else '?'}purge=no", policy=Policy(keep=0.001)) as guard:
        guard.run_batch("old", list(range(count)), key=lambda number: number, handler=lambda _: None)
    time.sleep(0.01)


@pytest.mark.parametrize("server", ["postgres", "mysql"])
def test_a_purge_waits_for_nobody_and_nobody_for_long(server: str, request: pytest.FixtureRequest) -> None:
    """Somebody holds an expired record, for as long as they like."""
    url = str(request.getfixturevalue(f"{server}_url"))
    leave(url, 10)
    bounded = f"{url}?{BOUNDED}" if server == "postgres" else url
    with closing(connected(url)) as connection, Guard(bounded) as guard:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        cursor.execute("SELECT state FROM onefold_records ORDER BY scope, operation LIMIT 1 FOR UPDATE")
        began = time.monotonic()

        done = purge(guard.store, batch=100)

        # Half of what MySQL waits for a row; on PostgreSQL it would have raised.
        assert time.monotonic() - began < 25.0
        assert (done.removed, done.finished) == (9, True)
        connection.rollback()
        assert purge(guard.store).removed == 1


def test_an_expired_claim_of_a_key_beats_or_follows_the_purge(url: str) -> None:
    """Whichever comes first, the claim is there in the end, and nobody waits for a lock until a time-out."""
    leave_many(url, 300)
    with Guard(url) as guard, ThreadPoolExecutor(2) as threads:
        purged = threads.submit(purge, guard.store, batch=10)
        for number in range(300):
            guard.run("old", number, lambda: None, policy=Policy(keep=3600))
        purged.result(PATIENCE)

        assert purge(guard.store).removed == 0
    assert rows(url) == 300


def test_the_gauge_and_the_doctor_agree_with_a_purge(url: str) -> None:
    """What the lag says is what a purge removes."""
    from onefold.metrics.watched import purge_lag

    leave(url, 5)
    with Guard(url) as guard:
        facts: Any = guard.store
        before, waiting = purge_lag(facts.facts()), facts.facts()["expired_count"]
        purge(guard.store)
        after = purge_lag(facts.facts())

    assert before is not None
    assert before > 0.0
    assert (waiting, after) == (5, 0.0)


def test_a_store_with_a_moved_clock_is_purged_by_it(tmp_path: Path) -> None:
    clock = Clock(1_000.0)
    with closing(SqliteStore(tmp_path / "records.db", clock=clock)) as store:
        Guard(store, policy=Policy(keep=60)).run("charge", "k", lambda: None)
        before = purge(store).removed
        clock.advance(61)

        assert (before, purge(store).removed) == (0, 1)
