"""The loop of a worker: it takes entries, runs their handlers and settles them, and keeps what it has from others.

Flows without I/O of their own: each is performed by a sync or an async driver. Of `work` there are as many at a time as
handlers may run; of `fetch` and of `keep` there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from onefold._concurrency.generators import Flow
from onefold.queues._redis_streams import requests
from onefold.queues._redis_streams.consumer import ACKNOWLEDGED, BEGINNING, Rules, Step, gone_from, log
from onefold.queues._redis_streams.jobs import FIRST, Job, Jobs
from onefold.queues._redis_streams.requests import ERRORS, SCAN_FROM, Entry, Requests, is_temporary, is_without_group
from onefold.queues._shared.verdict import ACK, SOON, Later
from onefold.queues.keys import Message
from onefold.stores.base import Address

# How long a worker waits for a new entry; that is also how long a stop may have to wait for it.
FETCH_SECONDS: Final = 1.0

# The server hears of an entry this often within the time after which another consumer claims it.
BEATS: Final = 3

# How often a worker looks for entries that nobody keeps any more: twice within that time, and at least this often.
CLAIM_SECONDS_MAX: Final = 5.0

# Acknowledgements are sent together: so many, or those of a second. What a crash swallows is found done.
ACKS_MAX: Final = 100
ACK_SECONDS_MAX: Final = 1.0

# A script that keeps entries blocks its server for some 10 us an entry.
KEPT_AT_ONCE: Final = 100

# How often a worker that has no room for more looks again.
ROOM_SECONDS: Final = 0.05

# How long entries are handled without a turn for others, in an event loop.
YIELD_SECONDS: Final = 0.01

# Of a worker that stops: an entry that it cannot give back.
LEFT_REASON: Final = "it was trimmed or deleted before it was done, and its worker stopped"

# The first of the entries that are this consumer's own.
OWN_FROM: Final = "-"


class Loop:
    """One worker of a group, on one client."""

    def __init__(
        self,
        requests: Requests,
        rules: Rules,
        batch: int,
        *,
        block: float,
        call: Callable[[Job], Any],
        fetch_alone: Callable[[], Any],
        sleep: Callable[[float], Any],
        address_of: Callable[[Message], Address],
        runs_without_key: bool,
        leaves_group: bool,
    ) -> None:
        self.jobs = Jobs()
        self.is_leaving = False
        # Set once nothing runs any more.
        self.is_over = False
        self._requests = requests
        self._rules = rules
        self._batch = batch
        self._block = min(block, FETCH_SECONDS)
        self._call = call
        self._fetch_alone = fetch_alone
        self._sleep = sleep
        self._address_of = address_of
        self._runs_without_key = runs_without_key
        self._leaves_group = leaves_group
        self._is_lost = False
        # Where the scan of this consumer's own entries goes on; None if it knows of all of them.
        self._own_from: str | None = OWN_FROM
        # The same for those that nobody keeps, and when it goes on.
        self._claim_from, self._claim_at = SCAN_FROM, 0.0
        self._beat_at = 0.0

    def begin(self) -> Flow[None]:
        """Create the group if it is not there, with its stream."""
        yield from self._create_group(self._rules.start)
        if not self._requests.has_one_slot:
            log.warning(
                "%s and %s are on different nodes of the cluster: a worker that dies while it buries an entry may bury "
                "it twice. Give them one hash tag: {charges} and {charges}.dead",
                *(self._rules.stream, self._rules.dead_letter),
            )

    def work(self) -> Flow[None]:
        """Handle one entry after the other, until the worker is to stop."""
        since = time.monotonic()
        while not self.is_leaving:
            now = time.monotonic()
            job = self.jobs.next(now)
            if job is None:
                yield self._fetch_alone
                since = now
                continue
            yield from self._settle(job)
            if now - since >= YIELD_SECONDS:
                yield partial(self._sleep, 0)
                since = now

    def fetch(self) -> Flow[None]:
        """Acknowledge what is done, and take entries if none is there: own ones, abandoned ones, new ones."""
        due = self.jobs.due_in(time.monotonic())
        if due == 0 or self.is_leaving:
            return
        try:
            yield from self._acknowledge()
            yield from self._take(due)
        except ERRORS as error:
            if is_without_group(error):
                log.warning("%s: the group %s is gone, and is created again", self._rules.stream, self._rules.group)
                # From the beginning: nobody knows what came since. What was done before is found done.
                yield from self._create_group(BEGINNING)
            else:
                yield from self._survive(error)
        else:
            self._is_back()

    def keep(self) -> Flow[None]:
        """Keep all entries from others, and acknowledge what is done, until nothing runs any more."""
        every = self._rules.min_idle / BEATS
        self._beat_at = time.monotonic() + every
        while not self.is_over:
            yield partial(self._sleep, min(every, ACK_SECONDS_MAX))
            try:
                yield from self._acknowledge()
                if time.monotonic() >= self._beat_at:
                    self._beat_at = time.monotonic() + every
                    yield from self._beat()
            except ERRORS as error:
                # If it does not go away, `work` says so.
                self._note(error)

    def leave(self) -> Flow[None]:
        """Let others have what was not started or waits, once nothing runs any more."""
        now = time.monotonic()
        try:
            yield from self._acknowledge()
            for some in _some(self.jobs.left()):
                gone = yield self._requests.give_back((job.id, self._idle(job, now), _uncounted(job)) for job in some)
                yield from self._rescue(job for job in some if job.is_deleted or job.id in gone)
            if self._leaves_group:
                yield self._requests.leave()
        except ERRORS as error:
            log.info("%s: %s, others take over what is left", self._rules.stream, type(error).__name__)

    def _rescue(self, jobs: Iterable[Job]) -> Flow[None]:
        """Bury what is not in the stream any more: nobody else can take it, and this worker leaves."""
        for job in jobs:
            job.address = self._address_of(job.delivery.message)
            where = self._rules.found_at(job.address)
            log.error("%s: to the dead letters: %s", where, LEFT_REASON)
            dead = self._rules.dead(job.delivery, LEFT_REASON, job.address)
            bury = self._requests.bury(job.id, dead) if self._requests.has_one_slot else self._requests.add_dead(dead)
            try:
                yield bury
            except ERRORS as error:
                # The others are not to be lost with it.
                self._rules.refused(error, LEFT_REASON, where)
                gone_from(self._rules.stream, [job.id])
            else:
                self._rules.buried(LEFT_REASON, job.address)

    # Taking entries.

    def _take(self, due: float | None) -> Flow[None]:
        room = self.jobs.room(self._batch)
        if not room:
            yield partial(self._sleep, ROOM_SECONDS if due is None else min(due, ROOM_SECONDS))
            return
        if self._own_from is not None:
            found = requests.taken((yield self._requests.own(room, self._own_from, self.jobs.known())))
            self._own_from = found.goes_on or None
            return self._arrived(found.entries, found.gone)
        if time.monotonic() >= self._claim_at:
            found = requests.taken((yield self._requests.claim(room, self._claim_from, self.jobs.known())))
            self._claim_from = found.goes_on
            if found.goes_on == SCAN_FROM:
                self._claim_at = time.monotonic() + min(self._rules.min_idle / 2, CLAIM_SECONDS_MAX)
            self._arrived(found.entries, found.gone)
            if found.entries or found.goes_on != SCAN_FROM:
                # A read may wait: of a long list of what others keep, it would let the scan make a step a second.
                return
        block = self._block if due is None else min(due, self._block)
        self._arrived(requests.read_entries((yield self._requests.read(room, block))))

    def _arrived(self, entries: Iterable[Entry], gone: Iterable[bytes] = ()) -> None:
        now = time.monotonic()
        for one in entries:
            self.jobs.add(Job(one.id, self._rules.delivery(one.id, one.fields, one.times_delivered), now))
        gone_from(self._rules.stream, gone)

    def _create_group(self, start: str) -> Flow[None]:
        while not self.is_leaving:
            try:
                yield self._requests.create_group(start)
            except ERRORS as error:
                if str(error).startswith("BUSYGROUP"):
                    return
                yield from self._survive(error)
            else:
                log.info("%s: created the group %s, from %s", self._rules.stream, self._rules.group, start)
                return

    # One entry.

    def _settle(self, job: Job) -> Flow[None]:
        is_new = job.step is FIRST and time.monotonic() - job.kept_at < self._rules.min_idle
        if not is_new and not (yield from self._is_still_ours(job)):
            return
        step = job.step if job.step.action == "bury" else (yield from self._handled(job))
        match step.action:
            case "ack":
                # Nothing but its acknowledgement keeps an entry without a key from running again.
                if self.jobs.done(job) >= ACKS_MAX or self._has_no_key(job):
                    yield from self._acknowledge_or_later()
            case "again":
                self.jobs.wait(job, step, time.monotonic())
            case "bury":
                yield from self._bury(job, step.reason)

    def _handled(self, job: Job) -> Flow[Step]:
        job.has_begun = True
        verdict = yield partial(self._call, job)
        job.claim = None
        if verdict == ACK:
            return ACKNOWLEDGED
        job.address = self._address_of(job.delivery.message)
        job.times_held += isinstance(verdict, Later) and verdict.limited
        return self._rules.after(verdict, job.delivery, time.monotonic() - job.since, job.address)

    def _is_still_ours(self, job: Job) -> Flow[bool]:
        """Ask the server whether this worker has the entry, and count a delivery after a failed attempt."""
        counted, now = job.step.is_counted, time.monotonic()
        if not job.is_deleted:
            try:
                (times,) = yield self._requests.keep([job.id], is_counted=counted)
            except ERRORS as error:
                if not is_without_group(error):
                    self._note(error)
                    self.jobs.wait(job, job.step._replace(delay=SOON), time.monotonic())
                    return False
                times = 0
            if not times:
                self._taken(job)
                self.jobs.forget(job)
                return False
            job.kept_at, job.is_deleted = now, times < 0
        before = job.delivery.times_delivered
        job.delivery = job.delivery._replace(times_delivered=before + counted if job.is_deleted else times)
        return True

    def _bury(self, job: Job, reason: str) -> Flow[None]:
        if not self.jobs.is_ours(job):
            return self.jobs.forget(job)
        dead = self._rules.dead(job.delivery, reason, job.address)
        try:
            if self._requests.has_one_slot:
                written = yield self._requests.bury(job.id, dead)
            else:
                written = yield from self._bury_in_steps(job, dead)
        except ERRORS as error:
            where = self._rules.found_at(job.address)
            return self.jobs.wait(job, self._rules.refused(error, reason, where), time.monotonic())
        self.jobs.forget(job)
        if written:
            self._rules.buried(reason, job.address)

    def _bury_in_steps(self, job: Job, dead: list[str | bytes]) -> Flow[bool]:
        """Write a dead letter, then acknowledge its entry: whoever dies in between has written it, and not lost it."""
        if not job.is_deleted:
            (times,) = yield self._requests.keep([job.id])
            if not times:
                return False
            # It is asked for only once: then it is not pending any more, either.
            job.is_deleted = times < 0
        yield self._requests.add_dead(dead)
        yield self._requests.ack([job.id])
        return True

    def _has_no_key(self, job: Job) -> bool:
        return self._runs_without_key and not self._address_of(job.delivery.message).key

    def _acknowledge(self) -> Flow[None]:
        ids = self.jobs.unacknowledged
        if ids:
            yield self._requests.ack(ids)
            self.jobs.acknowledged(ids)

    def _acknowledge_or_later(self) -> Flow[None]:
        try:
            yield from self._acknowledge()
        except ERRORS as error:
            self._note(error)

    # Keeping entries.

    def _beat(self) -> Flow[None]:
        for some in _some(self.jobs.kept()):
            now = time.monotonic()
            try:
                found = yield self._requests.keep(job.id for job in some)
            except ERRORS as error:
                if not is_without_group(error):
                    raise
                found = [0] * len(some)
            for job, times in zip(some, found, strict=True):
                if not times:
                    self._taken(job)
                else:
                    job.kept_at, job.is_deleted = now, times < 0

    def _taken(self, job: Job) -> None:
        if self.jobs.is_ours(job):
            where = self._rules.found_at(job.address)
            log.info("%s: another consumer has it now, or it is settled", where)
        self.jobs.taken(job)

    def _idle(self, job: Job, now: float) -> float:
        """Return how long an entry that is given back counts as idle: one that waits is claimed when it is due."""
        return max(0.0, self._rules.min_idle - max(0.0, job.due - now))

    # A server that does not answer.

    def _survive(self, error: Exception) -> Flow[None]:
        """Wait for a server that may be back in a moment. Raise any other error."""
        if not is_temporary(error):
            raise error
        self._note(error)
        # What the server has delivered in an answer that was lost is found there.
        self._own_from = OWN_FROM
        yield partial(self._sleep, SOON)

    def _note(self, error: Exception) -> None:
        if self._is_lost:
            log.debug("%s: %s", self._rules.stream, type(error).__name__)
            return
        self._is_lost = True
        log.warning("%s: the server does not answer, and is asked again: %s", self._rules.stream, type(error).__name__)

    def _is_back(self) -> None:
        if self._is_lost:
            self._is_lost = False
            log.info("%s: the server answers again", self._rules.stream)


def _uncounted(job: Job) -> int:
    """Return how many of its deliveries are not to be counted: this one, unless it has failed."""
    return 0 if job.step.is_counted else 1


def _some(jobs: list[Job]) -> Iterator[list[Job]]:
    return (jobs[at : at + KEPT_AT_ONCE] for at in range(0, len(jobs), KEPT_AT_ONCE))
