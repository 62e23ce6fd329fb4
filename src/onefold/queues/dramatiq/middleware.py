"""The middleware that shows guarded actors their messages, and checks their stores when a worker starts."""

from __future__ import annotations

import threading
from typing import Any, Final

from dramatiq.broker import Broker
from dramatiq.middleware import Middleware

from onefold import Guard
from onefold._concurrency.generators import run
from onefold.health.first_use import first_use_of
from onefold.health.startup import StoreProblems
from onefold.queues.dramatiq.messages import FAILED, RECEIVED, Failed, Received, enqueued_after_all, log

_one_at_a_time: Final = threading.Lock()


class OnefoldMiddleware(Middleware):
    """Shows guarded actors their messages. `guarded` adds it; its place among others makes no difference.

    A guard runs inside the actor, and so within everything that other middleware does before and after it.
    """

    @classmethod
    def added_to(cls, broker: Broker) -> None:
        """Add it to a broker, unless it is there."""
        with _one_at_a_time:
            if not any(isinstance(one, cls) for one in broker.middleware):
                broker.add_middleware(cls())

    def before_process_message(self, broker: Broker, message: Any) -> None:
        """Remember the message for its actor."""
        RECEIVED.set(Received(broker, message))
        # Before Retries has counted: its place may be before ours.
        FAILED.set(Failed(message) if _is_guarded(broker, message) else None)

    def after_process_message(self, *_: Any, **__: Any) -> None:
        """Forget it."""
        RECEIVED.set(None)

    def after_enqueue(self, _broker: Broker, message: Any, _delay: int | None) -> None:
        """Note that a message which has failed is enqueued again."""
        failed = FAILED.get()
        if failed is not None and failed.message.message_id == message.message_id:
            failed.is_enqueued = True

    def before_ack(self, broker: Broker, message: Any) -> None:
        """Enqueue a retry that Retries could not, as a broker was away: acknowledged, the message would be lost."""
        failed = FAILED.get()
        if failed is not None and failed.message is message and failed.is_lost():
            enqueued_after_all(broker, failed)
        FAILED.set(None)

    def after_skip_message(self, *_: Any) -> None:
        """Forget it, also if another middleware has skipped it."""
        RECEIVED.set(None)

    def before_worker_boot(self, broker: Broker, *_: Any) -> None:
        """Check the stores of all guarded actors. A worker whose messages would all have to wait does not start."""
        _confirm(broker)
        for actor in list(broker.actors.values()):
            job = getattr(actor, "job", None)
            if job is None or job.record is not None or not isinstance(job.guard, Guard):
                continue
            first_use = first_use_of(job.guard)
            try:
                if not first_use.is_over:
                    run(first_use.check(job.guard, job.policy))
            except StoreProblems as problem:
                # Dramatiq logs any other exception of a middleware, and starts.
                raise SystemExit(f"onefold: {problem}") from problem


def _is_guarded(broker: Broker, message: Any) -> bool:
    return hasattr(broker.actors.get(message.actor_name), "job")


def _confirm(broker: Any) -> None:
    """Let RabbitMQ confirm what this worker enqueues, before the message that it replaces is acknowledged.

    Dramatiq does not by default, also not for retries and delayed messages: a broker that is killed, or cut off, would
    lose the only copy.
    """
    if getattr(broker, "confirm_delivery", True) is False:
        broker.confirm_delivery = True
        log.info("RabbitMQ confirms what this worker enqueues (confirm_delivery)")
