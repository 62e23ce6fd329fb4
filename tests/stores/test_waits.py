"""Waits are as long as the documentation says: where nothing was sent, nothing is taken back, which would wait again.

Calls are counted, not seconds.
"""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg_pool
import pytest
import redis
from sqlalchemy import create_engine

from onefold import Guard, StoreUnavailable
from onefold._model import Claim, Released
from onefold.stores.dynamodb import DynamoDBStore
from tests.support import PATIENCE, ProxyStore

# As short as a wait can be: how long it is does not matter here.
SHORT: Final = 0.05


class Counted:
    """A guard's store whose attempts to take a claim back are counted."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.releases = 0
        self._release = guard.store.release
        guard.store.release = self.release

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        self.releases += 1
        return bool(self._release(claim, released))

    def refuses(self) -> bool:
        """Whether a delivery is refused, its claim not having come as far as the store."""
        ran: list[str] = []
        with pytest.raises(StoreUnavailable) as refusal:
            self.guard.run("charge", "pay_1", lambda: ran.append("ran"))
        return not refusal.value.reached and not ran


def no_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


Hindered = Callable[[pytest.FixtureRequest, ExitStack], Guard]


def busy_file(request: pytest.FixtureRequest, stack: ExitStack) -> Guard:
    path: Path = request.getfixturevalue("tmp_path") / "records.db"
    guard = Guard(f"sqlite:////{path}?busy_timeout={SHORT}s")
    guard.run("charge", "earlier", lambda: None)
    other = sqlite3.connect(path, isolation_level=None)
    stack.callback(other.close)
    other.execute("BEGIN IMMEDIATE")
    return guard


def pool_in_use(request: pytest.FixtureRequest, stack: ExitStack) -> Guard:
    url = request.getfixturevalue("postgres_url")
    pool = stack.enter_context(psycopg_pool.ConnectionPool(url, min_size=0, max_size=1, timeout=PATIENCE, open=True))
    guard = Guard(pool)
    guard.run("charge", "earlier", lambda: None)
    stack.callback(pool.putconn, pool.getconn())
    # Not before: on a busy machine the first connection takes longer.
    pool.timeout = SHORT
    return guard


def engine_in_use(request: pytest.FixtureRequest, stack: ExitStack) -> Guard:
    url = request.getfixturevalue("postgres_url").replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=SHORT)
    stack.callback(engine.dispose)
    guard = Guard(engine)
    guard.run("charge", "earlier", lambda: None)
    stack.callback(engine.connect().close)
    return guard


def own_pool_in_use(request: pytest.FixtureRequest, stack: ExitStack) -> Guard:
    guard = Guard(f"{request.getfixturevalue('postgres_url')}?pool_size=1&pool_timeout={SHORT}s")
    guard.run("charge", "earlier", lambda: None)
    stack.enter_context(guard.store._pool.acquire())
    return guard


def no_postgres(_request: pytest.FixtureRequest, _stack: ExitStack) -> Guard:
    return Guard(f"postgresql://127.0.0.1:{no_port()}/nothing")


def no_mysql(_request: pytest.FixtureRequest, _stack: ExitStack) -> Guard:
    return Guard(f"mysql://somebody@127.0.0.1:{no_port()}/nothing")


def redis_in_use(request: pytest.FixtureRequest, stack: ExitStack) -> Guard:
    url = request.getfixturevalue("redis_url")
    pool: Any = redis.BlockingConnectionPool.from_url(url, max_connections=1, timeout=SHORT)
    stack.callback(pool.disconnect)
    guard = Guard(redis.Redis(connection_pool=pool))
    guard.run("charge", "earlier", lambda: None)
    stack.callback(pool.release, pool.get_connection())
    return guard


def no_redis(_request: pytest.FixtureRequest, _stack: ExitStack) -> Guard:
    return Guard(f"redis://127.0.0.1:{no_port()}")


def no_dynamodb(request: pytest.FixtureRequest, _stack: ExitStack) -> Guard:
    patching: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patching.setenv(name, "nobody")
    store = DynamoDBStore("records", endpoint_url=f"http://127.0.0.1:{no_port()}", region="eu-central-1")
    return Guard(lambda: store)


HINDERED: Final[dict[str, Hindered]] = {
    "a busy file": busy_file,
    "a pool of yours": pool_in_use,
    "an engine of yours": engine_in_use,
    "a pool of ours": own_pool_in_use,
    "no PostgreSQL": no_postgres,
    "no MySQL": no_mysql,
    "a client of yours": redis_in_use,
    "no Redis": no_redis,
    "no DynamoDB": no_dynamodb,
}


@contextmanager
def hindered(how: str, request: pytest.FixtureRequest) -> Iterator[Counted]:
    with ExitStack() as stack:
        guard = HINDERED[how](request, stack)
        stack.callback(guard.close)
        yield Counted(guard)


@pytest.mark.parametrize("how", HINDERED)
def test_where_nothing_was_sent_nothing_is_taken_back(how: str, request: pytest.FixtureRequest) -> None:
    with hindered(how, request) as counted:
        assert counted.refuses()
        assert counted.releases == 0


def test_a_claim_that_may_have_been_written_is_taken_back_once() -> None:
    store = ProxyStore()
    store.reply_lost = {"claim"}

    with pytest.raises(StoreUnavailable):
        Guard(store).run("charge", "pay_1", lambda: "paid")

    assert store.calls["release"] == 1
    assert store.inner.read(Guard(store).address("charge", "pay_1")) is None
