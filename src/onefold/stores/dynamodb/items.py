"""Convert records to items, and operations to requests, and back.

Pure: no client, no I/O, no clock. Items are in DynamoDB's own form, `{"S": "text"}`.

An item has one key, the address as text. Empty attributes (no result, no end) are left out, because each byte is stored
and billed. A record without `expires` stays forever, for us and for DynamoDB's time to live.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, NamedTuple

from msgspec import NODEFAULT
from msgspec.structs import fields

from onefold._model import Address, Claim, Ending, Entry, Record, Released, State
from onefold.stores.base import Query
from onefold.stores.dynamodb.clock import Now

Item = dict[str, dict[str, Any]]
Parameters = dict[str, Any]

# The item that holds the version of the others; if absent, they are of the first. No address has this form.
VERSION_KEY: Final = "onefold schema"

# The version of the items that this code writes. A newer one whose `usable_from` is not above it is usable too.
VERSION: Final = 1

# The size limit of an item, names and values together.
ITEM_MAX: Final = 409_600

# The size of an item without result, notes and remark: names, address, token, fingerprint, numbers.
ITEM_RESERVE: Final = 4_096

# More than three hundred years is forever: a larger number of seconds is not a valid time.
TTL_MAX: Final = 1e10

# The fields of a record that are left out at their default, whatever it is made of.
OPTIONAL: Final = {field.name: field.default for field in fields(Record) if field.default is not NODEFAULT}

# DynamoDB's kinds of attributes, and our types.
KINDS: Final[dict[str, type]] = {"BOOL": bool, "N": int, "S": str, "B": bytes}

FREE: Final = "attribute_not_exists(#address) OR #expires <= :now"
OVER: Final = "#expires <= :now"
ALIVE: Final = "(attribute_not_exists(#expires) OR #expires > :now)"
# Even if expired: as long as no other delivery has taken it, the record is its owner's.
OURS: Final = "#token = :token"
# Neither token nor revision alone would be enough.
STILL: Final = "#token = :seen_token AND #revision = :seen_revision"


class Request(NamedTuple):
    """One call of a client: the method, and its arguments."""

    action: str
    parameters: Parameters


def text_of(address: Address) -> str:
    """Return the address as readable text: `4.6/acme/charge/pay_7f3a`.

    The lengths come first, so that no separator can be confused.
    """
    return f"{len(address.scope)}.{len(address.operation)}/{address.scope}/{address.operation}/{address.key}"


def address_of(text: str) -> Address:
    lengths, _, rest = text.partition("/")
    scope, operation = map(int, lengths.split("."))
    return Address(rest[:scope], rest[scope + 1 : scope + 1 + operation], rest[scope + operation + 2 :])


class Requests:
    """The requests of one table."""

    def __init__(self, table: str) -> None:
        self.table = table

    def version(self) -> Request:
        return self._get(VERSION_KEY)

    def read(self, address: Address) -> Request:
        return self._get(text_of(address))

    def claim(self, entry: Entry, revision: int, now: Now, *, still: tuple[bytes, int] | None = None) -> Request:
        """Write the entry if the address is free, or if its record still has this token and revision."""
        if still is None:
            return self._request("put_item", FREE, {":now": _moment(now.earliest)}, Item=item_of(entry, revision, now))
        seen = {":seen_token": _bytes(still[0]), ":seen_revision": _number(still[1])}
        return self._request("put_item", STILL, seen, Item=item_of(entry, revision, now))

    def extend(self, claim: Claim, notes: bytes | None, now: Now) -> Request:
        changes = {"lease_until": _until(now.latest + claim.lease), "expires": _end(claim.ttl, now)}
        if notes is not None:
            changes["notes"] = _bytes(notes)
        return self._change(claim, changes, now, state=State.RUNNING, notes=notes)

    def note(self, claim: Claim, notes: bytes, now: Now) -> Request:
        """Keep the notes of a held record, and nothing else: a late heartbeat must not make it expire."""
        return self._change(claim, {"notes": _bytes(notes)}, now, state=State.HELD, notes=notes)

    def annotate(self, seen: Record, notes: bytes, now: Now) -> Request:
        """Change the notes of a record that still has this token and revision, and has not expired."""
        sets = {"notes": _bytes(notes), "changed": _moment(now.earliest)}
        written = ", ".join(["#revision = #revision + :one", *(f"#{name} = :set_{name}" for name in sets)])
        values = {f":set_{name}": value for name, value in sets.items()} | {":one": _number(1)}
        values |= {":seen_token": _bytes(seen.token), ":seen_revision": _number(seen.revision)}
        values[":now"] = _moment(now.earliest)
        key = _key(text_of(seen.address))
        return self._request("update_item", f"{STILL} AND {ALIVE}", values, Key=key, UpdateExpression=f"SET {written}")

    def finish(self, claim: Claim, ending: Ending, now: Now) -> Request:
        changes = {
            "state": {"S": ending.state.value},
            "lease_until": None,
            "expires": _end(ending.ttl, now),
            **_attributes(ending),
        }
        return self._change(claim, changes, now)

    def leave_open(self, claim: Claim, released: Released, now: Now) -> Request:
        changes = {
            "state": {"S": State.OPEN.value},
            "lease_until": None,
            "expires": _end(released.ttl, now),
            "attempt": _number(released.attempt),
            **_attributes(released),
        }
        return self._change(claim, changes, now)

    def forget(self, claim: Claim) -> Request:
        values = {":token": _bytes(claim.token)}
        return self._request("delete_item", OURS, values, Key=_key(text_of(claim.address)))

    def remove_expired(self, key: Item, now: Now) -> Request:
        return self._request("delete_item", OVER, {":now": _moment(now.earliest)}, Key=key)

    def scan_expired(self, now: Now, after: Item | None) -> Request:
        return self._scan(OVER, {":now": _moment(now.earliest)}, after, ProjectionExpression="#address")

    def scan(self, query: Query, now: Now, after: Item | None) -> Request:
        """Scan one part of the table. Its results have to be checked once more, with `matches`."""
        conditions, values = ["attribute_exists(#token)", ALIVE], {":now": _moment(now.earliest)}
        if query.state is not None:
            conditions.append("#state = :state")
            values[":state"] = {"S": query.state.value}
        if query.scope is not None and query.operation is not None:
            conditions.append("begins_with(#address, :prefix)")
            values[":prefix"] = {"S": text_of(Address(query.scope, query.operation, ""))}
        return self._scan(" AND ".join(conditions), values, after)

    def _change(
        self,
        claim: Claim,
        changes: dict[str, Any],
        now: Now,
        *,
        state: State | None = None,
        notes: bytes | None = None,
    ) -> Request:
        """Write under a token that is still the record's. None removes an attribute.

        With `notes`, only if the record's are not longer: a log only grows, so a shorter one is outdated.
        """
        sets = {"changed": _moment(now.earliest)} | {
            name: value for name, value in changes.items() if value is not None
        }
        gone = [f"#{name}" for name, value in changes.items() if value is None]
        written = ", ".join(["#revision = #revision + :one", *(f"#{name} = :set_{name}" for name in sets)])
        values = {f":set_{name}": value for name, value in sets.items()}
        values |= {":one": _number(1), ":token": _bytes(claim.token)}
        condition = OURS
        if state is not None:
            condition += " AND #state = :state"
            values[":state"] = {"S": state.value}
        if notes is not None:
            condition += " AND (attribute_not_exists(#notes) OR size(#notes) <= :notes_size)"
            values[":notes_size"] = _number(len(notes))
        return self._request(
            "update_item",
            condition,
            values,
            Key=_key(text_of(claim.address)),
            UpdateExpression=f"SET {written}" + (f" REMOVE {', '.join(gone)}" if gone else ""),
        )

    def _request(self, action: str, condition: str, values: Item, **parameters: Any) -> Request:
        """Build a conditional write; if it is refused, the existing item comes back with the refusal."""
        used = {
            "TableName": self.table,
            "ConditionExpression": condition,
            "ExpressionAttributeNames": _names(condition, parameters.get("UpdateExpression", "")),
            "ExpressionAttributeValues": values,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }
        return Request(action, used | parameters)

    def _get(self, text: str) -> Request:
        return Request("get_item", {"TableName": self.table, "Key": _key(text), "ConsistentRead": True})

    def _scan(self, condition: str, values: Item, after: Item | None, **parameters: Any) -> Request:
        used = {
            "TableName": self.table,
            "FilterExpression": condition,
            "ExpressionAttributeNames": _names(condition, parameters.get("ProjectionExpression", "")),
            "ExpressionAttributeValues": values,
            "ConsistentRead": True,
        }
        return Request("scan", used | parameters | ({} if after is None else {"ExclusiveStartKey": after}))


def item_of(entry: Entry, revision: int, now: Now) -> Item:
    """Return the item that a claim writes: a whole record."""
    attributes = {
        "address": {"S": text_of(entry.address)},
        "state": {"S": entry.state.value},
        "attempt": _number(entry.attempt),
        # The age is compared with a downstream system's memory: better too old than too young.
        "began": _moment(now.earliest - entry.age),
        "changed": _moment(now.earliest),
        "lease_until": _until(now.latest + entry.lease) if entry.lease > 0 else None,
        "expires": _end(entry.ttl, now),
        "revision": _number(revision),
        "token": _bytes(entry.token),
        **_attributes(entry),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def record_of(item: Item, now: Now) -> Record:
    """Return the record of an item and its remaining times: rather too much of a lease and a TTL than too little."""
    return Record(
        address=address_of(item["address"]["S"]),
        token=item["token"]["B"],
        revision=int(item["revision"]["N"]),
        state=State(item["state"]["S"]),
        attempt=int(item["attempt"]["N"]),
        lease_left=float(item["lease_until"]["N"]) - now.earliest if "lease_until" in item else 0.0,
        ttl_left=float(item["expires"]["N"]) - now.earliest if "expires" in item else math.inf,
        age=now.latest - float(item["began"]["N"]),
        **{name: _value(item[name]) for name in OPTIONAL if name in item},
    )


def matches(record: Record, query: Query) -> bool:
    """Return whether a record that a scan has found belongs to the page."""
    wanted = zip((query.scope, query.operation, query.key), record.address.parts, strict=True)
    if record.is_expired or any(asked is not None and asked != found for asked, found in wanted):
        return False
    return query.after is None or record.address.parts > query.after.parts


def too_large(*parts: bytes | str | None) -> int:
    """Return by how many bytes result, notes and remark exceed the limit of an item; zero if they fit."""
    size = sum(len(part.encode() if isinstance(part, str) else part) for part in parts if part is not None)
    return max(size - (ITEM_MAX - ITEM_RESERVE), 0)


def _key(text: str) -> Item:
    return {"address": {"S": text}}


def _names(*expressions: str) -> dict[str, str]:
    """Return the names used: each is written as #name, because many are reserved words."""
    return {f"#{name}": name for expression in expressions for name in re.findall(r"#(\w+)", expression)}


