"""One message in progress: its key, its handler under a guard, and the verdict. Shared by all adapters, sync and async.

No error that a message can cause is ever raised: a consumer survives every message.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from onefold import AsyncGuard, Guard, MissingKey, OutcomeUnknown, Policy, RecordColumn, UsageError
from onefold._checks import with_article
from onefold._concurrency.generators import Flow, run, run_async
from onefold.health.first_use import first_use_of
from onefold.queues._shared.bypasses import GONE, asks, is_used_up, permission_of, use_up
from onefold.queues._shared.logs import address_of
from onefold.queues._shared.options import WAIT, check, check_arguments, check_record, named_like, takes_tx
from onefold.queues._shared.verdict import ACK, HandlerRaised, Never, Verdict, of_error, of_state
from onefold.queues.keys import KeyOf, Message, PayloadOf, can_be_compared, checked, checked_payload, usable
from onefold.stores.base import Address
from onefold.stores.opening import without_transactions

MissingKeyRule = Literal["never", "run"]

G = TypeVar("G", Guard, AsyncGuard)

NO_KEY: Final = Never("it has no key")

# What a handler may raise that is not only about its message.
ENDS_THE_LOOP: Final = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class MessageCall:
    """The call of a handler for one message. Its progress shows whose mistake an error is."""

    __slots__ = ("arguments", "asked", "begun", "bypass", "key", "on_start", "payload")

    def __init__(self, arguments: tuple[Any, ...], on_start: Callable[[], None] | None = None) -> None:
        self.arguments = arguments
        self.on_start = on_start
        self.key: str | None = None
        self.payload: object = None
        # The name of the deliberate second run that it asks for, and may have.
        self.bypass: bool | str = False
        # The message was read, and the guard was called; then the handler was called.
        self.asked = False
        self.begun = False

    @property
    def is_to_blame(self) -> bool:
        """Return whether the message or its handler is at fault, not the worker (a closed guard, a failing store)."""
        return self.begun or not self.asked or not can_be_compared(self.payload)


class _Prepared(Generic[G]):
    """The checked options of a consumer, and the handling of each of its messages."""

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
        policy: Policy | None = None,
        payload: PayloadOf | None = None,
        record: RecordColumn | None = None,
    ) -> None:
        check(guard, self.takes, operation, handler, missing_key=missing_key, policy=policy, is_async=self.is_async)
        check_arguments(handler)
        check_record(record, handler, missing_key, payload)
        self._guard: G = guard
        self._first_use = first_use_of(guard)
        self._operation = operation
        self._handler = handler
        self._key = checked(key)
        self._payload = checked_payload(payload)
        self._runs_without_key = missing_key == "run"
        self._policy = guard.policy.replace(wait=WAIT) if policy is None else policy
        self._record = record
        # Errors of a guard from a file (unknown operation, wrong mode) are raised now, not for each message.
        (guard.transactional if takes_tx(handler) else guard.idempotent)(operation, key="key")
        # A batch may work in a transaction of the caller's; otherwise `check_transactions` refuses such a store.
        joins = takes_tx(handler) and not without_transactions(guard.source)
        self._with_tx = self._transactional() if joins else None
        if self._with_tx is None:
            guard.check_handler(operation, handler)

    def _transactional(self) -> Callable[..., Any]:
        guarded: Any = self._guard.transactional(
            self._operation, key="key", fingerprint=self._compared, policy=self._policy, record=self._record
        )
        return guarded(named_like(self._handler, self._with_transaction()))  # type: ignore[no-any-return]

    def _with_transaction(self) -> Callable[..., Any]:
        """Return the handler as a function of its key and payload, which the guard reads, and of its call."""
        raise NotImplementedError

    def _call(self, call: MessageCall, **tx: Any) -> Any:
        """Call the handler; on an async guard the result is awaitable."""
        call.begun = True
        if call.on_start is not None and call.key is not None:
            call.on_start()
        return self._ended(self._handler(*call.arguments, **tx))

    def _deliver(self, call: MessageCall, message: Message, held_before: int) -> Flow[Verdict]:
        try:
            self._read(call, message)
            if call.key is None and not self._runs_without_key:
                return NO_KEY
            # A row of the caller's is in no table of ours.
            if not self._first_use.is_over and call.key is not None and self._record is None:
                yield from self._first_use.check(self._guard, self._policy)
            allowed = None
            if call.key is not None and asks(message):
                allowed = yield from permission_of(self._guard, message, self.address_of(message))
            if allowed is not None and is_used_up(allowed):
                # As a duplicate, which needs the record that it is one of.
                if not (yield from self._has_record(call.key)):
                    return GONE
            elif allowed is not None:
                call.bypass = allowed.latest_remark
            yield partial(self._run, call)
            if allowed is not None and call.bypass and call.begun:
                yield from use_up(self._guard, allowed)
        except MissingKey as error:
            return Never(str(error))
        except Exception as error:  # noqa: BLE001 - every error of a handler is a verdict
            verdict = self._verdict_of(error, call, held_before)
        else:
            return ACK
        return (yield from self._looked(call.key)) if verdict is None else verdict

    def _run(self, call: MessageCall) -> Any:
        if self._with_tx is not None:
            if call.bypass:
                with_tx: Any = self._with_tx
                return with_tx.bypass_as(call.bypass, call.key, call.payload, call)
            # Without a key it needs a transaction all the same; this key is never used again.
            return self._with_tx(throw_away_key() if call.key is None else call.key, call.payload, call)
        if call.key is None:
            return self._call(call)
        handle: Any = partial(self._call, call)
        options: dict[str, Any] = {"returns": type(None), "payload": call.payload, "policy": self._policy}
        return self._guard.run(self._operation, call.key, handle, bypass=call.bypass, **options)

    def _looked(self, key: Any) -> Flow[Verdict]:
        """Return the verdict after a lost claim: the worker that has taken it over may have finished it."""
        try:
            record = yield partial(self._guard.read, self._operation, key)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error, begun=False) or HandlerRaised(error)
        return of_state(None if record is None else record.state.value)

    def _has_record(self, key: Any) -> Flow[bool]:
        record = yield partial(self._guard.read, self._operation, key)
        return record is not None and not record.is_expired

    def _ended(self, handling: Any) -> Any:
        """Check what a handler has returned, or await it."""
        raise NotImplementedError

    def address_of(self, message: Message) -> Address:
        """Return the address of this message in logs, events and records. Without a usable key: an empty one."""
        try:
            key = usable(self._key(message))
        except Exception:  # noqa: BLE001 - its verdict has reported it
            key = None
        return address_of(self._guard, self._operation, key)

    def _read(self, call: MessageCall, message: Message) -> None:
        """Read the key and payload from the message, before the guard is called."""
        call.key = usable(self._key(message))
        if call.key is not None and self._payload is not None:
            call.payload = self._payload(message)
        call.asked = True

    @property
    def _compared(self) -> str | None:
        """Return the argument of a transactional handler that is compared with that of the first delivery."""
        return None if self._payload is None else "payload"

    def _verdict_of(self, error: Exception, call: MessageCall, held_before: int) -> Verdict | None:
        own, final = (self._operation, call.key), self._policy.final_errors
        # A row of the caller's cannot run again: the message asks for what it cannot have.
        is_refused_bypass = bool(call.bypass) and self._record is not None
        begun = not isinstance(error, UsageError) or call.is_to_blame or is_refused_bypass
        return of_error(error, own=own, final=final, held_before=held_before, begun=begun, called=call.begun)


class Consuming(_Prepared[Guard]):
    """The implementation of `guarded` for every sync adapter."""

    is_async = False
    takes = Guard

    def deliver(
        self, message: Message, *arguments: Any, held_before: int = 0, on_start: Callable[[], None] | None = None
    ) -> Verdict:
        """Run the handler once for this message's key, with these arguments; return the verdict on the message.

        `on_start` is called just before the handler, where `current()` is its delivery.
        """
        return run(self._deliver(MessageCall(arguments, on_start), message, held_before))

    def _with_transaction(self) -> Callable[..., Any]:
        def handle(key: Any, payload: Any, call: MessageCall, *, tx: Any) -> None:  # noqa: ARG001 - for the guard
            self._call(call, tx=tx)

        return handle

    def _ended(self, handling: Any) -> Any:
        return nothing(handling)


class AsyncConsuming(_Prepared[AsyncGuard]):
    """The implementation of `guarded` for every async adapter."""

    is_async = True
    takes = AsyncGuard

    async def deliver(
        self, message: Message, *arguments: Any, held_before: int = 0, on_start: Callable[[], None] | None = None
    ) -> Verdict:
        """Await the handler once for this message's key, with these arguments; return the verdict on the message.

        `on_start` is called just before the handler, where `current()` is its delivery.
        """
        return await run_async(self._deliver(MessageCall(arguments, on_start), message, held_before))

    def _with_transaction(self) -> Callable[..., Any]:
        async def handle(key: Any, payload: Any, call: MessageCall, *, tx: Any) -> None:  # noqa: ARG001 - for the guard
            await self._call(call, tx=tx)

        return handle

    def _ended(self, handling: Any) -> Any:
        return finished(handling)


def throw_away_key() -> str:
    return f"without-key:{uuid.uuid4()}"


def nothing(value: object) -> None:
    """Drop a result, because a queue has no caller to return it to; refuse an object whose code has not run yet."""
    if inspect.iscoroutine(value):
        value.close()
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise UsageError(f"the handler has returned {with_article(type(value).__name__)}, which nobody would run")


async def finished(handling: Awaitable[object]) -> None:
    """Await a handler. If work inside it was cancelled, it has failed, while its consumer continues."""
    try:
        nothing(await handling)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise OutcomeUnknown("something that the handler has waited for was cancelled") from error
