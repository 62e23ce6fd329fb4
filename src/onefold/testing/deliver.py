"""Deliver twice, as a queue does, and check that nothing happened twice."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onefold import Event, Outcome, subscribe
from onefold.events import Kind

# A handler was called.
RAN = (Kind.STARTED, Kind.UNPROTECTED)


def deliver_twice(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a guarded function twice with the same arguments; return the value of the first call.

    The second call has to be a replay with an equal value, or an `AssertionError` says what it was. Takes decorated
    functions and methods, and any other function that uses a guard inside. For an async function, await the result.
    """
    # If it is decorated, `outcome` says what happened.
    call = getattr(function, "outcome", function)
    first = call(*args, **kwargs)
    if inspect.isawaitable(first):
        return _deliver_async(first, call, args, kwargs)
    with _heard() as events:
        second = call(*args, **kwargs)
    return _compared(first, second, events)


async def _deliver_async(first: Awaitable[Any], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    value = await first
    with _heard() as events:
        second = await call(*args, **kwargs)
    return _compared(value, second, events)


@contextmanager
def _heard() -> Iterator[list[Event]]:
    events: list[Event] = []
    stop = subscribe(events.append)
    try:
        yield events
    finally:
        stop()


def _compared(first: Any, second: Any, events: list[Event]) -> Any:
    if isinstance(first, Outcome) and isinstance(second, Outcome):
        assert second.replayed, f"the second delivery ran the handler again (attempt {second.attempt})"
        assert not second.omitted, f"the second delivery has no result to replay: {second.remark}"
        first, second = first.value, second.value
    else:
        kinds = [event.kind for event in events]
        ran = ", ".join(event.operation for event in events if event.kind in RAN)
        assert not ran, f"the second delivery ran a handler again: {ran}"
        assert Kind.REPLAYED in kinds, "the second delivery replayed nothing: does this function use a guard?"
    assert second == first, f"the second delivery returned {second!r}, but the first returned {first!r}"
    return first
