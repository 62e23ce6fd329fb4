"""MySQL: URLs that are wrong, and servers that refuse. One clear line each, no password in it, and nothing runs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import asyncmy.errors
import pymysql
import pytest

from onefold import AsyncGuard, Guard, Policy, StoreUnavailable, UsageError
from onefold.stores.mysql import open_async_store, open_store
from onefold.stores.mysql.asyncmy import connection as asyncmy_connection
from onefold.stores.mysql.dialect import MARIADB, MYSQL, dialect_of
from onefold.stores.mysql.errors import MEANINGS, NOT_REACHED, meaning
from onefold.stores.mysql.pymysql import connection as pymysql_connection
from onefold.stores.mysql.urls import settings_of
from onefold.stores.sql.connection import ErrorClass
from services.house import House
from services.servers import Server
from tests.stores.mysql.wallet import DAILY_TYPES, Blocking, Ledger, Worker, connected
from tests.stores.sql.versions import REFUSED, TOO_NEW
from tests.support import Handler, eventually

PASSWORD = "hunter2"


@pytest.fixture
def ledger(mysql_url: str) -> Ledger:
    return Ledger(mysql_url)


@pytest.fixture(params=DAILY_TYPES)
def worker_type(request: pytest.FixtureRequest) -> type[Worker]:
    found: type[Worker] = request.param
    return found


def refused(worker_type: type[Worker], url: str, *, says: str) -> None:
    """Both ways to deliver are refused in one line, and nothing runs."""
    worker, handler = worker_type(url), Handler()
    for deliver in (worker.run, worker.transactional):
        with pytest.raises(StoreUnavailable) as raised:
            deliver("pay_1", handler)
        message = str(raised.value)
        assert says in message
        assert "\n" not in message
        assert PASSWORD not in message
        assert raised.value.__cause__ is not None
    shown = repr(worker.guard) + repr(worker.guard.store)
    worker.close()
    assert handler.starts == 0
    assert PASSWORD not in shown


def changed(url: str, *, user: str | None = None, path: str | None = None) -> str:
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port}"
    return parts._replace(
        netloc=f"{user or parts.username}:{PASSWORD if user else parts.password}@{host}", path=path or parts.path
    ).geturl()


@pytest.fixture
def limited(ledger: Ledger) -> Iterator[str]:
    """The URL of a user without any right."""
    ledger.execute(f"CREATE OR REPLACE USER limited@'%' IDENTIFIED BY '{PASSWORD}'")
    yield changed(ledger.url, user="limited")
    ledger.execute("DROP USER limited@'%'")


def grant(ledger: Ledger, rights: str) -> None:
    ledger.execute(f"GRANT {rights} ON {urlsplit(ledger.url).path[1:]}.* TO limited@'%'")


# What a server refuses.


def test_a_wrong_password_is_refused(worker_type: type[Worker], ledger: Ledger) -> None:
    refused(worker_type, changed(ledger.url, user="onefold"), says="the server refuses this user or its password")


def test_a_server_that_is_absent_is_not_reached(worker_type: type[Worker]) -> None:
    # Taken, so that it is nobody else's; and nobody listens.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        refused(
            worker_type,
            f"mysql://app:{PASSWORD}@127.0.0.1:{port}/shop",
            says="the server cannot be reached: Can't connect",
        )


def test_a_host_that_does_not_exist_is_not_reached(worker_type: type[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *_: object, **__: object) -> Any:
        assert host == "nowhere.invalid"
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    # A real resolver may take its time, or answer with a page of the provider's.
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    refused(worker_type, f"mysql://app:{PASSWORD}@nowhere.invalid/shop", says="Name or service not known")


def test_what_does_not_speak_mysql_is_not_waited_for(worker_type: type[Worker]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mysql://app:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/shop?connect_timeout=0.3s"
        refused(worker_type, url, says="the server cannot be reached")


def test_a_missing_database_is_named_as_such(worker_type: type[Worker], ledger: Ledger) -> None:
    refused(worker_type, changed(ledger.url, path="/missing"), says="there is no such database")


def test_a_user_without_rights_is_told_which(worker_type: type[Worker], ledger: Ledger, limited: str) -> None:
    refused(worker_type, limited, says="this user lacks a permission")
    grant(ledger, "SELECT")
    refused(worker_type, limited, says="this user lacks a permission")


def test_a_user_who_may_only_read_and_write_needs_the_tables_to_be_there(
    worker_type: type[Worker], ledger: Ledger, limited: str
) -> None:
    grant(ledger, "SELECT, INSERT, UPDATE, DELETE")
    refused(
        worker_type,
        limited,
        says="CREATE, or create them as another user with the command `onefold schema --store URL --apply`",
    )
    with closing(Blocking(ledger.url)) as other:
        other.run("earlier", Handler())

    worker = worker_type(limited)
    assert worker.run("pay_1", Handler("paid")).value == "paid"
    assert worker.transactional("m1", Handler("receipt")).value == "receipt"
    assert worker.store("purge", 1) == 0
    worker.close()


def test_a_server_without_a_connection_left_says_so(worker_type: type[Worker], ledger: Ledger, limited: str) -> None:
    grant(ledger, "ALL")
    # Those of the tests before: the server takes a moment to see that they were closed.
    connections = "SELECT 1 FROM information_schema.processlist WHERE user = 'limited'"
    assert eventually(lambda: ledger.rows(connections) == [])
    ledger.execute("ALTER USER limited@'%' WITH MAX_USER_CONNECTIONS 1")

    with connected(limited):
        refused(worker_type, limited, says="the server has no connection left for us")


def test_tables_of_another_version_are_refused(worker_type: type[Worker], ledger: Ledger) -> None:
    with closing(Blocking(ledger.url)) as other:
        other.run("earlier", Handler())
    ledger.execute(TOO_NEW)
    worker, handler = worker_type(ledger.url), Handler()

    with pytest.raises(StoreUnavailable, match=rf"{REFUSED}\. Nothing ran"):
        worker.run("pay_1", handler)
    worker.close()

    assert (handler.starts, ledger.records) == (0, ["earlier"])


# What would harm others is done to a server of our own.


@pytest.fixture(scope="module")
def own(house: House) -> Iterator[Server]:
    with house.own("mariadb") as server:
        with connected(server.url, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE shop")
            cursor.execute(f"CREATE USER app@'%' IDENTIFIED BY '{PASSWORD}'")
            cursor.execute("GRANT ALL ON shop.* TO app@'%'")
        yield server


@pytest.fixture
def set_global(own: Server) -> Iterator[Any]:
    """Changes a variable of the server's, and puts it back."""
    before: list[tuple[str, Any]] = []
    with connected(own.url, autocommit=True) as connection, connection.cursor() as cursor:

        def change(name: str, value: Any) -> None:
            cursor.execute(f"SELECT @@GLOBAL.{name}")
            before.append((name, cursor.fetchall()[0][0]))
            cursor.execute(f"SET GLOBAL {name} = {value}")

        yield change
        for name, value in reversed(before):
            cursor.execute(f"SET GLOBAL {name} = {value}")


