"""One message on its way: its key, its handler under a guard, and the verdict. Shared by every adapter, once a colour.

It never raises what a message can cause: a consumer lives on, whatever it is sent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, Literal

from onefold import AsyncGuard, Guard, MissingKey, Policy, UsageError
from onefold.durations import Duration, seconds
from onefold.queues._verdict import ACK, Failed, Never, Verdict, of_error, of_state
from onefold.queues.keys import KeyOf, Message, usable

MissingKeyRule = Literal["never", "run"]

# How long a duplicate waits in place for the running one, before it is given back.
WAIT: Final = 5.0


class Consuming:
    """What `guarded` of every blocking adapter works with."""

    awaited: Final = False

    def __init__(
        self,
        guard: Guard,
        operation: str,
        handler: Callable[..., Any],
        *,
        key: KeyOf,
        missing_key: MissingKeyRule = "never",
        wait: Duration = WAIT,
        policy: Policy | None = None,
    ) -> None:
        _check(guard, Guard, handler, missing_key, awaited=False)
        self._guard = guard
        self._operation = operation
        self._handler = handler
        self._key = key
        self._missing_key = missing_key
        self._policy = (policy or guard.policy).but(wait=seconds(wait, "wait"))
        self._with_tx = None if not takes_tx(handler) else _transactional(guard, operation, handler, self._policy)

    def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Run the handler once for this message's key, with these arguments; what becomes of the message."""
        try:
            key = usable(self._key(message))
            if key is None and self._missing_key == "run":
                self._handler(*arguments)
                return ACK
            if key is None:
                return Never("it has no key")
            self._run(key, arguments)
        except MissingKey as error:
            return Never(str(error))
        except Exception as error:  # noqa: BLE001 - every error of a handler is a verdict
            verdict = of_error(error, held_before=held_before)
            return self._looked(key) if verdict is None else verdict
        return ACK

    def _run(self, key: str | int, arguments: tuple[Any, ...]) -> None:
        if self._with_tx is not None:
            self._with_tx(key, arguments)
        else:
            self._guard.run(self._operation, key, lambda: _nothing(self._handler(*arguments)), policy=self._policy)

    def _looked(self, key: Any) -> Verdict:
        try:
            record = self._guard.read(self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error) or Failed(error)
        return of_state(None if record is None else record.state.value)


class AsyncConsuming:
    """The same, awaited."""

    awaited: Final = True

    def __init__(
        self,
        guard: AsyncGuard,
        operation: str,
        handler: Callable[..., Any],
        *,
        key: KeyOf,
        missing_key: MissingKeyRule = "never",
        wait: Duration = WAIT,
        policy: Policy | None = None,
    ) -> None:
        _check(guard, AsyncGuard, handler, missing_key, awaited=True)
        self._guard = guard
        self._operation = operation
        self._handler = handler
        self._key = key
        self._missing_key = missing_key
        self._policy = (policy or guard.policy).but(wait=seconds(wait, "wait"))
        self._with_tx = None if not takes_tx(handler) else _transactional_async(guard, operation, handler, self._policy)

    async def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Await the handler once for this message's key, with these arguments; what becomes of the message."""
        try:
            key = usable(self._key(message))
            if key is None and self._missing_key == "run":
                await self._handler(*arguments)
                return ACK
            if key is None:
                return Never("it has no key")
            await self._run(key, arguments)
        except MissingKey as error:
            return Never(str(error))
        except Exception as error:  # noqa: BLE001 - every error of a handler is a verdict
            verdict = of_error(error, held_before=held_before)
            return await self._looked(key) if verdict is None else verdict
        return ACK

    async def _run(self, key: str | int, arguments: tuple[Any, ...]) -> None:
        async def handle() -> None:
            await self._handler(*arguments)

        if self._with_tx is not None:
            await self._with_tx(key, arguments)
        else:
            await self._guard.run(self._operation, key, handle, policy=self._policy)

    async def _looked(self, key: Any) -> Verdict:
        try:
            record = await self._guard.read(self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error) or Failed(error)
        return of_state(None if record is None else record.state.value)


def takes_tx(handler: Callable[..., Any]) -> bool:
    """Whether the handler wants the transaction in which its record is written."""
    return "tx" in inspect.signature(handler).parameters


def _transactional(guard: Guard, operation: str, handler: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    def handle(key: Any, arguments: tuple[Any, ...], *, tx: Any) -> None:  # noqa: ARG001 - the guard reads it
        handler(*arguments, tx=tx)

    return guard.transactional(operation, key="key", fingerprint=None, policy=policy)(handle)


def _transactional_async(
    guard: AsyncGuard, operation: str, handler: Callable[..., Any], policy: Policy
) -> Callable[..., Any]:
    async def handle(key: Any, arguments: tuple[Any, ...], *, tx: Any) -> None:  # noqa: ARG001 - the guard reads it
        await handler(*arguments, tx=tx)

    return guard.transactional(operation, key="key", fingerprint=None, policy=policy)(handle)


def _check(guard: Any, kind: type, handler: Callable[..., Any], missing_key: str, *, awaited: bool) -> None:
    if not isinstance(guard, kind):
        raise UsageError(f"this client is {'async' if awaited else 'blocking'}: it takes {kind.__name__}")
    inner = handler.func if isinstance(handler, functools.partial) else handler
    called = getattr(inner, "__call__", inner)  # noqa: B004 - an object with an async __call__ is an async handler
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(called)
    if is_async != awaited:
        have, want = ("async def", "def") if is_async else ("def", "async def")
        raise UsageError(f"the handler is `{have}`, and this client calls `{want}`: its work would be lost")
    if missing_key not in ("never", "run"):
        raise UsageError(f"missing_key={missing_key!r} is neither 'never' nor 'run'")


def _nothing(_value: Any) -> None:
    """A queue has nobody to answer: results are not kept."""
