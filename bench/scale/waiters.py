"""What duplicates that wait for one running delivery cost: looks at the store, and the time until the last is answered.

The owner runs in this process. Its duplicates are threads, in this process or all in another one. A handler takes a
given time after all of them have called; looks are counted by the server, and compared with those without a duplicate.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from bench.scale.filling import OPERATION, Place
from onefold import Guard

WAITERS: Final = (1, 4, 16, 64)
HANDLER_SECONDS: Final = 2.0

# How long a duplicate may wait, and how long the other process may take to begin or to end.
WAIT_SECONDS: Final = 60.0
PATIENCE: Final = 120.0

SAME, ANOTHER = "the owner's process", "another process"
# Where a store wakes other processes only if it is asked to: the option of its URL.
NOTIFIED: Final = "another process, `?notify=yes`"
OPTIONS: Final = {NOTIFIED: "&notify=yes"}


class Waited(NamedTuple):
    store: str
    where: str
    waiters: int
    handler_seconds: float
    reads: int
    # From the handler's return to the last duplicate's answer.
    last_seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "where": self.where,
            "waiters": self.waiters,
            "handler_seconds": self.handler_seconds,
            "reads": self.reads,
            "reads_a_waiter_and_second": round(self.reads / self.waiters / self.handler_seconds, 2),
            "last_answer_ms": round(self.last_seconds * 1e3, 1),
        }


def measure(store: str, place: Place, waiters: tuple[int, ...], handler_seconds: float) -> Iterator[Waited]:
    """Measure each number of duplicates in each place."""
    alone, _ = _run(place, 0, SAME, handler_seconds)
    for where in (SAME, ANOTHER, *([NOTIFIED] if store == "postgres" else [])):
        for number in waiters:
            reads, last = _run(place, number, where, handler_seconds)
            yield Waited(store, where, number, handler_seconds, max(reads - alone, 0), last)


def _run(place: Place, waiters: int, where: str, handler_seconds: float) -> tuple[int, float]:
    """Return how often the store was asked, and how long the last answer took."""
    key, ended, url = str(uuid.uuid4()), [0.0], place.url + OPTIONS.get(where, "")
    before = place.reads()
    with _statements() as ours, Guard(url) as guard:

        def handler() -> None:
            answers.begin()
            time.sleep(handler_seconds)
            ended[0] = time.monotonic()

        answers = (_Threads if where == SAME else _Process)(url, guard, key, waiters)
        guard.run(OPERATION, key, handler)
        answered, theirs = answers.end()
    # A server counts what a connection did when it is closed; SQLite's processes count themselves.
    reads = _settled(place.reads) - before or len(ours) + theirs
    return reads, max(answered, default=ended[0]) - ended[0]


def _settled(count: Callable[[], int]) -> int:
    """Return the count once it stays the same: a server hears of closed connections a moment later."""
    before = -1
    while (now := count()) != before:
        before = now
        time.sleep(0.5)
    return now


class _Threads:
    """Duplicates in the owner's process, on its own guard."""

    def __init__(self, _url: str, guard: Guard, key: str, waiters: int) -> None:
        self._answered: list[float] = []
        self._calling = threading.Barrier(waiters + 1)
        self._threads = [threading.Thread(target=self._wait, args=(guard, key)) for _ in range(waiters)]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()
        self._calling.wait(PATIENCE)

    def end(self) -> tuple[list[float], int]:
        for thread in self._threads:
            thread.join(PATIENCE)
        if len(self._answered) != len(self._threads):
            raise AssertionError(f"{len(self._answered)} of {len(self._threads)} duplicates were answered")
        return self._answered, 0

    def _wait(self, guard: Guard, key: str) -> None:
        self._calling.wait(PATIENCE)
        outcome = guard.run(OPERATION, key, lambda: None, wait=WAIT_SECONDS)
        if outcome.replayed:
            self._answered.append(time.monotonic())


class _Process:
    """Duplicates in another process, all on one guard of its own."""

    def __init__(self, url: str, _guard: Guard, key: str, waiters: int) -> None:
        processes = multiprocessing.get_context("spawn")
        self._ours, its = processes.Pipe()
        self._process = processes.Process(target=_wait_elsewhere, args=(url, key, waiters, its), daemon=True)
        self._process.start()
        its.close()
        self._recv()

    def begin(self) -> None:
        self._ours.send("begin")
        self._recv()

    def end(self) -> tuple[list[float], int]:
        found: tuple[list[float], int] = self._recv()
        self._process.join(PATIENCE)
        self._ours.close()
        return found

    def _recv(self) -> Any:
        if not self._ours.poll(PATIENCE):
            raise AssertionError("the process of the duplicates did not answer")
        return self._ours.recv()


def _wait_elsewhere(url: str, key: str, waiters: int, owner: Connection) -> None:
    with _statements() as statements:
        with Guard(url) as guard:
            # Its connection is open, and its tables are known.
            guard.read(OPERATION, "none")
            threads = _Threads(url, guard, key, waiters)
            owner.send("ready")
            owner.recv()
            threads.begin()
            owner.send("calling")
            answered, _ = threads.end()
        owner.send((answered, len(statements)))


@contextmanager
def _statements() -> Iterator[list[str]]:
    """Collect what this process asks SQLite about records, on connections that are opened meanwhile."""
    found: list[str] = []
    connect = sqlite3.connect

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.set_trace_callback(lambda said: found.append(said) if "onefold_records" in said else None)
        return connection

    sqlite3.connect = traced  # type: ignore[assignment]
    try:
        yield found
    finally:
        sqlite3.connect = connect
