"""FastStream: the promises on RabbitMQ, NATS JetStream, Kafka (librdkafka's mock cluster) and Redis streams."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import aio_pika
import pytest
from faststream import AckPolicy
from faststream.exceptions import AckMessage, NackMessage

from onefold import AsyncGuard, Event, Guard, UsageError
from onefold.queues import faststream as onefold_faststream
from onefold.queues.faststream import guarded, send
from onefold.queues.keys import body, field, header
from onefold.redrive.brokers import open_letters
from onefold.stores.memory import AsyncMemoryStore
from tests.queues.faststream_tools import (
    KINDS,
    Place,
    batches,
    broker_of,
    jetstream,
    left,
    letters,
    new_place,
    publish,
    publisher,
    running,
    subscriber,
    until,
)
from tests.support import in_own_context, in_time


class Heard:
    """What a guard has told, by kind."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def times(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)


# The header of a dead letter with the queue that it came from. An entry of a Redis stream has none: its headers are
# in FastStream's envelope, which nobody else reads.
ORIGINS: Final = {"rabbitmq": "x-onefold-routing-key", "nats": "x-onefold-subject", "kafka": "x-onefold-topic"}


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    return new_place(request, request.param)


@pytest.fixture
def rabbitmq(request: pytest.FixtureRequest) -> Place:
    """For what is the same with every broker."""
    return new_place(request, "rabbitmq")


@pytest.mark.parametrize("kind", ["async", pytest.param("sync", marks=pytest.mark.more)])
def test_duplicates_of_a_finished_message_are_acknowledged_and_their_result_is_published_again(
    place: Place, kind: str
) -> None:
    heard, ran = Heard(), list[int]()

    async def awaited(amount: int, note: str = "") -> str:
        ran.append(amount)
        return f"paid {amount}"

    def called(amount: int, note: str = "") -> str:
        ran.append(amount)
        return f"paid {amount}"

    async def story() -> None:
        broker = broker_of(place)
        guard: Any = AsyncGuard("memory:", on_event=heard) if kind == "async" else Guard("memory:", on_event=heard)
        handler: Any = guarded(guard, "charge", key=header())(awaited if kind == "async" else called)
        subscriber(broker, place)(publisher(broker, place, place.dead)(handler))
        async with running(broker, place):
            for _ in range(3):
                await publish(broker, place, {"amount": 5}, key="pay-1")
            await until(lambda: heard.times("replayed") == 2)
        assert await left(place) == 0
        assert len(await letters(place)) == (1 if place.kind == "nats" else 3)

    in_time(story())
    assert ran == [5]


def test_a_message_that_runs_elsewhere_comes_later_and_is_not_acknowledged(place: Place) -> None:
    heard, ran = Heard(), list[str]()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def elsewhere() -> None:
        entered.set()
        await leave.wait()

    async def story() -> None:
        store, broker = AsyncMemoryStore(), broker_of(place)
        guard, other = AsyncGuard(store, on_event=heard), AsyncGuard(store)

        @subscriber(broker, place)
        @guarded(guard, "charge", key=header(), wait=0)
        async def charge(amount: int, note: str = "") -> None:
            ran.append("here")

        busy = in_own_context(other.run("charge", "pay-1", elsewhere))
        await entered.wait()
        async with running(broker, place):
            await publish(broker, place, {"amount": 5}, key="pay-1")
            await until(lambda: heard.times("refused") >= 1)
            leave.set()
            await busy
            # On a Redis stream the second subscriber may have claimed it meanwhile, and then both are answered.
            await until(lambda: heard.times("replayed") >= 1)
        assert await left(place) == 0
        # It was asked once more, a second later: not in a hot loop.
        assert heard.times("refused") <= 4

    in_time(story())
    assert ran == []


