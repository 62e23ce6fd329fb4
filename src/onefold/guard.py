"""`Guard`, the entry point for sync code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import (
    TYPE_CHECKING,
    Any,
    Never,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from onefold._concurrency.generators import run
from onefold._delivery.drive import drive
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
from onefold._heartbeat.sync_guards import Heartbeat
from onefold._model import Fresh, Outcome, Record, Resolution
from onefold._model.policy import Policy, PolicyFields
from onefold.codecs import Codec
from onefold.durations import Duration
from onefold.errors import UsageError
from onefold.events import Listener
from onefold.keys import Key
from onefold.stores.hand_made import HandMadeTable
from onefold.stores.sources import StoreSource
from onefold.transactions import RecordColumn

if TYPE_CHECKING:
    from datetime import datetime

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M")


class Guarded(Protocol[P, R]):
    """A decorated function: called as before, with two additional ways to call it."""

    __name__: str
    __wrapped__: Callable[..., Any]
    # What its deliveries follow: the guard's policy, with what the decorator changes.
    policy: Policy

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it, or replay its result. Raises `ResultNotKept` on a replay without a stored result."""

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Run or replay it, and return what happened: `Outcome(value, replayed, attempt, ...)`."""

    def bypass(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Run it once more on purpose, although it is finished."""

    # Of a class: a class method, or another function. Of an instance: a method, a class method, or a static one.
    @overload
    def __get__(self: Method[S, Q, R], instance: None, owner: S) -> Guarded[Q, R]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Guarded[P, R]: ...
    @overload
    def __get__(self: Method[S, Q, R], instance: S, owner: type | None = None) -> Guarded[Q, R]: ...
    @overload
    def __get__(self: Method[S, Q, R], instance: object, owner: S) -> Guarded[Q, R]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Guarded[P, R]: ...


class UseAnAsyncGuard(Protocol):
    """An async function on a sync guard, to type checkers: it cannot be called. At runtime it is refused."""


class Decorator(Protocol):
    """A decorator of sync functions."""

    @overload
    def __call__(self, function: Callable[P, Never], /) -> Guarded[P, Never]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[..., Coroutine[Any, Any, Any]], /
    ) -> UseAnAsyncGuard: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Guarded[P, R]: ...


