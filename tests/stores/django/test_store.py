"""`django://default`: the whole contract on each database, transactions that are blocks of Django's, and its limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

pytest.importorskip("django")

from django.db import Error, connections, transaction

from onefold import AsyncGuard, Guard, Policy, RememberedFailure, StoreUnavailable, UsageError
from onefold._heartbeat import beats as heartbeat
from onefold.stores.base import Claim, Ending, Entry, Gone, Record
from onefold.stores.django import DjangoStore
from onefold.stores.django.connection import beside, in_transaction
from onefold.stores.mysql import orm as mysql
from onefold.stores.sql.pool import run_on
from onefold.testing import StoreContract
from services.proxy import Proxy
from tests.stores.django.project import Counter, alias_of, configure, described, ledger_at, payments, project
from tests.stores.sqlalchemy.wallet import Ledger
from tests.support import PATIENCE, Died, Handler, elsewhere


@pytest.fixture(scope="module", autouse=True)
def _project() -> Iterator[None]:
    with project():
        yield


def opened(settings: dict[str, Any]) -> DjangoStore:
    """In another process, which has to configure Django for itself."""
    with suppress(RuntimeError):
        import pymysql

        pymysql.install_as_MySQLdb()
        configure({"default": settings})
    return DjangoStore("default")


class OnDjango(StoreContract):
    """Each thread has a connection of its own, as Django has it."""

    racers = 4
    database: str

    @pytest.fixture(autouse=True)
    def set_up(self, request: pytest.FixtureRequest) -> Iterator[None]:
        ledger = ledger_at(request, self.database)
        self.settings = described(self.database, ledger.address)
        with alias_of(self.database, ledger.address) as self.alias:
            yield
        ledger.close()

    def process_source(self) -> partial[DjangoStore]:
        return partial(opened, self.settings)

    def open_store(self) -> DjangoStore:
        return InThreadsThatEnd(self.alias)


class InThreadsThatEnd(DjangoStore):
    """Django closes connections at the end of a request; a thread of the contract's ends without one."""

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        with self._ending():
            return super().claim(entry, replacing=replacing)

    def finish(self, claim: Claim, ending: Ending) -> bool:
        with self._ending():
            return super().finish(claim, ending)

    def _run_on(self, pool: Any, work: Callable[..., Any]) -> Any:
        with self._ending():
            return run_on(pool, work)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            if threading.current_thread() is not threading.main_thread():
                connections[self.alias].close()


@pytest.mark.more
class TestSqlite(OnDjango):
    database = "sqlite"


@pytest.mark.more
class TestPostgres(OnDjango):
    database = "postgres"


@pytest.mark.more
class TestMariaDb(OnDjango):
    database = "mariadb"


# Transactions.


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = ledger_at(request, request.param)
    yield ledger
    ledger.close()


@pytest.fixture
def at(ledger: Ledger) -> Iterator[Counter]:
    with alias_of(ledger.database, ledger.address) as alias:
        counter = Counter(alias, ledger)
        counter.guard = Guard(f"django://{alias}")
        yield counter
        counter.guard.close()


def deliver(at: Counter, key: str, work: Callable[..., Any]) -> Any:
    @at.guard.transactional("credit", key="key")
    def credit(key: str, *, tx: Any) -> Any:
        assert tx is at.connection
        return work()

    return credit.outcome(key)


def test_the_record_commits_with_the_work_and_with_what_models_do(at: Counter, ledger: Ledger) -> None:
    def work() -> None:
        at.add()
        at.pay()

    outcomes = [deliver(at, "m1", work) for _ in range(2)]

    assert [one.replayed for one in outcomes] == [False, True]
    assert (ledger.balance, ledger.records) == (10, ["m1"])
    assert payments().objects.using(at.alias).count() == 1
    assert not in_transaction(at.connection)


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_a_handler_that_raises_leaves_neither_record_nor_work(
    at: Counter, ledger: Ledger, error: BaseException
) -> None:
    def fail() -> None:
        at.add()
        raise error

    with pytest.raises(type(error)) as raised:
        deliver(at, "m1", fail)

    assert raised.value is error
    assert (ledger.balance, ledger.records) == (0, [])
    assert not deliver(at, "m1", at.add).replayed


def test_a_statement_that_fails_shows_its_own_error_and_undoes_all(at: Counter, ledger: Ledger) -> None:
    def overdraw() -> None:
        at.add(5)
        at.add(-10)

    with pytest.raises(Error, match=r"(?i)constraint"):
        deliver(at, "m1", overdraw)

    assert (ledger.balance, ledger.records) == (0, [])
    assert not in_transaction(at.connection)


def test_hooks_run_after_our_commit(at: Counter, ledger: Ledger) -> None:
    seen: list[Any] = []

    def handler() -> None:
        at.add()
        transaction.on_commit(lambda: seen.append((ledger.balance, ledger.records)), using=at.alias)

    deliver(at, "m1", handler)
    deliver(at, "m1", handler)

    assert seen == [(10, ["m1"])]


