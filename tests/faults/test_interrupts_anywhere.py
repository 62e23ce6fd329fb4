"""A signal's handler that raises between any two functions of ours, inside a transaction: no record without its effect.

What it raises may be an ordinary exception, as Celery's soft time limit is, and whoever called may catch it and commit.
Right after a handler it counts as the handler's own error: what that has written is then the caller's to undo.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg_pool
import pytest
import redis

import onefold
from onefold import TX, Guard, StoreUnavailable, current

# Where a signal may be noticed: our functions, and the context managers that they use.
OURS = (str(Path(onefold.__file__).parent), contextlib.__file__)

# More than any delivery has: a bound for the loop over them.
EVENTS_MAX = 2_000

# The pool may have to open another connection first.
NO_CONNECTION_SECONDS = 5

# A claim that is left is taken over soon.
LEASE_SECONDS, WAIT_SECONDS = 0.2, 5

# Nobody else uses the pool.
AT_ONCE_SECONDS = 0.2


class SoftTimeLimit(Exception):
    """What a signal's handler raises."""


class Strike:
    """Raises at the n-th call or return of a function of ours."""

    events: tuple[str, ...] = ("call", "return")

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self._left = at
        self._error = error
        self.where = ""

    @contextmanager
    def armed(self) -> Iterator[None]:
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event not in self.events or not frame.f_code.co_filename.startswith(OURS):
            return
        self._left -= 1
        if self._left == 0:
            # Python takes a profiler that raises away. This one must not: it would free a method that still runs.
            self.where = f"{event} of {frame.f_code.co_qualname} in {Path(frame.f_code.co_filename).name}"
            raise self._error("now")


def within(guard: Guard, path: Path, message: str, strike: Strike) -> None:
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")

        def credit() -> str:
            connection.execute("INSERT INTO effects VALUES (?)", (message,))
            return "credited"

        with suppress(KeyboardInterrupt, SoftTimeLimit), strike.armed():
            guard.within(connection).run("credit", message, credit)


def nested(guard: Guard, path: Path, message: str, strike: Strike) -> None:
    """The handler around it catches the interrupt, and goes on."""

    @guard.transactional("credit", key="message")
    def credit(message: str, *, tx: Any = TX) -> str:
        tx.execute("INSERT INTO effects VALUES (?)", (message,))
        return "credited"

    @guard.transactional("outer", key="message")
    def outer(message: str, *, tx: Any = TX) -> None:
        with suppress(KeyboardInterrupt, SoftTimeLimit), strike.armed():
            credit(message.removesuffix(" around"))
        tx.execute("INSERT INTO effects VALUES (?)", (message,))

    with suppress(Exception):
        outer(f"{message} around")


def seen(path: Path, message: str) -> tuple[int, int]:
    """How many records and effects there are, as another connection sees them."""
    with closing(sqlite3.connect(path)) as connection:
        (records,) = connection.execute("SELECT count(*) FROM onefold_records WHERE key = ?", (message,)).fetchone()
        (effects,) = connection.execute("SELECT count(*) FROM effects WHERE message = ?", (message,)).fetchone()
        return records, effects


# It may strike as a generator that nobody has gone through is closed, which nobody hears.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [SoftTimeLimit, pytest.param(KeyboardInterrupt, marks=pytest.mark.more)])
@pytest.mark.parametrize("story", [within, nested])
def test_wherever_it_strikes_no_record_is_committed_without_its_effect(
    story: Callable[..., None], error: type[BaseException], tmp_path: Path
) -> None:
    path, never = tmp_path / "wallet.db", Strike(0, error)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE effects (message TEXT)")
    with Guard(f"sqlite:///{path}?sync=normal") as guard:
        story(guard, path, "first", never)
        for at in count(1):
            strike, message = Strike(at, error), f"m{at}"
            story(guard, path, message, strike)
            if not strike.where:
                break
            assert at < EVENTS_MAX
            for one in (message, f"{message} around"):
                records, effects = seen(path, one)
                assert records <= effects, f"{strike.where} ({at}), {one}: {records} records and {effects} effects"
            within(guard, path, message, never)
            records, effects = seen(path, message)
            assert records == 1 <= effects, f"{strike.where} ({at}): it did not come again"

    assert at > 50


class Noticed(Strike):
    """Raises where Python itself notices a signal in our code: as a function begins, and after a call of C code."""

    # Python 3.11 itself crashes now and then if a profiler raises after a call of C code.
    events = ("call", "c_return") if sys.version_info >= (3, 12) else ("call",)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [SoftTimeLimit, pytest.param(KeyboardInterrupt, marks=pytest.mark.more)])
