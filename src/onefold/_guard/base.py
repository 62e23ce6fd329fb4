"""Make deliveries for `Guard` and `AsyncGuard`, which add the driver, the heartbeat, and `async` and `await`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from onefold._concurrency.forks import set_lock
from onefold._delivery.batch import BATCH_MAX, deliver_all
from onefold._delivery.claim import deliver
from onefold._delivery.joined import join, transact
from onefold._delivery.migration import read_through, read_through_first, read_through_joined
from onefold._delivery.seen import look
from onefold._delivery.steps import Flow
from onefold._delivery.work import Delivery
from onefold._guard.context import DeliveryContext, Opened, StoreSlot
from onefold._guard.options import Options
from onefold._handlers.arguments import named_scope
from onefold._handlers.nested import Nest
from onefold._heartbeat.loops import AsyncHeartbeat
from onefold._heartbeat.threaded import Heartbeat
from onefold._model import DeliveryRequest, Outcome, Policy
from onefold.codecs import Codec
from onefold.current import is_inside, transaction_around
from onefold.errors import InsideItself, UsageError
from onefold.events import Listener
from onefold.stores.base import Batching, Joinable
from onefold.stores.opening import check_source, open_store, without_password

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
        *,
        policy: Policy | None = None,
        scope: str | Callable[[], str | None] | None = None,
        on_event: Listener | Iterable[Listener] = (),
        codec: Codec | None = None,
        migrate_from: Any = None,
    ) -> None:
        check_source(store, is_async=self._awaited)
        if migrate_from is not None:
            check_source(migrate_from, is_async=self._awaited)
            if migrate_from is store or migrate_from == store:
                raise UsageError("migrate_from= names the store itself: name the one in which the records were before")
        super().__init__(policy, scope, on_event, codec)
        self._source = store
        self._migrate_from = migrate_from
        self._opened: Opened | None = None
        set_lock(self, "_opening")
        self._closed = False

    @property
    def store(self) -> Any:
        """The store, opened if it was not yet."""
        return self._context().store

    @property
    def source(self) -> Any:
        """What the store is made of, as it was passed: a URL (with its password), a client, a store, or a function."""
        return self._source

    def check_policy(self, policy: Policy | None) -> None:
        """Raise `UsageError` for a policy that no delivery of this guard could have."""
        self._chosen(policy)

    def _context(self) -> DeliveryContext:
        opened = self._opened
        return self._open().context if opened is None else opened.context

    def _open(self) -> Opened:
        with self._opening:
            if self._closed:
                raise UsageError("this guard is closed")
            if self._opened is None:
                store, ours = open_store(self._source, is_async=self._awaited)
                old, old_is_ours = None, False
                if self._migrate_from is not None:
                    old, old_is_ours = open_store(self._migrate_from, is_async=self._awaited)
                self._opened = Opened(self._make_context(store), ours, old, old_is_ours)
            return self._opened

    def _close(self) -> list[Any]:
        """Stop the heartbeat, refuse further deliveries, and return the stores that are ours to close."""
        with self._opening:
            opened, self._opened, self._closed = self._opened, None, True
        if opened is None:
            return []
        opened.context.close()
        return opened.to_close()

    def _read_through(self, flow: Flow[T]) -> Flow[T]:
        """The flow, with what the store knows that is read as well."""
        return flow if self._migrate_from is None else read_through(flow, self._open().old)

    def _transact(self, delivery: Delivery) -> Flow[Outcome[Any]]:
        flow = transact(delivery)
        if self._migrate_from is None:
            return flow
        return read_through_first(flow, delivery.request.address, self._open().old, self.store)

    def _join(self, delivery: Delivery) -> Flow[Outcome[Any]]:
        return self._read_through_joined(join(delivery))

    def _read_through_joined(self, flow: Flow[T]) -> Flow[T]:
        return flow if self._migrate_from is None else read_through_joined(flow, self._open().old, self.store)

    def _make_context(self, store: Any) -> DeliveryContext:
        """For deliveries that claim."""
        heartbeat = self._heartbeat(lambda: store, self._tell)
        return DeliveryContext(store, self._codec, self._tell, self._conduct, awaits=self._awaited, heartbeat=heartbeat)

    def _context_on(self, joined: Any, connection: Any) -> DeliveryContext:
        """For deliveries inside a transaction of the caller's: no claim is to be kept alive there."""
        return DeliveryContext(joined, self._codec, self._tell, self._conduct, awaits=self._awaited, home=connection)

    def _inside(self, transaction: Any) -> DeliveryContext:
        """For deliveries inside a transaction of our own."""
        home = self._context().home
        return DeliveryContext(
            transaction,
            self._codec,
            self._tell,
            self._conduct,
            awaits=self._awaited,
            home=home,
            transaction=transaction,
        )

    def _check_column(self, record: object) -> None:
        if record is not None and self._migrate_from is not None:
            raise UsageError("record= keeps the records in your own table: there is no migrate_from= for them")

    def _joinable(self) -> Joinable:
        store = self.store
        if not isinstance(store, Joinable):
            raise UsageError(
                f"{type(store).__name__} has no transactions of its own: use a store in your database, such as "
                "sqlite:///app.db, or guard.within(connection)"
            )
        return store

    def _swap(self, source: Any) -> StoreSlot:
        """Put another store in place; the answer is what was there. For `onefold.testing.use`."""
        check_source(source, is_async=self._awaited)
        return self._put(StoreSlot(source))

    def _put(self, slot: StoreSlot) -> StoreSlot:
        with self._opening:
            before = StoreSlot(self._source, self._migrate_from, self._opened, self._closed)
            self._source, self._migrate_from, self._opened, self._closed = slot
        return before

    def _check_outside(self, request: DeliveryRequest, home: object = None) -> None:
        if is_inside(request.address, self._context().home if home is None else home):
            raise InsideItself.about(request.address)

    def _deliver(
        self, request: DeliveryRequest, call: Callable[[], Any], returns: Any, policy: Policy | None
    ) -> tuple[Flow[Outcome[Any]], DeliveryContext]:
        """Return the flow of one delivery, and what its driver works with."""
        context = self._context()
        delivery = self._make_delivery(request, call, returns, self._chosen(policy))
        if is_inside(request.address, context.home):
            raise InsideItself.about(request.address)
        flow = look(delivery) if delivery.policy.mode == "seen" else deliver(delivery)
        return flow if self._migrate_from is None else self._read_through(flow), context

    def _deliver_all(
        self,
        operation: str,
        messages: Sequence[M],
        key: Callable[[M], object],
        handler: Callable[[M], Any],
        returns: Any,
        scope: str | Callable[[M], str] | None,
        fingerprint: Callable[[M], object] | None,
        policy: Policy | None,
    ) -> tuple[list[Flow[list[Outcome[Any] | Exception]]], DeliveryContext]:
        """Return the flows of a batch, each of at most BATCH_MAX messages, and what their driver works with."""
        context, returns = self._context(), self._returns_now(handler, returns, policy)
        policy = self._chosen(policy)
        deliveries = [
            self._batch_deliveries(
                message, operation, key, functools.partial(handler, message), returns, scope, fingerprint, policy
            )
            for message in messages
        ]
        # Where another store is read as well, it is read for each message.
        batching = isinstance(context.store, Batching) and self._migrate_from is None
        flows = [
            self._read_through(deliver_all(deliveries[start : start + BATCH_MAX], batching=batching))
            for start in range(0, len(deliveries), BATCH_MAX)
        ]
        return flows, context

    def _transaction(self) -> tuple[Any, Callable[[Delivery], Flow[Outcome[Any]]]]:
        """Return a context manager around a transaction, and the flow for it: our own, or the one open around us."""
        around, nest = transaction_around(self._context().home)
        if nest is None:
            return self._joinable().transaction(), self._transact
        return self._nested(around, nest), self._join

    def _nested(self, around: Any, nest: Nest) -> Any:
        """Return a context manager that gives the transaction around us, once it is our turn in it."""
        raise NotImplementedError

    def _batch_deliveries(
        self,
        message: M,
        operation: str,
        key: Callable[[M], object],
        call: Callable[[], Any],
        returns: Any,
        scope: str | Callable[[M], str] | None,
        fingerprint: Callable[[M], object] | None,
        policy: Policy,
        home: object = None,
    ) -> Delivery | Exception:
        """The work for one message; where its key is unusable, the error that takes its place."""
        try:
            whose = named_scope(scope(message), f"{operation}: scope=") if callable(scope) else scope
            payload = None if fingerprint is None else fingerprint(message)
            request = self._request(operation, key(message), whose, payload)
            self._check_outside(request, home)
            return self._make_delivery(request, call, returns, policy)
        except Exception as error:  # noqa: BLE001 - one poison message never fails its neighbours
            return error

    def __repr__(self) -> str:
        source = self._source
        shown = repr(without_password(source)) if isinstance(source, str) else type(source).__name__
        return f"{type(self).__name__}({shown})"
