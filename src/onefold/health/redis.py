"""Judge the facts of Redis and Valkey. Pure.

A store that forgets is worse than one that refuses: anything that makes the server drop records by itself is red.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from onefold.health.report import Check, counted, green, in_bytes, red, unknown, untold, worst, yellow
from onefold.stores.base import Untold

Server = Mapping[str, Any]

# Used memory, as a share of `maxmemory`. From the first there is time to act; at the second a busy hour fills it.
MEMORY_TIGHT: Final = 0.80
MEMORY_FULL: Final = 0.95

SLOTS: Final = 16_384

ALLOW_INFO: Final = "Give the user +info"
FORBIDDEN: Final = "Managed services forbid some commands: look for the setting in their console"


def judge(facts: Mapping[str, Any]) -> list[Check]:
    """Return, for each check, the result of the worst server."""
    servers: list[Server] = facts["servers"]
    judged: list[Callable[[Server], Check]] = [
        eviction_policy,
        evicted_keys,
        memory,
        persistence,
        fsync,
        lambda server: replication(server, int(facts["wait_replicas"])),
        neighbours,
    ]
    if facts["clustered"]:
        judged.append(cluster)
    return [_of_all(servers, [judgement(server) for server in servers]) for judgement in judged]


def hindrance(facts: Mapping[str, Any]) -> str | None:
    """Return why the store is not tried out; None if it is."""
    return "it is a replica" if is_replica(facts) else None


def is_replica(facts: Mapping[str, Any]) -> bool:
    infos = [server["info"] for server in facts["servers"]]
    return any(info.get("role") == "slave" for info in infos if not isinstance(info, Untold))


def _of_all(servers: list[Server], checks: list[Check]) -> Check:
    """Return the worst check, with the name of its server if they differ."""
    found = worst(checks)
    if len(set(checks)) == 1:
        return found
    return found._replace(reason=f"{servers[checks.index(found)]['name']}: {found.reason}")


def eviction_policy(server: Server) -> Check:
    name, info = "eviction policy", server["info"]
    if refused := untold(name, info, fix=ALLOW_INFO):
        return refused
    policy = info.get("maxmemory_policy")
    if policy is None:
        return unknown(name, "the server does not say its maxmemory-policy", FORBIDDEN)
    if policy == "noeviction":
        return green(name, "noeviction: a full server refuses, and forgets nothing")
    return red(
        name,
        f"maxmemory-policy is {policy}: when memory is short the server silently drops records, and their duplicates "
        "run again",
        "CONFIG SET maxmemory-policy noeviction (and in redis.conf, or the parameter group), and give Onefold a server "
        "of its own",
    )


def evicted_keys(server: Server) -> Check:
    name, info = "evicted keys", server["info"]
    if refused := untold(name, info, fix=ALLOW_INFO):
        return refused
    count = int(info.get("evicted_keys", 0))
    if count == 0:
        return green(name, "none since the server started")
    return red(
        name,
        f"{counted(count, 'key')} evicted since the server started, possibly including records: what they guarded can "
        "run again",
        "Set noeviction, give it more memory, look for effects that happened twice; then CONFIG RESETSTAT",
    )


def memory(server: Server) -> Check:
    name, info = "memory", server["info"]
    if refused := untold(name, info, fix=ALLOW_INFO):
        return refused
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if limit == 0:
        return yellow(
            name,
            f"{in_bytes(used)} used, and maxmemory is not set: the system kills the server when the machine's memory "
            "is full",
            "CONFIG SET maxmemory to what the machine can spare",
        )
    text = f"{in_bytes(used)} of {in_bytes(limit)} used ({used / limit:.0%})"
    fix = "Raise maxmemory, move others away, or keep records for a shorter time"
    if used > MEMORY_FULL * limit:
        return red(name, f"{text}: it is about to refuse claims, or to evict", fix)
    if used > MEMORY_TIGHT * limit:
        return yellow(name, f"{text}: more than {MEMORY_TIGHT:.0%}", fix)
    return green(name, text)


def persistence(server: Server) -> Check:
    name, info, save = "persistence", server["info"], server["save"]
    if refused := untold(name, info, fix=ALLOW_INFO):
        return refused
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            return red(name, "the last write to the append-only file failed", "Look at its log and its disk")
        return green(name, "append-only file")
    if isinstance(save, Untold):
        return unknown(name, f"there is no append-only file; whether it takes snapshots is not known: {save.why}")
    if not save:
        return red(
            name,
            "off: neither an append-only file nor snapshots. A restart forgets every record, and duplicates run again",
            "CONFIG SET appendonly yes (and in redis.conf)",
        )
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return red(name, "the last snapshot failed: the server accepts no writes", "Look at its log and its disk")
    return yellow(
        name,
        f"snapshots only (save {save}): a crash forgets what came after the last one",
        "CONFIG SET appendonly yes (and in redis.conf)",
    )


def fsync(server: Server) -> Check:
    name, info, setting = "fsync", server["info"], server["appendfsync"]
    if refused := untold(name, info, setting):
        return refused
    if info.get("aof_enabled") != "1":
        return green(name, "no append-only file, so there is nothing to sync: see persistence")
    if setting == "always":
        return green(name, "always: what was answered is on the disk")
    lost = "about a second" if setting == "everysec" else "half a minute"
    return yellow(
        name,
        f"appendfsync is {setting}: a crash of the machine can forget {lost} of records",
        "CONFIG SET appendfsync always, where a second run costs money",
    )


def replication(server: Server, wait_replicas: int) -> Check:
    name, info, setting = "replication", server["info"], server["min-replicas-to-write"]
    if refused := untold(name, info, fix=ALLOW_INFO):
        return refused
    if info.get("role") == "slave":
        return red(
            name,
            "this is a replica: claims are refused, or written where nobody looks",
            "Name the primary, or Sentinel",
        )
    replicas = int(info.get("connected_slaves", 0))
    if replicas == 0:
        return green(name, "a primary without replicas: nothing to fail over to")
    many = counted(replicas, "replica")
    # INFO has this line only if the setting is above zero.
    isolated = "min_slaves_good_slaves" not in info and setting in ("0", "")
    if isinstance(setting, Untold) and "min_slaves_good_slaves" not in info:
        return unknown(name, f"{many}; whether min-replicas-to-write is set is not known: {setting.why}")
    if isolated:
        return yellow(
            name,
            f"{many}, and min-replicas-to-write is 0: a primary that is cut off continues to answer, and what it "
            "writes is lost in the failover",
            "CONFIG SET min-replicas-to-write 1, and wait_replicas=1 in the URL",
        )
    waits = f"claims wait for {wait_replicas}" if wait_replicas else "claims wait for none: wait_replicas=1 in the URL"
    return green(name, f"{many}, and min-replicas-to-write is set; {waits}")


def neighbours(server: Server) -> Check:
    name, sample, info = "neighbours", server["sample"], server["info"]
    if refused := untold(name, sample, fix="Give the user +scan"):
        return refused
    fix = "Give Onefold a server of its own: others' load fills its memory, and their FLUSHALL empties it"
    if sample["foreign"]:
        text = f"{sample['foreign']:,} of {counted(sample['seen'], 'key')} looked at are not ours"
        return yellow(name, f"{text}: somebody shares this database", fix)
    # INFO has a line for each database that holds keys; one of them is ours, if we have any.
    filled = 0 if isinstance(info, Untold) else sum(line[:2] == "db" and line[2:].isdecimal() for line in info)
    others = filled - (sample["seen"] > 0)
    if others > 0:
        return yellow(name, f"keys in {counted(others, 'other database')} of this server: they share its memory", fix)
    return green(name, f"none: {counted(sample['seen'], 'key')} looked at, all ours")


def cluster(server: Server) -> Check:
    name, told = "cluster", server["cluster"]
    if refused := untold(name, told):
        if "cannot be reached" in refused.reason:
            return red(name, refused.reason, "Start it again, or let a replica take its place: CLUSTER NODES")
        return refused._replace(fix="Give the user +cluster|info")
    if told.get("cluster_state") != "ok":
        return red(
            name,
            f"cluster_state is {told.get('cluster_state')}: claims are refused",
            "Look at CLUSTER NODES and the logs",
        )
    served, failing = int(told.get("cluster_slots_ok", 0)), int(told.get("cluster_slots_pfail", 0))
    if served < SLOTS and not failing:
        return red(name, f"{served:,} of {SLOTS:,} slots are served", "Assign the others: redis-cli --cluster fix")
    if failing:
        return yellow(name, f"{counted(failing, 'slot')} of a server that does not answer", "Look at CLUSTER NODES")
    return green(name, f"ok, all {SLOTS:,} slots are served by {told.get('cluster_size')} primaries")