def test_wherever_it_strikes_a_callers_pool_gets_its_connection_back(
    error: type[BaseException], postgres_url: str
) -> None:
    with psycopg_pool.ConnectionPool(postgres_url, min_size=1, max_size=1, open=True) as pool, Guard(pool) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: Any = TX) -> None:
            tx.execute("SELECT 1")

        credit("first")
        for at in count(1):
            strike = Noticed(at, error)
            with suppress(error), strike.armed():
                credit(f"m{at}")
            if not strike.where:
                break
            assert at < EVENTS_MAX
            # What a traceback holds is not lost.
            gc.collect()
            try:
                with pool.connection(timeout=NO_CONNECTION_SECONDS) as connection:
                    assert not connection.autocommit
            except psycopg_pool.PoolTimeout:
                pytest.fail(f"{strike.where} ({at}): the pool has lost its connection")

    assert at > 50


def one(guard: Guard, message: str) -> Any:
    return guard.run("credit", message, lambda: "credited", lease=LEASE_SECONDS, wait=WAIT_SECONDS).value


def batch(guard: Guard, message: str) -> Any:
    return guard.run_batch("credit", [message], key=str, handler=lambda _: "credited", lease=LEASE_SECONDS)[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [SoftTimeLimit, pytest.param(KeyboardInterrupt, marks=pytest.mark.more)])
@pytest.mark.parametrize("story", [one, batch])
def test_wherever_it_strikes_a_callers_redis_client_gets_its_connection_back(
    story: Callable[[Guard, str], Any], error: type[BaseException], redis_url: str
) -> None:
    pool: Any = redis.BlockingConnectionPool.from_url(redis_url, max_connections=1, timeout=AT_ONCE_SECONDS)
    with redis.Redis.from_pool(pool), Guard(redis.Redis(connection_pool=pool)) as guard:
        story(guard, "first")
        for at in count(1):
            strike = Noticed(at, error)
            with suppress(error), strike.armed():
                story(guard, f"m{at}")
            if not strike.where:
                break
            assert at < EVENTS_MAX
            try:
                pool.release(pool.get_connection())
            except redis.ConnectionError:
                pytest.fail(f"{strike.where} ({at}): the pool has lost its connection")

    assert at > 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("story", [one, batch])
def test_wherever_it_strikes_our_own_redis_client_leaves_no_connection_open(
    story: Callable[[Guard, str], Any], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No heartbeat comes, which would open a connection of its own.
    monkeypatch.setitem(globals(), "LEASE_SECONDS", 60)
    with Guard(redis_url) as guard:
        story(guard, "first")
        gc.collect()
        most = len(os.listdir("/dev/fd"))
        for at in count(1):
            strike = Noticed(at, SoftTimeLimit)
            with suppress(SoftTimeLimit), strike.armed():
                story(guard, f"m{at}")
            if not strike.where:
                break
            assert at < EVENTS_MAX
            # A client's connection refers to itself.
            gc.collect()
            assert len(os.listdir("/dev/fd")) <= most, f"{strike.where} ({at}): a connection is left open"

    assert at > 50


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [SoftTimeLimit, pytest.param(KeyboardInterrupt, marks=pytest.mark.more)])
@pytest.mark.parametrize("server", ["postgres", pytest.param("mysql", marks=pytest.mark.more)])
def test_wherever_it_strikes_our_own_pool_has_its_slot_back_at_once(
    server: str, error: type[BaseException], request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    with Guard(f"{url}?pool_size=1&pool_timeout={AT_ONCE_SECONDS}s") as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: Any = TX) -> None:
            del tx

        credit("first")
        for at in count(1):
            strike = Noticed(at, error)
            with suppress(error), strike.armed():
                credit(f"m{at}")
            if not strike.where:
                break
            assert at < EVENTS_MAX
            try:
                credit(f"m{at} again")
            except StoreUnavailable:
                pytest.fail(f"{strike.where} ({at}): the slot is still taken")

    assert at > 50


STORES: dict[str, Callable[[Path], str]] = {
    "memory": lambda _: "memory:",
    "sqlite": lambda folder: f"sqlite:///{folder / 'shop.db'}?sync=normal",
}


def step(guard: Guard, message: str) -> Any:
    return guard.run(
        "steps", message, lambda: current().step("credit", lambda: "credited"), lease=LEASE_SECONDS, wait=WAIT_SECONDS
    ).value


def seen_mode(guard: Guard, message: str) -> Any:
    return guard.run("seen", message, lambda: "credited", mode="seen").value


@pytest.mark.parametrize("story", [one, step, seen_mode])
@pytest.mark.parametrize("store", STORES)
def test_wherever_it_strikes_a_soft_limit_is_raised_and_no_result_is_left_out(
    store: str, story: Callable[[Guard, str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard: list[Any] = []
    struck: dict[str, str] = {}
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    with Guard(STORES[store](tmp_path)) as guard:
        story(guard, "first")
        for at in count(1):
            strike, raised = Noticed(at, SoftTimeLimit), False
            try:
                with strike.armed():
                    story(guard, f"m{at}")
            except SoftTimeLimit:
                raised = True
            if not strike.where:
                break
            assert at < EVENTS_MAX
            assert raised or unheard, f"{strike.where} ({at}): it was swallowed"
            unheard.clear()
            struck[f"m{at}"] = f"{strike.where} ({at})"
        for message, where in struck.items():
            assert story(guard, message) == "credited", where

    # The shortest is seen mode in memory.
    assert at > 40
