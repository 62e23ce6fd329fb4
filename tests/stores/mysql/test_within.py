"""`within` on MariaDB, over PyMySQL and asyncmy: a transaction that the caller owns (rows 14 to 18, 25b and 30a)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pymysql.constants import CLIENT

from onefold import Guard, InsideItself, KeyReused, NotInTransaction, Policy, StoreUnavailable, UsageError
from onefold._delivery import fresh as fresh_flow
from onefold._delivery.fresh import sort_out
from onefold.stores.mysql import joined as mysql_joined
from onefold.stores.mysql.dialect import MARIADB, MYSQL, Mysql
from services.proxy import Proxy
from tests.stores.mysql.wallet import WORKER_TYPES, Blocking, Call, Ledger, Worker, Working, add, connected, deadlocking
from tests.stores.sql.versions import REFUSED, TOO_NEW
from tests.support import Died, Handler
from tests.wallet import never_opened

COMMIT, ROLLBACK = Call("commit"), Call("rollback")


@pytest.fixture
def ledger(mysql_url: str) -> Ledger:
    mysql_joined.looked.clear()
    return Ledger(mysql_url)


@pytest.fixture(params=[MARIADB, MYSQL], ids=["with RETURNING", "without RETURNING"])
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mysql:
    found: Mysql = request.param
    monkeypatch.setattr(mysql_joined, "dialect_of", lambda _version: found)
    return found


@pytest.fixture(params=WORKER_TYPES)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = request.param(never_opened)
    yield worker
    worker.close()


@pytest.fixture
def connection(worker: Worker, ledger: Ledger) -> Iterator[Any]:
    with worker.connection(ledger.url) as connection:
        yield connection


def test_the_record_commits_with_the_work_and_the_guards_own_store_is_never_opened(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    first = worker.within(connection, "m1", add)
    before_the_commit = ledger.now
    worker.on(connection, COMMIT)
    second = worker.within(connection, "m1", add)
    worker.on(connection, COMMIT)

    assert before_the_commit == (0, [])
    assert (first.replayed, second.replayed) == (False, True)
    assert ledger.now == (10, ["m1"])


def test_the_callers_rollback_takes_the_record_back_and_the_next_delivery_runs(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    worker.within(connection, "m1", add)
    worker.on(connection, ROLLBACK)
    again = worker.within(connection, "m1", add)
    worker.on(connection, COMMIT)

    assert not again.replayed
    assert ledger.now == (10, ["m1"])


def test_a_savepoint_that_is_rolled_back_takes_the_record_back_and_nothing_else(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    worker.within(connection, "m1", add)
    worker.on(connection, "SAVEPOINT part")
    worker.within(connection, "m2", add)
    worker.on(connection, "ROLLBACK TO SAVEPOINT part", COMMIT)

    assert ledger.now == (10, ["m1"])
    assert not worker.within(connection, "m2", add).replayed


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_when_the_handler_raises_and_the_caller_commits_the_next_delivery_runs(
    worker: Worker, connection: Any, ledger: Ledger, error: BaseException
) -> None:
    with pytest.raises(type(error)) as raised:
        worker.within(connection, "m1", Handler(error=error))
    worker.on(connection, "UPDATE wallet SET balance = balance + 1", COMMIT)
    again = worker.within(connection, "m1", add)
    worker.on(connection, COMMIT)

    assert raised.value is error
    assert not again.replayed
    assert ledger.now == (11, ["m1"])


# Row 14.


def test_an_autocommit_connection_is_refused_before_anything_runs(worker: Worker, ledger: Ledger) -> None:
    handler = Handler()

    with worker.connection(ledger.url, autocommit=True) as connection, pytest.raises(NotInTransaction) as refused:
        worker.within(connection, "m1", handler)

    assert "autocommit" in str(refused.value)
    assert (handler.starts, ledger.records) == (0, [])


BEGUN: dict[str, tuple[bool, list[str | Call]]] = {
    "the first statement is ours": (False, []),
    "a read before": (False, ["SELECT * FROM wallet"]),
    "begun by hand": (False, ["BEGIN"]),
    "begun by hand in autocommit mode": (True, ["START TRANSACTION"]),
    "begun by the driver in autocommit mode": (True, [Call("begin")]),
    "autocommit turned off": (True, [Call("autocommit", (False,))]),
}


@pytest.mark.parametrize("how", BEGUN)
def test_every_way_to_be_in_a_transaction_will_do(worker: Worker, ledger: Ledger, how: str) -> None:
    autocommit, begin = BEGUN[how]

    def deliver() -> bool:
        with worker.connection(ledger.url, autocommit=autocommit) as connection:
            worker.on(connection, *begin)
            outcome = worker.within(connection, "m1", add)
            worker.on(connection, COMMIT)
            return outcome.replayed

    assert [deliver(), deliver()] == [False, True]
    assert ledger.now == (10, ["m1"])


@pytest.mark.parametrize("way", ["one", "many"])
def test_a_transaction_that_a_deadlock_has_ended_is_none(worker: Worker, ledger: Ledger, way: str) -> None:
    """The server says nothing of it with its error, and the driver still believes in the transaction."""
    handler = Handler()
    with (
        worker.connection(ledger.url, autocommit=True) as connection,
        Blocking("memory:").connection(ledger.url) as other,
    ):
        worker.on(connection, Call("begin"))
        with pytest.raises(worker.error.OperationalError, match="Deadlock"):
            worker.do(connection, deadlocking(other))

        with pytest.raises(NotInTransaction):
            worker.within(connection, "m1", handler) if way == "one" else worker.fresh(connection, ["m1", "m2"])

    assert (handler.starts, ledger.now) == (0, (0, []))


# Errors of the handler.


def test_a_statement_that_fails_shows_its_own_error(worker: Worker, connection: Any, ledger: Ledger) -> None:
    with pytest.raises(worker.error.OperationalError, match="CONSTRAINT"):
        worker.within(connection, "m1", lambda: add(amount=-1))
    worker.on(connection, COMMIT)

    assert ledger.now == (0, [])


@pytest.mark.parametrize("way", [COMMIT, ROLLBACK, "COMMIT", "CREATE TABLE drafts (number INTEGER)"])
@pytest.mark.parametrize("value", [None, "receipt"])
def test_a_handler_that_ends_the_transaction_by_itself_is_told(
    worker: Worker, connection: Any, way: str | Call, value: str | None
) -> None:
    def handler() -> Working:
        yield way
        return value

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        worker.within(connection, "m1", handler)


@pytest.mark.parametrize("value", [None, "receipt"])
def test_a_handler_that_goes_on_after_a_deadlock_is_told(
    worker: Worker, connection: Any, ledger: Ledger, value: str | None
) -> None:
    with Blocking("memory:").connection(ledger.url) as other:

        def handler() -> Working:
            with pytest.raises(worker.error.OperationalError, match="Deadlock"):
                yield from deadlocking(other)
            return value

        with pytest.raises(UsageError, match="let the database's errors propagate: a deadlock ends a transaction"):
            worker.within(connection, "m1", handler)
    worker.on(connection, COMMIT)

    assert ledger.records == []


# Row 25b: the tables.


def test_the_first_use_makes_the_tables_beside_and_the_callers_transaction_sees_no_ddl(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    worker.on(connection, "UPDATE wallet SET balance = balance + 1")
    worker.within(connection, "m1", add)
    inside = ledger.tables, ledger.now
    worker.on(connection, ROLLBACK)

    assert inside == ({"wallet", "payments", "onefold_records", "onefold_schema"}, (0, []))
    assert ledger.now == (0, [])
    assert not worker.within(connection, "m1", add).replayed


def test_tables_that_were_dropped_since_are_made_again(worker: Worker, connection: Any, ledger: Ledger) -> None:
    worker.within(connection, "m1", add)
    worker.on(connection, COMMIT)
    ledger.execute("DROP TABLE onefold_records, onefold_schema")

    worker.on(connection, "SELECT * FROM wallet")
    assert not worker.within(connection, "m2", add).replayed
    worker.on(connection, COMMIT)

    assert ledger.now == (20, ["m2"])


def test_another_database_on_the_same_connection_gets_tables_of_its_own(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    worker.within(connection, "m1", Handler())
    name = f"{ledger.url.rpartition('/')[2]}_second"
    worker.on(connection, COMMIT, f"CREATE OR REPLACE DATABASE {name}", f"USE {name}")
    try:
        assert not worker.within(connection, "m1", Handler()).replayed
        worker.on(connection, COMMIT)
        assert ledger.rows(f"SELECT COUNT(*) FROM {name}.onefold_records") == [(1,)]
    finally:
        ledger.execute(f"DROP DATABASE {name}")


def test_without_the_right_to_make_tables_the_delivery_is_refused_in_words(worker: Worker, ledger: Ledger) -> None:
    handler = Handler()

    with limited(ledger, "SELECT, INSERT, UPDATE, DELETE") as url, worker.connection(url) as connection:
        with pytest.raises(StoreUnavailable, match="lacks a permission") as refused:
            worker.within(connection, "m1", handler)

        assert "\n" not in str(refused.value)
        assert handler.starts == 0


class limited:  # noqa: N801
    """A user with some rights only."""

    def __init__(self, ledger: Ledger, rights: str) -> None:
        self._ledger, self._rights = ledger, rights

    def __enter__(self) -> str:
        database = self._ledger.url.rpartition("/")[2]
        self._ledger.execute("CREATE OR REPLACE USER clerk@'%' IDENTIFIED BY 'secret'")
        self._ledger.execute(f"GRANT {self._rights} ON {database}.* TO clerk@'%'")
        scheme, _, rest = self._ledger.url.partition("://")
        return f"{scheme}://clerk:secret@{rest.partition('@')[2]}"

    def __exit__(self, *_: object) -> None:
        self._ledger.execute("DROP USER clerk@'%'")


@pytest.mark.parametrize("key", ["known", "new"])
def test_tables_of_a_newer_version_are_refused_in_one_line_and_nothing_runs(
    worker: Worker, connection: Any, ledger: Ledger, key: str
) -> None:
    worker.within(connection, "known", Handler("receipt"))
    worker.on(connection, COMMIT)
    ledger.execute(TOO_NEW)
    # Another process, which has not looked yet.
    mysql_joined.looked.clear()
    handler = Handler()

    with pytest.raises(StoreUnavailable, match=REFUSED) as raised:
        worker.within(connection, key, handler)

    assert "\n" not in str(raised.value)
    assert (handler.starts, ledger.records) == (0, ["known"])


# What it costs.

MESSAGES: dict[str, tuple[Handler, list[str]]] = {
    "new": (Handler(None), ["INSERT", "SAVEPOINT", "RELEASE"]),
    "new, with a result": (Handler("receipt"), ["INSERT", "SAVEPOINT", "RELEASE", "UPDATE"]),
    "new, and it fails": (Handler(error=ValueError()), ["INSERT", "SAVEPOINT", "DELETE", "RELEASE"]),
    "known": (Handler(None), ["INSERT", "SELECT"]),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_what_a_delivery_costs(worker: Worker, ledger: Ledger, case: str) -> None:
    handler, expected = MESSAGES[case]
    with Proxy(ledger.url) as proxy, worker.connection(proxy.url()) as connection:
        worker.within(connection, "known", Handler("receipt"))
        worker.on(connection, COMMIT)

        with proxy.counting() as count, suppress(ValueError):
            worker.within(connection, case.partition(",")[0], handler)

    assert [message[5:].split()[0].decode() for message in count.messages] == expected


def test_a_fresh_of_which_a_later_part_fails_cannot_be_committed(
    worker: Worker, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_flow, "BATCH_MAX", 2)
    keys, refused = ["m1", "m2", "m3"], list[bool]()
    # To close what is closed already is an error of PyMySQL's.
    with suppress(worker.error.Error), worker.connection(ledger.url) as connection, connected(ledger.url) as other:
        worker.fresh(connection, ["earlier"])
        worker.on(connection, COMMIT, "SET innodb_lock_wait_timeout = 1")
        Guard("memory:").within(other).run("credit", "m3", lambda: None)
        with pytest.raises(worker.error.OperationalError, match="Lock wait timeout"):
            worker.fresh(connection, keys)
        refused.append(True)
        worker.on(connection, COMMIT)

    assert refused
    assert ledger.records == ["earlier"]


class Struck(BaseException):
    """An interrupt."""


def test_a_fresh_that_is_interrupted_in_a_later_part_cannot_be_committed(
    worker: Worker, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def struck(works: Any) -> Any:
        calls.append(works)
        if len(calls) == 2:
            raise Struck
        return (yield from sort_out(works))

    with suppress(worker.error.Error), worker.connection(ledger.url) as connection:
        worker.fresh(connection, ["earlier"])
        worker.on(connection, COMMIT)
        monkeypatch.setattr(fresh_flow, "BATCH_MAX", 2)
        monkeypatch.setattr(fresh_flow, "sort_out", struck)
        with pytest.raises(Struck):
            worker.fresh(connection, ["m1", "m2", "m3"])
        worker.on(connection, COMMIT)

    assert len(calls) == 2
    assert ledger.records == ["earlier"]


def test_a_batch_of_500_asks_once(worker: Worker, ledger: Ledger, dialect: Mysql) -> None:
    keys = [f"message-{number:03}" for number in range(500)]
    with Proxy(ledger.url) as proxy, worker.connection(proxy.url()) as connection:
        worker.fresh(connection, keys[:250])
        worker.on(connection, COMMIT)

        with proxy.counting() as count:
            fresh = worker.fresh(connection, keys[::-1] + keys[:3])

    assert (sorted(fresh.new), sorted(fresh.seen)) == (keys[250:], sorted(keys[:250] + keys[:3]))
    assert count.trips == (1 if dialect.insert_returns else 2)


# Whatever the caller's session is like.

SESSIONS: dict[str, list[str]] = {
    "another time zone": ["SET time_zone = '+13:00'"],
    "not strict": ["SET sql_mode = ''"],
    "ANSI": ["SET sql_mode = 'ANSI'"],
    "no backslashes": ["SET sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT,HIGH_NOT_PRECEDENCE'"],
    "Oracle": ["SET sql_mode = 'ORACLE,EMPTY_STRING_IS_NULL,PAD_CHAR_TO_FULL_LENGTH'"],
    "latin1": ["SET NAMES latin1"],
    "wide characters": ["SET character_set_connection = utf16, collation_connection = utf16_bin"],
    "German": ["SET lc_messages = 'de_DE', lc_time_names = 'de_DE'"],
    "READ COMMITTED": ["SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"],
    "SERIALIZABLE": ["SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"],
}


@pytest.mark.parametrize("session", SESSIONS)
def test_the_callers_session_does_not_matter(worker: Worker, connection: Any, ledger: Ledger, session: str) -> None:
    worker.on(connection, *SESSIONS[session])
    keys = ["Key", "KEY", "key ", "kéy", "👍", "k\\'y"]

    outcomes = [worker.within(connection, key, Handler(f"{key} ✓")) for key in keys * 2]
    worker.on(connection, COMMIT)

    assert [(one.replayed, one.value) for one in outcomes] == [
        (replayed, f"{key} ✓") for replayed in (False, True) for key in keys
    ]
    assert sorted(ledger.records) == sorted(keys)
    left = ledger.rows("SELECT MIN(expires) - UNIX_TIMESTAMP(), MAX(expires) - UNIX_TIMESTAMP() FROM onefold_records")
    # Another time zone would be hours away.
    assert all(abs(one - 86_400) < 1_800 for one in left[0])


@pytest.mark.parametrize("form", ["dictionaries", "unbuffered", "bytes", "converters", "found rows"])
@pytest.mark.usefixtures("dialect")
def test_the_form_in_which_the_caller_wants_rows_does_not_matter_and_stays(
    worker: Worker, ledger: Ledger, form: str
) -> None:
    options: dict[str, dict[str, Any]] = {
        "dictionaries": worker.dictionaries,
        "unbuffered": worker.unbuffered,
        "bytes": {"use_unicode": False},
        "converters": {"conv": worker.converters | {kind: lambda _cell: "shouted" for kind in range(256)}},
        "found rows": {"client_flag": CLIENT.FOUND_ROWS},
    }
    with worker.connection(ledger.url, **options[form]) as connection:
        before = worker.on(connection, "SELECT 'text', 1.5e0")

        outcomes = [worker.within(connection, "m1", Handler("Receipt")) for _ in range(2)]
        seen = worker.fresh(connection, ["m1", "m2"])
        after = worker.on(connection, "SELECT 'text', 1.5e0")

    assert [(one.replayed, one.value) for one in outcomes] == [(False, "Receipt"), (True, "Receipt")]
    assert (seen.new, seen.seen) == (["m2"], ["m1"])
    assert before == after


def test_a_read_before_shows_an_old_snapshot_and_the_record_is_found_all_the_same(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    """REPEATABLE READ, MySQL's default: a plain read would find nothing."""
    worker.within(connection, "earlier", Handler())
    worker.on(connection, COMMIT, "SELECT * FROM onefold_records")
    with worker.connection(ledger.url) as other:
        worker.within(other, "m1", Handler("receipt"))
        worker.on(other, COMMIT)

    handler = Handler("another")
    outcome = worker.within(connection, "m1", handler)

    assert (outcome.replayed, outcome.value, handler.starts) == (True, "receipt", 0)


