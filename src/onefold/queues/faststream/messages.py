"""FastStream's messages on each broker: what a handler's guard reads of one, and how its verdict settles it.

A message that has to come later waits in place where the broker counts what is given back, or cannot take it back; on
NATS JetStream it is given back with a delay.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple

from faststream import AckPolicy
from faststream.exceptions import AckMessage, HandlerException, NackMessage, RejectMessage

from onefold import UsageError
from onefold.queues._nats.consumer import SEQUENCE_HEADER, STREAM_HEADER, SUBJECT_HEADER
from onefold.queues._rabbitmq.consumer import EXCHANGE_HEADER, ROUTING_KEY_HEADER
from onefold.queues._shared.dead_letters import DEAD_LETTER_DELAY
from onefold.queues._shared.jobs.handler import Ended, Framework, GuardedJob, JobCall
from onefold.queues._shared.jobs.waits import HELD
from onefold.queues._shared.logs import buried, waits_of
from onefold.queues._shared.verdict import HELD_DELAY, SOON, HandlerRaised, Later, Never
from onefold.queues.faststream import letters
from onefold.queues.keys import Message

FRAMEWORK: Final = Framework(
    "handler", (), (HandlerException,), "FastStream's AckMessage, NackMessage and RejectMessage"
)

log = logging.getLogger("onefold.queues.faststream")


# How far up its calls a subscriber is looked for when it starts.
FRAMES_MAX: Final = 20


class Way(NamedTuple):
    """How the messages of one broker are given back."""

    # How long one may wait in place, in seconds.
    in_place: float
    # A nack has a delay, and does not count.
    delays: bool = False
    # A rejected message leaves its queue; otherwise it has to be acknowledged.
    rejects: bool = True
    # Nothing is ever acknowledged: a message is lost with its worker.
    is_unreliable: bool = False


# RabbitMQ counts what is given back (quorum queues), and closes the channel of a consumer that keeps a message for
# 30 minutes. Kafka gives the partitions of a consumer to another if it does not poll for 5 minutes. A Redis stream
# delivers nothing again by itself.
RABBITMQ: Final = Way(15 * 60.0)
KAFKA: Final = Way(4 * 60.0, rejects=False)
JETSTREAM: Final = Way(0.0, delays=True)
REDIS_STREAM: Final = Way(math.inf, rejects=False)
UNRELIABLE: Final = Way(math.inf, rejects=False, is_unreliable=True)


class Delivery(NamedTuple):
    """A message of FastStream's, and how its broker takes it back."""

    native: Any
    subscriber: Any
    way: Way
    queue: str
    message: Message
    # How often the broker has delivered it before, if it counts.
    delivered_before: int = 0
    # Where it came from, in the headers by which `onefold redrive` finds that.
    origin: Mapping[str, str] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], held: int) -> JobCall:
        headers = {**self.message.headers, HELD: self.delivered_before + held}
        return JobCall(self.queue, str(self.message.position), headers, args, kwargs, self.message)


class Step(NamedTuple):
    """The next thing to do with a message, after the delay."""

    # `again`: deliver it in place. `bury`: to the dead letters.
    action: Literal["return", "raise", "again", "bury"]
    delay: float = 0.0
    error: BaseException | None = None
    reason: str = ""
    is_limited: bool = False


# The message whose handler is called.
CURRENT: Final[ContextVar[Delivery]] = ContextVar("onefold_faststream_delivery")


