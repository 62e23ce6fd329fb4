"""Judge the facts of MySQL and MariaDB. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onefold import Policy
from onefold.health import sql
from onefold.health.report import Check, counted, green, in_bytes, red, unknown, untold, yellow
from onefold.stores.base import Untold

Facts = Mapping[str, Any]

# Bytes are sent as hexadecimal digits, two for each, with a statement around them.
PACKET_MIN: Final = 2 * Policy().max_result_bytes + 2**16

# Changes that some transaction may still need to see. InnoDB purges thousands a second: a million means that a
# transaction has been open for a long time.
HISTORY_LONG: Final = 1_000_000

ENGINE: Final = "InnoDB"


def judge(facts: Facts) -> list[Check]:
    checks = [role(facts), durability(facts), binary_log(facts), isolation(facts), packet(facts), sql.tables(facts)]
    if sql.has_tables(facts):
        checks += [engine(facts), sql.indexes(facts), history(facts), sql.purge_lag(facts), sql.size(facts)]
    return checks


def hindrance(facts: Facts) -> str | None:
    """Return why the store is not tried out; None if it is. A privileged user could write even to a replica."""
    return "it is a replica, or read-only" if is_read_only(facts) else sql.hindrance(facts)


def is_read_only(facts: Facts) -> bool:
    # MySQL reports ON; MariaDB has some more values for it.
    return any(
        facts.get(name) not in (None, "OFF", "0") and not isinstance(facts.get(name), Untold) for name in READ_ONLY
    )


READ_ONLY: Final = ("read_only", "super_read_only")


def role(facts: Facts) -> Check:
    if refused := untold("role", facts.get("read_only")):
        return refused
    if is_read_only(facts):
        return red("role", "the server is read-only, as replicas are: claims are refused", "Name the primary")
    return green("role", f"a primary, {facts['server_version']}")


def durability(facts: Facts) -> Check:
    name, setting = "durability", facts.get("innodb_flush_log_at_trx_commit")
    if refused := untold(name, setting):
        return refused
    text = f"innodb_flush_log_at_trx_commit is {setting}"
    fix = "innodb_flush_log_at_trx_commit = 1"
    if setting in ("1", "3"):
        return green(name, text)
    if setting == "2":
        return yellow(name, f"{text}: a crash of the machine forgets a second of records", fix)
    if setting == "0":
        return red(name, f"{text}: a crash of the server forgets a second of records that were answered", fix)
    return unknown(name, "the server does not say how it writes its log")


def binary_log(facts: Facts) -> Check:
    name, on, sync = "binary log", facts.get("log_bin"), facts.get("sync_binlog")
    if refused := untold(name, on, sync):
        return refused
    if on != "ON":
        return green(name, "off: there are no replicas")
    if sync == "1":
        return green(name, "synced at each commit")
    return yellow(
        name,
        f"sync_binlog is {sync}: after a crash a replica can lack records that were answered",
        "sync_binlog = 1",
    )


def isolation(facts: Facts) -> Check:
    level = facts.get("transaction_isolation") or facts.get("tx_isolation")
    if refused := untold("isolation", level):
        return refused
    if level == "READ-UNCOMMITTED":
        return yellow(
            "isolation",
            "READ-UNCOMMITTED: a duplicate can be answered by a record whose transaction is rolled back after all",
            "READ-COMMITTED, or isolation=read-committed in the URL",
        )
    return green("isolation", f"{level}, unless the URL or the handler says otherwise")


def packet(facts: Facts) -> Check:
    name, told = "max packet", facts.get("max_allowed_packet")
    if refused := untold(name, told):
        return refused
    if told is None:
        return unknown(name, "the server does not say")
    if int(told) < PACKET_MIN:
        return yellow(
            name,
            f"max_allowed_packet is {in_bytes(int(told))}, too small for a result of max_result_bytes",
            f"max_allowed_packet = {PACKET_MIN} or more, or a smaller max_result_bytes",
        )
    return green(name, in_bytes(int(told)))


def engine(facts: Facts) -> Check:
    found = facts["engine"]
    if refused := untold("engine", found):
        return refused
    if found == ENGINE:
        return green("engine", ENGINE)
    return red(
        "engine",
        f"the table is in {found}, which has no transactions: a crash damages it",
        f"ALTER TABLE onefold_records ENGINE={ENGINE}",
    )


def history(facts: Facts) -> Check:
    name, length = "dead rows", facts["history_length"]
    if refused := untold(name, length):
        return refused._replace(fix="GRANT PROCESS, to see it")
    if int(length) > HISTORY_LONG:
        return yellow(
            name,
            f"{counted(int(length), 'change')} wait for InnoDB's purge: a transaction has been open for a long time",
            "Look for it in information_schema.innodb_trx",
        )
    return green(name, f"{counted(int(length), 'change')} wait for InnoDB's purge")