def test_a_read_only_server_is_told_from_a_primary(worker_type: type[Worker], own: Server, set_global: Any) -> None:
    url = changed(own.url, user="app", path="/shop")
    with closing(Blocking(url)) as worker:
        worker.run("earlier", Handler())

    set_global("read_only", "ON")

    refused(worker_type, url, says="perhaps a replica. Nothing ran. Name the primary in the URL")


def test_a_connection_whose_server_became_read_only_is_replaced_because_another_may_be_behind_its_name(
    worker_type: type[Worker], own: Server, set_global: Any
) -> None:
    with (
        closing(worker_type(changed(own.url, user="app", path="/shop"))) as worker,
        connected(own.url, autocommit=True) as connection,
        connection.cursor() as cursor,
    ):

        def opened() -> int:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Connections'")
            return int(cursor.fetchall()[0][1])

        worker.run(f"{worker_type.__name__} before", Handler())
        set_global("read_only", "ON")
        for deliver in (worker.run, worker.transactional):
            before = opened()
            with pytest.raises(StoreUnavailable, match="perhaps a replica"):
                deliver(f"{worker_type.__name__} moved", Handler())
            assert opened() > before


def test_a_server_that_becomes_read_only_is_refused_and_then_used_again(
    worker_type: type[Worker], own: Server, set_global: Any
) -> None:
    worker, handler = worker_type(changed(own.url, user="app", path="/shop")), Handler()
    worker.run("earlier", Handler())

    set_global("read_only", "ON")
    for deliver in (worker.run, worker.transactional):
        with pytest.raises(StoreUnavailable, match="perhaps a replica"):
            deliver(f"{worker_type.__name__} later", handler)
    set_global("read_only", "OFF")

    assert handler.starts == 0
    assert not worker.run(f"{worker_type.__name__} later", handler).replayed
    worker.close()


