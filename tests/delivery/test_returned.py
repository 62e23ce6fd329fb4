"""A handler that has run is never taken for one that has not, whatever it returns."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, OutcomeUnknown, Policy, State, UsageError, current

HOLD = Policy(after_crash="hold")

effects: list[str] = []


@pytest.fixture(autouse=True)
def _no_effects() -> None:
    effects.clear()


def stream(order: str = "o-1") -> Any:
    effects.append("stream")
    yield order


async def stream_async(order: str = "o-1") -> Any:
    effects.append("stream")
    yield order


async def fetch(order: str = "o-1") -> str:
    effects.append("fetch")
    return order


class Orders:
    def stream(self) -> Any:
        return (yield from stream())

    async def fetch(self) -> str:
        return await fetch()

    def __call__(self) -> Any:
        return (yield from stream())


@functools.wraps(stream)
def traced(*args: Any) -> Any:
    return stream(*args)


NOT_STARTED: dict[str, Callable[..., Any]] = {
    "a generator function": stream,
    "an async generator function": stream_async,
    "a coroutine function": fetch,
    "a method": Orders().stream,
    "an async method": Orders().fetch,
    "a callable object": Orders(),
    "a partial": functools.partial(stream, "o-1"),
    "a partial of a coroutine function": functools.partial(functools.partial(fetch), "o-1"),
    "a decorated function": traced,
    "a lambda": lambda: stream("o-1"),
    "a lambda of a method": lambda: Orders.stream(None),  # type: ignore[arg-type]
    "a lambda of a coroutine function": lambda: fetch("o-1"),
}


@pytest.mark.parametrize("case", NOT_STARTED)
def test_where_the_handler_itself_was_not_started_nothing_ran_and_the_claim_is_released(case: str) -> None:
    guard = Guard("memory:", policy=HOLD)

    with pytest.raises(UsageError, match=r"nothing.* ran"):
        guard.run("charge", "pay_1", NOT_STARTED[case])

    assert guard.read("charge", "pay_1") is None
    assert effects == []


def charge() -> Any:
    effects.append("charged")
    return (part for part in "ab")


def charge_and_stream() -> Any:
    effects.append("charged")
    return stream()


def charge_and_stream_async() -> Any:
    effects.append("charged")
    return stream_async()


def primed() -> Any:
    started = stream()
    next(started)
    return started


class Charges:
    def charge(self) -> Any:
        return charge()

    def __call__(self) -> Any:
        return charge()


@functools.wraps(charge)
def traced_charge() -> Any:
    return charge()


RAN: dict[str, Callable[..., Any]] = {
    "a generator expression": charge,
    "a generator": charge_and_stream,
    "an async generator": charge_and_stream_async,
    "a generator that has begun": functools.wraps(stream)(primed),
    "a method": Charges().charge,
    "a callable object": Charges(),
    "a partial": functools.partial(charge),
    "a decorated function": traced_charge,
    "a lambda": lambda: charge(),  # noqa: PLW0108 - the lambda is the point
    "a lambda of a generator": lambda: charge_and_stream(),  # noqa: PLW0108
    "a lambda that does more": lambda: [charge_blocking().close(), stream()][1],
}


@pytest.mark.parametrize("case", RAN)
def test_where_it_ran_and_returned_a_generator_it_is_done_without_a_result(case: str) -> None:
    guard = Guard("memory:", policy=HOLD)

    first = guard.run("charge", "pay_1", RAN[case])
    second = guard.run("charge", "pay_1", RAN[case])

    assert not first.replayed
    assert (second.replayed, second.omitted) == (True, True)
    assert len(effects) == 1


def test_where_it_ran_in_a_transaction_or_a_batch_or_a_step_it_is_done_too(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'onefold.db'}")

    @guard.transactional("credit", key="key")
    def credit(key: str, *, tx: Any) -> Any:
        return charge()

    def handler() -> None:
        assert list(current().step("charge", charge)) == ["a", "b"]

    credit.outcome("k")
    assert credit.outcome("k").omitted
    for _ in range(2):
        guard.run_batch("batch", ["m"], key=str, handler=lambda _message: charge())
    guard.run("steps", "k", handler)

    assert effects == ["charged"] * 3
    guard.close()


async def charge_and_forget() -> Any:
    effects.append("charged")
    return fetch()


async def charge_again() -> Any:
    """Its own coroutine, of which it has run one."""
    effects.append("charged")
    return charge_again()


def charge_blocking() -> Any:
    effects.append("charged")
    return fetch()


def run(handler: Callable[..., Any], policy: Policy, times: int, expected: list[type[Exception]]) -> State | None:
    """Deliver it so often, and return the state of its record."""
    guard = Guard("memory:", policy=policy)
    for _, kind in zip(range(times), expected, strict=True):
        with pytest.raises(kind):
            guard.run("charge", "pay_1", handler)
    found = guard.read("charge", "pay_1")
    return None if found is None else found.state


async def run_async(
    handler: Callable[..., Any], policy: Policy, times: int, expected: list[type[Exception]]
) -> State | None:
    async with AsyncGuard("memory:", policy=policy) as guard:
        for _, kind in zip(range(times), expected, strict=True):
            with pytest.raises(kind):
                await guard.run("charge", "pay_1", handler)
        found = await guard.read("charge", "pay_1")
    return None if found is None else found.state


@pytest.mark.parametrize("handler", [charge_and_forget, charge_again, functools.partial(charge_again)])
def test_where_it_ran_and_returned_a_coroutine_its_outcome_is_unknown(handler: Callable[..., Any]) -> None:
    assert asyncio.run(run_async(handler, HOLD, 2, [UsageError, Held])) is State.HELD
    assert effects == ["charged"]


def test_the_same_where_a_blocking_handler_did() -> None:
    assert run(charge_blocking, HOLD, 2, [UsageError, Held]) is State.HELD
    assert effects == ["charged"]


def test_under_rerun_it_is_as_any_error_and_says_that_it_ran() -> None:
    assert run(charge_blocking, Policy(), 2, [OutcomeUnknown, UsageError]) is None
    assert asyncio.run(run_async(charge_and_forget, Policy(), 1, [UsageError])) is None
    with pytest.raises(
        UsageError, match=r"the handler ran, and returned the coroutine fetch\(\).*Await it in the handler"
    ):
        Guard("memory:").run("charge", "pay_1", charge_blocking)
