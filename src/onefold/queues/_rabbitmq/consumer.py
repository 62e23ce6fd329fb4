"""The rules of a RabbitMQ consumer, for both clients: its messages, and what a verdict means. Pure, except for logs.

A message that has to come later stays unacknowledged and is delivered again in place: the broker counts nothing, and
the message does not circulate. Only messages that are given back are counted (`x-delivery-count`, on quorum queues).
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from onefold import UsageError
from onefold._checks import at_least
from onefold._concurrency.generators import Flow
from onefold.durations import Duration, seconds
from onefold.queues._shared import failures, sends
from onefold.queues._shared.dead_letters import (
    DEAD_LETTER_DELAY,
    DIGEST_HEADER,
    OPERATION_HEADER,
    REASON_HEADER,
    REASON_MAX,
    TIME_HEADER,
    fitting,
    plain,
)
from onefold.queues._shared.failures import ATTEMPTS, Failures, delay_after, times_failed
from onefold.queues._shared.logs import Waits, buried, found_at
from onefold.queues._shared.verdict import SOON, Ack, HandlerRaised, Later, Never, Verdict, named
from onefold.queues.keys import KEY_HEADER, Message
from onefold.stores.base import Address

log = logging.getLogger("onefold.queues.rabbitmq")

EXCHANGE_HEADER: Final = "x-onefold-exchange"
ROUTING_KEY_HEADER: Final = "x-onefold-routing-key"
# The headers of a dead letter. A sender's header that only shares the prefix is the sender's.
OURS: Final = frozenset(
    {REASON_HEADER, DIGEST_HEADER, OPERATION_HEADER, TIME_HEADER, EXCHANGE_HEADER, ROUTING_KEY_HEADER}
)

FAILED_DELAY: Final = failures.FAILED_DELAY

# RabbitMQ closes the channel of a consumer that keeps a message for 30 minutes (its `consumer_timeout`).
CONSUMER_TIMEOUT: Final = 30 * 60.0
UNACKED_MAX: Final = 15 * 60.0

# All properties of a message, including our headers, have to fit into one frame, 128 KiB by default.
FRAME_MAX: Final = 131_072
# A sixteenth of it is for the frame itself, and for headers that a broker adds when it forwards a message.
FRAME_SHARE: Final = 15 / 16

# The limit of AMQP for a property.
SHORT_MAX: Final = 255

# A sender survives a restart of the broker: half a minute.
SEND_TRIES: Final = 12

# A message that the broker has not confirmed by then is sent again.
CONFIRM_SECONDS_MAX: Final = 30.0

# Kept on the broker's disk.
PERSISTENT: Final = 2

# The properties that a dead letter keeps: not `expiration`, which would remove it, nor `user_id`, the sender's.
COPIED: Final = (
    *("content_type", "content_encoding", "priority", "correlation_id", "reply_to", "message_id", "timestamp"),
    *("type", "app_id"),
)

# These affect how a broker routes or counts a message: a copy must not carry them.
NOT_COPIED: Final = {"CC", "BCC", "x-delivery-count", "x-acquired-count"}


class DeadLetter(enum.Enum):
    """Stands for the name of a dead-letter queue."""

    OWN_EXCHANGE = "the exchange that the queue itself names"


# Reject the message: the queue's own `x-dead-letter-exchange` takes it; without one, it is gone.
OWN_EXCHANGE: Final = DeadLetter.OWN_EXCHANGE


class Delivery(NamedTuple):
    """A message as a handler sees it, with either client; `native` is the client's own view of it."""

    body: bytes
    headers: Mapping[str, Any]
    message_id: str | None
    content_type: str | None
    exchange: str
    routing_key: str
    redelivered: bool
    position: str
    native: Any

    @property
    def message(self) -> Message:
        return Message(self.body, self.headers, self.message_id, self.position)

    @property
    def broker_count(self) -> int | None:
        """Return how often a quorum queue has delivered it before; None if it is new, or the queue does not count."""
        count = self.headers.get("x-delivery-count")
        return count if isinstance(count, int) and count >= 0 else None


