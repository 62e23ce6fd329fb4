"""What a newcomer gets wrong is answered with what to write instead, before anything runs."""

from __future__ import annotations

import asyncio
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Policy, UsageError, current
from onefold.stores.memory import AsyncMemoryStore, MemoryStore


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


async def pay() -> int:
    return 4200


def test_a_wrong_argument_is_told_with_the_function_as_python_does(guard: Guard) -> None:
    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int = 1) -> int:
        return amount

    wrong: Any = charge

    with pytest.raises(TypeError, match=r"charge\(\) got an unexpected keyword argument 'amout'$"):
        wrong("pay_1", amout=1)
    with pytest.raises(TypeError, match=r"charge\(\) missing a required argument: 'payment_id'$"):
        wrong()
    with pytest.raises(TypeError, match=r"charge\(\) too many positional arguments$"):
        wrong("pay_1", 2, 3)


@pytest.mark.parametrize("given", [pay, lambda: 4200, lambda: None, lambda: "paid"])
def test_the_result_of_a_call_is_not_taken_for_a_function(guard: Guard, given: Any) -> None:
    kind = type(result := given()).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        with pytest.raises(UsageError, match="Pass the function, not its result") as refused:
            guard.run("charge", "pay_1", result)

    article = "an" if kind == "int" else "a"
    assert f"the call is {article} {kind}, which cannot be called" in str(refused.value)
    assert guard.read("charge", "pay_1") is None


def test_nor_by_an_async_guard_in_a_batch_or_within_a_transaction(guard: Guard) -> None:
    async def run() -> None:
        async with AsyncGuard("memory:") as awaiting:
            with pytest.raises(UsageError, match="Pass the function, not its result"):
                await awaiting.run("charge", "pay_1", pay())  # type: ignore[arg-type]

    asyncio.run(run())
    with pytest.raises(UsageError, match="Pass the function, not its result"):
        guard.run_batch("charge", [1], key=str, handler=3)  # type: ignore[arg-type]
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("BEGIN")
    with pytest.raises(UsageError, match="Pass the function, not its result"):
        guard.within(connection).run("charge", "pay_1", 3)  # type: ignore[arg-type]
    connection.close()


def test_a_guard_that_is_closed_or_entered_as_the_other_kind_says_how() -> None:
    blocking: Any = Guard("memory:")
    awaiting: Any = AsyncGuard("memory:")

    async def enter() -> None:
        async with blocking:
            pytest.fail("a Guard is not async")

    with pytest.raises(UsageError, match=r"await guard\.aclose\(\)"):
        awaiting.close()
    with pytest.raises(UsageError, match=r"async with AsyncGuard\(\.\.\.\)"), awaiting:
        pytest.fail("an AsyncGuard is async")
    with pytest.raises(UsageError, match=r"with Guard\(\.\.\.\)"):
        asyncio.run(enter())
    with pytest.raises(UsageError, match=r"guard\.close\(\)"):
        blocking.aclose()


def test_a_key_for_nobody_is_refused(guard: Guard) -> None:
    with pytest.raises(UsageError, match="key_for"):
        guard.run("charge", "pay_1", lambda: current().key_for(""))

    guard.run("charge", "pay_1", lambda: None)
    record = guard.read("charge", "pay_1")
    assert record is not None
    with pytest.raises(UsageError, match="name the system downstream"):
        record.key_for("")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("memory:", "memory"),
        ("redis://localhost", "redis"),
        ("valkey://localhost", "valkey"),
        ("dynamodb://records", "dynamodb"),
        (MemoryStore(), "MemoryStore"),
    ],
    ids=str,
)
def test_transactional_on_a_store_without_transactions_is_refused_when_decorating(source: Any, shown: str) -> None:
    guard = Guard(source)

    with pytest.raises(UsageError, match=rf"credit\(\) is transactional, and {shown} has no transactions"):

        @guard.transactional("credit", key="payment_id")
        def credit(payment_id: str, *, tx: Any) -> None: ...


def test_transactional_on_an_async_store_without_transactions_is_refused_when_decorating() -> None:
    for source in ("memory:", AsyncMemoryStore()):
        guard = AsyncGuard(source)

        with pytest.raises(UsageError, match="has no transactions"):

            @guard.transactional("credit", key="payment_id")
            async def credit(payment_id: str, *, tx: Any) -> None: ...


@pytest.mark.parametrize("value", [None, 1])
@pytest.mark.parametrize("policy", [Policy(), Policy(final_errors=(ValueError,))])
def test_a_handler_that_commits_is_told_with_its_operation_and_key(tmp_path: Path, value: Any, policy: Policy) -> None:
    with Guard(f"sqlite:///{tmp_path}/app.db", policy=policy) as guard:

        @guard.transactional("credit", key="payment_id")
        def credit(payment_id: str, *, tx: sqlite3.Connection) -> Any:
            tx.execute("COMMIT")
            return value

        digest = guard.address("credit", "pay_1").digest
        with pytest.raises(UsageError) as told:
            credit("pay_1")

    assert str(told.value).startswith(f"credit [key {digest}]: the handler ended the transaction by itself")
    assert (told.value.operation, told.value.key) == ("credit", "pay_1")


def test_so_is_one_that_commits_its_callers_transaction(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    with Guard(url) as guard:
        guard.check()
        connection = sqlite3.connect(tmp_path / "app.db", isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")

        with pytest.raises(UsageError, match=r"^credit \[key [0-9a-f]{12}\]: the handler ended the transaction"):
            guard.within(connection).run("credit", "pay_1", connection.commit)

        connection.close()


@pytest.mark.parametrize("guard", [Guard("memory:"), AsyncGuard("memory:")])
@pytest.mark.parametrize("way", ["idempotent", "transactional"])
def test_a_decorator_without_parentheses_is_told_what_to_write(guard: Any, way: str) -> None:
    with pytest.raises(UsageError, match=rf"Write for example @guard\.{way}\('pay', key=\.\.\.\)"):
        getattr(guard, way)(pay)


def test_an_outcome_that_is_logged_shows_no_key() -> None:
    guard = Guard("memory:", keep_result=False)
    outcomes = [guard.run("charge", "pay_7f3a", lambda: 1) for _ in range(2)]

    assert "pay_7f3a" not in f"{outcomes}"
    assert guard.address("charge", "pay_7f3a").digest in f"{outcomes[1]}"
