"""Decide, for both Kafka clients, which partition waits for which message, and what is committed or buried. Pure.

Kafka redelivers nothing: an unfinished message is read again because its partition seeks back to it. The steps are
yielded, and the client's shell performs them. An offset above an unfinished message is never among them.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from onefold import AsyncGuard, Guard, Policy, PolicyFields, UsageError
from onefold._checks import at_least, did_you_mean
from onefold.durations import Duration, seconds
from onefold.queues._kafka.notices import AddressOf, Notices, Undeliverable, log, unaddressed
from onefold.queues._kafka.offsets import Delivery, Partition, Spot
from onefold.queues._kafka.unread import Ends, Readings
from onefold.queues._shared.consumer import MissingKeyRule
from onefold.queues._shared.options import policy_of
from onefold.queues._shared.verdict import ACK, Ack, HandlerRaised, Later, Never, Verdict, named
from onefold.queues.keys import KeyOf, PayloadOf

if TYPE_CHECKING:
    from onefold.queues.kafka_offsets import Offsets

# A waiting partition falls behind; a longer failure is solved by people, not by faster retries.
BACKOFF_MAX: Final = 60.0
DOUBLINGS_MAX: Final = 10

# How often to check whether a paused partition is ours again, if rebalances are not reported.
STRAY_EVERY: Final = 1.0

# The delay before an unconfirmed dead letter is retried.
BURY_AGAIN: Final = 5.0

REASON_MAX: Final = 1_000

# The defaults of `guarded`: about a quarter of a minute for failures, ten minutes for held messages.
ATTEMPTS: Final = 5
BACKOFF: Final = 1.0
HELD_TIMES: Final = 10


# A handler was interrupted, and the consumer may survive: its message is read again at once.
INTERRUPTED: Final = Later(0.0, "interrupted")


class Bury(NamedTuple):
    """Produce the message to the dead letters. Reply with whether that was confirmed."""

    delivery: Delivery
    reason: str


class Commit(NamedTuple):
    """Commit these next offsets. Partitions that are no longer ours are left out."""

    offsets: dict[Partition, int]


class GoBack(NamedTuple):
    """Pause the partition, and seek to the offset. Reply with whether that was done."""

    partition: Partition
    offset: int


class Resume(NamedTuple):
    """Resume reading. Reply with whether that was done; False if the partition is not ours."""

    partition: Partition


class Position(NamedTuple):
    """Reply with the offset after the last message that was read; it is lower after the partition went back."""

    partition: Partition


class Assigned(NamedTuple):
    """Reply with the partitions that are ours now, as a set."""


class FindEnds(NamedTuple):
    """Reply with the partition's next position, and its end, as `Ends`."""

    partition: Partition


Step = Bury | Commit | GoBack | Resume | Position | Assigned | FindEnds
Steps = Generator[Step, Any, Any]


class Options(PolicyFields, total=False):
    """Further options of `guarded` and `guarded_batches` of both clients, besides the fields of a policy."""

    # A message without a key: to the dead letters, or run without a guard.
    missing_key: MissingKeyRule
    # The part of a message that must be the same under one key: body(), or a function of yours.
    payload: PayloadOf | None
    # Keeps the next offsets in your own database.
    offsets: Offsets | None
    # How often a handler may fail before its message goes to the dead letters, and the first delay.
    attempts: int
    backoff: Duration
    # How often a held message comes again, once a minute, before it goes to the dead letters.
    held_times: int


# By their own names, without a policy's.
OWN: Final = Options.__optional_keys__ - PolicyFields.__optional_keys__


def asked_of(
    guard: Guard | AsyncGuard, kind: type, key: KeyOf, options: Options, policy: Policy | None
) -> dict[str, Any]:
    """Return the options for the guard, for single messages and for polls."""
    wrong = next((name for name in options if name not in Options.__optional_keys__), None)
    if wrong is not None:
        raise UsageError(f"unknown argument {wrong!r}{did_you_mean(wrong, Options.__optional_keys__)}")
    fields = {name: value for name, value in options.items() if name not in OWN}
    return {
        "key": key,
        "missing_key": options.get("missing_key", "never"),
        "payload": options.get("payload"),
        "policy": policy_of(guard, kind, policy, fields, asked_of),
    }


@dataclasses.dataclass(slots=True)
class Waiting:
    """A partition that has gone back to an unfinished message."""

    offset: int
    due: float
    sought: bool = False
    resumed: bool = False


