"""Handlers that are no plain functions: mocks, proxies that answer to every name, what wraps itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock, create_autospec

import pytest

from onefold import AsyncGuard, Guard, Outcome, UsageError
from onefold._handlers.arguments import name_of, returns_of
from onefold._handlers.innermost import innermost


def charge(order: str = "o-1") -> int:
    return len(order)


class Proxy:
    """A client of a remote service: whatever is asked for is the name of something there."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Proxy:
        return Proxy(f"{self._name}.{name}")

    def __call__(self, *_args: Any) -> int:
        return 3


def wraps_itself() -> Callable[..., Any]:
    def call(*_args: Any) -> int:
        return 3

    call.__wrapped__ = call  # type: ignore[attr-defined]
    return call


HANDLERS: dict[str, Callable[[], Any]] = {
    "a mock": lambda: Mock(return_value=3),
    "a magic mock": lambda: MagicMock(return_value=3),
    "a mock with a spec": lambda: Mock(spec=charge, return_value=3),
    "a mock with the spec of a partial": lambda: Mock(spec=functools.partial(charge), return_value=3),
    "a function with the spec of another": lambda: create_autospec(charge, return_value=3),
    "a partial of a mock": lambda: functools.partial(Mock(return_value=3)),
    "a method of a mock": lambda: Mock(**{"charge.return_value": 3}).charge,
    "a proxy": lambda: Proxy("billing").charge,
    "what wraps itself": wraps_itself,
}


@pytest.mark.parametrize("name", HANDLERS)
def test_a_handler_that_answers_to_every_name_is_called_once(name: str) -> None:
    handler = HANDLERS[name]()
    with Guard("memory:") as guard:
        outcomes = [guard.run("charge", "p-1", handler) for _ in range(2)]
        batch = guard.run_batch("charge", ["a", "b"], key=str, handler=handler)

    assert [(outcome.value, outcome.replayed) for outcome in outcomes] == [(3, False), (3, True)]
    assert [one.value for one in batch if isinstance(one, Outcome)] == [3, 3]
    if isinstance(handler, Mock):
        assert handler.call_count == 3


def test_a_mock_can_be_decorated() -> None:
    mock = Mock(return_value=3)
    with Guard("memory:") as guard:
        charged = guard.idempotent("charge", key=lambda order: order)(mock)

        assert [charged("o-1"), charged("o-1")] == [3, 3]
    assert mock.call_count == 1


def test_an_async_mock_belongs_to_an_async_guard() -> None:
    async def story() -> list[Outcome[Any]]:
        async with AsyncGuard("memory:") as guard:
            return [await guard.run("charge", "p-1", mock) for _ in range(2)]

    mock = AsyncMock(return_value=3)

    assert [(outcome.value, outcome.replayed) for outcome in asyncio.run(story())] == [(3, False), (3, True)]
    assert mock.await_count == 1
    with Guard("memory:") as guard, pytest.raises(UsageError, match="which nobody awaits"):
        guard.run("charge", "p-1", AsyncMock(return_value=3))


class Orders:
    def place(self) -> int:
        return 3

    @functools.wraps(charge)
    def __call__(self, *args: Any) -> Any:
        return charge(*args)


@pytest.mark.parametrize(
    ("call", "function"),
    [
        (charge, charge),
        (functools.partial(functools.partial(charge, "o-1")), charge),
        (functools.wraps(charge)(lambda: None), charge),
        (functools.lru_cache(charge), charge),
        (Orders().place, Orders.place),
        (functools.partial(Orders().place), Orders.place),
        (Orders(), charge),
        (Orders, Orders),
        (len, len),
    ],
)
def test_the_function_inside_is_found(call: Any, function: Any) -> None:
    assert innermost(call) is function


def test_its_annotations_and_its_name_are_those_of_the_function_inside() -> None:
    assert returns_of(functools.lru_cache(charge)) is returns_of(Orders().place) is int
    assert name_of(functools.partial(Orders().place)) == "Orders.place"
    assert returns_of(Proxy("billing").charge) is int
    assert returns_of(Mock()) is returns_of(AsyncMock()) is Any
