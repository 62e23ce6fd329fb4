"""Amazon SQS with boto3 or aiobotocore: workers that guard a queue, and senders that create keys.

    worker = guarded(guard, "charge", charge, client=sqs, queue=url, key=header(), dead_letter=dead_url)
    worker.consume()                                                # until worker.stop(), or drain() in another thread

    worker = guarded_async(guard, "charge", charge, client=sqs, queue=url, key=header(), dead_letter=dead_url)
    await worker.consume()                                          # until worker.stop(), or await worker.drain()

The visibility of every message that a worker has received is extended, so that it is not delivered again while it waits
for its turn or its handler runs; one whose claim is lost is not. Messages are deleted in batches, once they are done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from msgspec import UNSET, UnsetType

from onefold import AsyncGuard, Guard, Policy, PolicyFields, RecordColumn, UsageError
from onefold._checks import at_least, positive
from onefold._concurrency.generators import run, run_async
from onefold.durations import Duration
from onefold.queues._shared.consumer import AsyncConsuming, Consuming, MissingKeyRule
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.logs import waits_of
from onefold.queues._shared.options import check_transactions, policy_of
from onefold.queues._sqs import consumer as sqs_consumer
from onefold.queues._sqs.consumer import OWN_REDRIVE, DeadLetter, Delivery
from onefold.queues._sqs.dead_letters import restored
from onefold.queues.keys import Key, KeyOf, PayloadOf

try:
    from onefold.queues._sqs import sending
    from onefold.queues._sqs.requests import check_client
    from onefold.queues._sqs.tasks import AsyncWorker
    from onefold.queues._sqs.threads import Worker
    from onefold.queues._sqs.worker import Options, batch_of
except ImportError as missing:
    raise UsageError("onefold.queues.sqs needs boto3: pip install 'onefold[sqs]'") from missing

__all__ = [
    "OWN_REDRIVE",
    "AsyncWorker",
    "Delivery",
    "Worker",
    "deduplication_id",
    "guarded",
    "guarded_async",
    "restored",
    "send",
    "send_async",
]


def deduplication_id() -> KeyOf:
    """Use the `MessageDeduplicationId` of a FIFO queue, which the sender chooses, and keeps when it sends again.

    With content-based deduplication SQS makes it from the body: then two equal orders are one.
    """
    return lambda message: message.message_id


def guarded(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    *,
    client: Any,
    queue: str,
    key: KeyOf,
    dead_letter: str | DeadLetter,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    attempts: int = ATTEMPTS,
    unacked_max: Duration = sqs_consumer.UNACKED_MAX,
    threads: int = 1,
    batch: int | None = None,
    visibility: Duration | None = None,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> Worker:
    """Return a worker for a queue: it calls `handler(delivery)`, or `handler(delivery, tx=…)`, once a key.

    `docs/queues/sqs.md` explains each argument.
    """
    chosen = policy_of(guard, Guard, policy, fields, guarded)
    consuming = Consuming(
        guard, operation, handler, key=key, missing_key=missing_key, policy=chosen, payload=payload, record=record
    )
    check_transactions(guard, handler)
    check_client(client, is_async=False)
    rules = sqs_consumer.rules(operation, queue, dead_letter, attempts, unacked_max, waits_of(guard))
    return Worker(consuming, _options(client, queue, rules, at_least(1, threads, "threads"), batch, visibility))


def guarded_async(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    client: Any,
    queue: str,
    key: KeyOf,
    dead_letter: str | DeadLetter,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    attempts: int = ATTEMPTS,
    unacked_max: Duration = sqs_consumer.UNACKED_MAX,
    concurrency: int = 1,
    batch: int | None = None,
    visibility: Duration | None = None,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> AsyncWorker:
    """Return a worker for a queue: it awaits `handler(delivery)`, or `handler(delivery, tx=…)`, once a key.

    `docs/queues/sqs.md` explains each argument.
    """
    chosen = policy_of(guard, AsyncGuard, policy, fields, guarded_async)
    consuming = AsyncConsuming(
        guard, operation, handler, key=key, missing_key=missing_key, policy=chosen, payload=payload, record=record
    )
    check_transactions(guard, handler)
    check_client(client, is_async=True)
    rules = sqs_consumer.rules(operation, queue, dead_letter, attempts, unacked_max, waits_of(guard))
    return AsyncWorker(
        consuming, _options(client, queue, rules, at_least(1, concurrency, "concurrency"), batch, visibility)
    )


def _options(
    client: Any,
    queue: str,
    rules: sqs_consumer.Rules,
    concurrency: int,
    batch: int | None,
    visibility: Duration | None,
) -> Options:
    size = batch_of(concurrency) if batch is None else at_least(1, batch, "batch")
    kept = None if visibility is None else positive(visibility, "visibility")
    return Options(client, queue, rules, concurrency, size, kept)


def send(
    client: Any,
    queue: str,
    body: bytes | str,
    *,
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, Any] | None = None,
    group: str | None = None,
    deduplication_id: str | None = None,
    delay: int = 0,
) -> str:
    """Send a message until SQS has confirmed it, and return its key: the one that you passed, or a new one.

    It is sent again after a lost connection or answer, always with the same key and, to a FIFO queue, with the same
    `MessageDeduplicationId`. Raises boto3's own error once its attempts are used up, and at once if a retry is
    pointless.
    """
    message = sending.sending(queue, body, key, headers, group, deduplication_id, delay)
    check_client(client, is_async=False)
    return run(sending.sent(client, message, time.sleep))


async def send_async(
    client: Any,
    queue: str,
    body: bytes | str,
    *,
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, Any] | None = None,
    group: str | None = None,
    deduplication_id: str | None = None,
    delay: int = 0,
) -> str:
    """Send a message with aiobotocore; see `send`."""
    message = sending.sending(queue, body, key, headers, group, deduplication_id, delay)
    check_client(client, is_async=True)
    return await run_async(sending.sent(client, message, asyncio.sleep))
