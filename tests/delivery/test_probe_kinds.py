"""Which probes a guard takes, and what is said of one that cannot answer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from onefold import AsyncGuard, Done, Guard, Policy, ResultNotKept, UsageError
from onefold.events import _warned
from onefold.queues._shared.consumer import Consuming
from onefold.stores.memory import MemoryStore
from tests.support import Clock, die_running


async def ask_async(_running: Any) -> Any:
    return Done("receipt")


class Asks:
    async def __call__(self, _running: Any) -> Any:
        return Done("receipt")

    async def ask(self, _running: Any) -> Any:
        return Done("receipt")


ASYNC: dict[str, Any] = {
    "a function": ask_async,
    "a method": Asks().ask,
    "an object": Asks(),
    "a partial": functools.partial(functools.partial(ask_async)),
    "a partial of an object": functools.partial(Asks()),
}
GIVEN: dict[str, Callable[[Policy], object]] = {
    "the guard": lambda policy: Guard("memory:", policy=policy),
    "a decorator": lambda policy: Guard("memory:").idempotent("charge", key="key", policy=policy)(lambda key: key),
    "a call": lambda policy: Guard("memory:").run("charge", "pay_1", pytest.fail, policy=policy),
    "a batch": lambda policy: raised(
        Guard("memory:").run_batch("charge", ["pay_1"], key=str, handler=pytest.fail, policy=policy)[0]
    ),
    "a consumer": lambda policy: Consuming(Guard("memory:"), "charge", print, key=lambda _message: "k", policy=policy),
}


def raised(result: Any) -> None:
    if isinstance(result, Exception):
        raise result


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("probe", ASYNC.values(), ids=ASYNC)
def test_a_blocking_guard_refuses_an_async_probe_when_it_gets_it(given: Callable[[Policy], object], probe: Any) -> None:
    with pytest.raises(UsageError, match=r"after_crash=.+: this probe is async, and a Guard is not"):
        given(Policy(after_crash=probe))


@pytest.mark.parametrize("probe", [*ASYNC.values(), lambda _running: Done("receipt")], ids=[*ASYNC, "a lambda"])
def test_an_async_guard_takes_both(probe: Any) -> None:
    async def pay() -> None:
        raise TimeoutError

    async def story() -> None:
        async with AsyncGuard("memory:", policy=Policy(after_crash=probe)) as guard:
            assert (await guard.run("charge", "pay_1", pay)).value == "receipt"

    asyncio.run(story())


def abandoned(probe: Any) -> Guard:
    clock = Clock()
    store = MemoryStore(clock=clock)
    guard = Guard(store, policy=Policy(after_crash=probe))
    die_running(store, "charge", "pay_1", guard.policy)
    clock.advance(31)
    return guard


def test_a_coroutine_that_shows_only_at_the_call_is_named_as_the_probes() -> None:
    def ask(running: Any) -> Any:
        return ask_async(running)

    with pytest.raises(UsageError, match=r"the probe \(after_crash=\) has returned the coroutine ask_async\(\), which"):
        abandoned(ask).run("charge", "pay_1", pytest.fail)


def test_a_generator_is_named_as_the_probes() -> None:
    def ask(_running: Any) -> Any:
        yield Done("receipt")

    with pytest.raises(UsageError, match=r"the probe \(after_crash=\) has returned the generator .*ask\(\), and no"):
        abandoned(ask).run("charge", "pay_1", pytest.fail)


def test_an_answer_that_is_not_what_the_handler_returns_is_told_as_the_probes(caplog: pytest.LogCaptureFixture) -> None:
    _warned.clear()
    guard = abandoned(lambda _running: Done(17))

    @guard.idempotent("charge", key="key", fingerprint=None)
    def charge(key: str) -> str:
        raise AssertionError("it ran")

    assert charge("pay_1") == 17  # type: ignore[comparison-overlap]
    with pytest.raises(ResultNotKept, match=r"its result was not kept \(the probe's answer: "):
        charge("pay_1")
    [line] = [record.message for record in caplog.records if "not kept" in record.message]
    assert "the probe's answer, Done(int), was not kept, and its duplicates get no result. It has to answer" in line
    assert "the type that the handler returns, str" in line
