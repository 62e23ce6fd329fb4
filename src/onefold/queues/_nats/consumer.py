"""The rules of a JetStream consumer: its messages, and what a verdict means. Pure, except for logs.

A message that has to come later is given back with a delay (`nak`). A consumer with `max_deliver` counts that as one of
its deliveries, and never delivers a message again that has used them up: there a message waits in place instead, and
its last delivery ends in an acknowledgement or in the dead letters.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from onefold import MissingKey, StoreUnavailable, UsageError
from onefold._checks import at_least
from onefold.durations import Duration, seconds
from onefold.queues._shared.dead_letters import (
    DEAD_LETTER_DELAY,
    DIGEST_HEADER,
    DROPPED_HEADER,
    OPERATION_HEADER,
    REASON_HEADER,
    REASON_MAX,
    fitting,
    plain,
)
from onefold.queues._shared.failures import (
    ATTEMPTS,
    FAILED_DELAY,
    Failures,
    delay_after,
    less_often,
    times_failed,
)
from onefold.queues._shared.logs import Waits, buried, found_at
from onefold.queues._shared.verdict import SOON, Ack, HandlerRaised, Later, Never, Verdict, named
from onefold.queues.keys import KEY_HEADER, Message
from onefold.stores.base import Address

log = logging.getLogger("onefold.queues.nats")

SUBJECT_HEADER: Final = "x-onefold-subject"
STREAM_HEADER: Final = "x-onefold-stream"
SEQUENCE_HEADER: Final = "x-onefold-sequence"
# The sender's `Nats-Msg-Id`: a dead letter has one of its own.
MESSAGE_ID_HEADER: Final = "x-onefold-message-id"

# The header by which a stream drops duplicates within its window.
MSG_ID: Final = "Nats-Msg-Id"
# The server's own headers: a copy must not carry them. `Nats-Rollup` would empty the dead letters, and
# `Nats-Expected-Last-Sequence` would have them refused.
SERVERS: Final = "nats-"

# The default of a consumer, for one whose settings cannot be read.
ACK_WAIT: Final = 30.0
# A consumer without `max_deliver` says -1.
NO_LIMIT: Final = -1

# `in_progress` is sent this often within the time after which the server delivers a message again.
BEATS: Final = 3
BEAT_SECONDS_MIN: Final = 0.05

# How long a message waits in place, if each time that it is given back would count.
UNACKED_MAX: Final = 15 * 60.0

# The first line of a block of headers, and what each header adds to its name and value; the limit of a message is for
# both, headers and body, and a server closes the connection of whoever exceeds it.
BLOCK_BYTES: Final = len(b"NATS/1.0\r\n\r\n")
LINE_BYTES: Final = len(b": \r\n")
# A stream takes no larger block.
BLOCK_BYTES_MAX: Final = 65_535
HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class Settings(NamedTuple):
    """How a consumer of JetStream delivers its messages."""

    # After this many seconds without a sign, the server delivers a message again.
    ack_wait: float = ACK_WAIT
    max_deliver: int = NO_LIMIT

    @property
    def is_limited(self) -> bool:
        return self.max_deliver > 0


class Delivery(NamedTuple):
    """A message as a handler sees it; `native` is the client's own."""

    body: bytes
    headers: Mapping[str, Any]
    # Its `Nats-Msg-Id`.
    message_id: str | None
    subject: str
    stream: str
    sequence: int
    # How often the server has delivered it, this time included.
    num_delivered: int
    position: str
    native: Any

    @property
    def message(self) -> Message:
        return Message(self.body, self.headers, self.message_id, self.position)


class Step(NamedTuple):
    """The action of an adapter on a message, after keeping it in progress for the delay."""

    # `again`: deliver it in place. `give back`: a nak with this delay. `bury`: to the dead letters, then terminate it.
    action: Literal["ack", "again", "give back", "bury"]
    delay: float = 0.0
    reason: str = ""
    # What it waits for concerns this message alone: others can be handled meanwhile.
    is_aside: bool = False


ACKNOWLEDGED: Final = Step("ack")


class Dead(NamedTuple):
    """A dead letter."""

    subject: str
    body: bytes
    headers: dict[str, str]


