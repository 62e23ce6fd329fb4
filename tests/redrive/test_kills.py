"""A redrive that is killed, interrupted or cut off at any step, and run again: nothing is lost, and nothing runs twice.

A deliberate second run happens once, too.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

import onefold.cli.commands.redrive as command
from onefold import Guard
from onefold.redrive import permissions
from onefold.redrive.brokers import open_letters
from onefold.redrive.letters import Letter
from services.proxy import Proxy
from tests.processes import Stage, child
from tests.queues.rabbitmq_tools import Consumer, until
from tests.queues.test_rabbitmq_crashes import Credit, work
from tests.redrive.conftest import BROKERS
from tests.redrive.killed import Stopping, redrive
from tests.redrive.test_redrive import WHY, Effects
from tests.redrive.tools import Place
from tests.support import eventually
from tests.wallet import balance, create

STEPS: Final = (
    "before the permission",
    "after the permission",
    "after the send",
    "after the removal",
)
# How many messages a consumer gets from a redrive of two letters that was killed at the first of these steps.
SENT: Final = dict(zip(STEPS, (0, 0, 1, 1), strict=True))


def arguments_of(place: Place, *options: str) -> list[str]:
    return ["redrive", "--broker", place.broker, "--dead-letters", place.dead, "--send", *options]


MEANWHILE: Final = "delivered meanwhile"
LATER: Final = "delivered later"
EVERY_DAY: Final = {
    *(("rabbitmq", step, MEANWHILE) for step in STEPS),
    *((broker, "after the send", MEANWHILE) for broker in BROKERS),
    ("rabbitmq", "after the send", LATER),
}


@pytest.mark.parametrize(
    ("place", "step", "when"),
    [
        pytest.param(*one, marks=() if one in EVERY_DAY else pytest.mark.more)
        for one in itertools.product(BROKERS, STEPS, (MEANWHILE, LATER))
    ],
    indirect=["place"],
)
def test_a_bypass_runs_once_wherever_its_redrive_is_killed(
    place: Place, store: str, step: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects = Effects()
    keys, delivered = ("one", "two"), when == MEANWHILE
    for key in keys:
        place.send(key, key.encode())
    place.deliver(store, effects, 2)
    for key in keys:
        place.bury(key, key.encode())
    bypass = ("--bypass", *WHY, "--store", store)

    with child(redrive, arguments_of(place, *bypass), stops=(step,)) as killed:
        killed.reaches(step)
        killed.kill()
    left = 1 if step == "after the removal" else 2
    assert eventually(lambda: place.listed() == left), "what was not removed is there again"
    if delivered and SENT[step]:
        place.deliver(store, effects, SENT[step])
    # Whoever repeats it does so at another time.
    monkeypatch.setattr(permissions, "moment", lambda: "2030-01-01T00:00:00Z")
    assert place.json("--send", *bypass)["sent"] == left
    # NATS drops what was sent twice within its window.
    again = left - (SENT[step] if place.drops_what_is_sent_twice and step == "after the send" else 0)
    place.deliver(store, effects, again + (0 if delivered else SENT[step]))

    assert sorted(effects.done) == [b"one", b"one", b"two", b"two"]
    assert place.listed() == 0
    with Guard(store) as guard:
        records = [guard.read(place.operation, key) for key in keys]
    assert [record.bypasses for record in records if record is not None] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.more)])
def test_a_redrive_that_is_interrupted_leaves_every_letter_in_one_place_at_least(
    rabbit: Place, store: str, number: signal.Signals
) -> None:
    effects = Effects()
    for key in ("one", "two"):
        rabbit.bury(key, key.encode())

    with child(redrive, arguments_of(rabbit), stops=("after the send",)) as stopped:
        stopped.reaches("after the send")
        stopped.signal(number)
        if number is signal.SIGINT:
            assert stopped.hear() == 128 + signal.SIGINT
        else:
            assert eventually(lambda: not stopped._process.is_alive())
    assert eventually(lambda: rabbit.listed() == 2), "neither was removed"
    assert rabbit.json("--send")["sent"] == 2
    rabbit.deliver(store, effects, 3)

    assert sorted(effects.done) == [b"one", b"two"]


def test_a_connection_that_is_cut_is_one_line_that_says_how_far_it_came(
    rabbit: Any, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects, sent = Effects(), []
    for key in ("one", "two", "three"):
        rabbit.bury(key, key.encode())
    with Proxy(rabbit.broker) as proxy:
        straight, rabbit.broker = rabbit.broker, proxy.url()

        class Cut(Stopping):
            def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
                self._inner.send(letter, to, headers)
                sent.append(letter)
                if len(sent) == 2:
                    proxy.cut_all()

        monkeypatch.setattr(command, "open_letters", lambda *names: Cut(open_letters(*names), Stage(None)))  # type: ignore[arg-type]
        said = rabbit.redrive("--send")
        rabbit.broker = straight
    monkeypatch.undo()

    assert said.exit_code == 1
    assert said.stderr.startswith("onefold: RabbitMQ cannot be reached, or was lost: ")
    assert said.stderr.endswith("Until then: 1 sent back. Run it again for the rest\n")
    assert eventually(lambda: rabbit.listed() == 2)
    assert rabbit.redrive("--send").exit_code == 0
    rabbit.deliver(store, effects, 4)
    assert sorted(effects.done) == [b"one", b"three", b"two"]


@pytest.mark.parametrize("step", ["after the effect", "before the ack"])
def test_a_bypass_in_a_transaction_happens_once_wherever_its_worker_is_killed(
    rabbit: Any, tmp_path: Path, step: str
) -> None:
    wallet = create(tmp_path / "wallet.db")
    store = f"sqlite:///{wallet}"
    rabbit.send("one", b"10")
    with Consumer("pika", rabbit.queues, store, Credit()) as consumer:
        until(lambda: consumer.acks == 1, "it is acknowledged")
    rabbit.bury("one", b"10")
    assert rabbit.redrive("--send", "--bypass", *WHY, "--store", store).exit_code == 0

    with child(work, "pika", rabbit.queues, store, None, None, stops=(step,)) as worker:
        worker.reaches(step)
        worker.kill()
    assert balance(wallet) == (10 if step == "after the effect" else 20)
    with Consumer("pika", rabbit.queues, store, Credit()) as consumer:
        until(lambda: consumer.acks == 1, "it is acknowledged")

    assert balance(wallet) == 20
