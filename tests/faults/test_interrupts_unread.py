"""An exception of a signal's handler between a statement and its answer, at each statement of a delivery.

The next statement on that connection would be given the answer that nobody has read. So the connection is never used
again: not for a ROLLBACK, and not by the next delivery, which a pool would lend it to. Celery's soft time limit is such
an exception, and comes wherever the worker is: in the claim, in a statement of the handler, in COMMIT.

The drivers that wait for their answers in Python. sqlite3, psycopg2 and mysqlclient wait in C, where a signal's handler
does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count, product
from typing import Any

import psycopg
import pymysql.connections
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from onefold import Guard
from tests.faults.cancel_tools import DRIVERS as ASYNC_DRIVERS
from tests.faults.cancel_tools import prepare
from tests.faults.test_interrupts_joined import FACES as BLOCKING
from tests.faults.test_interrupts_joined import Face, SoftTimeLimitExceeded, _credit_sqlalchemy


@contextmanager
def _session(address: str) -> Iterator[Face]:
    # One connection, so that what was left on it meets the next delivery.
    engine = create_engine(address.replace("mysql:", "mysql+pymysql:"), pool_size=1, max_overflow=0)
    try:
        with Guard(sessionmaker(engine)) as guard:
            yield Face(guard, engine.begin, _credit_sqlalchemy)
    finally:
        engine.dispose()


FACES: dict[str, tuple[str, Callable[[str], AbstractContextManager[Face]]]] = {
    name: face for name, face in BLOCKING.items() if "sqlite" not in name
} | {"session, pymysql": ("mysql_url", _session)}


class Struck:
    """A signal at the n-th answer that a driver waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._at = self._seen = 0
        mysql = pymysql.connections.Connection
        for name in ("_read_query_result", "_read_ok_packet"):
            monkeypatch.setattr(mysql, name, self._unread(getattr(mysql, name)))
        monkeypatch.setattr(psycopg.Connection, "wait", self._under_way(psycopg.Connection.wait))

    def set(self, at: int) -> None:
        self._at, self._seen = at, 0

    @property
    def is_over(self) -> bool:
        return 0 < self._at <= self._seen

    def _is_now(self) -> bool:
        self._seen += 1
        return self._seen == self._at

    def _unread(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def struck(connection: Any, *options: Any, **named: Any) -> Any:
            if self._is_now():
                raise SoftTimeLimitExceeded
            return read(connection, *options, **named)

        return struck

    def _under_way(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def struck(connection: Any, generator: Any, *options: Any, **named: Any) -> Any:
            if self._is_now():
                # As far as to where it waits, if it sends anything.
                with suppress(StopIteration):
                    next(generator)
                raise SoftTimeLimitExceeded
            return wait(connection, generator, *options, **named)

        return struck


def _writes(face: Face, tx: Any, message: str) -> None:
    face.credit(tx, message)


def _fails_once(face: Face, tx: Any, message: str) -> None:
    face.credit(tx, message)
    if message not in _failed:
        _failed.add(message)
        raise LookupError(message)


_failed: set[str] = set()


def _writes_in_a_savepoint(face: Face, tx: Any, message: str) -> None:
    with _savepoint(tx):
        face.credit(tx, message)


def _catches_it(face: Face, tx: Any, message: str) -> None:
    with suppress(SoftTimeLimitExceeded):
        face.credit(tx, message)


def _catches_it_around_a_savepoint(face: Face, tx: Any, message: str) -> None:
    with suppress(SoftTimeLimitExceeded), _savepoint(tx):
        face.credit(tx, message)
    if hasattr(tx, "run_on_commit"):
        # Django's hooks come after COMMIT, on the same connection, and before we have it back.
        tx.on_commit(lambda: _ask(tx))


def _ask(tx: Any) -> None:
    with tx.cursor() as cursor:
        cursor.execute("SELECT 1")


@contextmanager
def _savepoint(tx: Any) -> Iterator[None]:
    """As each library has it; by hand for a driver alone."""
    if hasattr(tx, "begin_nested"):
        with tx.begin_nested():
            yield
    elif hasattr(tx, "alias"):
        from django.db import transaction

        with transaction.atomic(using=tx.alias):
            yield
    elif hasattr(tx, "transaction"):
        with tx.transaction():
            yield
    else:
        with tx.cursor() as cursor:
            cursor.execute("SAVEPOINT mine")
            try:
                yield
            except BaseException:
                cursor.execute("ROLLBACK TO SAVEPOINT mine")
                raise


HANDLERS = {
    "writes": _writes,
    "fails": _fails_once,
    "savepoint": _writes_in_a_savepoint,
    "catches it": _catches_it,
    "catches it around a savepoint": _catches_it_around_a_savepoint,
}
# What a handler returns decides which statements end the delivery.
RESULTS = (None, "credited")

EVERYDAY = {
    *product(["sqlalchemy, pymysql", "django, pymysql"], ["writes", "catches it around a savepoint"], ["credited"]),
    ("psycopg", "writes", "credited"),
    ("django, psycopg", "writes", None),
    ("session, pymysql", "fails", None),
}
COMBINATIONS = [
    pytest.param(*one, id="-".join(map(str, one)), marks=() if one in EVERYDAY else pytest.mark.more)
    for one in product(FACES, HANDLERS, RESULTS)
]


@pytest.fixture
def address(face: str, request: pytest.FixtureRequest) -> str:
    database = FACES[face][0]
    found = str(request.getfixturevalue(database))
    prepare(database, found)
    return found


# psycopg's own generator, which is torn at the end of a pipeline.
@pytest.mark.filterwarnings("ignore:.*BasePipeline._exit_gen:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("face", "handler", "result"), COMBINATIONS)
def test_whichever_answer_is_not_read_three_more_deliveries_make_one_effect(
    face: str, handler: str, result: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, opened = FACES[face]
    seen = next(one for one in ASYNC_DRIVERS.values() if one.database == database).seen
    with opened(address) as working:

        @working.guard.transactional("credit", key="message", returns=object)
        def credit(message: str, *, tx: Any) -> str | None:
            HANDLERS[handler](working, tx, message)
            return result

        _failed.clear()
        _failed.update({"first", "another"})
        credit("first")  # type: ignore[call-arg]
        struck = Struck(monkeypatch)
        for at in count(1):
            message = f"m{at}"
            struck.set(at)
            with suppress(Exception):
                credit(message)  # type: ignore[call-arg]
            if not struck.is_over:
                assert at > 2
                break
            struck.set(0)
            _failed.add(message)
            assert [credit(message) for _ in range(3)] == [result] * 3, at  # type: ignore[call-arg]
            # A handler that goes back to its savepoint, and returns, has done nothing.
            undone = handler == "catches it around a savepoint" and seen(address, message) == (1, 0)
            assert undone or seen(address, message) == (1, 1), at
            assert credit("first") == result  # type: ignore[call-arg]
            assert seen(address, "first") == (1, 1), at