def handler_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler as a guard calls it: one that acknowledges by an exception is done."""
    if inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            try:
                return await handler(*args, **kwargs)
            except AckMessage:
                return None

        return awaited
    if not inspect.isroutine(handler) or inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        # What it is instead is refused elsewhere.
        return handler

    @functools.wraps(handler)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return handler(*args, **kwargs)
        except AckMessage:
            return None

    return called


def delivery_of(message: Any, subscriber: Any) -> Delivery:
    """Return a message of any broker as a guard reads it."""
    raw, headers = message.raw_message, message.headers
    body = message.body if isinstance(message.body, bytes) else b""
    match letters.broker_of(message):
        case "rabbit":
            # A delivery tag is no position: each channel counts from 1, and another message has the same.
            known, queue = Message(body, headers, raw.message_id), str(raw.routing_key or "")
            origin = {EXCHANGE_HEADER: str(raw.exchange or ""), ROUTING_KEY_HEADER: queue}
            return Delivery(message, subscriber, RABBITMQ, queue, known, origin=origin)
        case "nats":
            return _of_nats(message, subscriber, body)
        case "kafka" | "confluent":
            topic, partition, offset = (_value(raw, name) for name in ("topic", "partition", "offset"))
            known = Message(body, headers, None, f"{topic}/{partition}/{offset}")
            spot = {"topic": topic, "partition": partition, "offset": offset}
            origin = {f"x-onefold-{name}": str(value) for name, value in spot.items()}
            return Delivery(message, subscriber, KAFKA, str(topic), known, origin=origin)
        case "redis" if isinstance(raw, Mapping):
            ids = raw.get("message_ids") or ()
            position = ids[0].decode() if ids else None
            way = REDIS_STREAM if ids and _is_kept_pending(subscriber) else UNRELIABLE
            return Delivery(
                message, subscriber, way, str(raw.get("channel", "")), Message(body, headers, None, position)
            )
    return Delivery(message, subscriber, UNRELIABLE, "", Message(body, headers))


def _of_nats(message: Any, subscriber: Any, body: bytes) -> Delivery:
    raw, headers = message.raw_message, message.headers
    if _is_batch(raw):
        # It is refused, and given back: only pulled messages come in batches, and JetStream keeps them.
        return Delivery(message, subscriber, JETSTREAM, "", Message(body, headers))
    queue = str(getattr(raw, "subject", ""))
    if not str(getattr(raw, "reply", "")).startswith("$JS.ACK."):
        return Delivery(message, subscriber, UNRELIABLE, queue, Message(body, headers))
    # On use: it needs nats-py.
    from onefold.queues._nats.messages import origin_of

    stream, consumer, delivered, sequence, _ = origin_of(raw.reply)
    facts = Message(body, headers, headers.get("Nats-Msg-Id"), f"{stream}.{consumer}.{sequence}")
    origin = {SUBJECT_HEADER: queue, STREAM_HEADER: str(stream), SEQUENCE_HEADER: str(sequence)}
    return Delivery(message, subscriber, JETSTREAM, queue, facts, max(0, int(delivered) - 1), origin)


def _value(raw: Any, name: str) -> Any:
    """Return a fact of a record: an attribute with aiokafka, a method with confluent-kafka."""
    found = getattr(raw, name, "")
    return found() if callable(found) else found


def _is_kept_pending(subscriber: Any) -> bool:
    """Return whether Redis keeps a message of this stream until it is acknowledged."""
    stream = getattr(subscriber, "stream_sub", None)
    return bool(getattr(stream, "group", None)) and not getattr(stream, "no_ack", False)


def _is_batch(raw: Any) -> bool:
    """Return whether this is several messages: with Redis, those that one entry of a mapping has."""
    return isinstance(raw.get("data") if isinstance(raw, Mapping) else raw, (list, tuple))


def check_starting(frame: Any) -> None:
    """Refuse the subscriber that starts here, if FastStream acknowledges its messages before any handler is called."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        policy = getattr(frame.f_locals.get("self"), "ack_policy", None)
        if policy is AckPolicy.ACK_FIRST:
            raise UsageError(
                "the subscriber of a guarded handler has AckPolicy.ACK_FIRST, the default on Kafka: a message whose "
                "worker dies would be lost, so it does not start. Use ack_policy=AckPolicy.NACK_ON_ERROR"
            )
        if policy is not None:
            return
        frame = frame.f_back


