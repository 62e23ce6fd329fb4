"""Perform the ledger's steps on the partitions of a confluent-kafka Consumer, and report rebalances to it.

A partition that is not ours any more is forgotten, and nothing is committed for it: `store_offsets` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from onefold import UsageError
from onefold.queues._kafka.confluent_messages import Consumer, DeadLetters, KafkaException, TopicPartition
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


class Partitions:
    """The partitions of one consumer: what is done to them, and what is reported about them."""

    def __init__(
        self, consumer: Consumer, dead_letter: Any, operation: str, options: Options, address_of: AddressOf
    ) -> None:
        stops = dead_letter_stops(dead_letter, DeadLetters)
        self._ledger = Ledger(options, stops=stops, address_of=address_of)
        self._consumer = _checked(consumer)
        self._dead_letter = dead_letter
        self._operation = operation
        self._offsets = options.get("offsets")
        # Whether somebody tells us of partitions that come and go.
        self._hears = False

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe the consumer, and hear of its partitions' coming and going."""
        self._hears = True
        self._consumer.subscribe(list(topics), on_assign=self.assigned, on_revoke=self.revoked, on_lost=self.lost)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions of the consumer's until `resume`, also where one waits for its message's time.

        A pause by `consumer.pause` is not seen here, and ends when a message that its partition waits for is due.
        """
        places = {Partition(one.topic, one.partition) for one in partitions}
        if strange := sorted(places - self._assignment()):
            topic, number = strange[0]
            raise UsageError(f"{topic}/{number} is not assigned to this consumer, and cannot be paused")
        self._ledger.paused_by_user(places)
        self._consumer.pause([TopicPartition(*one) for one in places])

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Read on; a partition that waits for its message's time does so when that has come."""
        ready = self._ledger.resumed_by_user((one.topic, one.partition) for one in partitions)
        self._consumer.resume([TopicPartition(*one) for one in ready])

    def assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """For an `on_assign` of your own."""
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
            # The cooperative protocol wants it in its own way.
            consumer.incremental_assign(partitions)

    def revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """For an `on_revoke` of your own: what is finished is committed before another consumer begins."""
        with suppress(KafkaException):
            consumer.commit(asynchronous=False)
        self.lost(consumer, partitions)

    def lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """For an `on_lost` of your own."""
        self._ledger.forget((one.topic, one.partition) for one in partitions)

    def _warn_of_silence(self) -> None:
        """Warn once. A consumer without a member id is assigned by hand: its partitions do not change."""
        if not self._hears and self._consumer.memberid():
            log.warning(UNHEARD, "handle.assigned, handle.revoked and handle.lost")
        self._hears = True

    def _perform(self, steps: Steps) -> Any:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._step(step)

    def _step(self, step: Step) -> Any:
        consumer = self._consumer
        match step:
            case Bury(delivery, reason):
                return self._dead_letter.bury(delivery, self._operation, reason)
            case Commit(offsets):
                return self._commit(offsets)
            case Position(partition):
                return consumer.position([TopicPartition(*partition)])[0].offset
            case GoBack(partition, offset):
                at = TopicPartition(*partition, offset)
                paused = self._tried(partition, lambda: consumer.pause([at]))
                return paused and self._tried(partition, lambda: consumer.seek(at))
            case Resume(partition):
                # librdkafka says nothing where the partition is not ours: it is resumed when it is.
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
            # None where the broker has not answered in time.
            found: Any = self._consumer.get_watermark_offsets(at, timeout=LOOK_SECONDS_MAX)
        except KafkaException:
            return Ends(None, None)
        return Ends(here.offset if here.offset >= 0 else None, found[1] if found else None)

    def _commit(self, offsets: dict[Partition, int]) -> None:
        """Request a commit without waiting: a lost commit makes a duplicate, and the next one covers it."""
        next_ones = [(one, TopicPartition(*one, offset)) for one, offset in offsets.items()]
        ours = [at for one, at in next_ones if self._tried(one, partial(self._consumer.store_offsets, offsets=[at]))]
        if ours:
            with suppress(KafkaException):
                self._consumer.commit(offsets=ours, asynchronous=True)

    def _tried(self, partition: Partition, call: Callable[[], object]) -> bool:
        """Try a step. False: not now, or no longer ours."""
        try:
            call()
        except KafkaException:
            if partition not in self._assignment():
                self._ledger.forget([partition])
            return False
        return True

    def _assignment(self) -> set[Partition]:
        return {Partition(one.topic, one.partition) for one in self._consumer.assignment()}


def _checked(consumer: Consumer) -> Consumer:
    """Return the consumer, if it leaves the offsets to us: it refuses to store any if it stores them itself."""
    check_consumer(consumer, Consumer)
    check_undecoded(consumer)
    try:
        consumer.store_offsets(offsets=[])
    except KafkaException as error:
        raise UsageError(
            'the consumer stores the offset of a message before it is handled. Make it with "enable.auto.offset.store":'
            " False; otherwise a crash loses messages"
        ) from error
    return consumer
