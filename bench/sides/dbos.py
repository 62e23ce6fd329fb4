"""DBOS: a workflow whose id is the key, with the effect in a step, as its guide asks. An engine, in PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from bench.measure import Side
from bench.sides import AMOUNT, Handler, library, postgres_database
from services.house import House

TITLE: Final = "DBOS"


@contextmanager
def _launched(house: House) -> Iterator[Any]:
    """Yield the library while its runtime is open; workflows are registered before `launch`."""
    dbos = library("dbos")
    with postgres_database(house) as url:
        dbos.DBOS(
            config={
                "name": "bench",
                "system_database_url": url,
                "log_level": "ERROR",
                # Without an admin server or a console: they are no part of a call.
                "run_admin_server": False,
            }
        )
        try:
            yield dbos
        finally:
            dbos.DBOS.destroy(destroy_registry=True)


@contextmanager
def postgres(house: House) -> Iterator[Side]:
    with _launched(house) as dbos:
        handler = Handler()

        @dbos.DBOS.step()  # type: ignore[untyped-decorator]
        def effect() -> None:
            handler()

        @dbos.DBOS.workflow()  # type: ignore[untyped-decorator]
        def charge(payment_id: str, amount: int) -> None:  # noqa: ARG001 - they are what is delivered
            effect()

        def deliver(key: str) -> None:
            with dbos.SetWorkflowID(key):
                charge(key, AMOUNT)

        dbos.DBOS.launch()
        yield Side(TITLE, deliver, deliver, handler.times)


@asynccontextmanager
async def postgres_async(house: House, steps: int = 1) -> AsyncIterator[Side]:
    with _launched(house) as dbos:
        handler = Handler()

        @dbos.DBOS.step()  # type: ignore[untyped-decorator]
        async def effect(number: int) -> int:
            if number == 0:
                handler()
            return number

        @dbos.DBOS.workflow()  # type: ignore[untyped-decorator]
        async def charge(payment_id: str, amount: int) -> None:  # noqa: ARG001 - they are what is delivered
            for number in range(steps):
                await effect(number)

        async def deliver(key: str) -> None:
            with dbos.SetWorkflowID(key):
                await charge(key, AMOUNT)

        dbos.DBOS.launch()
        yield Side(TITLE, deliver, deliver, handler.times)


@asynccontextmanager
async def three_steps(house: House) -> AsyncIterator[Side]:
    async with postgres_async(house, steps=3) as side:
        yield side
