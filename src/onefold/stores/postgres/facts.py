"""PostgreSQL's facts: its settings, its role, our table, its indexes, and the records that are due for purging."""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from typing import Any, Final

from onefold.stores.base import Untold
from onefold.stores.postgres.partitions.layout import BEGAN, OUR_TRIGGER, SEALED
from onefold.stores.postgres.statements.fragments import DUE_SECONDS, NOW
from onefold.stores.sql import facts as sql_facts
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.records import IN_DOUBT_SECONDS_MIN, TABLE

SETTINGS: Final = (
    "server_version",
    "synchronous_commit",
    "synchronous_standby_names",
    "max_wal_senders",
    "fsync",
    "full_page_writes",
    "transaction_isolation",
    "transaction_read_only",
)

# Who could take over: not a backup in progress, nor a consumer of logical changes. Without the role pg_monitor a user
# sees that others are connected, and nothing else about them.
STANDBYS: Final = ("standbys", "synchronous_standbys", "hidden_standbys")
_STANDBYS: Final = (
    "SELECT count(*), count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')), "
    "count(*) FILTER (WHERE sync_state IS NULL) FROM pg_stat_replication WHERE coalesce(state, '') <> 'backup' AND "
    "pid NOT IN (SELECT active_pid FROM pg_replication_slots WHERE slot_type = 'logical' AND active_pid IS NOT NULL)"
)

PURGE_INDEX: Final = f"{TABLE}_due"
INDEXES: Final = (f"{TABLE}_pkey", PURGE_INDEX, f"{TABLE}_held")

# The same condition as purge's.
_EXPIRED: Final = f"WHERE due <= (SELECT floor({NOW} / {DUE_SECONDS})::integer) AND expires <= {NOW}"


def oldest_in(table: str) -> str:
    """Return the statement for `sql_facts.expired`."""
    found = f"{table} {_EXPIRED} ORDER BY due LIMIT"
    return (
        f"SELECT (SELECT {NOW} - expires FROM {found} 1), "
        f"(SELECT count(*) FROM (SELECT 1 FROM {found} {sql_facts.EXPIRED_COUNTED_MAX}) AS counted)"
    )


_OLDEST: Final = oldest_in(TABLE)

_IN_DOUBT: Final = sql_facts.counting_in_doubt(NOW, within=f"due >= {IN_DOUBT_SECONDS_MIN / DUE_SECONDS:.0f}", by="due")

# Counted since the statistics were reset; dead rows wait for a vacuum. The rows of partitions are summed up, and the
# one that was vacuumed least recently counts.
_TABLE: Final = (
    "SELECT sum(n_live_tup)::bigint, sum(n_dead_tup)::bigint, "
    "date_part('epoch', min(greatest(last_vacuum, last_autovacuum))), sum(pg_total_relation_size(relid))::bigint, "
    f"count(*) FILTER (WHERE held_by <> to_regclass('{TABLE}') AND relname <> '{SEALED}') FROM ("
    f"WITH RECURSIVE tree AS (SELECT to_regclass('{TABLE}')::oid AS held_by UNION ALL "
    "SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = held_by) SELECT held_by FROM tree) AS leaves "
    "JOIN pg_stat_user_tables ON relid = held_by "
    "WHERE held_by NOT IN (SELECT partrelid FROM pg_partitioned_table)"
)

_WHICH: Final = f"SELECT to_regclass('{TABLE}')::oid::bigint"

# Sealing is rare: twice in a row is an hour or more.
LOOKS_MAX: Final = 2

# Of a table that the store itself has partitioned; NULL of any other. And whether it has sealed partitions.
_CURRENT: Final = (
    f"SELECT (SELECT {NOW} - {BEGAN} FROM {OUR_TRIGGER} = to_regclass('{TABLE}')), "
    "EXISTS (SELECT FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid "
    f"WHERE inhparent = to_regclass('{TABLE}') AND relname = '{SEALED}')"
)

# Our primary key is what keeps a second record of an address out.
_KEY: Final = (
    "SELECT attname::text FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey) "
    f"WHERE indrelid = to_regclass('{TABLE}') AND indisprimary ORDER BY array_position(indkey::smallint[], attnum)"
)

# What an index of ours is called in each partition.
_PARTS: Final = (
    "SELECT part.relname::text FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid "
    f"WHERE inhparent = to_regclass('{PURGE_INDEX}')"
)

_INDEXES: Final = (
    "SELECT index_class.relname::text FROM pg_index "
    "JOIN pg_class AS index_class ON index_class.oid = pg_index.indexrelid "
    f"WHERE pg_index.indrelid = to_regclass('{TABLE}') AND pg_index.indisvalid"
)

_PLAN: Final = f"EXPLAIN (FORMAT TEXT) SELECT ctid FROM {TABLE} {_EXPIRED} ORDER BY due LIMIT 1000"


def facts(database: Database) -> SqlFlow[dict[str, Any]]:
    found: dict[str, Any] = {"kind": "postgres", "clock": (yield from sql_facts.moment(database, f"SELECT {NOW}"))}
    settings = ", ".join(f"current_setting('{name}')" for name in SETTINGS)
    found |= yield from sql_facts.row(database, f"SELECT {settings}, pg_is_in_recovery()", (*SETTINGS, "in_recovery"))
    found |= yield from sql_facts.row(database, _STANDBYS, STANDBYS)
    found |= yield from sql_facts.tables(database)
    if found["version"] and not isinstance(found["version"], Untold):
        found |= yield from _settled_table(database)
    return found


def _settled_table(database: Database) -> SqlFlow[dict[str, Any]]:
    """Return the facts of the table; look again if a partition was sealed meanwhile, which gives it another table."""
    found: dict[str, Any] = {}
    for _ in range(LOOKS_MAX):
        before = yield from sql_facts.rows(database, _WHICH)
        found = yield from _table(database)
        if before == (yield from sql_facts.rows(database, _WHICH)):
            break
    return found


def _table(database: Database) -> SqlFlow[dict[str, Any]]:
    names = ("live_rows", "dead_rows", "vacuumed_at", "table_bytes", "partitions")
    found: dict[str, Any] = yield from sql_facts.row(database, _TABLE, names)
    found |= yield from sql_facts.indexes(
        database, _INDEXES, wanted=INDEXES, for_purge=PURGE_INDEX, oldest=_OLDEST, doubtful=_IN_DOUBT
    )
    found |= yield from sql_facts.row(database, _CURRENT, ("current_partition_age", "has_sealed"))
    key = yield from sql_facts.rows(database, _KEY)
    found["key_columns"] = key if isinstance(key, Untold) else [str(name) for (name,) in key]
    return found | {"plan": (yield from _plan(database))}


def _plan(database: Database) -> SqlFlow[str | Untold]:
    """Return the plan of a purge. The index of a partition counts as ours."""
    plan = yield from sql_facts.rows(database, _PLAN)
    if isinstance(plan, Untold):
        return plan
    parts = yield from sql_facts.rows(database, _PARTS)
    text = "\n".join(str(line) for (line,) in plan)
    names = {str(name) for (name,) in ([] if isinstance(parts, Untold) else parts)}
    return f"{text}\n{PURGE_INDEX}" if any(name in text for name in names) else text