@pytest.mark.usefixtures("dialect")
def test_a_batch_after_a_read_finds_what_is_newer_than_the_snapshot(
    worker: Worker, connection: Any, ledger: Ledger
) -> None:
    worker.fresh(connection, ["earlier"])
    worker.on(connection, COMMIT, "SELECT * FROM onefold_records")
    with worker.connection(ledger.url) as other:
        worker.fresh(other, ["m1"])
        worker.on(other, COMMIT)

    fresh = worker.fresh(connection, ["m1", "m2"])

    assert (fresh.new, fresh.seen) == (["m2"], ["m1"])


# The rest.


def test_a_policy_that_remembers_failures_is_refused(worker: Worker, connection: Any) -> None:
    handler = Handler()

    with pytest.raises(UsageError, match="the rollback removes it"):
        worker.within(connection, "m1", handler, policy=Policy(final_errors=(ValueError,)))

    assert handler.starts == 0


def test_the_same_key_with_another_payload_is_refused(worker: Worker, connection: Any) -> None:
    handler = Handler()

    for _ in range(2):
        worker.within(connection, "m1", handler, payload={"amount": 10})
    with pytest.raises(KeyReused):
        worker.within(connection, "m1", handler, payload={"amount": 11})

    assert handler.starts == 1


def test_a_bypass_that_fails_leaves_what_was_done_also_if_the_caller_commits(worker: Worker, connection: Any) -> None:
    worker.within(connection, "m1", Handler("receipt"))
    worker.on(connection, COMMIT)
    with pytest.raises(ValueError, match="no"):
        worker.within(connection, "m1", Handler(error=ValueError("no")), bypass=True)
    worker.on(connection, COMMIT)

    outcome = worker.within(connection, "m1", add)

    assert (outcome.value, outcome.replayed) == ("receipt", True)


