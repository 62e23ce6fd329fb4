"""The shape of `onefold show --raw --format json`, which `make docs` writes as a JSON Schema. Pure.

Bytes are hexadecimal digits. Only an item of DynamoDB is in DynamoDB's own JSON, in which they are base64.
`docs/record-format.md` describes each field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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