def test_a_failing_handler_is_left_to_the_policy_of_its_subscriber(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker = broker_of(place)

        @subscriber(broker, place)
        @guarded(AsyncGuard("memory:"), "charge", key=header())
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)
            if len(ran) == 1:
                raise ValueError("secret 4711")

        async with running(broker, place):
            await publish(broker, place, {"amount": 5}, key="pay-1")
            await until(lambda: len(ran) == 2)
        assert await left(place) == 0

    in_time(story())
    lines = [one.getMessage() for one in caplog.records if one.name == "onefold.queues.faststream"]
    assert ["failed: ValueError" in line and "4711" not in line for line in lines] == [True]


def test_a_handler_that_raises_a_cancellation_of_its_own_is_tried_again_and_stops_no_subscriber(place: Place) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker = broker_of(place)

        @subscriber(broker, place)
        @guarded(AsyncGuard("memory:"), "charge", key=header())
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)
            if ran == [5]:
                awaited = asyncio.get_running_loop().create_future()
                awaited.cancel()
                await awaited

        async with running(broker, place):
            for amount in (5, 6):
                await publish(broker, place, {"amount": amount}, key=f"pay-{amount}")
            await until(lambda: sorted(ran) == [5, 5, 6])
        assert await left(place) == 0

    in_time(story())


def test_what_never_can_run_goes_to_the_dead_letters_with_its_reason(place: Place) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker = broker_of(place)
        dead = publisher(broker, place, place.dead)

        @subscriber(broker, place)
        @guarded(AsyncGuard("memory:"), "charge", key=header(), payload=body(), dead_letter=dead)
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)

        async with running(broker, place):
            await publish(broker, place, {"amount": 5}, key="pay-1")
            await until(lambda: ran == [5])
            await publish(broker, place, {"amount": 6}, key="pay-1", trace="t-1")
            await publish(broker, place, {"amount": 7}, key="pay-2")
            await until(lambda: ran == [5, 7])
        assert await left(place) == 0
        (found,) = await letters(place)
        assert found["x-onefold-reason"].startswith("KeyReused: charge [key ")
        assert (found["x-onefold-operation"], found["trace"]) == ("charge", "t-1")
        assert "pay-1" not in found["x-onefold-reason"]
        # By which `onefold redrive` finds the way back.
        assert ORIGINS.get(place.kind) is None or found[ORIGINS[place.kind]] == place.name

    in_time(story())


@pytest.mark.parametrize("place", ["rabbitmq", "nats"], indirect=True)
def test_a_dead_letter_is_sent_back_by_onefold_redrive(place: Place) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker = broker_of(place)
        dead = publisher(broker, place, place.dead)

        @subscriber(broker, place)
        @guarded(AsyncGuard("memory:"), "charge", key=header(), payload=body(), dead_letter=dead)
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)

        async with running(broker, place):
            await publish(broker, place, {"amount": 5}, key="pay-1")
            await publish(broker, place, {"amount": 6}, key="pay-1")
            await publish(broker, place, {"amount": 7}, key="pay-2")
            await until(lambda: ran == [5, 7])

    in_time(story())
    found = open_letters(place.url, place.dead)
    (letter,) = found.letters()
    assert (letter.origin, letter.operation) == (place.name, "charge")
    assert letter.age is not None
    found.send(letter, letter.origin, {})
    found.remove(letter)
    found.close()
    assert in_time(left(place)) == 1


