"""Make deliveries for `Guard` and `AsyncGuard`, which add the driver, the heartbeat, and `async` and `await`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from onefold._concurrency.forks import set_lock
from onefold._concurrency.generators import Flow
from onefold._delivery.batch import BATCH_MAX, deliver_all
from onefold._delivery.claim import deliver
from onefold._delivery.decide import replays
from onefold._delivery.joined import join, transact
from onefold._delivery.migration import (
    Old,
    read_through,
    read_through_first,
    read_through_joined,
    read_through_to_forget,
)
from onefold._delivery.records import forget
from onefold._delivery.seen import look
from onefold._delivery.work import Delivery, replay
from onefold._guard.context import DeliveryContext, Opened, StoreSlot
from onefold._guard.options import Options, check_of_message, mint
from onefold._handlers.arguments import GuardScope, name_of, named_scope
from onefold._handlers.nested import Nest
from onefold._heartbeat.async_guards import AsyncHeartbeat
from onefold._heartbeat.sync_guards import Heartbeat
from onefold._model import DeliveryRequest, Outcome, Record
from onefold._model.policy import Policy
from onefold.codecs import Codec
from onefold.current import around, is_inside, transaction_around
from onefold.errors import InsideItself, StoreUnavailable, UsageError
from onefold.events import Listener
from onefold.stores.background_purge import is_switched_off
from onefold.stores.base import Annotating, Batching, Joinable, RowJoinable
from onefold.stores.hand_made import HandMadeTable, open_lookup
from onefold.stores.opening import check_source, open_store, without_password, without_transactions
from onefold.transactions import RecordColumn, check_compared
from onefold.transactions import checked as checked_column
from onefold.transactions import join as join_connection

T = TypeVar("T")
M = TypeVar("M")


class GuardBase(Options):
    """Options, checks and the making of deliveries: each as a flow, and the context in which a driver performs it."""

    # Sync or async: the driver of flows, and the heartbeat.
    _conduct: Callable[..., Any]
    _heartbeat: type[Heartbeat | AsyncHeartbeat]
    _opening: threading.Lock

    def __init__(
        self,
        store: Any,
        migrate_from: Any,
        policy: Policy | None,
        fields: Mapping[str, Any],
        scope: GuardScope,
        on_event: Listener | Iterable[Listener],
        codec: Codec | None,
    ) -> None:
        check_source(store, is_async=self._is_async)
        if migrate_from is not None:
            self._check_old(migrate_from, store)
        super().__init__(policy, fields, scope, on_event, codec)
        self._source = store
        self._migrate_from = migrate_from
        self._opened: Opened | None = None
        set_lock(self, "_opening")
        self._closed = False

    def _check_old(self, migrate_from: Any, store: Any) -> None:
        if isinstance(migrate_from, HandMadeTable):
            # It may be in the database of the store.
            migrate_from.check_database(is_async=self._is_async)
            return
        if isinstance(migrate_from, str) and ":" not in migrate_from:
            raise UsageError(
                f"migrate_from={migrate_from!r} is not the URL of a store. If it is a table of your own, pass "
                f"migrate_from=HandMadeTable(url, {migrate_from!r}, key='message_id', operation='credit')"
            )
        check_source(migrate_from, is_async=self._is_async)
        if migrate_from is store or migrate_from == store:
            raise UsageError("migrate_from= names the store itself: name the one that has the records so far")

    @property
    def store(self) -> Any:
        """Return the store; open it on first use."""
        return self._context().store

    @property
    def source(self) -> Any:
        """Return the store as it was passed: a URL (with its password), a client, a store, or a function."""
        return self._source

    def check_policy(self, policy: Policy | None) -> None:
        """Raise `UsageError` for a policy that no delivery of this guard could have."""
        self._chosen(policy)

    def check_handler(self, operation: str, handler: Callable[..., Any]) -> None:
        """Warn, once, if another function has this operation on this guard: they would share their records."""
        self._tell_if_shared(operation, handler)

    def _check_stores(self) -> Flow[None]:
        """Return the flow that finds problems of the stores before a delivery does."""
        from onefold.health.startup import check

        opened = self._open()
        is_table = isinstance(self._migrate_from, HandMadeTable)
        return check(repr(self), opened.context.store, opened.old, old_is_table=is_table)

    def _context(self) -> DeliveryContext:
        opened = self._opened
        return self._open().context if opened is None else opened.context

    def _open(self) -> Opened:
        with self._opening:
            if self._closed:
                raise UsageError(
                    f"this guard is closed: {self!r}. Nothing ran. Close it after its last delivery; a test that needs "
                    "it again lends it a store: with onefold.testing.use(guard, 'memory:')"
                )
            if self._opened is None:
                store, ours = open_store(self._source, is_async=self._is_async)
                old, old_is_ours = None, False
                if isinstance(self._migrate_from, HandMadeTable):
                    old, old_is_ours = open_lookup(self._migrate_from, self._codec, is_async=self._is_async), True
                elif self._migrate_from is not None:
                    old, old_is_ours = open_store(self._migrate_from, is_async=self._is_async)
                self._opened = Opened(self._make_context(store), ours, old, old_is_ours)
            return self._opened

    def _shut(self) -> Opened | None:
        """Refuse further deliveries; return what was opened, for the caller to close."""
        with self._opening:
            opened, self._opened, self._closed = self._opened, None, True
        return opened

    @property
    def _old(self) -> Old:
        return Old(self._open().old, only_read=isinstance(self._migrate_from, HandMadeTable))

    def _read_through(self, flow: Flow[T]) -> Flow[T]:
        """Wrap a flow so that the records of `migrate_from` count as well, if it is set."""
        return flow if self._migrate_from is None else read_through(flow, self._old)

    def _forget(self, delivery: Delivery, only: Record | None) -> Flow[bool]:
        flow = forget(delivery, only)
        if self._migrate_from is None:
            return flow
        return read_through_to_forget(flow, delivery.request.address, self._old)

    def _transact(self, delivery: Delivery) -> Flow[Outcome[Any]]:
        flow = transact(delivery)
        if self._migrate_from is None:
            return flow
        return read_through_first(flow, delivery.request.address, self._old, self.store)

    def _join(self, delivery: Delivery) -> Flow[Outcome[Any]]:
        return self._read_through_joined(join(delivery))

    def _read_through_joined(self, flow: Flow[T]) -> Flow[T]:
        return flow if self._migrate_from is None else read_through_joined(flow, self._old, self.store)

    def _make_context(self, store: Any) -> DeliveryContext:
        """Make the context for deliveries that claim."""
        heartbeat = self._heartbeat(lambda: store, self._tell)
        return DeliveryContext(
            store,
            self._codec,
            self._tell,
            self._conduct,
            awaits=self._is_async,
            heartbeat=heartbeat,
            # Of its own class: one that inherits it may have changed what a claim does.
            find_done=store.find_done if "find_done" in vars(type(store)) and self._migrate_from is None else None,
        )

    def _purges(self) -> bool:
        """Return whether expired records are removed in the background: it opens no store to find out."""
        opened = self._opened
        return not is_switched_off(self._source if opened is None else opened.context.store)

    def _context_on(self, joined: Any, connection: Any) -> DeliveryContext:
        """Make the context for deliveries inside a caller's transaction: there is no claim to keep alive."""
        return DeliveryContext(joined, self._codec, self._tell, self._conduct, awaits=self._is_async, home=connection)

    def _inside(self, transaction: Any, record: RecordColumn | None = None) -> DeliveryContext:
        """Make the context for deliveries inside a transaction of our own.

        In a nested one, whose records are rows: as for a caller's, on the connection of the one around it.
        """
        if record is not None and transaction_around(self._context().home)[1] is not None:
            tx = transaction.tx
            return self._context_on(join_connection(tx, record, is_async=self._is_async), tx)
        home = self._context().home
        return DeliveryContext(
            transaction,
            self._codec,
            self._tell,
            self._conduct,
            awaits=self._is_async,
            home=home,
            transaction=transaction,
        )

    def _check_column(self, record: RecordColumn | None) -> None:
        if record is None:
            return
        checked_column(record)
        if self._migrate_from is not None:
            raise UsageError("record= keeps the records in your own table: there is no migrate_from= for them")

    def _check_own_row(self, record: RecordColumn | None, fingerprint: object, policy: Policy | None) -> None:
        """Raise `UsageError` for what a row of the caller's cannot keep in a transaction of our own."""
        if record is None:
            return
        self._check_column(record)
        check_compared(record, fingerprint, "fingerprint")
        if self._chosen(policy).final_errors:
            raise UsageError(
                f"record={record!r} cannot remember a failure: the rollback removes the row. Leave record= out, or "
                "pass final_errors=()"
            )

    def _joinable(self) -> Joinable:
        store: Joinable = self.store
        # `isinstance(store, Joinable)`, which takes a tenth of a delivery on Python 3.11.
        if not hasattr(store, "transaction"):
            raise UsageError(
                f"{type(store).__name__} has no transactions of its own: use a store in your database, such as "
                "sqlite:///app.db, or guard.within(connection)"
            )
        return store

    def _row_transaction(self, record: RecordColumn) -> Any:
        store = self._joinable()
        if not isinstance(store, RowJoinable):
            raise UsageError(
                f"{type(store).__name__} has no records in rows of yours, which record= asks for. Nothing ran. Leave "
                "record= out, or use guard.within(connection, record=...)"
            )
        return store.row_transaction(record)

    def _check_injects_tx(self, function: Callable[..., Any]) -> None:
        kind = without_transactions(self._source)
        if kind:
            raise UsageError(
                f"{name_of(function)}() is transactional, and {kind} has no transactions of its own: use a store in "
                "your database, such as sqlite:///app.db, or guard.within(connection)"
            )

    def _swap(self, source: Any) -> StoreSlot:
        """Replace the store, and return the previous one. For `onefold.testing.use`."""
        check_source(source, is_async=self._is_async)
        return self._put(StoreSlot(source))

    def _put(self, slot: StoreSlot) -> StoreSlot:
        with self._opening:
            before = StoreSlot(self._source, self._migrate_from, self._opened, self._closed)
            self._source, self._migrate_from, self._opened, self._closed = slot
        return before

    def _check_outside(self, request: DeliveryRequest, home: object = None) -> None:
        if is_inside(request.address, self._context().home if home is None else home):
            raise InsideItself.about(request.address)

    def _answered(self, request: DeliveryRequest, returns: Any, policy: Policy | None) -> Outcome[Any] | None:
        """Return the replay of a record that is done, if the store finds it without waiting; None: deliver.

        Such a duplicate needs no flow, no token, and no handler.
        """
        opened = self._opened
        if opened is None or (find_done := opened.context.find_done) is None:
            return None
        try:
            found = find_done(request.address)
        except StoreUnavailable:
            # The flow meets it again, and does what the policy says.
            return None
        if found is None or not replays(found, request):
            return None
        if around() is not None and is_inside(request.address, opened.context.home):
            return None
        if (self.policy if policy is None else self._checked(policy)).count_duplicates:
            return None
        return replay(found, request.address, returns, self._codec, self._tell)

    def _deliver(
        self, request: DeliveryRequest, call: Callable[[], Any], returns: Any, policy: Policy | None
    ) -> tuple[Flow[Outcome[Any]], DeliveryContext]:
        """Return the flow of one delivery, and the context for its driver."""
        # `_context`, `_chosen` and `_make_delivery`, without calling them: every delivery comes here, and a call is a
        # fiftieth of it.
        opened = self._opened
        context = self._open().context if opened is None else opened.context
        chosen = self.policy if policy is None else self._checked(policy)
        delivery = Delivery(request, chosen, call, returns, self._codec, self._tell, mint)
        if around() is not None and is_inside(request.address, context.home):
            raise InsideItself.about(request.address)
        if chosen.count_duplicates:
            _check_counts(context.store)
        flow = look(delivery) if chosen.mode == "seen" else deliver(delivery)
        return flow if self._migrate_from is None else self._read_through(flow), context

    def _deliver_all(
        self,
        operation: str,
        messages: Sequence[M],
        key: Callable[[M], object],
        handler: Callable[[M], Any],
        returns: Any,
        scope: str | Callable[[M], str] | None,
        payload: Callable[[M], object] | None,
        policy: Policy | None,
    ) -> tuple[list[Flow[list[Outcome[Any] | Exception]]], DeliveryContext]:
        """Return the flows of a batch, each of at most BATCH_MAX messages, and the context for their driver."""
        check_of_message(key, "key")
        if payload is not None:
            check_of_message(payload, "payload")
        context, returns = self._context(), self._returns_now(handler, returns, policy)
        policy = self._chosen(policy)
        if policy.count_duplicates:
            _check_counts(context.store)
        deliveries = [
            self._batch_deliveries(
                message, operation, key, functools.partial(handler, message), returns, scope, payload, policy
            )
            for message in messages
        ]
        # With `migrate_from`, the old store is read for each message.
        batching = isinstance(context.store, Batching) and self._migrate_from is None
        flows = [
            self._read_through(deliver_all(deliveries[start : start + BATCH_MAX], batching=batching))
            for start in range(0, len(deliveries), BATCH_MAX)
        ]
        return flows, context

    def _transaction(self, record: RecordColumn | None) -> tuple[Any, Callable[[Delivery], Flow[Outcome[Any]]]]:
        """Return a context manager around a transaction, and the flow for it: our own, or the one open around us."""
        around, nest = transaction_around(self._context().home)
        if nest is not None:
            return self._nested(around, nest), self._join if record is None else partial(join, confirm=True)
        if record is None:
            return self._joinable().transaction(), self._transact
        return self._row_transaction(record), partial(transact, confirm=True)

    def _nested(self, around: Any, nest: Nest) -> Any:
        """Return a context manager that yields the surrounding transaction, once it is our turn in it."""
        raise NotImplementedError

    def _batch_deliveries(
        self,
        message: M,
        operation: str,
        key: Callable[[M], object],
        call: Callable[[], Any],
        returns: Any,
        scope: str | Callable[[M], str] | None,
        payload: Callable[[M], object] | None,
        policy: Policy,
        home: object = None,
    ) -> Delivery | Exception:
        """Return the delivery of one message or, if its key is unusable, the error in its place."""
        try:
            whose = named_scope(scope(message), f"{operation}: scope= returned") if callable(scope) else scope
            compared = None if payload is None else payload(message)
            request = self._request(operation, key(message), whose, compared)
            self._check_outside(request, home)
            return self._make_delivery(request, call, returns, policy)
        except Exception as error:  # noqa: BLE001 - one poison message never fails its neighbours
            return error

    def __repr__(self) -> str:
        source = self._source
        shown = repr(without_password(source)) if isinstance(source, str) else type(source).__name__
        return f"{type(self).__name__}({shown})"


def _check_counts(store: Any) -> None:
    if not isinstance(store, Annotating):
        raise UsageError(
            f"{type(store).__name__} cannot count duplicates in its records, as count_duplicates=True asks for: it has "
            "no annotate(). Nothing ran. Leave count_duplicates= out, and count them with onefold.report.Absorbed"
        )
