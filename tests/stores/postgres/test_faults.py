"""Faults between a worker and PostgreSQL: lost replies, cut commits, stopped workers, a server that is killed.

The proxy cuts a connection at an exact message, before or after the server has executed it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest

from onefold import TX, AsyncGuard, Guard, Policy, RecordColumn, StoreUnavailable
from onefold._model import Address, Claim, Close, Ending, Entry, Record, Released, State
from onefold.stores.base import Query
from onefold.stores.postgres import open_async_store, open_store
from services.proxy import Proxy
from services.servers import Server
from tests.processes import Stage, child, exit_code
from tests.stores.postgres.tools import (
    DAILY_DRIVERS,
    DRIVERS,
    SCHEMA,
    Hand,
    Worker,
    add,
    another,
    balance,
    records,
    rows,
    somebody_waits,
    through_asyncpg,
)
from tests.support import Handler

# More deliveries than psycopg counts before it prepares a statement.
OFTEN = 8


@pytest.fixture
def url(postgres_url: str) -> str:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    return postgres_url


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with Proxy(url) as proxy:
        yield proxy


@pytest.fixture(params=DAILY_DRIVERS)
def worker(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Worker]:
    """It has delivered before, so that its next message is no greeting."""
    worker = request.param(proxy.url())
    worker.transactional("earlier", add)
    yield worker
    worker.close()


# COMMIT.


@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("value", [None, "receipt"])
def test_a_commit_that_is_cut_has_one_effect_and_its_outcome_is_known(
    worker: Worker, proxy: Proxy, url: str, executed: bool, value: str | None
) -> None:
    starts: list[int] = []

    async def work(hand: Hand) -> Any:
        starts.append(1)
        await add(hand)
        return value

    fault = (proxy.cut_after if executed else proxy.cut_before)(b"COMMIT")
    outcome = worker.transactional("m1", work)

    assert fault.reached.is_set()
    # What the server has executed is not run again: its own result is the answer.
    assert (outcome.value, outcome.replayed, len(starts)) == (value, False, 1 if executed else 2)
    assert (balance(url), records(url)) == (20, ["earlier", "m1"])
    again = worker.transactional("m1", add)
    assert (again.replayed, again.value) == (True, value)


@pytest.mark.parametrize("executed", [True, False])
def test_a_commit_that_is_cut_is_known_by_the_row_that_is_the_record(proxy: Proxy, url: str, executed: bool) -> None:
    with another(url) as connection:
        connection.execute("CREATE TABLE keys (key text PRIMARY KEY, result jsonb)")
    starts: list[str] = []

    with Guard(proxy.url()) as guard:

        @guard.transactional("pay", key="key", record=RecordColumn("keys", "key", result="result"), fingerprint=None)
        def pay(key: str, *, tx: Any = TX) -> str:
            starts.append(key)
            tx.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")
            return f"receipt {len(starts)}"

        pay("earlier")
        fault = (proxy.cut_after if executed else proxy.cut_before)(b"COMMIT")
        outcome = pay.outcome("m1")

    assert fault.reached.is_set()
    assert (outcome.value, outcome.replayed) == (("receipt 2", True) if executed else ("receipt 3", False))
    assert rows(url, "SELECT count(*) FROM keys") == [(2,)]
    assert len(starts) == (2 if executed else 3)


def test_the_commit_of_a_remembered_failure_that_is_cut_is_known_too(worker: Worker, proxy: Proxy, url: str) -> None:
    class Declined(Exception):
        """A final answer."""

    careful = type(worker)(proxy.url(), Policy(final_errors=(Declined,)))
    careful.transactional("first", add)

    async def decline(hand: Hand) -> None:
        await add(hand)
        raise Declined("too little money")

    fault = proxy.cut_after(b"COMMIT")
    with pytest.raises(Declined):
        careful.transactional("m1", decline)
    careful.close()

    assert fault.reached.is_set()
    assert (balance(url), records(url)) == (20, ["earlier", "first", "m1"])


@pytest.mark.parametrize("message", [b"BEGIN", b"UPDATE wallet"])
@pytest.mark.parametrize("executed", [True, False])
def test_a_transaction_that_is_cut_before_its_commit_is_done_again(
    worker: Worker, proxy: Proxy, url: str, message: bytes, executed: bool
) -> None:
    async def work(hand: Hand) -> None:
        # Not prepared, so that the text is on the wire.
        await hand.run("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")

    fault = (proxy.cut_after if executed else proxy.cut_before)(message)
    outcome = worker.transactional("m1", work)

    assert fault.reached.is_set()
    assert not outcome.replayed
    assert (balance(url), records(url)) == (20, ["earlier", "m1"])


# The operations of a store.

ADDRESS = Address("", "charge", "key")
TOKEN = b"t" * 16


def entry(key: str = "key", **fields: Any) -> Entry:
    usual: dict[str, Any] = {"address": Address("", "charge", key), "token": TOKEN, "lease": 30.0, "ttl": 90.0}
    return Entry(**(usual | fields))


CLAIM = Claim(ADDRESS, TOKEN, 30.0, 90.0)
DONE = Ending(state=State.DONE, ttl=60.0, result=b"result")

# What is asked of a store in which the record runs, and what has to be answered although the first answer got lost.
OPERATIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "claim": (lambda store: store.claim(entry("new")), None),
    "extend": (lambda store: store.extend(CLAIM, b"notes"), True),
    "finish": (lambda store: store.finish(CLAIM, DONE), True),
    "release": (lambda store: store.release(CLAIM), True),
    "leave open": (lambda store: store.release(CLAIM, Released(ttl=60.0, attempt=2)), True),
    "read": (lambda store: store.read(ADDRESS), Record),
    "purge": (lambda store: store.purge(10), 0),
    "claim all": (lambda store: store.claim_all([entry("b"), entry("a")]), [None, None]),
    "extend all": (lambda store: store.extend_all([CLAIM]), [True]),
    "close all": (lambda store: store.close_all([Close(CLAIM, DONE)]), [True]),
    "release all": (lambda store: store.close_all([Close(CLAIM)]), [True]),
    "browse": (lambda store: store.browse(Query(), 10), list),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("scheme", ["blocking", "postgresql", "postgresql+asyncpg"])
def test_an_operation_whose_reply_gets_lost_is_sent_again_and_answered_as_if_nothing_had_happened(
    proxy: Proxy, scheme: str, operation: str
) -> None:
    ask, expected = OPERATIONS[operation]

    async def on_loop() -> Any:
        store = open_async_store(proxy.url().replace("postgresql", scheme))
        assert await store.claim(entry()) is None
        fault = proxy.lose_reply()
        answer = await ask(store)
        await store.aclose()
        return fault, answer

    def blocking() -> Any:
        store = open_store(proxy.url())
        assert store.claim(entry()) is None
        fault = proxy.lose_reply()
        answer = ask(store)
        store.close()
        return fault, answer

    fault, answer = blocking() if scheme == "blocking" else asyncio.run(on_loop())

    assert fault.reached.is_set()
    assert isinstance(answer, expected) if isinstance(expected, type) else answer == expected


def test_a_take_over_whose_reply_gets_lost_has_succeeded(proxy: Proxy) -> None:
    store = open_store(proxy.url())
    store.claim(entry())
    successor = entry(token=b"s" * 16)
    seen = store.read(ADDRESS)

    proxy.lose_reply()

    assert store.claim(successor, replacing=seen) is None
    store.close()


def test_a_server_that_loses_every_reply_is_unavailable_in_one_line(proxy: Proxy) -> None:
    with Guard(proxy.url()) as guard:
        guard.run("charge", "earlier", Handler())
        handler = Handler()
        for number in range(1, 9):
            proxy.lose_reply(number)

        with pytest.raises(StoreUnavailable) as refused:
            guard.run("charge", "key", handler)

    assert "\n" not in str(refused.value)
    assert handler.starts == 0


# Workers.


def deliver(stage: Stage, url: str) -> Any:
    """The part of a child: one delivery, which is stopped in its handler."""

    def handler() -> str:
        stage.at("in the handler")
        return "by the zombie"

    with Guard(url) as guard:
        return guard.run("charge", "key", handler).value


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="THIS SYSTEM HAS NO SIGNALS")
def test_a_zombie_is_told_and_the_new_owners_result_stands(url: str) -> None:
    with Guard(url) as guard, child(deliver, url, stops=("in the handler",)) as zombie:
        zombie.reaches("in the handler")
        zombie.signal(signal.SIGSTOP)
        # Its lease ends now: a short one could be over before the handler begins.
        with another(url) as connection:
            assert connection.execute("UPDATE onefold_records SET lease_until = began").rowcount == 1
        outcome = guard.run("charge", "key", Handler("by the next"))
        zombie.signal(signal.SIGCONT)
        zombie.go_on()

        assert (outcome.value, outcome.attempt) == ("by the next", 2)
        assert zombie.hear() == ("ClaimLost", "by the zombie")
        assert guard.run("charge", "key", Handler()).value == "by the next"


# The connections of guards; others come and go.
SERVED = "SELECT pid FROM pg_stat_activity WHERE application_name = 'onefold' AND datname = current_database()"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_goes_on_with_the_guard_of_its_parent_and_leaves_its_connections_alone(url: str) -> None:
    guard = Guard(url)
    guard.run("charge", "before", Handler())

    pid = os.fork()
    if pid == 0:
        done = False
        try:
            outcomes = [guard.run("charge", key, Handler()) for key in ("before", "in the child")]
            guard.close()
            done = [outcome.replayed for outcome in outcomes] == [True, False]
        finally:
            os._exit(0 if done else 1)
    code = exit_code(pid)
    after = guard.run("charge", "after", Handler())
    guard.close()

    assert code == 0
    assert not after.replayed
    assert records(url) == ["after", "before", "in the child"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_that_only_closes_its_parents_guard_ends_none_of_its_connections(url: str) -> None:
    guard = Guard(url)
    guard.run("charge", "before", Handler())
    served = rows(url, SERVED)

    pid = os.fork()
    if pid == 0:
        guard.close()
        os._exit(0)
    assert exit_code(pid) == 0
    guard.run("charge", "after", Handler())

    # One for operations, and one for renewals.
    assert len(served) == 2
    assert rows(url, SERVED) == served
    guard.close()


# The server.


@pytest.fixture
def killed(own_postgres: Server) -> Callable[[], None]:
    def kill_and_restart() -> None:
        own_postgres.kill()
        own_postgres.restart()

    return kill_and_restart


def test_connections_of_a_pool_survive_a_server_that_was_killed(
    own_postgres: Server, killed: Callable[[], None]
) -> None:
    url = own_postgres.url
    with another(url) as connection:
        connection.execute(SCHEMA)
    workers = [driver(url) for driver in DRIVERS]
    for number, worker in enumerate(workers):
        worker.transactional(f"before-{number}", add)

    killed()

    for number, worker in enumerate(workers):
        assert worker.transactional(f"before-{number}", add).replayed
        assert not worker.transactional(f"after-{number}", add).replayed
        worker.close()
    assert (balance(url), len(records(url))) == (60, 6)


@pytest.mark.parametrize("driver", DAILY_DRIVERS)
def test_a_transaction_on_an_idle_connection_that_is_dead_begins_on_a_new_one(driver: type[Worker], url: str) -> None:
    worker = driver(url)
    # So often that psycopg has prepared the statement that is sent with the BEGIN.
    for number in range(OFTEN):
        worker.transactional(f"before-{number}", add)

    with another(url) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    worker.transactional("after", add)

    worker.close()
    assert (balance(url), len(records(url))) == (10 * (OFTEN + 1), OFTEN + 1)


def test_claims_and_results_survive_a_server_that_was_killed(own_postgres: Server, killed: Callable[[], None]) -> None:
    with Guard(own_postgres.url) as guard:
        guard.run("charge", "done", Handler("receipt"))

        def handler() -> str:
            killed()
            return "through the crash"

        outcome = guard.run("charge", "running", handler)

        assert (outcome.value, outcome.recorded) == ("through the crash", True)
        assert [guard.run("charge", key, Handler()).value for key in ("done", "running")] == [
            "receipt",
            "through the crash",
        ]


def test_while_the_server_is_away_nothing_runs_and_afterwards_nothing_has_to_be_restarted(own_postgres: Server) -> None:
    handler = Handler()
    with Guard(own_postgres.url) as guard:
        guard.run("charge", "before", Handler())
        own_postgres.kill()
        with pytest.raises(StoreUnavailable) as refused:
            guard.run("charge", "key", handler)
        own_postgres.restart()

        assert handler.starts == 0
        assert "Is the server up" in str(refused.value)
        assert not guard.run("charge", "key", handler).replayed


def test_pools_of_the_callers_survive_a_server_that_was_killed(
    own_postgres: Server, killed: Callable[[], None]
) -> None:
    url = own_postgres.url

    async def on_loop() -> None:
        async with (
            psycopg_pool.AsyncConnectionPool(url, min_size=3, open=False) as pool,
            asyncpg.create_pool(url, min_size=3) as other,
        ):
            guards = [AsyncGuard(pool), AsyncGuard(other)]
            for number, guard in enumerate(guards):
                await guard.run("charge", f"{number}", Handler())
            await asyncio.to_thread(killed)
            for number, guard in enumerate(guards):
                assert (await guard.run("charge", f"{number}", Handler())).replayed
                await guard.aclose()

    with psycopg_pool.ConnectionPool(url, min_size=3, open=True) as pool, Guard(pool) as guard:
        guard.run("charge", "blocking", Handler())
        killed()
        assert guard.run("charge", "blocking", Handler()).replayed
    asyncio.run(on_loop())


def test_an_operation_that_is_interrupted_gives_no_connection_back(url: str) -> None:
    """The server may still be at work on it."""

    async def story(source: str) -> list[Any]:
        store = open_async_store(source)
        await store.claim(entry("other"))
        with psycopg.connect(url) as holding:
            holding.execute("UPDATE onefold_records SET attempt = 7 WHERE key = 'other'")
            task = asyncio.create_task(store.extend(Claim(Address("", "charge", "other"), TOKEN)))
            await asyncio.to_thread(somebody_waits, url)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        idle = list(store._pool.known_share().idle)  # type: ignore[attr-defined]
        assert await store.extend(Claim(Address("", "charge", "other"), TOKEN, 30.0, 90.0))
        await store.aclose()
        return idle

    for source in (url, through_asyncpg(url)):
        assert asyncio.run(story(source)) == []
        with another(url) as connection:
            connection.execute("DROP TABLE onefold_records, onefold_schema")


@pytest.mark.parametrize("executed", [False, True])
def test_a_connection_that_is_lost_as_a_callers_pool_takes_it_back_hides_nothing(url: str, *, executed: bool) -> None:
    """The work is committed by then: asyncpg's pool resets each connection with a query of its own."""

    async def story(proxy: Proxy) -> None:
        async with asyncpg.create_pool(proxy.url(), min_size=1, max_size=1) as pool, AsyncGuard(pool) as guard:

            @guard.transactional("charge", key="key")
            async def charge(key: str, *, tx: Any) -> str:
                await tx.execute("SELECT 1")
                if key == "fails":
                    raise LookupError
                return "paid"

            await charge("first")  # type: ignore[call-arg]
            for key in ("paid", "fails"):
                fault = (proxy.cut_after if executed else proxy.cut_before)(b"pg_advisory_unlock_all")
                with pytest.raises(LookupError) if key == "fails" else nullcontext():
                    assert await charge(key) == "paid"  # type: ignore[call-arg]
                assert fault.reached.is_set()
            assert await charge("paid") == "paid"  # type: ignore[call-arg]

    with Proxy(url) as proxy:
        asyncio.run(story(proxy))
