"""Judge the facts of a DynamoDB table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.health.report import Check, counted, green, red, unknown, untold, yellow
from onefold.stores.base import Untold

Facts = Mapping[str, Any]

APPLY = "onefold schema --store URL --apply"


def judge(facts: Facts) -> list[Check]:
    checks = [table(facts)]
    if facts["table"] is not None:
        checks += [regions(facts), time_to_live(facts), capacity(facts), backups(facts)]
    return checks


def hindrance(facts: Facts) -> str | None:
    """Return why the store is not tried out; None if it is."""
    if facts["table"] is None:
        return "the table does not exist yet, and the doctor creates none"
    if isinstance(facts["table"], Untold):
        return None
    return None if _status(facts) in ("ACTIVE", "UPDATING") else "the table cannot be used yet"


def _status(facts: Facts) -> str:
    return str(facts["table"].get("TableStatus", "unknown"))


def table(facts: Facts) -> Check:
    name, found = "table", facts["table"]
    if refused := untold(name, found):
        return refused
    if found is None and facts["auto_schema"]:
        return yellow(name, "there is none yet: the first delivery creates it", APPLY)
    if found is None:
        return red(name, "there is none, and auto_schema=no: every delivery is refused", APPLY)
    if _status(facts) not in ("ACTIVE", "UPDATING"):
        return red(name, f"it is {_status(facts)}: claims are refused", "Wait for it, or look at it in the console")
    count = found.get("ItemCount")
    return green(name, "active" if count is None else f"active, about {counted(count, 'record')}")


def regions(facts: Facts) -> Check:
    name, told = "regions", facts["table"]
    if refused := untold(name, told):
        return refused
    others = ", ".join(sorted(str(one.get("RegionName")) for one in told.get("Replicas") or ()))
    if not others:
        return green(name, "one: this is not a global table")
    fix = "Use a table in one region for each key, or another store"
    if told.get("MultiRegionConsistency") == "STRONG":
        return yellow(name, f"a global table with strong consistency, also in {others}: it was never tried", fix)
    return red(name, f"a global table, also in {others}: two regions can both win a claim, and both run", fix)


def time_to_live(facts: Facts) -> Check:
    name, told = "time to live", facts["time_to_live"]
    if refused := untold(name, told):
        return refused
    status, attribute = told.get("TimeToLiveStatus"), told.get("AttributeName")
    if status is None:
        return unknown(name, "the endpoint does not say")
    if status in ("ENABLED", "ENABLING") and attribute == "expires":
        return green(name, "on, by the attribute expires")
    return yellow(
        name,
        f"{'on for another attribute' if status in ('ENABLED', 'ENABLING') else 'off'}: expired records are "
        "never removed, and the bill grows",
        f"Turn it on for the attribute `expires`: {APPLY}",
    )


def capacity(facts: Facts) -> Check:
    name, told = "capacity", facts["table"]
    if refused := untold(name, told):
        return refused
    mode = told.get("BillingModeSummary", {}).get("BillingMode")
    units = told.get("ProvisionedThroughput", {}).get("WriteCapacityUnits", 0)
    if mode == "PAY_PER_REQUEST":
        return green(name, "on demand")
    if mode is None and not units:
        return unknown(name, "the endpoint does not say")
    return yellow(
        name,
        f"provisioned, {units} writes a second: claims beyond that are refused, and each delivery writes twice",
        "On demand (PAY_PER_REQUEST), or auto scaling and an alarm on throttled requests",
    )


def backups(facts: Facts) -> Check:
    name, told = "backups", facts["backups"]
    if refused := untold(name, told):
        return refused
    status = told.get("PointInTimeRecoveryDescription", {}).get("PointInTimeRecoveryStatus")
    if status is None:
        return unknown(name, "the endpoint does not say")
    # An old copy of the records would let newer duplicates run: it is a choice, not a fault.
    return green(
        name, "point-in-time recovery is on" if status == "ENABLED" else "point-in-time recovery is off: optional"
    )
