"""Perform the ledger's steps on the partitions of an AIOKafkaConsumer, and report rebalances to it.

Partitions come and go while a handler runs: a message that finishes after its partition has gone commits nothing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from onefold import UsageError
from onefold._concurrency.generators import run
from onefold.queues._kafka.aiokafka_messages import (
    AIOKafkaConsumer,
    ConsumerRebalanceListener,
    DeadLetters,
    KafkaError,
    TopicPartition,
)
from onefold.queues._kafka.consumer import GuardedConsumer, Sender
from onefold.queues._kafka.notices import log
from onefold.queues._kafka.offsets import Partition
from onefold.queues._kafka.partitions import (
    Assigned,
    Bury,
    Commit,
    FindEnds,
    GoBack,
    Position,
    Resume,
    Step,
)
from onefold.queues._kafka.unread import LOOK_SECONDS_MAX, Ends


class Partitions(GuardedConsumer, ConsumerRebalanceListener):  # type: ignore[misc] # the package has no types
    """The partitions of one consumer: performs steps on them, and reports their rebalances."""

    _takes = AIOKafkaConsumer
    _letters = DeadLetters
    _refusal = KafkaError
    _listeners = "handle.on_partitions_assigned and handle.on_partitions_revoked"

    def __init__(self, consumer: AIOKafkaConsumer, *given: Any) -> None:
        super().__init__(consumer, *given)
        self._pause, self._resume = self._listen(consumer)
        self._alarm: asyncio.TimerHandle | None = None

    def _listen(self, consumer: Any) -> tuple[Callable[..., None], Callable[..., None]]:
        """Intercept the user's own pauses; return the methods by which to pause and resume without being intercepted.

        The consumer reports which partitions are paused, but not by whom: one that waits for a message may be both.
        """
        heard_pause, heard_resume = consumer.pause, consumer.resume

        @functools.wraps(heard_pause)
        def pause(*partitions: TopicPartition) -> None:
            heard_pause(*partitions)
            self._ledger.paused_by_user(partitions)

        @functools.wraps(heard_resume)
        def resume(*partitions: TopicPartition) -> None:
            heard_resume(*(TopicPartition(*one) for one in sorted(self._ledger.resumed_by_user(partitions))))

        consumer.pause, consumer.resume = pause, resume
        return inspect.unwrap(heard_pause), inspect.unwrap(heard_resume)

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe the consumer, and listen to its rebalances."""
        self._hears = True
        self._consumer.subscribe(topics=list(topics), listener=self)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Handle a revocation, for a listener of your own. Forget the pauses, as aiokafka does."""
        self._ledger.resumed_by_user(revoked)
        self._ledger.forget(revoked)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Handle an assignment, for a listener of your own."""
        self._hears = True
        self._ledger.assigned(assigned)
        if self._offsets is not None:
            for partition, offset in (await self._offsets.load_async(assigned)).items():
                self._consumer.seek(TopicPartition(*partition), offset)

    def _is_subscribed(self) -> bool:
        subscription = getattr(self._consumer, "_subscription", None)
        return bool(getattr(subscription, "partitions_auto_assigned", bool)())

    async def _step(self, step: Step) -> Any:
        match step:
            case Bury(delivery, reason):
                return await self._dead_letter.bury(delivery, self._operation, reason, self._digest_of(delivery))
            case Commit(offsets):
                return await self._commit(offsets)
            case Position(partition):
                at = TopicPartition(*partition)
                return await self._consumer.position(at) if at in self._consumer.assignment() else -1
            case Assigned():
                return self._assignment()
            case FindEnds(partition):
                return await self._ends(TopicPartition(*partition))
            case _:
                return self._step_now(step)

    async def _ends(self, at: TopicPartition) -> Ends:
        try:
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                position = await self._consumer.committed(at)
                found = await self._consumer.end_offsets([at])
        except (KafkaError, TimeoutError):
            return Ends(None, None)
        return Ends(position, found[at])

    def _step_now(self, step: Step) -> bool:
        match step:
            case GoBack(partition, offset):
                at = TopicPartition(*partition)
                if at not in self._consumer.paused():
                    # The user's pause ended with an assignment that was not reported to us.
                    self._ledger.resumed_by_user([partition])
                paused = self._tried(partition, lambda: self._pause(at))
                return paused and self._tried(partition, lambda: self._consumer.seek(at, offset))
            case Resume(partition):
                return self._tried(partition, lambda: self._resume(TopicPartition(*partition)))
            case _:
                raise AssertionError(f"{step} has to be awaited")

    async def _commit(self, offsets: dict[Partition, int]) -> None:
        wanted = {TopicPartition(*one): offset for one, offset in offsets.items()}
        ours = {one: offset for one, offset in wanted.items() if one in self._consumer.assignment()}
        try:
            if ours:
                await self._consumer.commit(ours)
        except KafkaError as error:
            # A rebalance came in between; the next reader finds that they are done.
            log.info("offsets not committed: %s", type(error).__name__)

    def _assignment(self) -> set[Partition]:
        return {Partition(*one) for one in self._consumer.assignment()}

    def _set_alarm(self) -> None:
        """Set a timer to wake `getone` and `async for`, which do not return while all partitions wait."""
        if self._alarm is not None:
            self._alarm.cancel()
        due = self._ledger.next_due()
        self._alarm = None if due is None else asyncio.get_running_loop().call_later(due, self._ring)

    def _ring(self) -> None:
        run(self._ledger.wake(), Sender(self._step_now))
        self._set_alarm()

    def _check_commits(self, consumer: AIOKafkaConsumer) -> None:
        if getattr(consumer, "_group_id", "") is None:
            raise UsageError(
                "the consumer has no group, so nothing can be committed for it. Create it with group_id=..."
            )
        if getattr(consumer, "_enable_auto_commit", False):
            raise UsageError(
                "the consumer commits offsets before their messages are handled. Create it with "
                "enable_auto_commit=False; otherwise a crash loses messages"
            )
