"""Dramatiq: the promises on real workers, with Redis and RabbitMQ as brokers."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from dramatiq.results import ResultFailure

from onefold import Done
from onefold.queues._shared.jobs.waits import TIMES
from onefold.queues.dramatiq import send
from services.fixtures import found, missing_told
from services.house import House
from services.proxy import Proxy
from services.servers import Server
from tests.queues.dramatiq_actors import Setting
from tests.queues.dramatiq_tools import Environment


@pytest.fixture(scope="module")
def data(house: House) -> Iterator[Server]:
    """A server for messages, results and records, which no other test empties."""
    with missing_told(), house.own("valkey") as server:
        yield server


def setting_of(request: pytest.FixtureRequest, folder: Path, broker: str) -> Setting:
    redis = request.getfixturevalue("data").url.replace("valkey:", "redis:").removesuffix("/0")
    with closing(sqlite3.connect(folder / "wallet.db")) as connection:
        connection.execute("CREATE TABLE wallet (name TEXT, amount INTEGER)")
        connection.commit()
    where = found(request, "rabbitmq").url if broker == "rabbitmq" else f"{redis}/0"
    return Setting(where, f"{redis}/1", str(folder), f"onefold-{secrets.token_hex(6)}")


@pytest.fixture(scope="module")
def environments(data: Server) -> Iterator[dict[str, Environment]]:
    """The workers, one for each broker, for the whole module."""
    kept: dict[str, Environment] = {}
    with ExitStack() as ends:
        yield kept
        for environment in kept.values():
            ends.callback(environment.close)


def environment_fixture(*brokers: Any) -> Any:
    @pytest.fixture(scope="module", params=brokers)
    def environment(
        request: pytest.FixtureRequest,
        environments: dict[str, Environment],
        tmp_path_factory: pytest.TempPathFactory,
        house: House,
    ) -> Environment:
        broker: str = request.param
        if broker not in environments:
            setting = setting_of(request, tmp_path_factory.mktemp("dramatiq"), broker)
            environments[broker] = Environment(setting, house.home)
        return environments[broker]

    return environment


environment = environment_fixture("redis", "rabbitmq")
# The broker's own part is no other than in tests that are always run with both.
each = environment_fixture("redis", pytest.param("rabbitmq", marks=pytest.mark.more))
# For what is the same with every broker.
one = environment_fixture("redis")


@pytest.fixture
def name() -> str:
    return secrets.token_hex(6)


def test_duplicates_of_a_finished_message_get_its_result(environment: Environment, name: str) -> None:
    first = environment.send("add", 1, 2, key=name)
    assert environment.result(first) == 3
    environment.again(first)
    other = environment.send("add", 1, 2, key=name)

    assert environment.result(other) == 3
    environment.until_noted("replayed", "add", name, times=2)
    assert environment.times("started", "add", name) == 1


def test_an_async_actor_runs_once(one: Environment, name: str) -> None:
    messages = [one.send("add_async", 1, 2, key=name) for _ in range(2)]

    assert [one.result(message) for message in messages] == [3, 3]
    assert one.times("started", "add_async", name) == 1


def test_a_key_in_an_argument_finds_what_a_sender_sent_twice(one: Environment, name: str) -> None:
    messages = [one.pay.send(name, 5) for _ in range(2)]

    assert [one.result(message) for message in messages] == ["paid 5"] * 2
    assert one.times("ran", "pay", name) == 1


def test_a_running_message_that_comes_again_is_not_acknowledged_and_uses_up_no_retry(
    environment: Environment, name: str
) -> None:
    first = environment.send("slow", name, key=name)
    environment.until_noted("ran", "slow", name)
    second = environment.send("slow", name, key=name)
    environment.until_noted("refused", "slow", name, times=2)
    environment.open_gate(name)

    assert environment.result(first) == environment.result(second) == "slow"
    assert environment.times("ran", "slow", name) == 1
    environment.until_noted("replayed", "slow", name)


def test_a_message_that_the_broker_delivers_again_while_it_runs_runs_once(one: Environment, name: str) -> None:
    """Redis takes a worker for dead that is silent for a moment: another's next command gives back its messages."""
    message = one.send("slow", name, key=name)
    one.until_noted("ran", "slow", name)
    one.until(lambda: (one.shop.broker.do_qsize(one.setting.queue), one.times("refused", "slow", name))[1])
    one.open_gate(name)

    assert one.result(message) == "slow"
    one.until_noted("replayed", "slow", name)
    assert one.times("ran", "slow", name) == 1


def test_a_failing_actor_is_retried_by_dramatiq_and_its_effect_counts_once(each: Environment, name: str) -> None:
    message = each.send("shaky", name, 2, key=name)

    assert each.result(message) == "at last"
    assert each.times("ran", "shaky", name) == 3
    each.again(message)
    each.until_noted("replayed", "shaky", name)
    assert each.times("ran", "shaky", name) == 3


