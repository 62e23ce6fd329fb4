"""RQ: the promises on real workers, which fork a work horse for each job."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rq import Retry
from rq.registry import StartedJobRegistry

from onefold import Done, Guard
from services.fixtures import missing_told
from services.house import House
from services.proxy import Proxy
from services.servers import Server
from tests.queues.rq_functions import LEASE, Setting
from tests.queues.rq_tools import Environment


@pytest.fixture(scope="module")
def data(house: House) -> Iterator[Server]:
    """A server for jobs, results and records, which no other test empties."""
    with missing_told(), house.own("valkey") as server:
        yield server


def setting_of(data: Server, folder: Path) -> Setting:
    with closing(sqlite3.connect(folder / "wallet.db")) as connection:
        connection.execute("CREATE TABLE wallet (name TEXT, amount INTEGER)")
        connection.commit()
    return Setting(data.url.replace("valkey:", "redis:"), str(folder), f"onefold-{secrets.token_hex(6)}")


@pytest.fixture(scope="module")
def environment(data: Server, house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    setting = setting_of(data, tmp_path_factory.mktemp("rq"))
    with closing(Environment(setting, house.home, "--job-monitoring-interval", "1")) as environment:
        yield environment


@pytest.fixture(scope="module")
def second(environment: Environment, house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """Another worker on the same queue, with the same notes."""
    folder = tmp_path_factory.mktemp("rq-second")
    other = Environment(environment.setting, house.home, "--job-monitoring-interval", "1", log=folder)
    with closing(other):
        yield other


@pytest.fixture
def guard(environment: Environment) -> Iterator[Guard]:
    with Guard(environment.setting.redis) as guard:
        yield guard


@pytest.fixture
def name() -> str:
    return secrets.token_hex(6)


def test_duplicates_of_a_finished_job_get_its_result(environment: Environment, name: str) -> None:
    first = environment.enqueue("add", 1, 2, key=name)
    assert environment.result(first) == 3
    other = environment.enqueue("add", 1, 2, key=name)
    environment.queue.enqueue_job(first)

    assert environment.result(other) == environment.result(first) == 3
    environment.until_noted("replayed", "add", name, times=2)
    assert environment.times("started", "add", name) == 1


def test_an_async_function_runs_once(environment: Environment, name: str) -> None:
    jobs = [environment.enqueue("add_async", 1, 2, key=name) for _ in range(2)]

    assert [environment.result(job) for job in jobs] == [3, 3]
    assert environment.times("started", "add_async", name) == 1


@pytest.mark.usefixtures("second")
def test_a_running_duplicate_is_not_done_and_uses_up_no_retry(environment: Environment, name: str) -> None:
    first = environment.enqueue("slow", name, key=name)
    environment.until_noted("ran", "slow", name)
    other = environment.enqueue("slow", name, key=name, retry=Retry(max=1))
    environment.until_noted("refused", "slow", name, times=2)
    environment.open_gate(name)

    assert environment.result(first) == environment.result(other) == "slow"
    assert environment.times("ran", "slow", name) == 1
    assert other.retries_left == 1


@pytest.mark.more
@pytest.mark.usefixtures("second")
def test_a_job_that_takes_longer_than_its_lease_keeps_its_claim(environment: Environment, name: str) -> None:
    first = environment.enqueue("lasting", name, key=name)
    environment.until_noted("ran", "lasting", name)
    over = time.monotonic() + 1.3 * LEASE
    environment.until(lambda: time.monotonic() > over)
    other = environment.enqueue("lasting", name, key=name)
    environment.until_noted("refused", "lasting", name)
    environment.open_gate(name)

    assert environment.result(first) == environment.result(other) == "lasting"
    assert environment.times("ran", "lasting", name) == 1


def test_a_failing_job_is_retried_by_rq_and_its_effect_counts_once(environment: Environment, name: str) -> None:
    job = environment.enqueue("shaky", name, 2, key=name, retry=Retry(max=2))

    assert environment.result(job) == "at last"
    assert environment.times("ran", "shaky", name) == 3


def test_a_killed_work_horse_fails_its_job_and_a_requeued_one_runs_again_with_the_same_downstream_key(
    environment: Environment, name: str
) -> None:
    """RQ delivers at most once here: without a Retry the job is in the FailedJobRegistry, and somebody requeues it."""
    job = environment.enqueue("mail", name, key=name)
    environment.until_failed(job)
    assert "Work-horse terminated unexpectedly" in str(job.latest_result().exc_string)  # type: ignore[union-attr]
    job.requeue()

    assert environment.result(job) == "mailed"
    effects = [line for line in environment.notes.read() if line.startswith(f"ran mail {name} ")]
    assert len(effects) == 2
    assert len(set(effects)) == 1


def test_a_killed_work_horse_under_hold_leaves_a_record_that_a_person_resolves(
    environment: Environment, guard: Guard, name: str
) -> None:
    # A job waits for a third of its time limit at most.
    job = environment.enqueue("invoice", name, key=name, retry=Retry(max=1), timeout=3)
    environment.until_noted("held", "invoice", name)
    guard.resolve("invoice", name, Done("by hand"), by="ann", reason="seen at the printer")

    assert environment.result(job) == "by hand"
    assert environment.times("ran", "invoice", name) == 1


def test_a_worker_killed_with_its_work_horse_leads_to_exactly_one_effect_in_a_transaction(
    data: Server, house: House, tmp_path: Path, name: str
) -> None:
    """The job is abandoned: any other worker finds that out, here at once, and retries it."""
    with closing(Environment(setting_of(data, tmp_path), house.home)) as environment:
        job = environment.enqueue("credit", name, key=name, retry=Retry(max=1))
        environment.until(lambda: not environment.running)
        StartedJobRegistry(queue=environment.queue).cleanup(timestamp=time.time() + 3_600)
        environment.start()
        environment.result(job)
        again = environment.enqueue("credit", name, key=name)
        environment.result(again)

    with closing(sqlite3.connect(tmp_path / "wallet.db")) as connection:
        rows = connection.execute("SELECT amount FROM wallet WHERE name = ?", (name,)).fetchall()
    assert rows == [(1,)]


@pytest.mark.more
def test_a_connection_that_is_cut_at_each_job_repeats_no_effect(
    data: Server, house: House, tmp_path: Path, name: str
) -> None:
    """The worker's connection, that is: records go there too. What RQ has lost is requeued by hand."""
    setting = setting_of(data, tmp_path)
    with Proxy(setting.redis) as proxy:
        through = setting._replace(redis=proxy.url())
        with closing(Environment(setting, house.home, worker=through)) as environment:
            for number in range(5):
                job = environment.enqueue("add", number, 1, key=f"{name}-{number}", retry=Retry(max=5))
                proxy.lose_reply(3 + 4 * number)
                environment.until(
                    lambda key=f"{name}-{number}": (
                        environment.times("finished", "add", key)  # type: ignore[misc]
                        or environment.rescue()
                    )
                )
                assert job.id

            environment.until(lambda: all(environment.times("ran", "add", str(number)) for number in range(5)))
            assert [environment.times("started", "add", f"{name}-{number}") for number in range(5)] == [1] * 5
