"""The proxy of the tests: it cuts, holds and counts exactly where it was told to."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.proxy import Proxy
from services.servers import Server

# Far more than any of it needs; it bounds how long a broken one hangs.
PATIENCE = 60.0


@pytest.fixture
def table(postgres_url: str) -> str:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE written (n int)")
    return postgres_url


def rows(url: str) -> int:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT count(*) FROM written").fetchone()
    assert found is not None
    return int(found[0])


@pytest.fixture
def valkey_proxy(valkey_url: str) -> Iterator[Proxy]:
    with Proxy(valkey_url) as proxy:
        yield proxy


@contextlib.contextmanager
def one_connection(url: str) -> Iterator[Any]:
    """A client that has connected already, and that never tries again by itself."""
    pool = redis.ConnectionPool.from_url(url.replace("valkey://", "redis://"), max_connections=1, decode_responses=True)
    with redis.Redis.from_pool(pool) as client:
        client.set_retry(Retry(NoBackoff(), 0))
        client.ping()
        yield client


@pytest.mark.parametrize(("fault", "written"), [("cut_before", 0), ("cut_after", 1)])
def test_a_connection_is_cut_before_or_after_the_server_has_executed_commit(
    table: str, fault: str, written: int
) -> None:
    with Proxy(table) as proxy, psycopg.connect(proxy.url()) as connection:
        connection.execute("INSERT INTO written VALUES (1)")
        struck = getattr(proxy, fault)(b"COMMIT")

        with pytest.raises(psycopg.OperationalError):
            connection.commit()

        assert struck.reached.is_set()
    assert rows(table) == written


def test_the_reply_to_the_nth_request_is_lost(valkey_proxy: Proxy, valkey_url: str) -> None:
    with one_connection(valkey_proxy.url()) as client:
        valkey_proxy.lose_reply(2)
        assert client.incr("sum") == 1

        with pytest.raises(redis.ConnectionError):
            client.incr("sum")

    with one_connection(valkey_url) as client:
        assert client.get("sum") == "2"


def test_a_fault_strikes_once(valkey_proxy: Proxy) -> None:
    fault = valkey_proxy.cut_before(b"INCR")
    with one_connection(valkey_proxy.url()) as client, pytest.raises(redis.ConnectionError):
        client.incr("sum")
    assert fault.reached.is_set()

    with one_connection(valkey_proxy.url()) as client:
        assert client.incr("sum") == 1


def test_a_fault_looks_at_what_is_sent(valkey_proxy: Proxy) -> None:
    with one_connection(valkey_proxy.url()) as client:
        fault = valkey_proxy.cut_before(lambda message: b"INCR" in message and b"other" in message)

        assert client.incr("sum") == 1
        with pytest.raises(redis.ConnectionError):
            client.incr("other")

        assert fault.reached.is_set()


@pytest.mark.parametrize(("hold", "seen"), [("hold_request", None), ("hold_reply", "1")])
def test_a_message_is_held_until_it_is_released(
    valkey_proxy: Proxy, valkey_url: str, hold: str, seen: str | None
) -> None:
    answers: list[int] = []
    with one_connection(valkey_proxy.url()) as client, one_connection(valkey_url) as beside:
        fault = getattr(valkey_proxy, hold)(b"INCR")
        asking = threading.Thread(target=lambda: answers.append(client.incr("sum")))
        asking.start()
        assert fault.reached.wait(PATIENCE)

        assert (beside.get("sum"), answers) == (seen, [])
        fault.released.set()
        asking.join(PATIENCE)

    assert answers == [1]


def test_nothing_passes_a_stalled_proxy(valkey_proxy: Proxy) -> None:
    with one_connection(valkey_proxy.url()) as client:
        valkey_proxy.stall()
        asking = threading.Thread(target=client.ping)
        asking.start()
        asking.join(0.3)
        assert asking.is_alive()

        valkey_proxy.resume()

        asking.join(PATIENCE)
        assert not asking.is_alive()


def test_all_connections_are_cut_even_when_stalled(valkey_proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", valkey_proxy.port), PATIENCE) as client:
        client.sendall(b"PING\r\n")
        assert client.recv(100) == b"+PONG\r\n"
        valkey_proxy.stall()

        valkey_proxy.cut_all()

        with pytest.raises(ConnectionResetError):
            client.recv(100)


def test_a_proxy_before_a_dead_server_cuts(own_valkey: Server) -> None:
    with Proxy(own_valkey.url) as proxy:
        own_valkey.kill()

        with pytest.raises(redis.ConnectionError), one_connection(proxy.url()):
            pass


class TestCounting:
    def test_each_question_and_answer_is_one_trip(self, valkey_proxy: Proxy) -> None:
        with one_connection(valkey_proxy.url()) as client, valkey_proxy.counting() as count:
            client.set("a", "1")
            client.get("a")

        assert count.trips == 2
        assert [b"SET" in count.messages[0], b"GET" in count.messages[1]] == [True, True]

    def test_a_first_reply_waits_for_what_the_client_still_sends(
        self, valkey_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Longer than a machine may stand still, until the client has sent all.
        monkeypatch.setattr("services.proxy.QUIET_SECONDS", 20.0)
        address = ("127.0.0.1", valkey_proxy.port)
        with socket.create_connection(address, PATIENCE) as client, valkey_proxy.counting() as count:
            client.sendall(b"PING\r\n")
            answered, _, _ = select.select([client], [], [], 0.1)
            client.sendall(b"PING\r\n")
            monkeypatch.setattr("services.proxy.QUIET_SECONDS", 0.1)
            with client.makefile("rb") as replies:
                assert [replies.readline(), replies.readline()] == [b"+PONG\r\n"] * 2

        assert not answered
        assert count.messages == [b"PING\r\nPING\r\n"]

    def test_a_batch_that_is_sent_in_pieces_is_one_trip(self, valkey_proxy: Proxy) -> None:
        with one_connection(valkey_proxy.url()) as client, valkey_proxy.counting() as count:
            batch = client.pipeline(transaction=False)
            for number in range(500):
                batch.set(f"key:{number}", "x" * 1000)
            assert len(batch.execute()) == 500

        assert count.trips == 1

    def test_what_nobody_answers_is_no_trip(self, postgres_url: str) -> None:
        with Proxy(postgres_url) as proxy:
            connection = psycopg.connect(proxy.url(), autocommit=True)
            with proxy.counting() as count:
                connection.execute("SELECT 1")
                connection.close()

        assert count.trips == 1

    def test_psycopg_begins_and_commits_in_trips_of_their_own(self, postgres_url: str) -> None:
        with Proxy(postgres_url) as proxy, psycopg.connect(proxy.url()) as connection, proxy.counting() as count:
            connection.execute("SELECT 1")
            connection.commit()

        assert count.trips == 3


def test_the_url_of_a_dynamodb_store_goes_through_the_proxy(dynamodb_url: str) -> None:
    with Proxy(dynamodb_url) as proxy:
        assert f"endpoint_url=http://127.0.0.1:{proxy.port}&" in proxy.url()
