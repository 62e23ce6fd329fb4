"""Describe and create the table. No I/O.

One key, a string; on-demand billing; and time to live on `expires`, by which DynamoDB removes expired items. The table
is never created twice: of two processes that start together the second finds it being created, and waits.
"""

from __future__ import annotations

import json
from typing import Any, Final

from onefold.errors import StoreUnavailable
from onefold.stores.dynamodb.errors import (
    DENIED,
    INVALID,
    NO_TABLE,
    TABLE_IN_USE,
    TOO_MANY_CHANGES,
    Problem,
    label,
    of_something_else,
)
from onefold.stores.dynamodb.items import Request
from onefold.stores.dynamodb.records import Pause, Records, Steps

# A new table is usable after some ten seconds.
TABLE_PAUSE: Final = 0.5
TABLE_ROUNDS_MAX: Final = 120

TIME_TO_LIVE: Final = {"AttributeName": "expires", "Enabled": True}


def properties(table: str) -> dict[str, Any]:
    return {
        "TableName": table,
        "AttributeDefinitions": [{"AttributeName": "address", "AttributeType": "S"}],
        "KeySchema": [{"AttributeName": "address", "KeyType": "HASH"}],
        "BillingMode": "PAY_PER_REQUEST",
    }


def template(table: str) -> str:
    """Return the table as a CloudFormation template, which a person can read, change and apply."""
    resource = {
        "Type": "AWS::DynamoDB::Table",
        "DeletionPolicy": "Retain",
        "Properties": properties(table) | {"TimeToLiveSpecification": TIME_TO_LIVE},
    }
    return json.dumps({"Resources": {"OnefoldRecords": resource}}, indent=2) + "\n"


def create(records: Records) -> Steps[None]:
    """Create the table if it does not exist."""
    yield from apply(records)


def apply(records: Records) -> Steps[list[str]]:
    """Create the table if it does not exist, and return what was done."""
    table = records.table
    made = yield from records.ask(Request("create_table", properties(table)), TABLE_IN_USE, DENIED)
    if isinstance(made, Problem) and made.code == DENIED:
        raise StoreUnavailable(
            f"{label(table)}: there is no such table, and the role may not create it (dynamodb:CreateTable). "
            "Create it with the command `onefold schema --store URL --apply`"
        ) from made.error
    yield from _wait_until_active(records)
    is_new = not isinstance(made, Problem)
    done = [f"table {table}: made" if is_new else f"table {table}: is there"]
    turned_on = yield from _turn_on_time_to_live(records)
    return [*done, f"table {table}: time to live on `expires` {'turned on' if turned_on else 'is on'}"]


def _wait_until_active(records: Records) -> Steps[None]:
    for _ in range(TABLE_ROUNDS_MAX):
        found = yield from records.ask(Request("describe_table", {"TableName": records.table}), NO_TABLE)
        # Right after its creation, some servers may not know the table yet.
        if not isinstance(found, Problem) and found["Table"]["TableStatus"] in ("ACTIVE", "UPDATING"):
            _check_ours(found["Table"])
            return
        yield Pause(TABLE_PAUSE)
    raise StoreUnavailable(
        f"{label(records.table)}: it is not ready {TABLE_PAUSE * TABLE_ROUNDS_MAX:g} s after it was made. "
        "Look at it in the console"
    )


def _check_ours(found: dict[str, Any]) -> None:
    """Check, before anything is changed, that it is not one of the application's own tables."""
    wanted = properties(found["TableName"])
    if any(found[part] != wanted[part] for part in ("KeySchema", "AttributeDefinitions")):
        raise of_something_else(found["TableName"])


def _turn_on_time_to_live(records: Records) -> Steps[bool]:
    """Turn on time to live. Return whether this call did it: another process may have been faster."""
    if (yield from _lives(records)):
        return False
    request = Request("update_time_to_live", {"TableName": records.table, "TimeToLiveSpecification": TIME_TO_LIVE})
    answer = yield from records.ask(request, INVALID, TABLE_IN_USE, TOO_MANY_CHANGES)
    if not isinstance(answer, Problem):
        return True
    if (yield from _lives(records)):
        return False
    raise StoreUnavailable(
        f"{label(records.table)}: time to live could not be turned on ({answer.code}), so expired records "
        "would pile up. Turn it on for the attribute `expires`"
    ) from answer.error


def _lives(records: Records) -> Steps[bool]:
    found = yield from records.ask(Request("describe_time_to_live", {"TableName": records.table}))
    told = found["TimeToLiveDescription"]
    return told["TimeToLiveStatus"] in ("ENABLED", "ENABLING") and told["AttributeName"] == "expires"
