"""The pytest plugin: fixtures for tests of guarded handlers, without infrastructure. See `docs/testing.md`.

pytest loads this file in every project that has Onefold installed: each fixture imports what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onefold import AsyncGuard, Guard
    from onefold.testing import Clock

# So that a broken promise shows its values.
pytest.register_assert_rewrite("onefold.testing.promises", "onefold.testing.deliver")


@pytest.fixture
def onefold_clock() -> Clock:
    """Return the clock of `onefold_guard` and `onefold_async_guard`: `onefold_clock.advance("31s")`."""
    from onefold.testing import Clock

    return Clock()


@pytest.fixture
def onefold_guard(onefold_clock: Clock) -> Iterator[Guard]:
    """Provide a `Guard` on a memory store of its own, whose clock is `onefold_clock`."""
    from onefold import Guard
    from onefold.stores.memory import MemoryStore
    from onefold.testing import use

    guard = Guard("memory:")
    with use(guard, MemoryStore(clock=onefold_clock)):
        yield guard


@pytest.fixture
def onefold_async_guard(onefold_clock: Clock) -> Iterator[AsyncGuard]:
    """Provide an `AsyncGuard` on a memory store of its own, whose clock is `onefold_clock`."""
    from onefold import AsyncGuard
    from onefold.stores.memory import AsyncMemoryStore
    from onefold.testing import use

    guard = AsyncGuard("memory:")
    with use(guard, AsyncMemoryStore(clock=onefold_clock)):
        yield guard


@pytest.fixture
def deliver_twice() -> Callable[..., Any]:
    """Return `deliver_twice(function, *args, **kwargs)`, which checks that the second delivery is a replay.

    It returns the value of the first delivery. For an async function await it.
    """
    from onefold.testing import deliver_twice

    return deliver_twice


@pytest.fixture
def crash_at(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[None]]:
    """Return `crash_at`: with `crash_at("after_handler"):` a worker dies at this point, as SIGKILL would end it.

    Points are before_claim, after_claim, after_step (with `step="pay"`), after_handler and after_finish; `guard=` is
    `onefold_guard` unless given.
    """

    def crashing(
        point: Any, guard: Guard | AsyncGuard | None = None, *, step: str | None = None
    ) -> AbstractContextManager[None]:
        from onefold.testing import crash_at

        return crash_at(point, request.getfixturevalue("onefold_guard") if guard is None else guard, step=step)

    return crashing
