"""MariaDB, and what a network, a process and a server can do: cut at COMMIT, replies lost, zombies, kills, forks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pymysql
import pytest

from onefold import AsyncGuard, Guard, StoreUnavailable
from onefold._model import Address, Claim, Close, Ending, Entry, Record, Released, State
from onefold.stores import mysql
from onefold.stores.base import Query
from onefold.stores.mysql import MysqlStore
from onefold.stores.mysql.dialect import MARIADB, MYSQL, Mysql
from services.proxy import Proxy
from services.servers import Server
from tests.processes import Stage, child, exit_code
from tests.stores.mysql.wallet import (
    WORKER_TYPES,
    Awaiting,
    Blocking,
    Ledger,
    Worker,
    Working,
    add,
    parameters,
    waiting_for_rows,
)
from tests.support import PATIENCE, Elsewhere, Handler, eventually


@pytest.fixture
def ledger(mysql_url: str) -> Ledger:
    return Ledger(mysql_url)


@pytest.fixture
def proxy(ledger: Ledger) -> Iterator[Proxy]:
    with Proxy(ledger.url) as proxy:
        yield proxy


@pytest.fixture(params=[MARIADB, MYSQL], ids=["with RETURNING", "without RETURNING"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mysql:
    found: Mysql = request.param
    monkeypatch.setattr(mysql, "dialect_of", lambda _version: found)
    return found


@pytest.fixture(params=WORKER_TYPES)
def worker(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Worker]:
    worker = request.param(proxy.url())
    yield worker
    worker.close()


# Row 19: the COMMIT.


def test_a_commit_whose_answer_is_lost_is_resolved_by_delivering_again(
    worker: Worker, ledger: Ledger, proxy: Proxy
) -> None:
    worker.transactional("earlier", Handler())
    starts: list[int] = []

    def work(tx: Any) -> Working:
        starts.append(1)
        yield from add(tx)
        return "receipt"

    fault = proxy.cut_after(b"COMMIT")
    outcome = worker.transactional("m1", work)

    assert fault.reached.is_set()
    assert (outcome.value, outcome.replayed, len(starts)) == ("receipt", False, 1)
    assert ledger.now == (10, ["earlier", "m1"])


def test_a_commit_that_never_arrives_is_made_again(worker: Worker, ledger: Ledger, proxy: Proxy) -> None:
    worker.transactional("earlier", Handler())
    starts: list[int] = []

    def work(tx: Any) -> Working:
        starts.append(1)
        yield from add(tx)

    fault = proxy.cut_before(b"COMMIT")
    outcome = worker.transactional("m1", work)

    assert fault.reached.is_set()
    assert (outcome.replayed, len(starts)) == (False, 2)
    assert ledger.now == (10, ["earlier", "m1"])


@pytest.mark.parametrize("statement", ["INSERT INTO {records}", "UPDATE wallet", "UPDATE {records}"])
@pytest.mark.parametrize("way", ["cut_before", "cut_after"])
def test_a_connection_that_is_lost_in_a_transaction_is_a_new_transaction(
    worker: Worker, ledger: Ledger, proxy: Proxy, statement: str, way: str
) -> None:
    worker.transactional("earlier", Handler())

    def work(tx: Any) -> Working:
        yield from add(tx)
        return "receipt"

    records = f"`{parameters(ledger.url)['database']}`.onefold_records"
    fault = getattr(proxy, way)(statement.format(records=records).encode())
    outcome = worker.transactional("m1", work)

    assert fault.reached.is_set()
    assert (outcome.value, outcome.replayed) == ("receipt", False)
    assert ledger.now == (10, ["earlier", "m1"])


# Row 13a: the reply of each operation is lost once.


def entry(key: str = "key", **fields: Any) -> Entry:
    usual: dict[str, Any] = {
        "address": Address("", "charge", key),
        "token": os.urandom(16),
        "lease": 30.0,
        "ttl": 90.0,
    }
    return Entry(**(usual | fields))


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, entry.lease, entry.ttl)


DONE = Ending(state=State.DONE, ttl=60.0, result=b"result")
OPEN = Released(ttl=60.0, attempt=1)

OPERATIONS: dict[str, Callable[[Callable[..., Any], Entry, Entry], Any]] = {
    "claim": lambda ask, _mine, other: ask("claim", other),
    "extend": lambda ask, mine, _other: ask("extend", claim_of(mine), b"notes"),
    "finish": lambda ask, mine, _other: ask("finish", claim_of(mine), DONE),
    "release": lambda ask, mine, _other: ask("release", claim_of(mine)),
    "leave open": lambda ask, mine, _other: ask("release", claim_of(mine), OPEN),
    "read": lambda ask, mine, _other: ask("read", mine.address).token == mine.token,
    "browse": lambda ask, mine, _other: [one.token for one in ask("browse", Query(), 10)] == [mine.token],
    "purge": lambda ask, _mine, _other: ask("purge", 10) == 0,
    "claim_all": lambda ask, mine, other: ask("claim_all", [mine, other]) == [None, None],
    "extend_all": lambda ask, mine, _other: ask("extend_all", [claim_of(mine)]) == [True],
    "close_all": lambda ask, mine, _other: ask("close_all", [Close(claim_of(mine), DONE)]) == [True],
    "mixed close_all": lambda ask, mine, other: (
        ask("close_all", [Close(claim_of(mine), DONE), Close(claim_of(other), None)]) == [True, True]
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.usefixtures("dialect")
def test_an_operation_whose_reply_is_lost_is_sent_again_and_has_one_effect(
    worker: Worker, proxy: Proxy, operation: str
) -> None:
    mine, other = entry("mine"), entry("other")
    assert worker.store("claim", mine) is None
    fault = proxy.lose_reply()

    answer = OPERATIONS[operation](worker.store, mine, other)

    assert fault.reached.is_set()
    assert answer in (None, True)


def test_a_connection_that_is_cut_twice_is_one_clear_line_and_the_store_goes_on(worker: Worker, proxy: Proxy) -> None:
    assert worker.store("claim", entry()) is None
    proxy.cut_before(b"INSERT")
    proxy.cut_before(b"INSERT")

    with pytest.raises(StoreUnavailable) as refused:
        worker.store("claim", entry("other"))

    assert str(refused.value).endswith("the connection was lost")
    assert "\n" not in str(refused.value)
    assert worker.store("claim", entry("other")) is None


# Zombies, in two processes.


def charge(stage: Stage, url: str, value: str) -> Any:
    """The part of a child: one delivery, which stops in its handler."""

    def handler() -> str:
        stage.at("in the handler")
        return value

    with Guard(url) as guard:
        return guard.run("charge", "m1", handler).value


def test_a_zombie_is_told_and_the_new_owners_record_stands(ledger: Ledger) -> None:
    with child(charge, ledger.url, "zombie", stops=("in the handler",)) as zombie:
        zombie.reaches("in the handler")
        zombie.signal(signal.SIGSTOP)
        # Its lease ends now: a short one could be over before the handler begins.
        ledger.execute("UPDATE onefold_records SET lease_until = began")
        with Guard(ledger.url) as guard:
            outcome = guard.run("charge", "m1", lambda: "new owner")
            zombie.signal(signal.SIGCONT)
            zombie.go_on()

            assert zombie.hear() == ("ClaimLost", "zombie")
            assert (outcome.value, outcome.attempt) == ("new owner", 2)
            assert guard.run("charge", "m1", lambda: "not run").value == "new owner"


def credit(stage: Stage, url: str) -> Any:
    with Guard(url) as guard:

        @guard.transactional("credit", key="key")
        def work(key: str, *, tx: Any) -> str:
            with tx.cursor() as cursor:
                cursor.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")
            stage.at("in the handler")
            return "first"

        return work("m1")  # type: ignore[call-arg]


def test_a_stopped_transaction_is_waited_for_and_its_work_is_done_once(ledger: Ledger) -> None:
    with child(credit, ledger.url, stops=("in the handler",)) as stopped:
        stopped.reaches("in the handler")
        stopped.signal(signal.SIGSTOP)
        worker = Blocking(ledger.url)
        later = Elsewhere(lambda: worker.transactional("m1", add))
        waiting_for_rows(ledger, 1)
        stopped.signal(signal.SIGCONT)
        stopped.go_on()
        answer = later.result()
        worker.close()

        assert stopped.hear() == "first"
    assert (answer.value, answer.replayed) == ("first", True)
    assert ledger.now == (10, ["m1"])


def test_a_killed_transaction_leaves_nothing_and_the_next_one_runs(ledger: Ledger) -> None:
    with child(credit, ledger.url, stops=("in the handler",)) as killed:
        killed.reaches("in the handler")
        killed.kill()

    with closing(Blocking(ledger.url)) as worker:
        assert not worker.transactional("m1", add).replayed
    assert ledger.now == (10, ["m1"])


# The server.


@pytest.mark.parametrize("worker_type", WORKER_TYPES)
def test_a_killed_server_is_one_clear_line_and_after_its_restart_nothing_is_lost(
    worker_type: type[Worker], own_mariadb: Server
) -> None:
    ledger = Ledger(in_a_new_database(own_mariadb))
    worker = worker_type(ledger.url)
    worker.transactional("m1", add)
    worker.run("pay_1", Handler("paid"))
    handler = Handler()

    own_mariadb.kill()
    for deliver in (worker.run, worker.transactional):
        with pytest.raises(StoreUnavailable, match="the server cannot be reached"):
            deliver("m2", handler)
    own_mariadb.restart()

    assert handler.starts == 0
    assert worker.transactional("m1", add).replayed
    assert worker.run("pay_1", handler).value == "paid"
    assert not worker.transactional("m2", add).replayed
    worker.close()
    assert ledger.balance == 20


@pytest.mark.parametrize("worker_type", WORKER_TYPES)
def test_a_server_that_restarts_between_two_deliveries_is_not_noticed(
    worker_type: type[Worker], own_mariadb: Server
) -> None:
    ledger = Ledger(in_a_new_database(own_mariadb))
    worker = worker_type(ledger.url)
    worker.transactional("m1", add)
    worker.run("pay_1", Handler("paid"))

    own_mariadb.restart()

    assert worker.run("pay_1", Handler()).value == "paid"
    assert not worker.transactional("m2", add).replayed
    worker.close()


@pytest.mark.parametrize("worker_type", WORKER_TYPES)
def test_a_frozen_server_is_not_waited_for_without_end(worker_type: type[Worker], own_mariadb: Server) -> None:
    url = in_a_new_database(own_mariadb)
    with closing(worker_type(url)) as patient:
        patient.run("pay_1", Handler("paid"))
    worker = worker_type(f"{url}?connect_timeout=0.5s&read_timeout=0.5s")

    def replays() -> bool:
        try:
            return bool(worker.run("pay_1", Handler()).value == "paid")
        except StoreUnavailable:
            # So short a time may be over before an answer of a server that is well, on a busy machine.
            return False

    assert eventually(replays)

    own_mariadb.stop()
    began = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable):
            worker.run("pay_2", Handler())
        with pytest.raises(StoreUnavailable, match="the server cannot be reached"):
            worker.transactional("m1", Handler())
        took = time.monotonic() - began
    finally:
        own_mariadb.cont()

    assert took < PATIENCE
    assert eventually(replays)
    worker.close()


def in_a_new_database(server: Server) -> str:
    """A database of the server's that nobody has used."""
    url = server.url.rpartition("/")[0]
    with closing(Blocking("memory:")) as worker, worker.connection(server.url) as connection:
        worker.on(connection, "CREATE DATABASE shop")
    return f"{url}/shop"


