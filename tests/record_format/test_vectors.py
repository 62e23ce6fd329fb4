"""The vectors that other languages test themselves with: the code writes them, reads them, and so do the servers."""

from __future__ import annotations

import hashlib
import json
import math
import runpy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from onefold import Guard, Record
from onefold._model import Entry, State
from onefold.cli._common.raw_record import meaning, raw_record
from onefold.codecs import MsgspecCodec
from onefold.stores.base import Address
from onefold.stores.dynamodb.items import address_of
from onefold.stores.redis.keys import Keys
from tests.record_format.stores import ENTRIES, FOLDER, STORES, TIMES, VECTORS, moved, opened, url_of, write

MADE = runpy.run_path(str(FOLDER / "vectors.py"))
WRITTEN: dict[str, Entry] = MADE["ENTRIES"]
SCHEMA = json.loads((FOLDER / "raw.schema.json").read_text(encoding="utf-8"))

# DynamoDB's clock is known to about three seconds, and its times are rounded up. The time between two looks at a clock
# is measured.
TOLERANCE = 5.0


def of(found: Mapping[str, Any]) -> Address:
    return Address(found["scope"], found["operation"], found["key"])


@pytest.mark.parametrize("path", MADE["FILES"], ids=lambda path: path.name)
def test_the_files_are_what_the_code_writes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == MADE["FILES"][path](), "run `make docs`"


def test_every_stored_form_of_the_vectors_is_valid_by_the_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    documents = [
        {
            "store": store,
            "format": VECTORS["format"],
            **{name: entry[name] for name in ("scope", "operation", "key")},
            "address": of(entry).packed.hex(),
            "digest": of(entry).digest,
            "stored": stored,
            "record": entry["record"],
        }
        for entry in VECTORS["entries"]
        for store, stored in entry["stored"].items()
    ]

    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(documents)] == []
    assert {document["store"] for document in documents} == set(STORES)
    assert not Draft202012Validator(SCHEMA).is_valid([{**documents[0], "digest": "?"}])


@pytest.mark.parametrize("vector", VECTORS["addresses"], ids=lambda vector: f"{vector['scope']} {vector['key'][:8]}")
def test_an_address_is_read_back_from_each_of_its_forms(vector: dict[str, Any]) -> None:
    packed, parts = bytes.fromhex(vector["address"]), []
    assert hashlib.sha256(packed).hexdigest()[:12] == vector["digest"]
    while packed:
        size = int.from_bytes(packed[:2])
        parts.append(packed[2 : 2 + size].decode())
        packed = packed[2 + size :]

    assert Address(*parts) == of(vector)
    assert Keys("onefold:").address(bytes.fromhex(vector["redis_key"])) == of(vector)
    assert address_of(vector["dynamodb_key"]) == of(vector)


def test_no_two_addresses_look_alike() -> None:
    for form in ("address", "digest", "redis_key", "dynamodb_key"):
        assert len({vector[form] for vector in VECTORS["addresses"]}) == len(VECTORS["addresses"])


@pytest.mark.parametrize("vector", VECTORS["fingerprints"], ids=str)
def test_a_guard_writes_the_fingerprint_of_the_vector(vector: dict[str, Any]) -> None:
    with Guard("memory:") as guard:
        if "payload" in vector:
            guard.run(vector["operation"], vector["key"], lambda: None, payload=vector["payload"])
        else:

            @guard.idempotent(vector["operation"], key="key")
            def charge(key: str, amount: int, currency: str) -> None: ...

            charge(vector["key"], **vector["arguments"])
        found = guard.read(vector["operation"], vector["key"])

    assert found is not None
    assert found.fingerprint is not None
    assert found.fingerprint.hex() == vector["fingerprint"]


@pytest.mark.parametrize("vector", VECTORS["results"], ids=str)
def test_a_result_is_the_value_of_the_vector(vector: dict[str, Any]) -> None:
    value = MsgspecCodec().decode(bytes.fromhex(vector["result"]), Any)

    assert (value, type(value)) == (vector["value"], type(vector["value"]))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("store", STORES)
def test_what_a_store_writes_are_the_columns_and_bytes_of_the_vector(
    store: str, entry: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    written = WRITTEN[entry["name"]]
    with opened(url_of(store, request, tmp_path)) as found:
        since = time.monotonic()
        assert found.claim(written) is None
        record, stored = found.read(written.address), found.stored(written.address)
        tolerance = TOLERANCE + time.monotonic() - since

    actual = raw_record(record, stored)
    assert (actual["store"], of(actual)) == (store, of(entry))
    compare(store, actual["stored"], entry["stored"][store], tolerance)


def compare(store: str, actual: dict[str, Any], vector: dict[str, Any], tolerance: float) -> None:
    """Byte by byte, except that it was written later."""
    if store == "redis":
        shift = (int(actual["value"][34:46], 16) - int(vector["value"][34:46], 16)) / 1000
        assert actual.pop("pttl") == pytest.approx(vector["pttl"], abs=tolerance * 1000)
        assert abs(actual.pop("now") / 1000 - vector["now"] / 1000 - shift) < tolerance
        later = moved(store, vector, shift)
        assert actual == {"key": later["key"], "value": later["value"]}
        return
    began = float(actual["began"]["N"] if store == "dynamodb" else actual["began"])
    shift = began - float(vector["began"]["N"] if store == "dynamodb" else vector["began"])
    later = moved(store, vector, shift)
    for name in TIMES:
        times = [one.pop(name, None) for one in (actual, later)]
        found, wanted = (float(one["N"]) if isinstance(one, dict) else one for one in times)
        assert found == (None if wanted is None else pytest.approx(wanted, abs=tolerance)), name
    if later.get("due") is not None:
        assert abs(actual.pop("due") - later.pop("due")) <= 1
    assert actual == later


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("store", STORES)
def test_what_another_program_writes_by_the_vector_is_read_as_its_record(
    store: str, entry: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = url_of(store, request, tmp_path)
    with opened(url) as found:
        assert found.read(of(entry)) is None
        since = time.monotonic()
        write(store, url, moved(store, entry["stored"][store], time.time() - entry["now"]))
        record = found.read(of(entry))
        tolerance = TOLERANCE + time.monotonic() - since

    assert isinstance(record, Record)
    assert record.address == of(entry)
    actual, wanted = meaning(record), dict(entry["record"])
    for name in ("age", "lease_left", "ttl_left"):
        left, right = actual.pop(name), wanted.pop(name)
        assert (math.inf if left is None else left) == pytest.approx(
            math.inf if right is None else right, abs=tolerance
        )
    assert actual == wanted


def test_the_vectors_have_every_state() -> None:
    assert {entry["record"]["state"] for entry in VECTORS["entries"]} == {state.value for state in State}
