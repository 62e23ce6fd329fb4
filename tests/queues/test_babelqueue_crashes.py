"""BabelQueue on RabbitMQ: workers that are killed after the effect and before the acknowledgement, and poison."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pika
import pytest
from babelqueue import BabelQueue
from babelqueue.codec import EnvelopeCodec

from onefold import Guard, Policy
from onefold.queues.babelqueue import wrap
from tests.processes import lapse
from tests.support import PATIENCE, PROJECT

URN = "urn:babel:orders:created"

# No pause of the machine outlasts it; after a kill its end is brought about.
LEASE = 3_600.0


def work(broker: str, queue: str, path: str, mode: str, way: str, messages: str = "1") -> None:
    """One worker; `die` kills it when the effect has happened."""
    guard = Guard(f"sqlite:///{path}", policy=Policy(lease=LEASE, after_crash="hold" if mode == "hold" else "rerun"))

    @guard.transactional("credit", key="key")
    def credit(key: str, *, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO effects VALUES (?)", (key,))

    def in_its_transaction(data: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        credit(meta["id"])  # type: ignore[call-arg]
        end(way)

    def in_a_claim(data: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        if way == "raise":
            raise ValueError("cannot be done")
        with closing(sqlite3.connect(path)) as ledger, ledger:
            ledger.execute("INSERT INTO effects VALUES (?)", (meta["id"],))
        end(way)

    app = BabelQueue(broker, queue=queue, dead_letter=True, max_attempts=3)
    app.register(URN, in_its_transaction if mode == "transactional" else wrap(guard, in_a_claim, wait=PATIENCE))
    left, ends = int(messages), time.monotonic() + PATIENCE
    # It gives up at once where a queue is empty; and a broker takes a moment to see that a worker is dead.
    while left and time.monotonic() < ends:
        left -= app.consume(max_messages=left, timeout=0.1)
    # What it has published is taken, and what it has acknowledged is gone, once the connection has ended in order.
    app.transport.close()
    guard.close()
    sys.exit(left)


def end(way: str) -> None:
    if way == "die":
        os.kill(os.getpid(), signal.SIGKILL)


class Environment:
    """A queue with one message in it, and the effects."""

    def __init__(self, broker: str, queue: str, path: Path) -> None:
        self.broker, self.queue, self.path = broker, queue, path
        with closing(sqlite3.connect(path)) as ledger, ledger:
            ledger.execute("CREATE TABLE effects (key TEXT)")
        body = EnvelopeCodec.encode(EnvelopeCodec.make(URN, {"amount": 1}, queue=queue))
        with closing(BabelQueue(broker, queue=queue).transport) as transport:
            transport.publish(queue, body)

    def work(self, mode: str, way: str = "live", messages: int = 1) -> int:
        arguments = [self.broker, self.queue, str(self.path), mode, way, str(messages)]
        code = f"from tests.queues.test_babelqueue_crashes import work; work(*{arguments!r})"
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, timeout=PATIENCE * 3, check=False).returncode

    @property
    def effects(self) -> int:
        with closing(sqlite3.connect(self.path)) as ledger:
            return int(ledger.execute("SELECT count(*) FROM effects").fetchone()[0])

    def waiting(self, suffix: str = "") -> int:
        with pika.BlockingConnection(pika.URLParameters(self.broker)) as connection:
            found = connection.channel().queue_declare(f"{self.queue}{suffix}", passive=True)
            return int(found.method.message_count)


@pytest.fixture
def environment(rabbitmq_url: str, rabbitmq_name: str, tmp_path: Path) -> Environment:
    return Environment(rabbitmq_url, rabbitmq_name, tmp_path / "wallet.db")


def test_in_a_transaction_a_killed_worker_leaves_one_effect(environment: Environment) -> None:
    assert environment.work("transactional", "die") == -signal.SIGKILL
    assert environment.work("transactional") == 0

    assert (environment.effects, environment.waiting()) == (1, 0)


def test_in_a_claim_a_killed_worker_runs_again_with_the_same_key(environment: Environment) -> None:
    assert environment.work("rerun", "die") == -signal.SIGKILL
    lapse(environment.path)
    assert environment.work("rerun") == 0

    assert (environment.effects, environment.waiting()) == (2, 0)


def test_under_hold_a_killed_worker_leaves_one_effect_and_a_dead_letter(environment: Environment) -> None:
    assert environment.work("hold", "die") == -signal.SIGKILL
    lapse(environment.path)
    assert environment.work("hold", messages=3) == 0

    assert (environment.effects, environment.waiting(), environment.waiting(".dlq")) == (1, 0, 1)


def test_a_poison_message_ends_in_the_dead_letters(environment: Environment) -> None:
    assert environment.work("rerun", "raise", messages=3) == 0

    assert (environment.effects, environment.waiting(), environment.waiting(".dlq")) == (0, 0, 1)
