"""An interrupt on the way into a handler, or out of it: the delivery does not stay the current one of its thread.

A signal handler may raise between any two instructions: Ctrl-C, or an `Exception` such as Celery's soft time limit.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import sqlite3
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from onefold import TX, AsyncGuard, Guard, Policy, UsageError, current
from tests.faults.test_interrupts_anywhere import EVENTS_MAX, Strike

# The module: the package's own `current` is the function.
CURRENT = importlib.import_module("onefold.current")

EVENTS = {"enter": "return", "leave": "call"}


class SoftTimeLimit(Exception):
    """What a signal handler raises."""


@contextmanager
def interrupted(method: str, error: type[BaseException]) -> Iterator[None]:
    """Raise as soon as `enter` returns, or `leave` begins."""

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        # A step, too, is left; it was never entered.
        of_delivery = method == "enter" or frame.f_locals.get("inside") is not None
        here = (code.co_name, event) == (method, EVENTS[method]) and code.co_filename.endswith("onefold/current.py")
        if here and of_delivery:
            sys.setprofile(None)
            raise error

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.fixture
def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore what a finalizer raises: pytest's own way to hear of it would be struck, too."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _unraisable: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE paid (id TEXT)")
    return path


def paid(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [order for (order,) in connection.execute("SELECT id FROM paid ORDER BY id")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SoftTimeLimit])
@pytest.mark.parametrize("method", EVENTS)
def test_after_it_deliveries_of_the_thread_have_transactions_of_their_own(
    path: Path, method: str, error: type[BaseException]
) -> None:
    fails = ["m1"]
    with Guard(f"sqlite:///{path}") as guard:

        @guard.transactional("pay", key="order")
        def pay(order: str, *, tx: sqlite3.Connection = TX) -> None:
            tx.execute("INSERT INTO paid VALUES (?)", (order,))
            if order in fails:
                fails.remove(order)
                raise ValueError("once more")

        with pytest.raises(error), interrupted(method, error):
            pay("m0")
        with pytest.raises(ValueError, match="once more"):
            pay("m1")
        for order in ("m0", "m1"):
            pay(order)

    assert paid(path) == ["m0", "m1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SoftTimeLimit])
@pytest.mark.parametrize("method", EVENTS)
def test_after_it_no_handler_is_running_and_what_was_outside_is_outside_again(
    method: str, error: type[BaseException]
) -> None:
    with Guard("memory:", policy=Policy(lease=3_600)) as guard:

        def outer() -> str:
            with pytest.raises(error), interrupted(method, error):
                guard.run("inner", "a", lambda: None)
            return current().operation

        assert guard.run("outer", "a", outer).value == "outer"
        with pytest.raises(UsageError, match="none is running"):
            current()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SoftTimeLimit])
@pytest.mark.parametrize("after_crash", ["rerun", "hold"])
def test_the_value_of_a_handler_that_has_returned_is_recorded(after_crash: Any, error: type[BaseException]) -> None:
    """Its effect has happened: whoever comes again gets its value, and the interrupt is raised after all."""
    with Guard("memory:", policy=Policy(after_crash=after_crash)) as guard:
        with pytest.raises(error), interrupted("leave", error):
            guard.run("charge", "pay_1", lambda: "receipt")

        assert guard.run("charge", "pay_1", pytest.fail).value == "receipt"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SoftTimeLimit])
def test_a_nested_delivery_that_has_returned_keeps_its_record_with_its_rows(
    path: Path, error: type[BaseException]
) -> None:
    with Guard(f"sqlite:///{path}") as guard:

        @guard.transactional("pay", key="order")
        def pay(order: str, *, tx: sqlite3.Connection = TX) -> None:
            tx.execute("INSERT INTO paid VALUES (?)", (order,))

        @guard.transactional("orders", key="order")
        def outer(order: str, *, tx: sqlite3.Connection = TX) -> None:
            with suppress(error), interrupted("leave", error):
                pay(order)

        with suppress(UsageError):
            outer("m0")
        pay("m0")

    assert paid(path) == ["m0"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SoftTimeLimit])
def test_a_step_that_was_finished_before_it_is_not_repeated(error: type[BaseException]) -> None:
    steps: list[str] = []
    with Guard("memory:") as guard:

        def handler() -> None:
            current().step("mail", lambda: steps.append("mail"))

        with pytest.raises(error), interrupted("leave", error):
            guard.run("welcome", "a", handler)
        guard.run("welcome", "a", handler)

    assert steps == ["mail"]


class Anywhere(Strike):
    """Raises at the n-th beginning or end of a function of ours, or of C code that it has called."""

    events = ("call", "return", "c_return")


def left_current() -> list[str]:
    return [name for name in ("_current", "_step", "_batch") if getattr(CURRENT, name).get() is not None]


@pytest.mark.usefixtures("unheard")
def test_wherever_it_strikes_nothing_stays_current_nor_becomes_so_later() -> None:
    """What the traceback of the interrupt holds is left late: that must not make its delivery current again."""

    def handler(key: str) -> None:
        current().step("reserve", lambda: None)
        current().step("mail", lambda: guard.run("inner", key, lambda: current().step("mail", lambda: None)))

    with Guard("memory:", policy=Policy(lease=3_600)) as guard:
        for at in count(1):
            strike = Anywhere(at, SoftTimeLimit)
            with suppress(SoftTimeLimit), strike.armed():
                guard.run("welcome", f"m{at}", partial(handler, f"m{at}"))
            if not strike.where:
                break
            assert at < EVENTS_MAX
            assert left_current() == [], f"{strike.where} ({at})"

    assert at > 50


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.usefixtures("unheard")
def test_wherever_it_strikes_nothing_stays_current_in_its_task() -> None:
    async def mail() -> None: ...

    async def handler() -> None:
        await current().step("mail", mail)

    async def strikes() -> int:
        # No beat comes between, whose task would be struck.
        async with AsyncGuard("memory:", policy=Policy(lease=3_600)) as guard:
            for at in count(1):
                strike = Anywhere(at, SoftTimeLimit)
                with suppress(SoftTimeLimit), strike.armed():
                    await guard.run("welcome", f"m{at}", handler)
                if not strike.where:
                    return at
                assert at < EVENTS_MAX
                assert left_current() == [], f"{strike.where} ({at})"
        raise AssertionError("the count has no end")

    assert asyncio.run(strikes()) > 50
    # Coroutines that an interrupt has kept from being awaited.
    gc.collect()


@pytest.mark.usefixtures("unheard")
def test_a_step_in_a_thread_of_its_own_leaves_nothing_current_there() -> None:
    left: list[tuple[str, list[str]]] = []

    def step(inside: Any, at: int) -> None:
        strike = Anywhere(at, SoftTimeLimit)
        with suppress(SoftTimeLimit), strike.armed():
            inside.step(f"mail {at}", lambda: None)
        left.append((strike.where, left_current()))

    with Guard("memory:") as guard, ThreadPoolExecutor(1) as pool:

        def handler() -> None:
            for at in count(1):
                pool.submit(step, current(), at).result()
                if not left[-1][0]:
                    break

        guard.run("welcome", "a", handler)

    assert [one for one in left if one[1]] == []
    assert len(left) > 20
