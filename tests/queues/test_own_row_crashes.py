"""Workers that are killed with SIGKILL while a row of the business is the record of their message: one effect."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onefold import RecordColumn
from onefold.queues.keys import body
from tests.processes import Stage, child
from tests.queues.kafka_tools import WORKERS, committed, produce, value_of
from tests.queues.rabbitmq_tools import LIBRARIES, Consumer, Environment, Library, until
from tests.queues.test_kafka_crashes import stopping_consumer
from tests.queues.test_rabbitmq_crashes import stopping_before_the_ack

ROW: dict[str, Any] = {"record": RecordColumn("payments", "message_key", fingerprint="fingerprint"), "payload": body()}

# What a killed worker leaves behind: nothing, or the effect without an acknowledgement.
LEFT = {"after the effect": [], "before the ack": [(10,)]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE payments (message_key TEXT PRIMARY KEY, fingerprint TEXT)")
        connection.execute("CREATE TABLE effects (amount INTEGER)")
    return path


def effects(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT amount FROM effects").fetchall()


class Pay:
    """A handler with the documents' own statement."""

    def __init__(self, stage: Stage | None = None) -> None:
        self._stage = stage

    def __call__(self, message: Any, *, tx: sqlite3.Connection) -> None:
        amount = int(message.body if hasattr(message, "body") else value_of(message))
        tx.execute("INSERT INTO payments (message_key) VALUES ('pay-1') ON CONFLICT DO NOTHING")
        tx.execute("INSERT INTO effects VALUES (?)", (amount,))
        if self._stage is not None:
            self._stage.at("after the effect")


def consume(stage: Stage, library: Library, environment: Environment, path: Path) -> None:
    """The part of a consumer of RabbitMQ that is killed on the stage."""
    stopping_before_the_ack(stage)
    with Consumer(library, environment, f"sqlite:///{path}", Pay(stage), prefetch=1, **ROW):
        threading.Event().wait()


@pytest.mark.parametrize("step", sorted(LEFT))
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_killed_consumer_of_rabbitmq_leaves_one_effect(
    library: Library, rabbitmq_url: str, rabbitmq_name: str, path: Path, step: str
) -> None:
    environment = Environment(rabbitmq_url, rabbitmq_name)
    environment.send_keyed("pay-1", b"10", times=3)

    with child(consume, library, environment, path, stops=(step,)) as worker:
        worker.reaches(step)
        worker.kill()
    left = effects(path)
    with Consumer(library, environment, f"sqlite:///{path}", Pay(), **ROW) as consumer:
        until(lambda: consumer.acks == 3, "all are acknowledged")

    assert left == LEFT[step]
    assert effects(path) == [(10,)]
    assert (environment.count(), environment.count(environment.dead)) == (0, 0)


def poll(stage: Stage, client: str, url: str, topic: str, path: Path) -> None:
    """The part of a worker of Kafka that is killed on the stage."""
    name = "session.timeout.ms" if client == "confluent" else "session_timeout_ms"
    options = ROW | {"consumer_kind": stopping_consumer(client, stage), "consumer_config": {name: 1500}}
    with WORKERS[client](url, topic, Pay(stage), store=f"sqlite:///{path}", **options) as worker:
        worker.until(lambda: committed(url, topic, topic) == 3)


@pytest.mark.parametrize(("step", "left"), [("after the effect", []), ("before the commit", [(10,)])])
@pytest.mark.parametrize("client", ["confluent", pytest.param("aiokafka", marks=pytest.mark.more)])
def test_a_killed_worker_of_kafka_leaves_one_effect(
    client: str, kafka_url: str, kafka_topic: str, path: Path, step: str, left: list[Any]
) -> None:
    produce(kafka_url, kafka_topic, *[("pay-1", b"10")] * 3)

    with child(poll, client, kafka_url, kafka_topic, path, stops=(step,)) as first:
        first.reaches(step)
        first.kill()
    found = effects(path)
    with child(poll, client, kafka_url, kafka_topic, path) as second:
        assert second.hear() is None

    assert found == left
    assert effects(path) == [(10,)]
