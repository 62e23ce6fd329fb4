"""Seal and drop by hand: what a day and a purge would bring about."""

from __future__ import annotations

from typing import Any

from onefold import Guard
from onefold._concurrency.generators import run
from onefold._model import Entry, Gone, Record
from onefold.stores.postgres import PostgresStore, open_store
from onefold.stores.postgres.partitions.dialect import Partitioned, removing
from onefold.stores.postgres.statements.fragments import DUE_SECONDS
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from tests.stores.postgres.tools import another, rows

# A partition that is due as soon as it has a record, and a lock that is asked for each time.
AT_ONCE = Partitioned("day", 0.0)
TURNING_ONLY = Partitioned("day", 1e9)


def partitioned(url: str, period: str = "day") -> str:
    return f"{url}{'&' if '?' in url else '?'}partitions={period}"


def seal(url: str, wait: str = "5s") -> bool:
    """Seal the current partition, and drop what can be dropped. Return whether another is current now."""
    before = current(url)
    _turn(url, AT_ONCE, wait)
    return current(url) != before


def drop(url: str, wait: str = "5s") -> int:
    """Drop what can be dropped, and return about how many records went."""
    return _turn(url, TURNING_ONLY, wait)


def _turn(url: str, sql: Partitioned, wait: str) -> int:
    store = open_store(url)
    try:
        with store._pool.acquire() as connection:
            return run(sql.turn(wait, 0), connection)[0]
    finally:
        store.close()


def current(url: str) -> int:
    return int(rows(url, "SELECT 'onefold_records'::regclass::oid::bigint")[0][0])


def sealed(url: str) -> list[str]:
    """The sealed partitions, the oldest first."""
    found = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'onefold_records_sealed'::regclass"
    return [name for (name,) in rows(url, f"{found} ORDER BY inhrelid")]


def where(url: str, key: str) -> list[str]:
    """The partitions that hold a record of this key."""
    found = f"SELECT tableoid::regclass::text FROM onefold_records WHERE key = '{key}' ORDER BY tableoid"
    return [name for (name,) in rows(url, found)]


def expire(url: str, condition: str = "true", *, ago: float = 3600) -> None:
    """Let these records have expired."""
    past = f"date_part('epoch', clock_timestamp()) - {ago}"
    with another(url) as connection:
        connection.execute(
            f"UPDATE onefold_records SET expires = {past}, due = floor(({past}) / {DUE_SECONDS}) "
            f"WHERE {condition}".encode()
        )


def made_old(url: str, began: float = 1.0) -> None:
    """Let the current partition have begun long ago, so that the next purge seals it."""
    with another(url) as connection:
        connection.execute("DROP TRIGGER onefold_partitions ON onefold_records")
        connection.execute(
            "CREATE TRIGGER onefold_partitions BEFORE INSERT ON onefold_records FOR EACH ROW "
            f"EXECUTE FUNCTION onefold_records_once('1', '{began}')".encode()
        )


class SealsAfterEachClaim(Partitioned):
    """Seals a partition after each claim, so that hardly a record is in the current one."""

    def claim(
        self, entry: Entry, replacing: Record | None = None, mark: int | None = None
    ) -> SqlFlow[Record | Gone | None]:
        answer = yield from super().claim(entry, replacing, mark)
        yield from self.turn("5s", 0)
        return answer

    def purge(self, limit: int) -> SqlFlow[int]:
        """Delete row by row in each partition: it would be dropped ten minutes after its last record has expired."""
        # Not by the whole name, which would be qualified by its schema.
        found = "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relname ~ '^onefold_rec'"
        names: Reply = yield SqlRequest(found, {}, rows=True)
        removed = 0
        for (name,) in names.rows:
            reply: Reply = yield SqlRequest(removing(name), {"limit": limit - removed})
            removed += reply.written
        return removed


def sealing(store: Any) -> Any:
    store.database = store.database._replace(sql=SealsAfterEachClaim("day", 0.0))
    return store


def guard_on(url: str, **options: Any) -> Guard:
    store: PostgresStore = open_store(partitioned(url))
    return Guard(store, **options)
