"""Two schedulers that fire the same job, and run it once for each second. Run it: python examples/scheduled_report.py

Each is a process with an APScheduler of its own, as on two machines; one of them is killed in the middle. The other
goes on, and no second is run twice. It needs `pip install 'onefold[apscheduler]'`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from apscheduler.schedulers.blocking import BlockingScheduler  # pyright: ignore[reportUnknownVariableType]

from onefold import Guard
from onefold.schedulers.apscheduler import ThreadPoolExecutor

# Far longer than it takes, in seconds; it bounds the wait.
PATIENCE: Final = 60.0


def schedule(folder: Path, name: str) -> None:
    """Run a scheduler, until it is killed."""
    guard = Guard(f"sqlite:///{folder}/onefold.db")

    # Held, not run again, if it is killed in the middle of a report.
    @guard.scheduled("report", wait="10s", after_crash="hold")
    def report(planned: datetime | None = None) -> None:
        with (folder / "reports.log").open("a", encoding="utf-8") as reports:
            reports.write(f"{planned:%H:%M:%S} by {name}\n")

    scheduler: Any = BlockingScheduler(executors={"default": ThreadPoolExecutor(10)}, timezone="UTC")
    scheduler.add_job(report, "cron", second="*", misfire_grace_time=None, max_instances=10)
    scheduler.start()


def reports_in(folder: Path) -> list[str]:
    log = folder / "reports.log"
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def wait_for(folder: Path, reports: int) -> None:
    end = time.monotonic() + PATIENCE
    while len(reports_in(folder)) < reports:
        assert time.monotonic() < end, "no reports"
        time.sleep(0.05)


def main(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    first, second = (context.Process(target=schedule, args=(folder, name)) for name in ("first", "second"))
    first.start()
    second.start()
    try:
        wait_for(folder, 2)
        first.kill()
        first.join()
        print(f"the first scheduler was killed after {len(reports_in(folder))} reports")
        wait_for(folder, len(reports_in(folder)) + 2)
    finally:
        for process in (first, second):
            process.kill()
            process.join()
    reports = reports_in(folder)
    print("\n".join(reports))
    times = Counter(report.partition(" ")[0] for report in reports)
    print(f"{len(times)} planned times, {len(reports)} reports")
    assert set(times.values()) == {1}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