class Step(NamedTuple):
    """The action of an adapter on a message, after keeping it unacknowledged for the delay."""

    # `again`: deliver it in place. `give back`: to its queue. `bury`: send it to the dead letters, then acknowledge it.
    action: Literal["ack", "again", "give back", "bury", "reject"]
    delay: float = 0.0
    reason: str = ""


# Not at once, or it would be redelivered at once.
GIVEN_BACK: Final = Step("give back", SOON)


class Dead(NamedTuple):
    """A dead letter, as either client can send it."""

    queue: str
    body: bytes
    properties: dict[str, Any]


@dataclass
class Rules:
    """Decides what a consumer does with its messages.

    It remembers which of them have failed, if the broker does not.
    """

    operation: str
    dead_letter: str | DeadLetter
    attempts: int = ATTEMPTS
    unacked_max: float = UNACKED_MAX
    waits: Waits = field(default_factory=Waits)
    _failures: Failures = field(default_factory=Failures)

    def after(self, verdict: Verdict, delivery: Delivery, unacked_for: float, address: Address | None = None) -> Step:
        """Decide what to do with a message that was delivered this many seconds ago.

        The address is that of its record.
        """
        where = self.found_at(delivery, address)
        match verdict:
            case Ack():
                if self._failures:
                    self._failures.forget(_digest(delivery))
                return Step("ack")
            case Later():
                return self._later(verdict, where, unacked_for)
            case HandlerRaised(error):
                return self._failed(error, delivery, where)
            case Never(reason):
                return self._never(reason, where)

    def found_at(self, delivery: Delivery, address: Address | None) -> str:
        """Return how a message is identified in the log. Its own id is not shown: it may be the key."""
        return found_at(delivery.routing_key, address or Address("", self.operation, ""))

    def _later(self, later: Later, where: str, unacked_for: float) -> Step:
        if unacked_for + later.delay <= self.unacked_max:
            self.waits.tell(log, where, later)
            return Step("again", later.delay)
        if later.limited:
            return self._never(later.reason, where)
        self.waits.tell(log, where, later, delay=GIVEN_BACK.delay)
        log.warning("%s: given back after %.0f s: %s", where, unacked_for, later.reason)
        return GIVEN_BACK

    def _failed(self, error: Exception, delivery: Delivery, where: str) -> Step:
        # A classic queue forwards a count that its message brought along, and never increases it.
        attempt = self._failures.add(_digest(delivery), delivery.broker_count or 0)
        what = named(error)
        log.debug("%s: the handler raised", where, exc_info=error)
        if attempt >= self.attempts:
            self._failures.forget(_digest(delivery))
            return self._never(times_failed(attempt, what), where)
        delay = delay_after(attempt, FAILED_DELAY)
        log.warning("%s: attempt %d failed: %s; given back in %.3g s", where, attempt, what, delay)
        return Step("give back", delay)

    def _never(self, reason: str, where: str) -> Step:
        log.error("%s: to the dead letters: %s", where, reason)
        return Step("reject" if isinstance(self.dead_letter, DeadLetter) else "bury", reason=reason)

    def buried(self, reason: str, address: Address | None) -> None:
        """Report that the message is a dead letter now."""
        buried(address or Address("", self.operation, ""), reason)

    def came_too_late(self, delivery: Delivery) -> None:
        """Report a message that came while its consumer was leaving, or after that."""
        where = self.found_at(delivery, None)
        log.warning(
            "%s: it came after drain() and was not started; it goes back to its queue when its channel is closed. To "
            "consume again, open another channel",
            where,
        )

    def dead(self, delivery: Delivery, reason: str, address: Address | None = None) -> Dead:
        """Return the message as a dead letter: unchanged, with the reason, and the digest of its record."""
        # Not a digest of the sender's: a person may let the record with this digest run again.
        theirs = NOT_COPIED | OURS
        headers = {name: value for name, value in delivery.headers.items() if name not in theirs}
        headers |= {
            REASON_HEADER: plain(reason)[:REASON_MAX],
            OPERATION_HEADER: self.operation,
            EXCHANGE_HEADER: plain(delivery.exchange),
            ROUTING_KEY_HEADER: plain(delivery.routing_key),
            TIME_HEADER: int(time.time()),
        }
        if address is not None and address.key:
            headers[DIGEST_HEADER] = address.digest
        properties = {name: getattr(delivery.native, name, None) for name in COPIED}
        return Dead(
            str(self.dead_letter), delivery.body, properties | {"headers": headers, "delivery_mode": PERSISTENT}
        )

    def refused(self, error: Exception, reason: str, unacked_for: float, where: str) -> Step:
        """Decide what to do with a message that its dead-letter queue did not accept.

        The message is never lost because of that.
        """
        log.error("%s: %s did not accept a dead letter: %s", where, self.dead_letter, type(error).__name__)
        if unacked_for + DEAD_LETTER_DELAY > self.unacked_max:
            return GIVEN_BACK
        return Step("bury", DEAD_LETTER_DELAY, reason)


