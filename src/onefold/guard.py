"""`Guard`, the entry point for sync code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast, overload

from onefold._delivery.batch import deliver_all
from onefold._delivery.drive import Flow, drive
from onefold._delivery.fresh import sort_out
from onefold._delivery.joined import join
from onefold._delivery.records import forget, read, resolve
from onefold._delivery.work import Work
from onefold._guard_base import BATCH_MAX, Front, moment, sorted_by, unwrap
from onefold._handlers.arguments import ALL, Call, FingerprintOf, KeyOf, ScopeOf, as_written
from onefold._heartbeat.beats import Heartbeat
from onefold._interrupts import When
from onefold._model import Fresh, Outcome, Policy, Record, Resolution
from onefold.codecs import Codec
from onefold.current import transaction_around
from onefold.events import Listener
from onefold.keys import Key
from onefold.stores.base import Batching
from onefold.stores.opening import StoreSource
from onefold.transactions import Column, check_compared
from onefold.transactions import join as join_connection

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


class Guard(Front):
    """Make at-least-once deliveries safe: anything delivered twice happens once.

    `store` is a URL (`memory:`), a `Store`, or a function that returns one, called on first use. A guard is
    thread-safe, nestable and fork-safe. It does not close a store that the caller passed in. `also_read` is the store
    that held the records before: its records count, and are moved when they are asked for.
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
        also_read: StoreSource | None = None,
    ) -> None:
        super().__init__(store, policy=policy, scope=scope, on_event=on_event, codec=codec, also_read=also_read)

    def idempotent(
        self,
        operation: str,
        *,
        key: KeyOf,
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
                asked = self._asked_by(call, args, kwargs, bypass=bypass)
                tools, wanted = self._tools(), result_type()
                work = self._work(asked, functools.partial(function, *args, **kwargs), wanted, policy)
                outcome = drive(self._deliver(work, tools), tools)
                return unwrap(outcome, asked, wanted) if bare else outcome

            return self._decorated(function, call, deliver)

        return decorate

    def _decorated(self, function: Callable[P, R], call: Call, deliver: Callable[..., Any]) -> Guarded[P, R]:
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
        key: KeyOf,
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
                asked = self._asked_by(call, args, kwargs, bypass=bypass)
                self._check_outside(asked)
                wanted = result_type()
                with self._transaction() as (transaction, flow):
                    work = self._work(asked, call.with_tx(args, kwargs, transaction), wanted, policy)
                    outcome = drive(flow(work), self._inside(transaction))
                return unwrap(outcome, asked, wanted) if bare else outcome

            return self._decorated(function, call, deliver)

        return decorate

    def _transaction(self) -> AbstractContextManager[tuple[Any, Callable[[Work], Flow[Outcome[Any]]]]]:
        """Return a transaction and the flow that belongs to it: one of our own, or the one that is open around us."""
        around, nest = transaction_around(self._tools().home)
        if nest is None:
            return self._own_transaction()
        nest.check_thread()
        return nullcontext((around, self._join))

    @contextmanager
    def _own_transaction(self) -> Iterator[tuple[Any, Callable[[Work], Flow[Outcome[Any]]]]]:
        with self._joinable().transaction() as transaction:
            yield transaction, self._transact

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
        asked = self._asked(operation, key, scope, fingerprint, bypass=bypass)
        tools = self._tools()
        work = self._work(asked, call, self._returns_now(call, returns, policy), policy)
        return drive(self._deliver(work, tools), tools)

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
        tools, returns = self._tools(), self._returns_now(handler, returns, policy)
        works = [
            self._batch_work(
                message, operation, key, functools.partial(handler, message), returns, scope, fingerprint, policy
            )
            for message in messages
        ]
        # If another store is read as well, it is read for each message.
        batching = isinstance(tools.store, Batching) and self._also_read is None
        results: list[Outcome[R] | Exception] = []
        for start in range(0, len(works), BATCH_MAX):
            flow = self._looking(deliver_all(works[start : start + BATCH_MAX], batching=batching))
            results += drive(flow, tools)
        return results

    def read(self, operation: str, key: Key, *, scope: str | None = None) -> Record | None:
        """Return the record of this key, if there is one."""
        return drive(self._looking(read(self._by_hand(operation, key, scope))), self._tools())

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
        work = self._by_hand(operation, key, scope, returns)
        return drive(self._looking(resolve(work, resolution, by=by, reason=reason, at=moment())), self._tools())

    def forget(self, operation: str, key: Key, *, scope: str | None = None, only: Record | None = None) -> bool:
        """Remove the record, so that the next delivery runs. False: there was none. `InProgress` while it runs.

        With `only=`, a record from `read`, remove it only if nobody has written it since.
        """
        return drive(self._looking(forget(self._by_hand(operation, key, scope), only)), self._tools())

    def close(self) -> None:
        """Stop the heartbeat, and close the store if this guard opened it."""
        with self._opening:
            opened, self._opened, self._closed = self._opened, None, True
        if opened is not None:
            opened.tools.close()
            for store in opened.to_close():
                store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Within:
    """A guard inside a transaction that the caller owns. Created by `guard.within`."""

    def __init__(self, guard: Guard, connection: Any, record: Column | None) -> None:
        self._guard = guard
        self._connection = connection
        self._record = record

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
        guard = self._guard
        check_compared(self._record, fingerprint)
        asked = guard._asked(operation, key, scope, fingerprint, bypass=bypass)
        policy = guard._joined_policy(policy)
        guard._check_outside(asked, self._connection)
        self._check_thread()
        work = guard._work(asked, call, guard._returns_now(call, returns, policy), policy)
        joined = join_connection(self._connection, self._record, awaited=False)
        tools = guard._tools_on(joined, self._connection)
        return drive(guard._looking_joined(join(work, confirm=self._record is not None)), tools)

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
        guard = self._guard
        works = guard._fresh_works(
            messages, operation, key, scope, fingerprint, policy, (self._connection, self._record)
        )
        self._check_thread()
        joined = join_connection(self._connection, None, awaited=False)
        tools = guard._tools_on(joined, self._connection)
        verdicts: list[bool | Exception] = []
        for start in range(0, len(works), BATCH_MAX):
            flow = guard._looking_joined(sort_out(works[start : start + BATCH_MAX]))
            try:
                verdicts += drive(flow, tools)
            except Exception:
                if verdicts:
                    # Earlier parts are recorded as done, but the caller never learns which: they must not be committed.
                    joined.spoil(When.AFTER)
                raise
        return sorted_by(messages, verdicts)

    def _check_thread(self) -> None:
        """Raise `UsageError` inside a handler of another thread on the same connection."""
        _, nest = transaction_around(self._connection)
        if nest is not None:
            nest.check_thread()