@dataclass
class Rules:
    """Decides what a consumer does with its messages.

    It remembers which of them have failed, if the server's own count says something else.
    """

    operation: str
    dead_letter: str
    attempts: int = ATTEMPTS
    unacked_max: float = UNACKED_MAX
    waits: Waits = field(default_factory=Waits)
    _failures: Failures = field(default_factory=Failures)

    def after(
        self,
        verdict: Verdict,
        delivery: Delivery,
        settings: Settings,
        unacked_for: float,
        address: Address | None = None,
    ) -> Step:
        """Decide what to do with a message that came this many seconds ago. The address is that of its record."""
        if isinstance(verdict, Ack):
            if self._failures:
                self._failures.forget(delivery.position)
            return ACKNOWLEDGED
        where = self.found_at(delivery, address)
        match verdict:
            case Later():
                return self._later(verdict, delivery, settings, where, unacked_for)
            case HandlerRaised(error):
                return self._failed(error, delivery, settings, where)
            case Never(reason):
                return self._never(reason, where)

    def found_at(self, delivery: Delivery, address: Address | None) -> str:
        """Return how a message is identified in the log. Its own id is not shown: it may be the key."""
        return found_at(delivery.subject, address or Address("", self.operation, ""))

    def _later(self, later: Later, delivery: Delivery, settings: Settings, where: str, unacked_for: float) -> Step:
        given_back = 0 if settings.is_limited else delivery.num_delivered
        later = less_often(later, waited=unacked_for, given_back=given_back)
        is_aside = not isinstance(later.error, (StoreUnavailable, UsageError))
        in_place = Step("again", later.delay, later.reason, is_aside=is_aside)
        if not settings.is_limited:
            self.waits.tell(log, where, later)
            return in_place._replace(action="give back")
        if unacked_for + later.delay <= self.unacked_max:
            self.waits.tell(log, where, later)
            return in_place
        if later.limited:
            return self._never(later.reason, where)
        if is_last(delivery, settings):
            # Given back, it would stay in its stream, and nobody would know.
            self.waits.tell(log, where, later)
            return in_place
        self.waits.tell(log, where, later, delay=SOON)
        log.warning("%s: given back after %.0f s: %s", where, unacked_for, later.reason)
        return Step("give back", SOON)

    def _failed(self, error: Exception, delivery: Delivery, settings: Settings, where: str) -> Step:
        what = named(error)
        log.debug("%s: the handler raised", where, exc_info=error)
        attempt = self._failures.add(delivery.position)
        if settings.is_limited:
            # Nothing but failures and dead workers is counted here: what waits is not given back.
            attempt = delivery.num_delivered
        if attempt >= self.attempts or is_last(delivery, settings):
            self._failures.forget(delivery.position)
            return self._never(_failed_for_good(attempt, what, delivery, settings), where)
        delay = delay_after(attempt, FAILED_DELAY)
        log.warning("%s: attempt %d failed: %s; given back in %.3g s", where, attempt, what, delay)
        return Step("give back", delay)

    def _never(self, reason: str, where: str) -> Step:
        log.error("%s: to the dead letters: %s", where, reason)
        return Step("bury", reason=reason)

    def buried(self, reason: str, address: Address | None) -> None:
        """Report that the message is a dead letter now."""
        buried(address or Address("", self.operation, ""), reason)

    def refused(
        self, error: Exception, reason: str, delivery: Delivery, settings: Settings, unacked_for: float, where: str
    ) -> Step:
        """Decide what to do with a message that no stream took as a dead letter. It is never lost because of that."""
        log.error("%s: %s did not accept a dead letter: %s", where, self.dead_letter, type(error).__name__)
        if unacked_for + DEAD_LETTER_DELAY > self.unacked_max and not is_last(delivery, settings):
            return Step("give back", SOON)
        return Step("bury", DEAD_LETTER_DELAY, reason, is_aside=True)

    def left(self, step: Step, delivery: Delivery, settings: Settings, where: str) -> Step:
        """Decide what to do, when the worker leaves, with a message that waits in place for this step."""
        if step.action == "bury":
            return step._replace(delay=0.0)
        if is_last(delivery, settings):
            return self._never(
                f"it was the last of {settings.max_deliver} deliveries, and waited: {step.reason}", where
            )
        return Step("give back")

    def given_up(self, delivery: Delivery, settings: Settings, address: Address | None) -> None:
        """Report a message that no stream took as a dead letter before its worker left, if it does not come again."""
        if is_last(delivery, settings):
            log.error(
                "%s: it was the last of %d deliveries: it stays in the stream %s at sequence %d, and comes to nobody",
                *(self.found_at(delivery, address), settings.max_deliver, delivery.stream, delivery.sequence),
            )

    def came_too_late(self, delivery: Delivery) -> None:
        """Report a message that came while its consumer was leaving, or after that."""
        log.warning(
            "%s: it came after drain() and was not started; it is given back. Unsubscribe before drain(), and create "
            "another callback to consume again",
            self.found_at(delivery, None),
        )

    def dead(self, delivery: Delivery, reason: str, room: int, address: Address | None = None) -> Dead:
        """Return the message as a dead letter: its body, its headers as far as they fit, and why it is one.

        `room` is the size of the largest message that the server takes.
        """
        ours = {
            # One message that is buried twice, because its acknowledgement was lost, is one dead letter.
            MSG_ID: one_line(f"{self.operation}.{delivery.position}"),
            REASON_HEADER: one_line(reason)[:REASON_MAX],
            OPERATION_HEADER: one_line(self.operation),
            SUBJECT_HEADER: delivery.subject,
            STREAM_HEADER: delivery.stream,
            SEQUENCE_HEADER: str(delivery.sequence),
        }
        if delivery.message_id is not None:
            ours[MESSAGE_ID_HEADER] = delivery.message_id
        if address is not None and address.key:
            ours[DIGEST_HEADER] = address.digest
        return Dead(self.dead_letter, delivery.body, fitted(delivery.headers, ours, room - len(delivery.body)))


