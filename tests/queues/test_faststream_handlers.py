"""FastStream without a server: what is refused when decorating, what a handler gets, and each verdict."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from faststream import AckPolicy, Context, Depends, Header
from faststream.exceptions import AckMessage, NackMessage, RejectMessage
from faststream.kafka import KafkaBroker
from faststream.nats import NatsBroker
from faststream.nats.message import NatsMessage
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from faststream.redis import RedisBroker, RedisMessage, TestRedisBroker

from onefold import AsyncGuard, Event, Guard, Policy, UsageError, current, subscribe
from onefold.events import Kind
from onefold.queues._shared.jobs.handler import Ended, GuardedJob
from onefold.queues._shared.verdict import HELD_DELAY, HELD_MAX, Later, Never
from onefold.queues.faststream import guarded
from onefold.queues.faststream import messages as faststream_messages
from onefold.queues.faststream.messages import Delivery, Rules
from onefold.queues.keys import Message, body, field, header, message_id
from onefold.stores.memory import MemoryStore
from tests.support import Clock, die_running, in_time

KEYED: dict[str, Any] = {"idempotency-key": "pay-1"}


@pytest.fixture
def guard() -> AsyncGuard:
    return AsyncGuard("memory:")


@pytest.fixture
def guard_sync() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


@asynccontextmanager
async def played(broker: Any) -> AsyncIterator[Any]:
    """FastStream's own way to test: everything but the server."""
    tested = TestRedisBroker(broker) if isinstance(broker, RedisBroker) else TestRabbitBroker(broker)
    async with tested:
        yield broker


# What a handler gets.


def test_what_faststream_passes_reaches_the_handler(guard: AsyncGuard) -> None:
    ran: list[Any] = []
    broker = RabbitBroker(logger=None)

    async def tenant() -> str:
        return "ann"

    @broker.subscriber("charges")
    @guarded(guard, "charge", key=header())
    async def charge(
        amount: int,
        message: Annotated[Any, Context("message")],
        trace: Annotated[str, Header()],
        who: Annotated[str, Depends(tenant)],
        note: str = "none",
    ) -> str:
        ran.append((amount, message.headers["trace"], trace, who, note, current().key))
        return "paid"

    async def story() -> None:
        async with played(broker):
            for _ in range(2):
                answer = await broker.request({"amount": 5}, "charges", headers={**KEYED, "trace": "t-1"})
                assert await answer.decode() == "paid"

    in_time(story())
    assert ran == [(5, "t-1", "t-1", "ann", "none", "pay-1")]


def test_a_whole_body_is_one_argument(guard: AsyncGuard) -> None:
    ran: list[Any] = []
    broker = RabbitBroker(logger=None)

    @broker.subscriber("charges")
    @guarded(guard, "charge", key=field("order.id"))
    async def charge(order: dict[str, Any]) -> None:
        ran.append(order["order"]["id"])

    async def story() -> None:
        async with played(broker):
            for number in (1, 1, 2):
                await broker.publish({"order": {"id": number}}, "charges")

    in_time(story())
    assert ran == [1, 2]


def test_a_message_id_is_a_key_only_if_its_sender_has_set_it(guard: AsyncGuard) -> None:
    """FastStream invents one for a message that has none, anew for each delivery."""
    native = SimpleNamespace(
        raw_message=SimpleNamespace(message_id=None, delivery_tag=7, exchange="", routing_key="charges"),
        headers={},
        body=b"",
        message_id="invented",
    )
    made = type("Made", (SimpleNamespace,), {"__module__": "faststream.rabbit.message"})(**vars(native))

    found = faststream_messages.delivery_of(made, None)

    assert (message_id()(found.message), found.message.position, found.queue) == (None, None, "charges")


def test_a_plain_call_is_plain(guard: AsyncGuard, guard_sync: Guard) -> None:
    ran: list[int] = []
    broker = RabbitBroker(logger=None)

    @broker.subscriber("charges")
    @guarded(guard, "charge", key=header())
    async def charge(amount: int) -> int:
        ran.append(amount)
        return amount

    @guarded(guard_sync, "refund", key=header())
    def refund(amount: int) -> int:
        return -amount

    async def story() -> None:
        pending: Any = refund(5)
        assert [await charge(5), await charge(5), await pending] == [5, 5, -5]

    in_time(story())
    assert ran == [5, 5]


