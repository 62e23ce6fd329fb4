"""RQ's worker by hand, one job at a time in the test's own process, and real workers as processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.worker import BaseWorker

from services.home import Home
from services.processes import Daemon
from tests.processes import Notes
from tests.queues.rq_functions import Setting
from tests.support import PATIENCE, PROJECT

# Where the functions of a test are found by their names, as a worker imports them.
SPACE = ModuleType("tests_queues_rq_space")
sys.modules[SPACE.__name__] = SPACE


def published(function: Any) -> Any:
    """Put a function where RQ can import it."""
    function.__module__, function.__qualname__ = SPACE.__name__, function.__name__
    setattr(SPACE, function.__name__, function)
    return function


class Quiet(SimpleWorker):
    """A worker that takes no commands: it would listen for them in a thread, and wait a second for that to end."""

    def subscribe(self) -> None:
        """Listen to nobody."""

    def unsubscribe(self) -> None:
        """Nobody was listened to."""


class Hand:
    """A queue, and a worker that takes one job at a time."""

    def __init__(self, url: str, name: str) -> None:
        self.connection = Redis.from_url(url.replace("valkey:", "redis:"))
        self.queue = Queue(name, connection=self.connection)

    def enqueue(self, function: Any, *args: Any, key: str | None = None, **options: Any) -> Job:
        meta = {} if key is None else {"idempotency-key": key}
        return self.queue.enqueue_call(published(function), args=args, meta=meta, **options)

    def work(self, jobs: int = 1, kind: type[BaseWorker] = Quiet, **options: Any) -> None:
        """Take so many jobs. The signals of the tests stay as they are."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        try:
            kind([self.queue], connection=self.connection).work(
                burst=True, max_jobs=jobs, logging_level="CRITICAL", **options
            )
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def state(self, job: Job) -> str:
        return str(job.get_status(refresh=True).value)

    def close(self) -> None:
        self.connection.close()


class Environment:
    """A queue with a worker that forks a work horse for each job, and what the functions have written down."""

    def __init__(
        self, setting: Setting, home: Home, *options: str, log: Path | None = None, worker: Setting | None = None
    ) -> None:
        theirs = worker or setting
        self.setting = setting
        self.folder = Path(setting.folder)
        self.notes = Notes(self.folder / "notes")
        self.connection = Redis.from_url(setting.redis)
        self.queue = Queue(setting.queue, connection=self.connection)
        self._starts = 1
        command = [sys.executable, "-W", "ignore", "-m", "rq.cli", "worker", "--url", theirs.redis, *options]
        self._worker = Daemon(
            "rq",
            [*command, setting.queue],
            log or self.folder,
            answers=lambda: self._worker.log.read_text().count("Listening on ") >= self._starts,
            environment={
                "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
                "ONEFOLD_RQ": json.dumps(theirs),
            },
        )
        # It ends with the session, whatever becomes of that.
        home.keep(self._worker)

    @property
    def running(self) -> bool:
        return self._worker.running

    def rescue(self) -> bool:
        """Start a worker that has given up, and requeue what RQ has lost; return False: nothing is done yet."""
        if not self.running:
            StartedJobRegistry(queue=self.queue).cleanup(timestamp=time.time() + 3_600)
            for job_id in self.queue.failed_job_registry.get_job_ids():
                self.queue.failed_job_registry.requeue(job_id)
            self.start()
        # The reply that brought it was lost, or it is just being taken: then it comes twice, and the guard absorbs it.
        between = IntermediateQueue(self.queue.key, self.connection)
        for job_id in between.get_job_ids():
            between.remove(job_id)
            self.queue.push_job_id(job_id)
        return False

    def kill(self) -> None:
        """SIGKILL to the worker and its work horse."""
        self._worker.kill()

    def start(self) -> None:
        """Once more, after a kill."""
        self._starts += 1
        self._worker.start()

    def close(self) -> None:
        self.kill()
        self.connection.close()

    def enqueue(self, name: str, *args: Any, key: str, **options: Any) -> Job:
        where = f"tests.queues.rq_functions.{name}"
        return self.queue.enqueue_call(where, args=args, meta={"idempotency-key": key}, **options)

    def result(self, job: Job) -> Any:
        """What the job has returned, once it is finished."""
        self.until(lambda: job.get_status(refresh=True).value == "finished")
        return job.return_value(refresh=True)

    def until_failed(self, job: Job) -> None:
        self.until(lambda: job.id in self.queue.failed_job_registry)

    def times(self, *noted: str) -> int:
        """How often something was written down that begins with these words."""
        begin = " ".join(noted)
        return sum(f"{line} ".startswith(f"{begin} ") for line in self.notes.read())

    def until(self, holds: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self._worker.log.read_text()[-4000:]
            time.sleep(0.02)

    def until_noted(self, *noted: str, times: int = 1) -> None:
        self.until(lambda: self.times(*noted) >= times)

    def open_gate(self, name: str) -> None:
        (self.folder / name).touch()
