"""`transactional` on SQLite: what a handler gets as `tx` and may do with it, and handlers inside handlers."""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import (
    TX,
    Guard,
    InsideItself,
    KeyReused,
    Policy,
    StoreUnavailable,
    UsageError,
)
from onefold.stores.sqlite import IDLE_MAX
from tests.support import Handler
from tests.wallet import Awaiting, Blocking, Worker, add, balance, records


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}?busy_timeout=0.2s"


@pytest.fixture(params=[Blocking, Awaiting])
def worker(request: pytest.FixtureRequest, url: str) -> Iterator[Worker]:
    worker = request.param(url)
    yield worker
    worker.close()


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    with Guard(url) as guard:
        yield guard


def test_the_same_key_with_another_payload_is_refused_and_changes_nothing(guard: Guard, path: Path) -> None:
    @guard.transactional("credit", key="message")
    def credit(message: str, amount: int, *, tx: sqlite3.Connection = TX) -> None:
        add(tx, amount)

    credit("m1", 10)
    with pytest.raises(KeyReused):
        credit("m1", 11)

    assert balance(path) == 10


def test_a_handler_that_delivers_its_own_key_is_told(guard: Guard) -> None:
    @guard.transactional("credit", key="message")
    def credit(message: str, *, tx: sqlite3.Connection = TX) -> None:
        credit(message)

    with pytest.raises(InsideItself):
        credit("m1")


def nested(guard: Guard, *, then: BaseException | None = None) -> Callable[[str], None]:
    """A transfer whose two halves are deliveries themselves."""

    @guard.transactional("half", key="message")
    def half(message: str, amount: int, *, tx: sqlite3.Connection = TX) -> None:
        add(tx, amount)

    @guard.transactional("whole", key="message")
    def whole(message: str, *, tx: sqlite3.Connection = TX) -> None:
        half(f"{message}/1", 3)
        half(f"{message}/2", 4)
        half(f"{message}/2", 4)
        if then is not None:
            raise then

    return whole


def test_a_transactional_function_inside_another_joins_its_transaction(guard: Guard, path: Path) -> None:
    nested(guard)("m1")
    nested(guard)("m1")

    assert (balance(path), records(path)) == (7, ["m1", "m1/1", "m1/2"])


def test_when_the_outer_one_rolls_back_the_inner_records_and_their_work_go_too(guard: Guard, path: Path) -> None:
    with pytest.raises(ValueError, match="after all"):
        nested(guard, then=ValueError("after all"))("m1")

    assert (balance(path), records(path)) == (0, [])


def test_another_guard_on_the_same_file_inside_a_handler_is_refused_in_time(guard: Guard, url: str, path: Path) -> None:
    handler = Handler()
    with Guard(url) as other:

        @guard.transactional("credit", key="message")
        def credit(message: str, *, tx: sqlite3.Connection = TX) -> None:
            add(tx)
            other.run("receipt", message, handler)

        with pytest.raises(StoreUnavailable):
            credit("m1")

    assert (handler.starts, balance(path), records(path)) == (0, 0, [])


def tx_first(tx: Any, message: str, amount: int) -> Any:
    return tx, message, amount


def tx_between(message: str, tx: Any, amount: int = 5) -> Any:
    return tx, message, amount


def tx_last(message: str, amount: int, tx: Any = TX) -> Any:
    return tx, message, amount


def tx_by_keyword(message: str, amount: int, *, tx: Any) -> Any:
    return tx, message, amount


class Account:
    def tx_of_a_method(self, message: str, amount: int, *, tx: Any) -> Any:
        return tx, message, amount