def test_a_result_that_is_larger_than_a_packet_is_told_in_words(
    worker_type: type[Worker], own: Server, set_global: Any
) -> None:
    set_global("max_allowed_packet", 2_097_152)
    worker = worker_type(changed(own.url, user="app", path="/shop"), Policy(max_result_bytes=3_000_000))
    large = f"{worker_type.__name__} large"

    with pytest.raises(StoreUnavailable, match="larger than the server's max_allowed_packet"):
        worker.transactional(large, Handler("x" * 2_000_000))
    # The connection is as good as before, and the record was not written.
    assert not worker.transactional(large, Handler("x" * 900_000)).replayed
    assert len(worker.transactional(large, Handler()).value) == 900_000
    worker.close()


# What numbers mean.


@pytest.mark.parametrize("number", sorted(MEANINGS))
def test_every_number_has_words_that_are_one_line(number: int) -> None:
    for error, classify in (
        (pymysql.OperationalError(number, "text"), pymysql_connection.classify),
        (asyncmy.errors.OperationalError(number, "text"), asyncmy_connection.classify),
    ):
        found = classify(error)
        assert found is not None
        assert found.kind is MEANINGS[number].kind
        # The driver's own text only where it cannot hold a key: there was no connection yet.
        assert found.message.replace(": text", "") == MEANINGS[number].message
        assert (": text" in found.message) == (number == NOT_REACHED)
        assert "\n" not in found.message


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ((1213, 1205, 1020, 1412), ErrorClass.CONFLICT),
        ((2006, 2013, 1927, 4031, 0), ErrorClass.LOST),
        ((1146,), ErrorClass.NO_TABLES),
        ((1290, 1836), ErrorClass.READ_ONLY),
        ((1045, 1049, 1142, 1792, 1114, 1021, 1040, 1203, 1226, 2002, 2003, 1153), ErrorClass.DOWN),
        ((1062, 1048, 1452, 1406, 1064, 4025), ErrorClass.MISTAKE),
    ],
)
def test_numbers_are_of_their_kind(numbers: tuple[int, ...], kind: ErrorClass) -> None:
    assert {meaning(pymysql.OperationalError(number, "text")).kind for number in numbers} == {kind}


def test_the_text_of_an_error_which_may_hold_a_key_is_not_shown() -> None:
    assert "secret-key" not in meaning(pymysql.DataError(1366, "Incorrect value: 'secret-key'")).message


def test_what_is_no_error_of_the_driver_has_no_meaning_here() -> None:
    assert (pymysql_connection.classify(ValueError(1213)), asyncmy_connection.classify(OSError(2003))) == (None, None)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("5.5.5-10.11.19-MariaDB-0+deb12u1", MARIADB),
        ("11.4.2-MariaDB-log", MARIADB),
        ("10.6.4-MariaDB", MARIADB),
        ("10.5.9-MariaDB", MYSQL),
        ("8.0.36", MYSQL),
        ("8.4.0-commercial", MYSQL),
        ("8.0.11-TiDB-v7.5.0", MYSQL),
        ("9.1.0", MYSQL),
    ],
)
def test_the_server_says_what_it_is(version: str, expected: object) -> None:
    assert dialect_of(version) is expected


