"""The fields of a policy are keywords of every call and decorator; probes and people answer with classes."""

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from typing import Unpack, assert_type

from onefold import (
    FOREVER,
    AsyncGuard,
    Current,
    Done,
    Failed,
    Guard,
    NotDone,
    Outcome,
    OutcomeUnknown,
    Policy,
    PolicyFields,
    Record,
    Rerun,
    Unknown,
)
from onefold.guard import Within

guard = Guard("memory:", keep="7d", after_crash="hold", max_attempts=3)
async_guard = AsyncGuard("memory:", keep=timedelta(days=7), final_errors=(ValueError,))
connection = sqlite3.connect(":memory:")


def pay() -> int:
    return 1


def handle(message: str) -> float:
    return 1.0


def asks_the_bank(current: Current) -> Done | NotDone | Unknown:
    return Done(current.key)


async def asks_in_the_loop(current: Current) -> NotDone:
    return NotDone()


def always(current: Current) -> Done:
    return Done()


def says_yes(current: Current) -> bool:
    return True


def says_rerun(current: Current) -> Rerun:
    return Rerun()


def takes_two(current: Current, bank: str) -> Done:
    return Done()


@guard.idempotent("charge", key="payment", keep=FOREVER, after_crash=asks_the_bank, ambiguous_errors=[OutcomeUnknown])
def charge(payment: str) -> int:
    return 1


@guard.transactional("credit", key="payment", keep="forever", max_result_bytes=100)
def credit(payment: str) -> str:
    return ""


assert_type(charge("pay_1"), int)
assert_type(credit.outcome("pay_1").value, str)
assert_type(credit.outcome("pay_1").value_or(None), str | None)
assert_type(credit.outcome("pay_1").value_or(0), str | int)
assert_type(guard.run("charge", "pay_1", pay, keep="7d", payload={"amount": 1}, scope="acme"), Outcome[int])
assert_type(guard.run("charge", "pay_1", pay, policy=Policy(keep="7d"), wait=1).value, int)
assert_type(
    guard.run_batch("c", ["a"], key=str, handler=handle, payload=len, scope=str, keep="1h"),
    list[Outcome[float] | Exception],
)
assert_type(guard.within(connection, keep=FOREVER), Within)
assert_type(guard.within(connection).run("charge", "pay_1", pay, payload=1, keep="1h"), Outcome[int])
assert_type(guard.policy.replace(lease=30, store_down="run", mode="seen"), Policy)
assert_type(guard.resolve("charge", "pay_1", Done(7), by="ada", reason="why"), Record)
assert_type(guard.resolve("charge", "pay_1", Failed("declined"), by="ada", reason="why"), Record)
assert_type(guard.resolve("charge", "pay_1", Failed(ValueError()), by="ada", reason="why"), Record)
assert_type(guard.resolve("charge", "pay_1", Rerun(), by="ada", reason="why"), Record)
assert_type(Policy(after_crash=asks_the_bank, rerun_within="24h", keep_result=False), Policy)
assert_type(Policy(after_crash=asks_in_the_loop, cancel_when_lost=True), Policy)
assert_type(Policy(after_crash=always, ambiguous_errors=("httpx.TransportError", TimeoutError)), Policy)
assert_type(Policy(after_crash=lambda current: Unknown()), Policy)


def run_for_a_week(operation: str, key: str, call: Callable[[], int], **fields: Unpack[PolicyFields]) -> Outcome[int]:
    """A wrapper of a user's own, with every field of a policy as its keyword."""
    fields.setdefault("keep", "7d")
    return guard.run(operation, key, call, **fields)


assert_type(run_for_a_week("charge", "pay_1", pay, after_crash="hold"), Outcome[int])


def wrong() -> None:
    Guard("memory:", kep="7d")  # type: ignore[call-arg]
    Guard("memory:", keep=[7])  # type: ignore[arg-type]
    Guard("memory:", scope=3)  # type: ignore[arg-type]
    guard.idempotent("charge", key="id", after_crash="retry")  # type: ignore[arg-type]
    guard.idempotent("charge", key="id", payload=pay)  # type: ignore[call-arg]
    guard.idempotent("charge", key="id", scope=3)  # type: ignore[arg-type]
    guard.idempotent("charge", key=3)  # type: ignore[arg-type]
    guard.idempotent("charge", key="id", fingerprint=3)  # type: ignore[arg-type]
    guard.idempotent("charge", key="id", attempts_max=3)  # type: ignore[call-arg]
    guard.transactional("credit", key="id", final_errors=ValueError)  # type: ignore[arg-type]
    guard.transactional("credit", key="id", final_errors=["ValueError"])  # type: ignore[list-item]
    guard.transactional("credit", key="id", remember=(ValueError,))  # type: ignore[call-arg]
    guard.run("charge", "pay_1", pay, max_attempts="3")  # type: ignore[arg-type]
    guard.run("charge", "pay_1", pay, fingerprint="id")  # type: ignore[call-arg]
    guard.run("charge", "pay_1", pay, scope=str)  # type: ignore[arg-type]
    guard.run("charge", "pay_1", pay, policy="7d")  # type: ignore[arg-type]
    guard.run_batch("c", ["a"], key=str, handler=handle, mode="sen")  # type: ignore[arg-type]
    guard.run_batch("c", ["a"], key=str, handler=handle, payload="a")  # type: ignore[arg-type]
    guard.run_batch("c", ["a"], key="id", handler=handle)  # type: ignore[arg-type]
    guard.within(connection, keeps="7d")  # type: ignore[call-arg]
    guard.within(connection).run("charge", "pay_1", pay, keep_result="no")  # type: ignore[arg-type]
    guard.within(connection).run("charge", "pay_1", pay, fingerprint=1)  # type: ignore[call-arg]
    guard.policy.replace(store_down="skip")  # type: ignore[arg-type]
    run_for_a_week("charge", "pay_1", pay, kep="7d")  # type: ignore[call-arg]
    run_for_a_week("charge", "pay_1", pay, lease=None)  # type: ignore[arg-type]
    guard.resolve("charge", "pay_1", NotDone(), by="ada", reason="why")  # type: ignore[arg-type]
    guard.resolve("charge", "pay_1", Done, by="ada", reason="why")  # type: ignore[arg-type]
    guard.resolve("charge", "pay_1", "done", by="ada", reason="why")  # type: ignore[arg-type]
    Failed()  # type: ignore[call-arg]
    Failed(3)  # type: ignore[arg-type]
    Policy(after_crash=says_yes)  # type: ignore[arg-type]
    Policy(after_crash=says_rerun)  # type: ignore[arg-type]
    Policy(after_crash=takes_two)  # type: ignore[arg-type]
    Policy(after_crash=Done())  # type: ignore[arg-type]


def an_outcome(outcome: Outcome[int], text: Callable[[str], None], number: Callable[[int], None]) -> None:
    outcome.value = 3  # type: ignore[misc]
    outcome.remembered  # type: ignore[attr-defined]  # noqa: B018
    text(outcome.value)  # type: ignore[arg-type]
    text(outcome.value_or(""))  # type: ignore[arg-type]
    number(outcome.value_or(None))  # type: ignore[arg-type]
