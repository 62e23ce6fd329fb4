"""One message on its way: its key, its handler under a guard, and the verdict. Shared by every adapter, sync and async.

It never raises an error that a message can cause: a consumer survives anything that it is sent.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from onefold import AsyncGuard, Guard, MissingKey, OutcomeUnknown, Policy, UsageError
from onefold._concurrency.generators import Work, run, run_async
from onefold.durations import Duration, seconds
from onefold.queues._shared.logs import address_of
from onefold.queues._shared.options import check, check_arguments, takes_tx
from onefold.queues._shared.verdict import ACK, HandlerRaised, Never, Verdict, of_error, of_state
from onefold.queues.keys import KeyOf, Message, PayloadOf, can_be_compared, checked, checked_payload, usable
from onefold.stores.base import Address

MissingKeyRule = Literal["never", "run"]

G = TypeVar("G", Guard, AsyncGuard)

NO_KEY: Final = Never("it has no key")

# How long a duplicate waits in place for the running one, before it is given back.
WAIT: Final = 5.0


class MessageCall:
    """The call of a handler for one message. Its progress says whose mistake an error is."""

    __slots__ = ("arguments", "asked", "begun", "key", "payload")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.key: str | None = None
        self.payload: object = None
        # The message was read, and the guard was called; then the handler was called.
        self.asked = False
        self.begun = False

    @property
    def is_to_blame(self) -> bool:
        """Whether the message or its handler is at fault, and not the worker (a closed guard, a store that cannot)."""
        return self.begun or not self.asked or not can_be_compared(self.payload)


class _Prepared(Generic[G]):
    """What a consumer was given, checked once, and what becomes of each of its messages."""

    is_async: ClassVar[bool]
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
        check(guard, self.takes, operation, handler, missing_key=missing_key, policy=policy, is_async=self.is_async)
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
            # What a guard from a file refuses (another operation, a claim) is raised now, not for each message.
            guard.idempotent(operation, key="key")

    def _transactional(self) -> Callable[..., Any]:
        guarded: Any = self._guard.transactional(
            self._operation, key="key", fingerprint=self._compared, policy=self._policy
        )
        return guarded(self._with_transaction())  # type: ignore[no-any-return]

    def _with_transaction(self) -> Callable[..., Any]:
        """Return the handler as a function of its key and payload, which the guard reads, and of its call."""
        raise NotImplementedError

    def _call(self, call: MessageCall, **tx: Any) -> Any:
        """Call the handler: the answer is awaited where the guard is an async one."""
        call.begun = True
        return self._ended(self._handler(*call.arguments, **tx))

    def _deliver(self, call: MessageCall, message: Message, held_before: int) -> Work[Verdict]:
        try:
            self._read(call, message)
            if call.key is None and not self._runs_without_key:
                return NO_KEY
            yield partial(self._run, call)
        except MissingKey as error:
            return Never(str(error))
        except Exception as error:  # noqa: BLE001 - every error of a handler is a verdict
            verdict = self._verdict_of(error, call, held_before)
        else:
            return ACK
        return (yield from self._looked(call.key)) if verdict is None else verdict

    def _run(self, call: MessageCall) -> Any:
        if self._with_tx is not None:
            # Without a key it wants a transaction all the same; nobody will ask for this one again.
            return self._with_tx(throw_away_key() if call.key is None else call.key, call.payload, call)
        if call.key is None:
            return self._call(call)
        handle: Any = partial(self._call, call)
        options: dict[str, Any] = {"returns": type(None), "fingerprint": call.payload, "policy": self._policy}
        return self._guard.run(self._operation, call.key, handle, **options)

    def _looked(self, key: Any) -> Work[Verdict]:
        """A claim was lost: whoever has taken it over may have finished it."""
        try:
            record = yield partial(self._guard.read, self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error, begun=False) or HandlerRaised(error)
        return of_state(None if record is None else record.state.value)

    def _ended(self, handling: Any) -> Any:
        """Check what a handler has returned, or await it."""
        raise NotImplementedError

    def address_of(self, message: Message) -> Address:
        """Return the address of this message in logs, events and records. Without a usable key: an empty one."""
        try:
            key = usable(self._key(message))
        except Exception:  # noqa: BLE001 - its verdict has said so
            key = None
        return address_of(self._guard, self._operation, key)

    def _read(self, call: MessageCall, message: Message) -> None:
        """Read what the message itself says; then the guard is called."""
        call.key = usable(self._key(message))
        if call.key is not None and self._fingerprint is not None:
            call.payload = self._fingerprint(message)
        call.asked = True

    @property
    def _compared(self) -> str | None:
        """Return the argument of a transactional handler that is compared with that of the first delivery."""
        return None if self._fingerprint is None else "payload"

    def _verdict_of(self, error: Exception, call: MessageCall, held_before: int) -> Verdict | None:
        own, final = (self._operation, call.key), self._policy.remember
        begun = not isinstance(error, UsageError) or call.is_to_blame
        return of_error(error, own=own, final=final, held_before=held_before, begun=begun, called=call.begun)


class Consuming(_Prepared[Guard]):
    """The implementation of `guarded` for every sync adapter."""

    is_async = False
    takes = Guard

    def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Run the handler once for this message's key, with these arguments; return the verdict on the message."""
        return run(self._deliver(MessageCall(arguments), message, held_before))

    def _with_transaction(self) -> Callable[..., Any]:
        def handle(key: Any, payload: Any, call: MessageCall, *, tx: Any) -> None:  # noqa: ARG001 - for the guard
            self._call(call, tx=tx)

        return handle

    def _ended(self, handling: Any) -> Any:
        return nothing(handling)


class AsyncConsuming(_Prepared[AsyncGuard]):
    """What `guarded` of every async adapter works with."""

    is_async = True
    takes = AsyncGuard

    async def deliver(self, message: Message, *arguments: Any, held_before: int = 0) -> Verdict:
        """Await the handler once for this message's key, with these arguments; return the verdict on the message."""
        return await run_async(self._deliver(MessageCall(arguments), message, held_before))

    def _with_transaction(self) -> Callable[..., Any]:
        async def handle(key: Any, payload: Any, call: MessageCall, *, tx: Any) -> None:  # noqa: ARG001 - for the guard
            await self._call(call, tx=tx)

        return handle

    def _ended(self, handling: Any) -> Any:
        return finished(handling)


def throw_away_key() -> str:
    return f"without-key:{uuid.uuid4()}"


def nothing(value: object) -> None:
    """Drop a result: a queue has nobody to answer. But refuse an object of which nothing has run yet."""
    if inspect.iscoroutine(value):
        value.close()
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise UsageError(f"the handler has returned a {type(value).__name__}, whose work nobody would do")


async def finished(handling: Awaitable[object]) -> None:
    """Await a handler. It has failed if something inside was cancelled; its consumer was not, and lives on."""
    try:
        nothing(await handling)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise OutcomeUnknown("something that the handler has waited for was cancelled") from error
