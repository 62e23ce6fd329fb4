"""The brokers of these tests, and a store of their consumers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from onefold import Guard
from onefold.redrive.brokers import sqs
from services.dynamodb import CREDENTIALS
from tests.redrive.tools import Kafka, Nats, Place, Rabbit, Sqs, Streams

BROKERS: Final = ("rabbitmq", "nats", "kafka", "redis", "sqs")


@pytest.fixture(params=BROKERS)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    found = made(request.param, request, monkeypatch)
    yield found
    found.close()


@pytest.fixture
def rabbit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = made("rabbitmq", request, monkeypatch)
    yield found
    found.close()


def of_kind(kind: str) -> Any:
    """Return the fixture of one broker."""

    @pytest.fixture
    def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
        found = made(kind, request, monkeypatch)
        yield found
        found.close()

    return place


nats_place = of_kind("nats")
redis_place = of_kind("redis")
sqs_place = of_kind("sqs")
kafka_place = of_kind("kafka")


def made(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    name: str = request.getfixturevalue("rabbitmq_name")
    match kind:
        case "rabbitmq":
            return Rabbit(request.getfixturevalue("rabbitmq_url"), name)
        case "nats":
            return Nats(request.getfixturevalue("nats_url"), name)
        case "kafka":
            return Kafka(request.getfixturevalue("kafka_url"), request.getfixturevalue("kafka_topic"))
        case "redis":
            monkeypatch.setattr("onefold.queues.redis_streams.FETCH_SECONDS", 0.05)
            return Streams(request.getfixturevalue("redis_url"), name)
        case _:
            for variable, value in CREDENTIALS.items():
                monkeypatch.setenv(variable, value)
            monkeypatch.setattr(sqs, "WAIT", 0)
            monkeypatch.setattr("onefold.queues._sqs.requests.RECEIVE_SECONDS", 0)
            # Nothing comes back at once.
            monkeypatch.setattr(sqs, "PAUSE", 0.0)
            return Sqs(request.getfixturevalue("dynamodb").url, name)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """With tables, as a consumer's store has."""
    url = f"sqlite:///{tmp_path}/records.db"
    with Guard(url) as guard:
        guard.check()
    return url
