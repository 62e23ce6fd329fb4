"""The rules of an SQS consumer: its messages, and what a verdict means. Pure, except for logs.

A message that has to come later is given back with a delay (`ChangeMessageVisibility`). A queue with a redrive policy
counts each receive, and moves a message whose receives are used up to its dead letters: there a message waits in place
instead, so that what only waited is no dead letter.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from onefold import StoreUnavailable, UsageError
from onefold._checks import at_least
from onefold.durations import Duration, seconds
from onefold.queues._shared.dead_letters import DEAD_LETTER_DELAY
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
from onefold.queues.keys import Message
from onefold.stores.base import Address

log = logging.getLogger("onefold.queues.sqs")

# SQS keeps a message from others for 12 hours, counted from its receive, however often that is extended. It refuses a
# request that would exceed them, and takes whole seconds only: so this is a little less.
VISIBILITY_MAX: Final = 12 * 3600.0 - 2.0
# The default of a queue, for one whose attributes cannot be read: each receive asks for it then.
VISIBILITY: Final = 30.0

# The visibility is extended this often within its time, so that two requests may fail.
BEATS: Final = 3

# How long a message waits in place, if each time that it is given back would count.
UNACKED_MAX: Final = 15 * 60.0

# The size of a message with its attributes, for a queue that does not tell its own limit.
MESSAGE_BYTES_MAX: Final = 1_048_576

# A queue without a redrive policy.
NO_LIMIT: Final = 0

FIFO_SUFFIX: Final = ".fifo"


class DeadLetter(enum.Enum):
    """Stands for the URL of a dead-letter queue."""

    OWN_REDRIVE = "the queue that the redrive policy names"


# SQS itself moves a message there, once its receives are used up. It does not say why.
OWN_REDRIVE: Final = DeadLetter.OWN_REDRIVE


class Settings(NamedTuple):
    """How a queue delivers its messages."""

    # After this many seconds without an extension, a message is delivered again.
    visibility: float = VISIBILITY
    # A message that was received so often goes to the dead letters of the queue, instead of to a worker.
    max_receives: int = NO_LIMIT
    is_fifo: bool = False
    bytes_max: int = MESSAGE_BYTES_MAX

    @property
    def is_limited(self) -> bool:
        return self.max_receives > 0


class Delivery(NamedTuple):
    """A message as a handler sees it; `native` is the client's own."""

    body: bytes
    # Its message attributes: text, numbers as text, or bytes.
    headers: Mapping[str, Any]
    # What the sender has given a FIFO queue: `MessageDeduplicationId` and `MessageGroupId`.
    deduplication_id: str | None
    group: str | None
    # The name of the queue.
    queue: str
    # How often SQS has delivered it, this time included.
    receive_count: int
    # Its `MessageId`, which SQS makes anew for each message that is sent.
    position: str
    # The message attributes, with their types.
    attributes: Mapping[str, Any]
    native: Any

    @property
    def message(self) -> Message:
        return Message(self.body, self.headers, self.deduplication_id, self.position)


class Situation(NamedTuple):
    """How a message stands in this worker."""

    # Seconds since it was received.
    age: float = 0.0
    # How often it has failed here, and was tried again in place.
    retries: int = 0
    # Messages of its group wait behind it.
    is_followed: bool = False


class Step(NamedTuple):
    """The action of a worker on a message, after keeping it for the delay."""

    # `ack`: delete it. `again`: deliver it in place. `give back`: show it to others after the delay. `bury`: send it to
    # the dead letters, then delete it. `leave`: its receives are used up, and SQS moves it to the dead letters.
    action: Literal["ack", "again", "give back", "bury", "leave"]
    delay: float = 0.0
    reason: str = ""
    # It is tried again in place because it failed, not because it has to wait.
    failed: bool = False
    # What it waits for concerns this message alone: others can be handled meanwhile.
    is_aside: bool = False


DELETED: Final = Step("ack")


