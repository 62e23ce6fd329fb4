"""RabbitMQ: a dead letter is measured as it is written, and loses headers rather than its message."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pytest

from onefold.queues._rabbitmq import aio_pika_messages as _aio_pika_messages
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq import pika_messages as _pika_messages
from onefold.queues._rabbitmq.consumer import FRAME_MAX, Dead, fitted
from onefold.queues._shared.dead_letters import DROPPED_HEADER, REASON_HEADER
from tests.queues.rabbitmq_tools import LIBRARIES, Consumer, Environment, Library, until


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


@pytest.fixture
def environment(rabbitmq_url: str, rabbitmq_name: str) -> Environment:
    return Environment(rabbitmq_url, rabbitmq_name)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/records.db"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rabbitmq_consumer, "FAILED_DELAY", 0.01)
    monkeypatch.setattr(rabbitmq_consumer, "DEAD_LETTER_DELAY", 0.05)


def send(environment: Environment, by: Library, body: bytes, headers: dict[str, Any]) -> None:
    """As either client encodes it: aio-pika writes small numbers in two bytes, pika in five."""
    if by == "pika":
        environment.send(body, headers=headers)
        return

    async def story() -> None:
        async with await aio_pika.connect(environment.url) as connection:
            channel = await connection.channel()
            await channel.default_exchange.publish(aio_pika.Message(body, headers=headers), environment.queue)

    asyncio.run(story())


class Called:
    """A handler that notes that it was called."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, delivery: Any) -> None:
        self.bodies.append(delivery.body)


# What fits into a frame as it comes, and, with the reason or encoded by the other client, not as it would go.
LARGE: list[tuple[Library, dict[str, Any]]] = [
    ("pika", {"counts": [1] * 26_200}),
    ("pika", {"tables": {f"k{number}": 1 for number in range(11_000)}}),
    ("pika", {"texts": ["a"] * 21_835}),
    ("pika", {f"h{number}": "a" * 60 for number in range(1_850)}),
    ("aio-pika", {"counts": [1] * 60_000}),
    ("aio-pika", {"flags": [True] * 60_000}),
]


@pytest.mark.parametrize(("by", "headers"), LARGE, ids=lambda one: one if isinstance(one, str) else next(iter(one)))
def test_one_message_does_not_end_the_connection_of_its_consumer(
    library: Library, environment: Environment, store: str, by: Library, headers: dict[str, Any]
) -> None:
    handle = Called()
    send(environment, by, b"bad", headers)
    environment.send_keyed("pay-1", b"good")

    with Consumer(library, environment, store, handle) as consumer:
        properties, body = environment.letter()
        until(lambda: handle.bodies == [b"good"], "the good one ran")
        until(lambda: consumer.acks == 2, "both are acknowledged")

    assert body == b"bad"
    assert properties.headers[REASON_HEADER] == "it has no key"
    assert environment.count() == 0


# The rule.


def pika_size(properties: dict[str, Any]) -> int:
    return _pika_messages.encoded_size(properties)


def aio_pika_size(properties: dict[str, Any]) -> int:
    return _aio_pika_messages.encoded_size(properties)


@pytest.fixture(params=[pika_size, aio_pika_size], ids=["pika", "aio-pika"])
def size(request: pytest.FixtureRequest) -> Any:
    return request.param


def dead(**headers: Any) -> Dead:
    ours = {REASON_HEADER: "because", "x-onefold-operation": "charge"}
    return Dead("dead", b"body", {"headers": {**headers, **ours}, "message_id": "m" * 200, "delivery_mode": 2})


def test_what_fits_is_left_as_it_is(size: Any) -> None:
    letter = dead(kept="yes", at=dt.datetime.now(dt.UTC), price=decimal.Decimal("4.2"), table={"a": [1]})

    assert fitted(letter, size, FRAME_MAX) is letter


def test_the_largest_go_first_and_are_named(size: Any) -> None:
    letter = fitted(dead(small="yes", large="a" * 2_000, larger="a" * 3_000), size, 4_096)

    assert letter.properties["headers"]["small"] == "yes"
    assert letter.properties["headers"]["large"] == "a" * 2_000
    assert letter.properties["headers"][DROPPED_HEADER] == "larger"
    assert letter.properties["headers"][REASON_HEADER] == "because"
    assert size(letter.properties) < 4_096


@pytest.mark.parametrize(
    "value", [object, 1 << 80, "\ud800", {"deep": object}, [{"a": "\ud800"}], decimal.Decimal(1 << 40)], ids=repr
)
def test_what_cannot_be_written_is_dropped(size: Any, value: Any) -> None:
    letter = fitted(dead(kept="yes", bad=value), size, FRAME_MAX)

    assert letter.properties["headers"]["kept"] == "yes"
    assert size(letter.properties) < FRAME_MAX
    if "bad" not in letter.properties["headers"]:
        assert letter.properties["headers"][DROPPED_HEADER] == "bad"


def test_a_property_that_cannot_be_written_takes_the_others_along(size: Any) -> None:
    letter = dead(kept="yes")
    broken = fitted(letter._replace(properties=letter.properties | {"message_id": "m" * 300}), size, FRAME_MAX)

    assert broken.properties.keys() == {"headers", "delivery_mode"}
    assert broken.properties["headers"]["kept"] == "yes"
    assert broken.properties["headers"][REASON_HEADER] == "because"
    assert broken.body == b"body"


def test_a_connection_without_a_limit_has_the_usual_one(size: Any) -> None:
    letter = fitted(dead(large="a" * FRAME_MAX), size, 0)

    assert letter.properties["headers"][DROPPED_HEADER] == "large"


def test_the_limit_is_that_of_the_connection(rabbitmq_url: str) -> None:
    parameters = pika.URLParameters(rabbitmq_url)
    parameters.frame_max = 8_192
    with pika.BlockingConnection(parameters) as connection:
        assert _pika_messages.frame_max_of(connection) == 8_192

    async def story() -> int:
        async with await aio_pika.connect(rabbitmq_url) as connection:
            channel: Any = await (await connection.channel()).get_underlay_channel()
            return _aio_pika_messages.frame_max_of(channel.connection)

    assert asyncio.run(story()) == FRAME_MAX


def test_a_senders_header_that_is_named_like_ours_is_the_senders(size: Any) -> None:
    letter = fitted(dead(**{"x-onefold-foo": "a" * 5_000}), size, 4_096)

    assert letter.properties["headers"][DROPPED_HEADER] == "x-onefold-foo"
    assert letter.properties["headers"][REASON_HEADER] == "because"
    assert size(letter.properties) < 4_096
