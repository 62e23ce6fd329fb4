"""The rules of a Redis Streams consumer: its entries, and what a verdict means. Pure, except for logs.

Redis Streams cannot give an entry back with a delay. An entry that has to come later stays pending with its worker,
which keeps it from others and tries it again: nothing is counted. A failed attempt is counted by the server.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from onefold import UsageError
from onefold._checks import at_least
from onefold.durations import Duration, seconds
from onefold.queues._shared.dead_letters import (
    DEAD_LETTER_DELAY,
    DIGEST_HEADER,
    DROPPED_HEADER,
    OPERATION_HEADER,
    REASON_HEADER,
    REASON_MAX,
    plain,
)
from onefold.queues._shared.failures import ATTEMPTS, FAILED_DELAY, delay_after, less_often, times_failed
from onefold.queues._shared.logs import Waits, buried, found_at
from onefold.queues._shared.verdict import Ack, HandlerRaised, Later, Never, Verdict, named
from onefold.queues.keys import Message
from onefold.stores.base import Address

log = logging.getLogger("onefold.queues.redis_streams")

STREAM_HEADER: Final = "x-onefold-stream"
GROUP_HEADER: Final = "x-onefold-group"
ENTRY_ID_HEADER: Final = "x-onefold-entry-id"

# The field that `send` puts the body in.
BODY_FIELD: Final = "body"

# After this many seconds without a sign of its worker, an entry is another's. As long as a lease.
MIN_IDLE: Final = 30.0
MIN_IDLE_MIN: Final = 0.1

# A new group gets everything that is in its stream.
BEGINNING: Final = "0"

# A script can pass on some 8,000 values, and each field is two.
FIELDS_MAX: Final = 3_000

Fields = Mapping[bytes, bytes]


class Delivery(NamedTuple):
    """An entry as a handler sees it; `native` has its fields as they came."""

    body: bytes
    # All fields but the body. Their values are bytes.
    headers: Mapping[str, bytes]
    stream: str
    entry_id: str
    # How often it was delivered, this time included: new ones, failed attempts, and those of workers that died.
    times_delivered: int
    native: Any

    @property
    def message(self) -> Message:
        return Message(self.body, self.headers, None, self.entry_id)


class Step(NamedTuple):
    """The action of a worker on an entry, after keeping it for the delay."""

    action: Literal["ack", "again", "bury"]
    delay: float = 0.0
    reason: str = ""
    # Whether the next attempt is a delivery that the server counts.
    is_counted: bool = False


ACKNOWLEDGED: Final = Step("ack")


@dataclass
class Rules:
    """Decides what a consumer does with its entries."""

    operation: str
    stream: str
    group: str
    dead_letter: str
    attempts: int = ATTEMPTS
    min_idle: float = MIN_IDLE
    start: str = BEGINNING
    body_field: str = BODY_FIELD
    waits: Waits = field(default_factory=Waits)

    def delivery(self, entry_id: bytes, fields: Fields, times_delivered: int = 1) -> Delivery:
        """Return an entry as handlers see it. A field name that is not text is shown as far as it is."""
        headers = {name.decode(errors="backslashreplace"): value for name, value in fields.items()}
        body = headers.pop(self.body_field, b"")
        return Delivery(body, headers, self.stream, entry_id.decode(), times_delivered, fields)

    def after(self, verdict: Verdict, delivery: Delivery, age: float, address: Address | None = None) -> Step:
        """Decide what to do with an entry that this worker has had for `age` seconds. The address is its record's."""
        if isinstance(verdict, Ack):
            return ACKNOWLEDGED
        where = self.found_at(address)
        match verdict:
            case Later():
                later = less_often(verdict, waited=age)
                self.waits.tell(log, where, later)
                return Step("again", later.delay, later.reason)
            case HandlerRaised(error):
                return self._failed(error, delivery.times_delivered, where)
            case Never(reason):
                return self._never(reason, where)

    def found_at(self, address: Address | None) -> str:
        """Return how an entry is identified in the log."""
        return found_at(self.stream, address or Address("", self.operation, ""))

    def _failed(self, error: Exception, attempt: int, where: str) -> Step:
        what = named(error)
        log.debug("%s: the handler raised", where, exc_info=error)
        if attempt >= self.attempts:
            return self._never(times_failed(attempt, what), where)
        delay = delay_after(attempt, FAILED_DELAY)
        log.warning("%s: attempt %d failed: %s; again in %.3g s", where, attempt, what, delay)
        return Step("again", delay, what, is_counted=True)

    def _never(self, reason: str, where: str) -> Step:
        log.error("%s: to the dead letters: %s", where, reason)
        return Step("bury", reason=reason)

    def buried(self, reason: str, address: Address | None) -> None:
        """Report that the entry is a dead letter now."""
        buried(address or Address("", self.operation, ""), reason)

    def refused(self, error: Exception, reason: str, where: str) -> Step:
        """Decide what to do with an entry whose dead letter was not accepted. It is never lost because of that."""
        log.error("%s: %s did not accept a dead letter: %s", where, self.dead_letter, type(error).__name__)
        return Step("bury", DEAD_LETTER_DELAY, reason)

    def dead(self, delivery: Delivery, reason: str, address: Address | None = None) -> list[str | bytes]:
        """Return the fields of a dead letter, names and values in turn: those of the entry, and why it is one."""
        ours: dict[bytes, str] = {
            REASON_HEADER.encode(): plain(reason)[:REASON_MAX],
            OPERATION_HEADER.encode(): plain(self.operation),
            STREAM_HEADER.encode(): plain(self.stream),
            GROUP_HEADER.encode(): plain(self.group),
            ENTRY_ID_HEADER.encode(): delivery.entry_id,
        }
        if address is not None and address.key:
            ours[DIGEST_HEADER.encode()] = address.digest
        fields: Fields = delivery.native
        # Not a digest of the sender's: a person may let the record with this digest run again.
        own = {*ours, DIGEST_HEADER.encode()}
        theirs = {name: value for name, value in fields.items() if name not in own}
        if len(theirs) > FIELDS_MAX:
            dropped = [*theirs][FIELDS_MAX:]
            ours[DROPPED_HEADER.encode()] = plain(b", ".join(dropped).decode(errors="replace"))[:REASON_MAX]
            theirs = {name: theirs[name] for name in [*theirs][:FIELDS_MAX]}
        fields_of: list[tuple[bytes, str | bytes]] = [*theirs.items(), *ours.items()]
        return [part for pair in fields_of for part in pair]