def test_a_bypass_runs_it_once_more(worker: Worker, connection: Any, ledger: Ledger) -> None:
    worker.within(connection, "m1", add)
    worker.within(connection, "m1", add, bypass=True)
    worker.within(connection, "m1", add)
    worker.on(connection, COMMIT)

    assert ledger.now == (20, ["m1"])


def test_a_handler_may_take_longer_than_its_record_is_kept(worker: Worker, connection: Any) -> None:
    def work_for_long() -> Working:
        yield "UPDATE onefold_records SET expires = 1"
        return "done"

    assert worker.within(connection, "m1", work_for_long, policy=Policy(keep="1h")).value == "done"


def test_a_handler_that_delivers_its_own_key_is_told(ledger: Ledger) -> None:
    worker = Blocking(never_opened)

    with worker.connection(ledger.url) as connection, pytest.raises(InsideItself):
        worker.within(connection, "m1", lambda: worker.within(connection, "m1", Handler()))


@pytest.mark.parametrize("worker_type", WORKER_TYPES)
def test_a_connection_of_the_other_kind_is_refused(worker_type: type[Worker], ledger: Ledger) -> None:
    (other,) = (one for one in WORKER_TYPES if one is not worker_type)
    worker, stranger, handler = worker_type(never_opened), other(never_opened), Handler()

    with stranger.connection(ledger.url) as connection, pytest.raises(UsageError, match="joins a connection of"):
        worker.within(connection, "m1", handler)
    worker.close()
    stranger.close()

    assert handler.starts == 0
