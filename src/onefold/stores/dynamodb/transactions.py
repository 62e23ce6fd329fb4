"""Put the record into the caller's own `TransactWriteItems` on DynamoDB.

DynamoDB has no transaction that stays open, so there is none to be within. It has one request that writes up to a
hundred items, or none of them. `transact_item` creates the item for it: a record that is done, on the condition that
there is none yet. It commits with the work, or neither does. Nothing here sends a request, except to learn the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Unpack

from onefold._delivery import decide as _decide
from onefold._delivery.claim import answer
from onefold._delivery.decide import Then
from onefold._delivery.work import Delivery, done_ending, ended_entry
from onefold._model import Entry, Outcome
from onefold._model.policy import Policy, PolicyFields
from onefold.errors import UsageError
from onefold.stores.dynamodb import AsyncDynamoDBStore, DynamoDBStore
from onefold.stores.dynamodb.clock import Now
from onefold.stores.dynamodb.errors import problem_of
from onefold.stores.dynamodb.items import Item, Requests, record_of, text_of
from onefold.stores.dynamodb.records import fitting

if TYPE_CHECKING:
    from onefold.guard import Guard
    from onefold.guard_async import AsyncGuard
    from onefold.keys import Key

CANCELLED: Final = "TransactionCanceledException"


class TransactItem:
    """One delivery as an item for `transact_write_items`. Created by `transact_item`; good for one delivery.

    `item` is for a client, `resource_item` for the client of a boto3 resource. `request_token` makes the request safe
    to repeat if its answer got lost: pass it as `ClientRequestToken`.
    """

    def __init__(self, delivery: Delivery, value: Any, table: str, now: Now) -> None:
        self._delivery = delivery
        self._value = value
        self._now = now
        self._entry = fitting(_entry(delivery, value), delivery.request.address)
        request = Requests(table).claim(self._entry, 1, now)
        self.item: dict[str, Any] = {"Put": request.parameters}
        # At most 36 characters are allowed.
        self.request_token = self._entry.token.hex()

    @property
    def resource_item(self) -> dict[str, Any]:
        """Return the item in Python types, for `boto3.resource("dynamodb").meta.client`."""
        from boto3.dynamodb.types import TypeDeserializer

        python = TypeDeserializer().deserialize
        put = self.item["Put"]
        return {
            "Put": put
            | {
                part: {name: python(value) for name, value in put[part].items()}
                for part in ("Item", "ExpressionAttributeValues")
            }
        }

    def outcome(self, error: BaseException) -> Outcome[Any] | None:
        """Return what the error of `transact_write_items` means for this delivery; None: nothing, so raise it again.

        For a duplicate: the outcome of the first one, replayed. For the same item, sent again after its answer got
        lost: its own outcome. Raises `KeyReused`, `InProgress` and `Held` as a guard does.
        """
        item = self._in_the_way(error)
        if item is None:
            return None
        found = record_of(item, self._now)
        if found.token == self._entry.token:
            return Outcome(kept=self._value)
        then = _decide.decide(found, self._delivery.request, self._delivery.policy)
        settled = answer(self._delivery, found, Then.REFUSE_RUNNING if then is Then.RUN else then)
        if settled is not None:
            return settled
        address = self._delivery.request.address
        raise UsageError(
            f"{address.operation} [key {address.digest}]: its record is {found.state.value}, as guard.run leaves it, "
            "and an operation has one mode. Nothing was written. Settle it with guard.run, or forget it"
        )

    def _in_the_way(self, error: BaseException) -> Item | None:
        """Return the record that refused this item. Other refusals in the same transaction are the caller's."""
        problem = problem_of(error) if isinstance(error, Exception) else None
        if problem is None or problem.code != CANCELLED:
            return None
        ours = {"S": text_of(self._entry.address)}
        for reason in getattr(error, "response", {}).get("CancellationReasons", ()):
            item: Item = reason.get("Item") or {}
            if reason.get("Code") == "ConditionalCheckFailed" and item.get("address") == ours and "token" in item:
                return item
        return None


def transact_item(
    guard: Guard,
    operation: str,
    key: Key,
    *,
    value: Any = None,
    returns: Any = Any,
    scope: str | None = None,
    payload: object = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> TransactItem:
    """Return the item that remembers this delivery in your own `transact_write_items`.

    `value` is what a duplicate gets, if anything. The same key with another `payload` is refused. The time is
    DynamoDB's own; if the guard's store does not know it yet, this asks once.
    """
    policy = guard._asked(policy, fields, transact_item)
    delivery = _delivery_of(guard, operation, key, returns, scope, payload, policy)
    store = _checked(guard.store, DynamoDBStore)
    return TransactItem(delivery, value, store.table, store.now())


async def transact_item_async(
    guard: AsyncGuard,
    operation: str,
    key: Key,
    *,
    value: Any = None,
    returns: Any = Any,
    scope: str | None = None,
    payload: object = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> TransactItem:
    """Return the item for an `AsyncGuard`; see `transact_item`."""
    policy = guard._asked(policy, fields, transact_item)
    delivery = _delivery_of(guard, operation, key, returns, scope, payload, policy)
    store = _checked(guard.store, AsyncDynamoDBStore)
    return TransactItem(delivery, value, store.table, await store.now())


def _delivery_of(
    guard: Guard | AsyncGuard,
    operation: str,
    key: object,
    returns: Any,
    scope: str | None,
    payload: object,
    policy: Policy | None,
) -> Delivery:
    request = guard._request(operation, key, scope, payload)
    return guard._make_delivery(request, _nothing, returns, guard._chosen(policy))


def _entry(delivery: Delivery, value: Any) -> Entry:
    """Return the record, done at once, with its result."""
    entry = _decide.entry(Then.RUN, None, delivery.request, delivery.policy, delivery.mint())
    return ended_entry(entry, done_ending(delivery, value, 1))


def _checked(store: Any, wanted: Any) -> Any:
    if not isinstance(store, wanted):
        raise UsageError(
            f"transact_item is for a guard on DynamoDB, but this one is on {type(store).__name__}. "
            "In a database with transactions use guard.within(connection)"
        )
    return store


def _nothing() -> None:
    """Do nothing: the caller's own request does the work."""
