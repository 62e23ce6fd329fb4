"""taskiq: the promises on real workers, with Redis streams, RabbitMQ and NATS JetStream as brokers."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from onefold import Done, Guard
from services.fixtures import found, missing_told
from services.house import House
from services.servers import Server
from tests.queues.taskiq_tasks import Setting
from tests.queues.taskiq_tools import Environment


@pytest.fixture(scope="module")
def data(house: House) -> Iterator[Server]:
    """A server for messages, results and records, which no other test empties."""
    with missing_told(), house.own("valkey") as server:
        yield server


def setting_of(request: pytest.FixtureRequest, folder: Path, kind: str) -> Setting:
    redis = request.getfixturevalue("data").url.replace("valkey:", "redis:").removesuffix("/0")
    with closing(sqlite3.connect(folder / "wallet.db")) as connection:
        connection.execute("CREATE TABLE wallet (name TEXT, amount INTEGER)")
        connection.commit()
    where = f"{redis}/0" if kind == "redis" else found(request, kind).url
    return Setting(kind, where, f"{redis}/1", str(folder), f"onefold-{secrets.token_hex(6)}")


@pytest.fixture(scope="module")
def environments(data: Server) -> Iterator[dict[str, Environment]]:
    """The workers, one for each broker, for the whole module."""
    kept: dict[str, Environment] = {}
    with ExitStack() as ends:
        yield kept
        for environment in kept.values():
            ends.callback(environment.close)


def environment_fixture(*kinds: Any) -> Any:
    @pytest.fixture(scope="module", params=kinds)
    def environment(
        request: pytest.FixtureRequest,
        environments: dict[str, Environment],
        tmp_path_factory: pytest.TempPathFactory,
        house: House,
    ) -> Environment:
        kind: str = request.param
        if kind not in environments:
            setting = setting_of(request, tmp_path_factory.mktemp("taskiq"), kind)
            environments[kind] = Environment(setting, house.home)
        return environments[kind]

    return environment


# taskiq's own part is the same with every broker; what a broker does after a crash is not.
environment = environment_fixture("redis", "rabbitmq", pytest.param("nats", marks=pytest.mark.more))
each = environment_fixture("redis", *(pytest.param(one, marks=pytest.mark.more) for one in ("rabbitmq", "nats")))
one = environment_fixture("redis")


@pytest.fixture
def name() -> str:
    return secrets.token_hex(6)


def test_duplicates_of_a_finished_message_get_its_result(each: Environment, name: str) -> None:
    first = each.send("add", 1, 2, key=name)
    assert each.result(first) == 3
    each.again(first, "add", 1, 2, key=name)
    other = each.send("add", 1, 2, key=name)

    assert each.result(other) == 3
    each.until_noted("replayed", "add", name, times=2)
    assert each.times("started", "add", name) == 1


def test_a_sync_task_runs_once(one: Environment, name: str) -> None:
    messages = [one.send("add_sync", 1, 2, key=name) for _ in range(2)]

    assert [one.result(message) for message in messages] == [3, 3]
    assert one.times("started", "add_sync", name) == 1


def test_a_key_in_an_argument_finds_what_a_sender_sent_twice(one: Environment, name: str) -> None:
    messages = [one.run(one.shop.tasks["pay"].kiq(name, 5)) for _ in range(2)]

    assert [one.result(message) for message in messages] == ["paid 5"] * 2
    assert one.times("ran", "pay", name) == 1


def test_a_running_message_that_comes_again_is_not_done_and_uses_up_no_retry(each: Environment, name: str) -> None:
    first = each.send("slow", name, key=name)
    each.until_noted("ran", "slow", name)
    second = each.send("slow", name, key=name)
    each.until_noted("refused", "slow", name, times=2)
    each.open_gate(name)

    assert each.result(first) == each.result(second) == "slow"
    assert each.times("ran", "slow", name) == 1
    each.until_noted("replayed", "slow", name)


def test_a_failing_task_is_retried_by_taskiq_and_its_effect_counts_once(one: Environment, name: str) -> None:
    sent = one.send("shaky", name, 2, key=name)

    assert one.result(sent) == "at last"
    assert one.times("ran", "shaky", name) == 3
    one.again(sent, "shaky", name, 2, key=name)
    one.until_noted("replayed", "shaky", name)
    assert one.times("ran", "shaky", name) == 3


def test_used_up_retries_and_what_never_can_run_are_errors(one: Environment, name: str) -> None:
    poison = one.outcome(one.send("shaky", name, 9, key=name))
    one.result(one.send("add", 1, 1, key=name))
    reused = one.outcome(one.send("add", 2, 2, key=name))

    assert (poison.is_err, one.times("ran", "shaky", name)) == (True, 3)
    assert "KeyReused" in str(reused.error)
    assert one.times("ran", "add", "2") == 0


def test_a_killed_worker_leads_to_exactly_one_effect_in_a_transaction(each: Environment, name: str) -> None:
    each.send("credit", name, key=name)
    each.until_noted("finished", "credit", name)
    each.send("credit", name, key=name)
    each.until_noted("replayed", "credit", name)

    with closing(sqlite3.connect(each.folder / "wallet.db")) as connection:
        rows = connection.execute("SELECT amount FROM wallet WHERE name = ?", (name,)).fetchall()
    assert (each.folder / f"{name} died").exists()
    assert rows == [(1,)]


@pytest.mark.more
def test_a_worker_killed_after_the_effect_runs_again_with_the_same_downstream_key(one: Environment, name: str) -> None:
    sent = one.send("mail", name, key=name)

    assert one.result(sent) == "mailed"
    effects = [line for line in one.shop.notes.read() if line.startswith(f"ran mail {name} ")]
    assert len(effects) == 2
    assert len(set(effects)) == 1


def test_a_worker_killed_between_the_record_and_the_acknowledgement_runs_nothing_again(
    environment: Environment, name: str
) -> None:
    sent = environment.send("ship", name, key=name)

    assert environment.result(sent) == "shipped"
    environment.until_noted("replayed", "ship", name)
    assert environment.times("ran", "ship", name) == 1


@pytest.mark.more
def test_a_worker_killed_under_hold_leaves_a_record_that_a_person_resolves(one: Environment, name: str) -> None:
    one.send("invoice", name, key=name)
    one.until_noted("held", "invoice", name)
    with Guard(one.setting.redis) as guard:
        guard.resolve("invoice", name, Done("by hand"), by="ann", reason="seen at the printer")

    assert one.result(one.send("invoice", name, key=name)) == "by hand"
    assert one.times("ran", "invoice", name) == 1
