"""The middleware that shows guarded tasks their messages, sends them again, and checks a worker when it starts."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any, Final
from weakref import WeakSet

from taskiq import AckableMessage, AsyncBroker, InMemoryBroker, ScheduleSource, TaskiqMessage, TaskiqResult
from taskiq.abc.middleware import TaskiqMiddleware
from taskiq.exceptions import NoResultError
from taskiq.labels import LabelType
from taskiq.receiver import Receiver
from taskiq.result_backends.dummy import DummyResultBackend

from onefold import AsyncGuard, UsageError
from onefold._concurrency.generators import run, run_async
from onefold.health.first_use import first_use_of
from onefold.queues._shared.jobs.handler import GuardedJob
from onefold.queues._shared.jobs.sending import Keys
from onefold.queues._shared.jobs.waits import TIMES
from onefold.queues.keys import KEY_HEADER
from onefold.queues.taskiq.messages import (
    RECEIVED,
    RETRIES,
    ComesLater,
    NotKept,
    Received,
    check_ack_type,
    log,
    sent_again,
)

_one_at_a_time: Final = threading.Lock()

# How far up its calls a receiver is looked for when its broker starts.
FRAMES_MAX: Final = 20


class OnefoldMiddleware(TaskiqMiddleware):
    """Shows guarded tasks their messages. `guarded` adds it; its place among others makes no difference.

    With a `schedule_source`, messages that come later wait there, until a scheduler sends them; otherwise they wait in
    their worker for a moment, and go to the end of the queue.
    """

    def __init__(self, *, schedule_source: ScheduleSource | None = None) -> None:
        super().__init__()
        self._source = schedule_source
        # The receivers whose way to acknowledge is known, and right.
        self._checked: WeakSet[Receiver] = WeakSet()

    @classmethod
    def added_to(cls, broker: AsyncBroker) -> None:
        """Add it to a broker, unless it is there."""
        if any(isinstance(one, cls) for one in broker.middlewares):
            return
        with _one_at_a_time:
            if not any(isinstance(one, cls) for one in broker.middlewares):
                broker.add_middlewares(cls())

    def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        """Refuse a message without a key, or give it its id. What comes again was sent by somebody else."""
        keys: Keys | None = getattr(self.broker.find_task(message.task_name), "__onefold_keys__", None)
        if keys is None or RETRIES in message.labels or TIMES in message.labels:
            return message
        if keys.are_missing(message.args, message.kwargs, message.labels):
            message.labels[KEY_HEADER] = message.task_id
            if message.labels_types is not None:
                message.labels_types[KEY_HEADER] = LabelType.STR.value
        return message

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Remember the message for its task. Refuse one that would be acknowledged before it has run."""
        job = self._job_of(message.task_name)
        if job is None:
            RECEIVED.set(None)
            return message
        callback = sys._getframe(1).f_locals
        receiver = callback.get("self")
        if isinstance(receiver, Receiver) and receiver not in self._checked:
            _check_receiver(receiver, self._jobs)
            self._checked.add(receiver)
            self._tell_if_lost(callback.get("message"))
        check_ack_type(message.labels.get("ack_type"), f"{message.task_name}: its message has ack_type")
        RECEIVED.set(Received(message, _wire_of(callback.get("message"))))
        return message

    async def on_error(self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException) -> None:
        """Send a message again that has to come later. It stays unacknowledged if no broker takes it."""
        known = exception.received if isinstance(exception, ComesLater) else RECEIVED.get()
        if known is None or known.message is not message:
            return
        if isinstance(exception, asyncio.CancelledError) and _is_cancelled():
            # Its worker stops. taskiq would acknowledge it.
            raise exception
        # Once, also if the middleware was added twice.
        why, known.later = known.later, None
        if why is not None:
            result.error = NoResultError()
            await sent_again(self.broker, known, why, self._source)
        elif isinstance(exception, NotKept) and await self._has_result(message.task_id):
            result.error = NoResultError()

    async def startup(self) -> None:
        """Check how a worker acknowledges, and the stores of all guarded tasks. One that cannot work does not start."""
        if not self.broker.is_worker_process:
            return
        jobs, receiver = self._jobs, _starting()
        try:
            if jobs and receiver is not None:
                _check_receiver(receiver, jobs)
            for job in jobs:
                await _check_store(job)
        except UsageError as problem:
            raise SystemExit(f"onefold: {problem}") from problem

    def _job_of(self, task_name: str) -> GuardedJob | None:
        return getattr(self.broker.find_task(task_name), "__onefold_job__", None)

    @property
    def _jobs(self) -> list[GuardedJob]:
        return [job for name in self.broker.get_all_tasks() if (job := self._job_of(name)) is not None]

    def _tell_if_lost(self, message: object) -> None:
        if not isinstance(message, AckableMessage) and not isinstance(self.broker, InMemoryBroker):
            log.warning(
                "%s has no acknowledgements: a message whose worker dies is lost, and no guard brings it back. Use a "
                "broker that has them, such as RedisStreamBroker",
                type(self.broker).__name__,
            )

    async def _has_result(self, task_id: str) -> bool:
        """Return whether nobody waits for a result, or an earlier delivery has stored it."""
        backend = self.broker.result_backend
        try:
            return isinstance(backend, DummyResultBackend) or bool(await backend.is_result_ready(task_id))
        except Exception:  # noqa: BLE001 - then the error is stored
            return False


async def _check_store(job: GuardedJob) -> None:
    """Check the store of a guard once. Raise `StoreProblems` if it cannot be used as it is set up."""
    first_use = first_use_of(job.guard)
    # A row of the caller's is in no table of ours.
    if job.record is not None or first_use.is_over:
        return
    check = first_use.check(job.guard, job.policy)
    if isinstance(job.guard, AsyncGuard):
        await run_async(check)
    else:
        run(check)


def _wire_of(delivered: object) -> bytes | None:
    data = delivered.data if isinstance(delivered, AckableMessage) else delivered
    return data if isinstance(data, bytes) else None


def _is_cancelled() -> bool:
    """Return whether this task was cancelled, not something that its function has waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_receiver(receiver: Receiver, jobs: list[GuardedJob]) -> None:
    """Refuse a worker that acknowledges too early, or runs guarded functions where no guard is."""
    check_ack_type(receiver.ack_time, "this worker has --ack-type")
    if receiver.is_process_pool and not all(job.is_async for job in jobs):
        raise UsageError(
            "this worker has --use-process-pool, and guarded tasks that are `def`: their messages do not get there. "
            "Use threads, or make the tasks `async def`"
        )


def _starting() -> Receiver | None:
    """Return the receiver that starts its broker; None if somebody else does. taskiq shows it to nobody."""
    frame: Any = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        if frame is None:
            break
        found = frame.f_locals.get("self")
        if isinstance(found, Receiver):
            return found
        frame = frame.f_back
    return None
