"""The table of the DynamoDB store: made on first use, by one of many, or described for a person to make."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from onefold import Guard, StoreUnavailable
from onefold._model import State
from onefold.stores.base import Query
from onefold.stores.dynamodb import DynamoDBStore, apply_schema, describe_schema, open_store, schema
from onefold.stores.dynamodb.items import VERSION
from tests.stores.dynamodb.tools import answered, claim_of, counted, entry, plain_client, table_of
from tests.support import PATIENCE


@pytest.fixture
def client(dynamodb_url: str) -> Iterator[Any]:
    with plain_client(dynamodb_url) as client:
        yield client


def lives(client: Any, table: str) -> dict[str, Any]:
    told: dict[str, Any] = client.describe_time_to_live(TableName=table)["TimeToLiveDescription"]
    return told


def test_the_first_use_makes_the_table_with_time_to_live(dynamodb_url: str, client: Any) -> None:
    table = table_of(dynamodb_url)
    with closing(open_store(dynamodb_url)) as store:
        assert store.claim(entry()) is None

    made = client.describe_table(TableName=table)["Table"]
    assert made["KeySchema"] == [{"AttributeName": "address", "KeyType": "HASH"}]
    assert made["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert lives(client, table) == {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires"}


def test_without_auto_schema_a_missing_table_is_told_and_not_made(dynamodb_url: str, client: Any) -> None:
    with closing(open_store(dynamodb_url + "&auto_schema=false")) as store:
        with Guard(store) as guard, pytest.raises(StoreUnavailable) as refused:
            guard.run("charge", "key", lambda: pytest.fail("it ran"))
        assert str(refused.value) == (
            f"DynamoDB table {store.table}: there is no such table, and auto_schema=False. "
            "Create it with the command `onefold schema --store URL --apply`"
        )
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.describe_table(TableName=store.table)

        apply_schema(dynamodb_url)
        assert store.claim(entry()) is None


def test_a_role_that_may_not_make_tables_is_told_what_to_do(dynamodb_url: str, client: Any) -> None:
    answered(client, "CreateTable", ["AccessDeniedException"])

    with pytest.raises(StoreUnavailable, match=r"the role may not create it \(dynamodb:CreateTable\)"):
        DynamoDBStore(table_of(dynamodb_url), client=client).claim(entry())


def test_a_table_that_takes_its_time_is_waited_for(
    dynamodb_url: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "TABLE_PAUSE", 0.01)
    # As it is right after it was made: unknown here and there, and then not ready yet.
    answered(client, "DescribeTable", ["ResourceNotFoundException"])
    waiting = ["CREATING", "CREATING"]

    def not_yet(parsed: dict[str, Any], **_: Any) -> None:
        if "Table" in parsed and waiting:
            parsed["Table"]["TableStatus"] = waiting.pop()

    client.meta.events.register("after-call.dynamodb.DescribeTable", not_yet)
    sent = counted(client)

    assert DynamoDBStore(table_of(dynamodb_url), client=client).claim(entry()) is None

    assert sent.count("DescribeTable") == 4
    assert waiting == []


def test_a_table_that_is_never_ready_is_not_waited_for_without_end(
    dynamodb_url: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "TABLE_PAUSE", 0.0)
    monkeypatch.setattr(schema, "TABLE_ROUNDS_MAX", 3)
    answered(client, "DescribeTable", ["ResourceNotFoundException"] * 3)

    with pytest.raises(StoreUnavailable, match="it is not ready"):
        DynamoDBStore(table_of(dynamodb_url), client=client).claim(entry())


def test_who_comes_second_finds_the_table_being_made(dynamodb_url: str, client: Any) -> None:
    store = DynamoDBStore(table_of(dynamodb_url), client=client)
    # Another process makes it between our look and our own attempt.
    client.meta.events.register_first("before-call.dynamodb.CreateTable", lambda **_: _made_elsewhere(dynamodb_url))

    assert store.claim(entry()) is None


def _made_elsewhere(url: str) -> None:
    with plain_client(url) as another, suppress(another.exceptions.ResourceInUseException):
        another.create_table(**schema.properties(table_of(url)))


def test_time_to_live_that_another_has_just_turned_on_is_fine(dynamodb_url: str, client: Any) -> None:
    def turn_on(**_: Any) -> None:
        with plain_client(dynamodb_url) as another:
            another.update_time_to_live(TableName=table_of(dynamodb_url), TimeToLiveSpecification=schema.TIME_TO_LIVE)

    client.meta.events.register_first("before-call.dynamodb.UpdateTimeToLive", turn_on)
    answered(client, "UpdateTimeToLive", ["ValidationException"])

    assert DynamoDBStore(table_of(dynamodb_url), client=client).claim(entry()) is None


def test_time_to_live_that_cannot_be_turned_on_is_told(dynamodb_url: str, client: Any) -> None:
    answered(client, "UpdateTimeToLive", ["ValidationException"])

    with pytest.raises(StoreUnavailable, match="time to live could not be turned on"):
        DynamoDBStore(table_of(dynamodb_url), client=client).claim(entry())


def _race(start: Any, url: str, answers: Any) -> None:
    with closing(open_store(url)) as store:
        store._clients.get()
        start.wait(3 * PATIENCE)
        answers.put(store.claim(entry()) is None)


def test_of_many_processes_that_start_together_one_makes_the_table(dynamodb_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(4), context.SimpleQueue()
    processes = [context.Process(target=_race, args=(start, dynamodb_url, answers), daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(3 * PATIENCE)
            assert process.exitcode == 0, "a process failed"
        assert sorted(answers.get() for _ in processes) == [False, False, False, True]
    finally:
        for process in processes:
            process.kill()
            process.join()
        answers.close()


# Versions.


def version(client: Any, table: str, number: int, usable_from: int) -> None:
    client.put_item(
        TableName=table,
        Item={
            "address": {"S": "onefold schema"},
            "version": {"N": str(number)},
            "usable_from": {"N": str(usable_from)},
        },
    )


def test_a_table_of_a_newer_version_is_refused_and_nothing_runs(dynamodb_url: str, client: Any) -> None:
    apply_schema(dynamodb_url)
    version(client, table_of(dynamodb_url), VERSION + 2, VERSION + 1)

    with Guard(dynamodb_url) as guard, pytest.raises(StoreUnavailable) as refused:
        guard.run("charge", "key", lambda: pytest.fail("it ran"))

    assert str(refused.value).endswith(
        f"its records are of version {VERSION + 2}, but this Onefold only knows version {VERSION}. Upgrade Onefold"
    )


def test_a_newer_version_that_says_so_is_still_usable(dynamodb_url: str, client: Any) -> None:
    apply_schema(dynamodb_url)
    version(client, table_of(dynamodb_url), VERSION + 1, VERSION)
    mine = entry()

    with closing(open_store(dynamodb_url)) as store:
        assert store.claim(mine) is None
        # A newer version adds an attribute, which an older one neither needs nor loses.
        key = {"address": {"S": "0.6//charge/key"}}
        client.update_item(
            TableName=store.table,
            Key=key,
            UpdateExpression="SET later = :later",
            ExpressionAttributeValues={":later": {"S": "x"}},
        )
        assert store.extend(claim_of(mine)) is True
        # The item with the version is no record.
        assert [record.state for record in store.browse(Query(), 10)] == [State.RUNNING]
        assert store.purge(10) == 0
    assert client.get_item(TableName=store.table, Key=key)["Item"]["later"] == {"S": "x"}


@pytest.mark.parametrize(
    ("names", "kind"),
    [(["id"], "S"), (["address"], "B"), (["address", "sort"], "S")],
)
def test_a_table_of_something_else_is_refused(dynamodb_url: str, client: Any, names: list[str], kind: str) -> None:
    client.create_table(
        TableName=table_of(dynamodb_url),
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": kind} for name in names],
        KeySchema=[
            {"AttributeName": name, "KeyType": role} for name, role in zip(names, ("HASH", "RANGE"), strict=False)
        ],
        BillingMode="PAY_PER_REQUEST",
    )

    with Guard(dynamodb_url) as guard, pytest.raises(StoreUnavailable, match="this table belongs to something else"):
        guard.run("charge", "key", lambda: pytest.fail("it ran"))
    with pytest.raises(StoreUnavailable, match="this table belongs to something else"):
        apply_schema(dynamodb_url)
    assert lives(client, table_of(dynamodb_url))["TimeToLiveStatus"] == "DISABLED"


# The command `onefold schema`.


def test_the_schema_is_described_as_a_template() -> None:
    told = json.loads(describe_schema("dynamodb://records?region=eu-central-1"))

    properties = told["Resources"]["OnefoldRecords"]["Properties"]
    assert properties["TableName"] == "records"
    assert properties["TimeToLiveSpecification"] == {"AttributeName": "expires", "Enabled": True}
    assert '"onefold_records"' in describe_schema("dynamodb://")


def test_what_is_described_is_what_is_made(dynamodb_url: str, client: Any) -> None:
    apply_schema(dynamodb_url)

    made = client.describe_table(TableName=table_of(dynamodb_url))["Table"]
    told = json.loads(describe_schema(dynamodb_url))["Resources"]["OnefoldRecords"]["Properties"]
    for name in ("TableName", "KeySchema", "AttributeDefinitions"):
        assert made[name] == told[name]


def test_applying_the_schema_says_what_was_done(dynamodb_url: str) -> None:
    table = table_of(dynamodb_url)

    assert apply_schema(dynamodb_url) == [
        f"table {table}: made",
        f"table {table}: time to live on `expires` turned on",
    ]
    assert apply_schema(dynamodb_url + "&auto_schema=false") == [
        f"table {table}: is there",
        f"table {table}: time to live on `expires` is on",
    ]
