"""RabbitMQ with pika's BlockingConnection: the callback that guards a consumer, and a sender that creates keys.

    channel.basic_consume("charges", guarded(guard, "charge", handle, key=header(), dead_letter="charges.dead"))

Handlers run in their own thread, so that the connection answers heartbeats however long they take; everything that is
sent to the broker is sent in the connection's own thread. If an answer cannot be sent any more, the message is
redelivered.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack
from weakref import WeakKeyDictionary, WeakSet

from onefold import Guard, Policy, PolicyFields, RecordColumn, UsageError
from onefold._checks import at_least
from onefold.durations import Duration, seconds
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq.consumer import OWN_EXCHANGE, DeadLetter, Delivery, Rules, Step, log
from onefold.queues._shared.consumer import Consuming, MissingKeyRule
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.logs import waits_of
from onefold.queues._shared.options import check_transactions, policy_of
from onefold.queues._shared.verdict import ACK, SOON, Later, Verdict
from onefold.queues.keys import KeyOf, PayloadOf

try:
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
    from pika.exceptions import AMQPError

    from onefold.queues._rabbitmq.pika_messages import Job, bury, delivery_of, send
except ImportError as missing:
    raise UsageError("onefold.queues.pika needs pika: pip install 'onefold[rabbitmq]'") from missing

__all__ = ["OWN_EXCHANGE", "Delivery", "guarded", "send"]


def guarded(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf,
    dead_letter: str | DeadLetter,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    attempts: int = ATTEMPTS,
    unacked_max: Duration = rabbitmq_consumer.UNACKED_MAX,
    threads: int = 1,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> GuardedCallback:
    """Return the callback for `basic_consume`: it calls `handler(delivery)`, or `handler(delivery, tx=…)`, once a key.

    `docs/queues/rabbitmq.md` explains each argument.
    """
    at_least(1, threads, "threads")
    chosen = policy_of(guard, Guard, policy, fields, guarded)
    consuming = Consuming(
        guard, operation, handler, key=key, missing_key=missing_key, policy=chosen, payload=payload, record=record
    )
    check_transactions(guard, handler)
    rules = rabbitmq_consumer.rules(operation, dead_letter, attempts, unacked_max, waits_of(guard))
    return GuardedCallback(consuming, rules, threads)


class GuardedCallback:
    """The callback that pika calls for each message. Created by `guarded`."""

    def __init__(self, consuming: Consuming, rules: Rules, threads: int) -> None:
        self._consuming = consuming
        self._rules = rules
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"onefold {rules.operation}")
        # A job whose connection is lost before it is settled is forgotten with it.
        self._at_work: WeakSet[Job] = WeakSet()
        # The channels that messages have come from, and whether this consumer has left them.
        self._left: WeakKeyDictionary[BlockingChannel, bool] = WeakKeyDictionary()
        self._leaving: BlockingConnection | None = None

    def __call__(self, channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        if not isinstance(channel, BlockingChannel):
            raise UsageError("guarded() is for pika's BlockingConnection; with asyncio, use onefold.queues.aio_pika")
        job = Job(channel, method.delivery_tag, delivery_of(method, properties, body), time.monotonic())
        if self._left.setdefault(channel, channel.connection is self._leaving):
            self._rules.came_too_late(job.delivery)
        else:
            self._start(job)

    def drain(self, connection: BlockingConnection, within: Duration = 30) -> bool:
        """Start nothing more, after `stop_consuming`, and settle running handlers. Return False if one still runs.

        Messages that were not started go back to the queue when the channel is closed. To consume again with this
        callback, open another channel.
        """
        deadline = time.monotonic() + seconds(within, "within")
        self._leaving = connection
        self._left.update({channel: True for channel in self._left if channel.connection is connection})
        while (busy := any(job.channel.is_open for job in self._at_work)) and time.monotonic() < deadline:
            connection.process_data_events(0.1)
        self._leaving = None
        return not busy

    def _start(self, job: Job) -> None:
        self._at_work.add(job)
        self._threads.submit(self._work, job)

    def _work(self, job: Job) -> None:
        """Run a job, in its own thread."""
        verdict: Verdict | None = None
        try:
            if job.channel.is_open and not self._left.get(job.channel):
                verdict = self._consuming.deliver(job.delivery.message, job.delivery)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to tell; its claim is kept until it ends
            verdict = Later(SOON, f"the handler raised {type(error).__name__}")
        if verdict not in (None, ACK):
            job.address = self._consuming.address_of(job.delivery.message)
        try:
            job.channel.connection.add_callback_threadsafe(functools.partial(self._settle, job, verdict))
        except AMQPError:
            where = self._rules.found_at(job.delivery, job.address)
            log.info("%s: the connection is gone, the broker delivers it again", where)

    def _settle(self, job: Job, verdict: Verdict | None) -> None:
        """Settle a job, in the connection's thread, like everything from here on."""
        self._at_work.discard(job)
        if verdict is not None:
            self._take(job, self._rules.after(verdict, job.delivery, job.unacked_for, job.address))

    def _take(self, job: Job, step: Step) -> None:
        if not job.channel.is_open:
            return
        if step.delay:
            job.channel.connection.call_later(step.delay, functools.partial(self._take, job, step._replace(delay=0)))
            return
        match step.action:
            case "ack":
                job.channel.basic_ack(job.tag)
            case "again":
                self._start(job)
            case "give back":
                job.channel.basic_nack(job.tag, requeue=True)
            case "reject":
                job.channel.basic_reject(job.tag, requeue=False)
                self._rules.buried(step.reason, job.address)
            case "bury":
                self._take(job, self._buried(job, step.reason))

    def _buried(self, job: Job, reason: str) -> Step:
        """Decide what to do once the dead letter was sent, or was not."""
        try:
            bury(job.channel.connection, self._rules.dead(job.delivery, reason, job.address))
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer survives, and the message is kept
            where = self._rules.found_at(job.delivery, job.address)
            return self._rules.refused(error, reason, job.unacked_for, where)
        self._rules.buried(reason, job.address)
        return Step("ack")
