"""A scheduler of its own: `python -m tests.schedulers.apscheduler_jobs FOLDER NAME`. One of two dies in a job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from apscheduler.schedulers.blocking import BlockingScheduler

from onefold import Event, Guard, current
from onefold.events import Kind
from onefold.schedulers.apscheduler import ThreadPoolExecutor
from tests.processes import Notes
from tests.support import PATIENCE

# Long enough for a renewal on a busy machine, short enough to wait for its end.
LEASE = 2.0


def main(folder: Path, name: str) -> None:
    notes = Notes(folder / "notes")
    running: set[tuple[str, str]] = set()

    def heard(event: Event) -> None:
        if event.kind is Kind.STARTED:
            running.add((event.operation, event.address.key))
        if event.kind is Kind.FINISHED:
            running.discard((event.operation, event.address.key))
        notes.add(f"{event.kind} {event.operation} {event.address.key} {name}")

    guard = Guard(f"sqlite:///{folder}/onefold.db", lease=LEASE, wait=PATIENCE, on_event=heard)

    @guard.scheduled("cron")
    def by_cron() -> None:
        # Not while another job has had its effect, and is not recorded.
        if (folder / f"{name} dies").exists() and running == {("cron", current().key)}:
            notes.add(f"died {current().key}")
            os.kill(os.getpid(), signal.SIGKILL)
        notes.add(f"ran cron {current().key}")

    # Each process begins to count when it starts.
    @guard.scheduled("interval", every="1s", after_crash="hold")
    def by_interval() -> None:
        notes.add(f"ran interval {current().key}")

    scheduler = BlockingScheduler(
        executors={"default": ThreadPoolExecutor(20)},
        job_defaults={"coalesce": False, "misfire_grace_time": None, "max_instances": 20},
        timezone="UTC",
    )
    scheduler.add_job(by_cron, "cron", second="*")
    scheduler.add_job(by_interval, "interval", seconds=1)
    notes.add(f"ready {name}")
    scheduler.start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
