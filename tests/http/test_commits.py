"""A commit that fails behind the Idempotency-Key header: the client is told, and the next request runs."""

from __future__ import annotations

import importlib.util
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import flask
import httpx
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from onefold import AsyncGuard, Guard, StoreUnavailable
from onefold.http.fastapi import IdempotencyMiddleware, by_header, idempotent_route
from onefold.http.flask import IdempotencyMiddleware as WsgiMiddleware
from tests.project.test_docs_commits import Fuse, on_sqlite
from tests.support import PROJECT, in_time

EXAMPLES = PROJECT / "examples"

HEADERS = {"X-Api-Key": "shop", "Idempotency-Key": "order-1"}


def dependency_commits(app: FastAPI, sessions: async_sessionmaker[AsyncSession]) -> None:
    async def in_session() -> AsyncIterator[AsyncSession]:
        async with sessions() as session, session.begin():
            yield session

    @app.post("/credits")
    async def credit(session: AsyncSession = Depends(in_session, scope="function")) -> str:  # noqa: B008
        await session.execute(text("INSERT INTO wallet VALUES ('asha', 5)"))
        return "credited"


def endpoint_commits(app: FastAPI, sessions: async_sessionmaker[AsyncSession]) -> None:
    @app.post("/credits")
    async def credit() -> str:
        async with sessions() as session, session.begin():
            await session.execute(text("INSERT INTO wallet VALUES ('asha', 5)"))
        return "credited"


def first_commit_fails(engine: AsyncEngine) -> None:
    refused: list[str] = []

    @event.listens_for(engine.sync_engine, "commit")
    def refuse(_connection: Any) -> None:
        if not refused:
            refused.append("once")
            raise OSError("the disk is full")


@pytest.mark.parametrize("commits", [dependency_commits, endpoint_commits])
@pytest.mark.parametrize("per_route", [False, True], ids=["middleware", "route"])
def test_fastapi_with_sqlalchemy_answers_after_the_commit(
    tmp_path: Path, per_route: bool, commits: Callable[[FastAPI, async_sessionmaker[AsyncSession]], None]
) -> None:
    with closing(sqlite3.connect(tmp_path / "wallet.db")) as connection, connection:
        connection.execute("CREATE TABLE wallet (account TEXT, amount INTEGER)")
    app = FastAPI()
    guarding: dict[str, Any] = {"guard": AsyncGuard("memory:"), "scope": by_header("X-Api-Key")}
    if per_route:
        app.router.route_class = idempotent_route(**guarding)
    else:
        app.add_middleware(IdempotencyMiddleware, **guarding)

    async def story() -> list[httpx.Response]:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/wallet.db")
        first_commit_fails(engine)
        commits(app, async_sessionmaker(engine))
        try:
            return await posted(app, "/credits", 3)
        finally:
            await engine.dispose()

    assert told(in_time(story())) == [(500, False), (200, False), (200, True)]
    with closing(sqlite3.connect(tmp_path / "wallet.db")) as connection:
        assert connection.execute("SELECT * FROM wallet").fetchall() == [("asha", 5)]


async def posted(app: Any, path: str, times: int, **body: Any) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=HEADERS) as client:
        return [await client.post(path, json=body) for _ in range(times)]


def told(answers: list[Any]) -> list[tuple[int, bool]]:
    return [(one.status_code, "idempotent-replayed" in one.headers) for one in answers]


HOOKS = ["after_request", "teardown_request", "call_on_close"]


