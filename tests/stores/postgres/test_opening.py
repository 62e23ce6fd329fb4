"""psycopg: a connection that is interrupted or fails before anybody has it is closed, at whichever step it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import psycopg
import psycopg_pool
import pytest

from onefold.stores.postgres.psycopg.pool import AsyncOpener, CallersAsyncPool, CallersPool, Opener
from onefold.stores.postgres.urls import settings_of

BY_URL = ["set_isolation_level", "execute", "fetchone"]
BY_POOL = ["configure", "set_autocommit"]


def interrupted(*_values: object, **_options: object) -> NoReturn:
    raise KeyboardInterrupt


async def cancelled(*_values: object, **_options: object) -> NoReturn:
    raise asyncio.CancelledError


def failed(*_values: object, **_options: object) -> NoReturn:
    raise RuntimeError("a mistake of the hook")


async def failed_async(*_values: object, **_options: object) -> NoReturn:
    failed()


async def awaited(connect: Callable[[], Any]) -> None:
    await connect()


def noted(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[Any]:
    """The connections that are made from here on."""
    made: list[Any] = []
    create = kind.__init__

    def noting(connection: Any, *values: Any) -> None:
        made.append(connection)
        create(connection, *values)

    monkeypatch.setattr(kind, "__init__", noting)
    return made


@pytest.mark.parametrize("strike", [interrupted, failed])
@pytest.mark.parametrize("step", [*BY_URL, *BY_POOL])
def test_a_connection_that_nobody_gets_is_closed(
    step: str, strike: Callable[..., NoReturn], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = noted(monkeypatch, psycopg.Connection)
    pool = psycopg_pool.ConnectionPool(postgres_url, configure=strike if step == "configure" else None, open=False)
    connect = CallersPool(pool).reserve()._connect if step in BY_POOL else Opener(settings_of(postgres_url))
    if step != "configure":
        monkeypatch.setattr(psycopg.Cursor if step == "fetchone" else psycopg.Connection, step, strike)

    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        connect()
    assert [connection.closed for connection in made] == [True]


@pytest.mark.parametrize("strike", [cancelled, failed_async])
@pytest.mark.parametrize("step", [*BY_URL, *BY_POOL])
def test_an_async_connection_that_nobody_gets_is_closed(
    step: str, strike: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = noted(monkeypatch, psycopg.AsyncConnection)
    configure = strike if step == "configure" else None
    pool = psycopg_pool.AsyncConnectionPool(postgres_url, configure=configure, open=False)
    connect = CallersAsyncPool(pool).reserve()._connect if step in BY_POOL else AsyncOpener(settings_of(postgres_url))
    if step != "configure":
        monkeypatch.setattr(psycopg.AsyncCursor if step == "fetchone" else psycopg.AsyncConnection, step, strike)

    with pytest.raises((asyncio.CancelledError, RuntimeError)):
        asyncio.run(awaited(connect))
    assert [connection.closed for connection in made] == [True]