@dataclass
class Rules:
    """Decides what a worker does with its messages.

    It remembers which of them have failed, on a queue that does not limit their receives.
    """

    operation: str
    dead_letter: str | DeadLetter
    attempts: int = ATTEMPTS
    unacked_max: float = UNACKED_MAX
    waits: Waits = field(default_factory=Waits)
    _failures: Failures = field(default_factory=Failures)

    def after(
        self,
        verdict: Verdict,
        delivery: Delivery,
        settings: Settings,
        situation: Situation,
        address: Address | None = None,
    ) -> Step:
        """Decide what to do with a message. The address is that of its record."""
        if isinstance(verdict, Ack):
            if self._failures:
                self._failures.forget(delivery.position)
            return DELETED
        where = self.found_at(delivery, address)
        match verdict:
            case Later():
                return self._later(verdict, delivery, settings, situation.age, where)
            case HandlerRaised(error):
                return self._failed(error, delivery, settings, situation, where)
            case Never(reason):
                return self._never(reason, delivery, settings, where)

    @property
    def remembers(self) -> bool:
        """Return whether some messages have failed, and are counted."""
        return bool(self._failures)

    def found_at(self, delivery: Delivery, address: Address | None) -> str:
        """Return how a message is identified in the log. Its own id is not shown: it may be the key."""
        return found_at(delivery.queue, address or Address("", self.operation, ""))

    def _later(self, later: Later, delivery: Delivery, settings: Settings, age: float, where: str) -> Step:
        given_back = 0 if settings.is_limited else delivery.receive_count
        later = less_often(later, waited=age, given_back=given_back)
        if not settings.is_limited:
            self.waits.tell(log, where, later)
            return Step("give back", _at_most(later.delay, age))
        is_short = age + later.delay <= self.unacked_max
        if is_short or (is_last(delivery, settings) and age + later.delay < VISIBILITY_MAX and not later.limited):
            # Given back on its last receive, it would be a dead letter that has not failed.
            self.waits.tell(log, where, later)
            is_aside = not isinstance(later.error, (StoreUnavailable, UsageError))
            return Step("again", later.delay, later.reason, is_aside=is_aside)
        if later.limited:
            return self._never(later.reason, delivery, settings, where)
        self.waits.tell(log, where, later, delay=SOON)
        log.warning("%s: given back after %.0f s: %s", where, age, later.reason)
        return Step("give back", SOON)

    def _failed(
        self, error: Exception, delivery: Delivery, settings: Settings, situation: Situation, where: str
    ) -> Step:
        what = named(error)
        log.debug("%s: the handler raised", where, exc_info=error)
        if settings.is_limited:
            # Nothing but failures and dead workers is counted here: what waits is not given back.
            attempt = delivery.receive_count + situation.retries
        else:
            attempt = self._failures.add(delivery.position)
        if self._is_for_good(attempt, delivery, settings):
            self._failures.forget(delivery.position)
            return self._never(_failed_for_good(attempt, what, settings), delivery, settings, where)
        delay = delay_after(attempt, FAILED_DELAY)
        in_place = settings.is_limited and situation.is_followed and self.dead_letter is not OWN_REDRIVE
        if in_place and situation.age + delay <= self.unacked_max:
            # Given back, it would take the receives of those behind it along, which have not run yet.
            log.warning("%s: attempt %d failed: %s; again in %.3g s", where, attempt, what, delay)
            return Step("again", delay, f"it failed with {what}", failed=True, is_aside=True)
        log.warning("%s: attempt %d failed: %s; given back in %.3g s", where, attempt, what, delay)
        return Step("give back", _at_most(delay, situation.age))

    def _is_for_good(self, attempt: int, delivery: Delivery, settings: Settings) -> bool:
        if self.dead_letter is OWN_REDRIVE:
            return is_last(delivery, settings)
        return attempt >= self.attempts or (settings.is_limited and attempt >= settings.max_receives)

    def _never(self, reason: str, delivery: Delivery, settings: Settings, where: str) -> Step:
        if self.dead_letter is not OWN_REDRIVE:
            log.error("%s: to the dead letters: %s", where, reason)
            return Step("bury", reason=reason)
        # Beyond its last receive, SQS has not moved it: its dead letters are gone, or the policy is another one now.
        if delivery.receive_count == settings.max_receives:
            log.error("%s: left to the dead letters of the queue: %s", where, reason)
            return Step("leave", reason=reason)
        delay = delay_after(delivery.receive_count, FAILED_DELAY)
        log.warning(
            "%s: receive %d of %d, given back in %.3g s: %s",
            *(where, delivery.receive_count, settings.max_receives, delay, reason),
        )
        return Step("give back", delay, reason)

    def buried(self, reason: str, address: Address | None) -> None:
        """Report that the message is a dead letter now."""
        buried(address or Address("", self.operation, ""), reason)

    def refused(self, code: str, reason: str, delivery: Delivery, settings: Settings, age: float) -> Step:
        """Decide what to do with a message that the dead-letter queue did not take. It is never lost by that."""
        where = self.found_at(delivery, None)
        log.error("%s: the dead-letter queue did not accept a dead letter: %s", where, code)
        limit = VISIBILITY_MAX if is_last(delivery, settings) else self.unacked_max
        if age + DEAD_LETTER_DELAY > limit:
            return Step("give back", SOON)
        return Step("bury", DEAD_LETTER_DELAY, reason, is_aside=True)

    def left(self, step: Step, delivery: Delivery, settings: Settings, where: str) -> Step:
        """Decide what to do, when the worker leaves, with a message that waits in place for this step."""
        if step.action == "bury":
            return step._replace(delay=0.0)
        if is_last(delivery, settings):
            reason = f"it was the last of {settings.max_receives} receives, and waited: {step.reason}"
            return self._never(reason, delivery, settings, where)
        return Step("give back")


