"""Make deliveries inside a transaction that the caller owns, for `Within` and `AsyncWithin`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from onefold._concurrency.generators import Flow
from onefold._delivery.fresh import prove_rows, sort_out_all, sort_out_rows
from onefold._delivery.joined import join
from onefold._delivery.work import Delivery
from onefold._guard.base import GuardBase
from onefold._guard.context import DeliveryContext
from onefold._guard.options import check_of_message, nothing
from onefold._handlers.nested import Nest
from onefold._model import Entry, Fresh, Outcome
from onefold._model.policy import Policy
from onefold.current import transaction_around
from onefold.errors import UsageError
from onefold.stores import background_purge
from onefold.transactions import RecordColumn, check_compared
from onefold.transactions import join as join_connection

G = TypeVar("G", bound=GuardBase)
M = TypeVar("M")


class RowBatch(Generic[M]):
    """A batch in a caller's transaction whose records are rows: sort it out, do the work, and prove its rows.

    Each of the two returns its result or, on an async guard, an awaitable of it.
    """

    def __init__(
        self, sorting: Flow[Fresh[M]], proving: Flow[None], conduct: Callable[..., Any], context: DeliveryContext
    ) -> None:
        self._sorting, self._proving = sorting, proving
        self._conduct, self._context = conduct, context

    def fresh(self) -> Any:
        return self._conduct(self._sorting, self._context)

    def prove(self) -> Any:
        return self._conduct(self._proving, self._context)


class WithinBase(Generic[G]):
    """A guard, a caller's connection, and the column of the caller's own table that is the record."""

    def __init__(self, guard: G, connection: Any, record: RecordColumn | None, policy: Policy | None) -> None:
        self._guard = guard
        self._connection = connection
        self._record = record
        self._policy = policy

    def _asked(self, policy: Policy | None, fields: Mapping[str, Any], of: Callable[..., Any]) -> Policy | None:
        """Return the policy of one call: its own, or that of all calls on this connection."""
        return self._guard._asked(self._policy if policy is None else policy, fields, of)

    def _deliver(
        self,
        operation: str,
        key: object,
        call: Callable[[], Any],
        returns: Any,
        scope: str | None,
        payload: object,
        policy: Policy | None,
        *,
        bypass: bool | str,
    ) -> tuple[Flow[Outcome[Any]], DeliveryContext, Nest | None]:
        """Return the flow of one delivery, the context for its driver, and the nest that it runs in, if any."""
        guard = self._guard
        check_compared(self._record, payload)
        request = guard._request(operation, key, scope, payload, bypass=bypass)
        policy = guard._joined_policy(policy)
        guard._check_outside(request, self._connection)
        nest = self._around()
        delivery = guard._make_delivery(request, call, guard._returns_now(call, returns, policy), policy)
        context = guard._context_on(self._joined(1), self._connection)
        return guard._read_through_joined(join(delivery, confirm=self._record is not None)), context, nest

    def _sort_out(
        self,
        operation: str,
        messages: Sequence[M],
        key: Callable[[M], object],
        scope: str | Callable[[M], str] | None,
        payload: Callable[[M], object] | None,
        policy: Policy | None,
    ) -> tuple[Flow[Fresh[M]], DeliveryContext, Nest | None]:
        """Return the same for a batch without a handler: the caller does the work."""
        guard, connection = self._guard, self._connection
        check_of_message(key, "key")
        if payload is not None:
            check_of_message(payload, "payload")
        if self._record is not None:
            raise UsageError("fresh() writes records of its own, which record= rules out. Use run() for each message")
        deliveries = self._batched(operation, messages, key, scope, payload, policy)
        nest = self._around()
        context = guard._context_on(self._joined(len(messages)), connection)
        return guard._read_through_joined(sort_out_all(messages, deliveries)), context, nest

    def _sort_out_rows(
        self,
        operation: str,
        messages: Sequence[M],
        key: Callable[[M], object],
        payload: Callable[[M], object] | None,
        policy: Policy | None,
    ) -> RowBatch[M]:
        """Return the flows of a batch whose records are rows that the caller writes, for a queue's adapter."""
        guard, connection, won = self._guard, self._connection, list[tuple[Delivery, Entry]]()
        check_compared(self._record, payload)
        deliveries = self._batched(operation, messages, key, None, payload, policy)
        joined = join_connection(connection, self._record, is_async=guard._is_async)
        context = guard._context_on(joined, connection)
        return RowBatch(sort_out_rows(messages, deliveries, won), prove_rows(won), guard._conduct, context)

    def _batched(
        self,
        operation: str,
        messages: Sequence[M],
        key: Callable[[M], object],
        scope: str | Callable[[M], str] | None,
        payload: Callable[[M], object] | None,
        policy: Policy | None,
    ) -> list[Delivery | Exception]:
        guard, connection = self._guard, self._connection
        policy = guard._joined_policy(policy)
        return [
            guard._batch_deliveries(message, operation, key, nothing, Any, scope, payload, policy, connection)
            for message in messages
        ]

    def _joined(self, deliveries: int) -> Any:
        """Return the store inside the caller's transaction; maybe have a little purged after the commit."""
        guard = self._guard
        joined = join_connection(self._connection, self._record, is_async=guard._is_async)
        purge_after_commit = getattr(joined, "purge_after_commit", None)
        if purge_after_commit is not None:
            due = background_purge.batches_due(deliveries)
            if due and guard._purges():
                purge_after_commit(due)
        return joined

    def _around(self) -> Nest | None:
        """Return the nest of a surrounding handler, if any. Raise `UsageError` if that handler is in another thread."""
        _, nest = transaction_around(self._connection)
        if nest is not None:
            nest.check_thread()
        return nest
