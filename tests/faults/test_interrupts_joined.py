"""An interrupt at every operation inside a transaction, before it is sent and after it: a record, if its effect is.

The blocking drivers. It is a Ctrl-C, or an exception of any class that a signal's handler raises, as Celery's soft time
limit does. A caller of `within` may even catch it and commit (row 41 of the edge cases).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import count, product
from typing import Any, NamedTuple

import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, text

from onefold import Guard
from onefold._delivery import steps as _steps
from tests.faults.cancel_tools import DRIVERS as ASYNC_DRIVERS
from tests.faults.cancel_tools import Driver, prepare
from tests.stores.mysql.wallet import parameters
from tests.support import PATIENCE


class SoftTimeLimitExceeded(Exception):
    """As Celery's: an ordinary exception, which a signal's handler raises wherever the worker is."""


INTERRUPTS = {"ctrl-c": KeyboardInterrupt, "soft limit": SoftTimeLimitExceeded, "alarm": TimeoutError}


class Face(NamedTuple):
    """A driver at work: its guard, a caller's transaction that is committed at the end, and the effect on either."""

    guard: Guard
    begun: Callable[[], AbstractContextManager[Any]]
    credit: Callable[[Any, str], None]


def _credit(mark: str) -> Callable[[Any, str], None]:
    def credit(tx: Any, message: str) -> None:
        with closing(tx.cursor()) as cursor:
            cursor.execute(f"INSERT INTO effects VALUES ({mark})", (message,))

    return credit


@contextmanager
def _sqlite(path: str) -> Iterator[Face]:
    @contextmanager
    def begun() -> Iterator[Any]:
        with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection, connection:
            yield connection

    with Guard(f"sqlite:///{path}") as guard:
        yield Face(guard, begun, _credit("?"))


@contextmanager
def _psycopg(url: str) -> Iterator[Face]:
    with Guard(url) as guard:
        yield Face(guard, lambda: psycopg.connect(url), _credit("%s"))


@contextmanager
def _pymysql(url: str) -> Iterator[Face]:
    @contextmanager
    def begun() -> Iterator[Any]:
        connection = pymysql.connect(**parameters(url))
        try:
            connection.begin()
            yield connection
            connection.commit()
        finally:
            if connection.open:
                connection.close()

    with Guard(url) as guard:
        yield Face(guard, begun, _credit("%s"))


def _sqlalchemy(driver: str) -> Callable[[str], AbstractContextManager[Face]]:
    @contextmanager
    def opened(address: str) -> Iterator[Face]:
        url = f"{driver}:///{address}" if driver == "sqlite" else f"{driver}:{address.partition(':')[2]}"
        engine = create_engine(url)
        try:
            with Guard(engine) as guard:
                yield Face(guard, engine.begin, _credit_sqlalchemy)
        finally:
            engine.dispose()

    return opened


def _credit_sqlalchemy(tx: Any, message: str) -> None:
    tx.execute(text("INSERT INTO effects VALUES (:message)"), {"message": message})


@contextmanager
def _django(address: str) -> Iterator[Face]:
    pytest.importorskip("django")
    from django.db import connections, transaction

    from tests.stores.django.project import alias_of, project

    database = "sqlite" if address.endswith(".db") else "mariadb" if address.startswith("mysql") else "postgres"
    with project(), alias_of(database, address) as alias, Guard(f"django://{alias}") as guard:

        @contextmanager
        def begun() -> Iterator[Any]:
            with transaction.atomic(using=alias):
                yield connections[alias]

        yield Face(guard, begun, _credit("%s"))


# The fixture of each one's database, and how it is opened.
FACES: dict[str, tuple[str, Callable[[str], AbstractContextManager[Face]]]] = {
    "sqlite": ("path", _sqlite),
    "psycopg": ("postgres_url", _psycopg),
    "pymysql": ("mysql_url", _pymysql),
    "sqlalchemy, sqlite": ("path", _sqlalchemy("sqlite")),
    "sqlalchemy, psycopg": ("postgres_url", _sqlalchemy("postgresql+psycopg")),
    "sqlalchemy, pymysql": ("mysql_url", _sqlalchemy("mysql+pymysql")),
    "django, sqlite": ("path", _django),
    "django, psycopg": ("postgres_url", _django),
    "django, pymysql": ("mysql_url", _django),
}


def transactional(face: Face, message: str) -> None:
    @face.guard.transactional("credit", key="message")
    def credit(message: str, *, tx: Any) -> str:
        face.credit(tx, message)
        return "credited"

    assert credit(message) == "credited"  # type: ignore[call-arg]


def within(face: Face, message: str) -> None:
    with face.begun() as connection:
        _credited_within(face, connection, message)


def within_commits_all_the_same(face: Face, message: str) -> None:
    with suppress(Exception), face.begun() as connection, suppress(*INTERRUPTS.values()):
        _credited_within(face, connection, message)


def _credited_within(face: Face, connection: Any, message: str) -> None:
    def handler() -> str:
        face.credit(connection, message)
        return "credited"

    assert face.guard.within(connection).run("credit", message, handler).value == "credited"


