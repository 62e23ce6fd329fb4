"""`guard.scheduled`: a job runs once for each planned time, whoever calls it, and however late."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, KeyReused, Policy, UsageError, current
from onefold._schedule import planned as planned_module
from onefold.schedulers import planned_at, planned_times
from onefold.stores.memory import MemoryStore
from tests.support import Elsewhere, die_running, end_lease, in_time

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


class Time:
    """The clock of this scheduler, by hand."""

    def __init__(self) -> None:
        self.now = NOON

    def move(self, **by: float) -> None:
        self.now += timedelta(**by)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(planned_module, "now", lambda: time.now)
    return time


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


def test_a_job_runs_once_for_each_slot_and_a_second_scheduler_gets_its_result(guard: Guard, time: Time) -> None:
    ran: list[str] = []

    @guard.scheduled("invoices", every="1h")
    def invoices() -> int:
        ran.append(current().key)
        return len(ran)

    first = [invoices(), invoices()]
    time.move(minutes=59)
    late = invoices()
    # The next one is a little too early.
    time.move(seconds=59.5)
    second = [invoices(), invoices.outcome().replayed]

    assert (first, late, second) == ([1, 1], 1, [2, True])
    assert ran == ["2026-11-18T12:00:00Z", "2026-11-18T13:00:00Z"]


def test_the_planned_time_is_given_to_the_job_and_taken_from_its_caller(guard: Guard, time: Time) -> None:
    seen: list[Any] = []

    @guard.scheduled("invoices", every="1h")
    def invoices(shop: str, planned: datetime | None = None) -> None:
        seen.append((shop, planned))

    time.move(minutes=7)
    invoices("a")
    invoices("a", NOON - timedelta(hours=2))
    invoices(shop="a", planned=NOON - timedelta(hours=2, minutes=-3))
    with planned_at(NOON - timedelta(hours=1)):
        invoices("a")

    assert seen == [("a", NOON), ("a", NOON - timedelta(hours=2)), ("a", NOON - timedelta(hours=1))]


def test_a_job_that_catches_all_keywords_takes_its_planned_time_from_its_caller_too(guard: Guard, time: Time) -> None:
    seen: list[dict[str, Any]] = []
    earlier = NOON - timedelta(hours=1)

    @guard.scheduled("invoices", every="1h")
    def invoices(**options: Any) -> int:
        seen.append({**options, "key": current().key})
        return len(seen)

    # It is no argument: a scheduler that passes it and one that does not mean the same run.
    assert [invoices(shop="a", planned=earlier + timedelta(minutes=3)), invoices(shop="a")] == [1, 2]
    assert [invoices(shop="a", planned=NOON), invoices(shop="a", planned=earlier)] == [2, 1]
    with planned_at(earlier):
        assert invoices(shop="a") == 1
    assert seen == [
        {"shop": "a", "planned": earlier, "key": "2026-11-18T11:00:00Z"},
        {"shop": "a", "key": "2026-11-18T12:00:00Z"},
    ]


def test_an_async_job_that_catches_all_keywords_does_as_well(time: Time) -> None:
    seen: list[dict[str, Any]] = []

    async def story() -> None:
        async with AsyncGuard("memory:") as guard:

            @guard.scheduled("invoices", every="1h")
            async def invoices(**options: Any) -> None:
                seen.append(options)

            await invoices(planned=NOON - timedelta(hours=1))
            await invoices()

    in_time(story())
    assert seen == [{"planned": NOON - timedelta(hours=1)}, {}]


def test_without_an_interval_the_scheduler_says_when_it_is_planned(guard: Guard, time: Time) -> None:
    ran: list[str] = []

    @guard.scheduled("invoices")
    def invoices() -> None:
        ran.append(current().key)

    with pytest.raises(UsageError, match="it has no planned time"):
        invoices()
    for minutes in (0, 0, 3):
        with planned_at(NOON - timedelta(minutes=minutes)):
            invoices()

    assert ran == ["2026-11-18T12:00:00Z", "2026-11-18T11:57:00Z"]


def test_missed_times_are_made_up_for_once_each(guard: Guard, time: Time) -> None:
    ran: list[datetime | None] = []

    @guard.scheduled("invoices", every="1h")
    def invoices(planned: datetime | None = None) -> None:
        ran.append(planned)

    invoices()
    down_since = time.now
    time.move(hours=3, minutes=10)
    for _ in range(2):
        for planned in planned_times("1h", since=down_since, until=time.now):
            invoices(planned=planned)

    assert ran == [NOON + timedelta(hours=hours) for hours in range(4)]


def test_a_planned_time_whose_record_may_be_gone_is_refused(guard: Guard, time: Time) -> None:
    ran: list[int] = []

    @guard.scheduled("invoices", every="1h", keep="10h")
    def invoices(planned: datetime | None = None) -> None:
        ran.append(1)

    invoices(planned=NOON - timedelta(hours=9))
    with pytest.raises(UsageError, match="kept for 10h"):
        invoices(planned=NOON - timedelta(hours=10))
    assert ran == [1]
    # Whoever knows that it did not run says so.
    invoices.bypass(planned=NOON - timedelta(hours=10))
    assert ran == [1, 1]


def test_keep_and_wait_follow_from_the_interval(guard: Guard) -> None:
    def policy_of(**options: Any) -> Policy:
        return guard.scheduled("invoices", **options)(lambda: None).policy

    day = 86_400.0
    assert (policy_of(every="1h").keep, policy_of(every="1h").wait) == (day, 3_600.0)
    assert (policy_of(every="7d").keep, policy_of(every="7d").wait) == (21 * day, 3_600.0)
    assert (policy_of(every="10s").keep, policy_of(every="10s").wait) == (day, 10.0)
    assert (policy_of(every="7d", keep="1h", wait=0).keep, policy_of(every="7d", wait=0).wait) == (3_600.0, 0.0)
    assert (policy_of().keep, policy_of().wait) == (day, 0.0)
    assert policy_of(every="7d", policy=Policy(keep="2d"), lease="5s").keep == 2 * day


def test_two_jobs_of_one_function_need_a_scope(guard: Guard, time: Time) -> None:
    ran: list[str] = []

    @guard.scheduled("invoices", every="1h")
    def unscoped(shop: str) -> None:
        ran.append(shop)

    @guard.scheduled("invoices of a shop", every="1h", scope="shop")
    def scoped(shop: str) -> None:
        ran.append(shop)

    unscoped("a")
    with pytest.raises(KeyReused):
        unscoped("b")
    for shop in "abab":
        scoped(shop)
    assert ran == ["a", "a", "b"]


def test_the_second_scheduler_waits_and_takes_over_if_the_first_dies(time: Time) -> None:
    store, ran = MemoryStore(), list[int]()
    die_running(store, "invoices", "2026-11-18T12:00:00Z", Policy(lease="1h"))
    with Guard(store, lease="1h") as guard:

        @guard.scheduled("invoices", every="1h", fingerprint=None)
        def invoices() -> int:
            ran.append(current().attempt)
            return len(ran)

        second = Elsewhere(invoices)
        end_lease(store, guard.address("invoices", "2026-11-18T12:00:00Z"))

        assert second.result() == 1
    assert ran == [2]


def test_after_a_crash_the_policy_decides(time: Time) -> None:
    store = MemoryStore()
    die_running(store, "invoices", "2026-11-18T12:00:00Z", Policy(lease="1h"))
    with Guard(store) as guard:

        @guard.scheduled("invoices", every="1h", fingerprint=None, after_crash="hold")
        def invoices() -> None:
            raise AssertionError("it ran")

        end_lease(store, guard.address("invoices", "2026-11-18T12:00:00Z"))
        with pytest.raises(Held):
            invoices()
        # The next time is another one.
        time.move(hours=1)
        with pytest.raises(AssertionError, match="it ran"):
            invoices()


def test_many_threads_run_a_job_once(guard: Guard, time: Time) -> None:
    ran: list[int] = []
    together = threading.Barrier(8)

    @guard.scheduled("invoices", every="1h")
    def invoices() -> int:
        ran.append(1)
        return len(ran)

    def fire() -> int:
        together.wait(30)
        return invoices()

    assert [one.result() for one in [Elsewhere(fire) for _ in range(8)]] == [1] * 8
    assert ran == [1]


def test_a_job_with_tx_commits_its_rows_with_its_record(tmp_path: Path, time: Time) -> None:
    with Guard(f"sqlite:///{tmp_path}/shop.db") as guard:

        @guard.scheduled("invoices", every="1h")
        def invoices(planned: datetime | None = None, *, tx: Any = None) -> int:
            tx.execute("CREATE TABLE IF NOT EXISTS invoices (planned TEXT)")
            tx.execute("INSERT INTO invoices VALUES (?)", (str(planned),))
            return 1

        assert [invoices(), invoices()] == [1, 1]
    with sqlite3.connect(tmp_path / "shop.db") as found:
        assert found.execute("SELECT * FROM invoices").fetchall() == [("2026-11-18 12:00:00+00:00",)]
    found.close()


def test_async_jobs_and_methods(time: Time) -> None:
    class Shop:
        guard = AsyncGuard("memory:")

        def __init__(self) -> None:
            self.ran: list[datetime | None] = []

        @guard.scheduled("invoices", every="1h")
        async def invoices(self, planned: datetime | None = None) -> int:
            self.ran.append(planned)
            await asyncio.sleep(0)
            return len(self.ran)

    shop = Shop()

    async def story() -> Any:
        async with shop.guard:
            both = await asyncio.gather(shop.invoices(), shop.invoices())
            outcome = await shop.invoices.outcome()
            again = await shop.invoices.bypass()
            return both, outcome.replayed, again.value

    assert in_time(story()) == ([1, 1], True, 2)
    assert shop.ran == [NOON, NOON]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"anchor": NOON}, "belong to every="),
        ({"early": 3}, "belong to every="),
        ({"every": "1h", "kepe": "1d"}, "did you mean 'keep'"),
        ({"every": "1h", "policy": "1d"}, "has to be a Policy"),
    ],
)
def test_wrong_options_are_refused_when_decorating(guard: Guard, options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        guard.scheduled("invoices", **options)(lambda: None)


def test_wrong_functions_and_times_are_refused(guard: Guard) -> None:
    async def invoices() -> None: ...

    with pytest.raises(UsageError, match="use an AsyncGuard"):
        guard.scheduled("invoices", every="1h")(invoices)
    with pytest.raises(UsageError, match=r"@guard\.scheduled\('invoices', every='1h'\)"):
        guard.scheduled(invoices)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no time zone"), planned_at(datetime(2026, 1, 1)):  # noqa: DTZ001
        pass

    @guard.scheduled("invoices", every="1h")
    def planned_only(planned: Any = None) -> None: ...

    with pytest.raises(UsageError, match="planned has to be a datetime, not str"):
        planned_only(planned="2026-01-01")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        planned_only(plannd=NOON)  # type: ignore[call-arg]


def test_the_functions_signature_and_name_stay(guard: Guard) -> None:
    import inspect

    @guard.scheduled("invoices", every="1h")
    def invoices(shop: str, *, tidy: bool = False) -> None:
        """Write invoices."""

    assert str(inspect.signature(invoices)) == "(shop: 'str', *, tidy: 'bool' = False) -> 'None'"
    assert (invoices.__name__, invoices.__doc__) == ("invoices", "Write invoices.")
