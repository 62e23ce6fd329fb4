"""The doctor's judgements, which are pure: facts that are hard to have on a real server."""

from __future__ import annotations

import re
from typing import Any

import pytest

from onefold.health import Grade, mysql, postgres, redis, sql, sqlite
from onefold.health.examine import ROUND_TRIP_SLOW, clock
from onefold.health.report import Check, in_bytes, worst
from onefold.health.trial import OPERATION
from onefold.stores.base import Untold
from tests.health.tools import GREEN, RED, UNKNOWN, YELLOW
from tests.support import PROJECT

SILENT = Untold("permission denied")

SERVER: dict[str, Any] = {
    "name": "",
    "info": {"aof_enabled": "1", "role": "master", "connected_slaves": "0"},
    "save": "",
    "appendfsync": "always",
    "min-replicas-to-write": "0",
    "sample": {"seen": 0, "foreign": 0},
    "cluster": None,
}


def server(**info: str) -> dict[str, Any]:
    return SERVER | {"info": SERVER["info"] | info}


def test_a_failing_append_only_file_is_red() -> None:
    assert redis.persistence(server(aof_last_write_status="err")).grade is RED


def test_a_failing_snapshot_is_red() -> None:
    failing = server(aof_enabled="0", rdb_last_bgsave_status="err") | {"save": "60 1"}

    assert redis.persistence(failing).grade is RED


def test_without_config_no_append_only_file_is_unknown_and_not_red() -> None:
    assert redis.persistence(server(aof_enabled="0") | {"save": SILENT}).grade is UNKNOWN


def test_without_config_info_tells_whether_replicas_are_needed() -> None:
    silent = {"min-replicas-to-write": SILENT}

    assert redis.replication(server(connected_slaves="2") | silent, 0).grade is UNKNOWN
    assert redis.replication(server(connected_slaves="2", min_slaves_good_slaves="2") | silent, 0).grade is GREEN


@pytest.mark.parametrize(
    ("told", "grade"),
    [
        ({"cluster_state": "ok", "cluster_slots_ok": "16384"}, GREEN),
        ({"cluster_state": "ok", "cluster_slots_ok": "16000", "cluster_slots_pfail": "384"}, YELLOW),
        ({"cluster_state": "ok", "cluster_slots_ok": "16000", "cluster_slots_pfail": "0"}, RED),
        ({"cluster_state": "fail"}, RED),
        (SILENT, UNKNOWN),
        (Untold("it cannot be reached: Connection refused"), RED),
    ],
)
def test_the_health_of_a_cluster(told: Any, grade: Grade) -> None:
    assert redis.cluster(SERVER | {"cluster": told}).grade is grade


def test_all_servers_are_judged_and_the_worst_is_told() -> None:
    servers = [server(maxmemory_policy="noeviction"), server(maxmemory_policy="allkeys-lru") | {"name": "second:6379"}]

    first, *_ = redis.judge({"servers": servers, "clustered": False, "wait_replicas": 0})

    assert (first.grade, first.reason.partition(":")[0]) == (RED, "second")
    assert worst([Check("x", GREEN, "a"), Check("x", UNKNOWN, "b"), Check("x", YELLOW, "c")]).reason == "c"


@pytest.mark.parametrize(("on", "sync", "grade"), [("OFF", "0", GREEN), ("ON", "1", GREEN), ("ON", "0", YELLOW)])
def test_a_binary_log_that_is_not_synced_is_yellow(on: str, sync: str, grade: Grade) -> None:
    assert mysql.binary_log({"log_bin": on, "sync_binlog": sync}).grade is grade


def test_a_long_history_is_yellow_and_a_secret_one_unknown() -> None:
    assert mysql.history({"history_length": mysql.HISTORY_LONG + 1}).grade is YELLOW
    assert mysql.history({"history_length": SILENT}).grade is UNKNOWN


def test_where_mysql_says_nothing_nothing_is_made_up() -> None:
    told = dict.fromkeys(("read_only", "innodb_flush_log_at_trx_commit", "log_bin", "tx_isolation"), SILENT)
    facts = told | {"max_allowed_packet": SILENT, "version": SILENT, "auto_schema": True}

    assert {check.grade for check in mysql.judge(facts)} == {UNKNOWN}
    assert mysql.hindrance(facts) == "it is not known whether its tables exist"


