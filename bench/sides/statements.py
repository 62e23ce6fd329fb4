"""The floors: Onefold's own statements, sent by the raw driver without Onefold.

What such a side takes longer than the same work by hand is the record's: an address, a token, a fingerprint, an expiry,
and an answer to read back. What Onefold takes longer than such a side is its Python.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.measure import Side
from bench.sides import Handler, joined
from bench.sides.by_hand import KEEP_SECONDS, LEASE_SECONDS, in_each_thread
from onefold import Guard
from onefold._model import State
from onefold.stores.postgres.statements import usual
from onefold.stores.sql.records import Parameters, in_numbers
from onefold.stores.sqlite.dialect import END_WITHOUT_RESULT, INSERT_NEW, LOOK_DONE
from services.house import House

FINGERPRINT: Final = bytes(33)


def sends(connection: Any) -> Callable[[str, Parameters], Any]:
    """Return a function that sends one of our statements with psycopg, as anybody would."""
    import psycopg

    def send(statement: str, values: Parameters) -> Any:
        text, names = in_numbers(statement)
        return psycopg.RawCursor(connection).execute(text, [values[name] for name in names], binary=True)

    return send


def _values(key: str, fingerprint: bytes | None = None) -> dict[str, Any]:
    shared = {"scope": "", "operation": "credit", "ttl": float(KEEP_SECONDS), "lease": float(LEASE_SECONDS)}
    # The mark is far above what the parameter is otherwise: see `onefold.stores.postgres.marks`.
    return shared | {"fingerprint": fingerprint, "key": key, "token": os.urandom(16), "mark": "5000"}


@contextmanager
def within(house: House) -> Iterator[Side]:
    with joined.wallet(house) as (url, connection), Guard(url) as guard:
        guard.read("credit", "none")
        send = sends(connection)

        def deliver(key: str) -> None:
            with connection.transaction():
                if not send(usual.INSERT_MARKED, _values(key)).fetchall():
                    connection.execute(joined.CREDIT)

        yield Side("our statement, psycopg", deliver, deliver, lambda: joined.balance(connection))


@contextmanager
def batch(house: House) -> Iterator[Side]:
    with joined.wallet(house) as (url, connection), Guard(url) as guard:
        guard.read("credit", "none")
        send = sends(connection)

        def deliver(key: str) -> None:
            keys = joined.batch_of(key)
            many = {"keys": keys, "tokens": [os.urandom(16) for _ in keys], "fingerprints": [None] * len(keys)}
            with connection.transaction():
                refused = send(usual._INSERT_ALL[State.DONE], _values(key) | many).fetchall()
                if not refused:
                    connection.execute(joined.CREDIT_MANY, [len(keys)])

        yield Side("our statement, psycopg", deliver, deliver, lambda: joined.balance(connection) // joined.BATCH)


@contextmanager
def claim(house: House) -> Iterator[Side]:
    import psycopg

    with joined.wallet(house) as (url, _), Guard(url) as guard, ExitStack() as stack:
        guard.read("credit", "none")
        handler = Handler()

        def connect() -> Any:
            return stack.enter_context(closing(psycopg.connect(url, autocommit=True)))

        send = in_each_thread(lambda: _Sending(sends(connect())))

        def deliver(key: str) -> None:
            values = _values(key, FINGERPRINT)
            if not send(usual.INSERT_RUNNING, values).fetchall():
                handler()
                send(usual.END, values)

        yield Side("our statements, psycopg", deliver, deliver, handler.times)


class _Sending:
    """A connection of psycopg's, as `in_each_thread` knows one."""

    def __init__(self, send: Callable[[str, Parameters], Any]) -> None:
        self.execute = send


@contextmanager
def sqlite(_house: House, sync: str = "full") -> Iterator[Side]:
    with TemporaryDirectory(prefix="onefold-bench-") as folder, ExitStack() as stack:
        file = Path(folder, "onefold.db")
        with Guard(f"sqlite:///{file}?sync={sync}") as guard:
            guard.run("none", "none", lambda: None)

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            stack.callback(connection.close)
            connection.execute(f"PRAGMA synchronous = {sync}")
            connection.execute("PRAGMA busy_timeout = 60000")
            return connection

        execute, handler = in_each_thread(connect), Handler()

        def first(key: str) -> None:
            token = os.urandom(16)
            execute(INSERT_NEW, (time.time(), "", "charge", key, token, LEASE_SECONDS, KEEP_SECONDS, FINGERPRINT))
            handler()
            execute(END_WITHOUT_RESULT, (time.time(), "", "charge", key, token, KEEP_SECONDS))

        def duplicate(key: str) -> None:
            execute(LOOK_DONE, (time.time(), "", "charge", key)).fetchone()

        yield Side("our statements, sqlite3", first, duplicate, handler.times)


@contextmanager
def sqlite_normal(house: House) -> Iterator[Side]:
    with sqlite(house, sync="normal") as side:
        yield side
