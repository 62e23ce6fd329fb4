"""Write the test vectors of the record's format, and the schema of `onefold show --raw`. `make docs` runs it.

Everything comes from the code that reads and writes records. Where only a server's statement or script does that, the
few lines here say the same once more, and `tests/project/test_record_format.py` compares them with the servers.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from onefold._fingerprint import of_parts, of_whole, recipe_of_parts, recipe_of_whole
from onefold._fingerprint.canonical import encode
from onefold._model import Address, Entry, Record, State, downstream
from onefold.cli._common.raw_record import FORMAT, meaning, raw_record
from onefold.codecs import MsgspecCodec
from onefold.stores.base import StoredRecord
from onefold.stores.dynamodb.clock import Now
from onefold.stores.dynamodb.items import item_of, text_of
from onefold.stores.mysql.dialect import Mysql
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.raw_schema import schema
from onefold.stores.redis import records as redis_records
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.urls import PREFIX
from onefold.stores.sqlite.dialect import SQLITE
from onefold.stores.sqlite.records import Records

HERE = Path(__file__).parent
VECTORS = HERE / "vectors.json"
SCHEMA = HERE / "raw.schema.json"
STATEMENTS = HERE / "statements.json"

# The time of every entry: seconds since 1970, with a fraction that each store can hold.
NOW = 1_800_000_000.25

CHARGE = Address("", "charge", "pay_7f3a")
TOKEN = bytes(range(16))

DIALECTS: dict[str, Any] = {"postgresql": POSTGRES, "mysql": Mysql(), "sqlite": SQLITE}
# PostgreSQL's own way of writing a cast is hard to tell from a parameter.
CAST = re.compile(r"(:\w+)::(double precision|\w+)")
OPERATIONS = {
    "read": "look",
    "claim": "insert",
    "take_over": "replace",
    "extend": "renew",
    "finish": "end",
    "leave_open": "leave_open",
    "forget": "forget",
}

ADDRESSES = (
    CHARGE,
    Address("acme", "charge", "pay_7f3a"),
    Address("Ünïted", "send mail", "küche/1"),
    Address("", "babelqueue", "f1e2d3c4-b5a6-4789-90ab-cdef01234567"),
    Address("", "babelqueue", "F1E2D3C4-B5A6-4789-90AB-CDEF01234567"),
    Address("a", "b", "x" * 255),
)

PAYLOADS: tuple[Any, ...] = (
    {"amount": 4200, "currency": "EUR"},
    {"currency": "EUR", "amount": 4200},
    {"ü": [1, -1, 2**32, 0.5, True, False], "a": {"z": None, "b": ""}},
    "text",
    [],
    {},
)

RESULTS: tuple[Any, ...] = (True, 0, -33, 300, 2**40, 0.5, "sent", "ü" * 40, [1, [2]], {"receipt": 17, "paid": None})

ENTRIES = {
    "claimed": Entry(address=CHARGE, token=TOKEN, lease=30.0, ttl=86_430.0),
    "claimed with a payload": Entry(
        address=CHARGE,
        token=TOKEN,
        lease=30.0,
        ttl=86_430.0,
        fingerprint=of_whole(recipe_of_whole("payload"), CHARGE.parts, PAYLOADS[0]),
    ),
    "claimed by a batch, not started": Entry(address=CHARGE, token=TOKEN, lease=30.0, ttl=86_430.0, notes=b"\xc0"),
    "done without a result": Entry(address=ADDRESSES[3], token=TOKEN, state=State.DONE, ttl=86_400.0),
    "done with a result, kept forever": Entry(
        address=ADDRESSES[1], token=TOKEN, state=State.DONE, result=b"\x00\x81\xa7receipt\x11", age=2.0
    ),
    "done, its result was too large": Entry(
        address=CHARGE,
        token=TOKEN,
        state=State.DONE,
        ttl=86_400.0,
        omitted=True,
        remark="2000000 bytes, and max_result_bytes=1048576",
    ),
    "failed": Entry(
        address=CHARGE,
        token=TOKEN,
        state=State.FAILED,
        ttl=86_400.0,
        attempt=2,
        result=MsgspecCodec().encode({"type": "builtins.ValueError", "message": "declined", "args": ["declined"]}, Any),
        remark="failed: ValueError",
    ),
    "open after two attempts, with a finished step": Entry(
        address=CHARGE,
        token=TOKEN,
        state=State.OPEN,
        ttl=86_400.0,
        attempt=2,
        age=61.5,
        notes=msgspec.msgpack.encode({"pay": b"\x00\x11"}),
        remark="released: TimeoutError",
    ),
    "held": Entry(
        address=ADDRESSES[2],
        token=TOKEN,
        state=State.HELD,
        attempt=17,
        age=3_600.0,
        remark="attempt 17 was abandoned: its lease ended without an answer",
    ),
    "done after a bypass": Entry(
        address=CHARGE,
        token=TOKEN,
        state=State.DONE,
        ttl=86_400.0,
        bypasses=1,
        remark=" | before: bypassed as ticket 4711",
    ),
}


def vectors() -> dict[str, Any]:
    """Return all vectors."""
    return {
        "format": FORMAT,
        "addresses": [_address(address) for address in ADDRESSES],
        "fingerprints": [*map(_whole, PAYLOADS), *_in_parts()],
        "results": [_result(value) for value in RESULTS],
        "entries": [_entry(name, entry) for name, entry in ENTRIES.items()],
    }


def _address(address: Address) -> dict[str, Any]:
    return {
        **_parts(address),
        "address": address.packed.hex(),
        "digest": address.digest,
        "redis_key": Keys(PREFIX).of(address).hex(),
        "dynamodb_key": text_of(address),
        "key_for": {
            "gateway": downstream(address, "gateway", 0),
            "gateway, bypassed once": downstream(address, "gateway", 1),
        },
    }


def _parts(address: Address) -> dict[str, str]:
    return {"scope": address.scope, "operation": address.operation, "key": address.key}


def _whole(payload: Any) -> dict[str, Any]:
    fingerprint = of_whole(recipe_of_whole("payload"), CHARGE.parts, payload)
    return {**_parts(CHARGE), "payload": payload, "encoded": encode(payload).hex(), "fingerprint": fingerprint.hex()}


def _in_parts() -> list[dict[str, Any]]:
    """The fingerprint of a decorated function: of each of its arguments, by name."""
    names, values = ["amount", "currency"], [4200, "EUR"]
    fingerprint = of_parts(recipe_of_parts(names), CHARGE.parts, values)
    return [{**_parts(CHARGE), "arguments": dict(zip(names, values, strict=True)), "fingerprint": fingerprint.hex()}]


def _result(value: Any) -> dict[str, Any]:
    return {"value": value, "result": MsgspecCodec().encode(value, Any).hex()}


def _entry(name: str, entry: Entry) -> dict[str, Any]:
    return {
        "name": name,
        "now": NOW,
        **_parts(entry.address),
        "record": meaning(_record(entry)),
        "stored": stored(entry),
    }


def _record(entry: Entry) -> Record:
    return msgspec.structs.replace(entry.as_record(), lease_left=entry.lease if entry.state is State.RUNNING else 0.0)


def stored(entry: Entry) -> dict[str, Any]:
    """What each store keeps of an entry that is written at this time."""
    row = sqlite_row(entry)
    forms = {
        "sqlite": row,
        "mysql": row,
        "postgresql": postgres_row(row, entry),
        "redis": redis_string(entry),
        "dynamodb": dict(sorted(item_of(entry, 1, Now(NOW, NOW, 0.0)).items())),
    }
    return {form: raw_record(_record(entry), StoredRecord(form, columns))["stored"] for form, columns in forms.items()}


def sqlite_row(entry: Entry) -> dict[str, Any]:
    """What SQLite itself has stored, at this time."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        records = Records(connection, clock=lambda: NOW)
        records.upgrade(0)
        assert records.claim(entry) is None
        found = records.stored(entry.address)
        assert found is not None
        return dict(found.columns)
    finally:
        connection.close()


