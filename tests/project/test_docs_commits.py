"""Every recipe of the documentation, with a commit that fails: nobody is told of a success, and nothing is remembered.

A page runs statement by statement. The first transaction of a statement that writes rows of the page's own cannot be
committed: the statement has to raise, or its HTTP client to get a 5xx. Then it runs again, and has to end as the page
says: as if it had never been tried.
"""

from __future__ import annotations

import ast
import re
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncmy.connection
import httpx
import psycopg
import pymysql.connections
import pytest

from tests.project.test_docs import PAGES, blocks_of, on_our_servers, tidied
from tests.stores.django.project import put_back
from tests.support import PROJECT

# How a page writes rows together with their record.
JOINS = re.compile(r"\btransactional\(|\bwithin\(|\btx\b|guarded_batches|\bBEGIN\b|\.begin\(")
PAGES_THAT_JOIN = [page for page in PAGES if any(JOINS.search(block) for _, block in blocks_of(page))]

# A consumer catches what a message raises, and tries it again: what its page asserts afterwards is the proof.
TRIES_AGAIN = (
    "docs/queues/dramatiq.md",
    "docs/queues/kafka.md",
    "docs/queues/nats.md",
    "docs/queues/redis-streams.md",
    "docs/queues/sqs.md",
    "docs/queues/taskiq.md",
)

# They take seconds, for a broker or another process. Every day, Celery's page stands for all queues.
SLOW = ("docs/purge.md", "docs/queues/")
EVERY_DAY = ("docs/queues/celery.md",)

# A statement whose page counts attempts, and not effects; and a loop that logs what a message raises.
SPARED = ('withdraw("m4")', "    work()")

# Its worker stops after its first attempt: nobody would see the second.
STOPS = ("docs/queues/rabbitmq.md",)


class Fuse:
    """Refuses the next commit of a page's rows, once."""

    def __init__(self) -> None:
        self.is_set = False
        self.has_blown = False
        # What an HTTP client was told since.
        self.statuses: list[int] = []

    def arm(self) -> None:
        self.is_set, self.has_blown, self.statuses = True, False, []

    def disarm(self) -> None:
        self.is_set = False

    def blow(self) -> None:
        self.is_set, self.has_blown = False, True

    def watch(self, patching: pytest.MonkeyPatch) -> None:
        """Hear of every answer; an error of the application is one, as a server makes it."""
        send = httpx.ASGITransport.handle_async_request

        async def handle(transport: httpx.ASGITransport, request: httpx.Request) -> httpx.Response:
            transport.raise_app_exceptions = transport.raise_app_exceptions and not self.has_blown and not self.is_set
            response = await send(transport, request)
            self.statuses.append(response.status_code)
            return response

        patching.setattr(httpx.ASGITransport, "handle_async_request", handle)


WRITES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}


def on_sqlite(fuse: Fuse, patching: pytest.MonkeyPatch) -> None:
    """A transaction that has written both a row and a record may not commit."""
    open_it = sqlite3.connect

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        # A statement is looked at when it is prepared: one that is kept would be looked at once.
        connection: sqlite3.Connection = open_it(*args, **{**kwargs, "cached_statements": 0})
        is_ours: set[bool] = set()

        def may(action: int, name: str | None, *_more: str | None) -> int:
            if action in WRITES and name is not None and not name.startswith("sqlite_"):
                is_ours.add(name.startswith("onefold"))
            if action != sqlite3.SQLITE_TRANSACTION:
                return sqlite3.SQLITE_OK
            if name == "COMMIT" and is_ours == {True, False} and fuse.is_set:
                fuse.blow()
                return sqlite3.SQLITE_DENY
            is_ours.clear()
            return sqlite3.SQLITE_OK

        connection.set_authorizer(may)
        return connection

    patching.setattr(sqlite3, "connect", connect)
    patching.setattr(sqlite3.dbapi2, "connect", connect)


def on_mysql(fuse: Fuse, patching: pytest.MonkeyPatch) -> None:
    """There are no constraints that wait for the commit: the driver refuses to send it."""

    def refused(sql: Any) -> bool:
        text = sql.encode() if isinstance(sql, str) else sql
        # A commit of ours comes with the proof that it is still the same transaction.
        if not fuse.is_set or not (text == b"COMMIT" or text.endswith(b"; COMMIT; END")):
            return False
        fuse.blow()
        return True

    plain: Any = pymysql.connections.Connection
    async_class: Any = asyncmy.connection.Connection
    send, send_async = plain._execute_command, async_class._execute_command

    def execute(connection: Any, command: int, sql: Any) -> None:
        if refused(sql):
            raise pymysql.OperationalError(1180, "Got error 149 during COMMIT")
        send(connection, command, sql)

    async def execute_async(connection: Any, command: int, sql: Any) -> None:
        if refused(sql):
            raise asyncmy.errors.OperationalError(1180, "Got error 149 during COMMIT")
        await send_async(connection, command, sql)

    patching.setattr(plain, "_execute_command", execute)
    patching.setattr(async_class, "_execute_command", execute_async)


