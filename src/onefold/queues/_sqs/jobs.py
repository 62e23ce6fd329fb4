"""The messages that a worker has received and not settled: which run, which wait, and what SQS has to be told. Pure.

It has no clock and sends nothing: a driver passes the time, and performs what is due. Of a FIFO queue, the messages of
one group run one after another; those behind one that is given back are given back, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from onefold import Current, current
from onefold.queues._sqs.consumer import (
    BEATS,
    VISIBILITY_MAX,
    Delivery,
    Rules,
    Settings,
    Situation,
    Step,
    is_last,
    log,
)
from onefold.stores.base import Address

# SQS takes so many messages in one request.
ENTRIES_MAX: Final = 10

# How many messages may wait in a worker's hands, each for something of its own, before it receives no more.
WAITING_MAX: Final = 1_000

# How long a deletion waits for others, to be sent together with them.
DELETE_SECONDS: Final = 0.05
# How often a deletion is tried. A message that stays comes again, and is found done.
DELETE_TRIES: Final = 5
# The pause before the next try, of a deletion and of an extension.
RETRY_SECONDS: Final = 1.0


class Job:
    """A message that this worker has not settled yet."""

    __slots__ = (
        *("address", "claim", "delivery", "due", "extend_at", "is_done", "is_running", "receipt", "received"),
        *("retries", "step", "tries", "visible_at"),
    )

    def __init__(self, delivery: Delivery, receipt: str, received: float, settings: Settings) -> None:
        self.delivery = delivery
        self.receipt = receipt
        self.received = received
        # When SQS delivers it to another worker, and when it has to be told that it must not.
        self.visible_at = received + settings.visibility
        self.extend_at = received + settings.visibility / BEATS
        self.step = Step("again")
        # When it has its turn again, while it waits in place.
        self.due = math.inf
        self.retries = 0
        # How often its deletion has failed.
        self.tries = 0
        self.is_running = False
        # It is only to be deleted.
        self.is_done = False
        # Its claim, while its handler runs.
        self.claim: Current | None = None
        # The address of its record, once something has to be reported about it.
        self.address: Address | None = None

    def started(self) -> None:
        """Note the claim, inside the handler's delivery."""
        self.claim = current()

    @property
    def is_lost(self) -> bool:
        """Return whether its claim may be another worker's: then SQS should deliver it to that one."""
        return self.claim is not None and self.claim.lost


class Change(NamedTuple):
    """A message, and after how many seconds SQS may deliver it again."""

    job: Job
    seconds: float


class Due(NamedTuple):
    """What SQS has to be told now, each in requests of at most `ENTRIES_MAX` messages."""

    deletions: list[Job]
    # Messages that are given back, and those that are kept longer.
    given_back: list[Change]
    extended: list[Change]


