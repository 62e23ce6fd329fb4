"""DynamoDB's description, for modules that know no store."""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult

from onefold.stores.dynamodb.records import LEASE_MIN
from onefold.stores.identity import Identity
from onefold.stores.kinds import StoreKind

# The table of a URL without one.
TABLE: Final = "onefold_records"


def identity(_url: str, parts: SplitResult, options: dict[str, str]) -> Identity:
    server = frozenset({options["endpoint_url"].lower().rstrip("/")} if "endpoint_url" in options else ())
    # Table names are case-sensitive.
    table = f"{parts.netloc}{parts.path}".rstrip("/") or TABLE
    return Identity("dynamodb", server, table, region=options.get("region"))


KIND: Final = StoreKind(
    name="DynamoDB",
    has_transactions=False,
    expires_by_itself=True,
    clock_margin=1.0,
    lease_min=LEASE_MIN,
    health="onefold.health.dynamodb",
    identity=identity,
)
