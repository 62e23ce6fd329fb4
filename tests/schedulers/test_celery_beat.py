"""Celery beat: entries are sent under a key of their planned time; two real beats run each planned time once."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, beat, signals
from celery.schedules import crontab, schedule, solar

from onefold import UsageError
from onefold.queues.keys import KEY_HEADER
from onefold.schedulers.celery_beat import PLANNED_HEADER, KeyedByPlannedTime, Scheduler, planned_of, planned_time
from services.house import House
from services.processes import Daemon
from tests.processes import Notes
from tests.support import PROJECT, eventually


@pytest.fixture
def app() -> Iterator[Celery]:
    with Celery("shop", broker="memory://", set_as_current=False) as app:
        app.conf.update(timezone="Europe/Berlin")
        yield app


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"{text}+00:00")


@pytest.mark.parametrize(
    ("fields", "now", "planned"),
    [
        ({"minute": "*"}, "2026-11-18T14:00:30", "2026-11-18T14:00:00"),
        ({"minute": "*"}, "2026-11-18T13:59:59.950", "2026-11-18T14:00:00"),
        ({"minute": "*"}, "2026-11-18T13:59:50", "2026-11-18T13:59:00"),
        ({"minute": "0"}, "2026-11-18T14:59:00", "2026-11-18T14:00:00"),
        # In the app's time zone, an hour ahead in winter, two in summer.
        ({"minute": "30", "hour": "2"}, "2026-11-18T14:00:00", "2026-11-18T01:30:00"),
        ({"minute": "30", "hour": "2"}, "2026-07-18T14:00:00", "2026-07-18T00:30:00"),
        ({"minute": "0", "hour": "9", "day_of_week": "mon"}, "2026-11-18T14:00:00", "2026-11-16T08:00:00"),
        ({"minute": "0", "hour": "9", "day_of_month": "1"}, "2026-11-18T14:00:00", "2026-11-01T08:00:00"),
        ({"minute": "*", "hour": "3"}, "2026-11-18T14:00:00", "2026-11-18T02:59:00"),
        # A beat that was down for days, and more minutes than it could look at one by one.
        ({"minute": "*", "day_of_month": "1-20"}, "2026-11-29T14:00:00", "2026-11-20T22:59:00"),
        (
            {"minute": "0", "hour": "0", "day_of_month": "29", "month_of_year": "2"},
            "2026-11-18T14:00:00",
            "2024-02-28T23:00:00",
        ),
    ],
)
def test_the_planned_time_of_a_crontab(app: Celery, fields: dict[str, str], now: str, planned: str) -> None:
    assert planned_time(crontab(**fields, app=app), at(now)) == at(planned)


def test_on_a_day_on_which_clocks_change_the_times_are_celerys_own(app: Celery) -> None:
    hourly = crontab(minute="0", app=app)
    start = at("2026-10-24T22:00:00")
    hours = {planned_time(hourly, start + timedelta(minutes=minutes)) for minutes in range(0, 25 * 60, 7)}

    # The local hour from two to three comes twice, and Celery plans it once.
    assert hours == {start + timedelta(hours=number) for number in range(25) if number != 3}
    assert sorted(hour.astimezone(ZoneInfo("Europe/Berlin")).hour for hour in hours) == list(range(24))


@pytest.mark.parametrize(
    ("minutes", "begun"),
    [("15,45", ["00:15", "00:45", "02:15"]), ("*/20", ["00:00", "00:20", "00:40", "02:00"])],
)
def test_in_an_hour_that_comes_twice_the_planned_time_never_goes_back(
    app: Celery, minutes: str, begun: list[str]
) -> None:
    due = crontab(minute=minutes, app=app)
    found = [planned_time(due, at("2026-10-25T00:16:00") + timedelta(minutes=past)) for past in range(122)]

    # A beat that is late, or starts again, means the last time before the repetition, and not the first of that hour.
    assert found == sorted(found)
    assert sorted(set(found)) == [at(f"2026-10-25T{time}:00") for time in begun]


def test_the_planned_time_of_an_interval_is_a_slot(app: Celery) -> None:
    assert planned_time(schedule(30.0, app=app), at("2026-11-18T14:00:28")) == at("2026-11-18T14:00:30")
    assert planned_time(schedule(30.0, app=app), at("2026-11-18T14:00:26")) == at("2026-11-18T14:00:00")
    assert abs(planned_time(schedule(3600.0, app=app)) - datetime.now(UTC)) < timedelta(hours=1, minutes=1)


def test_a_schedule_without_such_times_is_refused(app: Celery) -> None:
    by_the_sun = solar.__new__(solar)

    with pytest.raises(UsageError, match="type solar has no planned time"):
        planned_time(by_the_sun)


class Sent:
    """The headers of what is published."""

    def __init__(self) -> None:
        self.headers: list[dict[str, Any]] = []

    def note(self, headers: Any, **_: Any) -> None:
        self.headers.append(dict(headers))


@pytest.fixture
def sent() -> Iterator[Sent]:
    sent = Sent()
    signals.before_task_publish.connect(sent.note)
    yield sent
    signals.before_task_publish.disconnect(sent.note)


@pytest.mark.parametrize("is_own", [False, True])
def test_an_entry_is_sent_under_its_name_and_planned_time_and_is_not_changed(
    app: Celery, sent: Sent, is_own: bool
) -> None:
    options = {"headers": {"Idempotency-Key": "mine"}} if is_own else {"headers": {"shop": "a"}}
    app.conf.beat_schedule = {"hourly": {"task": "shop.tick", "schedule": crontab(minute="0"), "options": options}}
    scheduler: Any = Scheduler(app)

    entry = scheduler.schedule["hourly"]
    scheduler.apply_async(entry, advance=False)
    scheduler.apply_async(entry)

    planned = planned_time(entry.schedule)
    for headers in sent.headers:
        request = SimpleNamespace(headers=headers)
        assert planned_of(request) == planned
        if is_own:
            assert (headers["Idempotency-Key"], KEY_HEADER in headers) == ("mine", False)
        else:
            assert headers[KEY_HEADER] == f"hourly {headers[PLANNED_HEADER]}"
            assert headers["shop"] == "a"
    assert len(sent.headers) == 2
    # The next time has another key.
    assert scheduler.schedule["hourly"].options == options
    assert planned_of(SimpleNamespace(headers=None)) is None


def test_any_scheduler_can_be_keyed(app: Celery, sent: Sent) -> None:
    class Own(KeyedByPlannedTime, beat.Scheduler):
        pass

    app.conf.beat_schedule = {"hourly": {"task": "shop.tick", "schedule": 3600.0}}
    scheduler: Any = Own(app)
    scheduler.apply_entry(scheduler.schedule["hourly"])

    assert KEY_HEADER in sent.headers[0]


class Environment:
    """Two beats, a worker, and what the task has written down."""

    def __init__(self, broker: str, folder: Path, house: House) -> None:
        self.folder = folder
        self._notes = Notes(folder / "notes")
        setting = {"broker": broker, "queue": f"onefold-{secrets.token_hex(6)}", "folder": str(folder)}
        self._environment = {
            "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
            "ONEFOLD_BEAT": json.dumps(setting),
        }
        worker = ["worker", "-P", "threads", "-c", "4", "--without-gossip", "--without-mingle", "-l", "INFO"]
        self._daemons = [self._started(house, "worker", worker, " ready.")]
        self._daemons += [
            self._started(house, name, ["beat", "-s", str(folder / f"{name}.schedule"), "-l", "INFO"], "beat: Starting")
            for name in ("first", "second")
        ]

    def _started(self, house: House, name: str, command: list[str], says: str) -> Daemon:
        (self.folder / name).mkdir()
        daemon = Daemon(
            f"celery-{name}",
            [sys.executable, "-W", "ignore", "-m", "celery", "-A", "tests.schedulers.beat_tasks", *command],
            self.folder / name,
            answers=lambda: says in daemon.log.read_text(),
            environment=self._environment,
        )
        return house.home.keep(daemon)

    def words(self, noted: str) -> list[str]:
        return [line.removeprefix(f"{noted} ") for line in self._notes.read() if line.startswith(f"{noted} ")]

    def kill_first_beat(self) -> None:
        self._daemons[1].kill()

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()


@pytest.mark.more
@pytest.mark.parametrize("broker", ["redis_url", "rabbitmq_url"])
def test_two_beats_one_of_them_killed_run_each_planned_time_once(
    request: pytest.FixtureRequest, tmp_path: Path, house: House, broker: str
) -> None:
    with closing(Environment(request.getfixturevalue(broker), tmp_path, house)) as environment:
        assert eventually(lambda: len(environment.words("replayed")) >= 2)
        environment.kill_first_beat()
        before = len(environment.words("ran"))
        assert eventually(lambda: len(environment.words("ran")) >= before + 2)
        ran = Counter(environment.words("ran"))

    assert set(ran.values()) == {1}, ran
    # The time that the task is told is that of its key.
    told = {line.partition(" every-second ")[::2] for line in ran}
    assert all(datetime.fromisoformat(planned) == datetime.fromisoformat(key) for planned, key in told)
