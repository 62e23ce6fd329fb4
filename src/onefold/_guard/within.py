"""Make deliveries inside a transaction that the caller owns, for `Within` and `AsyncWithin`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from onefold._delivery.fresh import sort_out_all
from onefold._delivery.joined import join
from onefold._delivery.steps import Flow
from onefold._guard.base import GuardBase
from onefold._guard.context import DeliveryContext
from onefold._guard.options import nothing
from onefold._handlers.nested import Nest
from onefold._model import Fresh, Outcome, Policy
from onefold.current import transaction_around
from onefold.errors import UsageError
from onefold.transactions import Column, check_compared
from onefold.transactions import join as join_connection

G = TypeVar("G", bound=GuardBase)
M = TypeVar("M")


class WithinBase(Generic[G]):
    """A guard, a connection of the caller's, and the column of the caller's own table that is the record."""

    def __init__(self, guard: G, connection: Any, record: Column | None) -> None:
        self._guard = guard
        self._connection = connection
        self._record = record

    def _deliver(
        self,
        operation: str,
        key: object,
        call: Callable[[], Any],
        returns: Any,
        scope: str | None,
        fingerprint: object,
        policy: Policy | None,
        *,
        bypass: bool,
    ) -> tuple[Flow[Outcome[Any]], DeliveryContext, Nest | None]:
        """Return the flow of one delivery, what its driver works with, and what runs around it on the connection."""
        guard = self._guard
        check_compared(self._record, fingerprint)
        request = guard._request(operation, key, scope, fingerprint, bypass=bypass)
        policy = guard._joined_policy(policy)
        guard._check_outside(request, self._connection)
        nest = self._around()
        delivery = guard._make_delivery(request, call, guard._returns_now(call, returns, policy), policy)
        joined = join_connection(self._connection, self._record, is_async=guard._awaited)
        context = guard._context_on(joined, self._connection)
        return guard._read_through_joined(join(delivery, confirm=self._record is not None)), context, nest

    def _sort_out(
        self,
        operation: str,
        messages: Sequence[M],
        key: Callable[[M], object],
        scope: str | Callable[[M], str] | None,
        fingerprint: Callable[[M], object] | None,
        policy: Policy | None,
    ) -> tuple[Flow[Fresh[M]], DeliveryContext, Nest | None]:
        """Return the same for a batch whose handler nobody calls: the caller does the work."""
        guard, connection = self._guard, self._connection
        if self._record is not None:
            raise UsageError("fresh() writes records of its own, and cannot with record=. Use run() for each message")
        policy = guard._joined_policy(policy)
        deliveries = [
            guard._batch_deliveries(message, operation, key, nothing, Any, scope, fingerprint, policy, connection)
            for message in messages
        ]
        nest = self._around()
        context = guard._context_on(join_connection(connection, None, is_async=guard._awaited), connection)
        return guard._read_through_joined(sort_out_all(messages, deliveries)), context, nest

    def _around(self) -> Nest | None:
        """Return what runs inside of a handler around us. Raise `UsageError` where that is in another thread."""
        _, nest = transaction_around(self._connection)
        if nest is not None:
            nest.check_thread()
        return nest
