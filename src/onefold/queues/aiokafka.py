"""Kafka with aiokafka: your consumer, your loop; each message under a guard, and committed when it is finished.

    handle = guarded(guard, "credit", credit, consumer=consumer, key=header(), dead_letter=DeadLetters(producer, topic))
    handle.subscribe(["payments"])
    async for message in consumer:
        await handle(message)                   # or handle.batch(await consumer.getmany(timeout_ms=1000))

The consumer needs `enable_auto_commit=False`: only what is finished is committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

from onefold import AsyncGuard, Policy, UsageError
from onefold.durations import Duration
from onefold.queues._aiokafka_messages import AIOKafkaConsumer, DeadLetters, TopicPartition, delivery_of, send
from onefold.queues._aiokafka_partitions import Partitions
from onefold.queues._checked import takes_tx
from onefold.queues._consuming import WAIT, AsyncConsuming
from onefold.queues._kafka import INTERRUPTED, Delivery, Options, Undeliverable, asked_of
from onefold.queues._kafka_messages import NotConfirmed
from onefold.queues._polls import JoinedPolls, Polls
from onefold.queues._verdict import Verdict
from onefold.queues.kafka_offsets import Offsets
from onefold.queues.keys import KeyOf

__all__ = ["DeadLetters", "Guarded", "NotConfirmed", "Offsets", "Undeliverable", "guarded", "guarded_batches", "send"]

Deliver = Callable[[Sequence[Delivery]], Awaitable[list[Verdict]]]
Records = Mapping[TopicPartition, Sequence[Any]]


def guarded(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    consumer: AIOKafkaConsumer,
    key: KeyOf,
    dead_letter: DeadLetters | Literal["stop"],
    wait: Duration = WAIT,
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Guarded:
    """What your loop calls with each message: it runs `handler(message)` once a key, and commits what is finished.

    A handler with `tx` works in the transaction of its record. `docs/queues/kafka.md` explains each argument.
    """
    offsets, asked = options.get("offsets"), asked_of(key, options, policy)

    def consuming(handler: Callable[..., Any]) -> AsyncConsuming:
        return AsyncConsuming(guard, operation, handler, wait=wait, **asked)

    # Of the wrong colour it is refused before it is wrapped.
    one = consuming(handler)
    if offsets is not None:
        one = consuming(_saving(handler, offsets))
    polls = Polls(guard, operation, handler, **asked)

    async def deliver(taken: Sequence[Delivery]) -> list[Verdict]:
        return [await one.deliver(delivery.message, delivery.native) for delivery in taken]

    return Guarded(
        consumer, dead_letter, operation, options, deliver, None if takes_tx(handler) else polls.deliver_async
    )


def guarded_batches(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    transaction: Callable[[], Any],
    consumer: AIOKafkaConsumer,
    key: KeyOf,
    dead_letter: DeadLetters | Literal["stop"],
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Guarded:
    """Whole polls in one transaction: `handler(new_messages, tx=tx)`. Await `handle.batch(await consumer.getmany())`.

    `transaction` opens one that commits at its end. If it fails, each message gets one of its own.
    """
    offsets, asked = options.get("offsets"), asked_of(key, options, policy)
    # It refuses the wrong colour.
    AsyncConsuming(guard, operation, handler, **asked)
    polls = JoinedPolls(guard, operation, handler, transaction, **asked)

    async def deliver(taken: Sequence[Delivery]) -> list[Verdict]:
        return await polls.deliver_async(taken, None if offsets is None else offsets.saving_async(taken))

    return Guarded(consumer, dead_letter, operation, options, deliver, deliver)


class Guarded(Partitions):
    """A guarded handler. Await it in the task that reads: one message, or one poll, at a time."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        dead_letter: DeadLetters | Literal["stop"],
        operation: str,
        options: Options,
        one: Deliver,
        many: Deliver | None,
    ) -> None:
        super().__init__(consumer, dead_letter, operation, options)
        self._one = one
        self._many = many

    async def __call__(self, message: Any) -> None:
        """Handle what `consumer.getone()` or `async for` gave."""
        await self._handle([message], self._one)

    async def batch(self, messages: Records) -> None:
        """Handle what `consumer.getmany()` gave, in a few round trips for all. Of equal keys one runs."""
        if self._many is None:
            raise UsageError("a handler with tx takes whole polls by guarded_batches(..., transaction=...)")
        await self._handle([message for several in messages.values() for message in several], self._many)

    async def _handle(self, messages: Sequence[Any], deliver: Deliver) -> None:
        await self._perform(self._ledger.wake())
        deliveries = [delivery_of(message, self._ledger) for message in messages]
        taken = [delivery for delivery in deliveries if await self._perform(self._ledger.admit(delivery.spot))]
        verdicts: list[Verdict] = [INTERRUPTED] * len(taken)
        try:
            if taken:
                verdicts = await deliver(taken)
        finally:
            try:
                await self._perform(self._ledger.settle(taken, verdicts))
            finally:
                self._set_alarm()


def _saving(handler: Callable[..., Any], offsets: Offsets) -> Callable[..., Any]:
    """The handler, and the next offset in its transaction."""
    if not takes_tx(handler):
        raise UsageError("offsets= are kept in the transaction of the work: the handler has to take tx")

    async def handle(message: Any, *, tx: Any) -> None:
        await handler(message, tx=tx)
        await offsets.save_async(tx, message.topic, message.partition, message.offset + 1)

    return handle