def fresh(face: Face, message: str) -> None:
    with face.begun() as connection:
        for new in face.guard.within(connection).fresh("credit", [message, f"{message}-2"], key=str).new:
            face.credit(connection, new)


def fresh_commits_all_the_same(face: Face, message: str) -> None:
    with suppress(Exception), face.begun() as connection:
        new: Any = ()
        with suppress(*INTERRUPTS.values()):
            new = face.guard.within(connection).fresh("credit", [message, f"{message}-2"], key=str).new
        for one in new:
            face.credit(connection, one)


STORIES = {
    "transactional": (transactional, transactional),
    "within": (within, within),
    "within, commits all the same": (within_commits_all_the_same, within),
    "fresh": (fresh, fresh),
    "fresh, commits all the same": (fresh_commits_all_the_same, fresh),
}


class Interrupts:
    """An interrupt at the n-th operation of a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.at = 0
        self._kind = kind
        self.after = False
        self._seen = 0
        for step in vars(_steps).values():
            if isinstance(step, type) and issubclass(step, _steps.StoreStep) and "send" in vars(step):
                monkeypatch.setattr(step, "send", self._struck(step.send))

    def set(self, at: int, *, after: bool) -> None:
        self.at, self.after, self._seen = at, after, 0

    @property
    def struck(self) -> bool:
        return 0 < self.at <= self._seen

    def _struck(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def struck(step: Any, store: Any) -> Any:
            self._seen += 1
            here = self._seen == self.at
            if here and not self.after:
                raise self._kind("now")
            reply = send(step, store)
            if here:
                raise self._kind("now")
            return reply

        return struck


@pytest.fixture
def address(face: str, request: pytest.FixtureRequest, tmp_path: Any) -> str:
    database = FACES[face][0]
    found = str(tmp_path / "wallet.db") if database == "path" else str(request.getfixturevalue(database))
    prepare(database, found)
    return found


# Each driver and each story is there; all of their combinations are for `make test-all`.
EVERYDAY = {
    *product(["sqlite", "psycopg"], STORIES),
    ("pymysql", "within, commits all the same"),
    ("pymysql", "transactional"),
    ("sqlalchemy, sqlite", "fresh, commits all the same"),
    ("sqlalchemy, psycopg", "within, commits all the same"),
    ("sqlalchemy, pymysql", "transactional"),
    ("django, sqlite", "within, commits all the same"),
    ("django, sqlite", "transactional"),
    ("django, psycopg", "fresh, commits all the same"),
}
EVERYDAY_KINDS = {
    *product(EVERYDAY, ["ctrl-c"]),
    *product(product(["sqlite", "psycopg", "pymysql"], ["within, commits all the same"]), ["soft limit"]),
    (("sqlalchemy, psycopg", "within, commits all the same"), "soft limit"),
    (("django, sqlite", "within, commits all the same"), "soft limit"),
    (("psycopg", "fresh, commits all the same"), "alarm"),
    (("sqlalchemy, psycopg", "within, commits all the same"), "alarm"),
    (("django, psycopg", "fresh, commits all the same"), "alarm"),
    (("sqlite", "fresh, commits all the same"), "soft limit"),
    (("pymysql", "transactional"), "alarm"),
}
COMBINATIONS = [
    pytest.param(*one, kind, id="-".join((*one, kind)), marks=() if (one, kind) in EVERYDAY_KINDS else pytest.mark.more)
    for one, kind in product(product(FACES, STORIES), INTERRUPTS)
]


@pytest.mark.parametrize(("face", "story", "kind"), COMBINATIONS)
def test_whichever_operation_is_interrupted_the_record_is_there_exactly_if_its_effect_is(
    face: str, story: str, kind: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, opened = FACES[face]
    interrupted, again = STORIES[story]
    seen = next(one for one in ASYNC_DRIVERS.values() if one.database == database).seen
    with opened(address) as working:
        transactional(working, "first")
        again(working, "second")
        interrupts = Interrupts(monkeypatch, INTERRUPTS[kind])
        for at in count(1):
            for after in (False, True):
                interrupts.set(at, after=after)
                message = f"m{at}{after}"
                # What is told first may be that the connection is closed.
                with suppress(KeyboardInterrupt, Exception):
                    interrupted(working, message)
                if not interrupts.struck:
                    assert at > 1
                    return
                records, effects = seen(address, message)
                assert records == effects, f"operation {at}: {records} records and {effects} effects"

                interrupts.set(0, after=False)
                again(working, message)

                assert seen(address, message) == (1, 1), f"operation {at}"


def test_an_interrupted_claim_leaves_the_callers_own_work_alone_in_sqlite(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "wallet.db")
    prepare("path", path)
    seen = Driver("path", ASYNC_DRIVERS["sqlite"].opened).seen
    with _sqlite(path) as face:
        within(face, "first")
        interrupts = Interrupts(monkeypatch)
        interrupts.set(1, after=True)
        with face.begun() as connection:
            face.credit(connection, "of the caller")
            with pytest.raises(KeyboardInterrupt):
                _credited_within(face, connection, "m1")

    assert seen(path, "of the caller") == (0, 1)
    assert seen(path, "m1") == (0, 0)
