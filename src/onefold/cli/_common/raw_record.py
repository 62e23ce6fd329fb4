"""Format a record as its store keeps it, for `onefold show --raw`: JSON whose schema is made of the classes here. Pure.

Bytes are hexadecimal digits. Only an item of DynamoDB is in DynamoDB's own JSON, in which they are base64.
`docs/record-format.md` describes each field.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from onefold import FOREVER, Record
from onefold.stores.base import StoredRecord

# The version of the form that the page describes. A later one has another number here.
FORMAT: Final = 1

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$")]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="The token: 16 bytes")]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{12}$", description="The 12 digits that stand for the key in logs")]
Count = Annotated[int, Meta(ge=0)]
State = Literal["running", "open", "done", "failed", "held"]
Moment = Annotated[float, Meta(description="Seconds since 1970, by the store's clock")]


class Meaning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the stored form says. Durations are seconds, and null is forever."""

    state: State
    token: Token
    revision: Count
    attempt: Count
    bypasses: Count
    age: float
    lease_left: float
    ttl_left: float | None
    fingerprint: Hex | None
    notes: Hex | None
    result: Hex | None
    omitted: bool
    remark: str


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A row of `onefold_records` on SQLite, MySQL or MariaDB."""

    scope: str
    operation: str
    key: str
    state: State
    attempt: Count
    began: Moment
    changed: Moment
    lease_until: Moment
    expires: Moment | None
    bypasses: Count
    remark: str
    revision: Count
    token: Token
    fingerprint: Hex | None
    notes: Hex | None
    omitted: Literal[0, 1]
    result: Hex | None


class PostgresRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A row of `onefold_records` on PostgreSQL, where what is absent is NULL."""

    scope: str
    operation: str
    key: str
    state: State
    attempt: Count
    began: Moment
    changed: Moment
    lease_until: Moment | None
    expires: Moment | None
    bypasses: Count | None
    remark: str
    revision: Count
    token: Token
    fingerprint: Hex | None
    notes: Hex | None
    omitted: Literal[1] | None
    result: Hex | None
    due: int | None
    held: Literal[True] | None


class RedisString(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A string of Redis or Valkey."""

    key: Hex
    value: Hex
    pttl: Annotated[int, Meta(ge=-1, description="What is left of its TTL in milliseconds; -1: it has none")]
    now: Annotated[int, Meta(description="The server's time, in milliseconds since 1970")]


class RawRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="store"):
    """A record of `onefold show --raw`."""

    format: Annotated[Literal[1], Meta(description="The version of the form")]
    scope: str
    operation: str
    key: str
    address: Annotated[Hex, Meta(description="Scope, operation and key, each after its length in two bytes")]
    digest: Digest
    record: Meaning


class RawSqlite(RawRecord, tag="sqlite"):
    """A record on SQLite."""

    stored: Row


class RawMysql(RawRecord, tag="mysql"):
    """A record on MySQL or MariaDB."""

    stored: Row


class RawPostgres(RawRecord, tag="postgresql"):
    """A record on PostgreSQL."""

    stored: PostgresRow


class RawRedis(RawRecord, tag="redis"):
    """A record on Redis or Valkey."""

    stored: RedisString


class RawDynamodb(RawRecord, tag="dynamodb"):
    """A record on DynamoDB."""

    stored: Annotated[dict[str, dict[str, str | bool]], Meta(description="The item, in DynamoDB's own JSON")]


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the output: an array."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | msgspec.json.schema(
        list[RawSqlite | RawMysql | RawPostgres | RawRedis | RawDynamodb]
    )


def raw_record(record: Record, stored: StoredRecord) -> dict[str, Any]:
    """Return the document about one record."""
    address = record.address
    return {
        "store": stored.form,
        "format": FORMAT,
        "scope": address.scope,
        "operation": address.operation,
        "key": address.key,
        "address": address.packed.hex(),
        "digest": address.digest,
        "stored": {name: _as_json(value) for name, value in sorted_columns(stored).items()},
        "record": meaning(record),
    }


def meaning(record: Record) -> dict[str, Any]:
    """Return what the stored form says."""
    found = {name: _as_json(getattr(record, name)) for name in Meaning.__struct_fields__}
    return found | {"state": record.state.value, "ttl_left": None if record.ttl_left == FOREVER else record.ttl_left}


def sorted_columns(stored: StoredRecord) -> dict[str, Any]:
    """Return the columns in the order of the store; the attributes of an item have none, and get the alphabet's."""
    return dict(sorted(stored.columns.items())) if stored.form == "dynamodb" else dict(stored.columns)


def _as_json(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {kind: _as_attribute(kind, content) for kind, content in value.items()}
    return value


def _as_attribute(kind: str, content: Any) -> Any:
    return base64.b64encode(bytes(content)).decode("ascii") if kind == "B" else content


def raw_lines(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the same as lines for people: what is stored, field by field."""
    for name in ("store", "address", "digest"):
        yield name, str(document[name])
    for name, value in document["stored"].items():
        yield f"stored.{name}", json.dumps(value)
