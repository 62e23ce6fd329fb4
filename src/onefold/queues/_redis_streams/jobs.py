"""The entries that a worker has taken and not settled: which run, and which wait. No I/O; safe among threads."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from onefold import Current, current
from onefold.queues._redis_streams.consumer import Delivery, Step
from onefold.stores.base import Address

# How many entries may wait in a worker's hands before it reads no more: of a store that is down, or held ones.
WAITING_MAX: Final = 1_000

FIRST: Final = Step("again")


class Job:
    """An entry that this worker has not settled yet."""

    __slots__ = (
        *("address", "claim", "delivery", "due", "has_begun", "id", "is_deleted", "is_running", "is_taken"),
        *("kept_at", "since", "step", "times_held"),
    )

    def __init__(self, entry_id: bytes, delivery: Delivery, now: float) -> None:
        self.id = entry_id
        self.delivery = delivery
        self.since = now
        # When the server last heard that this worker has it.
        self.kept_at = now
        self.step = FIRST
        self.due = now
        # The address of its record, once something has to be reported about it.
        self.address: Address | None = None
        # Its claim, while its handler runs.
        self.claim: Current | None = None
        self.is_running = False
        self.has_begun = False
        # Another consumer has it now, or somebody has settled it.
        self.is_taken = False
        # It is not in the stream any more. This worker has all that is left of it.
        self.is_deleted = False
        self.times_held = 0

    @property
    def is_kept(self) -> bool:
        """Return whether no other worker should get it: one may if the claim is lost, and so may be another's."""
        claim = self.claim
        return claim is None or not claim.lost

    def started(self) -> None:
        """Note the claim, inside the handler's delivery."""
        self.claim = current()


class Jobs:
    """The unsettled entries of one worker, by their ids, and the ids of those to acknowledge."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, Job] = {}
        self._ready: deque[Job] = deque()
        # By the time at which they are due. Those that were forgotten meanwhile stay until then.
        self._waiting: list[tuple[float, int, Job]] = []
        self._waits: set[Job] = set()
        self._number = itertools.count()
        self._done: dict[bytes, None] = {}
        self._one_at_a_time = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Take an entry, unless this worker has it and keeps it. One whose claim is lost starts anew."""
        with self._one_at_a_time:
            known = self._jobs.get(job.id)
            if job.id in self._done or (known is not None and known.is_kept):
                return
            self._jobs[job.id] = job
            self._ready.append(job)

    def next(self, now: float) -> Job | None:
        """Return the entry whose turn it is, if any: first those that have waited long enough."""
        with self._one_at_a_time:
            while self._waiting and self._waiting[0][0] <= now:
                job = heapq.heappop(self._waiting)[2]
                if self._is_current(job):
                    return self._running(job)
            while self._ready:
                job = self._ready.popleft()
                if self._is_current(job):
                    return self._running(job)
        return None

    def _running(self, job: Job) -> Job:
        job.is_running = True
        self._waits.discard(job)
        return job

    def due_in(self, now: float) -> float | None:
        """Return in how many seconds there is a turn: 0 if there is one now, None if nothing waits for one."""
        with self._one_at_a_time:
            if self._ready:
                return 0.0
            return max(0.0, self._waiting[0][0] - now) if self._waiting else None

    def wait(self, job: Job, step: Step, now: float) -> None:
        """Do this step after its delay."""
        with self._one_at_a_time:
            job.step, job.due, job.is_running, job.claim = step._replace(delay=0.0), now + step.delay, False, None
            if self._is_current(job):
                self._waits.add(job)
                heapq.heappush(self._waiting, (job.due, next(self._number), job))
            else:
                self._forget(job)

    def done(self, job: Job) -> int:
        """Note that it is to be acknowledged; return how many are."""
        with self._one_at_a_time:
            self._forget(job)
            self._done[job.id] = None
            return len(self._done)

    def forget(self, job: Job) -> None:
        with self._one_at_a_time:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        job.is_running, job.claim = False, None
        self._waits.discard(job)
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]

    def is_ours(self, job: Job) -> bool:
        """Return whether this worker still has it, as far as it knows."""
        with self._one_at_a_time:
            return self._is_current(job)

    def _is_current(self, job: Job) -> bool:
        return self._jobs.get(job.id) is job and not job.is_taken

    def taken(self, job: Job) -> None:
        """Note that another consumer has it. If its handler runs, it goes on to its end."""
        with self._one_at_a_time:
            job.is_taken = True
            if not job.is_running:
                self._forget(job)

    @property
    def waiting(self) -> list[Job]:
        with self._one_at_a_time:
            return [*self._waits]

    @property
    def unacknowledged(self) -> list[bytes]:
        with self._one_at_a_time:
            return [*self._done]

    def acknowledged(self, ids: Iterable[bytes]) -> None:
        with self._one_at_a_time:
            for one in ids:
                self._done.pop(one, None)

    def kept(self) -> list[Job]:
        """Return the entries that no other worker should get."""
        with self._one_at_a_time:
            return [job for job in self._jobs.values() if job.is_kept and not (job.is_taken or job.is_deleted)]

    def known(self) -> list[bytes]:
        """Return the ids of entries that are not to be taken once more."""
        with self._one_at_a_time:
            return [*(job.id for job in self._jobs.values() if job.is_kept), *self._done]

    def room(self, batch: int) -> int:
        """Return how many more entries may be taken."""
        with self._one_at_a_time:
            waiting = len(self._waits)
            return 0 if waiting >= WAITING_MAX else max(0, batch - (len(self._jobs) - waiting))

    def left(self) -> list[Job]:
        """Give up all entries but those that still run, and return them."""
        with self._one_at_a_time:
            found = [job for job in self._jobs.values() if not job.is_running and not job.is_taken]
            for job in found:
                self._forget(job)
            return found