def rules(operation: str, dead_letter: str | DeadLetter, attempts: int, unacked_max: Duration, waits: Waits) -> Rules:
    """Check the options, and return the rules."""
    if not dead_letter or not isinstance(dead_letter, (str, DeadLetter)):
        raise UsageError("dead_letter= is the name of a queue, or OWN_EXCHANGE for the one that the queue itself names")
    kept = seconds(unacked_max, "unacked_max")
    if kept >= CONSUMER_TIMEOUT:
        raise UsageError(
            f"unacked_max={unacked_max!r} has to be less than 30 min, after which RabbitMQ closes the channel of a "
            "consumer that keeps a message (consumer_timeout)"
        )
    return Rules(operation, dead_letter, at_least(1, attempts, "attempts"), kept, waits)


def sent_properties(key: str, headers: Mapping[str, Any] | None, content_type: str | None) -> dict[str, Any]:
    """Return the properties of a message to send: the key is in its header and, if it fits, in `message_id`."""
    return {
        "headers": {**(headers or {}), KEY_HEADER: key},
        "message_id": key if len(key.encode()) <= SHORT_MAX else None,
        "content_type": content_type,
        "delivery_mode": PERSISTENT,
    }


def pauses() -> list[float]:
    """Return how long a sender waits between its attempts."""
    return sends.pauses(SEND_TRIES)


def confirmed(
    publish: Callable[[], Any],
    sleep: Callable[[float], Any],
    lost: tuple[type[BaseException], ...],
    is_worth_another_try: Callable[[BaseException], bool],
) -> Flow[None]:
    """Publish a message until the broker has confirmed it; see `_shared.sends`."""
    return sends.confirmed(publish, sleep, lost, is_worth_another_try, pauses())


def fitted(dead: Dead, encoded_size: Callable[[dict[str, Any]], int], frame_max: int) -> Dead:
    """Return the dead letter in a writable form: without parts that are too large for a frame, or not valid in AMQP.

    The size is measured with the client's own encoder. A message that cannot be buried would end its connection, again
    and again: it loses its headers and properties, never its body.
    """
    room = (frame_max or FRAME_MAX) * FRAME_SHARE

    def size(properties: dict[str, Any]) -> float:
        try:
            return encoded_size(properties)
        except Exception:  # noqa: BLE001 - each client has its own errors for values that it cannot write
            return math.inf

    if size(dead.properties) <= room:
        return dead
    headers = dead.properties["headers"]
    ours = {name: value for name, value in headers.items() if name in OURS}
    rest = dead.properties | {"headers": ours}
    if size(rest) > room:
        rest = {"headers": ours, "delivery_mode": PERSISTENT}
    theirs = fitting(
        headers,
        headers.keys() - ours.keys(),
        lambda name, value: size({"headers": {name: value}}),
        room - size(rest) - REASON_MAX,
    )
    return dead._replace(properties=rest | {"headers": theirs | ours})


def _digest(delivery: Delivery) -> bytes:
    """Digest a message with its key: two orders may be equal except for the key, wherever that is."""
    headers = sorted((name, repr(value)) for name, value in delivery.headers.items() if name not in NOT_COPIED)
    return hashlib.sha256(f"{delivery.message_id}\n{headers}\n".encode(errors="replace") + delivery.body).digest()