def test_where_postgres_says_nothing_nothing_is_made_up() -> None:
    names = (
        *("in_recovery", "transaction_read_only", "synchronous_commit", "transaction_isolation", "version"),
        *("standbys", "synchronous_standbys", "hidden_standbys"),
    )

    assert {check.grade for check in postgres.judge(dict.fromkeys(names, SILENT))} == {UNKNOWN}


@pytest.mark.parametrize(
    ("standbys", "commit", "grade", "told"),
    [
        ((0, 0, 0), "on", GREEN, "nothing to fail over to"),
        ((2, 0, 0), "on", YELLOW, "2 standbys, and none is synchronous: a fail-over can lose the last commits"),
        ((2, 1, 0), "on", GREEN, "2 standbys, 1 of them synchronous"),
        ((1, 1, 0), "remote_apply", GREEN, "1 standby, 1 of them synchronous"),
        ((1, 1, 0), "local", YELLOW, "synchronous_commit is local: no commit waits"),
        ((1, 0, 1), "on", UNKNOWN, "not shown to this user"),
    ],
)
def test_a_standby_that_confirms_no_commit_is_yellow(
    standbys: tuple[int, int, int], commit: str, grade: Grade, told: str
) -> None:
    counts = dict(zip(("standbys", "synchronous_standbys", "hidden_standbys"), standbys, strict=True))

    found = postgres.replication(counts | {"synchronous_commit": commit})

    assert found.grade is grade
    assert told in found.reason


def test_half_pages_are_yellow_because_some_storage_writes_none() -> None:
    facts = {"synchronous_commit": "on", "fsync": "on", "full_page_writes": "off"}

    assert postgres.durability(facts).grade is YELLOW
    assert postgres.durability(facts | {"synchronous_commit": "off"}).grade is RED
    assert postgres.durability(facts | {"fsync": "off"}).grade is RED


def test_many_expired_records_are_counted_up_to_a_bound() -> None:
    found = sql.purge_lag({"expired_for": 90_000.0, "expired_count": sql.COUNTED_MAX})

    assert "expired: 10,000 records or more, the oldest by 25h" in found.reason


@pytest.mark.parametrize(
    ("facts", "grade"),
    [({"free_bytes": 1_000}, YELLOW), ({"log_bytes": 10**9}, YELLOW), ({}, GREEN), ({"writable": False}, RED)],
)
def test_the_disk_of_a_file(facts: dict[str, Any], grade: Grade) -> None:
    usual = {"writable": True, "file_bytes": 4096, "log_bytes": 0, "free_bytes": 10**10}

    assert sqlite.disk(usual | facts).grade is grade


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ((100.0, 100.05, 100.1), "the same as"),
        ((100.0, 103.55, 100.1), "3.5 s ahead of"),
        ((100.0, 40.05, 100.1), "60 s behind"),
    ],
)
def test_the_difference_of_the_clocks_is_told_and_never_judged(told: tuple[float, ...], message: str) -> None:
    found = clock({"kind": "postgres", "clock": told})

    assert found.grade is GREEN
    assert message in found.reason


def test_sizes_are_told_for_people() -> None:
    assert [in_bytes(size) for size in (0, 999, 10_485_760, 5 * 10**12)] == [
        "0 bytes",
        "999 bytes",
        "10.5 MB",
        "5000.0 GB",
    ]


def test_the_page_names_every_check_and_every_bound() -> None:
    text = (PROJECT / "docs" / "doctor.md").read_text(encoding="utf-8")
    names = set()
    for path in (PROJECT / "src" / "onefold" / "health").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        names |= set(re.findall(r"\bname(?:, \w+)* = \"([a-z -]+)\"", source))
        names |= set(re.findall(r"\b(?:green|yellow|red|unknown|untold)\(\s*\"([a-z -]+)\"", source))

    assert len(names) > 20
    assert [name for name in sorted(names - {"server"}) if f"`{name}`" not in text] == []
    bounds = [f"{redis.MEMORY_TIGHT:.0%}", f"{redis.MEMORY_FULL:.0%}", f"{ROUND_TRIP_SLOW * 1000:.0f} ms"]
    bounds += [in_bytes(sqlite.FREE_MIN), in_bytes(sqlite.LOG_LONG), f"{postgres.DEAD_ROWS_MANY:,}", f"`{OPERATION}`"]
    assert [bound for bound in bounds if bound.replace("%", " %").replace(".0 MB", " MB") not in text] == []