def test_a_dead_letter_that_no_queue_takes_keeps_its_message(rabbitmq: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        broker = broker_of(rabbitmq, graceful_timeout=0.1)
        nowhere = publisher(broker, rabbitmq, f"{rabbitmq.dead}-elsewhere")

        @subscriber(broker, rabbitmq)
        @guarded(AsyncGuard("memory:"), "charge", key=header(), dead_letter=nowhere)
        async def charge(amount: int, note: str = "") -> None: ...

        async with running(broker, rabbitmq):
            await publish(broker, rabbitmq, {"amount": 5})
            await until(lambda: "a dead letter was not accepted: NotTaken" in caplog.text)
        assert await left(rabbitmq) == 1

    in_time(story())


def test_a_dead_letter_of_rabbitmq_is_kept_on_disk_with_its_properties_and_goes_nowhere_else(rabbitmq: Place) -> None:
    other = f"{rabbitmq.name}-other"
    forged = {"x-onefold-digest": "5a1f0c93be27", "x-onefold-routing-key": other, "x-onefold-exchange": ""}

    async def story() -> None:
        broker = broker_of(rabbitmq)

        @subscriber(broker, rabbitmq)
        @guarded(AsyncGuard("memory:"), "charge", key=header(), dead_letter=publisher(broker, rabbitmq, rabbitmq.dead))
        async def charge(amount: int, note: str = "") -> None: ...

        async with running(broker, rabbitmq), await aio_pika.connect(rabbitmq.url) as connection:
            channel = await connection.channel()
            copies = await channel.declare_queue(other, exclusive=True)
            dead = await channel.get_queue(rabbitmq.dead)
            sent = aio_pika.Message(
                b'{"amount": 5}', message_id="m-1", content_type="application/json", headers={"CC": [other], **forged}
            )
            await channel.default_exchange.publish(sent, rabbitmq.name)
            letter = None
            while letter is None:
                letter = await dead.get(no_ack=True, fail=False)
            assert (letter.delivery_mode, letter.message_id) == (aio_pika.DeliveryMode.PERSISTENT, "m-1")
            assert letter.content_type == "application/json"
            ours = ("reason", "operation", "time", "exchange", "routing-key")
            assert set(letter.headers) == {f"x-onefold-{name}" for name in ours}
            assert letter.headers["x-onefold-routing-key"] == rabbitmq.name
            assert await copies.get(no_ack=True) is not None, "the sender's own copy"
            assert await copies.get(no_ack=True, fail=False) is None

    in_time(story())


@pytest.mark.parametrize("name", ["Nats-Expected-Last-Sequence", "Nats-Rollup"])
def test_what_a_header_says_to_jetstream_is_not_said_of_a_dead_letter(
    request: pytest.FixtureRequest, name: str
) -> None:
    place = new_place(request, "nats")

    async def story() -> None:
        broker = broker_of(place)

        @subscriber(broker, place)
        @guarded(AsyncGuard("memory:"), "charge", key=header(), dead_letter=publisher(broker, place, place.dead))
        async def charge(amount: int, note: str = "") -> None: ...

        async with running(broker, place), jetstream(place) as js:
            config = (await js.stream_info(place.name)).config
            config.allow_rollup_hdrs = True
            await js.update_stream(config)
            await js.publish(place.dead, b"an earlier letter")
            value = "1" if name.startswith("Nats-Expected") else "sub"
            headers = {name: value, "Nats-Msg-Id": "m-1", "content-type": "application/json"}
            await js.publish(place.name, b'{"amount": 5}', headers=headers)
            letter: Any = None
            while letter is None or letter.data == b"an earlier letter":
                letter = await js.get_last_msg(place.name, place.dead)
            state = (await js.stream_info(place.name, subjects_filter=place.dead)).state
        assert state.subjects == {place.dead: 2}
        assert not {one.lower() for one in letter.headers} & {name.lower(), "nats-msg-id"}
        assert letter.headers["x-onefold-message-id"] == "m-1"

    in_time(story())


def test_without_a_publisher_it_is_rejected_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR and "onefold" in one.name]

    async def story() -> None:
        broker = broker_of(place)

        @subscriber(broker, place)
        @guarded(AsyncGuard("memory:"), "charge", key=header())
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)

        async with running(broker, place):
            await publish(broker, place, {"amount": 6})
            await publish(broker, place, {"amount": 6}, key=" ")
            await publish(broker, place, {"amount": 7}, key="pay-2")
            await until(lambda: ran == [7] and len(told()) == 2)
        assert await left(place) == 0
        assert len(await letters(place)) == (2 if place.kind == "rabbitmq" else 0)

    in_time(story())
    assert [line.rpartition("never again: ")[2].partition(":")[0] for line in told()] == ["MissingKey"] * 2