class Rules:
    """Decides what becomes of the messages of one handler, and reports it."""

    def __init__(self, job: GuardedJob, dead_letter: Any, unacked_max: float | None) -> None:
        self._job = job
        self._dead_letter = dead_letter
        self._unacked_max = unacked_max
        self._has_warned = False

    def refused(self, delivery: Delivery) -> Ended | None:
        """Return the verdict on a message of a subscriber that cannot be guarded. Its messages wait: none is lost."""
        policy = getattr(delivery.subscriber, "ack_policy", None)
        why = ""
        if _is_batch(delivery.native.raw_message):
            why = "it has batch=True, and a guard takes one message at a time"
        elif delivery.way.is_unreliable:
            self._warn(delivery)
        elif policy is AckPolicy.ACK_FIRST:
            why = "it has AckPolicy.ACK_FIRST, and a message whose worker dies is lost: use NACK_ON_ERROR"
        elif policy is AckPolicy.MANUAL:
            why = "it has AckPolicy.MANUAL, and nobody would acknowledge a duplicate: use NACK_ON_ERROR"
        if not why:
            return None
        mistake = UsageError(f"{self._job.operation}: its subscriber cannot be guarded, and nothing ran: {why}")
        return Ended(Later(HELD_DELAY, str(mistake), error=mistake), error=mistake)

    def _warn(self, delivery: Delivery) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: this subscriber has no acknowledgements: a message whose worker dies is lost, and no guard brings "
                "it back",
                self._job.found_at(delivery.call((), {}, 0)),
            )

    def after(self, delivery: Delivery, call: JobCall, ended: Ended, waited: float) -> Step:
        """Decide what to do with a message that came this many seconds ago."""
        job, error = self._job, ended.error
        match ended.verdict:
            case HandlerRaised():
                assert error is not None
                job.tell_failed(log, call, error)
                return Step("raise", error=error)
            case Never(reason):
                return self._never(delivery, call, reason, error)
            case Later() as later:
                return self._later(delivery, call, later, waited)
        # Done, and perhaps its result was not kept: then there is nothing to publish.
        return Step("return") if error is None else Step("raise", error=AckMessage())

    def _never(self, delivery: Delivery, call: JobCall, reason: str, error: BaseException | None) -> Step:
        if self._dead_letter is not None:
            log.error("%s: to the dead letters: %s", self._job.found_at(call), reason)
            return Step("bury", reason=reason)
        self._job.tell_rejected(log, call, reason)
        settled: BaseException = RejectMessage() if delivery.way.rejects else AckMessage()
        settled.__cause__ = error
        return Step("raise", error=settled)

    def _later(self, delivery: Delivery, call: JobCall, later: Later, waited: float) -> Step:
        way, where = delivery.way, self._job.found_at(call)
        if way.delays:
            self._tell(where, later)
            return Step("raise", error=NackMessage(delay=later.delay))
        limit = way.in_place if self._unacked_max is None else min(self._unacked_max, way.in_place)
        if math.isinf(way.in_place) or waited + later.delay <= limit:
            self._tell(where, later)
            return Step("again", later.delay, is_limited=later.limited)
        if later.limited:
            return self._never(delivery, call, later.reason, later.error)
        self._tell(where, later._replace(delay=SOON))
        # Not at once, or it would be redelivered at once.
        return Step("raise", SOON, NackMessage())

    def _tell(self, where: str, later: Later) -> None:
        waits_of(self._job.guard).tell(log, where, later)

    async def buried(self, delivery: Delivery, call: JobCall, reason: str, waited: float) -> Step:
        """Publish a dead letter. Return what settles the message, or what to do if no broker takes it."""
        address = self._job.address_of(call)
        headers = letters.headers_of(
            delivery.message.headers, delivery.message.message_id, address, reason, delivery.origin
        )
        try:
            await letters.published(self._dead_letter, delivery.native, headers)
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer survives, and the message is kept
            log.error("%s: a dead letter was not accepted: %s", self._job.found_at(call), type(error).__name__)
            later = Later(DEAD_LETTER_DELAY, "its dead letter was not accepted", error=error)
            return self._later(delivery, call, later, waited)
        buried(address, reason)
        return Step("raise", error=AckMessage())
