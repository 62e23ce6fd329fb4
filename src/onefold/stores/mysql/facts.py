"""MySQL's and MariaDB's facts: their settings, our table, its indexes, and the records that are due for purging."""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from typing import Any, Final

from onefold.stores.base import Untold
from onefold.stores.mysql.statements.fragments import NOW
from onefold.stores.sql import facts as sql_facts
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import SqlFlow
from onefold.stores.sql.records import IN_DOUBT_SECONDS_MIN, TABLE

# The isolation level has a different name on each of the two.
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

# Deleted or changed row versions that some open transaction may still need. Reading it takes a permission.
_HISTORY: Final = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"

_EXPIRED: Final = f"{TABLE} WHERE expires <= {NOW} ORDER BY expires LIMIT"

_OLDEST: Final = (
    f"SELECT (SELECT {NOW} - expires FROM {_EXPIRED} 1), "
    f"(SELECT COUNT(*) FROM (SELECT 1 FROM {_EXPIRED} {sql_facts.EXPIRED_COUNTED_MAX}) AS counted)"
)

_IN_DOUBT: Final = sql_facts.counting_in_doubt(
    NOW, within=f"expires >= {IN_DOUBT_SECONDS_MIN:.0f}", by="expires", literal="_binary"
)


def facts(database: Database) -> SqlFlow[dict[str, Any]]:
    found: dict[str, Any] = {"kind": "mysql", "clock": (yield from sql_facts.moment(database, f"SELECT {NOW}"))}
    settings = yield from sql_facts.rows(database, _SETTINGS)
    if isinstance(settings, Untold):
        found |= dict.fromkeys(SETTINGS, settings)
    else:
        found |= {sql_facts.text(name): sql_facts.text(value) for name, value in settings}
        found["server_version"] = found.pop("version", Untold("the server does not say"))
    found |= yield from sql_facts.tables(database)
    if found["version"] and not isinstance(found["version"], Untold):
        found |= yield from _table(database)
    return found


def _table(database: Database) -> SqlFlow[dict[str, Any]]:
    found: dict[str, Any] = yield from sql_facts.row(database, _TABLE, ("engine", "live_rows", "table_bytes"))
    found |= yield from sql_facts.row(database, _HISTORY, ("history_length",))
    found |= yield from sql_facts.indexes(
        database, _INDEXES, wanted=INDEXES, for_purge=PURGE_INDEX, oldest=_OLDEST, doubtful=_IN_DOUBT
    )
    return found | {"engine": sql_facts.text(found["engine"])}
