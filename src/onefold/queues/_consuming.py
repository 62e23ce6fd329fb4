"""One message on its way: its key, its handler under a guard, and the verdict. Shared by every adapter, once a colour.

It never raises what a message can cause: a consumer lives on, whatever it is sent.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from onefold import AsyncGuard, Guard, MissingKey, OutcomeUnknown, Policy, UsageError
from onefold.durations import Duration, seconds
from onefold.queues._checked import check, check_arguments, takes_tx
from onefold.queues._verdict import ACK, Failed, Never, Verdict, of_error, of_state
from onefold.queues.keys import KeyOf, Message, PayloadOf, checked, checked_payload, usable

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
        fingerprint: PayloadOf | None = None,
    ) -> None:
        check(guard, self.takes, operation, handler, missing_key=missing_key, policy=policy, awaited=self.awaited)
        check_arguments(handler)
        self._guard: G = guard
        self._operation = operation
        self._handler = handler
        self._key = checked(key)
        self._fingerprint = checked_payload(fingerprint)
        self._runs_without_key = missing_key == "run"
        self._policy = (policy or guard.policy).but(wait=seconds(wait, "wait"))
        self._with_tx = self._transactional() if takes_tx(handler) else None
        if self._with_tx is None:
            # What a guard from a file refuses (another operation, a claim) is raised now, and not for each message.
            guard.idempotent(operation, key="key")

    def _transactional(self) -> Callable[..., Any]:
        raise NotImplementedError

    def _payload(self, message: Message) -> object:
        return None if self._fingerprint is None else self._fingerprint(message)

    @property
    def _compared(self) -> str | None:
        """The argument of a transactional handler that is compared with that of the first delivery."""
        return None if self._fingerprint is None else "payload"

    def _verdict_of(self, error: Exception, key: str | None, held_before: int) -> Verdict | None:
        final = self._policy.remember
        return of_error(error, own=(self._operation, key), final=final, held_before=held_before)


class Consuming(_Prepared[Guard]):
    """What `guarded` of every blocking adapter works with."""

    awaited = False
    takes = Guard

    def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Run the handler once for this message's key, with these arguments; what becomes of the message."""
        key = None
        try:
            key = usable(self._key(message))
            if key is not None:
                self._run(key, self._payload(message), arguments)
            elif self._runs_without_key:
                self._run_unguarded(arguments)
            else:
                return NO_KEY
        except MissingKey as error:
            return Never(str(error))
        except Exception as error:  # noqa: BLE001 - every error of a handler is a verdict
            verdict = self._verdict_of(error, key, held_before)
            return self._looked(key) if verdict is None else verdict
        return ACK

    def _run(self, key: str, payload: object, arguments: tuple[Any, ...]) -> None:
        if self._with_tx is not None:
            self._with_tx(key, payload, arguments)
            return

        def handle() -> None:
            nothing(self._handler(*arguments))

        self._guard.run(self._operation, key, handle, fingerprint=payload, policy=self._policy)

    def _run_unguarded(self, arguments: tuple[Any, ...]) -> None:
        if self._with_tx is None:
            nothing(self._handler(*arguments))
        else:
            # It wants a transaction all the same; nobody will ask for this key again.
            self._with_tx(throw_away_key(), None, arguments)

    def _looked(self, key: Any) -> Verdict:
        try:
            record = self._guard.read(self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error) or Failed(error)
        return of_state(None if record is None else record.state.value)

    def _transactional(self) -> Callable[..., Any]:
        def handle(key: Any, payload: Any, arguments: tuple[Any, ...], *, tx: Any) -> None:  # noqa: ARG001 - for the guard
            nothing(self._handler(*arguments, tx=tx))

        guarded = self._guard.transactional(self._operation, key="key", fingerprint=self._compared, policy=self._policy)
        return guarded(handle)


class AsyncConsuming(_Prepared[AsyncGuard]):
    """The same, awaited."""

    awaited = True
    takes = AsyncGuard

    async def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Await the handler once for this message's key, with these arguments; what becomes of the message."""
        key = None
        try:
            key = usable(self._key(message))
            if key is not None:
                await self._run(key, self._payload(message), arguments)
            elif self._runs_without_key:
                await self._run_unguarded(arguments)
            else:
                return NO_KEY
        except MissingKey as error:
            return Never(str(error))
        except Exception as error:  # noqa: BLE001 - every error of a handler is a verdict
            verdict = self._verdict_of(error, key, held_before)
            return await self._looked(key) if verdict is None else verdict
        return ACK

    async def _run(self, key: str, payload: object, arguments: tuple[Any, ...]) -> None:
        async def handle() -> None:
            await finished(self._handler(*arguments))

        if self._with_tx is not None:
            await self._with_tx(key, payload, arguments)
        else:
            await self._guard.run(self._operation, key, handle, fingerprint=payload, policy=self._policy)

    async def _run_unguarded(self, arguments: tuple[Any, ...]) -> None:
        if self._with_tx is None:
            await finished(self._handler(*arguments))
        else:
            await self._with_tx(throw_away_key(), None, arguments)

    async def _looked(self, key: Any) -> Verdict:
        try:
            record = await self._guard.read(self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error) or Failed(error)
        return of_state(None if record is None else record.state.value)

    def _transactional(self) -> Callable[..., Any]:
        async def handle(key: Any, payload: Any, arguments: tuple[Any, ...], *, tx: Any) -> None:  # noqa: ARG001 - as above
            await finished(self._handler(*arguments, tx=tx))

        guarded = self._guard.transactional(self._operation, key="key", fingerprint=self._compared, policy=self._policy)
        return guarded(handle)


def throw_away_key() -> str:
    return f"without-key:{uuid.uuid4()}"


def nothing(value: object) -> None:
    """A queue has nobody to answer: results are not kept. But what has not run yet is no result."""
    if inspect.iscoroutine(value):
        value.close()
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise UsageError(f"the handler has returned a {type(value).__name__}, whose work nobody would do")


async def finished(handling: Awaitable[object]) -> None:
    """Await a handler. It has failed where something inside was cancelled; its consumer was not, and lives on."""
    try:
        nothing(await handling)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise OutcomeUnknown("something that the handler has waited for was cancelled") from error
