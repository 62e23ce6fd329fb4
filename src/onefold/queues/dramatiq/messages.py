"""Dramatiq's messages: take one from a worker, and settle it by its verdict."""

from __future__ import annotations

import logging
import threading
import time
from contextvars import ContextVar
from typing import Any, Final

from dramatiq.broker import Broker, MessageProxy
from dramatiq.errors import RateLimitExceeded, Retry
from dramatiq.middleware import MiddlewareError, SkipMessage
from dramatiq.results import ResultMissing
from dramatiq.threading import Interrupt
from dramatiq.worker import WorkerThread

from onefold import UsageError
from onefold.queues._shared.jobs.handler import Ended, Framework, GuardedJob, JobCall
from onefold.queues._shared.verdict import HandlerRaised, Later, Never, reason_of

FRAMEWORK: Final = Framework("actor", (Interrupt,), (Retry, RateLimitExceeded), "Dramatiq's Retry")

# A broker that cannot be reached is asked again after this long, in seconds: the message stays in the worker's hands.
REFUSED_SECONDS: Final = 1.0

log = logging.getLogger("onefold.queues.dramatiq")


class Rejected(Exception):
    """The message can never run: it is in the dead-letter queue, and its result is this error."""


class Received:
    """A message in the hands of the worker of a broker, until its actor has taken it."""

    __slots__ = ("broker", "message", "taken")

    def __init__(self, broker: Broker, message: MessageProxy) -> None:
        self.broker = broker
        self.message = message
        self.taken = False

    def call(self, queue: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobCall:
        return JobCall(queue, self.message.message_id, self.message.options, args, kwargs)


# The message that this thread processes. Set by the middleware.
RECEIVED: Final[ContextVar[Received | None]] = ContextVar("onefold_dramatiq_received", default=None)


def received(actor: Any) -> Received | None:
    """Return the message for which a worker calls this actor; None if this is a plain call. Each is taken once."""
    found = RECEIVED.get()
    if found is None:
        if isinstance(threading.current_thread(), WorkerThread):
            raise UsageError(
                f"the actor {actor.actor_name}: the broker of this worker has no OnefoldMiddleware, so nothing would "
                "be guarded, and nothing ran: broker.add_middleware(OnefoldMiddleware())"
            )
        return None
    if found.taken or found.message.actor_name != actor.actor_name:
        return None
    found.taken = True
    return found


def throws_of(job: GuardedJob, given: Any) -> tuple[type[BaseException], ...]:
    """Return the exceptions that Retries does not retry: the actor's own, what is final, and what never can run."""
    own = (given,) if isinstance(given, type) else tuple(given or ())
    return (*own, Rejected, *job.policy.final_errors)


def settled(actor: Any, received: Received, call: JobCall, ended: Ended) -> Any:
    """Return the result of a message, or raise what makes Dramatiq settle it by its verdict."""
    job, message, error = actor.job, received.message, ended.error
    match ended.verdict:
        case HandlerRaised():
            assert error is not None
            job.tell_failed(log, call, error, message.options.get("retries", 0) + 1)
            raise error
        case Never(reason):
            raise rejected(job, message, call, reason, error)
        case Later() as later:
            raise sent_again(job, received, call, later) from error
        case _ if error is None:
            return ended.value
    if somebody_waits(actor, received):
        raise rejected(job, message, call, reason_of(error), error)
    message.options["store_results"] = False
    return None


def rejected(
    job: GuardedJob, message: MessageProxy, call: JobCall, reason: str, error: Exception | None
) -> BaseException:
    """Mark a message for the dead-letter queue; return what to raise, which Retries does not retry."""
    job.tell_rejected(log, call, reason)
    message.fail()
    if isinstance(error, job.policy.final_errors):
        return error
    told = Rejected(reason)
    told.__cause__ = error
    return told


def sent_again(job: GuardedJob, received: Received, call: JobCall, later: Later) -> SkipMessage:
    """Enqueue the message again, with its id, key, pipeline and retries; return what ends it here, acknowledged."""
    message = received.message
    delay, counted = job.tell_later(log, call, later)
    try:
        _enqueued(received.broker, message.copy(options=counted), round(delay * 1000))
    except BaseException:
        # Only the dead-letter queue is left: acknowledged, it would be lost.
        message.fail()
        raise
    # Results would store None for a message that is skipped.
    message.options["store_results"] = False
    return SkipMessage(later.reason)


def _enqueued(broker: Broker, message: Any, delay: int) -> None:
    """Enqueue a message, as soon as the broker takes it. Raise its error once this worker is about to end."""
    while True:
        try:
            if _is_enqueued(broker, message, delay):
                return
            time.sleep(REFUSED_SECONDS)
        except Interrupt as interrupt:
            # A time limit is for the actor. Here nothing of it runs, and the message would be lost, or dead.
            log.info("%s: %s while it is enqueued again", message.queue_name, type(interrupt).__name__)


def _is_enqueued(broker: Broker, message: Any, delay: int) -> bool:
    try:
        broker.enqueue(message, delay=delay)
    except Exception as error:
        if not getattr(threading.current_thread(), "running", True) or not _can_be_encoded(message):
            raise
        log.warning("%s: cannot be enqueued again yet: %s", message.queue_name, type(error).__name__)
        return False
    return True


def _can_be_encoded(message: Any) -> bool:
    """Return whether a broker may take the message later: not if somebody has put an object into its options."""
    try:
        message.encode()
    except Exception:  # noqa: BLE001 - whatever its encoder raises
        return False
    return True


class NotEnqueued(MiddlewareError):
    """The broker takes no retry, and this worker ends: the message is not acknowledged, and comes again."""


class Failed:
    """A message whose actor has failed, until it is acknowledged: Retries enqueues it again before that."""

    __slots__ = ("is_enqueued", "message", "retries")

    def __init__(self, message: MessageProxy) -> None:
        self.message = message
        # Retries counts, and then enqueues.
        self.retries = message.options.get("retries", 0)
        self.is_enqueued = False

    def is_lost(self) -> bool:
        """Return whether Retries could not enqueue it: Dramatiq logs that, and acknowledges the message."""
        options = self.message.options
        return not (self.is_enqueued or self.message.failed) and options.get("retries", 0) > self.retries


# The message of this thread that has failed. Set by the middleware.
FAILED: Final[ContextVar[Failed | None]] = ContextVar("onefold_dramatiq_failed", default=None)


def enqueued_after_all(broker: Broker, failed: Failed) -> None:
    """Enqueue the retry that the broker did not take."""
    try:
        _enqueued(broker, failed.message, round(REFUSED_SECONDS * 1000))
    except Exception as error:
        raise NotEnqueued(f"{failed.message.queue_name}: {type(error).__name__}") from error


def somebody_waits(actor: Any, received: Received) -> bool:
    """Return whether a result that was not kept is still needed: by a caller, or by the next step."""
    options = {**actor.options, **received.message.options}
    target = options.get("pipe_target")
    ignores = options.get("pipe_ignore") or (target or {}).get("options", {}).get("pipe_ignore")
    if options.get("on_success") or (target is not None and not ignores):
        return True
    if not options.get("store_results"):
        return False
    try:
        received.message.get_result(backend=received.broker.get_results_backend())
    except ResultMissing:
        return True
    except Exception:  # noqa: BLE001 - it holds the failure of an earlier attempt, or cannot be asked
        return True
    return False
