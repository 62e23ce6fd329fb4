"""An interrupt in the handler of a nested delivery takes the transaction around it down, also if it is caught there.

The nested delivery's record is taken back, and its writes are in the transaction: if that were committed, the next
delivery would write them once more. Each driver, blocking and async.
"""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

from onefold import UsageError
from tests.faults.cancel_tools import DRIVERS, Driver, Environment, prepare
from tests.faults.test_interrupts_joined import FACES, Face

WAYS = ["goes on", "writes", "two deep", "within"]


@pytest.fixture
def address(database: str, request: pytest.FixtureRequest, tmp_path: Any) -> str:
    found = str(tmp_path / "wallet.db") if database == "path" else str(request.getfixturevalue(database))
    prepare(database, found)
    return found


def chosen(drivers: Any, databases: dict[str, str], everyday: set[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(
            driver, databases[driver], way, id=f"{driver}-{way}",
            marks=() if (driver, way) in everyday else pytest.mark.more,
        )
        for driver, way in product(drivers, WAYS)
    ]  # fmt: skip


class Nested:
    """A delivery in another one; the nested one is cancelled while its handler waits, after it has written."""

    def __init__(self, environment: Environment, way: str) -> None:
        self.cancelled = True
        self.ran = 0
        self._inside = asyncio.Event()
        guard = environment.guard

        @guard.transactional("innermost", key="message")
        async def innermost(message: str, *, tx: Any) -> None:
            await environment.credit(tx, message)
            if self.cancelled:
                self._inside.set()
                await asyncio.Event().wait()

        @guard.transactional("inner", key="message")
        async def inner(message: str, *, tx: Any) -> None:
            if way == "two deep":
                await innermost(f"{message}-most")  # type: ignore[call-arg]
            await written(message, tx)

        async def called(message: str, tx: Any) -> None:
            if way != "within":
                await inner(message)  # type: ignore[call-arg]
                return
            await guard.within(tx).run("inner", message, lambda: written(message, tx))

        async def written(message: str, tx: Any) -> None:
            await environment.credit(tx, message)
            if self.cancelled:
                self._inside.set()
                await asyncio.Event().wait()

        @guard.transactional("outer", key="message")
        async def outer(message: str, *, tx: Any) -> None:
            self.ran += 1
            task = asyncio.create_task(called(f"{message}-inner", tx))
            if self.cancelled:
                await self._inside.wait()
                task.cancel()
            await asyncio.wait({task})
            if way == "writes" or not self.cancelled:
                await environment.credit(tx, message)

        self.outer: Any = outer
        self.inner: Any = inner


ASYNC_EVERYDAY = {
    ("psycopg", "goes on"),
    ("psycopg", "two deep"),
    ("asyncpg", "goes on"),
    ("asyncmy", "goes on"),
    ("asyncmy", "writes"),
    ("sqlite", "goes on"),
    ("sqlite", "writes"),
    ("sqlite", "two deep"),
    ("asyncmy", "within"),
    ("sqlite", "within"),
    ("sqlalchemy, sessions on asyncpg", "goes on"),
}


@pytest.mark.parametrize(
    ("driver", "database", "way"),
    chosen(DRIVERS, {name: driver.database for name, driver in DRIVERS.items()}, ASYNC_EVERYDAY),
)
def test_a_nested_delivery_that_was_cancelled_is_not_committed_by_the_one_around_it(
    driver: str, database: str, way: str, address: str
) -> None:
    async def main() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            nested = Nested(environment, way)
            with pytest.raises(Exception) as raised:  # noqa: PT011 - ours, or the driver's where the handler writes
                await nested.outer("m")
            assert nested.ran == 1
            if way != "writes":
                assert isinstance(raised.value, UsageError)
            said = [str(raised.value), *getattr(raised.value, "__notes__", ())]
            assert any("a delivery inside this one was interrupted" in message for message in said), said
            assert DRIVERS[driver].seen(address, "m") == (0, 0)
            assert DRIVERS[driver].seen(address, "m-inner") == (0, 0)

            nested.cancelled = False
            await nested.outer("m")
            await nested.inner("m-inner")

        for message in ["m", "m-inner", *(["m-inner-most"] if way == "two deep" else ())]:
            assert DRIVERS[driver].seen(address, message) == (1, 1), message

    asyncio.run(main())


class NestedBlocking:
    """The same, and Ctrl-C hits the nested handler after it has written."""

    def __init__(self, face: Face, way: str) -> None:
        self.interrupted = True
        guard = face.guard

        @guard.transactional("innermost", key="message")
        def innermost(message: str, *, tx: Any) -> None:
            face.credit(tx, message)
            if self.interrupted:
                raise KeyboardInterrupt

        @guard.transactional("inner", key="message")
        def inner(message: str, *, tx: Any) -> None:
            if way == "two deep":
                innermost(f"{message}-most")  # type: ignore[call-arg]
            written(message, tx)

        def called(message: str, tx: Any) -> None:
            if way != "within":
                inner(message)  # type: ignore[call-arg]
                return
            guard.within(tx).run("inner", message, lambda: written(message, tx))

        def written(message: str, tx: Any) -> None:
            face.credit(tx, message)
            if self.interrupted:
                raise KeyboardInterrupt

        @guard.transactional("outer", key="message")
        def outer(message: str, *, tx: Any) -> None:
            try:
                called(f"{message}-inner", tx)
            except KeyboardInterrupt:
                if way != "writes":
                    return
            face.credit(tx, message)

        self.outer: Any = outer
        self.inner: Any = inner


EVERYDAY = {
    ("psycopg", "goes on"),
    ("psycopg", "writes"),
    ("pymysql", "goes on"),
    ("sqlite", "goes on"),
    ("sqlite", "two deep"),
    ("psycopg", "within"),
    ("sqlite", "within"),
    ("sqlalchemy, psycopg", "goes on"),
    ("django, sqlite", "goes on"),
    ("django, sqlite", "writes"),
}


@pytest.mark.parametrize(
    ("face", "database", "way"), chosen(FACES, {name: database for name, (database, _) in FACES.items()}, EVERYDAY)
)
def test_a_nested_delivery_that_ctrl_c_has_hit_is_not_committed_by_the_one_around_it(
    face: str, database: str, way: str, address: str
) -> None:
    seen = Driver(database, None).seen  # type: ignore[arg-type]
    with FACES[face][1](address) as opened:
        nested = NestedBlocking(opened, way)
        with pytest.raises(Exception) as raised:  # noqa: PT011 - ours, or the driver's where the handler writes
            nested.outer("m")
        if way != "writes":
            assert isinstance(raised.value, UsageError)
        said = [str(raised.value), *getattr(raised.value, "__notes__", ())]
        assert any("a delivery inside this one was interrupted" in message for message in said), said
        assert (seen(address, "m"), seen(address, "m-inner")) == ((0, 0), (0, 0))

        nested.interrupted = False
        nested.outer("m")
        nested.inner("m-inner")

    for message in ["m", "m-inner", *(["m-inner-most"] if way == "two deep" else ())]:
        assert seen(address, message) == (1, 1), message
