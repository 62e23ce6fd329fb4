"""taskiq's messages: take one from a worker, settle it by its verdict, and send it again."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from taskiq import AsyncBroker, Context, ScheduledTask, ScheduleSource, TaskiqMessage
from taskiq.acks import AcknowledgeType
from taskiq.exceptions import NoResultError, TaskRejectedError
from taskiq.labels import prepare_label

from onefold import UsageError
from onefold.queues._shared.jobs.handler import Ended, Framework, GuardedJob, JobCall
from onefold.queues._shared.verdict import SOON, HandlerRaised, Later, Never, reason_of

FRAMEWORK: Final = Framework("task", (), (NoResultError, TaskRejectedError), "taskiq's NoResultError")

# Without a schedule source, a message waits in its worker before it is sent again, this many seconds at most.
PAUSE_MAX: Final = 5.0

# A broker that cannot be reached is asked again after this long, so often: a restart of the broker takes less. After
# that the message stays unacknowledged, and the broker delivers it again by its own rule.
REFUSED_SECONDS: Final = 1.0
SEND_TRIES: Final = 60

# Labels of taskiq's: whether its retry middlewares retry a message, how often they have, and `Context.requeue`.
RETRY: Final = "retry_on_error"
RETRIES: Final = "_retries"
REQUEUED: Final = "X-Taskiq-requeue"

# The ways to acknowledge by which a message is lost with its worker, or never acknowledged if it is a duplicate.
TOO_EARLY: Final = AcknowledgeType.WHEN_RECEIVED.value
BY_HAND: Final = "manual"

log = logging.getLogger("onefold.queues.taskiq")


# A time limit has ended the wait for another worker: nothing of the message has run.
OUT_OF_TIME: Final = Later(SOON, "its time limit ended before it was called")


class Rejected(Exception):
    """The message can never run: it is not retried, and its result is this error."""


class ComesLater(NoResultError):
    """The message has no result yet: it is sent again. No retry middleware counts this."""

    __template__ = "the message comes later"
    received: Any = None


class Received:
    """A message in the hands of a worker, as it came: taskiq converts the arguments of its own object."""

    __slots__ = ("args", "is_done_without_result", "kwargs", "labels", "later", "message", "resolved", "taken", "wire")

    def __init__(self, message: TaskiqMessage, wire: bytes | None = None) -> None:
        self.message = message
        # As the broker has delivered it: other middlewares may have decrypted it since.
        self.wire = wire
        self.args = list(message.args)
        self.kwargs = dict(message.kwargs)
        self.labels = dict(message.labels)
        self.taken = False
        # The arguments that taskiq has resolved.
        self.resolved: dict[str, Any] = {}
        # The function is done, and wants no result to be stored.
        self.is_done_without_result = False
        # If it has to be sent again: by which job, and why.
        self.later: tuple[GuardedJob, JobCall, Later] | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobCall:
        return JobCall(_queue_of(self.labels), self.message.task_id, self.labels, args, kwargs)

    def without_result(self, error: NoResultError) -> None:
        """Note that the function is done, and wants no result; raise the error if it has put itself back instead."""
        if self.message.labels.get(REQUEUED) != self.labels.get(REQUEUED):
            raise error
        self.is_done_without_result = True

    def comes_later(self, job: GuardedJob, call: JobCall, later: Later) -> None:
        """Have the middleware send it again, and nobody else."""
        self.later = job, call, later
        self.message.labels[RETRY] = False

    def begins(self) -> None:
        """Leave it to taskiq: its function is called, or it is settled."""
        self.later = None
        if RETRY in self.labels:
            self.message.labels[RETRY] = self.labels[RETRY]
        else:
            self.message.labels.pop(RETRY, None)


# The message of this task, set by the middleware; and the one whose function is called.
RECEIVED: Final[ContextVar[Received | None]] = ContextVar("onefold_taskiq_received", default=None)
CURRENT: Final[ContextVar[Received]] = ContextVar("onefold_taskiq_current")


def received(context: Context) -> Received:
    """Return the message for which a worker calls a task. Each is taken once."""
    found = RECEIVED.get()
    if found is None or found.taken or found.message.task_id != context.message.task_id:
        # No middleware has seen it: its worker has another broker than the task, which may be a shared one.
        found = Received(context.message)
        RECEIVED.set(found)
    found.taken = True
    # Another middleware may have replaced it since.
    found.message = context.message
    return found


def settled(job: GuardedJob, message: Received, call: JobCall, ended: Ended) -> Any:
    """Return the result of a message, or raise what makes taskiq and the middleware settle it by its verdict."""
    error = ended.error
    match ended.verdict:
        case HandlerRaised():
            assert error is not None
            job.tell_failed(log, call, error, _retries_of(message.labels) + 1)
            raise error
        case Never(reason):
            raise rejected(job, message, call, reason, error)
        case Later() as later:
            message.comes_later(job, call, later)
            raise ComesLater(received=message) from error
        case _ if error is None and not message.is_done_without_result:
            return ended.value
        case _ if error is None:
            raise NoResultError
    # Done, and its result was not kept: whoever waits for this one gets to know that.
    message.message.labels[RETRY] = False
    raise NotKept(reason_of(error)) from error


class NotKept(Rejected):
    """It is done, and its result was not kept. An earlier delivery of the same message may have stored it."""


def rejected(job: GuardedJob, message: Received, call: JobCall, reason: str, error: Exception | None) -> BaseException:
    """Report a message that never runs; return what to raise, which nobody retries."""
    job.tell_rejected(log, call, reason)
    message.message.labels[RETRY] = False
    if isinstance(error, job.policy.final_errors):
        return error
    told = Rejected(reason)
    told.__cause__ = error
    return told


async def sent_again(
    broker: AsyncBroker, message: Received, why: tuple[GuardedJob, JobCall, Later], source: ScheduleSource | None
) -> None:
    """Send a message again, with its id, key, labels and retries, after a pause. Raise if no broker takes it."""
    job, call, later = why
    delay, counted = job.tell_later(log, call, later, PAUSE_MAX if source is None else math.inf)
    if source is not None:
        await source.add_schedule(_scheduled(message, {**message.labels, **counted}, delay))
    else:
        await asyncio.sleep(delay)
        await _kicked(broker, _copied(_on_the_wire(broker, message), counted))


def _scheduled(message: Received, labels: dict[str, Any], delay: float) -> ScheduledTask:
    return ScheduledTask(
        task_name=message.message.task_name,
        task_id=message.message.task_id,
        labels=labels,
        args=message.args,
        kwargs=message.kwargs,
        time=datetime.now(UTC) + timedelta(seconds=delay),
    )


def _on_the_wire(broker: AsyncBroker, message: Received) -> Received:
    if message.wire is None:
        return message
    came = broker.formatter.loads(message.wire)
    came.parse_labels()
    return Received(came)


def _copied(message: Received, counted: dict[str, int]) -> TaskiqMessage:
    prepared = {label: prepare_label(value) for label, value in {**message.labels, **counted}.items()}
    return TaskiqMessage(
        task_id=message.message.task_id,
        task_name=message.message.task_name,
        labels={label: value for label, (value, _) in prepared.items()},
        labels_types={label: kind for label, (_, kind) in prepared.items()},
        args=message.args,
        kwargs=message.kwargs,
    )


async def _kicked(broker: AsyncBroker, message: TaskiqMessage) -> None:
    """Send a message, as soon as the broker takes it."""
    for tries_left in reversed(range(SEND_TRIES)):
        try:
            await broker.kick(broker.formatter.dumps(message))
        except Exception as error:
            if not tries_left:
                raise
            log.warning("%s: cannot be sent again yet: %s", message.task_name, type(error).__name__)
            await asyncio.sleep(REFUSED_SECONDS)
        else:
            return


def check_ack_type(given: object, whose: str) -> None:
    """Refuse a way to acknowledge by which a message is lost with its worker, or a duplicate is never acknowledged."""
    value = str(getattr(given, "value", given)).lower()
    if value == TOO_EARLY:
        raise UsageError(
            f"{whose}={value!r}: the broker forgets a message before it is handled, and a crash loses it. Leave it "
            "out, or take 'when_saved' or 'when_executed'"
        )
    if value == BY_HAND:
        raise UsageError(
            f"{whose}={value!r}: a duplicate gets the stored result, and its function, which would acknowledge it, is "
            "not called. Leave it out, or take 'when_saved' or 'when_executed'"
        )


def _queue_of(labels: Mapping[str, Any]) -> str:
    return str(labels.get("queue_name") or "")


def _retries_of(labels: Mapping[str, Any]) -> int:
    try:
        return int(labels.get(RETRIES, 0))
    except (TypeError, ValueError):
        return 0