class Declined(Exception):
    """A final answer."""


@pytest.mark.parametrize("way_to_fail", ["by itself", "after a statement that failed"])
def test_a_remembered_failure_is_committed_and_what_its_handler_wrote_and_hooked_is_not(
    at: Counter, ledger: Ledger, way_to_fail: str
) -> None:
    at.guard = Guard(f"django://{at.alias}", policy=Policy(final_errors=(Declined,)))
    hooked: list[int] = []

    def decline() -> None:
        at.add()
        transaction.on_commit(lambda: hooked.append(1), using=at.alias)
        if way_to_fail != "by itself":
            with suppress(Error):
                at.pay()
                at.pay()
        raise Declined("too little money")

    with pytest.raises(Declined):
        deliver(at, "m1", decline)
    with pytest.raises((Declined, RememberedFailure), match="too little money"):
        deliver(at, "m1", at.add)

    assert (ledger.balance, ledger.records, hooked) == (0, ["m1"], [])


def test_inside_of_a_callers_block_it_is_refused_in_words_that_help(at: Counter, ledger: Ledger) -> None:
    handler = Handler()

    with at.atomic(), pytest.raises(UsageError, match=r"ATOMIC_REQUESTS.*guard\.within"):
        deliver(at, "m1", handler)

    assert (handler.starts, ledger.records) == (0, [])


def test_the_block_around_a_test_of_djangos_is_looked_through(at: Counter, ledger: Ledger) -> None:
    # As `django.test.TestCase` marks the block in which each test runs.
    deliver(at, "earlier", at.add)
    around = at.atomic()
    around._from_testcase = True
    around.__enter__()
    try:
        outcomes = [deliver(at, "m1", at.add) for _ in range(2)]
    finally:
        transaction.set_rollback(True, using=at.alias)
        around.__exit__(None, None, None)

    assert [one.replayed for one in outcomes] == [False, True]
    assert (ledger.balance, ledger.records) == (10, ["earlier"])


BREAKS = {
    "postgres": {
        "serialization failure": "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$",
        "deadlock": "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$",
        "lost connection": "SELECT pg_terminate_backend(pg_backend_pid())",
    },
    "mariadb": {
        "serialization failure": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1205",
        "deadlock": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213",
        "lost connection": "KILL CONNECTION CONNECTION_ID()",
    },
}


