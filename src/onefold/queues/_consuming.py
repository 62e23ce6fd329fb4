"""One message on its way: its key, its handler under a guard, and the verdict. Shared by every adapter, once a colour.

It never raises what a message can cause: a consumer lives on, whatever it is sent.
"""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Callable
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from onefold import AsyncGuard, Guard, MissingKey, Policy, UsageError
from onefold.durations import Duration, seconds
from onefold.queues._verdict import ACK, Failed, Never, Verdict, of_error, of_state
from onefold.queues.keys import KeyOf, Message, usable

MissingKeyRule = Literal["never", "run"]

G = TypeVar("G", Guard, AsyncGuard)

NO_KEY: Final = Never("it has no key")

# How long a duplicate waits in place for the running one, before it is given back.
WAIT: Final = 5.0


class _Prepared(Generic[G]):
    """What a consumer of either colour was given, checked once."""

    awaited: ClassVar[bool]
    takes: ClassVar[type]

    def __init__(
        self,
        guard: G,
        operation: str,
        handler: Callable[..., Any],
        *,
        key: KeyOf,
        missing_key: MissingKeyRule = "never",
        wait: Duration = WAIT,
        policy: Policy | None = None,
    ) -> None:
        check(guard, self.takes, handler, missing_key, awaited=self.awaited)
        self._guard: G = guard
        self._operation = operation
        self._handler = handler
        self._key = key
        self._runs_without_key = missing_key == "run"
        self._policy = (policy or guard.policy).but(wait=seconds(wait, "wait"))
        self._with_tx = self._transactional() if takes_tx(handler) else None

    def _transactional(self) -> Callable[..., Any]:
        raise NotImplementedError


class Consuming(_Prepared[Guard]):
    """What `guarded` of every blocking adapter works with."""

    awaited = False
    takes = Guard

    def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Run the handler once for this message's key, with these arguments; what becomes of the message."""
        try:
            key = usable(self._key(message))
            if key is not None:
                self._run(key, arguments)
            elif self._runs_without_key:
                self._run_unguarded(arguments)
            else:
                return NO_KEY
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

    def _run_unguarded(self, arguments: tuple[Any, ...]) -> None:
        if self._with_tx is None:
            self._handler(*arguments)
        else:
            # It wants a transaction all the same; nobody will ask for this key again.
            self._with_tx(throw_away_key(), arguments)

    def _looked(self, key: Any) -> Verdict:
        try:
            record = self._guard.read(self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error) or Failed(error)
        return of_state(None if record is None else record.state.value)

    def _transactional(self) -> Callable[..., Any]:
        def handle(key: Any, arguments: tuple[Any, ...], *, tx: Any) -> None:  # noqa: ARG001 - the guard reads it
            self._handler(*arguments, tx=tx)

        return self._guard.transactional(self._operation, key="key", fingerprint=None, policy=self._policy)(handle)


class AsyncConsuming(_Prepared[AsyncGuard]):
    """The same, awaited."""

    awaited = True
    takes = AsyncGuard

    async def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Await the handler once for this message's key, with these arguments; what becomes of the message."""
        try:
            key = usable(self._key(message))
            if key is not None:
                await self._run(key, arguments)
            elif self._runs_without_key:
                await self._run_unguarded(arguments)
            else:
                return NO_KEY
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

    async def _run_unguarded(self, arguments: tuple[Any, ...]) -> None:
        if self._with_tx is None:
            await self._handler(*arguments)
        else:
            await self._with_tx(throw_away_key(), arguments)

    async def _looked(self, key: Any) -> Verdict:
        try:
            record = await self._guard.read(self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error) or Failed(error)
        return of_state(None if record is None else record.state.value)

    def _transactional(self) -> Callable[..., Any]:
        async def handle(key: Any, arguments: tuple[Any, ...], *, tx: Any) -> None:  # noqa: ARG001 - the guard reads it
            await self._handler(*arguments, tx=tx)

        return self._guard.transactional(self._operation, key="key", fingerprint=None, policy=self._policy)(handle)


def throw_away_key() -> str:
    return f"without-key:{uuid.uuid4()}"


def takes_tx(handler: Callable[..., Any]) -> bool:
    """Whether the handler wants the transaction in which its record is written."""
    return "tx" in inspect.signature(handler).parameters


def check(guard: Any, kind: type, handler: Callable[..., Any], missing_key: str, *, awaited: bool) -> None:
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
