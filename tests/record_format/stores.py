"""The stores of the page, each with a way to write what another program would write: columns and bytes, not records."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from sqlalchemy import MetaData, Table, create_engine, insert
from sqlalchemy.types import _Binary

from onefold import Guard
from tests.stores.dynamodb.tools import plain_client, table_of
from tests.support import PROJECT

FOLDER: Final = PROJECT / "docs" / "record-format"
VECTORS: Final = json.loads((FOLDER / "vectors.json").read_text(encoding="utf-8"))
ENTRIES: Final = [pytest.param(entry, id=entry["name"]) for entry in VECTORS["entries"]]

STORES: Final = ("sqlite", "postgresql", "mysql", "redis", "dynamodb")

# The columns that are times, and where a lease and a beginning are in a string of Redis.
TIMES: Final[tuple[str, ...]] = ("began", "changed", "lease_until", "expires")
BEGAN, LEASE, COUNTS = slice(17, 23), slice(23, 29), slice(29, None)

BYTES: Final = ("token", "fingerprint", "notes", "result")


def url_of(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match store:
        case "sqlite":
            return f"sqlite:///{tmp_path}/records.db"
        case "postgresql":
            return str(request.getfixturevalue("postgres_url"))
        case name:
            return str(request.getfixturevalue(f"{name}_url"))


@contextmanager
def opened(url: str) -> Iterator[Any]:
    with Guard(url) as guard:
        yield guard.store


def moved(store: str, stored: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The same, written so much later: every time of it is moved."""
    found = dict(stored)
    if store == "redis":
        return {**found, "value": _moved_string(found["value"], round(seconds * 1000))}
    if store == "dynamodb":
        times = {name: {"N": str(float(found[name]["N"]) + seconds)} for name in TIMES if name in found}
        return {**found, **times}
    found |= {name: found[name] + seconds for name in TIMES if found[name] is not None}
    if found.get("due") is not None:
        found["due"] = math.floor(found["expires"] / 600)
    return found


def _moved_string(value: str, milliseconds: int) -> str:
    string = bytes.fromhex(value)
    running = string[16] % 8 == 0
    began = (int.from_bytes(string[BEGAN]) + milliseconds).to_bytes(6)
    if not running:
        return (string[:17] + began + string[23:]).hex()
    return (string[:17] + began + (int.from_bytes(string[LEASE]) + milliseconds).to_bytes(6) + string[COUNTS]).hex()


def write(store: str, url: str, stored: Mapping[str, Any]) -> None:
    """Write it as another program would: with a plain client, and none of our code."""
    match store:
        case "redis":
            with redis.Redis.from_url(url) as client:
                ttl = None if stored["pttl"] < 0 else stored["pttl"]
                client.set(bytes.fromhex(stored["key"]), bytes.fromhex(stored["value"]), px=ttl)
        case "dynamodb":
            item = {
                name: {kind: base64.b64decode(value) if kind == "B" else value for kind, value in attribute.items()}
                for name, attribute in stored.items()
            }
            with plain_client(url) as client:
                client.put_item(TableName=table_of(url), Item=item)
        case _:
            _insert(url, stored)


@contextmanager
def plain_connection(url: str) -> Iterator[Any]:
    """A connection of another program's, in a transaction."""
    drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
    scheme, _, rest = url.partition("://")
    engine = create_engine(f"{drivers.get(scheme, scheme)}://{rest}")
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def _insert(url: str, row: Mapping[str, Any]) -> None:
    with plain_connection(url) as connection:
        table = Table("onefold_records", MetaData(), autoload_with=connection)
        values = {name: _cell(value, table.columns[name].type, is_hex=name in BYTES) for name, value in row.items()}
        connection.execute(insert(table).values(values))


def _cell(value: Any, column: Any, *, is_hex: bool) -> Any:
    if value is None or not isinstance(value, str):
        return value
    if is_hex:
        return bytes.fromhex(value)
    return value.encode() if isinstance(column, _Binary) else value
