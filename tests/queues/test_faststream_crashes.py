"""FastStream: a worker is killed after the effect and before the acknowledgement, on each broker."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from services.house import House
from services.processes import Daemon
from tests.processes import Notes
from tests.queues.faststream_tools import KINDS, broker_of, new_place, publish
from tests.queues.faststream_worker import READY, Setting
from tests.support import PATIENCE, PROJECT, in_time


class Worker:
    """A process with one handler, and what it has written down."""

    def __init__(self, setting: Setting, house: House) -> None:
        self.folder = Path(setting.folder)
        self.notes = Notes(self.folder / "notes")
        self._starts = 1
        self._process = Daemon(
            "faststream",
            [sys.executable, "-W", "ignore", "-m", "tests.queues.faststream_worker"],
            self.folder,
            answers=lambda: self.times(READY) >= self._starts,
            environment={
                "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
                "ONEFOLD_FASTSTREAM": json.dumps(setting),
            },
        )
        # It ends with the session, whatever becomes of that.
        house.home.keep(self._process)

    def revive(self) -> None:
        """Start it again, after it was killed."""
        self.until(lambda: not self._process.running)
        self._starts += 1
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def times(self, line: str) -> int:
        return self.notes.read().count(line)

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, (self.notes.read(), self._process.log.read_text()[-3000:])
            time.sleep(0.02)


@pytest.mark.parametrize("where", ["after", pytest.param("inside", marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(one, marks=pytest.mark.more) for one in KINDS[1:])])
def test_a_worker_killed_before_the_acknowledgement_leads_to_exactly_one_effect(
    request: pytest.FixtureRequest, house: House, tmp_path: Path, kind: str, where: str
) -> None:
    place = new_place(request, kind)
    with closing(sqlite3.connect(tmp_path / "wallet.db")) as connection:
        connection.execute("CREATE TABLE wallet (name TEXT, amount INTEGER)")
    worker = Worker(Setting(place, str(tmp_path)), house)
    name = f"{where}-1"

    async def sent() -> None:
        broker = broker_of(place)
        await broker.connect()
        await publish(broker, place, {"name": name, "dies": where}, key=name)
        await broker.stop()
        await asyncio.sleep(0)

    try:
        in_time(sent())
        worker.revive()
        worker.until(lambda: worker.times(f"{'replayed' if where == 'after' else 'finished'} {name}") == 1)
    finally:
        worker.kill()

    with closing(sqlite3.connect(tmp_path / "wallet.db")) as connection:
        assert connection.execute("SELECT name, amount FROM wallet").fetchall() == [(name, 1)]
    assert worker.times(f"ran {name}") == (1 if where == "after" else 2)