# Processes, loops and interrupts.


@pytest.mark.parametrize("worker_type", WORKER_TYPES)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_connections_alone(worker_type: type[Worker], ledger: Ledger) -> None:
    worker = worker_type(ledger.url)
    worker.transactional("before", add)
    worker.run("pay_1", Handler("paid"))

    process = os.fork()
    if process == 0:
        code = 1
        try:
            # In the child the parent's event loop is not used, either.
            mine = worker if worker_type is Blocking else Awaiting(ledger.url)
            if worker_type is Awaiting:
                mine.guard = worker.guard
            found = [mine.transactional(key, add).replayed for key in ("before", "in the child")]
            code = 0 if found == [True, False] and mine.run("pay_1", Handler()).value == "paid" else 2
        finally:
            os._exit(code)
    worker.transactional("after", add)

    assert exit_code(process) == 0
    assert worker.transactional("in the child", add).replayed
    worker.close()
    assert ledger.now == (30, ["after", "before", "in the child", "pay_1"])


def test_an_async_guard_survives_a_new_event_loop(ledger: Ledger) -> None:
    guard = AsyncGuard(ledger.url)

    @guard.transactional("credit", key="key")
    async def credit(key: str, *, tx: Any) -> None:
        async with tx.cursor() as cursor:
            await cursor.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")

    async def deliver() -> tuple[bool, Any]:
        async def handler() -> str:
            return "paid"

        outcome = await credit.outcome("m1")  # type: ignore[call-arg]
        return outcome.replayed, (await guard.run("charge", "pay_1", handler)).value

    assert [asyncio.run(deliver()) for _ in range(3)] == [(False, "paid"), (True, "paid"), (True, "paid")]
    asyncio.run(guard.aclose())
    assert ledger.balance == 10


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest has its own use for."""


def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the next question and its answer."""
    read = pymysql.connections.Connection._read_query_result  # type: ignore[attr-defined]

    def interrupted(*_: object, **__: object) -> Any:
        monkeypatch.setattr(pymysql.connections.Connection, "_read_query_result", read)
        raise Interrupted

    monkeypatch.setattr(pymysql.connections.Connection, "_read_query_result", interrupted)


