"""Collect the facts that DynamoDB reports about a table, without judgement. Nothing is created, and no item is read."""

from __future__ import annotations

import time
from typing import Any, Final

from onefold.stores.base import Untold
from onefold.stores.dynamodb.errors import NO_TABLE, Problem, refused
from onefold.stores.dynamodb.items import Request
from onefold.stores.dynamodb.records import Records, Steps

# Emulators do not know every action; a role may not be allowed all of them.
REFUSALS: Final = (
    "AccessDeniedException",
    "UnknownOperationException",
    "InvalidAction",
    "NotImplemented",
    "NotImplementedException",
    "ValidationException",
)


def facts_of(records: Records) -> Steps[dict[str, Any]]:
    """Return the facts of the table; if there is none, `table` is None and its version 0."""
    asked = time.time()
    described = yield from _told(records, "describe_table", NO_TABLE)
    answered = time.time()
    clock = _clock(records, asked, answered)
    found: dict[str, Any] = {"kind": "dynamodb", "auto_schema": records.auto_schema, "clock": clock}
    if isinstance(described, Problem):
        return found | {"table": None, "version": 0}
    found["table"] = described if isinstance(described, Untold) else described["Table"]
    found["table_bytes"] = described if isinstance(described, Untold) else described["Table"].get("TableSizeBytes")
    lives = yield from _told(records, "describe_time_to_live")
    found["time_to_live"] = lives if isinstance(lives, Untold) else lives.get("TimeToLiveDescription", {})
    backups = yield from _told(records, "describe_continuous_backups")
    told = backups if isinstance(backups, Untold) else backups.get("ContinuousBackupsDescription", {})
    return found | {"backups": told}


def _told(records: Records, action: str, *expected: str) -> Steps[Any]:
    answer = yield from records.ask(Request(action, {"TableName": records.table}), *REFUSALS, *expected)
    if isinstance(answer, Problem) and answer.code not in expected:
        return Untold(str(refused(answer, action, records.table)))
    return answer


def _clock(records: Records, asked: float, answered: float) -> tuple[float, float, float] | Untold:
    if not records.clock.is_fresh:
        return Untold("the replies have no Date")
    now = records.clock.now()
    return asked, (now.earliest + now.latest) / 2, answered
