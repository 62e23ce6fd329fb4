"""Fixtures that several files share: a wallet in a file of its own, and others at work on it."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import math
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.loaders
import pytest
import redis.connection
import typer.testing
from pymysql.connections import Connection as Pymysql

from onefold import events
from onefold.stores import background_purge
from onefold.stores.sqlite.joined import SqliteTransaction
from tests.wallet import connected, create

# The servers, which start when a test asks for one; and which file comes first in a parallel run.
pytest_plugins = ["services.fixtures", "tests.scheduling"]


# Whoever starts the tests in the background, a runner of CI say, has Ctrl-C ignored by all of their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The module: the package's own `current` is the function.
_CURRENT = importlib.import_module("onefold.current")

# The servers of the tests are on this machine: no proxy of the environment is asked for them.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that are another's in each process: the processes of a parallel run have to agree on them."""
    if named := next((item.nodeid for item in items if " at 0x" in item.nodeid), None):
        raise pytest.UsageError(f"{named}: a test is not named by an address; give its parameters ids")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported and collected out of the search for garbage: it stays to the end, and there is a lot."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail a test that leaves a delivery, a step or a batch current in its thread: the next one would be inside it."""
    marks = {name: getattr(_CURRENT, name) for name in ("_current", "_step", "_batch")}
    left = {name: mark.get() for name, mark in marks.items() if mark.get() is not None}
    for name in left:
        marks[name].set(None)
    assert not left, f"this test has left something current in its thread: {left}"


@pytest.fixture(scope="session", autouse=True)
def races_from_a_server_of_forks() -> Iterator[None]:
    """Fork the processes of a contract's race from a server that has imported the package: a new Python is slower."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("onefold.testing.promises._processes.START_METHOD", "forkserver")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_purge_by_chance() -> Iterator[None]:
    """After which delivery a store purges a little is chance: whoever counts statements would fail now and then."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(background_purge, "chance", lambda *_: background_purge.ONE_IN)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_round_trip_is_slow() -> Iterator[None]:
    """On a busy machine every store is: whoever wants all checks of the doctor green would fail now and then."""
    with pytest.MonkeyPatch.context() as patching:
        # The package's own `examine` is the function.
        patching.setattr(importlib.import_module("onefold.health.examine"), "ROUND_TRIP_SLOW", math.inf)
        yield


@pytest.fixture(scope="session", autouse=True)
def what_libraries_make_anew_each_time_is_made_once() -> Iterator[None]:
    """Keep typer's form of our command line, PyMySQL's certificates and botocore's models: most of a short test."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        patching.setattr(botocore.loaders, "create_loader", functools.cache(botocore.loaders.create_loader))
        patching.setattr(Pymysql, "_create_ssl_ctx", trusting_once(Pymysql._create_ssl_ctx))  # type: ignore[attr-defined]
        yield


def trusting_once(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes one TLS context for all who have no wish: the system's certificates take 40 ms to read."""
    usual: list[Any] = []

    def created(connection: Any, wishes: Any) -> Any:
        if wishes:
            return create(connection, wishes)
        if not usual:
            usual.append(create(connection, {}))
        return usual[0]

    return created


@pytest.fixture(scope="module", autouse=True)
def logging_is_left_as_it_was() -> Iterator[None]:
    """Put back what a framework sets: another file's test would see more of the log, or nothing of ours."""
    root = logging.getLogger()
    level = root.level
    # What another file's test has warned of would not be said again.
    events._warned.clear()
    yield
    root.setLevel(level)
    logging.disable(logging.NOTSET)
    for ours in (logging.getLogger(name) for name in list(root.manager.loggerDict) if name.startswith("onefold")):
        ours.disabled, ours.propagate = False, True
        ours.setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def leaks_are_found_where_they_are_made() -> Iterator[None]:
    """Collect at the end of a file: a connection that it left open in a cycle would fail another file's test.

    What is left stays, such as modules: nobody has to look through it again.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def connections_of_redis_are_closed_by_whoever_opened_them() -> Iterator[None]:
    """Take redis-py's finalizers away: whether one closes a socket in time is chance, in a cycle of garbage."""
    with pytest.MonkeyPatch.context() as patching:
        patching.delattr(redis.connection.AbstractConnection, "__del__")
        yield


@pytest.fixture
def long_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    """A lease that no pause of the machine outlasts; its beats come ten times a second all the same."""
    monkeypatch.setattr("onefold._heartbeat.beats.BEATS_PER_LEASE", 36_000)
    return 3_600.0


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`stall(31)`: the workers have stood still for so many seconds, by their own clock and at once."""
    stood = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stood), sleep=time.sleep)
    monkeypatch.setattr("onefold._heartbeat.clock.monotonic", clock.monotonic)
    monkeypatch.setattr("onefold._delivery.drive.time", clock)
    return stood.append


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a new wallet."""
    return create(tmp_path / "wallet.db")


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    with connected(path) as connection:
        yield connection


@pytest.fixture
def kept_waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a transaction has found another one in its way."""
    found, begun = threading.Event(), SqliteTransaction.begun

    def watched(transaction: SqliteTransaction) -> bool:
        if begun(transaction):
            return True
        found.set()
        return False

    monkeypatch.setattr(SqliteTransaction, "begun", watched)
    return found


@pytest.fixture
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody has begun to write, and does not end."""
    with connected(path, isolation_level=None, check_same_thread=False) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
