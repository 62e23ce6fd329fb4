"""The common part of both Kafka clients: the options of a guarded consumer, and which messages are handled now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from onefold import UsageError
from onefold.queues._kafka.messages import check_consumer, check_undecoded, dead_letter_stops
from onefold.queues._kafka.notices import UNHEARD, AddressOf, log
from onefold.queues._kafka.offsets import Delivery, Partition
from onefold.queues._kafka.partitions import Ledger, Options, Step, Steps
from onefold.queues._shared.options import check_transactions, takes_tx
from onefold.queues.kafka_offsets import Offsets

C = TypeVar("C")

# Runs the handler for these deliveries; returns a verdict for each, or the awaitable of that.
Deliver = Callable[[Sequence[Delivery]], Any]


class Sender(NamedTuple):
    """Performs the steps of the ledger."""

    send: Callable[[Step], Any]


class GuardedConsumer:
    """A consumer, the ledger of its partitions, and the two ways to deliver its messages."""

    # Of the client: its consumer, its dead letters, and its error for a partition that is no longer ours.
    _takes: ClassVar[type]
    _letters: ClassVar[type]
    _refusal: ClassVar[type[Exception]]
    # The callbacks to name for users who subscribe by themselves.
    _listeners: ClassVar[str]

    def __init__(
        self,
        consumer: Any,
        dead_letter: Any,
        operation: str,
        options: Options,
        address_of: AddressOf,
        one: Deliver,
        many: Deliver | None,
    ) -> None:
        stops = dead_letter_stops(dead_letter, self._letters)
        self._ledger = Ledger(options, stops=stops, address_of=address_of)
        check_consumer(consumer, self._takes)
        check_undecoded(consumer)
        self._check_commits(consumer)
        self._consumer = consumer
        self._dead_letter = dead_letter
        self._operation = operation
        self._address_of = address_of
        self._offsets = options.get("offsets")
        self._one = one
        self._many = many
        # Whether rebalances are reported to us.
        self._hears = False

    def _check_commits(self, consumer: Any) -> None:
        """Raise `UsageError` unless the consumer leaves the offsets to us."""
        raise NotImplementedError

    def _digest_of(self, delivery: Delivery) -> str:
        """Return the digest of a message's record, for its dead letter; empty if it has no usable key."""
        address = self._address_of(delivery.message)
        return address.digest if address.key else ""

    def _is_subscribed(self) -> bool:
        """Return whether its partitions come and go: those of a manually assigned consumer do not."""
        raise NotImplementedError

    def _assignment(self) -> set[Partition]:
        raise NotImplementedError

    def _deliver_batches(self) -> Deliver:
        if self._many is None:
            raise UsageError("a handler with tx processes whole polls with guarded_batches(..., transaction=...)")
        return self._many

    def _admit(self, deliveries: Iterable[Delivery]) -> Steps:
        """Return which of these messages are handled now; the others come again."""
        read: list[Delivery] = []
        taken = []
        try:
            yield from self._ledger.wake()
            read.extend(deliveries)
            yield from self._ledger.look()
            for delivery in read:
                if (yield from self._ledger.admit(delivery.spot)):
                    taken.append(delivery)  # noqa: PERF401 - a comprehension cannot yield
        except BaseException:
            # Interrupted on the way: none of them is handled.
            self._ledger.come_again([*read, *deliveries])
            raise
        if taken:
            self._warn_of_silence()
        return taken

    def _warn_of_silence(self) -> None:
        """Warn once if rebalances are not reported to us."""
        if not self._hears and self._is_subscribed():
            log.warning(UNHEARD, self._listeners)
        self._hears = True

    def _tried(self, partition: Partition, call: Callable[[], object]) -> bool:
        """Run a call on a partition; return False if it is refused now, or if the partition is no longer ours."""
        try:
            call()
        except self._refusal:
            if partition not in self._assignment():
                self._ledger.forget([partition])
            return False
        return True


def consuming_of(
    consuming: Callable[[Callable[..., Any]], C],
    guard: Any,
    handler: Callable[..., Any],
    offsets: Offsets | None,
    saving: Callable[..., Callable[..., Any]],
) -> C:
    """Return the consumer of single messages; with offsets, the next one is saved in the handler's transaction."""
    # A sync handler for an async guard, or the reverse, is refused before it is wrapped.
    one = consuming(handler)
    check_transactions(guard, handler)
    if offsets is None:
        return one
    if not takes_tx(handler):
        raise UsageError("offsets= are kept in the transaction of the work: the handler has to take tx")
    return consuming(saving(handler, offsets))
