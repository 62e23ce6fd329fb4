"""DynamoDB: the first items of a scan, which come in the order of their hashes, and the table's own count."""

from __future__ import annotations

from typing import Final

from onefold._model import Record
from onefold.stores.base import Query, Sample
from onefold.stores.dynamodb.facts import facts_of
from onefold.stores.dynamodb.items import Item, Request, record_of
from onefold.stores.dynamodb.records import Records, Steps

# Each returns up to a megabyte: some thousand records without results.
REQUESTS_MAX: Final = 5


def sample(records: Records, query: Query, limit: int) -> Steps[Sample]:
    """Return all matching records if the table is small, else those among its first items."""
    found: list[Record] = []
    seen = 0
    after: Item | None = None
    for _ in range(REQUESTS_MAX):
        now = yield from records.now()
        page = yield from records.ask(_scan(records.table, limit - seen, after))
        seen += page["ScannedCount"]
        found += [record_of(item, now) for item in page["Items"] if "token" in item]
        after = page.get("LastEvaluatedKey")
        if not after or seen >= limit:
            break
    if not after:
        return Sample.of(((one, 1.0) for one in found), query, complete=True)
    table = (yield from facts_of(records))["table"]
    # Counted by DynamoDB every six hours or so. Without the permission to ask, only what was seen is known.
    total = table.get("ItemCount", 0) if isinstance(table, dict) else 0
    weight = max(total / max(seen, 1), 1.0)
    return Sample.of(((one, weight) for one in found), query, complete=False)


def _scan(table: str, limit: int, after: Item | None) -> Request:
    """Return the request for the next items, whatever they are: one of them is not a record."""
    return Request(
        "scan", {"TableName": table, "Limit": limit} | ({} if after is None else {"ExclusiveStartKey": after})
    )
