"""A worker of the FastStream tests, as a process that may be killed: `python -m tests.queues.faststream_worker`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

from onefold import Event, Guard, Policy
from onefold.queues.faststream import guarded
from onefold.queues.keys import header
from tests.processes import Notes
from tests.queues.faststream_tools import Place, broker_of, subscriber

READY = "ready"


class Setting(NamedTuple):
    place: Place
    folder: str


class Shop:
    """A broker with one handler, which is killed once, and the notes of what it does."""

    def __init__(self, setting: Setting) -> None:
        self.folder = Path(setting.folder)
        self.notes = Notes(self.folder / "notes")
        self.broker = broker_of(setting.place)
        guard = Guard(f"sqlite:///{self.folder}/wallet.db", policy=Policy(lease=2, keep="1h"), on_event=self.heard)

        # In a transaction: killed before its end, and after it, before the message is acknowledged.
        @subscriber(self.broker, setting.place)
        @guarded(guard, "credit", key=header())
        def credit(name: str, dies: str, *, tx: sqlite3.Connection) -> None:
            self.notes.add(f"ran {name}")
            tx.execute("INSERT INTO wallet VALUES (?, 1)", (name,))
            if dies == "inside":
                self.die_once(name)

    def heard(self, event: Event) -> None:
        self.notes.add(f"{event.kind} {event.address.key}")
        if event.kind == "finished" and event.address.key.startswith("after-"):
            self.die_once(event.address.key)

    def die_once(self, name: str) -> None:
        marker = self.folder / f"{name} died"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


async def work(setting: Setting) -> None:
    shop = Shop(setting)
    await shop.broker.start()
    shop.notes.add(READY)
    await asyncio.Event().wait()


if __name__ == "__main__":
    given: Any = json.loads(os.environ["ONEFOLD_FASTSTREAM"])
    asyncio.run(work(Setting(Place(*given[0]), given[1])))