class Guard(GuardBase):
    """Make at-least-once deliveries safe: anything delivered twice happens once.

    `store` is a URL (`memory:`), a `Store`, or a function that returns one, called on first use. A guard is
    thread-safe, nestable and fork-safe. It does not close a store that the caller passed in. `migrate_from` is the
    store that held the records before: its records count, and each is moved when a delivery needs it. It may also be a
    `HandMadeTable`: its rows count as done, and it is only read. `keep`, `after_crash` and the other fields of a
    `Policy` are keywords here, and of every call.
    """

    _conduct = staticmethod(drive)
    _heartbeat = Heartbeat

    def __init__(
        self,
        store: StoreSource,
        *,
        scope: GuardScope = None,
        on_event: Listener | Iterable[Listener] = (),
        codec: Codec | None = None,
        migrate_from: StoreSource | HandMadeTable | None = None,
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
    ) -> Decorator:
        """Decorate a function: claim its key, run it, remember what it returned.

        `key` is an argument's name, several names, or a function of the arguments. The fingerprint covers all other
        arguments, those that `fingerprint` names, or nothing if it is None. `scope` names a tenant as `key` does
        a key. `returns` is the type of the result, if there is no annotation. Fields of a policy change the guard's.
        The function raises `KeyReused`, `InProgress`, `Held`, `ClaimLost`, `ResultNotKept`, `StoreUnavailable`,
        `MissingKey`, and its own errors.
        """

        policy = self._asked(policy, fields, Guard.idempotent)

        def decorate(function: Callable[P, R]) -> Guarded[P, R]:
            call, result_type = self._prepared(function, operation, key, scope, fingerprint, policy, returns)

            def deliver(args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool | str, bare: bool) -> Any:
                request = call.request(args, kwargs, bypass=bypass)
                wanted = result_type()
                outcome = self._answered(request, wanted, policy)
                if outcome is None:
                    handler = functools.partial(function, *args, **kwargs)
                    outcome = drive(*self._deliver(request, handler, wanted, policy))
                return (outcome.value if outcome.omitted else outcome.kept) if bare else outcome

            return self._decorated(function, call, self._chosen(policy), deliver)

        return cast("Decorator", decorate)

    def _decorated(
        self, function: Callable[P, R], call: GuardedFunction, policy: Policy, deliver: Callable[..., Any]
    ) -> Guarded[P, R]:
        """Wrap the function for its callers, with its three ways to be called."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            value: R = deliver(args, kwargs, bypass=False, bare=True)
            return value

        def outcome(*args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", deliver(args, kwargs, bypass=False, bare=False))

        def bypass(*args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", deliver(args, kwargs, bypass=True, bare=False))

        # For consumers: `onefold redrive --bypass` names its runs.
        def bypass_as(name: str, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", deliver(args, kwargs, bypass=named_bypass(name), bare=False))

        ways: dict[str, Callable[..., Any]] = {"outcome": outcome, "bypass": bypass, "bypass_as": bypass_as}
        return cast("Guarded[P, R]", as_written(guarded, call, policy, **ways))

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
    ) -> Decorator:
        """Decorate a function that works on rows in the guard's database: rows and record commit together, or neither.

        The function gets the transaction as its argument `tx`, which its callers do not see; give it a default for type
        checkers: `tx: Connection = TX`. Serialization failures and deadlocks are retried in a new transaction. Inside
        another transactional function of the same guard it joins that one's transaction. `record` names the column of
        your own table that serves as the record, if there is one.
        """

        policy = self._asked(policy, fields, Guard.transactional)
        self._check_own_row(record, fingerprint, policy)

        def decorate(function: Callable[P, R]) -> Guarded[P, R]:
            prepared = self._prepared(function, operation, key, scope, fingerprint, policy, returns, injects_tx=True)
            call, result_type = prepared

            def deliver(args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool | str, bare: bool) -> Any:
                request = call.request(args, kwargs, bypass=bypass)
                self._check_outside(request)
                wanted = result_type()
                around, flow = self._transaction(record)
                with around as transaction:
                    delivery = self._make_delivery(
                        request, call.with_tx(args, kwargs, transaction), wanted, self._chosen(policy)
                    )
                    outcome = drive(flow(delivery), self._inside(transaction, record))
                return (outcome.value if outcome.omitted else outcome.kept) if bare else outcome

            return self._decorated(function, call, self._chosen(policy), deliver)

        return cast("Decorator", decorate)

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
    ) -> Decorator:
        """Decorate a job that several schedulers call: it runs once for each planned time, which is its key.

        With `every`, the planned times are at regular intervals in UTC (from `anchor`, by default a Monday at
        midnight), and a call belongs to the last one, or to one that begins within `early`. Otherwise the scheduler
        says for which time it was planned: see `onefold.schedulers`. A parameter `planned` gets that time, and a caller
        may pass it; a parameter `tx` makes the job transactional. `keep` is at least three intervals; a second
        scheduler waits for the first, and takes over if it dies. Raises what `idempotent` does, and `UsageError` for a
        planned time so long ago that its record may be forgotten.
        """
        from onefold._schedule.planned import planned_slots, scheduled

        times = planned_slots(every, anchor, early)
        options = {"scope": scope, "fingerprint": fingerprint, "returns": returns}
        return cast("Decorator", scheduled(self, operation, times, policy, fields, options))

    def _nested(self, around: Any, nest: Nest) -> AbstractContextManager[Any]:
        nest.check_thread()
        return nullcontext(around)

    def within(
        self,
        connection: Any,
        *,
        record: RecordColumn | None = None,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Within:
        """Deliver inside a transaction that you own: the record is written on your connection, and commits with it.

        `record` names the column of your own table that serves as the record, if there is one.
        """
        self._check_column(record)
        return Within(self, connection, record, self._asked(policy, fields, Guard.within))

    def run(
        self,
        operation: str,
        key: Key,
        call: Callable[[], R],
        *,
        returns: Any = Any,
        scope: str | None = None,
        payload: object = None,
        bypass: bool | str = False,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Outcome[R]:
        """Run `call` once for this key; a duplicate gets the stored result.

        The same key with a different `payload` is refused. Without one nothing is compared. Fields of a policy change
        the guard's. `bypass=True` runs it although it is finished; if that fails, the earlier outcome stands.
        `bypass="ticket 4711"` does so once: the record's history keeps this name, and deliveries under a name that has
        run to its end are duplicates.
        """
        if fields:
            policy = self._asked(policy, fields, Guard.run)
        request = self._request(operation, key, scope, payload, bypass=bypass)
        wanted = self._returns_now(call, returns, policy)
        outcome = self._answered(request, wanted, policy)
        return drive(*self._deliver(request, call, wanted, policy)) if outcome is None else outcome

    def run_batch(
        self,
        operation: str,
        messages: Sequence[M],
        *,
        key: Callable[[M], object],
        handler: Callable[[M], R],
        returns: Any = Any,
        scope: str | Callable[[M], str] | None = None,
        payload: Callable[[M], object] | None = None,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> list[Outcome[R] | Exception]:
        """Call `handler` for each new message; return outcomes or errors in the order of the messages.

        One round trip claims all, one ends all. One poison message never fails its neighbours; of messages with equal
        keys one runs, and the others share its outcome.
        """
        policy = self._asked(policy, fields, Guard.run_batch)
        flows, context = self._deliver_all(operation, messages, key, handler, returns, scope, payload, policy)
        return [result for flow in flows for result in drive(flow, context)]

    def check(self) -> None:
        """Find mistakes now, and not at the first delivery: call it when a program starts.

        Raises `UsageError` for a missing driver, a store that cannot be written (a replica, missing tables that are not
        created, a missing permission), or one that drops records (a Redis that evicts); `StoreUnavailable` if the
        server does not answer. The message has every problem and its fix. It costs about a dozen round trips, creates
        the tables if the guard would, and leaves no record behind. `migrate_from` is checked, too.
        """
        run(self._check_stores())

    def read(self, operation: str, key: Key, *, scope: str | None = None) -> Record | None:
        """Return the record of this key, if there is one."""
        return drive(self._read_through(read(self._by_hand(operation, key, scope))), self._context())

    def resolve(
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
        """Settle a held record: `Done(value)`, `Failed(error)` or `Rerun()`. The record keeps who, when and why.

        Its late owner, if there is one, is refused from now on. A record resolved by hand can be resolved again, to
        correct it: `record.history` has both. With `only=`, a record from `read`, settle it only if it has not changed
        since. Return the record as it was before.
        """
        delivery = self._by_hand(operation, key, scope, returns)
        return drive(
            self._read_through(resolve(delivery, resolution, by=by, reason=reason, at=moment(), only=only)),
            self._context(),
        )

    def forget(self, operation: str, key: Key, *, scope: str | None = None, only: Record | None = None) -> bool:
        """Remove the record, so that the next delivery runs. Return False if there was none.

        Raises `InProgress` while it runs. With `only=`, a record from `read`, remove it only if nobody has written it
        since: a duplicate that was only counted in it does not matter.
        """
        return drive(self._forget(self._by_hand(operation, key, scope), only), self._context())

    def close(self) -> None:
        """Stop the heartbeat, and close the store if this guard opened it."""
        opened = self._shut()
        if opened is not None:
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:
        # A type checker says it better.

        def aclose(self) -> NoReturn:
            """Refuse what belongs to an `AsyncGuard`."""
            raise UsageError("a Guard is not async: close it with guard.close(), or use `with`")

        async def __aenter__(self) -> NoReturn:
            raise UsageError("a Guard is not async: write `with Guard(...)`, or `async with AsyncGuard(...)`")

        async def __aexit__(self, *_: object) -> None: ...


class Within(WithinBase[Guard]):
    """A guard inside a transaction that the caller owns. Created by `guard.within`."""

    def run(
        self,
        operation: str,
        key: Key,
        call: Callable[[], R],
        *,
        returns: Any = Any,
        scope: str | None = None,
        payload: object = None,
        bypass: bool | str = False,
        policy: Policy | None = None,
        **fields: Unpack[PolicyFields],
    ) -> Outcome[R]:
        """Run `call` once for this key, in the connection's transaction; a duplicate gets the stored result.

        Raises `NotInTransaction` if none is open. If `call` raises, the record is removed, so that a caller who catches
        the error and commits does not lose the delivery.
        """
        policy = self._asked(policy, fields, Within.run)
        flow, context, _ = self._deliver(operation, key, call, returns, scope, payload, policy, bypass=bypass)
        return drive(flow, context)

    def fresh(
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
        """Find the new messages, and record them as done in the connection's transaction, in one statement.

        Process `new` and commit: both the records and the work are committed, or neither is. Acknowledge `new` and
        `seen` after that, and never `unsettled`. Raises `NotInTransaction` if no transaction is open.
        """
        policy = self._asked(policy, fields, Within.fresh)
        flow, context, _ = self._sort_out(operation, messages, key, scope, payload, policy)
        return drive(flow, context)
