"""Kafka with confluent-kafka: your Consumer, your loop; each message under a guard, and committed when it is finished.

    handle = guarded(guard, "credit", credit, consumer=consumer, key=header(), dead_letter=DeadLetters(producer, topic))
    handle.subscribe(["payments"])
    while running:
        handle(consumer.poll(1.0))              # or handle.batch(consumer.consume(500, 1.0))

The consumer needs `"enable.auto.offset.store": False`: only finished messages are stored, and so committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Unpack

from onefold import Guard, Policy, RecordColumn, UsageError
from onefold._concurrency.generators import run
from onefold.queues._kafka.confluent_messages import Consumer, DeadLetters, Message, delivery_of, is_news, saving, send
from onefold.queues._kafka.confluent_partitions import Partitions
from onefold.queues._kafka.consumer import Deliver, Sender, consuming_of
from onefold.queues._kafka.messages import NotConfirmed
from onefold.queues._kafka.notices import Undeliverable
from onefold.queues._kafka.offsets import Delivery
from onefold.queues._kafka.partitions import INTERRUPTED, Options, asked_of
from onefold.queues._shared.batches import Batches
from onefold.queues._shared.bypasses import apart
from onefold.queues._shared.consumer import Consuming
from onefold.queues._shared.options import takes_tx
from onefold.queues._shared.transactional_batches import TransactionalBatches
from onefold.queues._shared.verdict import Verdict
from onefold.queues.kafka_offsets import Offsets
from onefold.queues.keys import KeyOf

__all__ = ["DeadLetters", "Guarded", "NotConfirmed", "Offsets", "Undeliverable", "guarded", "guarded_batches", "send"]


def guarded(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    *,
    consumer: Consumer,
    key: KeyOf,
    dead_letter: DeadLetters | Literal["stop"],
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Guarded:
    """Return the function that your loop calls: it runs `handler(message)` once per key, and commits finished messages.

    A handler with `tx` works in the transaction of its record. `docs/queues/kafka.md` explains each argument.
    """
    asked = asked_of(guard, Guard, key, options, policy)
    consuming = partial(Consuming, guard, operation, record=record, **asked)
    one = consuming_of(consuming, guard, handler, options.get("offsets"), saving)

    def deliver(taken: Sequence[Delivery]) -> list[Verdict]:
        return [one.deliver(delivery.message, delivery.native) for delivery in taken]

    many = None if takes_tx(handler) else partial(apart, deliver, Batches(guard, operation, handler, **asked).deliver)
    return Guarded(consumer, dead_letter, operation, options, one.address_of, deliver, many)


def guarded_batches(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    *,
    transaction: Callable[[], Any],
    consumer: Consumer,
    key: KeyOf,
    dead_letter: DeadLetters | Literal["stop"],
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Guarded:
    """Handle whole polls in one transaction: `handler(new_messages, tx=tx)`.

    Call `handle.batch(consumer.consume(500, 1))`. `transaction` opens one that commits at its end. If it fails, each
    message gets its own.
    """
    offsets, asked = options.get("offsets"), asked_of(guard, Guard, key, options, policy)
    # Refuses a sync handler for an async guard, and the reverse.
    one = Consuming(guard, operation, handler, record=record, **asked)
    batches = TransactionalBatches(guard, operation, handler, transaction, record=record, **asked)

    def deliver(taken: Sequence[Delivery]) -> list[Verdict]:
        return batches.deliver(taken, None if offsets is None else offsets.saving(taken))

    return Guarded(consumer, dead_letter, operation, options, one.address_of, deliver, deliver)


class Guarded(Partitions):
    """A guarded handler. It is called in the thread that polls, and never sleeps; a running duplicate waits in it."""

    def __call__(self, message: Message | None) -> None:
        """Handle the result of `consumer.poll()`. Call it with None too, so that waiting partitions continue."""
        if message is not None and not isinstance(message, Message):
            raise UsageError(
                f"handle() takes the result of poll(), not {type(message).__name__}: for consume() use handle.batch()"
            )
        self._handle([] if message is None else [message], self._one)

    def batch(self, messages: Sequence[Message]) -> None:
        """Handle the result of `consumer.consume()`, in a few round trips for all. Of equal keys one runs."""
        deliver = self._deliver_batches()
        if not isinstance(messages, list | tuple):
            raise UsageError(
                f"handle.batch() takes the result of consume(), not {type(messages).__name__}: for poll() use handle()"
            )
        self._handle(messages, deliver)

    def _handle(self, messages: Sequence[Message], deliver: Deliver) -> None:
        sender = Sender(self._step)
        read = (delivery_of(message, self._ledger) for message in messages if not is_news(message))
        taken = run(self._admit(read), sender)
        verdicts: list[Verdict] = [INTERRUPTED] * len(taken)
        try:
            if taken:
                verdicts = deliver(taken)
        finally:
            run(self._ledger.settle(taken, verdicts), sender)
