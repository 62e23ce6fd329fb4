"""The record as an item of the caller's own TransactWriteItems: it commits with the work, or neither does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, InProgress, KeyReused, Outcome, Policy, UsageError
from onefold._model import Address, State
from onefold.stores.dynamodb import ITEM_MAX, AsyncDynamoDBStore, DynamoDBStore
from onefold.stores.dynamodb.transactions import TransactItem, transact_item, transact_item_async
from onefold.testing import Clock
from services.proxy import Proxy
from tests.stores.dynamodb.tools import answered, client_options, counted, entry, plain_client, table_of


@pytest.fixture
def client(dynamodb_url: str) -> Iterator[Any]:
    with plain_client(dynamodb_url) as client:
        yield client


@pytest.fixture
def guard(dynamodb_url: str, client: Any) -> Iterator[Guard]:
    with Guard(DynamoDBStore(table_of(dynamodb_url), client=client)) as guard:
        yield guard


@pytest.fixture
def wallet(guard: Guard, client: Any) -> str:
    """The name of a table of the application's own, with 100 on the account of asha."""
    name = f"{guard.store.table}_wallet"
    client.create_table(
        TableName=name,
        AttributeDefinitions=[{"AttributeName": "account", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "account", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    client.put_item(TableName=name, Item={"account": {"S": "asha"}, "balance": {"N": "100"}})
    return name


def paid(wallet: str, amount: int = 40) -> dict[str, Any]:
    """The caller's own part: it must not go below zero."""
    return {
        "Update": {
            "TableName": wallet,
            "Key": {"account": {"S": "asha"}},
            "UpdateExpression": "SET balance = balance - :amount",
            "ConditionExpression": "balance >= :amount",
            "ExpressionAttributeValues": {":amount": {"N": str(amount)}},
        }
    }


def send(client: Any, delivery: TransactItem, *work: dict[str, Any]) -> Outcome[Any] | None:
    """As a user writes it. None: it was new, and is done now."""
    try:
        client.transact_write_items(TransactItems=[*work, delivery.item], ClientRequestToken=delivery.request_token)
    except client.exceptions.TransactionCanceledException as error:
        outcome = delivery.outcome(error)
        if outcome is None:
            raise
        return outcome
    return None


def balance(client: Any, wallet: str) -> int:
    found = client.get_item(TableName=wallet, Key={"account": {"S": "asha"}}, ConsistentRead=True)
    return int(found["Item"]["balance"]["N"])


def test_work_and_record_are_written_together(guard: Guard, client: Any, wallet: str) -> None:
    assert send(client, transact_item(guard, "pay", "m1", value="paid 40"), paid(wallet)) is None

    assert balance(client, wallet) == 60
    record = guard.read("pay", "m1")
    assert record is not None
    assert (record.state, record.attempt, record.revision) == (State.DONE, 1, 1)
    assert 86_000 < record.ttl_left < 86_410


def test_a_duplicate_is_answered_from_the_record_and_does_nothing(guard: Guard, client: Any, wallet: str) -> None:
    send(client, transact_item(guard, "pay", "m1", value="paid 40"), paid(wallet))

    outcome = send(client, transact_item(guard, "pay", "m1", value="other"), paid(wallet))

    assert outcome is not None
    assert (outcome.value, outcome.replayed) == ("paid 40", True)
    assert balance(client, wallet) == 60


def test_a_duplicate_is_seen_although_the_work_is_refused_too(guard: Guard, client: Any, wallet: str) -> None:
    send(client, transact_item(guard, "pay", "m1"), paid(wallet, 100))

    outcome = send(client, transact_item(guard, "pay", "m1"), paid(wallet, 100))

    assert outcome is not None
    assert outcome.replayed


def test_where_the_work_is_refused_nothing_is_remembered(guard: Guard, client: Any, wallet: str) -> None:
    delivery = transact_item(guard, "pay", "m1")

    with pytest.raises(client.exceptions.TransactionCanceledException):
        send(client, delivery, paid(wallet, 1_000))

    assert guard.read("pay", "m1") is None
    delivery = transact_item(guard, "pay", "m1")
    assert send(client, delivery, paid(wallet, 40)) is None
    assert balance(client, wallet) == 60


def test_of_many_deliveries_at_once_one_does_the_work(guard: Guard, client: Any, wallet: str) -> None:
    def deliver(number: int) -> Outcome[Any] | None:
        return send(client, transact_item(guard, "pay", "m1", value=number), paid(wallet, 10))

    with ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(deliver, range(6)))

    winner = outcomes.index(None)
    assert [outcome.value for outcome in outcomes if outcome is not None] == [winner] * 5
    assert balance(client, wallet) == 90


def test_a_guard_replays_what_a_transaction_recorded(guard: Guard, client: Any, wallet: str) -> None:
    send(client, transact_item(guard, "pay", "m1", value=[1, "two"], payload={"amount": 40}), paid(wallet))

    outcome = guard.run("pay", "m1", lambda: pytest.fail("it ran"), payload={"amount": 40})
    assert (outcome.value, outcome.replayed) == ([1, "two"], True)
    with pytest.raises(KeyReused):
        guard.run("pay", "m1", lambda: pytest.fail("it ran"), payload={"amount": 41})


def test_the_same_key_with_another_payload_is_refused(guard: Guard, client: Any, wallet: str) -> None:
    send(client, transact_item(guard, "pay", "m1", payload={"amount": 40}), paid(wallet))

    with pytest.raises(KeyReused):
        send(client, transact_item(guard, "pay", "m1", payload={"amount": 41}), paid(wallet))

    assert balance(client, wallet) == 60


def test_scopes_and_operations_stay_apart(guard: Guard, client: Any, wallet: str) -> None:
    for delivery in (
        transact_item(guard, "pay", "m1"),
        transact_item(guard, "refund", "m1"),
        transact_item(guard, "pay", "m1", scope="acme"),
        transact_item(guard, "pay", 1),
    ):
        assert send(client, delivery) is None

    assert send(client, transact_item(guard, "pay", "1")) is not None


def test_a_lost_reply_is_resolved_by_sending_it_again(
    guard: Guard, client: Any, wallet: str, dynamodb_url: str
) -> None:
    delivery = transact_item(guard, "pay", "m1")
    with Proxy(dynamodb_url) as proxy, plain_client(proxy.url()) as behind:
        fault = proxy.cut_after(b"TransactWriteItems")

        # The client library does it by itself.
        assert send(behind, delivery, paid(wallet)) is None

    assert fault.reached.is_set()
    assert balance(client, wallet) == 60


def test_a_lost_reply_that_is_resolved_late_meets_its_own_record(guard: Guard, client: Any, wallet: str) -> None:
    delivery = transact_item(guard, "pay", "m1", value="paid 40")
    send(client, delivery, paid(wallet))

    # After ten minutes DynamoDB has forgotten the request token.
    delivery.request_token = "another-request"
    outcome = send(client, delivery, paid(wallet))

    assert outcome is not None
    assert (outcome.value, outcome.replayed) == ("paid 40", False)
    assert balance(client, wallet) == 60


def test_an_expired_record_is_taken_over(dynamodb_url: str, client: Any, wallet: str) -> None:
    clock = Clock(1_900_000_000.0)
    with Guard(DynamoDBStore(table_of(dynamodb_url), client=client, clock=clock), policy=Policy(keep="1h")) as guard:
        assert send(client, transact_item(guard, "pay", "m1"), paid(wallet, 10)) is None
        clock.advance("59m")
        assert send(client, transact_item(guard, "pay", "m1"), paid(wallet, 10)) is not None
        clock.advance("2m")
        assert send(client, transact_item(guard, "pay", "m1"), paid(wallet, 10)) is None

    assert balance(client, wallet) == 80


def test_a_record_of_the_claim_mode_is_not_written_over(guard: Guard, client: Any, wallet: str) -> None:
    for key, state in (("running", State.RUNNING), ("held", State.HELD), ("open", State.OPEN)):
        guard.store.claim(entry(address=Address("", "pay", key), state=state))

    with pytest.raises(InProgress):
        send(client, transact_item(guard, "pay", "running"), paid(wallet))
    with pytest.raises(Held):
        send(client, transact_item(guard, "pay", "held"), paid(wallet))
    with pytest.raises(UsageError, match=r"its record is open, as guard\.run leaves it"):
        send(client, transact_item(guard, "pay", "open"), paid(wallet))

    assert balance(client, wallet) == 100


def test_what_is_not_about_the_record_is_left_to_the_caller(guard: Guard, client: Any, wallet: str) -> None:
    delivery = transact_item(guard, "pay", "m1")
    answered(client, "TransactWriteItems", ["TransactionCanceledException"])

    with pytest.raises(client.exceptions.TransactionCanceledException):
        send(client, delivery, paid(wallet))

    assert delivery.outcome(ValueError("something else")) is None
    assert delivery.outcome(KeyboardInterrupt()) is None


def test_it_costs_no_round_trip_of_its_own(guard: Guard, client: Any, wallet: str) -> None:
    guard.store.now()
    sent = counted(client)

    send(client, transact_item(guard, "pay", "m1"), paid(wallet))
    send(client, transact_item(guard, "pay", "m1"), paid(wallet))

    assert sent == ["TransactWriteItems"] * 2


def test_of_two_deliveries_in_one_transaction_each_is_told_its_own(guard: Guard, client: Any) -> None:
    send(client, transact_item(guard, "pay", "m1", value="first"))
    seen, new = transact_item(guard, "pay", "m1"), transact_item(guard, "pay", "m2")

    with pytest.raises(client.exceptions.TransactionCanceledException) as refused:
        client.transact_write_items(TransactItems=[new.item, seen.item])

    outcome = seen.outcome(refused.value)
    assert outcome is not None
    assert outcome.value == "first"
    assert new.outcome(refused.value) is None
    assert guard.read("pay", "m2") is None


def test_a_value_that_does_not_fit_is_left_out_and_said_so(guard: Guard, client: Any) -> None:
    send(client, transact_item(guard, "pay", "m1", value="x" * ITEM_MAX))

    outcome = send(client, transact_item(guard, "pay", "m1"))

    assert outcome is not None
    assert (outcome.value_or(None), outcome.omitted) == (None, True)


def test_the_client_of_a_resource_takes_it_in_pythons_own_types(guard: Guard, dynamodb_url: str) -> None:
    import boto3

    options: Any = client_options(dynamodb_url)
    resource: Any = boto3.resource("dynamodb", **options)
    client = resource.meta.client
    delivery = transact_item(guard, "pay", "m1", value=b"\0\xff")

    client.transact_write_items(TransactItems=[delivery.resource_item])

    again = transact_item(guard, "pay", "m1")
    with pytest.raises(client.exceptions.TransactionCanceledException) as refused:
        client.transact_write_items(TransactItems=[again.resource_item])
    outcome = again.outcome(refused.value)
    assert outcome is not None
    assert (outcome.value, outcome.replayed) == (b"\0\xff", True)


def test_an_async_guard_has_the_same(dynamodb_url: str) -> None:
    from aiobotocore.session import AioSession

    async def deliver_twice() -> Outcome[Any] | None:
        options: Any = client_options(dynamodb_url)
        async with AioSession().create_client("dynamodb", **options) as client:
            store = AsyncDynamoDBStore(table_of(dynamodb_url), client=client)
            async with AsyncGuard(store) as guard:
                first = await transact_item_async(guard, "pay", "m1", value="paid")
                await client.transact_write_items(TransactItems=[first.item], ClientRequestToken=first.request_token)
                second = await transact_item_async(guard, "pay", "m1")
                try:
                    await client.transact_write_items(TransactItems=[second.item])
                except client.exceptions.TransactionCanceledException as error:
                    return second.outcome(error)
        return None

    outcome = asyncio.run(deliver_twice())

    assert outcome is not None
    assert (outcome.value, outcome.replayed) == ("paid", True)


def test_a_guard_on_another_store_is_told_what_to_use() -> None:
    with Guard("memory:") as guard, pytest.raises(UsageError, match=r"use guard\.within\(connection\)"):
        transact_item(guard, "pay", "m1")


def test_a_finished_claim_is_seen_by_a_transaction(guard: Guard, client: Any, wallet: str) -> None:
    assert guard.run("pay", "m1", lambda: "by hand").value == "by hand"

    outcome = send(client, transact_item(guard, "pay", "m1"), paid(wallet))

    assert outcome is not None
    assert (outcome.value, outcome.replayed) == ("by hand", True)
    assert balance(client, wallet) == 100