# URLs.


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://app:hunter2@host", "write mysql://user:password@host/database"),
        ("mysql://app:hunter2@host/", "write mysql://user:password@host/database"),
        ("mysql://app:hunter2@host/a/b", "write mysql://user:password@host/database"),
        ("mysql://app:hunter2@host/shop#1", "write mysql://user:password@host/database"),
        ("mysql://app:hunter2@host:port/shop", "Port could not be cast"),
        ("mysql://app:hunter2@host/shop?pol_size=3", "did you mean 'pool_size'?"),
        ("mysql://app:hunter2@host/shop?pool_size=0", "pool_size='0' has to be a whole number from 1"),
        ("mysql://app:hunter2@host/shop?pool_size=many", "pool_size='many' has to be a whole number"),
        ("mysql://app:hunter2@host/shop?connect_timeout=5", "connect_timeout='5' is not a duration"),
        ("mysql://app:hunter2@host/shop?connect_timeout=forever", "connect_timeout"),
        ("mysql://app:hunter2@host/shop?read_timeout=2d", "read_timeout='2d' is more than a day"),
        ("mysql://app:hunter2@host/shop?auto_schema=maybe", "auto_schema='maybe' has to be yes or no"),
        ("mysql://app:hunter2@host/shop?pool_timeout=30", "pool_timeout='30' is not a duration"),
        ("mysql://app:hunter2@host/shop?isolation=serialisable", "did you mean 'serializable'?"),
        ("mysql://app:hunter2@host/shop?isolation=read-uncommitted", "isolation='read-uncommitted' is not one of"),
        ("mysql://app:hunter2@host/shop?ssl_mode=verify", "ssl_mode='verify' is not one of"),
        ("mysql://app:hunter2@host/shop?ssl_ca=/missing.pem", "/missing.pem"),
        ("mysql://app:hunter2@host/shop?ssl_mode=disabled&ssl_ca=x", "leave them out"),
        ("mysql://app:hunter2@host/shop?ssl_mode=required&ssl_key=x", "give both"),
        ("mysql+mysqldb://app:hunter2@host/shop", "Write mysql:// or mysql+"),
    ],
)
def test_a_wrong_url_says_what_to_write_and_shows_no_password(url: str, says: str) -> None:
    for open_it in (open_store, open_async_store):
        with pytest.raises(UsageError) as raised:
            open_it(url)
        assert says in str(raised.value)
        assert PASSWORD not in str(raised.value)


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "mysql+pymysql", "mariadb+pymysql"])
def test_both_names_are_one_store(mysql_url: str, scheme: str) -> None:
    with Guard(f"{scheme}:{mysql_url.partition(':')[2]}") as guard:
        assert guard.run("charge", "pay_1", lambda: 1).value == 1


def test_a_url_may_hold_what_needs_quoting() -> None:
    settings = settings_of("mysql://us%40er:p%2Fw%3A%E2%9C%93@[::1]:3307/my%20shop?unix_socket=/run/my.sock", "pymysql")

    assert (settings.user, settings.password, settings.host, settings.port) == ("us@er", "p/w:✓", "::1", 3307)
    assert (settings.database, settings.unix_socket) == ("my shop", "/run/my.sock")
    assert "✓" not in repr(settings)


def test_a_password_of_any_letters_logs_in(worker_type: type[Worker], ledger: Ledger) -> None:
    ledger.execute("CREATE OR REPLACE USER limited@'%' IDENTIFIED BY 'pä/ß ✓'")
    grant(ledger, "ALL")
    url = changed(ledger.url, user="limited").replace(PASSWORD, "p%C3%A4%2F%C3%9F%20%E2%9C%93")

    with closing(worker_type(url)) as worker:
        assert worker.run("pay_1", Handler("paid")).value == "paid"
    ledger.execute("DROP USER limited@'%'")


@pytest.mark.parametrize(("guard", "package"), [(Guard, "pymysql"), (AsyncGuard, "asyncmy")])
def test_a_missing_package_says_how_to_get_it(guard: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{package}.connection{'s' if package == 'pymysql' else ''}", None)
    monkeypatch.delitem(sys.modules, f"onefold.stores.mysql.{package}.connection")

    with pytest.raises(UsageError, match=r"pip install 'onefold\[mysql\]'"):
        _ = guard("mysql://app@host/shop").store


AS_MYSQLDB = """
import pymysql
pymysql.install_as_MySQLdb()
import MySQLdb.err
from onefold.stores.mysql.pymysql.connection import OwnConnection
assert issubclass(pymysql.err.MySQLError, Exception) and pymysql.err.MySQLError is not pymysql.MySQLError
assert issubclass(pymysql.IntegrityError, OwnConnection._driver_error)
assert issubclass(OwnConnection._operational_error, pymysql.MySQLError)
"""


def test_where_pymysql_is_installed_as_mysqldb_its_errors_are_known_all_the_same() -> None:
    """Importing `MySQLdb.err` replaces the attribute `pymysql.err` by a second copy, whose classes nobody raises."""
    subprocess.run([sys.executable, "-c", AS_MYSQLDB], check=True)
