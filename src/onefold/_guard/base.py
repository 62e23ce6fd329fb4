"""Make deliveries for `Guard` and `AsyncGuard`, which add the driver, the heartbeat, and `async` and `await`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from onefold._delivery.batch import BATCH_MAX, deliver_all
from onefold._delivery.claim import deliver
from onefold._delivery.joined import join, transact
from onefold._delivery.migration import looking_back, looking_back_first, looking_back_joined
from onefold._delivery.seen import look
from onefold._delivery.steps import Flow
from onefold._delivery.work import Work
from onefold._forks import set_lock
from onefold._guard.context import Opened, Place, Toolbox
from onefold._guard.options import Options
from onefold._handlers.arguments import named_scope
from onefold._handlers.nested import Nest
from onefold._heartbeat.loops import AsyncHeartbeat
from onefold._heartbeat.threaded import Heartbeat
from onefold._model import Asked, Outcome, Policy
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
        also_read: Any = None,
    ) -> None:
        check_source(store, awaited=self._awaited)
        if also_read is not None:
            check_source(also_read, awaited=self._awaited)
            if also_read is store or also_read == store:
                raise UsageError("also_read= names the store itself: name the one in which the records were before")
        super().__init__(policy, scope, on_event, codec)
        self._source = store
        self._also_read = also_read
        self._opened: Opened | None = None
        set_lock(self, "_opening")
        self._closed = False

    @property
    def store(self) -> Any:
        """The store, opened if it was not yet."""
        return self._tools().store

    @property
    def source(self) -> Any:
        """What the store is made of, as it was passed: a URL (with its password), a client, a store, or a function."""
        return self._source

    def check_policy(self, policy: Policy | None) -> None:
        """Raise `UsageError` for a policy that no delivery of this guard could have."""
        self._chosen(policy)

    def _tools(self) -> Toolbox:
        opened = self._opened
        return self._open().tools if opened is None else opened.tools

    def _open(self) -> Opened:
        with self._opening:
            if self._closed:
                raise UsageError("this guard is closed")
            if self._opened is None:
                store, ours = open_store(self._source, awaited=self._awaited)
                old, old_is_ours = None, False
                if self._also_read is not None:
                    old, old_is_ours = open_store(self._also_read, awaited=self._awaited)
                self._opened = Opened(self._toolbox(store), ours, old, old_is_ours)
            return self._opened

    def _close(self) -> list[Any]:
        """Stop the heartbeat, refuse further deliveries, and return the stores that are ours to close."""
        with self._opening:
            opened, self._opened, self._closed = self._opened, None, True
        if opened is None:
            return []
        opened.tools.close()
        return opened.to_close()

    def _looking(self, flow: Flow[T]) -> Flow[T]:
        """The flow, with what the store knows that is read as well."""
        return flow if self._also_read is None else looking_back(flow, self._open().old)

    def _transact(self, work: Work) -> Flow[Outcome[Any]]:
        flow = transact(work)
        if self._also_read is None:
            return flow
        return looking_back_first(flow, work.asked.address, self._open().old, self.store)

    def _join(self, work: Work) -> Flow[Outcome[Any]]:
        return self._looking_joined(join(work))

    def _looking_joined(self, flow: Flow[T]) -> Flow[T]:
        return flow if self._also_read is None else looking_back_joined(flow, self._open().old, self.store)

    def _toolbox(self, store: Any) -> Toolbox:
        """For deliveries that claim."""
        heartbeat = self._heartbeat(lambda: store, self._tell)
        return Toolbox(store, self._codec, self._tell, self._conduct, awaits=self._awaited, heartbeat=heartbeat)

    def _tools_on(self, joined: Any, connection: Any) -> Toolbox:
        """For deliveries inside a transaction of the caller's: no claim is to be kept alive there."""
        return Toolbox(joined, self._codec, self._tell, self._conduct, awaits=self._awaited, home=connection)

    def _inside(self, transaction: Any) -> Toolbox:
        """For deliveries inside a transaction of our own."""
        home = self._tools().home
        return Toolbox(
            transaction,
            self._codec,
            self._tell,
            self._conduct,
            awaits=self._awaited,
            home=home,
            transaction=transaction,
        )

    def _check_column(self, record: object) -> None:
        if record is not None and self._also_read is not None:
            raise UsageError("record= keeps the records in your own table: there is no also_read= for them")

    def _joinable(self) -> Joinable:
        store = self.store
        if not isinstance(store, Joinable):
            raise UsageError(
                f"{type(store).__name__} has no transactions of its own: use a store in your database, such as "
                "sqlite:///app.db, or guard.within(connection)"
            )
        return store

    def _swap(self, source: Any) -> Place:
        """Put another store in place; the answer is what was there. For `onefold.testing.use`."""
        check_source(source, awaited=self._awaited)
        return self._put(Place(source))

    def _put(self, place: Place) -> Place:
        with self._opening:
            before = Place(self._source, self._also_read, self._opened, self._closed)
            self._source, self._also_read, self._opened, self._closed = place
        return before

    def _check_outside(self, asked: Asked, home: object = None) -> None:
        if is_inside(asked.address, self._tools().home if home is None else home):
            raise InsideItself.about(asked.address)

    def _deliver(
        self, asked: Asked, call: Callable[[], Any], returns: Any, policy: Policy | None
    ) -> tuple[Flow[Outcome[Any]], Toolbox]:
        """Return the flow of one delivery, and what its driver works with."""
        tools = self._tools()
        work = self._work(asked, call, returns, self._chosen(policy))
        if is_inside(asked.address, tools.home):
            raise InsideItself.about(asked.address)
        flow = look(work) if work.policy.mode == "seen" else deliver(work)
        return flow if self._also_read is None else self._looking(flow), tools

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
    ) -> tuple[list[Flow[list[Outcome[Any] | Exception]]], Toolbox]:
        """Return the flows of a batch, each of at most BATCH_MAX messages, and what their driver works with."""
        tools, returns = self._tools(), self._returns_now(handler, returns, policy)
        policy = self._chosen(policy)
        works = [
            self._batch_work(
                message, operation, key, functools.partial(handler, message), returns, scope, fingerprint, policy
            )
            for message in messages
        ]
        # Where another store is read as well, it is read for each message.
        batching = isinstance(tools.store, Batching) and self._also_read is None
        flows = [
            self._looking(deliver_all(works[start : start + BATCH_MAX], batching=batching))
            for start in range(0, len(works), BATCH_MAX)
        ]
        return flows, tools

    def _transaction(self) -> tuple[Any, Callable[[Work], Flow[Outcome[Any]]]]:
        """Return a context manager around a transaction, and the flow for it: our own, or the one open around us."""
        around, nest = transaction_around(self._tools().home)
        if nest is None:
            return self._joinable().transaction(), self._transact
        return self._nested(around, nest), self._join

    def _nested(self, around: Any, nest: Nest) -> Any:
        """Return a context manager that gives the transaction around us, once it is our turn in it."""
        raise NotImplementedError

    def _batch_work(
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
    ) -> Work | Exception:
        """The work for one message; where its key is unusable, the error that takes its place."""
        try:
            whose = named_scope(scope(message), f"{operation}: scope=") if callable(scope) else scope
            payload = None if fingerprint is None else fingerprint(message)
            asked = self._asked(operation, key(message), whose, payload)
            self._check_outside(asked, home)
            return self._work(asked, call, returns, policy)
        except Exception as error:  # noqa: BLE001 - one poison message never fails its neighbours
            return error

    def __repr__(self) -> str:
        source = self._source
        shown = repr(without_password(source)) if isinstance(source, str) else type(source).__name__
        return f"{type(self).__name__}({shown})"
