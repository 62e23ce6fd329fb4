"""Judge the facts of PostgreSQL. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onefold.durations import as_text
from onefold.health import sql
from onefold.health.report import Check, counted, green, red, unknown, untold, yellow
from onefold.stores.base import Untold

Facts = Mapping[str, Any]

# The share of dead rows. A vacuum comes at a twentieth; if half of the table is dead, none has come.
DEAD_SHARE: Final = 0.5
# Below this the whole table is a few pages, and not worth a vacuum.
DEAD_ROWS_MANY: Final = 10_000

# The columns of the primary key, without which a duplicate would run.
ADDRESS: Final = ("scope", "operation", "key")

# So many sealed partitions take longer to look into than to delete from; a few more, and no other is sealed.
SEALED_MANY: Final = 35
# The current partition is sealed by the first purge after its period; a night without a delivery is no reason to worry.
PERIODS_LATE: Final = 2.0

# Settings under which a confirmed commit is on this server's disk.
ON_DISK: Final = ("on", "local", "remote_write", "remote_apply")

# Settings under which a commit waits for synchronous standbys.
REPLICATED: Final = ("on", "remote_write", "remote_apply")


def judge(facts: Facts) -> list[Check]:
    checks = [role(facts), durability(facts), isolation(facts), sql.tables(facts)]
    if not facts["in_recovery"] or isinstance(facts["in_recovery"], Untold):
        checks.insert(2, replication(facts))
    if sql.has_tables(facts):
        checks += [sql.indexes(facts), uniqueness(facts), dead_rows(facts), sql.purge_lag(facts), sql.size(facts)]
        if facts.get("partitions_wanted") or facts.get("current_partition_age") is not None:
            checks.append(partitions(facts))
    return checks


def hindrance(facts: Facts) -> str | None:
    """Return why the store is not tried out; None if it is."""
    if facts["in_recovery"] is True:
        return "it is a replica"
    if waits_for_nobody(facts):
        return "its commit would wait for ever"
    if sql.has_tables(facts) and lacks_partitions(facts) and facts["auto_schema"]:
        return "its table has no partitions yet, and the doctor does not change it"
    return sql.hindrance(facts)


def role(facts: Facts) -> Check:
    name = "role"
    if refused := untold(name, facts["in_recovery"], facts["transaction_read_only"]):
        return refused
    if facts["in_recovery"]:
        return red(
            name, "this is a replica: every claim is refused", "Name the primary (target_session_attrs=read-write)"
        )
    if facts["transaction_read_only"] == "on":
        return red(name, "transactions are read-only: every claim is refused", "Reset default_transaction_read_only")
    return green(name, f"a primary, PostgreSQL {facts['server_version']}")


def durability(facts: Facts) -> Check:
    name, commit = "durability", facts["synchronous_commit"]
    if refused := untold(name, commit):
        return refused
    if facts["fsync"] != "on":
        return red(name, f"fsync is {facts['fsync']}: a crash can damage the database", "fsync = on")
    if commit not in ON_DISK:
        return red(
            name,
            f"synchronous_commit is {commit}: a crash forgets claims and results that were answered, and duplicates "
            "run again",
            "synchronous_commit = on (for the role or the database: ALTER ROLE ... SET)",
        )
    if facts["full_page_writes"] != "on":
        # Right on a file system, or in a service, that never writes half a page.
        return yellow(
            name,
            f"full_page_writes is {facts['full_page_writes']}: unless the storage writes whole pages, as ZFS and some "
            "managed services do, a crash can damage the database",
            "full_page_writes = on",
        )
    if facts["synchronous_standby_names"] and commit == "local":
        return yellow(
            name,
            "there are synchronous standbys, but synchronous_commit is local: a failover can lose the last moments",
            "synchronous_commit = on or remote_apply",
        )
    lossy = ". A failover to an asynchronous replica may lose the last moments"
    replicas = "" if facts["synchronous_standby_names"] else lossy
    return green(name, f"fsync is on, synchronous_commit is {commit}{replicas}")


def replication(facts: Facts) -> Check:
    name, standbys, confirming = "replication", facts["standbys"], facts["synchronous_standbys"]
    if refused := untold(name, standbys, confirming, facts["synchronous_commit"]):
        return refused
    if waits_for_nobody(facts):
        return red(
            name,
            f"synchronous_standby_names is {facts['synchronous_standby_names']}, and no such standby is connected: "
            "every commit waits",
            "Start the standby, or reset synchronous_standby_names",
        )
    if standbys == 0:
        return green(name, "no standby is connected: nothing to fail over to")
    many = counted(standbys, "standby")
    if facts["hidden_standbys"]:
        return unknown(name, f"{many}; whether they are synchronous is not shown to this user", "GRANT pg_monitor")
    if confirming == 0:
        return yellow(
            name,
            f"{many}, and none is synchronous: a fail-over can lose the last commits, records and rows, and "
            "their duplicates run again",
            "synchronous_standby_names (Patroni: synchronous_mode: true); docs/stores/postgres.md#fail-over",
        )
    if facts["synchronous_commit"] not in REPLICATED:
        return yellow(
            name,
            f"{many}, {confirming} of them synchronous, but synchronous_commit is {facts['synchronous_commit']}: "
            "no commit waits for them, and a fail-over can lose the last ones",
            "synchronous_commit = on",
        )
    return green(name, f"{many}, {confirming} of them synchronous: a fail-over to one loses no confirmed commit")


def waits_for_nobody(facts: Facts) -> bool:
    """Return whether commits wait for a synchronous standby, and none is connected."""
    return bool(
        facts.get("synchronous_standby_names")
        # Without room for a standby, PostgreSQL waits for none.
        and facts["max_wal_senders"] != "0"
        and facts["synchronous_commit"] in REPLICATED
        and facts.get("synchronous_standbys") == 0
        and facts.get("hidden_standbys") == 0
    )


def isolation(facts: Facts) -> Check:
    level = facts["transaction_isolation"]
    if refused := untold("isolation", level):
        return refused
    if level in ("repeatable read", "serializable"):
        return green("isolation", f"{level}: conflicting transactional handlers are retried")
    return green("isolation", f"{level}, unless the URL or the handler says otherwise")


def uniqueness(facts: Facts) -> Check:
    name, key = "uniqueness", facts["key_columns"]
    if refused := untold(name, key):
        return refused
    if set(key) != set(ADDRESS):
        there = f"its primary key is ({', '.join(key)})" if key else "it has no primary key"
        return red(
            name,
            f"{there}, not ({', '.join(ADDRESS)}): one key could have two records, and every claim is refused",
            "Partition by hash of (scope, operation, key), never by a time: docs/stores/postgres.md",
        )
    if facts["has_sealed"] is True and facts["current_partition_age"] is None:
        return red(
            name,
            "there are sealed partitions, and no trigger on the table: a key whose record is in one of them runs again",
            f"{sql.APPLY}, with partitions= in the URL",
        )
    parts = facts["partitions"]
    split = f", in {counted(parts, 'partition')}" if isinstance(parts, int) and parts else ""
    return green(name, f"one record for each scope, operation and key{split}")


def partitions(facts: Facts) -> Check:
    """Judge the partitions of `?partitions=`: whether the current one is sealed in time, and others are dropped."""
    name, age, sealed = "partitions", facts["current_partition_age"], facts["partitions"]
    wanted: tuple[str, float] | None = facts.get("partitions_wanted")
    if refused := untold(name, age, sealed):
        return refused
    if age is None and facts["auto_schema"]:
        return yellow(
            name,
            "the URL says partitions=, and the table has none yet: the first delivery makes it the first partition",
            f"{sql.APPLY}, at a quiet time: docs/stores/postgres.md",
        )
    if age is None:
        return red(
            name,
            "the URL says partitions=, the table has none, and auto_schema=no: every delivery is refused",
            f"{sql.APPLY}, with partitions= in the URL",
        )
    text = f"{counted(sealed, 'sealed partition')}, and the current one is {as_text(round(float(age)))} old"
    if wanted is None:
        return green(name, f"{text}. A store whose URL does not say partitions= seals and drops none")
    if sealed >= SEALED_MANY:
        return yellow(
            name,
            f"{text}: each claim looks into all of them",
            "Choose a longer period (partitions=week), or keep what lives longest in a store of its own",
        )
    if age > PERIODS_LATE * wanted[1]:
        return yellow(
            name,
            f"{text}, not sealed after a {wanted[0]}: no owner of the table purges, a transaction is always open, or "
            "a view, say, is in the way",
            "Run `onefold purge --store URL --every 60s` as the owner of the table: it says what is in the way. Look "
            "for long transactions",
        )
    return green(name, text)


def lacks_partitions(facts: Facts) -> bool:
    """Return whether the URL says partitions= of a table that is not partitioned."""
    return bool(facts.get("partitions_wanted")) and facts["current_partition_age"] is None


def dead_rows(facts: Facts) -> Check:
    name, live, dead = "dead rows", facts["live_rows"], facts["dead_rows"]
    if refused := untold(name, live, dead):
        return refused
    text = f"{dead:,} beside {live:,} living"
    if dead >= DEAD_ROWS_MANY and dead > DEAD_SHARE * (live + dead):
        return yellow(
            name,
            f"{text}: no vacuum keeps up with them, and reads get slower",
            "VACUUM onefold_records; then look for a long transaction, and at the autovacuum settings",
        )
    return green(name, text)
