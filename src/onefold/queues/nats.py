"""NATS JetStream with nats-py: the callback that guards a consumer, and a sender that creates keys.

    handle = guarded(guard, "charge", charge, key=header(), dead_letter="dead.charges")
    await js.subscribe("charges", durable="charges", cb=handle, manual_ack=True)        # push
    await handle.consume(await js.pull_subscribe("charges", durable="charges"))         # pull, until handle.drain()

Every message that this worker has taken is kept in progress, so that it is not delivered again while it waits for its
turn or its handler runs; one whose claim is lost is not. A handler is not cancelled when the connection is lost: it
runs to its end, and the redelivered message finds it done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Unpack

from onefold import AsyncGuard, Policy, PolicyFields, RecordColumn, UsageError
from onefold._checks import at_least
from onefold.durations import Duration, seconds
from onefold.queues._nats import consumer as nats_consumer
from onefold.queues._nats.consumer import Delivery, Rules, log
from onefold.queues._shared.consumer import AsyncConsuming, MissingKeyRule
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.logs import waits_of
from onefold.queues._shared.options import check_transactions, policy_of
from onefold.queues._shared.verdict import SOON
from onefold.queues.keys import KeyOf, PayloadOf

try:
    import nats.errors
    import nats.js.errors
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from onefold.queues._nats.jobs import Jobs
    from onefold.queues._nats.messages import end, send
except ImportError as missing:
    raise UsageError("onefold.queues.nats needs nats-py: pip install 'onefold[nats]'") from missing

__all__ = ["Delivery", "guarded", "send"]

# How many messages a pull subscription has at a time, at least: those that run, and those that were fetched ahead.
BATCH_MIN: Final = 10

# How often a connection that is lost is looked at.
RECONNECT_SECONDS: Final = 0.1

# How long a fetch waits for a message; that is also how long `drain` may have to wait for it.
FETCH_SECONDS: Final = 1.0


def guarded(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf,
    dead_letter: str,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    attempts: int = ATTEMPTS,
    unacked_max: Duration = nats_consumer.UNACKED_MAX,
    concurrency: int = 1,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> GuardedCallback:
    """Return the callback for a subscription: it awaits `handler(delivery)`, or `handler(delivery, tx=…)`, once a key.

    `docs/queues/nats.md` explains each argument.
    """
    at_least(1, concurrency, "concurrency")
    chosen = policy_of(guard, AsyncGuard, policy, fields, guarded)
    consuming = AsyncConsuming(
        guard, operation, handler, key=key, missing_key=missing_key, policy=chosen, payload=payload, record=record
    )
    check_transactions(guard, handler)
    rules = nats_consumer.rules(operation, dead_letter, attempts, unacked_max, waits_of(guard))
    return GuardedCallback(consuming, rules, concurrency, runs_without_key=missing_key == "run")


class GuardedCallback:
    """The callback that nats-py calls for each message. Created by `guarded`."""

    def __init__(
        self, consuming: AsyncConsuming, rules: Rules, concurrency: int, *, runs_without_key: bool = False
    ) -> None:
        self._consuming = consuming
        self._jobs = Jobs(consuming, rules, concurrency, runs_without_key=runs_without_key)
        self._concurrency = concurrency
        self._loops: set[asyncio.Future[None]] = set()
        # Those of pull loops that were cancelled: the server still has their requests.
        self._left: set[JetStreamContext.PullSubscription] = set()

    async def __call__(self, message: Msg) -> None:
        """Take a message, and return at once. It is handled as soon as `concurrency` allows, and then settled."""
        await self._jobs.take(message)

    @property
    def func(self) -> Callable[[Msg], Awaitable[None]]:
        """Show nats-py that this is async: it takes functions, and objects with a function of this name."""
        return self.__call__

    async def batch(self, messages: Iterable[Msg]) -> None:
        """Handle the messages of one `fetch`, and return when each of them has had its turn."""
        if isinstance(messages, Msg):
            raise UsageError("batch() takes the list that fetch() returns; for one message call it itself")
        turns: list[asyncio.Future[None]] = []
        for message in messages:
            turns.append(asyncio.get_running_loop().create_future())
            await self._jobs.take(message, turn=turns[-1])
        await asyncio.gather(*turns)

    async def consume(self, subscription: JetStreamContext.PullSubscription, *, batch: int | None = None) -> None:
        """Fetch and handle messages until `drain` is called.

        At most `batch` of them are with this worker at a time: twice as many as may run, and at least 10. The
        subscription ends with it. Raises nats-py's error once the connection is closed for good; a lost one is waited
        for.
        """
        batch = max(BATCH_MIN, 2 * self._concurrency) if batch is None else at_least(1, batch, "batch")
        if not hasattr(subscription, "fetch"):
            raise UsageError("consume() is for a pull subscription; pass the callback to js.subscribe(cb=…) for push")
        ended = asyncio.get_running_loop().create_future()
        self._loops.add(ended)
        try:
            while not self._jobs.is_leaving:
                await self._jobs.has_room(batch)
                for message in await self._fetched(subscription, batch - self._jobs.busy):
                    await self._jobs.take(message, warns=False)
            await self._end(subscription)
        except asyncio.CancelledError:
            self._left.add(subscription)
            raise
        finally:
            self._loops.discard(ended)
            ended.set_result(None)

    async def _end(self, subscription: JetStreamContext.PullSubscription) -> None:
        """End a subscription. What came when a fetch had just ended is given back, too."""
        for message in await end(subscription):
            await self._jobs.take(message, warns=False)

    async def _fetched(self, subscription: JetStreamContext.PullSubscription, batch: int) -> list[Msg]:
        if self._jobs.is_leaving:
            return []
        client = subscription._nc
        if not client.is_connected and not client.is_closed:
            # Requests that are made meanwhile would all be sent when the connection is back.
            await asyncio.sleep(RECONNECT_SECONDS)
            return []
        try:
            return await subscription.fetch(batch, timeout=FETCH_SECONDS)
        except TimeoutError:
            return []
        except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
            raise
        except nats.errors.Error as error:
            log.warning("a fetch failed, and is tried again in %.3g s: %s", SOON, _told(error, subscription))
            await asyncio.sleep(SOON)
            return []

    async def drain(self, within: Duration = 30) -> bool:
        """Start nothing more and settle running handlers, after `unsubscribe`. Return False if one still runs then.

        Messages that were not started are given back, and other workers get them at once. To consume again, create
        another callback.
        """
        limit, clock = seconds(within, "within"), asyncio.get_running_loop().time
        began = clock()
        self._jobs.stop()
        if self._loops:
            # What they have fetched is given back before the others are waited for.
            await asyncio.wait(self._loops, timeout=limit)
        while self._left:
            await self._end(self._left.pop())
        return await self._jobs.leave(max(0.0, limit - (clock() - began))) and not self._loops


def _told(error: nats.errors.Error, subscription: JetStreamContext.PullSubscription) -> str:
    if not isinstance(error, nats.js.errors.ServiceUnavailableError):
        return str(error)
    # nats-py says only that nobody has answered.
    stream, consumer = subscription._stream, subscription._consumer
    return f"the consumer {consumer} of the stream {stream} does not answer: it was deleted, or elects a leader"