def rules(operation: str, dead_letter: object, attempts: int, unacked_max: Duration, waits: Waits) -> Rules:
    """Check the options, and return the rules."""
    if not isinstance(dead_letter, str) or not dead_letter or set(dead_letter) & set("*> \t\r\n"):
        raise UsageError(f"dead_letter={dead_letter!r} is the subject of a stream for dead letters, without wildcards")
    return Rules(operation, dead_letter, at_least(1, attempts, "attempts"), seconds(unacked_max, "unacked_max"), waits)


def is_last(delivery: Delivery, settings: Settings) -> bool:
    """Return whether the server will not deliver this message again."""
    return settings.is_limited and delivery.num_delivered >= settings.max_deliver


def _failed_for_good(attempt: int, what: str, delivery: Delivery, settings: Settings) -> str:
    if not settings.is_limited:
        return times_failed(attempt, what)
    last = " and last" if is_last(delivery, settings) else ""
    return f"its delivery {delivery.num_delivered} of {settings.max_deliver}{last} failed with {what}"


def fitted(headers: Mapping[str, Any], ours: dict[str, str], room: float) -> dict[str, str]:
    """Return the headers of a dead letter: ours, and as many of the message's own as there is room for.

    Without room for ours there are none: a body alone may be as large as a message can be.
    """

    def size(name: str, value: Any) -> float:
        if not isinstance(value, str) or not HEADER_NAME.fullmatch(name):
            # The client can read it, but not write it.
            return math.inf
        return len(name) + len(value.encode(errors="replace")) + LINE_BYTES

    room = min(room, BLOCK_BYTES_MAX) - BLOCK_BYTES - sum(size(name, value) for name, value in ours.items())
    if room < 0:
        return {}
    # Not a digest of the sender's: a person may let the record with this digest run again.
    own = {*ours, DIGEST_HEADER}
    theirs = [name for name in headers if not name.lower().startswith(SERVERS) and name not in own]
    if sum(size(name, headers[name]) for name in theirs) <= room:
        return {name: headers[name] for name in theirs} | ours
    found = fitting(headers, theirs, size, room - REASON_MAX - len(DROPPED_HEADER) - LINE_BYTES)
    fits = sum(size(name, value) for name, value in found.items()) <= room
    return (found if fits else {}) | ours


def sent_headers(subject: str, key: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a message to send. `Nats-Msg-Id` has the subject, too.

    A stream drops whatever has the id of another message, on whichever of its subjects: one order that is charged and
    shipped under one key is two messages.
    """
    for name, value in headers.items():
        if value != carried(value) or not HEADER_NAME.fullmatch(name):
            _refuse(name, is_key=name == KEY_HEADER)
    known = any(name.lower() == MSG_ID.lower() for name in headers)
    return dict(headers) if known else {**headers, MSG_ID: f"{key}@{subject}"}


def _refuse(name: str, *, is_key: bool) -> None:
    says = "a header of NATS is one line of text, without spaces around it: nothing was sent"
    raise MissingKey(f"the key is not, and {says}") if is_key else UsageError(f"headers={{{name!r}: …}}: {says}")


def carried(value: object) -> str | None:
    """Return a value as nats-py sends it; None if it does not."""
    if not isinstance(value, str):
        return None
    return value.strip().replace("\r", " ").replace("\n", " ")


def one_line(text: str) -> str:
    return carried(plain(text)) or ""
