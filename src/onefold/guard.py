"""`Guard`, the entry point for sync code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast, overload

from onefold._delivery.drive import drive
from onefold._delivery.records import forget, read, resolve
from onefold._guard.base import GuardBase
from onefold._guard.options import moment, unwrap
from onefold._guard.within import WithinBase
from onefold._handlers.arguments import ALL, FingerprintOf, GuardedFunction, KeyArgument, ScopeOf, as_written
from onefold._handlers.nested import Nest
from onefold._heartbeat.threaded import Heartbeat
from onefold._model import Fresh, Outcome, Policy, Record, Resolution
from onefold.codecs import Codec
from onefold.events import Listener
from onefold.keys import Key
from onefold.stores.opening import StoreSource
from onefold.transactions import Column

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M")


class Guarded(Protocol[P, R]):
    """A decorated function: called as before, with two additional ways to call it."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it, or replay its result. Raises `ResultNotKept` on a replay without a stored result."""

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Run or replay it, and return what happened: `Outcome(value, replayed, attempt, ...)`."""

    def bypass(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Run it once more on purpose, although it is finished."""

    @overload
    def __get__(self, instance: None, owner: type) -> Guarded[P, R]: ...
    @overload
    def __get__(self: Guarded[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> Guarded[Q, R]: ...


class Guard(GuardBase):
    """Make at-least-once deliveries safe: anything delivered twice happens once.

    `store` is a URL (`memory:`), a `Store`, or a function that returns one, called on first use. A guard is
    thread-safe, nestable and fork-safe. It does not close a store that the caller passed in. `migrate_from` is the
    store that held the records before: its records count, and are moved when they are asked for.
    """

    _conduct = staticmethod(drive)
    _heartbeat = Heartbeat

    def __init__(
        self,
        store: StoreSource,
        *,
        policy: Policy | None = None,
        scope: str | Callable[[], str | None] | None = None,
        on_event: Listener | Iterable[Listener] = (),
        codec: Codec | None = None,
        migrate_from: StoreSource | None = None,
    ) -> None:
        super().__init__(store, policy=policy, scope=scope, on_event=on_event, codec=codec, migrate_from=migrate_from)

    def idempotent(
        self,
        operation: str,
        *,
        key: KeyArgument,
        scope: ScopeOf = None,
        fingerprint: FingerprintOf = ALL,
        policy: Policy | None = None,
        returns: Any = Any,
    ) -> Callable[[Callable[P, R]], Guarded[P, R]]:
        """Decorate a function: claim its key, run it, remember what it returned.

        `key` is an argument's name, several names, or a function of the arguments. The fingerprint covers all other
        arguments, those that `fingerprint` names, or (None) nothing. `scope` is one string for all calls, or a function
        of the arguments. `returns` is the type of the result, if there is no annotation. The function raises
        `KeyReused`, `InProgress`, `OnHold`, `ClaimLost`, `ResultNotKept`, `StoreUnavailable`, `MissingKey`, and its own
        errors.
        """

        def decorate(function: Callable[P, R]) -> Guarded[P, R]:
            call, result_type = self._prepared(function, operation, key, scope, fingerprint, policy, returns)

            def deliver(args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool, bare: bool) -> Any:
                request = self._request_of_call(call, args, kwargs, bypass=bypass)
                wanted = result_type()
                handler = functools.partial(function, *args, **kwargs)
                outcome = drive(*self._deliver(request, handler, wanted, policy))
                return unwrap(outcome, request, wanted) if bare else outcome

            return self._decorated(function, call, deliver)

        return decorate

    def _decorated(self, function: Callable[P, R], call: GuardedFunction, deliver: Callable[..., Any]) -> Guarded[P, R]:
        """Wrap the function for its callers, with its three ways to be called."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            value: R = deliver(args, kwargs, bypass=False, bare=True)
            return value

        def outcome(*args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", deliver(args, kwargs, bypass=False, bare=False))

        def bypass(*args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
            return cast("Outcome[R]", deliver(args, kwargs, bypass=True, bare=False))

        return cast("Guarded[P, R]", as_written(guarded, call, outcome=outcome, bypass=bypass))

    def transactional(
        self,
        operation: str,
        *,
        key: KeyArgument,
        scope: ScopeOf = None,
        fingerprint: FingerprintOf = ALL,
        policy: Policy | None = None,
        returns: Any = Any,
    ) -> Callable[[Callable[P, R]], Guarded[P, R]]:
        """Decorate a function that works on rows in the guard's own database: the record commits with them, or neither.

        The function gets the transaction as its argument `tx`, which its callers do not see; give it a default for type
        checkers: `tx: Connection = TX`. Serialization failures and deadlocks are retried in a new transaction. Inside
        another transactional function of the same guard it joins that one's transaction.
        """

        def decorate(function: Callable[P, R]) -> Guarded[P, R]:
            prepared = self._prepared(function, operation, key, scope, fingerprint, policy, returns, injects_tx=True)
            call, result_type = prepared

            def deliver(args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool, bare: bool) -> Any:
                request = self._request_of_call(call, args, kwargs, bypass=bypass)
                self._check_outside(request)
                wanted = result_type()
                around, flow = self._transaction()
                with around as transaction:
                    delivery = self._make_delivery(
                        request, call.with_tx(args, kwargs, transaction), wanted, self._chosen(policy)
                    )
                    outcome = drive(flow(delivery), self._inside(transaction))
                return unwrap(outcome, request, wanted) if bare else outcome

            return self._decorated(function, call, deliver)

        return decorate

    def _nested(self, around: Any, nest: Nest) -> AbstractContextManager[Any]:
        nest.check_thread()
        return nullcontext(around)

    def within(self, connection: Any, *, record: Column | None = None) -> Within:
        """Deliver inside a transaction that you own: the record is written on your connection, and commits with it.

        `record` names the column of your own table that serves as the record, if there is one.
        """
        self._check_column(record)
        return Within(self, connection, record)

    def run(
        self,
        operation: str,
        key: Key,
        call: Callable[[], R],
        *,
        returns: Any = Any,
        scope: str | None = None,
        fingerprint: object = None,
        policy: Policy | None = None,
        bypass: bool = False,
    ) -> Outcome[R]:
        """Run `call` once for this key; a duplicate gets the stored result.

        `fingerprint` is the payload itself: the same key with a different payload is refused. Without it nothing is
        compared. `bypass=True` runs it although it is finished; if that fails, the earlier outcome stands.
        """
        request = self._request(operation, key, scope, fingerprint, bypass=bypass)
        return drive(*self._deliver(request, call, self._returns_now(call, returns, policy), policy))

    def run_batch(
        self,
        operation: str,
        messages: Sequence[M],
        *,
        key: Callable[[M], object],
        handler: Callable[[M], R],
        returns: Any = Any,
        scope: str | Callable[[M], str] | None = None,
        fingerprint: Callable[[M], object] | None = None,
        policy: Policy | None = None,
    ) -> list[Outcome[R] | Exception]:
        """Call `handler` for each new message; return outcomes or errors in the order of the messages.

        One round trip claims all, one ends all. One poison message never fails its neighbours; of messages with equal
        keys one runs, and the others share its outcome.
        """
        flows, context = self._deliver_all(operation, messages, key, handler, returns, scope, fingerprint, policy)
        return [result for flow in flows for result in drive(flow, context)]

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
    ) -> Record:
        """Settle a held record: `done(value)`, `failed(error)` or `rerun()`. The record keeps who, when and why.

        Its late owner, if there is one, is refused from now on. A record resolved by hand can be resolved again, to
        correct it: `record.history` has both. Return the record as it was before.
        """
        delivery = self._by_hand(operation, key, scope, returns)
        return drive(
            self._read_through(resolve(delivery, resolution, by=by, reason=reason, at=moment())), self._context()
        )

    def forget(self, operation: str, key: Key, *, scope: str | None = None, only: Record | None = None) -> bool:
        """Remove the record, so that the next delivery runs. False: there was none. `InProgress` while it runs.

        With `only=`, a record from `read`, remove it only if nobody has written it since.
        """
        return drive(self._read_through(forget(self._by_hand(operation, key, scope), only)), self._context())

    def close(self) -> None:
        """Stop the heartbeat, and close the store if this guard opened it."""
        for store in self._close():
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        fingerprint: object = None,
        policy: Policy | None = None,
        bypass: bool = False,
    ) -> Outcome[R]:
        """Run `call` once for this key, in the connection's transaction; a duplicate gets the stored result.

        Raises `NotInTransaction` if none is open. If `call` raises, the record is removed, so that a caller who catches
        the error and commits does not lose the delivery.
        """
        flow, context, _ = self._deliver(operation, key, call, returns, scope, fingerprint, policy, bypass=bypass)
        return drive(flow, context)

    def fresh(
        self,
        operation: str,
        messages: Sequence[M],
        *,
        key: Callable[[M], object],
        scope: str | Callable[[M], str] | None = None,
        fingerprint: Callable[[M], object] | None = None,
        policy: Policy | None = None,
    ) -> Fresh[M]:
        """Find the new messages, and record them as done in the connection's transaction, in one statement.

        Process `new` and commit: the records and the work are committed together, or neither. Acknowledge `new` and
        `seen` after that, and never `unsettled`. Raises `NotInTransaction` if no transaction is open.
        """
        flow, context, _ = self._sort_out(operation, messages, key, scope, fingerprint, policy)
        return drive(flow, context)
