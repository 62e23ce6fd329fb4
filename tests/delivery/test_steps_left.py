"""A handler that ends before its steps do, or after one of them was interrupted: nobody knows what happened.

So it is never taken for an error that says "it did not happen".
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from onefold import (
    AsyncGuard,
    ClaimLost,
    Done,
    Guard,
    Held,
    InProgress,
    InsideItself,
    NotDone,
    Policy,
    Rerun,
    State,
    UsageError,
    current,
)
from onefold.current import Current
from onefold.http.client import Transport
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import PATIENCE, Clock

LEASE = 31

WAYS: dict[str, Any] = {
    "rerun": "rerun",
    "hold": "hold",
    "skip": "skip",
    "a probe": lambda _running: NotDone(),
}


class Shop:
    """Counts what it has sent. The mail fails on the first run, while the payment is under way or has been cut off."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.runs = 0

    async def pay(self, begun: asyncio.Event, go_on: asyncio.Event) -> str:
        self.sent.append("pay")
        begun.set()
        if len(self.sent) == 1:
            await go_on.wait()
        return "paid"

    def fail_once(self) -> str:
        if self.runs == 1:
            raise ValueError("mail failed")
        return "mailed"


def gathering(shop: Shop, begun: asyncio.Event, go_on: asyncio.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    """A handler that waits for its steps by a plain gather: that one waits for none after the first error."""

    async def mail() -> str:
        await begun.wait()
        return shop.fail_once()

    async def handler() -> None:
        shop.runs += 1
        step = current().step
        await asyncio.gather(step("pay", lambda: shop.pay(begun, go_on)), step("mail", mail))

    return handler


async def let_go(go_on: asyncio.Event) -> None:
    """Let the steps that are under way come to their ends."""
    go_on.set()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait({task for task in others if "_step_async" in repr(task)})


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_outlives_its_handler_is_kept_in_the_log_and_never_repeated(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        clock, shop, begun, go_on = Clock(), Shop(), asyncio.Event(), asyncio.Event()
        guard = AsyncGuard(AsyncMemoryStore(clock=clock), policy=Policy(after_crash=WAYS[way]))
        handler = gathering(shop, begun, go_on)
        with pytest.raises(ValueError, match="mail failed"):
            await guard.run("order", "o-1", handler)
        with pytest.raises(InProgress):
            await guard.run("order", "o-1", handler)
        await let_go(go_on)

        clock.advance(LEASE)
        if way == "hold":
            with pytest.raises(Held):
                await guard.run("order", "o-1", handler)
            await guard.resolve("order", "o-1", Rerun(), by="me", reason="looked")
        await guard.run("order", "o-1", handler)

        assert shop.sent == ["pay"]
        assert shop.runs == (1 if way == "skip" else 2)

    asyncio.run(main())

    (message,) = [record.getMessage() for record in caplog.records if record.name == "onefold"]
    digest = Guard("memory:").address("order", "o-1").digest
    assert f"order [key {digest}]: its handler ended in ValueError while its step 'pay' was under way" in message
    assert "return_exceptions=True" in message


@pytest.mark.parametrize("way", WAYS)
def test_the_same_by_threads(way: str) -> None:
    clock, shop, begun, go_on = Clock(), Shop(), threading.Event(), threading.Event()
    guard = Guard(MemoryStore(clock=clock), policy=Policy(after_crash=WAYS[way]))
    futures: list[Future[str]] = []

    def pay() -> str:
        shop.sent.append("pay")
        begun.set()
        assert len(shop.sent) > 1 or go_on.wait(PATIENCE)
        return "paid"

    def handler() -> None:
        shop.runs += 1
        futures.append(pool.submit(current().step, "pay", pay))
        assert begun.wait(PATIENCE)
        shop.fail_once()
        futures[-1].result(PATIENCE)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="mail failed"):
            guard.run("order", "o-1", handler)
        with pytest.raises(InProgress):
            guard.run("order", "o-1", handler)
        go_on.set()
        assert futures[0].result(PATIENCE) == "paid"

        clock.advance(LEASE)
        if way == "hold":
            with pytest.raises(Held):
                guard.run("order", "o-1", handler)
            guard.resolve("order", "o-1", Rerun(), by="me", reason="looked")
        guard.run("order", "o-1", handler)

    assert shop.sent == ["pay"]


def test_a_bypass_that_leaves_a_step_under_way_neither_loses_its_entry_nor_what_it_found() -> None:
    async def first() -> str:
        return "first"

    async def main() -> None:
        clock, shop, begun, go_on = Clock(), Shop(), asyncio.Event(), asyncio.Event()
        guard = AsyncGuard(AsyncMemoryStore(clock=clock))
        handler = gathering(shop, begun, go_on)
        await guard.run("order", "o-1", first, returns=str)
        with pytest.raises(ValueError, match="mail failed"):
            await guard.run("order", "o-1", handler, bypass=True)
        await let_go(go_on)
        clock.advance(LEASE)

        assert (await guard.run("order", "o-1", handler, returns=str)).value == "first"
        await guard.run("order", "o-1", handler, bypass=True)
        assert shop.sent == ["pay"]

    asyncio.run(main())


def test_a_final_error_stays_final_and_the_step_is_told_that_its_handler_had_ended() -> None:
    async def main() -> None:
        shop, begun, go_on = Shop(), asyncio.Event(), asyncio.Event()
        late: list[Any] = []

        async def taking(step: Callable[..., Any]) -> None:
            try:
                await step("pay", lambda: shop.pay(begun, go_on))
            except ClaimLost as error:
                late.append(error)

        async def handler() -> None:
            task = asyncio.create_task(taking(current().step))
            tasks.append(task)
            await begun.wait()
            raise ValueError("declined")

        tasks: list[asyncio.Task[None]] = []
        guard = AsyncGuard("memory:", policy=Policy(final_errors=(ValueError,)))
        with pytest.raises(ValueError, match="declined"):
            await guard.run("order", "o-1", handler)
        go_on.set()
        await tasks[0]

        found = await guard.read("order", "o-1")
        assert found is not None
        assert found.state is State.FAILED
        assert "the step 'pay' finished after its handler had ended" in str(late[0])
        assert late[0].value == "paid"

    asyncio.run(main())


def in_a_group(shop: Shop, begun: asyncio.Event, go_on: asyncio.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    """A handler whose TaskGroup cancels the payment after it was sent, because the mail fails."""

    async def mail() -> str:
        await begun.wait()
        return shop.fail_once()

    async def handler() -> None:
        shop.runs += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(current().step("pay", lambda: shop.pay(begun, go_on)))
            group.create_task(current().step("mail", mail))

    return handler


@pytest.mark.parametrize(
    ("way", "sent"), [("rerun", ["pay", "pay"]), ("hold", ["pay"]), ("skip", ["pay"]), ("a probe", ["pay"])]
)
def test_a_step_that_was_interrupted_makes_the_outcome_unknown(
    way: str, sent: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        shop, begun, go_on = Shop(), asyncio.Event(), asyncio.Event()
        after_crash: Any = (lambda _running: Done("asked")) if way == "a probe" else way
        guard = AsyncGuard("memory:", policy=Policy(after_crash=after_crash))
        handler = in_a_group(shop, begun, go_on)

        if way == "a probe":
            assert (await guard.run("order", "o-1", handler)).value == "asked"
        else:
            with pytest.raises(ExceptionGroup):
                await guard.run("order", "o-1", handler)
        if way == "hold":
            with pytest.raises(Held, match="ended in ExceptionGroup, after its step 'pay' was interrupted"):
                await guard.run("order", "o-1", handler)
        else:
            await guard.run("order", "o-1", handler)

        assert shop.sent == sent

    asyncio.run(main())

    assert "its handler ended in ExceptionGroup after its step 'pay' was interrupted" in caplog.text


def test_under_rerun_its_provider_is_not_trusted_for_longer_than_it_remembers() -> None:
    async def main() -> None:
        clock, shop, begun, go_on = Clock(), Shop(), asyncio.Event(), asyncio.Event()
        guard = AsyncGuard(AsyncMemoryStore(clock=clock), policy=Policy(rerun_within="1h"))
        handler = in_a_group(shop, begun, go_on)
        with pytest.raises(ExceptionGroup):
            await guard.run("order", "o-1", handler)
        clock.advance(3_601)

        with pytest.raises(Held):
            await guard.run("order", "o-1", handler)
        assert shop.sent == ["pay"]

    asyncio.run(main())


def test_a_step_that_was_cancelled_before_it_began_has_not_happened(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[str] = []

    async def pay() -> None:
        sent.append("pay")

    async def handler() -> None:
        runs.append(1)
        if len(runs) == 1:
            task = asyncio.create_task(current().step("pay", pay))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ValueError("mail failed")
        await current().step("pay", pay)

    runs: list[int] = []

    async def main() -> None:
        guard = AsyncGuard("memory:", policy=Policy(after_crash="hold"))
        with pytest.raises(ValueError, match="mail failed"):
            await guard.run("order", "o-1", handler)
        await guard.run("order", "o-1", handler)

    asyncio.run(main())

    assert sent == ["pay"]
    assert caplog.text == ""


@pytest.mark.parametrize("again", [True, False])
def test_a_step_that_was_interrupted_and_tried_again_is_known(*, again: bool) -> None:
    """A handler may catch an interrupt of its own making: a time limit by SIGALRM, say."""

    class Limit(BaseException):
        pass

    runs: list[str] = []

    def pay() -> None:
        runs.append("pay")
        if len(runs) == 1:
            raise Limit

    def handler() -> None:
        with pytest.raises(Limit):
            current().step("pay", pay)
        if again:
            current().step("pay", pay)
        raise ValueError("mail failed")

    guard = Guard("memory:", policy=Policy(after_crash="hold"))
    with pytest.raises(ValueError, match="mail failed"):
        guard.run("order", "o-1", handler)

    found = guard.read("order", "o-1")
    assert found is not None
    assert found.state is (State.OPEN if again else State.HELD)


def test_an_error_of_a_step_itself_says_what_the_error_of_a_handler_says(caplog: pytest.LogCaptureFixture) -> None:
    def pay() -> None:
        raise ValueError("declined")

    guard = Guard("memory:", policy=Policy(after_crash="hold"))
    with pytest.raises(ValueError, match="declined"):
        guard.run("order", "o-1", lambda: current().step("pay", pay))

    assert guard.read("order", "o-1") is None
    assert caplog.text == ""


def test_a_handler_that_returns_while_a_step_is_under_way_is_done_and_warned(caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = threading.Event(), threading.Event()
    futures: list[Future[bool]] = []

    def pay() -> bool:
        begun.set()
        return go_on.wait(PATIENCE)

    def handler() -> str:
        futures.append(pool.submit(current().step, "pay", pay))
        assert begun.wait(PATIENCE)
        return "paid, I hope"

    with ThreadPoolExecutor(1) as pool:
        outcome = Guard("memory:").run("order", "o-1", handler)
        go_on.set()
        with pytest.raises(ClaimLost, match="finished after its handler had ended"):
            futures[0].result(PATIENCE)

    assert outcome.value == "paid, I hope"
    assert "its handler returned while its step 'pay' was under way: the delivery is done" in caplog.text


# A step belongs to its handler.


@pytest.mark.parametrize("policy", [Policy(), Policy(mode="seen")], ids=["claim", "seen"])
def test_a_step_that_is_begun_after_its_handler_has_ended_does_not_run(policy: Policy) -> None:
    effects: list[str] = []
    ended: list[Current] = []
    Guard("memory:", policy=policy).run("order", "o-1", lambda: ended.append(current()))

    with pytest.raises(UsageError, match=r"the handler of this delivery has ended.* the step 'late' did not run"):
        ended[0].step("late", lambda: effects.append("late"))
    assert effects == []


@pytest.mark.parametrize("policy", [Policy(), Policy(mode="seen")], ids=["claim", "seen"])
def test_nor_does_one_that_was_made_before_and_is_async_after_it(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    effects: list[str] = []
    ended: list[Any] = []

    async def main() -> None:
        async def handler() -> None:
            ended.append(current().step("late", lambda: effects.append("late")))

        async with AsyncGuard("memory:", policy=policy) as guard:
            await guard.run("order", "o-1", handler)
        with pytest.raises(UsageError, match="the step 'late' did not run"):
            await ended[0]

    with caplog.at_level(logging.WARNING, "onefold"):
        asyncio.run(main())

    assert effects == []
    if policy.mode == "claim":
        assert "its handler returned, and its step 'late' was never begun: it did not happen" in caplog.text


def test_current_in_a_task_that_outlives_its_handler_is_a_mistake() -> None:
    async def main() -> None:
        go_on, tasks = asyncio.Event(), []

        async def later() -> str:
            await go_on.wait()
            return current().key

        async def handler() -> None:
            tasks.append(asyncio.create_task(later()))

        await AsyncGuard("memory:").run("order", "o-1", handler)
        go_on.set()
        with pytest.raises(UsageError, match="the one that was running here has ended"):
            await tasks[0]

    asyncio.run(main())


# Inside of a step, the delivery is the current one.


def test_in_a_step_of_a_bare_thread_the_delivery_is_the_current_one_and_not_after_it() -> None:
    def names() -> tuple[str, str | None, bool]:
        return current().operation, current().step_name, current().is_running

    def handler() -> None:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(current().step, "pay", names).result(PATIENCE) == ("order", "pay", True)
            with pytest.raises(UsageError, match="none is running"):
                pool.submit(current).result(PATIENCE)

    Guard("memory:").run("order", "o-1", handler)


def test_a_step_of_the_outer_delivery_is_inside_of_the_inner_one_as_well() -> None:
    guard = Guard("memory:")

    def outer() -> None:
        take = current().step

        def inner() -> None:
            assert take("pay", lambda: current().operation) == "outer"
            assert current().operation == "inner"
            take("itself", lambda: guard.run("inner", "o-1", inner))

        guard.run("inner", "o-1", inner)

    with pytest.raises(InsideItself):
        guard.run("outer", "o-1", outer)


def test_what_a_step_of_a_bare_thread_sends_has_the_key_of_its_delivery_on_each_run() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        return httpx.Response(201)

    def pay() -> None:
        with httpx.Client(transport=Transport(httpx.MockTransport(answer))) as client:
            client.post("https://gateway/charges", json={"amount": 5})
        raise ConnectionError("the worker loses its network after the charge")

    def handler() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(current().step, "pay", pay).result(PATIENCE)

    guard = Guard("memory:")
    for _ in range(2):
        with pytest.raises(ConnectionError):
            guard.run("order", "o-1", handler)

    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_a_step_that_outlives_its_handler_still_sends_the_keys_of_its_delivery() -> None:
    begun, go_on = threading.Event(), threading.Event()
    futures: list[Future[str]] = []
    expected: list[str] = []

    def pay() -> str:
        begun.set()
        assert go_on.wait(PATIENCE)
        return current().key_for("gateway")

    def handler() -> None:
        expected.append(current().key_for("gateway"))
        futures.append(pool.submit(current().step, "pay", pay))
        assert begun.wait(PATIENCE)
        raise ValueError("mail failed")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="mail failed"):
            Guard("memory:").run("order", "o-1", handler)
        go_on.set()
        assert futures[0].result(PATIENCE) == expected[0]


# What a step is given.


@pytest.mark.parametrize("policy", [Policy(), Policy(mode="seen")], ids=["claim", "seen"])
def test_an_async_step_takes_plain_functions_too(policy: Policy) -> None:
    async def handler() -> int:
        # Its type is that of an async function: both work.
        count: Any = lambda: 5  # noqa: E731
        return int(await current().step("count", count))

    async def main() -> Any:
        return (await AsyncGuard("memory:", policy=policy).run("order", "o-1", handler)).value

    assert asyncio.run(main()) == 5


def test_a_coroutine_in_the_place_of_a_function_is_a_mistake_that_says_what_to_write() -> None:
    async def pay() -> None:
        raise AssertionError("it must not run")

    async def handler() -> None:
        await current().step("pay", pay())  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(UsageError, match=r"given a coroutine.* await current\(\).step\('pay', pay\)"):
            await AsyncGuard("memory:").run("order", "o-1", handler)

    asyncio.run(main())
    with pytest.raises(UsageError, match="needs a function to call, not int"):
        Guard("memory:").run("order", "o-1", lambda: current().step("pay", 5))  # type: ignore[arg-type]