@pytest.mark.parametrize("hook", HOOKS)
def test_the_wsgi_middleware_waits_for_whatever_of_flasks_may_commit(hook: str) -> None:
    app = flask.Flask("shop")
    runs: list[int] = []

    def commit(response: Any = None) -> Any:
        if len(runs) == 1:
            raise OSError("the disk is full")
        return response

    @app.post("/credits")
    def credit() -> flask.Response:
        runs.append(5)
        response = flask.make_response("credited")
        if hook == "call_on_close":
            response.call_on_close(commit)
        return response

    if hook != "call_on_close":
        getattr(app, hook)(commit)
    app.wsgi_app = WsgiMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, guard=Guard("memory:"), scope=by_header("X-Api-Key")
    )

    def post() -> tuple[int, bool]:
        try:
            return told([app.test_client().post("/credits", headers=HEADERS)])[0]
        except OSError:
            # A server answers 500.
            return 500, False

    assert [post() for _ in range(3)] == [(500, False), (200, False), (200, True)]
    assert runs == [5, 5]


# The examples.


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Fuse:
    fuse = Fuse()
    on_sqlite(fuse, monkeypatch)
    return fuse


def test_the_service_of_the_example_charges_once_though_its_first_commit_fails(tmp_path: Path, fuse: Fuse) -> None:
    async def story() -> list[httpx.Response]:
        app = example("payments_api").create_app(str(tmp_path / "payments.db"))
        async with app.router.lifespan_context(app):
            fuse.arm()
            return await posted(app, "/payments", 3, account="asha", amount=4200)

    answers = in_time(story())

    assert fuse.has_blown
    assert told(answers) == [(500, False), (201, False), (201, True)]
    assert answers[1].json()["balance"] == 5800


def test_its_twin_in_flask_does_the_same(tmp_path: Path, fuse: Fuse) -> None:
    with closing(sqlite3.connect(tmp_path / "payments.db")) as connection, connection:
        connection.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
        connection.execute("INSERT INTO wallet VALUES ('asha', 10000)")
    client = example("payments_flask").create_app(tmp_path / "payments.db").test_client()

    fuse.arm()
    body = {"account": "asha", "amount": 4200}
    answers = [client.post("/payments", json=body, headers=HEADERS) for _ in range(3)]

    assert fuse.has_blown
    assert told(answers) == [(500, False), (201, False), (201, True)]
    assert answers[1].json["balance"] == 5800


DJANGO = """
import sys, tempfile
from pathlib import Path
import pytest
sys.path[:0] = {folders!r}
from tests.project.test_docs_commits import Fuse, on_sqlite
import payments_django as example

fuse = Fuse()
on_sqlite(fuse, pytest.MonkeyPatch())
example.configure(Path({folder!r}))
from django.db import connection, connections
from django.test import Client

with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE payment (charge_id TEXT PRIMARY KEY, account TEXT, amount INTEGER NOT NULL)")
    cursor.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
    cursor.execute("INSERT INTO wallet VALUES ('asha', 10000)")
fuse.arm()
client, body = Client(raise_request_exception=False), {{"account": "asha", "amount": 4200}}
for _ in range(3):
    answer = client.post("/payments", body, content_type="application/json", headers={headers!r})
    print(answer.status_code, "Idempotent-Replayed" in answer, b"5800" in answer.content)
print(fuse.has_blown)
example.guard.close()
connections.close_all()
"""


def test_its_twin_in_django_does_the_same(tmp_path: Path) -> None:
    folders = [str(PROJECT), str(EXAMPLES)]
    code = DJANGO.format(folders=folders, folder=str(tmp_path), headers=HEADERS)

    # Django is configured once in a process.
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    expected = ["500 False False", "201 False True", "201 True True", "True"]
    assert found.stdout.splitlines() == expected, found.stderr


def test_the_consumer_of_the_example_stops_at_a_commit_that_fails_and_remembers_nothing(
    tmp_path: Path, fuse: Fuse
) -> None:
    fuse.arm()
    with pytest.raises(StoreUnavailable):
        example("wallet").main(tmp_path)

    assert fuse.has_blown
    with Guard(f"sqlite:///{tmp_path}/wallet.db") as guard:
        assert guard.read("credit", "txn-001") is None
    with closing(sqlite3.connect(tmp_path / "wallet.db")) as connection:
        assert connection.execute("SELECT * FROM effects").fetchall() == []