def postgres_row(row: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """The same row on PostgreSQL: what is absent is NULL, and two columns are for its indexes."""
    return row | {
        "lease_until": row["lease_until"] if entry.state is State.RUNNING else None,
        "bypasses": row["bypasses"] or None,
        "omitted": row["omitted"] or None,
        "due": None if row["expires"] is None else math.floor(row["expires"] / 600),
        "held": True if entry.state is State.HELD else None,
    }


def redis_string(entry: Entry) -> dict[str, Any]:
    """The string that `claim.lua` puts together of its arguments and of the time."""
    now = round(NOW * 1000)
    call = redis_records.claim(Keys(PREFIX).of(entry.address), entry)
    head, age, lease, ttl, rest = call.arguments
    began = (now - int(age)).to_bytes(6)
    until = (now + int(lease)).to_bytes(6) if lease else b""
    return {"key": call.key, "value": head + began + until + rest, "pttl": int(ttl or -1), "now": now}


def statements() -> dict[str, Any]:
    """Return the operations on one record as SQL, with named parameters."""
    found = {
        form: {name: CAST.sub(r"CAST(\1 AS \2)", getattr(sql, of)) for name, of in OPERATIONS.items()}
        for form, sql in DIALECTS.items()
    }
    # MySQL has no upsert that says who won: if the INSERT is refused (1062), the record in the way is read.
    found["mysql"]["claim_expired"] = DIALECTS["mysql"].seize
    return found


def as_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


FILES = {
    VECTORS: lambda: as_text(vectors()),
    SCHEMA: lambda: as_text(schema()),
    STATEMENTS: lambda: as_text(statements()),
}
