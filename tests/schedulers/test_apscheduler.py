"""APScheduler: executors tell a job its planned time; two real schedulers run each planned time once."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.executors import pool
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from onefold import AsyncGuard, Guard, UsageError, current
from onefold._schedule.slots import text_of
from onefold.schedulers.apscheduler import AsyncIOExecutor, ThreadPoolExecutor
from services.house import House
from services.processes import Daemon
from tests.processes import Notes
from tests.support import PATIENCE, PROJECT, eventually, in_time

# Every run, also those that a scheduler has missed.
LATE: dict[str, Any] = {"coalesce": False, "misfire_grace_time": None, "max_instances": 20}


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


def started(executor: Any, **options: Any) -> BackgroundScheduler:
    scheduler = BackgroundScheduler(executors={"default": executor}, timezone="UTC", **options)
    scheduler.start()
    return scheduler


def test_a_job_knows_each_of_the_times_that_its_scheduler_has_missed(guard: Guard) -> None:
    seen: list[datetime | None] = []
    now = datetime.now(UTC).replace(microsecond=0)

    @guard.scheduled("invoices")
    def invoices(planned: datetime | None = None) -> None:
        seen.append(planned)

    scheduler = started(ThreadPoolExecutor(1), job_defaults=LATE)
    scheduler.add_job(invoices, "cron", hour="*", next_run_time=now.replace(minute=0, second=0) - timedelta(hours=3))
    assert eventually(lambda: len(seen) >= 4)
    scheduler.shutdown()

    assert seen[:4] == [now.replace(minute=0, second=0) - timedelta(hours=hours) for hours in (3, 2, 1, 0)]


def test_two_schedulers_run_a_planned_time_once(guard: Guard) -> None:
    ran: list[str] = []
    done = threading.Barrier(3)
    planned = datetime.now(UTC) - timedelta(minutes=3)

    @guard.scheduled("invoices", wait=PATIENCE)
    def invoices() -> int:
        ran.append(current().key)
        return len(ran)

    def job() -> None:
        invoices()
        done.wait(PATIENCE)

    schedulers = [started(ThreadPoolExecutor(2), job_defaults=LATE) for _ in range(2)]
    for scheduler in schedulers:
        scheduler.add_job(job, "date", run_date=planned)
    done.wait(PATIENCE)
    for scheduler in schedulers:
        scheduler.shutdown()

    assert ran == [text_of(planned)]


def test_with_another_executor_a_job_says_what_is_missing(guard: Guard) -> None:
    errors: list[BaseException] = []

    @guard.scheduled("invoices")
    def invoices() -> None: ...

    scheduler = started(ThreadPoolExecutor(1), job_defaults=LATE)
    scheduler.add_executor(pool.ThreadPoolExecutor(1), "plain")
    scheduler.add_listener(lambda event: errors.append(event.exception), EVENT_JOB_ERROR)
    scheduler.add_job(invoices, "date", run_date=datetime.now(UTC))
    scheduler.add_job(invoices, "date", run_date=datetime.now(UTC), executor="plain")
    assert eventually(lambda: bool(errors))
    scheduler.shutdown()

    assert [type(error) for error in errors] == [UsageError]
    assert "onefold.schedulers.apscheduler" in str(errors[0])


def test_an_async_job_knows_its_planned_time() -> None:
    seen: list[datetime | None] = []
    planned = datetime.now(UTC) - timedelta(minutes=3)

    async def story() -> None:
        guard, ran = AsyncGuard("memory:"), asyncio.Event()

        @guard.scheduled("invoices")
        async def invoices(planned: datetime | None = None) -> None:
            seen.append(planned)

        async def job() -> None:
            await invoices()
            ran.set()

        scheduler = AsyncIOScheduler(executors={"default": AsyncIOExecutor()}, timezone="UTC", job_defaults=LATE)
        scheduler.start()
        scheduler.add_job(job, "date", run_date=planned)
        await ran.wait()
        scheduler.shutdown()
        await guard.aclose()

    in_time(story())

    assert seen == [planned]


class Schedulers:
    """Two processes with the same jobs, and what these have written down."""

    def __init__(self, folder: Path, house: House) -> None:
        self.folder = folder
        self._notes = Notes(folder / "notes")
        self._daemons = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            daemon = Daemon(
                f"apscheduler-{name}",
                [sys.executable, "-W", "ignore", "-m", "tests.schedulers.apscheduler_jobs", str(folder), name],
                folder / name,
                answers=lambda name=name: bool(self.words("ready", name)),  # type: ignore[misc]
                environment={"PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])},
            )
            self._daemons.append(house.home.keep(daemon))

    def words(self, *noted: str) -> list[str]:
        """The last words of the lines that begin with these."""
        begin = " ".join(noted)
        return [line.removeprefix(begin).strip() for line in self._notes.read() if f"{line} ".startswith(f"{begin} ")]

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()


@pytest.mark.more
def test_two_processes_one_of_them_killed_in_a_job_run_each_planned_time_once(tmp_path: Path, house: House) -> None:
    with closing(Schedulers(tmp_path, house)) as schedulers:
        assert eventually(lambda: len(schedulers.words("replayed cron")) >= 2)
        (tmp_path / "first dies").touch()
        assert eventually(lambda: bool(schedulers.words("died")))
        died = schedulers.words("died")[0]
        # The other one takes it over when the lease of the dead one is over.
        assert eventually(lambda: died in schedulers.words("ran cron"))
        ran = schedulers.words("ran cron")
        intervals = Counter(schedulers.words("ran interval"))

    times = sorted(datetime.fromisoformat(one) for one in ran)
    assert Counter(ran).most_common(1)[0][1] == 1, ran
    # Without a gap: the one that was taken over is the last to be run, and the others are done meanwhile.
    until = datetime.fromisoformat(died)
    whole = [one for one in times if one <= until]
    assert whole == [whole[0] + timedelta(seconds=number) for number in range(len(whole))]
    assert len(intervals) >= 2
    assert set(intervals.values()) == {1}, intervals
