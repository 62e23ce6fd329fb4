"""What a worker of SQS does, written once for threads and tasks: receive, handle, and settle messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple

from onefold import UsageError
from onefold._concurrency.generators import Flow
from onefold.queues._shared.consumer import AsyncConsuming, Consuming
from onefold.queues._shared.verdict import ACK, SOON, Later, Verdict
from onefold.queues._sqs import requests
from onefold.queues._sqs.consumer import DELETED, Rules, Step, log, name_of
from onefold.queues._sqs.jobs import ENTRIES_MAX, Change, Job, Jobs
from onefold.queues._sqs.requests import ERRORS, Refused, batches, code_of, is_passing
from onefold.queues._sqs.sending import dead

clock: Final = time.monotonic


class Options(NamedTuple):
    """The checked options of a worker."""

    client: Any
    queue: str
    rules: Rules
    # How many handlers run at once, and how many messages the worker has at a time.
    concurrency: int
    batch: int
    visibility: float | None

    @property
    def few(self) -> int:
        """Return at how many messages more are received."""
        return self.batch // 2


def batch_of(concurrency: int) -> int:
    """Return how many messages a worker has at a time: those that run, and those that were received ahead."""
    return max(ENTRIES_MAX, 2 * concurrency)


class WorkerBase:
    """The flows of a worker. The lock is around everything that changes its jobs; no request is made inside it."""

    def __init__(
        self, consuming: Consuming | AsyncConsuming, options: Options, lock: AbstractContextManager[Any]
    ) -> None:
        self._consuming = consuming
        self._options = options
        self._rules = options.rules
        self._lock = lock
        self._jobs: Jobs | None = None
        self._is_stopping = False

    @property
    def _work(self) -> Jobs:
        if self._jobs is None:
            raise UsageError("this worker does not consume yet")
        return self._jobs

    @property
    def _has_room(self) -> bool:
        """Return whether few messages are left and all of them run, so that few requests bring many."""
        return not self._work.has_ready and self._work.busy <= self._options.few

    def _begin(self) -> None:
        """Refuse to consume a second time."""
        if self._jobs is not None:
            raise UsageError("this worker has consumed before, or does: create another one")

    def _open(self) -> Flow[bool]:
        """Read how the queue delivers, before the first message. Return False if that may succeed in a moment."""
        chosen = self._options
        try:
            settings = yield from requests.read_settings(
                chosen.client, chosen.queue, chosen.visibility, self._rules.dead_letter
            )
        except ERRORS as error:
            self._survive(error, "reading its attributes")
            return False
        self._jobs = Jobs(settings, self._rules)
        return True

    def _receive(self, count: int) -> Flow[bool]:
        """Receive messages, if there are any. Return False after an error that may be over in a moment."""
        asked = clock()
        try:
            received = yield from requests.receive(
                self._options.client, self._options.queue, count, self._work.settings
            )
        except ERRORS as error:
            self._survive(error, "a receive")
            return False
        with self._lock:
            # The visibility does not count from a question that has waited for messages.
            self._work.take(received, max(asked, clock() - requests.ANSWER_SECONDS))
        return True

    def _survive(self, error: Exception, what: str) -> None:
        """Raise an error that does not go away by itself."""
        if not is_passing(error):
            raise error
        where = name_of(self._options.queue)
        log.warning("%s: %s failed, and is tried again in %.3g s: %s", where, what, SOON, code_of(error))

    def _handle(self, job: Job) -> Flow[Step]:
        """Call the handler, or send a dead letter; return what is to be done then."""
        step = job.step
        if step.action == "again":
            step = self._after((yield partial(self._deliver, job)), job)
        if step.action == "bury" and not step.delay:
            step = yield from self._bury(job, step.reason)
        return step

    def _deliver(self, job: Job) -> Any:
        delivery = job.delivery
        # Of a held message, each receive counts.
        held = delivery.receive_count - 1
        return self._consuming.deliver(delivery.message, delivery, held_before=held, on_start=job.started)

    def _after(self, verdict: Verdict, job: Job) -> Step:
        if verdict == ACK and not self._rules.remembers:
            return DELETED
        if verdict != ACK and job.address is None:
            job.address = self._consuming.address_of(job.delivery.message)
        with self._lock:
            situation = self._work.situation(job, clock())
            return self._rules.after(verdict, job.delivery, self._work.settings, situation, job.address)

    def _broken(self, error: BaseException, job: Job) -> Step:
        """Return what is to be done after an interrupt of the handler. Its claim is kept until its lease ends."""
        return self._after(Later(SOON, f"the handler raised {type(error).__name__}"), job)

    def _bury(self, job: Job, reason: str) -> Flow[Step]:
        settings = self._work.settings
        if job.address is None:
            job.address = self._consuming.address_of(job.delivery.message)
        try:
            letter = dead(self._rules, job.delivery, reason, settings, job.address)
            yield from requests.bury(self._options.client, letter)
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker survives, and the message is kept
            with self._lock:
                return self._rules.refused(code_of(error), reason, job.delivery, settings, clock() - job.received)
        self._rules.buried(reason, job.address)
        return DELETED

    def _settle(self) -> Flow[None]:
        """Tell SQS what is due."""
        with self._lock:
            due = self._work.due(clock())
        for changes in batches(due.extended):
            yield from self._extend(changes)
        for jobs in batches(due.deletions):
            yield from self._delete(jobs)
        for changes in batches(due.given_back):
            yield from self._give_back(changes)

    def _delete(self, jobs: Sequence[Job]) -> Flow[None]:
        remaining: list[Job] = []
        try:
            failed = yield from requests.delete(self._options.client, self._options.queue, jobs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other messages have to be settled
            remaining = [*jobs]
            log.warning("%s: %d deletions failed: %s", name_of(self._options.queue), len(jobs), code_of(error))
        else:
            remaining = [jobs[one.number] for one in failed if one.is_passing]
            for one in failed:
                if not one.is_passing:
                    log.info(
                        "%s: it was given to another worker, which finds it done", self._where(jobs[one.number], one)
                    )
        with self._lock:
            self._work.deleted(jobs, remaining, clock())

    def _give_back(self, changes: Sequence[Change]) -> Flow[None]:
        try:
            failed = yield from requests.change(self._options.client, self._options.queue, changes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other messages have to be settled
            failed = [Refused(number, code_of(error), is_passing=True) for number in range(len(changes))]
        for one in failed:
            log.info("%s: it comes again when its visibility ends", self._where(changes[one.number].job, one))

    def _extend(self, changes: Sequence[Change]) -> Flow[None]:
        sent = clock()
        try:
            failed = yield from requests.change(self._options.client, self._options.queue, changes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other messages have to be settled
            failed = [Refused(number, code_of(error), is_passing=True) for number in range(len(changes))]
        for one in failed:
            log.warning("%s: its visibility is not extended", self._where(changes[one.number].job, one))
        refused = {one.number for one in failed}
        with self._lock:
            self._work.extended([one for number, one in enumerate(changes) if number not in refused], sent)
            for one in failed:
                self._work.not_extended([changes[one.number]], clock(), for_good=not one.is_passing)

    def _where(self, job: Job, refused: Refused) -> str:
        return f"{self._rules.found_at(job.delivery, job.address)}: {refused.code}"