def test_an_interrupt_between_a_question_and_its_answer_breaks_the_connection(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one who asked would get that answer."""
    worker = Blocking(ledger.url)
    worker.run("pay_1", Handler("paid"))
    worker.transactional("m1", Handler("receipt"))
    never = Handler("wrong")

    for deliver in (worker.run, worker.transactional):
        interrupt_once(monkeypatch)
        with pytest.raises(Interrupted):
            deliver("other", never)

    assert worker.run("pay_1", Handler()).value == "paid"
    assert worker.transactional("m1", Handler()).value == "receipt"
    # A busy server may execute the claim of one who has gone after it was given back: until its lease ends, it stays.
    left = worker.guard.read("charge", "other")
    assert left is None or left.state is State.RUNNING
    assert worker.guard.read("credit", "other") is None
    worker.close()
    assert never.starts == 0
    assert set(ledger.records) - {"other"} == {"m1", "pay_1"}


def test_an_interrupt_in_a_handlers_statement_breaks_the_connection(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Blocking(ledger.url)
    worker.transactional("m1", Handler("receipt"))

    def work(tx: Any) -> Working:
        yield from add(tx)
        interrupt_once(monkeypatch)
        yield "UPDATE wallet SET balance = 77"

    with pytest.raises(Interrupted):
        worker.transactional("m2", work)

    assert worker.transactional("m1", Handler()).value == "receipt"
    assert not worker.transactional("m2", add).replayed
    worker.close()
    assert ledger.balance == 10


def test_a_cancelled_task_breaks_its_connection_and_leaves_nothing(ledger: Ledger, proxy: Proxy) -> None:
    async def scene() -> tuple[bool, Any]:
        async with AsyncGuard(proxy.url()) as guard:

            @guard.transactional("credit", key="key")
            async def credit(key: str, *, tx: Any) -> str:
                async with tx.cursor() as cursor:
                    await cursor.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")
                return "receipt"

            await credit("earlier")  # type: ignore[call-arg]
            fault = proxy.hold_reply(b"UPDATE wallet")
            task = asyncio.create_task(credit("m1"))  # type: ignore[call-arg]
            await asyncio.to_thread(fault.reached.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            fault.released.set()
            outcome = await credit.outcome("m1")  # type: ignore[call-arg]
            return outcome.replayed, (await credit.outcome("earlier")).value  # type: ignore[call-arg]

    assert asyncio.run(scene()) == (False, "receipt")
    assert ledger.now == (20, ["earlier", "m1"])


def test_a_pool_that_is_used_up_says_so(ledger: Ledger) -> None:
    store = MysqlStore(f"{ledger.url}?pool_size=1&pool_timeout=0.1s")
    found: list[Record | None] = []

    with store.transaction() as transaction:
        transaction.begin()
        with pytest.raises(StoreUnavailable, match="raise pool_size"), store.transaction() as another:
            another.begin()
        # Operations of the store have connections of their own.
        found.append(store.read(Address("", "charge", "key")))
    store.close()

    assert found == [None]