class Ledger:
    """The state of one consumer's partitions. Attempts are counted here, in memory: Kafka counts nothing."""

    def __init__(
        self,
        options: Options,
        *,
        stops: bool,
        address_of: AddressOf = unaddressed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempts = at_least(1, options.get("attempts", ATTEMPTS), "attempts")
        self._held_times = at_least(0, options.get("held_times", HELD_TIMES), "held_times")
        self._backoff = seconds(options.get("backoff", BACKOFF), "backoff")
        self._stops = stops
        self._clock = clock
        self._notices = Notices(address_of, clock)
        self._readings = Readings(clock)
        self._waiting: dict[Partition, Waiting] = {}
        # Paused and not yet resumed. librdkafka keeps a pause while a partition goes and comes back.
        self._paused: set[Partition] = set()
        # Paused by the user, whether or not by us: only the user resumes them.
        self._users: set[Partition] = set()
        self._strays_due = 0.0
        self._failures: Counter[tuple[Partition, int]] = Counter()
        self._held: Counter[tuple[Partition, int]] = Counter()
        self._turns: Counter[Partition] = Counter()

    def spot(self, topic: str, number: int, offset: int) -> Spot:
        partition = Partition(topic, number)
        self._readings.note(partition)
        return Spot(partition, offset, self._turns[partition])

    def assigned(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Note that these were assigned, perhaps again: they are read, whatever was waited for before."""
        self.forget(partitions)
        self._strays_due = self._clock()

    def forget(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Forget these: they were revoked or reassigned, and work still in progress for them has no effect."""
        gone = {Partition(*partition) for partition in partitions}
        for partition in gone:
            self._turns[partition] += 1
            self._waiting.pop(partition, None)
        for counter in (self._failures, self._held):
            for where in [where for where in counter if where[0] in gone]:
                del counter[where]

    def paused_by_user(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Note a pause by the user: it stays when a message becomes due."""
        self._users |= {Partition(*partition) for partition in partitions}

    def resumed_by_user(self, partitions: Iterable[tuple[str, int]]) -> set[Partition]:
        """Note that a pause by the user is over; return the partitions to resume now, as no message makes them wait."""
        resumed = {Partition(*partition) for partition in partitions}
        self._users -= resumed
        return {one for one in resumed if one not in self._waiting or self._waiting[one].resumed}

    def wake(self) -> Steps:
        """Resume the partitions whose messages are due."""
        for partition, waiting in list(self._waiting.items()):
            if not waiting.sought:
                self._paused.add(partition)
                waiting.sought = yield GoBack(partition, waiting.offset)
            if waiting.sought and not waiting.resumed and self._clock() >= waiting.due:
                waiting.resumed = yield from self._resume(partition)
        strays = self._paused - self._waiting.keys()
        if strays and self._clock() >= self._strays_due:
            self._strays_due = self._clock() + STRAY_EVERY
            for partition in sorted(strays):
                yield from self._resume(partition)

    def _resume(self, partition: Partition) -> Steps:
        is_done: bool = partition in self._users or (yield Resume(partition))
        if is_done:
            self._paused.discard(partition)
        return is_done

    def look(self) -> Steps:
        """Check, now and then, whether a partition of ours has messages and is not read."""
        if not self._readings.is_due:
            return
        ours: set[Partition] = yield Assigned()
        asleep = {one for one, waiting in self._waiting.items() if not waiting.resumed}
        partition = self._readings.silent(ours - asleep)
        if partition is None:
            return
        ends: Ends = yield FindEnds(partition)
        if count := self._readings.unread(partition, ends):
            self._notices.unread(partition, count, self._readings.silent_for(partition))

    def next_due(self) -> float | None:
        """Return the seconds until `wake` has something to do; None if not before another message."""
        due = [waiting.due for waiting in self._waiting.values() if not waiting.resumed]
        return max(min(due) - self._clock(), 0.0) if due else None

    def admit(self, spot: Spot) -> Steps:
        """Return whether this message may be handled now.

        One that was read before its partition went back is read again.
        """
        waiting = self._waiting.get(spot.partition)
        if waiting is None or spot.offset < waiting.offset:
            return True
        if spot.offset == waiting.offset and not waiting.resumed:
            # A rebalance has undone the pause.
            waiting.sought = False
            yield from self.wake()
            return False
        if spot.offset > waiting.offset:
            position: int = yield Position(spot.partition)
            if not waiting.sought or position <= spot.offset:
                return False
            # Read after the partition went back: the message it went back to is gone, or was finished by another
            # consumer.
            where = f"{spot.partition.topic}/{spot.partition.number}"
            log.warning("%s offset %s is read instead of %s, which is gone", where, spot.offset, waiting.offset)
        del self._waiting[spot.partition]
        return True

    def settle(self, deliveries: Sequence[Delivery], verdicts: Sequence[Verdict]) -> Steps:
        """Finish messages up to the first unfinished one of each partition, and go back to that one.

        Also if it is interrupted, or a client raises an error of another kind: what is not finished then comes again.
        """
        done: dict[Partition, int] = {}
        back: dict[Partition, Waiting] = {}
        stopped: Exception | None = None
        unsettled = deque(deliveries)
        turns = {delivery.spot.partition: delivery.spot for delivery in deliveries}
        try:
            for delivery, verdict in zip(deliveries, verdicts, strict=True):
                problem = yield from self._settle(delivery, verdict, done, back)
                stopped = stopped or problem
                unsettled.popleft()
            # While a dead letter was confirmed, a partition may have gone.
            if ours := {one: offset for one, offset in done.items() if self._is_ours(turns[one])}:
                yield Commit(ours)
        finally:
            for delivery in unsettled:
                back.setdefault(delivery.spot.partition, Waiting(delivery.spot.offset, self._clock()))
            self._waiting |= {one: waiting for one, waiting in back.items() if self._is_ours(turns[one])}
        yield from self.wake()
        if stopped is not None:
            raise stopped

    def _settle(
        self, delivery: Delivery, verdict: Verdict, done: dict[Partition, int], back: dict[Partition, Waiting]
    ) -> Steps:
        """Note how far its partition is done, or where it goes back to; return an error that has to end the loop."""
        spot = delivery.spot
        if not self._is_ours(spot):
            return None
        ending = self._ended(delivery, verdict)
        if spot.partition in back:
            # It is above an unfinished one, and comes again with it.
            return None
        if isinstance(ending, Never):
            ending = yield from self._bury(delivery, ending.reason[:REASON_MAX])
        if isinstance(ending, Later):
            problem = self._told(delivery, ending)
            back[spot.partition] = Waiting(spot.offset, self._clock() + ending.delay)
            return problem
        done[spot.partition] = spot.offset + 1
        self._failures.pop(spot.position, None)
        self._held.pop(spot.position, None)
        return None

    def come_again(self, deliveries: Iterable[Delivery]) -> None:
        """Seek back to messages that were read but could not be handled."""
        for delivery in deliveries:
            spot, waiting = delivery.spot, self._waiting.get(delivery.spot.partition)
            if self._is_ours(spot) and (waiting is None or waiting.resumed or spot.offset < waiting.offset):
                first = spot.offset if waiting is None else min(spot.offset, waiting.offset)
                self._waiting[spot.partition] = Waiting(first, self._clock())

    def _bury(self, delivery: Delivery, reason: str) -> Steps:
        if self._stops:
            return Later(BURY_AGAIN, reason, error=self._notices.undeliverable(delivery, reason))
        if not (yield Bury(delivery, reason)):
            return Later(BURY_AGAIN, "its dead letter was not confirmed")
        self._notices.buried(delivery, reason)
        return ACK

    def _told(self, delivery: Delivery, later: Later) -> Exception | None:
        """Return the error that has to end the loop, if any; report any other message as waiting."""
        if isinstance(later.error, (Undeliverable, UsageError)):
            # A worker's own mistake would bury every message, or make every one wait.
            return later.error
        self._notices.waits(delivery, later)
        return None

    def _is_ours(self, spot: Spot) -> bool:
        return spot.turn == self._turns[spot.partition]

    def _ended(self, delivery: Delivery, verdict: Verdict) -> Ack | Later | Never:
        where = delivery.spot.position
        if isinstance(verdict, HandlerRaised):
            self._failures[where] += 1
            count, what = self._failures[where], named(verdict.error)
            self._notices.failed(delivery, f"attempt {count} of {self._attempts}", what, verdict.error)
            if count >= self._attempts:
                return Never(f"it failed {count} times, the last time with {what}")
            return Later(min(self._backoff * 2 ** min(count - 1, DOUBLINGS_MAX), BACKOFF_MAX), what)
        if isinstance(verdict, Later) and verdict.limited:
            self._held[where] += 1
            # A person may need a day; the partition must not wait for that.
            return verdict if self._held[where] <= self._held_times else Never(verdict.reason)
        return verdict
