"""`AsyncGuard`, the entry point for async code. It does not import asyncio itself."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, Self, TypeVar, Unpack, cast, overload

from onefold._concurrency.generators import run_async
from onefold._delivery.drive import drive_async
from onefold._delivery.records import read, resolve
from onefold._guard.base import GuardBase
from onefold._guard.options import moment, named_bypass, with_parentheses
from onefold._guard.within import WithinBase
from onefold._handlers.arguments import (
    ALL,
    FingerprintOf,
    GuardedFunction,
    GuardScope,
    KeyArgument,
    ScopeOf,
    as_written,
)
from onefold._handlers.methods import Method
from onefold._handlers.nested import Nest
from onefold._heartbeat.async_guards import AsyncHeartbeat
from onefold._model import Fresh, Outcome, Record, Resolution
from onefold._model.policy import Policy, PolicyFields
from onefold.codecs import Codec
from onefold.durations import Duration
from onefold.errors import UsageError
from onefold.events import Listener
from onefold.keys import Key
from onefold.stores.hand_made import HandMadeTable
from onefold.stores.sources import AsyncStoreSource
from onefold.transactions import RecordColumn

if TYPE_CHECKING:
    from datetime import datetime

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M")


class AsyncGuarded(Protocol[P, R]):
    """A decorated async function: awaited as before, with two additional ways to call it."""

    __name__: str
    __wrapped__: Callable[..., Any]
    # What its deliveries follow: the guard's policy, with what the decorator changes.
    policy: Policy

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run it, or replay its result. Raises `ResultNotKept` on a replay without a stored result."""

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Outcome[R]]:
        """Run or replay it, and return what happened: `Outcome(value, replayed, attempt, ...)`."""

    def bypass(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Outcome[R]]:
        """Run it once more on purpose, although it is finished."""

    # Of a class: a class method, or another function. Of an instance: a method, a class method, or a static one.
    @overload
    def __get__(self: Method[S, Q, Coroutine[Any, Any, R]], instance: None, owner: S) -> AsyncGuarded[Q, R]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> AsyncGuarded[P, R]: ...
    @overload
    def __get__(
        self: Method[S, Q, Coroutine[Any, Any, R]], instance: S, owner: type | None = None
    ) -> AsyncGuarded[Q, R]: ...
    @overload
    def __get__(self: Method[S, Q, Coroutine[Any, Any, R]], instance: object, owner: S) -> AsyncGuarded[Q, R]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> AsyncGuarded[P, R]: ...