@pytest.mark.parametrize("failure", ["serialization failure", "deadlock", "lost connection"])
@pytest.mark.parametrize("ledger", ["postgres", "mariadb"], indirect=True)
def test_what_a_new_transaction_may_mend_is_tried_again(at: Counter, ledger: Ledger, failure: str) -> None:
    starts: list[int] = []

    def unlucky() -> str:
        starts.append(1)
        at.add()
        if len(starts) < 3:
            at.execute(BREAKS[ledger.database][failure])
        return "done"

    outcome = deliver(at, "m1", unlucky)

    assert (outcome.value, outcome.replayed, len(starts)) == ("done", False, 3)
    assert (ledger.balance, ledger.records) == (10, ["m1"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ledger", ["postgres", "mariadb"], indirect=True)
def test_a_commit_whose_reply_is_lost_is_resolved_by_delivering_again(ledger: Ledger, when: str) -> None:
    with Proxy(ledger.address) as proxy, alias_of(ledger.database, proxy.url()) as alias:
        at = Counter(alias, ledger)
        at.guard = Guard(f"django://{alias}")
        deliver(at, "earlier", at.add)
        starts: list[int] = []

        def work() -> str:
            starts.append(1)
            at.add()
            return "done"

        cut = proxy.cut_before if when == "before" else proxy.cut_after
        fault = cut(lambda message: b"COMMIT\0" in message or b"\x03COMMIT" in message)
        outcome = deliver(at, "m1", work)

        assert fault.reached.is_set()
        assert (outcome.value, outcome.replayed) == ("done", False)
        assert len(starts) == (2 if when == "before" else 1)
        assert (ledger.balance, ledger.records) == (20, ["earlier", "m1"])


@pytest.mark.parametrize("ledger", ["mariadb"], indirect=True)
def test_the_way_of_mysql_which_tells_less_works_too(
    at: Counter, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql, "sql_of", lambda _version: mysql.MYSQL)

    outcomes = [deliver(at, "m1", at.add), deliver(at, "m1", at.add)]
    with at.atomic():
        outcomes += [at.within("m2", at.add), at.within("m2", at.add)]

    assert [one.replayed for one in outcomes] == [False, True, False, True]
    assert (ledger.balance, ledger.records) == (20, ["m1", "m2"])


# Claims.


def seen_by_others(at: Counter, key: str) -> str | None:
    with Guard(f"django://{at.alias}") as other:
        record = other.read("charge", key)
    return None if record is None else record.state.value


@pytest.mark.parametrize("ledger", ["postgres", "mariadb"], indirect=True)
def test_a_claim_in_a_callers_block_is_seen_at_once_and_stays_when_the_block_rolls_back(at: Counter) -> None:
    seen: list[Any] = []

    with suppress(ValueError), at.atomic():
        at.add()
        at.guard.run("charge", "c1", lambda: seen.append(_in_another_thread(seen_by_others, at, "c1")))
        raise ValueError("no")

    assert seen == ["running"]
    assert seen_by_others(at, "c1") == "done"
    assert at.ledger.balance == 0


def _in_another_thread(work: Callable[..., Any], at: Counter, *args: Any) -> Any:
    def answer() -> Any:
        found = work(at, *args)
        connections[at.alias].close()
        return found

    return elsewhere(answer)


@contextmanager
def copied(at: Counter) -> Iterator[list[int]]:
    """Of how many connections beside it the thread's own was the model."""
    made: list[int] = []

    def counted(model: Any) -> Any:
        assert model is at.connection
        made.append(1)
        return beside(model)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("onefold.stores.django.beside", counted)
        yield made


def test_outside_of_a_block_a_claim_takes_the_connection_of_the_thread(at: Counter) -> None:
    with copied(at) as made:
        outcomes = [at.guard.run("charge", key, Handler("paid")) for key in ("c1", "c2")]

    # The one beside is for the renewal of claims.
    assert ([outcome.value for outcome in outcomes], made) == (["paid", "paid"], [1])


@pytest.mark.parametrize("age", [0, None])
@pytest.mark.parametrize("ledger", ["postgres", "mariadb"], indirect=True)
def test_connections_beside_are_few_and_kept_where_django_keeps_its_own(ledger: Ledger, age: int | None) -> None:
    with alias_of(ledger.database, ledger.address, CONN_MAX_AGE=age) as alias, Guard(f"django://{alias}") as guard:
        at = Counter(alias, ledger)
        at.guard = guard
        with copied(at) as made, at.atomic():
            for number in range(3):
                guard.run("charge", str(number), Handler())

        idle = guard.store._pool_of_alias._beside._idle
        # One for claims, and one for their renewal.
        assert made == [1, 1]
        assert [conn.connection.connection is not None for conn in idle] == [age is None]


def test_the_heartbeat_leaves_no_connection_open_in_its_thread(at: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten times a second, of a lease that does not run out on a busy machine.
    monkeypatch.setattr(heartbeat, "BEATS_PER_LEASE", 300)
    beaten = threading.Event()
    extend_all, seen = at.guard.store.extend_all, []

    def watched(claims: Any) -> list[bool]:
        answers: list[bool] = extend_all(claims)
        seen.append((answers, connections[at.alias].connection))
        beaten.set()
        return answers

    at.guard.store.extend_all = watched
    at.guard.run("charge", "c1", lambda: beaten.wait(PATIENCE))
    at.guard.close()

    assert seen[0] == ([True], None)


@pytest.mark.parametrize("ledger", ["postgres", "mariadb"], indirect=True)
def test_a_connection_that_was_cut_is_replaced(at: Counter, ledger: Ledger) -> None:
    at.guard.run("charge", "earlier", Handler())
    at.execute("SELECT 1")
    with suppress(Error), connections[at.alias].copy().cursor() as cursor:
        kill = {
            "postgres": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND datname = current_database()",
            "mariadb": f"KILL CONNECTION {at.execute('SELECT CONNECTION_ID()')[0][0]}"
            if ledger.database == "mariadb"
            else "",
        }[ledger.database]
        cursor.execute(kill)
        cursor.db.close()

    assert at.guard.run("charge", "c1", Handler("paid")).value == "paid"


# Words.


def test_an_alias_that_is_not_there_is_refused(ledger: Ledger, at: Counter) -> None:
    with pytest.raises(UsageError, match=f"no such alias in DATABASES; did you mean '{at.alias}'|There are: "):
        Guard(f"django://{at.alias}x").run("charge", "c1", Handler())


@pytest.mark.parametrize("url", ["django:", "django:default", "django:///default", "django://default/x", "django://#x"])
def test_a_url_without_an_alias_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="write django://ALIAS"):
        Guard(url).run("charge", "c1", Handler())


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(UsageError, match="'auto_shema' is not one of auto_schema"):
        Guard("django://default?auto_shema=no").run("charge", "c1", Handler())


def test_an_async_guard_is_refused() -> None:
    with pytest.raises(UsageError, match="Django has no async transactions"):
        _ = AsyncGuard("django://default").store


def test_without_tables_and_without_the_right_to_make_them_nothing_runs(at: Counter, ledger: Ledger) -> None:
    handler = Handler()
    guard = Guard(f"django://{at.alias}?auto_schema=no")

    with pytest.raises(StoreUnavailable, match="onefold schema"):
        guard.run("charge", "c1", handler)

    assert (handler.starts, ledger.records) == (0, [])