# What is refused.


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ("key='id' is only a name", {"key": "id"}),
        ("key=header is not called", {"key": header}),
        ("payload=body is not called", {"payload": body}),
        ("missing_key='maybe'", {"missing_key": "maybe"}),
        ("dead_letter='charges.dead'", {"dead_letter": "charges.dead"}),
        ("every Exception as final", {"final_errors": (Exception,)}),
        ("unacked_max", {"unacked_max": "soon"}),
        ("did you mean 'keep'", {"keeep": 5}),
    ],
)
def test_wrong_options_are_refused_when_decorating(guard: AsyncGuard, told: str, options: dict[str, Any]) -> None:
    async def charge(amount: int) -> None: ...

    with pytest.raises((UsageError, TypeError), match=told):
        guarded(guard, "charge", **{"key": header(), **options})(charge)


def test_what_cannot_be_guarded_is_refused_when_decorating(guard: AsyncGuard, guard_sync: Guard) -> None:
    async def awaited() -> None: ...
    def called() -> None: ...
    def yields() -> Iterator[int]:
        yield 1

    for chosen, function, told in (
        (guard, called, "takes Guard"),
        (guard_sync, awaited, "takes AsyncGuard"),
        (guard_sync, yields, "has a `yield`"),
    ):
        handler: Any = function
        with pytest.raises(UsageError, match=told):
            guarded(chosen, "charge", key=header())(handler)


@pytest.mark.parametrize("decorator", ["subscriber", "publisher"])
def test_a_guard_above_a_decorator_of_faststreams_is_refused(guard_sync: Guard, decorator: str) -> None:
    broker = RabbitBroker(logger=None)

    def charge(amount: int) -> int:
        return amount

    decorated = getattr(broker, decorator)("charges")(charge)
    with pytest.raises(UsageError, match=r"put @guarded\(...\) below"):
        guarded(guard_sync, "charge", key=header())(decorated)


# Verdicts, by broker.


def rules(guard: AsyncGuard, dead_letter: Any = None, unacked_max: float | None = None) -> Rules:
    async def charge() -> None: ...

    handler: Any = guarded(guard, "charge", key=header())(charge)
    job: GuardedJob = handler.__onefold_job__
    return Rules(job, dead_letter, unacked_max)


def delivery(way: faststream_messages.Way, policy: AckPolicy = AckPolicy.NACK_ON_ERROR, raw: Any = None) -> Delivery:
    subscriber, native = SimpleNamespace(ack_policy=policy), SimpleNamespace(raw_message=raw, body=b"")
    return Delivery(native, subscriber, way, "charges", Message(b"", KEYED, position="1"))


BUSY = Later(1.0, "somebody else runs it")
HELD = Later(HELD_DELAY, "it is held", limited=True)
RABBITMQ, KAFKA = faststream_messages.RABBITMQ, faststream_messages.KAFKA
JETSTREAM, REDIS = faststream_messages.JETSTREAM, faststream_messages.REDIS_STREAM


@pytest.mark.parametrize(
    ("way", "later", "waited", "action", "delay", "error"),
    [
        (RABBITMQ, BUSY, 0, "again", 1.0, None),
        (RABBITMQ, BUSY, 15 * 60, "raise", 1.0, NackMessage),
        (RABBITMQ, HELD, 0, "again", 60.0, None),
        (RABBITMQ, HELD, 15 * 60, "raise", 0, RejectMessage),
        (KAFKA, BUSY, 60, "again", 1.0, None),
        (KAFKA, BUSY, 4 * 60, "raise", 1.0, NackMessage),
        (KAFKA, HELD, 4 * 60, "raise", 0, AckMessage),
        (REDIS, BUSY, 10_000, "again", 1.0, None),
        (REDIS, HELD, 10_000, "again", 60.0, None),
        (JETSTREAM, BUSY, 0, "raise", 0, NackMessage),
        (JETSTREAM, HELD, 0, "raise", 0, NackMessage),
    ],
)
def test_what_comes_later_waits_in_place_or_is_given_back(
    guard: AsyncGuard, way: Any, later: Later, waited: float, action: str, delay: float, error: type | None
) -> None:
    given = delivery(way)
    step = rules(guard).after(given, given.call((), {}, 0), Ended(later, error=RuntimeError()), waited)

    assert (step.action, step.delay, type(step.error)) == (action, delay, error or type(None))
    if way is JETSTREAM:
        assert isinstance(step.error, NackMessage)
        assert step.error.extra_options == {"delay": later.delay}


@pytest.mark.parametrize(
    ("way", "error"), [(RABBITMQ, RejectMessage), (JETSTREAM, RejectMessage), (KAFKA, AckMessage), (REDIS, AckMessage)]
)
def test_what_never_can_run_leaves_its_queue(guard: AsyncGuard, way: Any, error: type) -> None:
    heard: list[Event] = []
    given = delivery(way)
    end = subscribe(heard.append)
    step = rules(guard).after(given, given.call((), {}, 0), Ended(Never("no"), error=ValueError()), 0)
    end()

    assert isinstance(step.error, error)
    assert [event.kind for event in heard] == [Kind.BURIED]