@pytest.mark.parametrize("function", [tx_first, tx_between, tx_last, tx_by_keyword, Account.tx_of_a_method])
def test_tx_is_passed_wherever_it_stands_and_callers_do_not_see_it(guard: Guard, function: Callable[..., Any]) -> None:
    class Owner:
        credit = guard.transactional(
            "credit", key="message", fingerprint="amount", policy=Policy(keep_result=False), returns=Any
        )(function)

    bound: Any = Owner().credit if "self" in inspect.signature(function).parameters else Owner.__dict__["credit"]
    seen = [bound("a", 5), bound("b", amount=5), bound(message="c", amount=5)]

    assert [type(tx) for tx, *_ in seen] == [sqlite3.Connection] * 3
    assert [rest for _, *rest in seen] == [["a", 5], ["b", 5], ["c", 5]]
    assert list(inspect.signature(bound).parameters) == ["message", "amount"]
    with pytest.raises(TypeError):
        bound("d", 5, tx=None)


def test_a_function_without_tx_is_refused_when_decorating(guard: Guard) -> None:
    with pytest.raises(UsageError, match=r"credit\(message\) gets its transaction as an argument: add `\*, tx`"):

        @guard.transactional("credit", key="message")
        def credit(message):  # type: ignore[no-untyped-def]
            """No `tx`."""


def test_a_store_without_transactions_is_refused_before_anything_runs() -> None:
    handler = Handler()
    worker = Blocking("memory:")

    with pytest.raises(UsageError, match="has no transactions of its own"):
        worker.transactional("m1", handler)
    worker.close()

    assert handler.starts == 0


WAYS_TO_END_IT: dict[str, Callable[[sqlite3.Connection], Any]] = {
    "commit": lambda tx: tx.commit(),
    "rollback": lambda tx: tx.rollback(),
    "with": lambda tx: tx.__exit__(None, None, None),
    "script": lambda tx: tx.executescript("SELECT 1"),
}


@pytest.mark.parametrize("value", [None, "receipt"])
@pytest.mark.parametrize("way", WAYS_TO_END_IT)
def test_a_handler_that_ends_the_transaction_by_itself_is_told(worker: Worker, way: str, value: Any) -> None:
    def handler(tx: sqlite3.Connection) -> Any:
        add(tx)
        WAYS_TO_END_IT[way](tx)
        return value

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        worker.transactional("m1", handler)


def test_a_handler_that_ends_the_transaction_and_raises_is_told_besides_its_own_error(worker: Worker) -> None:
    def handler(tx: sqlite3.Connection) -> None:
        tx.commit()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        worker.transactional("m1", handler)

    assert "ended the transaction by itself" in raised.value.__notes__[0]


def test_a_transaction_finds_its_argument_wherever_it_stands(guard: Guard, path: Path) -> None:
    @guard.transactional("first", key="message")
    def first(tx: sqlite3.Connection, message: str, *, amount: int) -> None:
        add(tx, amount)

    @guard.transactional("between", key="message")
    def between(message: str, tx: sqlite3.Connection = TX, *amounts: int) -> None:
        add(tx, sum(amounts))

    @guard.transactional("strict", key="message")
    def strict(message: str, /, tx: sqlite3.Connection = TX, amount: int = 0) -> None:
        add(tx, amount)

    decorated: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (first, ("m1",), {"amount": 1}),
        (between, ("m1", 10, 20), {}),
        (strict, ("m1", 100), {}),
        (strict, ("m2",), {"amount": 200}),
    ]
    for function, args, kwargs in decorated:
        function(*args, **kwargs)

    assert balance(path) == 331


def test_the_same_address_within_the_transaction_of_its_own_handler_is_told(guard: Guard, path: Path) -> None:
    @guard.transactional("credit", key="message")
    def credit(message: str, *, tx: sqlite3.Connection = TX) -> None:
        guard.within(tx).run("credit", message, lambda: add(tx, 1))

    with pytest.raises(InsideItself):
        credit("m1")

    assert balance(path) == 0


def test_many_transactions_leave_few_connections(guard: Guard) -> None:
    with contextlib.ExitStack() as open_at_once:
        for _ in range(IDLE_MAX + 3):
            open_at_once.enter_context(guard.store.transaction())

    assert len(guard.store._idle) == IDLE_MAX