def test_a_workers_own_mistake_buries_nothing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker, guard = broker_of(place, graceful_timeout=0.01), AsyncGuard("memory:")

        @subscriber(broker, place)
        @guarded(guard, "charge", key=header())
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)

        await guard.aclose()
        async with running(broker, place):
            await publish(broker, place, {"amount": 5}, key="pay-1")
            await until(lambda: "again in 60 s" in caplog.text)
        assert await left(place) == 1

    in_time(story())
    assert ran == []


def test_a_subscriber_that_nobody_acknowledges_for_runs_nothing(
    rabbitmq: Place, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker = broker_of(rabbitmq, graceful_timeout=0.01)

        @subscriber(broker, rabbitmq, AckPolicy.MANUAL)
        @guarded(AsyncGuard("memory:"), "charge", key=header())
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)

        async with running(broker, rabbitmq):
            await publish(broker, rabbitmq, {"amount": 5}, key="pay-1")
            await until(lambda: "it has AckPolicy.MANUAL" in caplog.text)
        assert await left(rabbitmq) == 1

    in_time(story())
    assert ran == []


def test_a_broker_that_passes_no_message_runs_nothing_and_buries_nothing(
    rabbitmq: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(onefold_faststream, "HELD_DELAY", 0.1)

    async def story() -> None:
        broker = broker_of(rabbitmq, graceful_timeout=0.01, apply_types=False)

        @subscriber(broker, rabbitmq, AckPolicy.REJECT_ON_ERROR)
        @guarded(AsyncGuard("memory:"), "charge", key=header())
        async def charge(amount: Any) -> None:
            ran.append(amount)

        async with running(broker, rabbitmq):
            await publish(broker, rabbitmq, {"amount": 5}, key="pay-1")
            # It was given back, and has come again.
            await until(lambda: caplog.text.count("needs apply_types=True") >= 2)
        assert await left(rabbitmq) == 1
        assert await letters(rabbitmq) == []

    in_time(story())
    assert ran == []


def test_a_subscriber_that_acknowledges_first_does_not_start_and_loses_nothing(rabbitmq: Place) -> None:
    ran: list[int] = []

    def subscribed(policy: AckPolicy) -> Any:
        broker = broker_of(rabbitmq, graceful_timeout=0.01)

        @subscriber(broker, rabbitmq, policy)
        @guarded(guard, "charge", key=header())
        async def charge(amount: int, note: str = "") -> None:
            ran.append(amount)

        return broker

    async def story() -> None:
        # Makes the queue; its guard is closed, so the message waits.
        broker = subscribed(AckPolicy.NACK_ON_ERROR)
        await guard.aclose()
        async with running(broker, rabbitmq):
            await publish(broker, rabbitmq, {"amount": 5}, key="pay-1")
        first = subscribed(AckPolicy.ACK_FIRST)
        with pytest.raises(UsageError, match="does not start"):
            await first.start()
        await first.stop()
        assert await left(rabbitmq) == 1

    guard = AsyncGuard("memory:")
    in_time(story())
    assert ran == []


def test_without_a_policy_a_subscriber_of_kafka_does_not_start() -> None:
    broker = broker_of(Place("kafka", "localhost:1", "charges"))

    @broker.subscriber("charges", group_id="workers")  # type: ignore[untyped-decorator]
    @guarded(AsyncGuard("memory:"), "charge", key=header())
    async def charge(amount: int) -> None: ...

    (only,) = broker.subscribers
    with pytest.raises(UsageError, match="the default on Kafka"):
        in_time(only.start())


@pytest.mark.parametrize("kind", ["nats", "redis"])
def test_a_batch_runs_nothing_and_loses_nothing(
    request: pytest.FixtureRequest, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[Any] = []
    place = new_place(request, kind)

    async def story() -> None:
        broker = broker_of(place, graceful_timeout=0.01)

        async def charge(several: list[Any]) -> None:
            ran.append(several)

        batches(broker, place)(guarded(AsyncGuard("memory:"), "charge", key=header())(charge))
        async with running(broker, place):
            for key in ("pay-1", "pay-2"):
                await publish(broker, place, {"amount": 5}, key=key)
            await until(lambda: "it has batch=True" in caplog.text)
        assert await left(place) >= 1

    in_time(story())
    assert ran == []


def test_a_handler_that_settles_by_an_exception_is_done_or_not(rabbitmq: Place) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker, guard = broker_of(rabbitmq), AsyncGuard("memory:")

        @subscriber(broker, rabbitmq)
        @guarded(guard, "charge", key=field("id"))
        async def charge(id: str, amount: int) -> None:  # noqa: A002
            ran.append(amount)
            if ran.count(amount) == 1:
                raise NackMessage if amount == 6 else AckMessage

        async with running(broker, rabbitmq):
            for amount in (5, 6):
                await publish(broker, rabbitmq, {"id": f"pay-{amount}", "amount": amount})
            await until(lambda: ran.count(6) == 2)
            await publish(broker, rabbitmq, {"id": "pay-5", "amount": 5})
            await publish(broker, rabbitmq, {"id": "pay-7", "amount": 7})
            await until(lambda: 7 in ran)
        assert await left(rabbitmq) == 0

    in_time(story())
    assert sorted(ran) == [5, 6, 6, 7]


def test_a_reply_is_the_stored_result(rabbitmq: Place) -> None:
    ran: list[int] = []

    async def story() -> None:
        broker = broker_of(rabbitmq)

        @subscriber(broker, rabbitmq)
        @guarded(AsyncGuard("memory:"), "charge", key=header())
        async def charge(amount: int, note: str = "") -> str:
            ran.append(amount)
            return f"paid {amount}, {len(ran)}"

        async with running(broker, rabbitmq):
            keyed = {"idempotency-key": "pay-1"}
            answers = [await broker.request({"amount": 5}, rabbitmq.name, headers=keyed) for _ in range(2)]
            assert [await one.decode() for one in answers] == ["paid 5, 1"] * 2

    in_time(story())


def test_what_waits_for_too_long_is_given_back_after_a_pause(rabbitmq: Place) -> None:
    heard, redelivered = Heard(), list[bool]()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def elsewhere() -> None:
        entered.set()
        await leave.wait()

    def noted(message: Any) -> object:
        redelivered.append(bool(message.headers.get("x-delivery-count")))
        return message.headers["idempotency-key"]

    async def story() -> None:
        store, broker = AsyncMemoryStore(), broker_of(rabbitmq)
        guard, other = AsyncGuard(store, on_event=heard), AsyncGuard(store)

        @subscriber(broker, rabbitmq)
        @guarded(guard, "charge", key=noted, wait=0, unacked_max=0)
        async def charge(amount: int, note: str = "") -> None:
            raise AssertionError("it ran twice")

        busy = in_own_context(other.run("charge", "pay-1", elsewhere))
        await entered.wait()
        async with running(broker, rabbitmq):
            await publish(broker, rabbitmq, {"amount": 5}, key="pay-1")
            await until(lambda: len(redelivered) >= 1)
            leave.set()
            await busy
            await until(lambda: heard.times("replayed") >= 1)
        assert await left(rabbitmq) == 0

    in_time(story())
    assert redelivered == [False, True]


def test_send_returns_the_key(rabbitmq: Place) -> None:
    seen: list[Any] = []

    async def story() -> None:
        broker = broker_of(rabbitmq)

        @subscriber(broker, rabbitmq)
        @guarded(AsyncGuard("memory:"), "charge", key=header())
        async def charge(amount: int, note: str = "") -> None:
            seen.append(amount)

        async with running(broker, rabbitmq):
            assert await send(broker, {"amount": 5}, rabbitmq.name, key="pay-1") == "pay-1"
            made = await send(broker.publisher(rabbitmq.name), {"amount": 6})
            assert await send(broker, {"amount": 6}, rabbitmq.name, headers={"Idempotency-Key": made}) == made
            await send(broker, {"amount": 7}, rabbitmq.name)
            await until(lambda: 7 in seen)

    in_time(story())
    assert sorted(seen) == [5, 6, 7]
    assert onefold_faststream.__all__ == ["guarded", "send"]
