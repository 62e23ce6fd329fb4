"""Perform the ledger's steps on the partitions of a confluent-kafka Consumer, and report rebalances to it.

A partition that is no longer ours is forgotten, and nothing is committed for it: `store_offsets` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from onefold import UsageError
from onefold.queues._kafka.confluent_messages import Consumer, DeadLetters, KafkaException, TopicPartition
from onefold.queues._kafka.consumer import GuardedConsumer
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


class Partitions(GuardedConsumer):
    """The partitions of one consumer: performs steps on them, and reports their rebalances."""

    _takes = Consumer
    _letters = DeadLetters
    _refusal = KafkaException
    _listeners = "handle.assigned, handle.revoked and handle.lost"

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe the consumer, and listen to its rebalances."""
        self._hears = True
        self._consumer.subscribe(list(topics), on_assign=self.assigned, on_revoke=self.revoked, on_lost=self.lost)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions of the consumer until `resume`, even if one waits for a message to become due.

        A pause by `consumer.pause` is not noticed here, and ends when a message that its partition waits for is due.
        """
        places = {Partition(one.topic, one.partition) for one in partitions}
        if strange := sorted(places - self._assignment()):
            topic, number = strange[0]
            raise UsageError(f"{topic}/{number} is not assigned to this consumer, so it cannot be paused")
        self._ledger.paused_by_user(places)
        self._consumer.pause([TopicPartition(*one) for one in places])

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Continue reading; a partition that waits for a message continues when that is due."""
        ready = self._ledger.resumed_by_user((one.topic, one.partition) for one in partitions)
        self._consumer.resume([TopicPartition(*one) for one in ready])

    def assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Handle an assignment, for an `on_assign` of your own."""
        self._hears = True
        self._ledger.assigned((one.topic, one.partition) for one in partitions)
        if self._offsets is None:
            return
        found = self._offsets.load((one.topic, one.partition) for one in partitions)
        for one in partitions:
            one.offset = found.get(Partition(one.topic, one.partition), one.offset)
        try:
            consumer.assign(partitions)
        except KafkaException:
            # The cooperative protocol has its own method.
            consumer.incremental_assign(partitions)

    def revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Handle a revocation, for an `on_revoke` of your own: first commit the finished messages."""
        with suppress(KafkaException):
            consumer.commit(asynchronous=False)
        self.lost(consumer, partitions)

    def lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Handle lost partitions, for an `on_lost` of your own."""
        self._ledger.forget((one.topic, one.partition) for one in partitions)

    def _is_subscribed(self) -> bool:
        # A manually assigned consumer has no member id.
        return bool(self._consumer.memberid())

    def _step(self, step: Step) -> Any:
        consumer = self._consumer
        match step:
            case Bury(delivery, reason):
                return self._dead_letter.bury(delivery, self._operation, reason, self._digest_of(delivery))
            case Commit(offsets):
                return self._commit(offsets)
            case Position(partition):
                return consumer.position([TopicPartition(*partition)])[0].offset
            case GoBack(partition, offset):
                at = TopicPartition(*partition, offset)
                paused = self._tried(partition, lambda: consumer.pause([at]))
                return paused and self._tried(partition, lambda: consumer.seek(at))
            case Resume(partition):
                # librdkafka does not complain if the partition is not ours: it is resumed when it is.
                ours = partition in self._assignment()
                return ours and self._tried(partition, lambda: consumer.resume([TopicPartition(*partition)]))
            case Assigned():
                return self._assignment()
            case FindEnds(partition):
                return self._ends(TopicPartition(*partition))

    def _ends(self, at: TopicPartition) -> Ends:
        try:
            (here,) = self._consumer.position([at])
            if here.offset < 0:
                (here,) = self._consumer.committed([at], timeout=LOOK_SECONDS_MAX)
            # None if the broker has not answered in time.
            found: Any = self._consumer.get_watermark_offsets(at, timeout=LOOK_SECONDS_MAX)
        except KafkaException:
            return Ends(None, None)
        return Ends(here.offset if here.offset >= 0 else None, found[1] if found else None)

    def _commit(self, offsets: dict[Partition, int]) -> None:
        """Request a commit without waiting: a lost commit only causes duplicates, and the next one covers it."""
        next_ones = [(one, TopicPartition(*one, offset)) for one, offset in offsets.items()]
        ours = [at for one, at in next_ones if self._tried(one, partial(self._consumer.store_offsets, offsets=[at]))]
        if ours:
            with suppress(KafkaException):
                self._consumer.commit(offsets=ours, asynchronous=True)

    def _assignment(self) -> set[Partition]:
        return {Partition(one.topic, one.partition) for one in self._consumer.assignment()}

    def _check_commits(self, consumer: Consumer) -> None:
        try:
            # It refuses to store offsets if it stores them automatically.
            consumer.store_offsets(offsets=[])
        except KafkaException as error:
            raise UsageError(
                "the consumer stores the offset of a message before it is handled. Create it with "
                '"enable.auto.offset.store": False; otherwise a crash loses messages'
            ) from error