def test_a_dead_letter_that_nobody_takes_keeps_the_message(guard: AsyncGuard) -> None:
    async def publish(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody answers")

    async def story() -> None:
        known, given = rules(guard, SimpleNamespace(publish=publish)), delivery(RABBITMQ)
        call = given.call((), {}, 0)
        assert known.after(given, call, Ended(Never("no"), error=ValueError()), 0).action == "bury"
        step = await known.buried(given, call, "no", 0)
        assert (step.action, step.delay) == ("again", 5.0)
        assert isinstance((await known.buried(given, call, "no", 15 * 60)).error, NackMessage)

    in_time(story())


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        (lambda: NatsBroker(logger=None).publisher("charges.dead"), "name the stream"),
        (lambda: RedisBroker().publisher("charges.dead"), "take a stream"),
    ],
)
def test_a_publisher_whose_letters_may_have_no_reader_is_refused(
    guard: AsyncGuard, made: Callable[[], Any], advice: str
) -> None:
    with pytest.raises(UsageError, match=advice):
        guarded(guard, "charge", key=header(), dead_letter=made())


@pytest.mark.parametrize(
    "made",
    [
        lambda: NatsBroker(logger=None).publisher("charges.dead", stream="charges"),
        lambda: RedisBroker().publisher(stream="charges.dead"),
        lambda: RedisBroker().publisher(list="charges.dead"),
        lambda: RabbitBroker(logger=None).publisher("charges.dead"),
        lambda: KafkaBroker(logger=None).publisher("charges.dead"),
    ],
)
def test_other_publishers_are_taken(guard: AsyncGuard, made: Callable[[], Any]) -> None:
    guarded(guard, "charge", key=header(), dead_letter=made())


@pytest.mark.parametrize(
    ("way", "raw"),
    [
        (JETSTREAM, [1, 2]),
        (KAFKA, (1, 2)),
        (REDIS, {"type": "bstream", "data": [{}, {}]}),
        (faststream_messages.UNRELIABLE, {"type": "blist", "data": [b"1", b"2"]}),
    ],
)
def test_a_batch_is_refused_and_its_messages_wait(guard: AsyncGuard, way: Any, raw: Any) -> None:
    ended = rules(guard).refused(delivery(way, raw=raw))

    assert ended is not None
    assert isinstance(ended.verdict, Later)
    assert "batch=True" in ended.verdict.reason


def test_a_subscriber_without_acknowledgements_is_told_once(
    guard: AsyncGuard, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    quiet: Any = None
    broker = RedisBroker(logger=quiet)

    @broker.subscriber(list="charges")
    @guarded(guard, "charge", key=header())
    async def charge(amount: int, note: str = "") -> None:
        ran.append(amount)

    async def story() -> None:
        async with played(broker):
            for _ in range(2):
                await broker.publish({"amount": 5}, list="charges", headers=KEYED)

    in_time(story())
    assert ran == [5]
    told = [one for one in caplog.records if one.levelno == logging.WARNING and "no acknowledgements" in one.message]
    assert len(told) == 1


@pytest.mark.parametrize(("group", "no_ack"), [(None, False), ("workers", True)])
def test_a_stream_that_keeps_nothing_pending_is_told(group: str | None, no_ack: bool) -> None:
    subscriber = SimpleNamespace(stream_sub=SimpleNamespace(group=group, no_ack=no_ack))
    raw: Any = {"type": "stream", "channel": "charges", "data": {}, "message_ids": [b"1-0"]}
    found = faststream_messages.delivery_of(RedisMessage(raw, b"", headers={}), subscriber)

    assert found.way.is_unreliable


def test_a_core_message_of_nats_is_never_acknowledged() -> None:
    raw: Any = SimpleNamespace(subject="charges", reply="_INBOX.1", data=b"")
    found = faststream_messages.delivery_of(NatsMessage(raw, b"", headers={}), None)

    assert found.way.is_unreliable


def test_what_is_held_is_rejected_after_a_bound() -> None:
    clock = Clock()
    store, policy = MemoryStore(clock=clock), Policy(lease=1, after_crash="hold")
    die_running(store, "charge", "pay-1", policy)
    clock.advance(2)
    with Guard(store, policy=policy) as guard:

        def charge() -> None: ...

        handler: Any = guarded(guard, "charge", key=header())(charge)
        job, given = handler.__onefold_job__, delivery(JETSTREAM)
        verdicts = [job.deliver(given._replace(delivered_before=one).call((), {}, 0)).verdict for one in (0, HELD_MAX)]

    assert [type(one) for one in verdicts] == [Later, Never]