class AsyncGuard(GuardBase):
    """The async `Guard`: the same methods, the same rules. One guard may be used from several event loops in turn."""

    _is_async = True
    _conduct = staticmethod(drive_async)
    _heartbeat = AsyncHeartbeat

    def __init__(
        self,
        store: AsyncStoreSource,
        *,
        scope: GuardScope = None,
        on_event: Listener | Iterable[Listener] = (),
        codec: Codec | None = None,
        migrate_from: AsyncStoreSource | HandMadeTable | None = None,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> None:
        super().__init__(store, migrate_from, policy, fields, scope, on_event, codec)

    @with_parentheses
    def idempotent(
        self,
        operation: str,
        *,
        key: KeyArgument,
        scope: ScopeOf = None,
        fingerprint: FingerprintOf = ALL,
        returns: Any = Any,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], AsyncGuarded[P, R]]:
        """Decorate an async function: claim its key, run it, remember what it returned. See `Guard.idempotent`."""
        policy = self._asked(policy, fields, AsyncGuard.idempotent)

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> AsyncGuarded[P, R]:
            call, result_type = self._prepared(function, operation, key, scope, fingerprint, policy, returns)

            async def deliver(args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool | str, bare: bool) -> Any:
                request = call.request(args, kwargs, bypass=bypass)
                wanted = result_type()
                outcome = self._answered(request, wanted, policy)
                if outcome is None:
                    handler = functools.partial(function, *args, **kwargs)
                    outcome = await drive_async(*self._deliver(request, handler, wanted, policy))
                return (outcome.value if outcome.omitted else outcome.kept) if bare else outcome

            return self._decorated(function, call, self._chosen(policy), deliver)

        return decorate

    def _decorated(
        self,
        function: Callable[P, Coroutine[Any, Any, R]],
        call: GuardedFunction,
        policy: Policy,
        deliver: Callable[..., Awaitable[Any]],
    ) -> AsyncGuarded[P, R]:
        """Wrap the function for its callers, with its three ways to be called."""

        @functools.wraps(function)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            value: R = await deliver(args, kwargs, bypass=False, bare=True)
            return value

        async def outcome(*args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", await deliver(args, kwargs, bypass=False, bare=False))

        async def bypass(*args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", await deliver(args, kwargs, bypass=True, bare=False))

        # For consumers: `onefold redrive --bypass` names its runs.
        async def bypass_as(name: str, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", await deliver(args, kwargs, bypass=named_bypass(name), bare=False))

        ways: dict[str, Callable[..., Any]] = {"outcome": outcome, "bypass": bypass, "bypass_as": bypass_as}
        return cast("AsyncGuarded[P, R]", as_written(guarded, call, policy, **ways))

    @with_parentheses
    def transactional(
        self,
        operation: str,
        *,
        key: KeyArgument,
        scope: ScopeOf = None,
        fingerprint: FingerprintOf = ALL,
        returns: Any = Any,
        record: RecordColumn | None = None,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], AsyncGuarded[P, R]]:
        """Decorate an async function whose work is rows in the guard's own database. See `Guard.transactional`."""
        policy = self._asked(policy, fields, AsyncGuard.transactional)
        self._check_own_row(record, fingerprint, policy)

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> AsyncGuarded[P, R]:
            prepared = self._prepared(function, operation, key, scope, fingerprint, policy, returns, injects_tx=True)
            call, result_type = prepared

            async def deliver(args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool | str, bare: bool) -> Any:
                request = call.request(args, kwargs, bypass=bypass)
                self._check_outside(request)
                wanted = result_type()
                around, flow = self._transaction(record)
                async with around as transaction:
                    delivery = self._make_delivery(
                        request, call.with_tx(args, kwargs, transaction), wanted, self._chosen(policy)
                    )
                    outcome = await drive_async(flow(delivery), self._inside(transaction, record))
                return (outcome.value if outcome.omitted else outcome.kept) if bare else outcome

            return self._decorated(function, call, self._chosen(policy), deliver)

        return decorate

    def scheduled(
        self,
        operation: str,
        *,
        every: Duration | None = None,
        anchor: datetime | None = None,
        early: Duration | None = None,
        scope: ScopeOf = None,
        fingerprint: FingerprintOf = ALL,
        returns: Any = Any,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], AsyncGuarded[P, R]]:
        """Decorate an async job that several schedulers call. See `Guard.scheduled`."""
        from onefold._schedule.planned import planned_slots, scheduled

        times = planned_slots(every, anchor, early)
        options = {"scope": scope, "fingerprint": fingerprint, "returns": returns}
        return scheduled(self, operation, times, policy, fields, options)

    def _nested(self, around: Any, nest: Nest) -> AbstractAsyncContextManager[Any]:
        return nest.turn(around)

    def within(
        self,
        connection: Any,
        *,
        record: RecordColumn | None = None,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> AsyncWithin:
        """Deliver inside a transaction that you own. See `Guard.within`."""
        self._check_column(record)
        return AsyncWithin(self, connection, record, self._asked(policy, fields, AsyncGuard.within))

    async def run(
        self,
        operation: str,
        key: Key,
        call: Callable[[], Awaitable[R]],
        *,
        returns: Any = Any,
        scope: str | None = None,
        payload: object = None,
        bypass: bool | str = False,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Outcome[R]:
        """Await `call` once for this key; a duplicate gets the stored result. See `Guard.run`."""
        if fields:
            policy = self._asked(policy, fields, AsyncGuard.run)
        request = self._request(operation, key, scope, payload, bypass=bypass)
        wanted = self._returns_now(call, returns, policy)
        outcome = self._answered(request, wanted, policy)
        return await drive_async(*self._deliver(request, call, wanted, policy)) if outcome is None else outcome

    async def run_batch(
        self,
        operation: str,
        messages: Sequence[M],
        *,
        key: Callable[[M], object],
        handler: Callable[[M], Awaitable[R]],
        returns: Any = Any,
        scope: str | Callable[[M], str] | None = None,
        payload: Callable[[M], object] | None = None,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> list[Outcome[R] | Exception]:
        """Await `handler` for each message that is new, one after the other. See `Guard.run_batch`."""
        policy = self._asked(policy, fields, AsyncGuard.run_batch)
        flows, context = self._deliver_all(operation, messages, key, handler, returns, scope, payload, policy)
        return [result for flow in flows for result in await drive_async(flow, context)]

    async def check(self) -> None:
        """Find mistakes now, and not at the first delivery: call it when a program starts.

        Raises `UsageError` for a missing driver, a store that cannot be written (a replica, missing tables that are not
        created, a missing permission), or one that drops records (a Redis that evicts); `StoreUnavailable` if the
        server does not answer. The message has every problem and its fix. It costs about a dozen round trips, creates
        the tables if the guard would, and leaves no record behind. `migrate_from` is checked, too.
        """
        await run_async(self._check_stores())

    async def read(self, operation: str, key: Key, *, scope: str | None = None) -> Record | None:
        """Return the record of this key, if there is one."""
        return await drive_async(self._read_through(read(self._by_hand(operation, key, scope))), self._context())

    async def resolve(
        self,
        operation: str,
        key: Key,
        resolution: Resolution,
        *,
        by: str,
        reason: str,
        scope: str | None = None,
        returns: Any = Any,
        only: Record | None = None,
    ) -> Record:
        """Settle a held record: `Done(value)`, `Failed(error)` or `Rerun()`. See `Guard.resolve`."""
        delivery = self._by_hand(operation, key, scope, returns)
        return await drive_async(
            self._read_through(resolve(delivery, resolution, by=by, reason=reason, at=moment(), only=only)),
            self._context(),
        )

    async def forget(self, operation: str, key: Key, *, scope: str | None = None, only: Record | None = None) -> bool:
        """Remove the record, so that the next delivery runs. Return False if there was none.

        Raises `InProgress` while it runs. With `only=`, a record from `read`, remove it only if nobody has written it
        since: a duplicate that was only counted in it does not matter.
        """
        return await drive_async(self._forget(self._by_hand(operation, key, scope), only), self._context())

    async def aclose(self) -> None:
        """Stop the heartbeat, and close the store if this guard opened it."""
        opened = self._shut()
        if opened is not None:
            await opened.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    if not TYPE_CHECKING:
        # A type checker says it better.

        def close(self) -> NoReturn:
            """Refuse what belongs to a `Guard`."""
            raise UsageError("an AsyncGuard is closed with `await guard.aclose()`, or by `async with`")

        def __enter__(self) -> NoReturn:
            raise UsageError("an AsyncGuard is async: write `async with AsyncGuard(...)`, or `with Guard(...)`")

        def __exit__(self, *_: object) -> None: ...


class AsyncWithin(WithinBase[AsyncGuard]):
    """An async guard inside a transaction that the caller owns. Created by `guard.within`."""

    async def run(
        self,
        operation: str,
        key: Key,
        call: Callable[[], Awaitable[R]],
        *,
        returns: Any = Any,
        scope: str | None = None,
        payload: object = None,
        bypass: bool | str = False,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Outcome[R]:
        """Await `call` once for this key, in the connection's transaction. See `Within.run`."""
        policy = self._asked(policy, fields, AsyncWithin.run)
        flow, context, nest = self._deliver(operation, key, call, returns, scope, payload, policy, bypass=bypass)
        async with _turn_in(nest):
            return await drive_async(flow, context)

    async def fresh(
        self,
        operation: str,
        messages: Sequence[M],
        *,
        key: Callable[[M], object],
        scope: str | Callable[[M], str] | None = None,
        payload: Callable[[M], object] | None = None,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Fresh[M]:
        """Find the new messages, and record them in the connection's transaction. See `Within.fresh`."""
        policy = self._asked(policy, fields, AsyncWithin.fresh)
        flow, context, nest = self._sort_out(operation, messages, key, scope, payload, policy)
        async with _turn_in(nest):
            return await drive_async(flow, context)


def _turn_in(nest: Nest | None) -> AbstractAsyncContextManager[None]:
    """Wait for anything else that runs inside a surrounding handler, on the same connection."""
    return nullcontext() if nest is None else nest.turn()
