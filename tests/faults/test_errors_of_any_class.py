"""A handler's error surfaces unchanged, and counts as what it is, even if its class cannot be changed or described."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, Policy, RememberedFailure, Unknown, current
from onefold.codecs import MsgspecCodec
from onefold.stores.memory import MemoryStore
from onefold.testing import crash_at


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int = 1


@dataclasses.dataclass(frozen=True)
class FrozenTimeout(TimeoutError):
    code: int = 504


class Unchangeable(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(name)


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("it has nothing to say")

    __repr__ = __str__

    def add_note(self, note: str) -> None:
        raise RuntimeError(note)


KINDS = (Frozen, FrozenTimeout, Unchangeable, Speechless, StopIteration)


def fail(kind: type[Exception]) -> Any:
    raise kind


async def fail_async(kind: type[Exception]) -> Any:
    await asyncio.sleep(0)
    raise kind


def by_run(guard: Guard, call: Callable[[], Any]) -> None:
    guard.run("pay", "k", call)


def by_step(guard: Guard, call: Callable[[], Any]) -> None:
    guard.run("pay", "k", lambda: current().step("charge", call))


def by_transaction(guard: Guard, call: Callable[[], Any]) -> None:
    @guard.transactional("pay", key="key")
    def pay(key: str, *, tx: Any) -> None:
        call()

    pay("k")  # type: ignore[call-arg]


def by_nested(guard: Guard, call: Callable[[], Any]) -> None:
    @guard.transactional("order", key="key")
    def order(key: str, *, tx: Any) -> None:
        by_transaction(guard, call)

    order("k")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [by_run, by_step, by_transaction, by_nested])
def test_it_surfaces_unchanged(way: Callable[..., None], kind: type[Exception], tmp_path: Path) -> None:
    with Guard(f"sqlite:///{tmp_path}/records.db") as guard:
        with pytest.raises(kind):
            way(guard, lambda: fail(kind))
        calls: list[int] = []
        way(guard, lambda: calls.append(1))
        assert calls == [1]


@pytest.mark.parametrize("kind", [Frozen, Speechless])
@pytest.mark.parametrize("way", [by_transaction, by_nested])
def test_it_surfaces_unchanged_on_each_database(way: Callable[..., None], kind: type[Exception], source: Any) -> None:
    with Guard(source) as guard, pytest.raises(kind):
        way(guard, lambda: fail(kind))


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg", "mysql"])
def test_it_surfaces_unchanged_on_each_async_driver(scheme: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue("mysql_url" if scheme == "mysql" else "postgres_url")

    async def deliver() -> None:
        async with AsyncGuard(scheme + url[url.index("://") :]) as guard:

            @guard.transactional("pay", key="key")
            async def pay(key: str, *, tx: Any) -> None:
                await fail_async(Frozen)

            with pytest.raises(Frozen):
                await pay("k")  # type: ignore[call-arg]

    asyncio.run(deliver())


def test_it_surfaces_unchanged_from_a_guard_that_is_to_crash(tmp_path: Path) -> None:
    with Guard(f"sqlite:///{tmp_path}/records.db") as guard, crash_at("after_finish", guard):
        with pytest.raises(Frozen):
            by_transaction(guard, lambda: fail(Frozen))
        by_transaction(guard, lambda: None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not StopIteration])
def test_it_surfaces_unchanged_where_it_is_awaited(kind: type[Exception], tmp_path: Path) -> None:
    async def deliver() -> None:
        async with AsyncGuard(f"sqlite:///{tmp_path}/records.db") as guard:

            @guard.transactional("pay", key="key")
            async def pay(key: str, *, tx: Any) -> None:
                await fail_async(kind)

            @guard.transactional("order", key="key")
            async def order(key: str, *, tx: Any) -> None:
                await pay(key)  # type: ignore[call-arg]

            async def stepped() -> None:
                await current().step("charge", lambda: fail_async(kind))

            for call in (lambda: pay("k"), lambda: order("k"), lambda: guard.run("step", "k", stepped)):  # type: ignore[call-arg]
                with pytest.raises(kind):
                    await call()

    asyncio.run(deliver())


def test_a_timeout_in_a_step_is_unknown_under_hold() -> None:
    charges: list[int] = []

    def charge() -> None:
        charges.append(1)
        raise FrozenTimeout

    with Guard("memory:", policy=Policy(after_crash="hold")) as guard:
        with pytest.raises(FrozenTimeout):
            by_step(guard, charge)
        with pytest.raises(Held):
            by_step(guard, charge)
    assert charges == [1]


@pytest.mark.parametrize("kind", [Frozen, Unchangeable, Speechless])
@pytest.mark.parametrize("way", [by_run, by_step, by_transaction])
def test_one_that_is_remembered_is_not_tried_again(
    way: Callable[..., None], kind: type[Exception], tmp_path: Path
) -> None:
    tries: list[int] = []

    def refuse() -> None:
        tries.append(1)
        raise kind

    with Guard(f"sqlite:///{tmp_path}/records.db", policy=Policy(final_errors=(kind,))) as guard:
        for _ in range(2):
            with pytest.raises(kind):
                way(guard, refuse)
    assert tries == [1]


class Incomparable:
    """As an array or an expression is."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")


class Declined(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.data = Incomparable()


def test_one_with_values_that_cannot_be_compared_is_remembered() -> None:
    tries: list[int] = []

    def refuse() -> None:
        tries.append(1)
        raise Declined("no")

    with Guard("memory:", policy=Policy(final_errors=(Declined,))) as guard:
        with pytest.raises(Declined):
            guard.run("charge", "k", refuse)
        with pytest.raises(RememberedFailure):
            guard.run("charge", "k", refuse)
    assert tries == [1]


def test_a_codec_that_fails_so_loses_no_effect() -> None:
    class Failing(MsgspecCodec):
        def encode(self, value: Any, returns: Any) -> bytes:
            fail(Speechless)
            return b""

    with Guard("memory:", codec=Failing()) as guard:
        assert guard.run("charge", "k", lambda: 5).value == 5
        assert guard.run("charge", "k", pytest.fail).omitted


def test_the_end_of_an_iteration_surfaces_unchanged() -> None:
    with Guard("memory:", policy=Policy(final_errors=(StopIteration,))) as guard:
        for _ in range(2):
            with pytest.raises(StopIteration):
                guard.run("charge", "k", lambda: fail(StopIteration))
        results = guard.run_batch("pay", ["a"], key=str, handler=lambda _: fail(StopIteration))
        assert [type(result) for result in results] == [StopIteration]


def test_an_error_of_a_generator_of_the_handlers_own_stays_what_it_is() -> None:
    def ends() -> None:
        next(fail(StopIteration) for _ in "x")

    with Guard("memory:") as guard, pytest.raises(RuntimeError, match="generator raised StopIteration"):
        guard.run("charge", "k", ends)


def test_a_probe_that_fails_so_does_not_hide_the_handlers_own_error() -> None:
    def probe(_current: Any) -> Any:
        fail(Speechless)
        return Unknown()

    with Guard("memory:", policy=Policy(after_crash=probe)) as guard, pytest.raises(FrozenTimeout):
        by_run(guard, lambda: fail(FrozenTimeout))


class Particular(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")


class Failing(MemoryStore):
    def claim_all(self, entries: Any) -> Any:
        raise Particular(7, "no")


def test_a_stores_error_that_cannot_be_copied_is_each_messages_own() -> None:
    with Guard(Failing()) as guard:
        results = guard.run_batch("pay", ["a", "b"], key=str, handler=pytest.fail)
    assert [type(result) for result in results] == [Particular, Particular]
