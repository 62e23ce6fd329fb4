"""Kafka with aiokafka: your consumer, your loop; each message under a guard, and committed when it is finished.

    handle = guarded(guard, "credit", credit, consumer=consumer, key=header(), dead_letter=DeadLetters(producer, topic))
    handle.subscribe(["payments"])
    async for message in consumer:
        await handle(message)                   # or handle.batch(await consumer.getmany(timeout_ms=1000))

The consumer needs `enable_auto_commit=False`: only finished messages are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

from onefold import AsyncGuard, Policy, RecordColumn, UsageError
from onefold._concurrency.generators import run_async
from onefold.queues._kafka.aiokafka_messages import (
    AIOKafkaConsumer,
    DeadLetters,
    TopicPartition,
    delivery_of,
    saving,
    send,
)
from onefold.queues._kafka.aiokafka_partitions import Partitions
from onefold.queues._kafka.consumer import Deliver, Sender, consuming_of
from onefold.queues._kafka.messages import NotConfirmed, check_wait
from onefold.queues._kafka.notices import Undeliverable
from onefold.queues._kafka.offsets import Delivery
from onefold.queues._kafka.partitions import INTERRUPTED, Options, asked_of
from onefold.queues._shared.batches import Batches
from onefold.queues._shared.bypasses import apart_async
from onefold.queues._shared.consumer import AsyncConsuming
from onefold.queues._shared.options import takes_tx
from onefold.queues._shared.transactional_batches import TransactionalBatches
from onefold.queues._shared.verdict import Verdict
from onefold.queues.kafka_offsets import Offsets
from onefold.queues.keys import KeyOf

__all__ = ["DeadLetters", "Guarded", "NotConfirmed", "Offsets", "Undeliverable", "guarded", "guarded_batches", "send"]

Records = Mapping[TopicPartition, Sequence[Any]]


def guarded(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    consumer: AIOKafkaConsumer,
    key: KeyOf,
    dead_letter: DeadLetters | Literal["stop"],
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Guarded:
    """Return the function that your loop calls: it runs `handler(message)` once per key, and commits finished messages.

    A handler with `tx` works in the transaction of its record. `docs/queues/kafka.md` explains each argument.
    """
    asked = asked_of(guard, AsyncGuard, key, options, policy)
    check_wait(asked["policy"].wait, getattr(consumer, "_max_poll_interval_ms", None))
    consuming = partial(AsyncConsuming, guard, operation, record=record, **asked)
    one = consuming_of(consuming, guard, handler, options.get("offsets"), saving)

    async def deliver(taken: Sequence[Delivery]) -> list[Verdict]:
        return [await one.deliver(delivery.message, delivery.native) for delivery in taken]

    batches = None if takes_tx(handler) else Batches(guard, operation, handler, **asked)
    many = None if batches is None else partial(apart_async, deliver, batches.deliver_async)
    return Guarded(consumer, dead_letter, operation, options, one.address_of, deliver, many)


def guarded_batches(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    transaction: Callable[[], Any],
    consumer: AIOKafkaConsumer,
    key: KeyOf,
    dead_letter: DeadLetters | Literal["stop"],
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Guarded:
    """Handle whole polls in one transaction: `handler(new_messages, tx=tx)`.

    Await `handle.batch(await consumer.getmany())`. `transaction` opens one that commits at its end. If it fails, each
    message gets its own.
    """
    offsets, asked = options.get("offsets"), asked_of(guard, AsyncGuard, key, options, policy)
    # Refuses a sync handler for an async guard, and the reverse.
    one = AsyncConsuming(guard, operation, handler, record=record, **asked)
    batches = TransactionalBatches(guard, operation, handler, transaction, record=record, **asked)

    async def deliver(taken: Sequence[Delivery]) -> list[Verdict]:
        return await batches.deliver_async(taken, None if offsets is None else offsets.saving_async(taken))

    return Guarded(consumer, dead_letter, operation, options, one.address_of, deliver, deliver)


class Guarded(Partitions):
    """A guarded handler. Await it in the task that reads: one message, or one poll, at a time."""

    async def __call__(self, message: Any) -> None:
        """Handle a message from `consumer.getone()` or `async for`."""
        if not hasattr(message, "offset"):
            raise UsageError(
                f"handle() takes the result of getone(), not {type(message).__name__}: for getmany() use handle.batch()"
            )
        await self._handle([message], self._one)

    async def batch(self, messages: Records) -> None:
        """Handle the result of `consumer.getmany()`, in a few round trips for all. Of equal keys one runs."""
        deliver = self._deliver_batches()
        if not isinstance(messages, Mapping):
            raise UsageError(
                f"handle.batch() takes the result of getmany(), not {type(messages).__name__}: for getone() use "
                "handle()"
            )
        await self._handle([message for several in messages.values() for message in several], deliver)

    async def _handle(self, messages: Sequence[Any], deliver: Deliver) -> None:
        sender = Sender(self._step)
        read = (delivery_of(message, self._ledger) for message in messages)
        try:
            taken = await run_async(self._admit(read), sender)
            verdicts: list[Verdict] = [INTERRUPTED] * len(taken)
            try:
                if taken:
                    verdicts = await deliver(taken)
            finally:
                await run_async(self._ledger.settle(taken, verdicts), sender)
        finally:
            self._set_alarm()