def rules(operation: str, queue: str, dead_letter: object, attempts: int, unacked_max: Duration, waits: Waits) -> Rules:
    """Check the options, and return the rules."""
    check_url(queue, "queue")
    if not isinstance(dead_letter, DeadLetter):
        check_url(dead_letter, "dead_letter", ", or OWN_REDRIVE for the queue that the redrive policy names")
    if dead_letter == queue:
        raise UsageError("dead_letter= is the queue itself: its dead letters would come back again and again")
    kept = seconds(unacked_max, "unacked_max")
    if kept >= VISIBILITY_MAX:
        raise UsageError(
            f"unacked_max={unacked_max!r} has to be less than 12 hours, after which SQS delivers a message again in "
            "any case"
        )
    chosen: Any = dead_letter
    return Rules(operation, chosen, at_least(1, attempts, "attempts"), kept, waits)


def check_url(url: object, name: str, more: str = "") -> None:
    if not isinstance(url, str) or "://" not in url:
        raise UsageError(
            f"{name}={url!r} is the URL of a queue, such as client.get_queue_url(QueueName=…)['QueueUrl'] tells{more}"
        )


def name_of(url: str) -> str:
    """Return the name of a queue, which is the last part of its URL and of its ARN."""
    return url.rstrip("/").replace(":", "/").rpartition("/")[2]


def is_last(delivery: Delivery, settings: Settings) -> bool:
    """Return whether SQS will not deliver this message again, but move it to the dead letters of the queue."""
    return settings.is_limited and delivery.receive_count >= settings.max_receives


def _at_most(delay: float, age: float) -> float:
    return max(0.0, min(delay, VISIBILITY_MAX - age))


def _failed_for_good(attempt: int, what: str, settings: Settings) -> str:
    if not settings.is_limited:
        return times_failed(attempt, what)
    return f"its attempt {attempt} of {settings.max_receives} receives failed with {what}"
