"""A worker in threads, for a `Guard` and boto3: one receives, some handle, and one settles.

The thread that settles also extends the visibility of all messages, however long handlers and receives take.
"""

from __future__ import annotations

import math
import threading
from typing import Final

from onefold._concurrency.generators import run
from onefold.durations import Duration, seconds
from onefold.queues._shared.consumer import Consuming
from onefold.queues._shared.verdict import SOON
from onefold.queues._sqs.jobs import Job
from onefold.queues._sqs.worker import Options, WorkerBase, clock

# A thread that waits looks at least this often.
LOOK_SECONDS: Final = 60.0

# How soon a worker notices `stop` while it waits: a signal handler cannot wake it.
STOP_SECONDS: Final = 0.1


class Worker(WorkerBase):
    """A worker for one queue. Created by `guarded`."""

    def __init__(self, consuming: Consuming, options: Options) -> None:
        lock = threading.RLock()
        # Notified when there is something to handle, something to settle, and room for more messages.
        self._to_handle = threading.Condition(lock)
        self._to_settle = threading.Condition(lock)
        self._changed = threading.Condition(lock)
        # When the thread that settles looks again by itself.
        self._settles_at = math.inf
        super().__init__(consuming, options, lock)
        # Set while nothing is consumed.
        self._idle = threading.Event()
        self._idle.set()

    def consume(self) -> None:
        """Receive and handle messages until `stop` or `drain` is called, and return when all of them are settled.

        Raises boto3's error if the queue does not exist, or may not be read; a lost connection is waited for.
        """
        self._begin()
        self._idle.clear()
        try:
            while not run(self._open()):
                self._rest(SOON)
                if self._is_stopping:
                    return
            self._consume()
        finally:
            self._idle.set()

    def _consume(self) -> None:
        threads = [
            threading.Thread(target=target, name=f"onefold {self._rules.operation}", daemon=True)
            for target in (self._keep_settling, *[self._keep_handling] * self._options.concurrency)
        ]
        for thread in threads:
            thread.start()
        try:
            while (count := self._room()) > 0:
                if not run(self._receive(count)):
                    self._rest(SOON)
                self._notify()
        finally:
            self.stop()
            with self._lock:
                self._work.leave()
            self._notify()
            for thread in threads:
                thread.join()

    def stop(self) -> None:
        """Have `consume` return, once what runs has ended. It returns at once; a signal handler may call it."""
        self._is_stopping = True

    def drain(self, within: Duration = 30) -> bool:
        """Start nothing more, and wait until `consume` has settled what runs. Return False if that takes longer.

        Messages that were not started are given back, and other workers get them at once. To be called from another
        thread than `consume`; to consume again, create another worker.
        """
        limit = seconds(within, "within")
        self.stop()
        self._notify()
        return self._idle.wait(limit)

    def _room(self) -> int:
        """Wait until there is room; return how many may be received, 0 if this worker stops."""
        with self._changed:
            while not self._has_room and not self._is_stopping:
                self._changed.wait(STOP_SECONDS)
            return 0 if self._is_stopping else self._options.batch - self._work.busy

    def _rest(self, pause: float) -> None:
        end = clock() + pause
        with self._changed:
            while not self._is_stopping and (left := end - clock()) > 0:
                self._changed.wait(min(left, STOP_SECONDS))

    def _notify(self) -> None:
        with self._lock:
            for condition in (self._to_handle, self._to_settle, self._changed):
                condition.notify_all()

    def _keep_handling(self) -> None:
        while (job := self._next()) is not None:
            try:
                step = run(self._handle(job))
            except BaseException as error:  # noqa: BLE001 - a thread has nobody to tell
                step = self._broken(error, job)
            with self._lock:
                self._work.ended(job, step, clock())
                self._look()

    def _look(self) -> None:
        """Wake whoever waits for what has come to hold. Most messages leave nothing to do but a deletion, later."""
        if self._work.has_ready or self._work.is_leaving:
            self._to_handle.notify_all()
        if self._work.is_due_before(self._settles_at) or self._work.is_leaving:
            self._to_settle.notify()
        if self._has_room:
            self._changed.notify()

    def _next(self) -> Job | None:
        """Wait for a message to handle; None once this worker has left all of them."""
        with self._lock:
            while True:
                job = self._work.next(clock())
                if job is not None and self._has_room:
                    # It was the last one: more are received while it runs.
                    self._changed.notify()
                if job is not None or (self._work.is_leaving and not len(self._work)):
                    return job
                self._to_handle.wait(LOOK_SECONDS)

    def _keep_settling(self) -> None:
        while self._has_work():
            run(self._settle())
            self._notify()

    def _has_work(self) -> bool:
        """Wait until there is something to settle; False once everything is settled, and nothing more comes."""
        with self._lock:
            while (pause := self._work.next_due() - clock()) > 0:
                if self._work.is_leaving and self._work.is_settled:
                    return False
                self._settles_at = self._work.next_due()
                self._to_settle.wait(min(pause, LOOK_SECONDS))
            self._settles_at = math.inf
            return True