def _end(ttl: float, now: Now) -> dict[str, str] | None:
    # In whole seconds, the only form that time to live reads; rounded up, because nothing may end too early.
    return None if ttl > TTL_MAX else {"N": str(math.ceil(now.latest + ttl))}


def _until(moment: float) -> dict[str, str]:
    return _moment(math.ceil(moment * 1000) / 1000)


def _moment(moment: float) -> dict[str, str]:
    # As DynamoDB stores it, without trailing zeros: a repeated request compares equal.
    return {"N": f"{moment:.3f}".rstrip("0").rstrip(".")}


def _number(number: int) -> dict[str, str]:
    return {"N": str(number)}


def _bytes(content: bytes) -> dict[str, Any]:
    return {"B": content}


def _attributes(written: Entry | Ending | Released) -> dict[str, Any]:
    """Return the optional fields that this writes, as attributes. One at its default is None: it has no attribute."""
    values = {name: getattr(written, name) for name in OPTIONAL if name in written.__struct_fields__}
    return {name: None if value == OPTIONAL[name] else _attribute(value) for name, value in values.items()}


def _attribute(value: Any) -> dict[str, Any]:
    # The kind of the first that fits: a flag is a number, too.
    kind = next(kind for kind, form in KINDS.items() if isinstance(value, form))
    return {kind: str(value) if kind == "N" else value}


def _value(attribute: dict[str, Any]) -> Any:
    ((kind, value),) = attribute.items()
    return KINDS[kind](value)
