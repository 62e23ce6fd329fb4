"""Wrong inputs: each is refused before anything runs, by an error that names the argument and the fix."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import AsyncGuard, Done, Guard, OnefoldError, Policy, UsageError
from onefold.keys import OPERATION_MAX, SCOPE_MAX
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import Handler, Heard

if TYPE_CHECKING:
    from nowhere import Client  # type: ignore[import-not-found]


class Opaque:
    """No codec knows it."""


def pay(payment_id: str, amount: int = 1, *, trace: object = None) -> str:
    return payment_id


async def pay_async(payment_id: str) -> str:
    return payment_id


def stream(payment_id: str) -> Iterator[str]:
    yield payment_id


async def stream_async(payment_id: str) -> AsyncIterator[str]:
    yield payment_id


def opaque(payment_id: str) -> Opaque:
    return Opaque()


def never_named(payment_id: str) -> NotThere:  # type: ignore[name-defined]  # noqa: F821
    return payment_id


def with_client(client: Client | None = None) -> dict[str, int]:
    return {"paid": 1}


def decorate(function: Any = pay, **options: Any) -> Any:
    return Guard("memory:").idempotent("charge", **({"key": "payment_id"} | options))(function)


def guard_of_a_connection() -> Guard:
    with closing(sqlite3.connect(":memory:")) as connection:
        return Guard(connection)  # type: ignore[arg-type]


def decorate_async(function: Any) -> Any:
    return AsyncGuard("memory:").idempotent("charge", key="payment_id")(function)


SAID_BEFORE_ANYTHING_RUNS: dict[str, tuple[Callable[[], Any], str]] = {
    "an unknown scheme": (lambda: Guard("memroy:"), r"store='memroy:'.*did you mean 'memory'"),
    "no scheme at all": (lambda: AsyncGuard("onefold.db"), r"store='onefold.db'.*Known: .*memory:"),
    "a store of another kind": (lambda: Guard(3), r"store=int is not a store: pass a URL .* a Store, or a function"),  # type: ignore[arg-type]
    "a memory store with a path": (lambda: Guard("memory:x").store, r"'memory:x': .* memory:\?limit="),
    "a limit that is not a number": (lambda: Guard("memory:?limit=x").store, r"limit='x' has to be a whole number"),
    "an async store for a sync guard": (lambda: Guard(AsyncMemoryStore()).store, "pass its sync form, or a URL"),  # type: ignore[arg-type]
    "a sync store for an async guard": (lambda: AsyncGuard(MemoryStore()).store, "pass its async form, or a URL"),  # type: ignore[arg-type]
    "a negative duration": (lambda: Policy(lease=-1), "lease=-1 is negative: .* zero or more"),
    "a negative timedelta": (lambda: Policy(keep=timedelta(-1)), r"keep=.* is negative"),
    "a negative duration in words": (lambda: Policy(wait="-5s"), r"wait='-5s' is negative"),
    "a duration of nothing": (lambda: Policy(keep=0), "keep=0 has to be more than zero"),
    "a duration without a unit": (lambda: Policy(keep="24"), r"keep='24' is not a duration: .*\"30s\""),
    "a duration that is a bool": (lambda: Policy(keep=True), "keep=True is not a duration"),
    "a duration that is not a number": (lambda: Policy(keep=float("nan")), "keep=nan is not a duration"),
    "a lease without an end": (lambda: Policy(lease="forever"), "lease=.*give it an end"),
    "an unknown way": (lambda: Policy(after_crash="rernu"), "after_crash='rernu' .*did you mean 'rerun'"),  # type: ignore[arg-type]
    "no attempts": (lambda: Policy(max_attempts=0), "max_attempts=0 has to be a whole number, 1 or more"),
    "one exception": (lambda: Policy(final_errors=ValueError), r"write final_errors=\(ValueError,\)"),  # type: ignore[arg-type]
    "no exception": (lambda: Policy(ambiguous_errors=(3,)), "ambiguous_errors= holds 3"),  # type: ignore[arg-type]
    "the name of an exception without its module": (
        lambda: Policy(ambiguous_errors=("TimeoutError",)),
        r"ambiguous_errors= holds 'TimeoutError'.*write 'module.Class', such as 'builtins.TimeoutError'",
    ),
    "the name of an exception with a colon": (
        lambda: Policy(ambiguous_errors=("shop:Late",)),
        "ambiguous_errors= holds 'shop:Late'",
    ),
    "the name of no exception": (
        lambda: Policy(ambiguous_errors=("builtins.TimoutError",)),
        "builtins has no such exception: did you mean 'TimeoutError'",
    ),
    "the name of an exception that has another": (
        lambda: Policy(ambiguous_errors=("sqlite3.DatabaseErrors",)),
        "sqlite3 has no such exception: did you mean 'DatabaseError'",
    ),
    "an exception by another module's name": (
        lambda: Policy(ambiguous_errors=("asyncio.TimeoutError",)),
        "is defined as builtins.TimeoutError: write 'builtins.TimeoutError'",
    ),
    "a probe without an argument": (
        lambda: Policy(after_crash=pay_nothing),  # type: ignore[arg-type]
        "after_crash=pay_nothing: a probe is called with one argument",
    ),
    "a connection as a store": (guard_of_a_connection, r"is a connection, .* guard\.within\("),
    "the key of a batch by name": (
        lambda: Guard("memory:").run_batch("charge", [1], key="id", handler=pay),  # type: ignore[arg-type]
        "key='id': a batch needs a function of the message",
    ),
    "the payload of a batch by name": (
        lambda: Guard("memory:").run_batch("charge", [1], key=str, handler=pay, payload="amount"),  # type: ignore[arg-type]
        "payload='amount': a batch needs a function of the message",
    ),
    "the key of a polled batch by name": (
        lambda: Guard("memory:").within(object()).fresh("charge", [1], key="id"),  # type: ignore[arg-type]
        "key='id': a batch needs a function of the message",
    ),
    "a name where a class is needed": (lambda: Policy(final_errors=("x.Declined",)), "final_errors="),  # type: ignore[arg-type]
    "an interrupt as an answer": (lambda: Policy(final_errors=(KeyboardInterrupt,)), "final_errors="),  # type: ignore[arg-type]
    "a limit without a rerun": (lambda: Policy(after_crash="hold", rerun_within="1h"), "rerun_within="),
    "a crash in seen mode": (lambda: Policy(mode="seen", after_crash="hold"), "leave after_crash= out"),
    "a policy of another kind": (lambda: decorate(policy={"keep": 1}), "policy=dict has to be a Policy"),
    "a policy of another kind, run by hand": (
        lambda: Guard("memory:").run("charge", 1, pay_nothing, policy={"keep": 1}),  # type: ignore[arg-type]
        "policy=dict has to be a Policy",
    ),
    "a scope that names no argument": (
        lambda: decorate(scope="acme"),
        r"scope='acme' is not an argument of pay\(.*One scope for all calls belongs to the guard",
    ),
    "no operation": (lambda: Guard("memory:").run(" ", 1, pay_nothing), "operation=' ' has to be a name"),
    "an operation too long": (
        lambda: Guard("memory:").run("x" * (OPERATION_MAX + 1), 1, pay_nothing),
        "operation=.*has 129 bytes of UTF-8, and the limit is 128",
    ),
    "a scope too long": (lambda: Guard("memory:", scope="x" * (SCOPE_MAX + 1)), "scope=.* the limit is 255"),
    "an empty scope": (lambda: Guard("memory:", scope=""), "scope='' has to be the name of a tenant"),
    "a key of no argument": (lambda: decorate(key="paymnt_id"), r"key='paymnt_id' .*pay\(.*did you mean 'payment_id'"),
    "a key of no names": (lambda: decorate(key=()), r"key= names no argument of pay\(\)"),
    "a payload of no argument": (
        lambda: decorate(fingerprint=("amout",)),
        r"fingerprint='amout' .*pay\(.*did you mean 'amount'",
    ),
    "a key of no argument of a partial": (
        lambda: decorate(functools.partial(pay, trace=1), key="paymnt_id"),
        "key='paymnt_id' .*did you mean 'payment_id'",
    ),
    "async under a guard": (lambda: decorate(pay_async), r"pay_async\(\) is async.* use an AsyncGuard"),
    "blocking under an async guard": (lambda: decorate_async(pay), r"pay\(\) is not async.* use a Guard"),
    "a generator": (lambda: decorate(stream), r"stream\(\) is a generator.* return a value instead"),
    "an async generator": (lambda: decorate_async(stream_async), r"stream_async\(\) is a generator"),
    "a static method below": (lambda: decorate(staticmethod(pay)), "put @staticmethod above .*: pay"),
    "a class method below": (lambda: decorate(classmethod(opaque)), "put @classmethod above .*: opaque"),  # type: ignore[arg-type]
    "no function": (lambda: decorate(3), "3 is not a function"),
    "an annotation that cannot be stored": (
        lambda: decorate(opaque),
        r"the result of opaque\(\) cannot be remembered: .*Opaque.*Policy\(keep_result=False\)",
    ),
    "a type that cannot be stored": (
        lambda: Guard("memory:").run("charge", 1, pay_nothing, returns=Opaque),
        r"pay_nothing\(\) cannot be remembered: .*Opaque",
    ),
    "an annotation that is never defined": (
        lambda: decorate(never_named)("pay_1"),
        r"the return annotation of never_named\(\) .*'NotThere'.* Pass the type as returns=",
    ),
    "the same, run by hand": (
        lambda: Guard("memory:").run("charge", 1, functools.wraps(never_named)(lambda: "")),
        r"never_named\(\) .*'NotThere'.* Pass the type as returns=",
    ),
    "a payload that has no form": (
        lambda: decorate()("pay_1", trace=Opaque()),
        r"charge: the argument 'trace' of pay\(\) cannot be fingerprinted .*Opaque.*fingerprint=None",
    ),
    "a payload that has no form, of a partial": (
        lambda: decorate(functools.partial(pay, trace=Opaque()))("pay_1"),
        "the argument 'trace' .*cannot be fingerprinted",
    ),
    "a payload that has no form, run by hand": (
        lambda: Guard("memory:").run("charge", 1, pay_nothing, payload=Opaque()),
        "payload=.*Opaque",
    ),
    "nothing to resolve": (
        lambda: Guard("memory:").resolve("charge", 1, Done(1), by="me", reason="why"),
        "there is no record of it, so there is nothing to resolve",
    ),
    "a guard that is closed": (lambda: _closed().run("charge", 1, pay_nothing), "this guard is closed"),
}


def pay_nothing() -> str:
    pytest.fail("it ran")


def _closed() -> Guard:
    with Guard("memory:") as guard:
        return guard


@pytest.mark.parametrize("case", SAID_BEFORE_ANYTHING_RUNS)
def test_a_wrong_input_is_refused_before_anything_runs_naming_the_argument_and_the_fix(case: str) -> None:
    wrong, said = SAID_BEFORE_ANYTHING_RUNS[case]

    with pytest.raises(UsageError, match=said):
        wrong()


def test_an_error_about_a_url_does_not_show_its_password() -> None:
    with pytest.raises(UsageError) as refusal:
        Guard("nowhere://user:p@ssw0rd@host/0")

    assert "ssw0rd" not in str(refusal.value)
    assert "nowhere://user:***@host/0" in str(refusal.value)


NOTHING_RAN: dict[str, Callable[[], Any]] = {
    "a coroutine": lambda: pay_async("pay_1"),
    "a generator": lambda: stream("pay_1"),
    "an async generator": lambda: stream_async("pay_1"),
}


@pytest.mark.parametrize("case", NOTHING_RAN)
def test_a_lambda_that_hides_what_cannot_be_guarded_ran_nothing_and_is_released(case: str) -> None:
    heard = Heard()
    guard = Guard("memory:", policy=Policy(after_crash="hold"), on_event=heard)

    with pytest.raises(UsageError, match=r"nothing.* ran"):
        guard.run("charge", "pay_1", NOTHING_RAN[case])

    assert guard.read("charge", "pay_1") is None
    assert heard.kinds == ["started", "released"]


@pytest.mark.parametrize("case", ["a generator", "an async generator"])
def test_a_lambda_that_hides_a_stream_is_released_when_async_too(case: str) -> None:
    guard = AsyncGuard("memory:")

    async def story() -> object:
        with pytest.raises(UsageError, match=r"nothing.* ran"):
            await guard.run("charge", "pay_1", NOTHING_RAN[case])
        return await guard.read("charge", "pay_1")

    assert asyncio.run(story()) is None


def test_only_the_return_annotation_has_to_be_readable() -> None:
    outcome = Guard("memory:").run("charge", 1, with_client)

    assert outcome.value == {"paid": 1}


def test_a_call_with_wrong_arguments_raises_what_the_function_itself_would() -> None:
    charge = decorate()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        (("pay_1", 1, 2), {}),
        (("pay_1",), {"payment_id": "pay_1"}),
        (("pay_1",), {"amout": 1}),
    ]

    for args, kwargs in calls:
        with pytest.raises(TypeError, match=r"argument"):
            charge(*args, **kwargs)


def test_without_a_kept_result_any_annotation_will_do() -> None:
    charge = decorate(opaque, policy=Policy(keep_result=False))

    assert isinstance(charge("pay_1"), Opaque)


def test_errors_of_use_are_value_errors_too() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(UsageError, OnefoldError)


def test_a_function_that_returns_a_store_is_asked_on_first_use_and_its_answer_checked() -> None:
    asked = Handler(3)
    guard = Guard(asked)

    assert asked.starts == 0
    with pytest.raises(UsageError, match="store=int is not a store"):
        guard.run("charge", 1, pay_nothing)
