"""The page of the DynamoDB store is true: its code runs, its numbers are measured, its names exist."""

from __future__ import annotations

import math
import re
import types

import pytest

from onefold._model import Ending, State
from onefold.stores.base import Query
from onefold.stores.dynamodb import LEASE_MIN, OPTIONS, DynamoDBStore
from tests.stores.dynamodb.tools import claim_of, client_options, counted, entry, plain_client, size_of, table_of
from tests.support import PROJECT

PAGE = PROJECT / "docs" / "stores" / "dynamodb.md"
TEXT = PAGE.read_text(encoding="utf-8")
URL = "dynamodb://onefold_records?region=eu-central-1"


def test_every_code_block_runs(dynamodb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The page's names, at the place of the tests.
    options = client_options(dynamodb_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", options["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", options["region_name"])
    module = types.ModuleType("page")
    monkeypatch.setitem(__import__("sys").modules, "page", module)
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4

    for block in blocks:
        here = block.replace(URL, dynamodb_url)
        here = here.replace('"onefold_records"', repr(table_of(dynamodb_url)))
        here = here.replace('"wallet"', repr(f"{table_of(dynamodb_url)}_wallet"))
        exec(compile(here, str(PAGE), "exec"), module.__dict__)
    module.__dict__["guard"].close()
    module.__dict__["client"].close()


@pytest.mark.parametrize(
    ("message", "result"),
    [("none", None), ("36 bytes", bytes(36)), ("300 bytes", bytes(300)), ("1 KiB", bytes(1024))],
)
def test_the_sizes_are_measured(dynamodb_url: str, message: str, result: bytes | None) -> None:
    sizes = []
    with plain_client(dynamodb_url) as client:
        store = DynamoDBStore(table_of(dynamodb_url), client=client, clock=lambda: 1_900_000_000.123)
        for ttl in (86_400.0, math.inf):
            mine = entry("k" * 36, fingerprint=bytes(36))
            store.claim(mine)
            store.finish(claim_of(mine), Ending(state=State.DONE, ttl=ttl, result=result))
            (item,) = client.scan(TableName=store.table)["Items"]
            sizes.append(size_of(item))
            store.release(claim_of(mine))

    assert f"| {message} | {sizes[0]:,} | {sizes[1]:,} |" in TEXT


def test_the_page_names_every_option_and_the_least_lease() -> None:
    missing = [name for name in OPTIONS if f"| `?{name}=" not in TEXT]

    assert missing == []
    assert f"{LEASE_MIN:g} s" in TEXT


def test_the_page_names_every_permission_that_is_needed(dynamodb_url: str) -> None:
    with plain_client(dynamodb_url) as client:
        sent, store, mine = counted(client), DynamoDBStore(table_of(dynamodb_url), client=client), entry()
        store.claim(mine)
        store.extend(claim_of(mine))
        store.release(claim_of(mine))
        store.browse(Query(), 1)

    missing = [action for action in {*sent} if f"`{action}`" not in TEXT and f":{action}`" not in TEXT]
    assert missing == []
