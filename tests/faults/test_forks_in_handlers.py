"""A handler forks, and its child comes back from it, too: the delivery stays the parent's."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, InProgress, UsageError
from tests.faults.cancel_tools import DRIVERS

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="THIS SYSTEM HAS NO FORK: a fork in a handler is not tried"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def exits() -> str:
    sys.exit(3)


def raises() -> str:
    raise LookupError


def returns() -> str:
    return "the child's"


ENDS = {exits: SystemExit, raises: LookupError, returns: UsageError}


def forked(child: Callable[[], str]) -> str | None:
    """In the parent: None, once the child has ended."""
    pid = os.fork()
    if pid == 0:
        return child()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child ended in something else"
    return None


def delivered(deliver: Callable[[], Any], child: Callable[[], str]) -> None:
    """Deliver in the parent; a child that comes back ends here."""
    parent = os.getpid()
    found: object = None
    try:
        deliver()
    except BaseException as error:
        if os.getpid() == parent:
            raise
        found = type(error)
    if os.getpid() != parent:
        os._exit(0 if found is ENDS[child] else 1)


@pytest.mark.parametrize("child", ENDS)
def test_the_child_leaves_its_parents_claim_alone(child: Callable[[], str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/records.db"
    with Guard(url) as guard, Guard(url) as other:

        def handler() -> str:
            mine = forked(child)
            if mine is not None:
                return mine
            with pytest.raises(InProgress):
                other.run("charge", "k", pytest.fail)
            return "the parent's"

        delivered(lambda: guard.run("charge", "k", handler), child)
        assert guard.run("charge", "k", pytest.fail).value == "the parent's"


@pytest.mark.parametrize("child", ENDS)
def test_the_child_leaves_its_parents_transaction_alone(child: Callable[[], str], source: Any) -> None:
    with Guard(source) as guard:
        starts: list[int] = []

        @guard.transactional("charge", key="key")
        def charge(key: str, *, tx: Any) -> str:
            starts.append(1)
            execute(tx, "INSERT INTO effects VALUES ('before')")
            mine = forked(child)
            if mine is not None:
                return mine
            execute(tx, "INSERT INTO effects VALUES ('after')")
            return "the parent's"

        @guard.transactional("count", key="key")
        def count(key: str, *, tx: Any) -> int:
            return int(execute(tx, "SELECT count(*) FROM effects").fetchone()[0])

        delivered(lambda: charge("k"), child)  # type: ignore[call-arg]
        assert count("k") == 2  # type: ignore[call-arg]
        assert charge("k") == "the parent's"  # type: ignore[call-arg]
        assert starts == [1]


@pytest.mark.parametrize("child", [raises, returns])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_child_of_an_async_handler_leaves_the_transaction_alone(
    child: Callable[[], str], driver: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Nothing of the child is committed, and its parent's connection goes on working."""
    database = DRIVERS[driver].database
    address = str(tmp_path / "wallet.db") if database == "path" else str(request.getfixturevalue(database))
    parent = os.getpid()

    async def story() -> None:
        async with DRIVERS[driver].opened(address) as environment:
            guard = environment.guard

            @guard.transactional("charge", key="key")
            async def charge(key: str, *, tx: Any) -> str:
                mine = forked(child) if key == "first" else None
                if mine is not None:
                    return mine
                if key == "first":
                    raise ArithmeticError
                return "the parent's"

            try:
                await charge("first")  # type: ignore[call-arg]
            except BaseException as error:
                if os.getpid() != parent:
                    # At once: the event loop is the parent's.
                    os._exit(0 if type(error) is ENDS[child] else 1)
                if not isinstance(error, ArithmeticError):
                    raise
            assert await guard.read("charge", "first") is None
            assert await charge("second") == "the parent's"  # type: ignore[call-arg]

    asyncio.run(story())


@pytest.mark.parametrize("child", [raises, returns])
@pytest.mark.parametrize("fixture", ["sqlite", "redis_url", "postgres_url", "mysql_url"])
def test_the_child_of_an_async_handler_leaves_the_claim_alone(
    child: Callable[[], str], fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/records.db" if fixture == "sqlite" else request.getfixturevalue(fixture)
    parent = os.getpid()

    async def handler() -> str:
        return forked(child) or "the parent's"

    async def story() -> None:
        async with AsyncGuard(url) as guard:
            try:
                await guard.run("charge", "k", handler)
            except BaseException as error:
                if os.getpid() != parent:
                    os._exit(0 if type(error) is ENDS[child] else 1)
                raise
            assert (await guard.run("charge", "k", pytest.fail)).value == "the parent's"

    asyncio.run(story())


def execute(tx: Any, statement: str) -> Any:
    """Execute it on a connection of SQLAlchemy, or of a driver."""
    if hasattr(tx, "exec_driver_sql"):
        return tx.exec_driver_sql(statement)
    cursor = tx.cursor()
    cursor.execute(statement)
    return cursor