def test_used_up_retries_and_what_never_can_run_end_in_the_dead_letter_queue(
    environment: Environment, name: str
) -> None:
    before = environment.dead()
    poison = environment.send("shaky", name, 9, key=name)
    reused = environment.send("shaky", name, 8, key=f"{name}-2")
    with pytest.raises(ResultFailure, match="ValueError"):
        environment.result(poison)
    with pytest.raises(ResultFailure, match="ValueError"):
        environment.result(reused)
    environment.result(environment.send("add", 1, 1, key=name))

    with pytest.raises(ResultFailure, match="KeyReused"):
        environment.result(environment.send("add", 2, 2, key=name))
    environment.until(lambda: environment.dead() == before + 3)


def test_a_killed_worker_leads_to_exactly_one_effect_in_a_transaction(each: Environment, name: str) -> None:
    send(each.credit, (name,), key=name)
    each.revive()
    each.until_noted("finished", "credit", name)
    send(each.credit, (name,), key=name)
    each.until_noted("replayed", "credit", name)

    with closing(sqlite3.connect(each.folder / "wallet.db")) as connection:
        rows = connection.execute("SELECT amount FROM wallet WHERE name = ?", (name,)).fetchall()
    assert rows == [(1,)]


def test_a_worker_killed_after_the_effect_runs_again_with_the_same_downstream_key(one: Environment, name: str) -> None:
    message = one.send("mail", name, key=name)
    one.revive()

    assert one.result(message) == "mailed"
    effects = [line for line in one.shop.notes.read() if line.startswith(f"ran mail {name} ")]
    assert len(effects) == 2
    assert len(set(effects)) == 1


def test_a_worker_killed_between_the_record_and_the_acknowledgement_runs_nothing_again(
    each: Environment, name: str
) -> None:
    message = each.send("ship", name, key=name)
    each.revive()

    assert each.result(message) == "shipped"
    each.until_noted("replayed", "ship", name)
    assert each.times("ran", "ship", name) == 1


def test_a_worker_killed_under_hold_leaves_a_record_that_a_person_resolves(one: Environment, name: str) -> None:
    one.send("invoice", name, key=name)
    one.revive()
    one.until_noted("held", "invoice", name)
    one.shop.guard.resolve("invoice", name, Done("by hand"), by="ann", reason="seen at the printer")

    assert one.result(one.send("invoice", name, key=name)) == "by hand"
    assert one.times("ran", "invoice", name) == 1


def test_a_time_limit_in_the_actor_is_ambiguous(one: Environment, name: str) -> None:
    one.send("limited", name, key=name)
    one.until_noted("held", "limited", name)
    one.open_gate(name)

    record = one.shop.guard.read("limited", name)
    assert record is not None
    assert record.state.value == "held"
    assert one.times("ran", "limited", name) == 1


# The connection.


@pytest.mark.more
def test_a_connection_that_is_cut_at_each_message_costs_no_effect_and_repeats_none(
    request: pytest.FixtureRequest, house: House, tmp_path: Path, name: str
) -> None:
    setting = setting_of(request, tmp_path, "rabbitmq")
    with (
        Proxy(setting.broker) as proxy,
        closing(Environment(setting, house.home, worker_broker=proxy.url())) as environment,
    ):
        stop = threading.Event()

        def cut() -> None:
            seen = 0
            while not stop.wait(0.01):
                finished = environment.times("ran", "pay")
                if finished > seen:
                    seen = finished
                    proxy.cut_all()

        cutting = threading.Thread(target=cut, daemon=True)
        cutting.start()
        numbers = [f"{name}-{number}" for number in range(6)]
        for number in numbers:
            for _ in range(2):
                environment.pay.send(number, 5)
            environment.until_noted("finished", "pay", number)
        stop.set()
        cutting.join(30)
        environment.until(lambda: all(environment.times("replayed", "pay", number) for number in numbers))

        assert [environment.times("ran", "pay", number) for number in numbers] == [1] * len(numbers)


def test_what_comes_again_is_with_rabbitmq_before_the_original_is_acknowledged(
    request: pytest.FixtureRequest, house: House, tmp_path: Path, name: str
) -> None:
    setting = setting_of(request, tmp_path, "rabbitmq")
    with (
        Proxy(setting.broker) as proxy,
        closing(Environment(setting, house.home, worker_broker=proxy.url())) as environment,
    ):
        first = environment.send("slow", name, key=name)
        environment.until_noted("ran", "slow", name)
        fault = proxy.cut_before(TIMES.encode())
        second = environment.send("slow", name, key=name)
        assert fault.reached.wait(30)
        environment.open_gate(name)

        assert environment.result(second) == environment.result(first) == "slow"
        assert environment.times("ran", "slow", name) == 1