class Jobs:
    """The unsettled messages of one worker."""

    def __init__(self, settings: Settings, rules: Rules) -> None:
        self.settings = settings
        self._rules = rules
        self._unsettled: dict[Job, None] = {}
        # Whose turn it is.
        self._ready: deque[Job] = deque()
        self._groups: dict[str, deque[Job]] = {}
        self._waiting: dict[Job, None] = {}
        self._deletions: list[Job] = []
        self._delete_at = math.inf
        # How many of them have failed before, and wait for another try.
        self._retried = 0
        # How many messages are done, and not deleted yet.
        self._done = 0
        self._given_back: list[Change] = []
        self.is_leaving = False

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def busy(self) -> int:
        """Return how many messages take up room.

        Not those that are done, and not those that wait for something of their own, or behind those.
        """
        left = len(self._unsettled) - self._done
        if not self._waiting:
            return left
        aside = sum(self._with_followers(job) for job in self._waiting if job.step.is_aside)
        return left - (aside if aside < WAITING_MAX else 0)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def is_settled(self) -> bool:
        return not self._unsettled and not self._given_back

    def take(self, deliveries: Iterable[tuple[Delivery, str]], received: float) -> None:
        """Have these messages and their receipts handled; they were asked for at this time."""
        for delivery, receipt in deliveries:
            job = Job(delivery, receipt, received, self.settings)
            self._unsettled[job] = None
            if self._is_grouped(job):
                self._drop_expired(str(delivery.group), received)
                group = self._groups.setdefault(str(delivery.group), deque())
                group.append(job)
                if len(group) > 1:
                    continue
            self._ready.append(job)
        if self.is_leaving:
            self._give_back_unstarted()

    def next(self, now: float) -> Job | None:
        """Return the message whose turn it is, if there is one."""
        self._wake(now)
        while self._ready:
            job = self._ready.popleft()
            if now < job.visible_at:
                job.is_running = True
                return job
            # Another worker may have it by now. It has not begun here.
            log.info("%s: it was not extended in time, and comes again", self._rules.found_at(job.delivery, None))
            self._forget(job)
            self._give_back_followers(job)
        return None

    def situation(self, job: Job, now: float) -> Situation:
        return Situation(now - job.received, job.retries, self._is_followed(job))

    def ended(self, job: Job, step: Step, now: float) -> None:
        """Take what is to be done with a message that has had its turn."""
        job.is_running, job.claim = False, None
        if self.is_leaving and step.action in ("again", "bury"):
            # A dead-letter queue that refuses it now is not asked again.
            step = self._left(job, step) if step.action == "again" else Step("give back")
        match step.action:
            case "ack":
                job.is_done = True
                self._done += 1
                self._deletions.append(job)
                self._delete_at = min(self._delete_at, now + DELETE_SECONDS)
                self._advance(job)
            case "leave":
                self._rules.buried(step.reason, job.address)
                self._forget(job)
                self._given_back.append(Change(job, 0.0))
                self._advance(job)
            case "give back":
                self._forget(job)
                self._given_back.append(Change(job, step.delay))
                self._give_back_followers(job)
            case "again" | "bury":
                job.retries += step.failed
                job.step, job.due = step._replace(delay=0.0), now + step.delay
                self._waiting[job] = None

    def leave(self) -> None:
        """Start nothing more, except what SQS would not deliver again."""
        self.is_leaving = True
        for job in list(self._waiting):
            del self._waiting[job]
            job.due = math.inf
            step = self._left(job, job.step)
            if step.action == "bury":
                job.step = step
                self._ready.append(job)
            else:
                self.ended(job, step, 0.0)
        self._give_back_unstarted()

    def next_due(self) -> float:
        """Return when there is something to do."""
        if self._given_back or self._is_time_to_delete(-math.inf):
            return -math.inf
        dues = (min(job.due, job.extend_at) for job in self._unsettled)
        return min(self._delete_at, min(dues, default=math.inf))

    def is_due_before(self, moment: float) -> bool:
        """Return whether a message that has just ended has to be settled before this time."""
        if self._given_back or self._delete_at < moment or self._is_time_to_delete(-math.inf):
            return True
        return any(job.due < moment for job in self._waiting)

    def due(self, now: float) -> Due:
        """Return what SQS has to be told now."""
        self._wake(now)
        deletions: list[Job] = []
        if self._is_time_to_delete(now):
            deletions, self._deletions, self._delete_at, self._retried = self._deletions, [], math.inf, 0
        given_back, self._given_back = self._given_back, []
        leaving = {*deletions}
        extended = [
            Change(job, seconds)
            for job in self._unsettled
            if now >= job.extend_at and job not in leaving and (seconds := self._extension(job, now)) > 0
        ]
        return Due(deletions, given_back, extended)

    def _is_time_to_delete(self, now: float) -> bool:
        """Return whether the deletions make one request, or nothing else is on its way that could join them."""
        if not self._deletions or now >= self._delete_at:
            return bool(self._deletions)
        fresh = len(self._deletions) - self._retried
        return fresh >= ENTRIES_MAX or 0 < fresh == len(self._unsettled)

    def deleted(self, jobs: Iterable[Job], remaining: Iterable[Job], now: float) -> None:
        """Forget what is deleted; `remaining` are to be tried again, which is done a few times."""
        again = [*remaining]
        for job in again:
            job.tries += 1
            if job.tries < DELETE_TRIES:
                self._deletions.append(job)
                self._retried += 1
                self._delete_at = min(self._delete_at, now + RETRY_SECONDS)
            else:
                log.warning("%s: it cannot be deleted, and comes again", self._rules.found_at(job.delivery, None))
        for job in jobs:
            if job not in again or job.tries >= DELETE_TRIES:
                self._forget(job)

    def extended(self, changes: Iterable[Change], sent: float) -> None:
        for job, seconds in changes:
            job.visible_at = sent + seconds
            job.extend_at = sent + self.settings.visibility / BEATS

    def not_extended(self, changes: Iterable[Change], now: float, *, for_good: bool) -> None:
        """Try again soon, or never: another worker has the message."""
        for job, _ in changes:
            job.extend_at = math.inf if for_good else now + min(RETRY_SECONDS, self.settings.visibility / BEATS / 2)
            if for_good:
                job.visible_at = -math.inf

    def _extension(self, job: Job, now: float) -> float:
        """Return how much longer a message is kept; 0 if it is not."""
        head = self._groups[str(job.delivery.group)][0] if self._is_waiting_behind(job) else job
        if head.is_lost or head.visible_at == -math.inf:
            # SQS delivers no message of a group while another of it is in flight.
            job.extend_at = now + self.settings.visibility / BEATS
            return 0.0
        left = VISIBILITY_MAX - (now - job.received)
        if left < 1:
            job.extend_at = math.inf
            where = self._rules.found_at(job.delivery, job.address)
            log.warning("%s: it was kept for 12 hours, the longest that SQS allows, and comes again", where)
            return 0.0
        return min(self.settings.visibility, left)

    def _wake(self, now: float) -> None:
        for job in [job for job in self._waiting if job.due <= now]:
            del self._waiting[job]
            job.due = math.inf
            self._ready.append(job)

    def _left(self, job: Job, step: Step) -> Step:
        where = self._rules.found_at(job.delivery, job.address)
        return self._rules.left(step, job.delivery, self.settings, where)

    def _give_back_unstarted(self) -> None:
        """Give back what has not begun, unless this is its last receive: then it runs."""
        for job in [*self._unsettled]:
            begun = job.is_running or job.is_done or job in self._waiting or job.step.action == "bury"
            if begun or is_last(job.delivery, self.settings):
                continue
            if job in self._ready:
                self._ready.remove(job)
            self._forget(job)
            self._given_back.append(Change(job, 0.0))
            self._leave_group(job)

    def _drop_expired(self, name: str, received: float) -> None:
        """Let what comes now begin its group anew, if SQS does not keep those that came before it any more.

        Behind one that goes on without its claim, it would be extended no more than that one, and never have its turn.
        """
        group = self._groups.get(name)
        if group and group[0].visible_at < received + RETRY_SECONDS and group[0].received < received:
            del self._groups[name]
            for follower in [*group][1:]:
                self._forget(follower)

    def _give_back_followers(self, job: Job) -> None:
        if not self._is_waiting_behind(job):
            return
        for follower in self._groups.pop(str(job.delivery.group), ()):
            if follower is not job and follower in self._unsettled and not follower.is_done:
                self._forget(follower)
                self._given_back.append(Change(follower, 0.0))

    def _advance(self, job: Job) -> None:
        """Let the next message of its group have its turn."""
        group = self._leave_group(job)
        if group and not group[0].is_running and group[0] not in self._ready and group[0] not in self._waiting:
            self._ready.append(group[0])

    def _leave_group(self, job: Job) -> deque[Job] | None:
        if not self._is_grouped(job):
            return None
        name = str(job.delivery.group)
        group = self._groups.get(name)
        if group is not None and job in group:
            group.remove(job)
            if not group:
                del self._groups[name]
        return group

    def _is_grouped(self, job: Job) -> bool:
        return self.settings.is_fifo and job.delivery.group is not None

    def _is_followed(self, job: Job) -> bool:
        return self._is_waiting_behind(job) and len(self._groups[str(job.delivery.group)]) > 1

    def _with_followers(self, job: Job) -> int:
        return len(self._groups.get(str(job.delivery.group), ())) if self._is_grouped(job) else 1

    def _is_waiting_behind(self, job: Job) -> bool:
        return self._is_grouped(job) and job in self._groups.get(str(job.delivery.group), ())

    def _forget(self, job: Job) -> None:
        """Extend it no more: after it is given back, that would delay its next delivery."""
        if job in self._unsettled:
            del self._unsettled[job]
            self._done -= job.is_done
