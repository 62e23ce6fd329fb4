"""RabbitMQ with aio-pika: the callback that guards a consumer, and a sender that creates keys.

    await queue.consume(guarded(guard, "charge", handle, key=header(), dead_letter="charges.dead"))

A handler is not cancelled when its connection is lost: it runs to its end, and the redelivered message finds it done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Unpack
from weakref import WeakKeyDictionary

from onefold import AsyncGuard, Policy, PolicyFields, RecordColumn, UsageError
from onefold.durations import Duration, seconds
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq.consumer import OWN_EXCHANGE, DeadLetter, Delivery, Rules, Step, log
from onefold.queues._shared.consumer import ENDS_THE_LOOP, AsyncConsuming, MissingKeyRule
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.logs import waits_of
from onefold.queues._shared.options import check_transactions, policy_of
from onefold.queues._shared.verdict import ACK, SOON, Verdict, of_interrupt
from onefold.queues.keys import KeyOf, PayloadOf
from onefold.stores.base import Address

try:
    from aio_pika.abc import AbstractIncomingMessage
    from aio_pika.exceptions import CONNECTION_EXCEPTIONS

    from onefold.queues._rabbitmq.aio_pika_messages import bury, delivery_of, send
except ImportError as missing:
    raise UsageError("onefold.queues.aio_pika needs aio-pika: pip install 'onefold[rabbitmq]'") from missing

__all__ = ["OWN_EXCHANGE", "Delivery", "guarded", "send"]


def guarded(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf,
    dead_letter: str | DeadLetter,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    attempts: int = ATTEMPTS,
    unacked_max: Duration = rabbitmq_consumer.UNACKED_MAX,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> GuardedCallback:
    """Return the callback for `consume`. It awaits `handler(delivery)`, or `handler(delivery, tx=…)`, once per key.

    `docs/queues/rabbitmq.md` explains each argument.
    """
    chosen = policy_of(guard, AsyncGuard, policy, fields, guarded)
    consuming = AsyncConsuming(
        guard, operation, handler, key=key, missing_key=missing_key, policy=chosen, payload=payload, record=record
    )
    check_transactions(guard, handler)
    return GuardedCallback(
        consuming, rabbitmq_consumer.rules(operation, dead_letter, attempts, unacked_max, waits_of(guard))
    )


class GuardedCallback:
    """The callback that aio-pika calls for each message. Created by `guarded`."""

    def __init__(self, consuming: AsyncConsuming, rules: Rules) -> None:
        self._consuming = consuming
        self._rules = rules
        self._unsettled: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        # The channels that messages have come from, and whether this consumer has left them.
        self._left: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._leaving = False

    async def __call__(self, message: AbstractIncomingMessage) -> None:
        if message.processed:
            raise UsageError("this consumer has no_ack=True: the broker forgets a message before it is handled")
        if self._left.setdefault(message.channel, self._leaving):
            self._rules.came_too_late(delivery_of(message))
            return
        task = asyncio.create_task(self._consume(message))
        self._unsettled.add(task)
        task.add_done_callback(self._unsettled.discard)
        # A lost connection cancels the callbacks that it has called.
        await asyncio.shield(task)

    async def drain(self, within: Duration = 30) -> bool:
        """Settle running handlers, after `queue.cancel`. Return False if something still runs after `within`.

        Messages that wait for their turn go back to the queue when the channel is closed. To consume again with this
        callback, open another channel.
        """
        self._leaving = True
        self._left.update(dict.fromkeys(self._left, True))
        for task in self._waiting:
            task.cancel()
        if self._unsettled:
            await asyncio.wait(self._unsettled, timeout=seconds(within, "within"))
        self._leaving = False
        return not self._unsettled

    async def _consume(self, message: AbstractIncomingMessage) -> None:
        delivery = delivery_of(message)
        try:
            await self._settle(message, delivery)
        except CONNECTION_EXCEPTIONS as error:
            where = self._rules.found_at(delivery, self._consuming.address_of(delivery.message))
            log.info("%s: %s, the broker delivers it again", where, type(error).__name__)
        except asyncio.CancelledError:
            # Mostly the loop ends, or `drain` ends a wait: the message goes back with its channel. Otherwise somebody
            # has cancelled this task, such as its handler, and the channel would keep the message for ever.
            asyncio.get_running_loop().call_later(SOON, self._give_back, message)
            raise

    def _give_back(self, message: AbstractIncomingMessage) -> None:
        if not (message.processed or message.channel.is_closed or self._left[message.channel]):
            task = asyncio.create_task(self._given_back(message))
            self._unsettled.add(task)
            task.add_done_callback(self._unsettled.discard)

    async def _given_back(self, message: AbstractIncomingMessage) -> None:
        with suppress(*CONNECTION_EXCEPTIONS):
            await message.nack(requeue=True)

    async def _verdict_on(self, delivery: Delivery) -> Verdict:
        try:
            return await self._consuming.deliver(delivery.message, delivery)
        except ENDS_THE_LOOP:
            raise
        except BaseException as error:  # noqa: BLE001 - a task has nobody to tell; its claim is kept until it ends
            return of_interrupt(error)

    async def _settle(self, message: AbstractIncomingMessage, delivery: Delivery) -> None:
        now = asyncio.get_running_loop().time
        since, step = now(), Step("again")
        address: Address | None = None
        while True:
            await self._pause(step.delay, message)
            match step.action:
                case "ack":
                    return await message.ack()
                case "again":
                    verdict = await self._verdict_on(delivery)
                    if verdict != ACK:
                        address = self._consuming.address_of(delivery.message)
                    step = self._rules.after(verdict, delivery, now() - since, address)
                case "give back":
                    return await message.nack(requeue=True)
                case "reject":
                    await message.reject(requeue=False)
                    return self._rules.buried(step.reason, address)
                case "bury":
                    dead = self._rules.dead(delivery, step.reason, address)
                    try:
                        await bury(message.channel.connection, dead)
                    except Exception as error:  # noqa: BLE001 - whatever it is, the consumer survives
                        where = self._rules.found_at(delivery, address)
                        step = self._rules.refused(error, step.reason, now() - since, where)
                    else:
                        self._rules.buried(step.reason, address)
                        step = Step("ack")

    async def _pause(self, delay: float, message: AbstractIncomingMessage) -> None:
        """Wait. Raise if there is nothing to wait for: the message goes back by itself."""
        task = asyncio.current_task()
        if delay and task is not None:
            self._waiting.add(task)
            try:
                await asyncio.sleep(0 if self._left[message.channel] else delay)
            finally:
                self._waiting.discard(task)
        if message.channel.is_closed or (delay and self._left[message.channel]):
            raise ConnectionError("it goes back to its queue")
