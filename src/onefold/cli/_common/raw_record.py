"""Format a record as its store keeps it, for `onefold show --raw`. Pure: `stores/raw_schema.py` has the shape of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec.structs import fields

from onefold import FOREVER, Record
from onefold.stores.base import StoredRecord

# The version of the form that `docs/record-format.md` describes. A later one has another number here.
FORMAT: Final = 1

# All fields of a record, except its address.
FIELDS: Final = tuple(field.name for field in fields(Record) if field.name != "address")


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
        "stored": {name: _as_json(value) for name, value in stored.columns.items()},
        "record": meaning(record),
    }


def meaning(record: Record) -> dict[str, Any]:
    """Return what the stored form says."""
    found = {name: _as_json(getattr(record, name)) for name in FIELDS}
    return found | {"state": record.state.value, "ttl_left": None if record.ttl_left == FOREVER else record.ttl_left}


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
