"""Fixtures that several files share: a wallet in a file of its own, and others at work on it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onefold.stores import _trickle
from onefold.stores._sqlite_joined import SqliteTransaction
from wallet import connected, create

# The servers; they start when a test asks for one.
pytest_plugins = ["services.fixtures"]


@pytest.fixture(scope="session", autouse=True)
def no_purge_by_chance() -> Iterator[None]:
    """After which delivery a store purges a little is chance: whoever counts statements would fail now and then."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(_trickle, "chance", lambda: _trickle.ONE_IN)
        yield


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
