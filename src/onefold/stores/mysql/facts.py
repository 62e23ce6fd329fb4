"""What MySQL and MariaDB say of themselves: their settings, our table, its indexes, and what waits to be purged."""

# ruff: noqa: S608 - statements are made of the names in `_sql`, never of values

from __future__ import annotations

from typing import Any, Final

from onefold.stores.base import Untold
from onefold.stores.mysql.statements.fragments import NOW
from onefold.stores.sql import facts as sql_facts
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.records import TABLE

# The isolation has another name on each of the two.
SETTINGS: Final = (
    "version",
    "innodb_flush_log_at_trx_commit",
    "sync_binlog",
    "log_bin",
    "max_allowed_packet",
    "read_only",
    "super_read_only",
    "transaction_isolation",
    "tx_isolation",
)

PURGE_INDEX: Final = f"{TABLE}_expires"
INDEXES: Final = ("PRIMARY", PURGE_INDEX)

_SETTINGS: Final = f"SHOW VARIABLES WHERE Variable_name IN ({', '.join(map(repr, SETTINGS))})"

_TABLE: Final = (
    "SELECT engine, table_rows, data_length + index_length FROM information_schema.tables "
    f"WHERE table_schema = DATABASE() AND table_name = '{TABLE}'"
)

_INDEXES: Final = (
    "SELECT DISTINCT index_name FROM information_schema.statistics "
    f"WHERE table_schema = DATABASE() AND table_name = '{TABLE}'"
)

# Rows that are deleted or changed, but that some open transaction may still want to see. Only some may ask.
_HISTORY: Final = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"

_EXPIRED: Final = f"{TABLE} WHERE expires <= {NOW} ORDER BY expires LIMIT"

_OLDEST: Final = (
    f"SELECT (SELECT {NOW} - expires FROM {_EXPIRED} 1), "
    f"(SELECT COUNT(*) FROM (SELECT 1 FROM {_EXPIRED} {sql_facts.EXPIRED_COUNTED_MAX}) AS counted)"
)


def facts(database: Database) -> SqlFlow[dict[str, Any]]:
    found: dict[str, Any] = {"kind": "mysql", "clock": (yield from sql_facts.moment(database, f"SELECT {NOW}"))}
    settings = yield from sql_facts.rows(database, _SETTINGS)
    if isinstance(settings, Untold):
        found |= dict.fromkeys(SETTINGS, settings)
    else:
        found |= {_text(name): _text(value) for name, value in settings}
        found["server_version"] = found.pop("version", Untold("the server does not say it"))
    found |= yield from sql_facts.tables(database)
    if found["version"] and not isinstance(found["version"], Untold):
        found |= yield from _table(database)
    return found


def _table(database: Database) -> SqlFlow[dict[str, Any]]:
    found: dict[str, Any] = yield from sql_facts.row(database, _TABLE, ("engine", "live_rows", "table_bytes"))
    found |= yield from sql_facts.row(database, _HISTORY, ("history_length",))
    indexes = yield from sql_facts.rows(database, _INDEXES)
    if isinstance(indexes, Untold):
        return found | {"indexes": indexes}
    there = sorted(_text(name) for (name,) in indexes)
    found |= {"engine": _text(found["engine"]), "indexes": there, "indexes_wanted": INDEXES, "purge_index": PURGE_INDEX}
    if PURGE_INDEX not in there:
        # Without the index it would read the whole table.
        return found | dict.fromkeys(("expired_for", "expired_count"), Untold("the index is missing"))
    return found | (yield from sql_facts.expired(database, _OLDEST))


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
