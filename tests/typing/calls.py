"""What is run by hand, what a handler may know, and what a policy takes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, assert_type
from uuid import uuid4

from onefold import (
    AsyncGuard,
    Current,
    Done,
    Event,
    Failed,
    Guard,
    HandMadeTable,
    Outcome,
    Policy,
    Record,
    Rerun,
    current,
    subscribe,
)

guard = Guard("memory:", policy=Policy(keep="7d"), scope=lambda: "acme", on_event=[lambda event: None])
async_guard = AsyncGuard("memory:")


def pay() -> int:
    return 1


async def pay_async() -> list[int]:
    return [1]


def handle(message: str) -> float:
    return 1.0


assert_type(guard.run("charge", "pay_1", pay), Outcome[int])
assert_type(guard.run("charge", 7, lambda: "x"), Outcome[str])
assert_type(guard.run("charge", uuid4(), pay, scope="acme", payload=[1], bypass=True).value, int)
assert_type(guard.run_batch("charge", ["a"], key=str, handler=handle), list[Outcome[float] | Exception])
assert_type(guard.read("charge", "pay_1"), Record | None)
assert_type(guard.resolve("charge", "pay_1", Done(7), by="ada", reason="why"), Record)
assert_type(guard.forget("charge", "pay_1"), bool)
assert_type(current(), Current)
assert_type(current().key_for("bank"), str)
assert_type(current().lost, bool)
assert_type(current().step("pay", pay), int)
assert_type(current().step("pay", lambda: {"a": 1}), dict[str, int])
assert_type(Policy(keep=timedelta(days=1), lease=30, wait="5s").replace(keep="7d"), Policy)
assert_type(subscribe(lambda event: event.kind), Callable[[], None])

resolutions = (Failed(ValueError("refused")), Rerun())
guard.resolve("charge", "pay_1", resolutions[0], by="ada", reason="why")


def listener(event: Event) -> None:
    assert_type(event.digest, str)


async def in_loop() -> None:
    assert_type(await async_guard.run("charge", "pay_1", pay_async), Outcome[list[int]])
    assert_type(await async_guard.run_batch("c", ["a"], key=str, handler=each), list[Outcome[int] | Exception])
    assert_type(await async_guard.read("charge", "pay_1"), Record | None)
    assert_type(await current().step("pay", pay_async), list[int])
    async with AsyncGuard("memory:", on_event=listener) as own:
        assert_type(own, AsyncGuard)


async def each(message: str) -> int:
    return 1


with Guard("memory:", on_event=listener) as own:
    assert_type(own, Guard)


def wrong(anything: Any) -> None:
    guard.run("charge", None, pay)  # type: ignore[arg-type]
    guard.run("charge", 1.5, pay)  # type: ignore[arg-type]
    guard.run("charge", "pay_1", 3)  # type: ignore[arg-type]
    guard.run("charge", "pay_1", handle)  # type: ignore[arg-type]
    guard.run("charge", "pay_1", pay, policy={"keep": 1})  # type: ignore[arg-type]
    guard.run_batch("charge", [1], key=str, handler=handle)  # type: ignore[arg-type]
    guard.resolve("charge", "pay_1", Done(1))  # type: ignore[call-arg]
    guard.resolve("charge", "pay_1", pay, by="ada", reason="why")  # type: ignore[arg-type]
    current().step("pay", 3)  # type: ignore[arg-type]
    current().attempt = 2  # type: ignore[misc]
    Policy(after_crash="retry")  # type: ignore[arg-type]
    Policy(kep="7d")  # type: ignore[call-arg]
    Policy(final_errors=(3,))  # type: ignore[arg-type]
    HandMadeTable("sqlite:///shop.db", "processed_messages", operation="credit")  # type: ignore[call-arg]
    HandMadeTable(3, "processed_messages", key="message_id", operation="credit")  # type: ignore[arg-type]
    Guard()  # type: ignore[call-arg]
    Guard("memory:", on_event=pay)  # type: ignore[arg-type]