class PostgresFuse(Fuse):
    """A constraint on each table of the page's own that is checked at the commit, and holds but once.

    A sequence counts what was refused: it is not rolled back.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        # A page that keeps its own transaction open on a table would be waited for without end.
        self._server = psycopg.connect(url, autocommit=True, options="-c lock_timeout=60s")
        self._server.execute("CREATE SEQUENCE onefold_fuse")
        self._server.execute("""
            CREATE FUNCTION onefold_blow() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF nextval('onefold_fuse') = 1 THEN RAISE EXCEPTION 'the commit is refused'; END IF;
                RETURN NULL;
            END $$""")

    def arm(self) -> None:
        super().arm()
        for (table,) in self._server.execute("""
            SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
            AND relname NOT LIKE 'onefold%' AND NOT relhastriggers""").fetchall():
            self._server.execute(
                f"CREATE CONSTRAINT TRIGGER onefold_fuse AFTER INSERT OR UPDATE OR DELETE ON {table} "
                "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION onefold_blow()"
            )
        self._server.execute("SELECT setval('onefold_fuse', 1, false)")

    def disarm(self) -> None:
        super().disarm()
        (called,) = self._server.execute("SELECT is_called FROM onefold_fuse").fetchone()  # type: ignore[misc]
        # A page may use SQLite as well.
        self.has_blown = self.has_blown or called
        self._server.execute("SELECT setval('onefold_fuse', 2)")

    def close(self) -> None:
        self._server.execute("DROP FUNCTION onefold_blow CASCADE")
        self._server.execute("DROP SEQUENCE onefold_fuse")
        self._server.close()


@pytest.fixture
def fuse_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Fuse]]:
    made: list[Fuse] = []

    def make(page: Path) -> Fuse:
        is_postgres = "postgresql://localhost" in page.read_text(encoding="utf-8")
        made.append(PostgresFuse(request.getfixturevalue("postgres_url")) if is_postgres else Fuse())
        on_sqlite(made[0], monkeypatch)
        on_mysql(made[0], monkeypatch)
        made[0].watch(monkeypatch)
        return made[0]

    yield make
    for fuse in made:
        if isinstance(fuse, PostgresFuse):
            fuse.close()


def statements_of(page: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    """Each statement of a page, with its position, or none where nothing of it is to fail."""
    for line, block in blocks_of(page):
        text = "\n" * (line - 1) + on_our_servers(block, request)
        for statement in ast.parse(text).body:
            code = compile(ast.Module([statement], []), str(page), "exec")
            is_spared = any(spared in str(ast.get_source_segment(text, statement)) for spared in SPARED)
            yield "" if is_spared else f"{page.relative_to(PROJECT)}:{statement.lineno}", code


def recipes() -> list[Any]:
    names = {str(page.relative_to(PROJECT)): page for page in PAGES_THAT_JOIN}
    return [
        pytest.param(page, id=name, marks=pytest.mark.more if name.startswith(SLOW) and name not in EVERY_DAY else ())
        for name, page in names.items()
        if name not in STOPS
    ]


@pytest.mark.parametrize("page", recipes())
def test_a_commit_that_fails_is_an_error_and_nothing_is_remembered(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    fuse_for: Callable[[Path], Fuse],
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    fuse, failed = fuse_for(page), 0

    with put_back(), tidied(module):
        for position, code in statements_of(page, request):
            failed += run(position, code, module, fuse)

    assert failed, "no transaction of this page was found: nothing was tested"


def run(position: str, code: Any, module: types.ModuleType, fuse: Fuse) -> bool:
    """Run a statement, and once more if a commit of it has failed. True: one has."""
    raised: BaseException | None = None
    if position:
        fuse.arm()
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        raised = error
    if position:
        fuse.disarm()
    if not position or not fuse.has_blown:
        if raised is not None:
            raised.add_note(f"at {position}")
            raise raised
        return False
    is_told = raised is not None or any(status >= 500 for status in fuse.statuses)
    assert is_told or position.startswith(TRIES_AGAIN), f"{position}: a commit failed, and nobody was told"
    if is_told:
        # `with psycopg.connect(…)` closes nothing where the commit has failed.
        close_connections(module)
        exec(code, module.__dict__)
    return True


def close_connections(module: types.ModuleType) -> None:
    for value in vars(module).values():
        if isinstance(value, psycopg.Connection):
            value.close()
