"""A delivery inside of another one, on the same connection, which it was given by another object of the library's.

A session of a connection, the connection of a session, a scoped session, an async shell, a pool's proxy, the driver's
own connection: whatever is sent through them is in one transaction.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from onefold import TX, AsyncGuard, Guard, InsideItself
from onefold._driver_connections import driver_connection
from tests.faults.cancel_tools import DRIVERS, prepare
from tests.stores.django.project import project
from tests.stores.postgres.tools import through_asyncpg
from tests.support import in_time

View = Callable[[Any], Any]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'wallet.db'}")
    yield engine
    engine.dispose()


def itself(held: Any) -> Any:
    return held


def session_on(held: Any) -> Any:
    return Session(bind=held)


def driver_of(held: Any) -> Any:
    return held.connection.driver_connection


@contextmanager
def scoped(engine: Engine) -> Iterator[Any]:
    sessions = scoped_session(sessionmaker(engine))
    with sessions.begin():
        yield sessions
    sessions.remove()


@contextmanager
def in_session(engine: Engine) -> Iterator[Any]:
    with Session(engine) as session, session.begin():
        yield session


@contextmanager
def in_savepoint(engine: Engine) -> Iterator[Any]:
    with in_session(engine) as session, session.begin_nested():
        yield session


# What the outer delivery is given, and what its handler makes of it for the inner one.
PAIRS: dict[str, tuple[Callable[[Engine], Any], View]] = {
    "a session, and itself": (in_session, itself),
    "a session, and its connection": (in_session, lambda session: session.connection()),
    "a session in a savepoint, and its connection": (in_savepoint, lambda session: session.connection()),
    "a connection, and a session on it": (Engine.begin, session_on),
    "a connection, and the driver's own": (Engine.begin, driver_of),
    "a scoped session, and its session": (scoped, lambda sessions: sessions()),
    "a scoped session, and its connection": (scoped, lambda sessions: sessions.connection()),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_same_key_inside_itself_is_told_by_whichever_view_of_the_connection(pair: str, engine: Engine) -> None:
    begun, view = PAIRS[pair]
    with Guard(engine) as guard, begun(engine) as held:

        def handler() -> None:
            guard.within(view(held)).run("credit", "m1", lambda: "inner")

        with pytest.raises(InsideItself):
            guard.within(held).run("credit", "m1", handler)


def test_a_transactional_handler_is_known_by_a_session_on_its_transaction(engine: Engine) -> None:
    with Guard(engine) as guard:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: Any = TX) -> None:
            guard.within(Session(bind=tx)).run("credit", message, lambda: None)

        with pytest.raises(InsideItself):
            credit("m1")


def test_another_connection_of_the_same_engine_is_another_transaction(engine: Engine) -> None:
    with Session(engine) as waiting, Session(engine) as begun, engine.begin() as connection:
        begun.begin()

        assert driver_connection(connection) is connection.connection.driver_connection
        assert driver_connection(waiting) is waiting
        # It has no connection yet, and is not made to take one.
        assert driver_connection(begun) is begun
        assert engine.pool.checkedout() == 1  # type: ignore[attr-defined]


def test_a_connection_that_is_closed_or_was_lost_is_left_as_it_is(engine: Engine) -> None:
    with engine.connect() as closed, engine.connect() as lost:
        closed.close()
        lost.invalidate()

        assert driver_connection(closed) is closed
        assert driver_connection(lost) is lost
        assert lost.invalidated


def test_what_has_nothing_behind_it_is_its_own() -> None:
    connection = sqlite3.connect(":memory:")

    assert driver_connection(connection) is connection
    assert driver_connection(None) is None
    connection.close()


def test_a_connection_of_djangos_is_known_by_the_drivers_own() -> None:
    with project():
        from django.db import connection, transaction

        guard = Guard("django://default")
        with transaction.atomic():
            wrapper = connection._connections[connection._alias]

            assert driver_connection(connection) is driver_connection(wrapper) is wrapper.connection

            def handler() -> None:
                guard.within(wrapper.connection).run("credit", "m1", lambda: None)

            with pytest.raises(InsideItself):
                guard.within(connection).run("credit", "m1", handler)
        connection.close()


def test_what_a_pool_of_asyncpg_lends_is_known_by_the_connection_inside(postgres_url: str) -> None:
    async def story() -> None:
        async with asyncpg.create_pool(postgres_url, min_size=1) as pool, AsyncGuard(pool) as guard:
            # Whoever works on a connection of asyncpg's has our module of it.
            await guard.read("credit", "m1")
            async with pool.acquire() as lent:
                assert driver_connection(lent) is lent._con  # type: ignore[attr-defined]
            # Given back.
            assert driver_connection(lent) is lent

    in_time(story())


async def check_views(engine: AsyncEngine) -> None:
    """Every view of one connection leads to the driver's own."""
    sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    async with engine.connect() as connection:
        session = AsyncSession(bind=connection)
        found = {driver_connection(one) for one in (connection, session, connection.sync_connection)}
        assert found == {(await connection.get_raw_connection()).driver_connection}
    async with sessions.begin():
        connection = await sessions.connection()
        assert driver_connection(sessions) is driver_connection(connection)
    await sessions.remove()


# How a handler sees the connection on which it is.
SHELLS: dict[str, Callable[[AsyncConnection], Any]] = {
    "itself": itself,
    "a session": lambda tx: AsyncSession(bind=tx),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_end_of_a_transaction_waits_for_a_task_that_delivers_through_another_view(
    shell: str, postgres_url: str
) -> None:
    prepare("postgres_url", postgres_url)
    seen = DRIVERS["asyncpg"].seen

    async def story() -> None:
        engine = create_async_engine(through_asyncpg(postgres_url))
        async with AsyncGuard(engine) as guard:
            inside, may_go, tasks = asyncio.Event(), asyncio.Event(), []

            @guard.transactional("outer", key="message")
            async def outer(message: str, *, tx: AsyncConnection = TX) -> None:
                view = SHELLS[shell](tx)

                async def inner() -> None:
                    inside.set()
                    await may_go.wait()
                    await view.execute(text("INSERT INTO effects VALUES ('i1')"))

                tasks.append(asyncio.create_task(guard.within(view).run("inner", "i1", inner)))
                await inside.wait()
                # After the handler has ended, unless the transaction does not wait.
                asyncio.get_running_loop().call_later(0.05, may_go.set)

            await outer("o1")
            assert seen(postgres_url, "i1") == (1, 1)
            await asyncio.gather(*tasks)
            await check_views(engine)
        await engine.dispose()

    in_time(story())