def rules(
    operation: str,
    *,
    stream: object,
    group: object,
    dead_letter: object,
    attempts: int,
    min_idle: Duration,
    start: object,
    body_field: object,
    waits: Waits,
) -> Rules:
    """Check the options, and return the rules."""
    names = {"stream": stream, "group": group, "dead_letter": dead_letter, "start": start, "body_field": body_field}
    for option, value in names.items():
        if not isinstance(value, str) or not value:
            raise UsageError(f"{option}={value!r} has to be text: {MEANINGS[option]}")
    if dead_letter == stream:
        raise UsageError(f"dead_letter={dead_letter!r} is the stream itself: its dead letters would come back for ever")
    idle = seconds(min_idle, "min_idle")
    if not MIN_IDLE_MIN <= idle < float("inf"):
        raise UsageError(f"min_idle={min_idle!r} has to be {MIN_IDLE_MIN:g} s or more, and to have an end")
    return Rules(
        operation,
        str(stream),
        str(group),
        str(dead_letter),
        at_least(1, attempts, "attempts"),
        idle,
        str(start),
        str(body_field),
        waits,
    )


MEANINGS: Final = {
    "stream": "the key of a stream",
    "group": "the name of a consumer group",
    "dead_letter": "the key of a stream for dead letters",
    "start": "'0', '$', or the id of an entry",
    "body_field": "the name of a field",
}


def sent_fields(headers: Mapping[Any, Any], body: bytes, body_field: str) -> dict[str, str | bytes | int]:
    """Return the fields of an entry to send: its headers with the key, and its body."""
    if not isinstance(body, bytes):
        raise UsageError(f"the body has to be bytes, not {type(body).__name__}")
    if body_field in headers:
        raise UsageError(f"headers={{{body_field!r}: …}}: that is the field of the body. Nothing was sent")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, (str, bytes, int)) or isinstance(value, bool):
            raise UsageError(f"headers={{{name!r}: …}} has to be text, bytes or a whole number: nothing was sent")
    return {**headers, body_field: body}


def gone_from(stream: str, ids: Iterable[bytes]) -> None:
    """Report entries that were pending, and that somebody has deleted or trimmed from their stream meanwhile."""
    found = [one.decode() for one in ids]
    if found:
        log.error(
            "%s: %d entries were trimmed or deleted before they were done, and are lost, the first of them %s",
            *(stream, len(found), found[0]),
        )
