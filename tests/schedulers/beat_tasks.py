"""An app with an entry for each second: `celery -A tests.schedulers.beat_tasks beat`, twice, and `... worker`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery

from onefold import Event, Guard, current
from onefold.queues.celery import guarded
from onefold.schedulers.celery_beat import planned_of
from tests.processes import Notes

UNSET = '{"broker": "memory://", "queue": "", "folder": ""}'
SETTING: dict[str, Any] = json.loads(os.environ.get("ONEFOLD_BEAT", UNSET))
FOLDER = Path(SETTING["folder"])
NOTES = Notes(FOLDER / "notes")

app = Celery("shop", broker=SETTING["broker"])
app.conf.update(
    task_default_queue=SETTING["queue"] or "celery",
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    beat_scheduler="onefold.schedulers.celery_beat:PersistentScheduler",
    beat_max_loop_interval=0.2,
    beat_schedule={"every-second": {"task": "shop.tick", "schedule": 1.0, "args": ("tick",)}},
)


def heard(event: Event) -> None:
    NOTES.add(f"{event.kind} {event.address.key}")


guard = Guard(f"sqlite:///{FOLDER}/onefold.db" if SETTING["folder"] else "memory:", on_event=heard)


@guarded(app, guard, "tick", name="shop.tick", bind=True, acks_late=True)
def tick(self: Any, name: str) -> None:
    NOTES.add(f"ran {planned_of(self.request)} {current().key}")
