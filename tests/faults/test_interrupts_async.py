"""An operation that was executed, and of which the caller learns only that it took too long, on every async driver.

asyncpg's `command_timeout` raises Python's own TimeoutError, and so do signal handlers. A caller who catches it and
commits all the same must not commit a record whose handler has not run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from onefold._delivery import steps
from tests.faults.cancel_tools import DRIVERS, Environment, prepare, transactional
from tests.support import in_time

# More than a delivery has operations: a bound for the loop over them.
OPERATIONS_MAX = 20

KINDS = {
    "time-out": TimeoutError,
    "lost socket": ConnectionResetError,
    "soft limit": type("SoftLimit", (Exception,), {}),
}

# Those that leave Python's own errors as they are; all of their combinations are for `make test-all`.
EVERYDAY = {"asyncpg", "sqlalchemy, asyncpg", "psycopg"}


class Late:
    """An error after the n-th operation of a store has been executed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
        self.at = self.seen = 0
        self._kind = kind
        for step in vars(steps).values():
            if isinstance(step, type) and issubclass(step, steps.StoreStep) and "send" in vars(step):
                monkeypatch.setattr(step, "send", self._late(step.send))

    def set(self, at: int) -> None:
        self.at, self.seen = at, 0

    @property
    def struck(self) -> bool:
        return 0 < self.at <= self.seen

    def _late(self, send: Callable[..., Any]) -> Callable[..., Any]:
        async def late(step: Any, store: Any) -> Any:
            self.seen += 1
            here = self.seen == self.at
            reply = await send(step, store)
            if here:
                raise self._kind("too late")
            return reply

        return late


async def within(working: Environment, message: str, *caught: type[Exception]) -> None:
    async with working.begun() as connection:

        async def handler() -> str:
            await working.credit(connection, message)
            return "credited"

        with suppress(*caught):
            await working.guard.within(connection).run("credit", message, handler)


async def story(working: Environment, late: Late, seen: Callable[[str], tuple[int, int]]) -> None:
    # It makes the tables, where others have dropped them.
    await transactional(working, "first", lambda: None)
    for at in count(1):
        assert at < OPERATIONS_MAX
        late.set(at)
        message = f"m{at}"
        with suppress(Exception):
            await within(working, message, Exception)
        if not late.struck:
            assert at > 1
            return
        records, effects = seen(message)
        assert records == effects, f"operation {at}: {records} records and {effects} effects"
        late.set(0)
        await within(working, message)
        assert seen(message) == (1, 1), f"operation {at}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "driver", [pytest.param(one, marks=() if one in EVERYDAY else pytest.mark.more) for one in DRIVERS]
)
def test_a_caller_who_commits_all_the_same_keeps_the_record_exactly_if_there_is_an_effect(
    driver: str, kind: str, request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = DRIVERS[driver]
    address = str(tmp_path / "wallet.db") if used.database == "path" else str(request.getfixturevalue(used.database))
    prepare(used.database, address)
    late = Late(monkeypatch, KINDS[kind])

    async def main() -> None:
        async with used.opened(address) as working:
            await story(working, late, lambda message: used.seen(address, message))

    in_time(main())
