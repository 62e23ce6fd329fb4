"""Perform the ledger's steps on the partitions of an AIOKafkaConsumer, and report rebalances to it.

Partitions come and go while a handler runs: what ends after that, ends nothing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from onefold import UsageError
from onefold.queues._kafka.aiokafka_messages import (
    AIOKafkaConsumer,
    ConsumerRebalanceListener,
    DeadLetters,
    KafkaError,
    TopicPartition,
)
from onefold.queues._kafka.messages import check_consumer, check_undecoded, dead_letter_stops
from onefold.queues._kafka.notices import UNHEARD, AddressOf, log
from onefold.queues._kafka.offsets import Partition
from onefold.queues._kafka.partitions import (
    Assigned,
    Bury,
    Commit,
    FindEnds,
    GoBack,
    Ledger,
    Options,
    Position,
    Resume,
    Step,
    Steps,
)
from onefold.queues._kafka.unread import LOOK_SECONDS_MAX, Ends


class Partitions(ConsumerRebalanceListener):  # type: ignore[misc] # the package has no types
    """The partitions of one consumer: what is done to them, and what is reported about them."""

    def __init__(
        self, consumer: AIOKafkaConsumer, dead_letter: Any, operation: str, options: Options, address_of: AddressOf
    ) -> None:
        stops = dead_letter_stops(dead_letter, DeadLetters)
        self._ledger = Ledger(options, stops=stops, address_of=address_of)
        self._consumer = _checked(consumer)
        self._dead_letter = dead_letter
        self._operation = operation
        self._offsets = options.get("offsets")
        self._pause, self._resume = self._listen(consumer)
        self._alarm: asyncio.TimerHandle | None = None
        # Whether somebody tells us of partitions that come and go.
        self._hears = False

    def _listen(self, consumer: Any) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hear of the user's own pauses, and return the methods by which to pause and resume unheard.

        The consumer tells what is paused, but not by whom: a partition that waits for a message may be both.
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
        """Subscribe the consumer, and hear of its partitions' coming and going."""
        self._hears = True
        self._consumer.subscribe(topics=list(topics), listener=self)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """For a listener of your own. What is finished was committed before, and aiokafka forgets every pause."""
        self._ledger.resumed_by_user(revoked)
        self._ledger.forget(revoked)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """For a listener of your own."""
        self._hears = True
        self._ledger.assigned(assigned)
        if self._offsets is not None:
            for partition, offset in (await self._offsets.load_async(assigned)).items():
                self._consumer.seek(TopicPartition(*partition), offset)

    def _warn_of_silence(self) -> None:
        """Warn once. If a consumer is assigned by hand, its partitions do not change."""
        subscription = getattr(self._consumer, "_subscription", None)
        if not self._hears and getattr(subscription, "partitions_auto_assigned", bool)():
            log.warning(UNHEARD, "handle.on_partitions_assigned and handle.on_partitions_revoked")
        self._hears = True

    async def _perform(self, steps: Steps) -> Any:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = await self._step(step)

    async def _step(self, step: Step) -> Any:
        match step:
            case Bury(delivery, reason):
                return await self._dead_letter.bury(delivery, self._operation, reason)
            case Commit(offsets):
                return await self._commit(offsets)
            case Position(partition):
                at = TopicPartition(*partition)
                return await self._consumer.position(at) if at in self._consumer.assignment() else -1
            case Assigned():
                return {Partition(*one) for one in self._consumer.assignment()}
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
                    # A pause of the user's ended with an assignment of which nobody has told us.
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
            # A rebalance came between; whoever reads them now finds that they are done.
            log.info("offsets not committed: %s", type(error).__name__)

    def _tried(self, partition: Partition, call: Callable[[], object]) -> bool:
        """Try a step. False: not now, or no longer ours."""
        try:
            call()
        except KafkaError:
            if TopicPartition(*partition) not in self._consumer.assignment():
                self._ledger.forget([partition])
            return False
        return True

    def _set_alarm(self) -> None:
        """Set a timer to wake `getone` and `async for`, which do not return while all partitions wait."""
        if self._alarm is not None:
            self._alarm.cancel()
        due = self._ledger.next_due()
        self._alarm = None if due is None else asyncio.get_running_loop().call_later(due, self._ring)

    def _ring(self) -> None:
        steps, answer = self._ledger.wake(), None
        while True:
            try:
                answer = self._step_now(steps.send(answer))
            except StopIteration:
                break
        self._set_alarm()


def _checked(consumer: AIOKafkaConsumer) -> AIOKafkaConsumer:
    """Return the consumer, if it leaves the offsets to us."""
    check_consumer(consumer, AIOKafkaConsumer)
    check_undecoded(consumer)
    if getattr(consumer, "_group_id", "") is None:
        raise UsageError("the consumer has no group, and nothing can be committed for it. Make it with group_id=...")
    if getattr(consumer, "_enable_auto_commit", False):
        raise UsageError(
            "the consumer commits offsets before their messages are handled. Make it with enable_auto_commit=False; "
            "otherwise a crash loses messages"
        )
    return consumer
