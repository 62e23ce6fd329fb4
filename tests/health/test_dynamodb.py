"""The doctor on DynamoDB: time to live, capacity, and a table that is not there."""

from __future__ import annotations

from typing import Any, cast

from onefold import Guard
from onefold.health import dynamodb
from onefold.stores.base import Untold
from tests.health.tools import GREEN, RED, UNKNOWN, YELLOW, checks_of, left_behind, use
from tests.stores.dynamodb.tools import plain_client, table_of


def test_a_table_that_is_run_well_is_green(dynamodb_url: str) -> None:
    use(dynamodb_url)

    found = checks_of(dynamodb_url)

    assert {name: check for name, check in found.items() if check.grade is not GREEN} == {}
    assert {"table", "time to live", "capacity", "backups", "trial", "clock"} < set(found)
    assert left_behind(dynamodb_url) == 0
    with Guard(dynamodb_url) as guard:
        assert isinstance(cast("Any", guard.store).facts()["table_bytes"], int)


def test_a_missing_table_is_yellow_or_red_and_is_not_made(dynamodb_url: str) -> None:
    ours, by_hand = checks_of(dynamodb_url), checks_of(f"{dynamodb_url}&auto_schema=no")

    assert (ours["table"].grade, by_hand["table"].grade) == (YELLOW, RED)
    assert ours["trial"].grade is UNKNOWN
    with plain_client(dynamodb_url) as client:
        assert table_of(dynamodb_url) not in client.list_tables()["TableNames"]


def test_a_table_without_time_to_live_is_yellow(dynamodb_url: str) -> None:
    use(dynamodb_url)
    with plain_client(dynamodb_url) as client:
        client.update_time_to_live(
            TableName=table_of(dynamodb_url), TimeToLiveSpecification={"AttributeName": "expires", "Enabled": False}
        )

    found = checks_of(dynamodb_url)["time to live"]

    assert found.grade is YELLOW
    assert "expires" in found.fix


def test_provisioned_capacity_is_yellow(dynamodb_url: str) -> None:
    use(dynamodb_url)
    with plain_client(dynamodb_url) as client:
        client.update_table(
            TableName=table_of(dynamodb_url),
            BillingMode="PROVISIONED",
            ProvisionedThroughput={"ReadCapacityUnits": 5, "WriteCapacityUnits": 5},
        )

    found = checks_of(dynamodb_url)["capacity"]

    assert found.grade is YELLOW
    assert "5 writes a second" in found.reason


def test_what_the_endpoint_does_not_say_is_unknown() -> None:
    silent = Untold("DynamoDB table x: denies DescribeTimeToLive")
    facts: dict[str, Any] = {"table": {"TableStatus": "ACTIVE"}, "auto_schema": True}

    denied = dynamodb.judge(facts | {"time_to_live": silent, "backups": silent})
    empty = dynamodb.judge(facts | {"time_to_live": {}, "backups": {}})

    assert [check.grade for check in denied] == [GREEN, GREEN, UNKNOWN, UNKNOWN, UNKNOWN]
    assert [check.grade for check in empty] == [GREEN, GREEN, UNKNOWN, UNKNOWN, UNKNOWN]
    assert denied[2].reason == silent.why


def test_a_table_that_is_being_made_or_deleted_is_red_and_is_not_tried() -> None:
    facts = {"table": {"TableStatus": "DELETING"}, "auto_schema": True}

    assert dynamodb.table(facts).grade is RED
    assert dynamodb.hindrance(facts) == "the table cannot be used yet"


def test_a_global_table_is_red_because_two_regions_can_both_win_a_claim() -> None:
    table = {"TableStatus": "ACTIVE", "Replicas": [{"RegionName": "eu-west-1"}]}

    assert dynamodb.regions({"table": {"TableStatus": "ACTIVE"}}).grade is GREEN
    assert dynamodb.regions({"table": table}).grade is RED
    assert "eu-west-1" in dynamodb.regions({"table": table}).reason
    assert dynamodb.regions({"table": table | {"MultiRegionConsistency": "STRONG"}}).grade is YELLOW
    assert dynamodb.regions({"table": Untold("not allowed")}).grade is UNKNOWN
