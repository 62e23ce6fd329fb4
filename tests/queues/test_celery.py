"""Celery: every promise on real workers, with Redis and RabbitMQ, in prefork and gevent pools."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import Reject

from onefold import Done, Guard, ResultNotKept
from onefold.queues.celery import send
from services.fixtures import found, missing_told
from services.house import House
from services.servers import Server
from tests.queues.celery_tasks import LEASE, Setting
from tests.queues.celery_tools import Environment, sending
from tests.support import PATIENCE

KEY = "idempotency-key"


@pytest.fixture(scope="module")
def data(request: pytest.FixtureRequest, house: House) -> Iterator[Server]:
    """A server for messages, results and records, which no other test empties."""
    with missing_told(), house.own("valkey") as server:
        yield server


@pytest.fixture(scope="module")
def fragile(request: pytest.FixtureRequest, house: House) -> Iterator[Server]:
    with missing_told(), house.own("valkey") as server:
        yield server


def opened(request: pytest.FixtureRequest, folder: Path, broker: str, pool: str) -> Environment:
    data, fragile = request.getfixturevalue("data"), request.getfixturevalue("fragile")
    redis = data.url.replace("valkey:", "redis:").removesuffix("/0")
    queue = f"onefold-{secrets.token_hex(6)}"
    where = found(request, "rabbitmq").url if broker == "rabbitmq" else f"{redis}/0"
    with closing(sqlite3.connect(folder / "wallet.db")) as connection:
        connection.execute("CREATE TABLE wallet (name TEXT, amount INTEGER)")
        connection.execute("CREATE TABLE payments (name TEXT PRIMARY KEY, amount INT, receipt TEXT, fingerprint TEXT)")
    patient = "socket_timeout=10s&socket_connect_timeout=10s"
    setting = Setting(where, f"{redis}/1", f"{redis}/2", f"{fragile.url}?{patient}", str(folder), queue, pool)
    house: House = request.getfixturevalue("house")
    return Environment(setting, house.home)


def environment_fixture(*environments: tuple[str, str]) -> Any:
    @pytest.fixture(scope="module", params=environments, ids="-".join)
    def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
        kept: dict[tuple[str, str], Environment] = request.getfixturevalue("environments")
        if request.param not in kept:
            kept[request.param] = opened(request, tmp_path_factory.mktemp("celery"), *request.param)
        return kept[request.param]

    return environment


@pytest.fixture(scope="module")
def environments(data: Server, fragile: Server) -> Iterator[dict[tuple[str, str], Environment]]:
    """The workers, one for each broker and pool, for the whole module."""
    kept: dict[tuple[str, str], Environment] = {}
    with ExitStack() as ends:
        yield kept
        for environment in kept.values():
            ends.callback(environment.close)


environment = environment_fixture(("redis", "prefork"), ("redis", "gevent"), ("rabbitmq", "prefork"))
forked = environment_fixture(("redis", "prefork"), ("rabbitmq", "prefork"))
# For what is the same in every pool and with every broker.
one = environment_fixture(("redis", "prefork"))


@pytest.fixture
def name() -> str:
    return secrets.token_hex(6)


# Duplicates.


def test_the_same_message_executed_twice_runs_once(environment: Environment, name: str) -> None:
    with sending(environment) as sent:
        result = environment.add.apply_async((1, 2), task_id=name)
    sent.again()

    assert result.get(timeout=PATIENCE) == 3
    environment.until_noted("replayed", "add", name)
    assert environment.times("started", "add", name) == 1
    assert result.state == "SUCCESS"


def test_a_producer_that_sends_again_with_its_key_gets_the_stored_result(one: Environment, name: str) -> None:
    assert send(one.add, (2, 2), key=name) == name
    one.until_noted("finished", "add", name)
    again = one.add.apply_async((2, 2), headers={KEY: name})

    assert again.get(timeout=PATIENCE) == 4
    assert one.times("started", "add", name) == 1


def test_a_running_duplicate_comes_again_until_it_is_replayed_and_uses_up_no_retry(
    forked: Environment, name: str
) -> None:
    first = forked.slow.apply_async((name,), headers={KEY: name})
    forked.until_noted("ran", "slow", name)
    second = forked.slow.apply_async((name,), headers={KEY: name})
    forked.until_noted("refused", "slow", name)
    forked.open_gate(name)

    assert first.get(timeout=PATIENCE) == second.get(timeout=PATIENCE) == 7
    assert forked.noted("ran", "slow", name) == [f"ran slow {name} 0"]


def test_a_task_that_takes_longer_than_its_lease_keeps_its_claim(environment: Environment, name: str) -> None:
    first = environment.lasting.apply_async((name,), headers={KEY: name})
    environment.until_noted("ran", "lasting", name)
    over = time.monotonic() + 1.3 * LEASE
    environment.until(lambda: time.monotonic() > over)
    second = environment.lasting.apply_async((name,), headers={KEY: name})
    environment.until_noted("refused", "lasting", name)
    environment.open_gate(name)

    assert first.get(timeout=PATIENCE) == second.get(timeout=PATIENCE) == 7
    assert environment.times("started", "lasting", name) == 1


def test_a_duplicate_in_a_chord_keeps_its_place_in_it_while_it_comes_again(environment: Environment, name: str) -> None:
    environment.slow.apply_async((name,), headers={KEY: name})
    environment.until_noted("ran", "slow", name)
    parts = [environment.slow.s(name).set(headers={KEY: name}), environment.add.s(1, 2)]
    result = chord(parts)(environment.total.s())
    environment.until_noted("refused", "slow", name)
    environment.open_gate(name)

    assert result.get(timeout=PATIENCE) == 10
    assert environment.times("ran", "slow", name) == 1


def test_a_store_that_is_down_uses_up_no_retry(environment: Environment, fragile: Server, name: str) -> None:
    fragile.kill()
    try:
        result = environment.fragile.apply_async((name,), task_id=name)
        environment.until_noted("store_failed", "fragile", name)
    finally:
        fragile.restart()

    assert result.get(timeout=PATIENCE) == name
    assert environment.noted("ran", "fragile", name) == [f"ran fragile {name} 0"]


# Canvas.


def test_every_step_of_a_chain_has_a_key_of_its_own_and_a_replay_hands_the_result_on(
    environment: Environment, name: str
) -> None:
    steps = chain(environment.add.s(1, 1).set(headers={KEY: name}), environment.add.s(1), environment.add.s(1))
    with sending(environment) as sent:
        result: Any = steps.apply_async()
    assert result.get(timeout=PATIENCE) == 4
    keys = [name, result.parent.id, result.id]
    sent.again()

    environment.until_noted("replayed", "add", result.id)
    assert [environment.times("started", "add", key) for key in keys] == [1, 1, 1]


def test_a_chain_whose_first_step_was_done_before_goes_on_with_the_stored_result(one: Environment, name: str) -> None:
    one.add.apply_async((40, 1), headers={KEY: name}).get(timeout=PATIENCE)

    result = chain(one.add.s(40, 1).set(headers={KEY: name}), one.add.s(1)).apply_async()

    assert result.get(timeout=PATIENCE) == 42
    assert one.times("started", "add", name) == 1


def test_a_chord_fires_once_however_often_its_parts_come(environment: Environment, name: str) -> None:
    with sending(environment) as sent:
        result = chord([environment.add.s(1, n) for n in range(3)])(environment.total.s())
    assert result.get(timeout=PATIENCE) == 6
    for part in range(3):
        sent.again(part)

    for message in sent.messages:
        environment.until_noted("replayed", "add", message["headers"][KEY])
    assert environment.times("started", "total", result.id) == 1


def test_a_callback_is_sent_with_the_same_key_by_a_replay(one: Environment, name: str) -> None:
    with sending(one) as sent:
        one.add.apply_async((1, 2), task_id=name, link=one.tell.s())
    one.until_noted("finished", "tell")
    sent.again()

    one.until_noted("replayed", "tell")
    told = [line.split()[-1] for line in one.noted("replayed", "tell")]
    assert [one.times("started", "tell", key) for key in told] == [1] * len(told)


def test_a_task_that_replaces_itself_goes_on_under_its_key(one: Environment, name: str) -> None:
    with sending(one) as sent:
        result = one.count_down.apply_async((2,), task_id=name)
    assert result.get(timeout=PATIENCE) == "zero"
    sent.again()

    one.until_noted("replayed", "count_down", name)
    assert one.times("ran", "count_down") == 3


def test_a_group_under_one_key_is_refused_where_its_tasks_differ(one: Environment, name: str) -> None:
    sent: Any = group([one.add.s(1, 1), one.add.s(2, 2)]).apply_async(headers={KEY: name})
    for result in sent.results:
        result.get(timeout=PATIENCE, propagate=False)

    assert sorted(result.state for result in sent.results) == ["FAILURE", "SUCCESS"]


# Retries, and what Celery says to itself.


@pytest.mark.parametrize("task", ["retries", "autoretries"])
def test_a_task_that_asks_for_a_retry_runs_again_under_its_key(environment: Environment, name: str, task: str) -> None:
    result = getattr(environment, task).apply_async((name, 2), task_id=name)

    assert result.get(timeout=PATIENCE) == name
    assert [line.split()[3] for line in environment.noted("ran", task, name)] == ["0", "1", "2"]
    assert environment.times("finished", task, name) == 1
    assert environment.times("failed", task, name) == 0


@pytest.mark.parametrize("task", ["retries", "autoretries"])
def test_used_up_retries_are_celerys_own_failure(one: Environment, name: str, task: str) -> None:
    result = getattr(one, task).apply_async((name, 9), task_id=name)

    with pytest.raises((ValueError, one.app.Task.MaxRetriesExceededError)):
        result.get(timeout=PATIENCE)
    assert one.times("ran", task, name) == 3


def test_a_task_that_is_to_be_ignored_is_not_done(one: Environment, name: str) -> None:
    with sending(one) as sent:
        one.ignores.apply_async((name,), task_id=name)
    one.until_noted("released", "ignores", name)
    sent.again()

    one.until_noted("released", "ignores", name, times=2)
    assert one.times("ran", "ignores", name) == 2


def test_a_countdown_and_an_expiry_do_what_they_did(one: Environment, name: str) -> None:
    result = one.add.apply_async((3, 4), task_id=name, countdown=0.2, expires=60)

    assert result.get(timeout=PATIENCE) == 7


# Crashes.


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_a_killed_worker_leads_to_exactly_one_effect_in_a_transaction(
    forked: Environment, name: str, when: str
) -> None:
    result = forked.credit.apply_async((name, 5, when), task_id=name)

    assert result.get(timeout=PATIENCE) == 5
    assert (forked.folder / f"{name} died").exists()
    assert forked.times("replayed", "credit", name) == (when == "after the commit")
    with closing(sqlite3.connect(forked.folder / "wallet.db")) as connection:
        assert connection.execute("SELECT amount FROM wallet WHERE name = ?", (name,)).fetchall() == [(5,)]


def test_a_row_of_the_business_is_the_record_of_a_task(forked: Environment, name: str) -> None:
    results = [forked.pay.apply_async((name, 5), headers={KEY: name}) for _ in range(4)]

    assert [result.get(timeout=PATIENCE) for result in results] == ["receipt of 5"] * 4
    assert (forked.times("ran", "pay", name), forked.times("replayed", "pay", name)) == (1, 3)
    with closing(sqlite3.connect(forked.folder / "wallet.db")) as connection:
        found = connection.execute("SELECT amount, receipt FROM payments WHERE name = ?", (name,)).fetchall()
    assert found == [(5, '"receipt of 5"')]


def test_a_killed_worker_leads_to_a_second_run_with_the_same_downstream_key(one: Environment, name: str) -> None:
    result = one.charge.apply_async((name,), task_id=name)

    assert result.get(timeout=PATIENCE) == name
    runs = one.noted("ran", "charge", name)
    assert len(runs) == 2
    assert len(set(runs)) == 1


def test_a_killed_worker_leaves_a_held_record_that_a_person_resolves(one: Environment, name: str) -> None:
    result = one.hold.apply_async((name,), task_id=name)
    one.until_noted("held", "hold", name)

    guard: Guard = one.hold.guard
    guard.resolve("hold", name, Done("by hand"), by="ada", reason="asked the provider")
    again = one.hold.apply_async((name,), headers={KEY: name})

    assert again.get(timeout=PATIENCE) == "by hand"
    assert one.times("ran", "hold", name) == 1
    assert not result.ready()


def test_a_whole_worker_that_is_killed_leaves_its_task_to_the_next_one(forked: Environment, name: str) -> None:
    result = forked.lasting.apply_async((name,), task_id=name)
    forked.until_noted("ran", "lasting", name)
    forked.kill()
    forked.give_back()
    forked.open_gate(name)
    forked.start()

    assert result.get(timeout=PATIENCE) == 7
    assert forked.times("taken_over", "lasting", name) == 1


# What never runs.


def refused(result: Any) -> str:
    with pytest.raises(Reject) as caught:
        result.get(timeout=PATIENCE)
    return str(caught.value)


def test_a_message_without_a_key_follows_the_policy(environment: Environment, name: str) -> None:
    refusal = refused(environment.app.send_task("shop.tell", (name,)))
    environment.app.send_task("shop.unkeyed", (name,))

    assert "has no key" in refusal
    environment.until_noted("ran", "unkeyed", name)
    assert environment.times("ran", "tell", name) == 0


@pytest.fixture
def dead(environments: dict[tuple[str, str], Environment]) -> Iterator[Callable[[str], Any]]:
    """The dead letter of a task, on RabbitMQ: those of an earlier test may come late."""
    environment = environments["rabbitmq", "prefork"]
    with environment.app.connection_for_read() as connection:
        queue = connection.SimpleQueue(f"{environment.setting.queue}-dead")

        def letter(id_: str) -> Any:
            while (found := queue.get(timeout=PATIENCE)).headers["id"] != id_:
                pass
            return found

        yield letter
        queue.close()


@pytest.mark.parametrize("forked", [("rabbitmq", "prefork")], indirect=True, ids="-".join)
def test_what_never_runs_and_what_always_fails_ends_in_the_dead_letter_queue(
    forked: Environment, dead: Callable[[str], Any], name: str
) -> None:
    unkeyed = dead(forked.app.send_task("shop.tell", (name,)).id)
    poison = dead(forked.poison.apply_async((name,), task_id=name).id)

    assert unkeyed.headers["task"] == "shop.tell"
    assert poison.headers["id"] == name
    assert forked.times("ran", "poison", name) == 1
    assert forked.times("ran", "tell", name) == 0


@pytest.mark.parametrize(
    ("key", "says"), [({"a": 1}, "dict"), (True, "bool"), ("  ", "empty"), ("k" * (1 << 20), "1048576 characters")]
)
def test_a_bad_key_is_told_and_the_worker_lives_on(one: Environment, name: str, key: Any, says: str) -> None:
    refusal = refused(one.tell.apply_async((name,), headers={KEY: key}))

    assert says in refusal
    assert one.add.apply_async((1, 1), headers={KEY: name}).get(timeout=PATIENCE) == 2
    assert one.times("ran", "tell", name) == 0


def test_a_key_with_other_arguments_is_refused(one: Environment, name: str) -> None:
    one.add.apply_async((1, 2), headers={KEY: name}).get(timeout=PATIENCE)

    assert "another payload" in refused(one.add.apply_async((9, 9), headers={KEY: name}))


def test_a_key_in_the_arguments_finds_what_a_producer_sent_twice(one: Environment, name: str) -> None:
    results = [one.ship.delay({"id": name}) for _ in range(2)]
    one.mail.delay(name, 1)
    one.mail.delay(name, 2)

    assert [result.get(timeout=PATIENCE) for result in results] == [name, name]
    one.until_noted("ran", "mail", name)
    assert one.times("ran", "ship", name) == 1
    assert "the key is its field" not in refused(one.ship.delay({"id": True}))
    assert one.times("ran", "mail", name) == 1


def test_a_result_that_was_not_kept_is_not_made_up(one: Environment, name: str) -> None:
    with sending(one) as sent:
        first = one.large.apply_async((name,), task_id=name)
    assert first.get(timeout=PATIENCE) == name
    sent.again()
    one.until_noted("replayed", "large", name)
    other = one.large.apply_async((name,), headers={KEY: name})

    with pytest.raises(ResultNotKept, match="did not run again"):
        other.get(timeout=PATIENCE)
    assert first.get(timeout=PATIENCE) == name
    assert one.times("ran", "large", name) == 1
