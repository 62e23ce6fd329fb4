"""The operations of a store that purges by dropping partitions. All but purges are those of every PostgreSQL."""

# ruff: noqa: S608 - statements are made of names of our own and of the catalog, never of values

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple

from onefold.stores.postgres.dialect import Postgres
from onefold.stores.postgres.partitions import turning
from onefold.stores.postgres.partitions.layout import IS_LAID_OUT, LAYOUT
from onefold.stores.postgres.statements.fragments import DUE_SECONDS, typed
from onefold.stores.postgres.wakeups import NotifyingPostgres
from onefold.stores.sql import facts as sql_facts
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import TABLE

# How long a claim may wait behind a lock that is taken beside deliveries, and by `onefold purge`. The latter is longer
# than the usual deadlock_timeout, after which the server ends an autovacuum that is in the way.
BACKGROUND_WAIT: Final = "100ms"
PURGE_WAIT: Final = "1500ms"

# A partition is dropped at a time, and there are no more.
DROPS_MAX: Final = turning.SEALED_MAX + 1

# Its last records are moved, and it is dropped.
STEPS_EACH: Final = 2


def removing(table: str) -> str:
    """Return the statement that deletes expired records of one partition, row by row, as `Postgres.remove_expired`."""
    return typed(
        f"DELETE FROM ONLY {table} WHERE ctid = ANY (ARRAY(SELECT ctid FROM ONLY {table} "
        f"WHERE due <= (SELECT floor(:now / {DUE_SECONDS})::integer) AND expires <= :now "
        "ORDER BY due LIMIT :limit FOR UPDATE SKIP LOCKED)) AND expires <= :now"
    )


_REMOVE: Final = removing(TABLE)

# As `Postgres.remove_near`.
_REMOVE_NEAR: Final = typed(
    f"DELETE FROM ONLY {TABLE} WHERE ctid = ANY (ARRAY(SELECT ctid FROM ONLY {TABLE} WHERE ctid = ANY (ARRAY("
    f"SELECT ctid FROM ONLY {TABLE} WHERE due <= (SELECT floor(:now / {DUE_SECONDS})::integer) ORDER BY due "
    "LIMIT :limit)) AND expires <= :now FOR UPDATE SKIP LOCKED)) AND expires <= :now"
)


class Partitioned(Postgres):
    """PostgreSQL with partitions of one period each, of which `layout` says how they keep addresses apart."""

    def __init__(self, period: str, seconds: float) -> None:
        self.period = period
        self.seconds = seconds

    def script(self) -> str:
        return f"{super().script()}\n{LAYOUT.strip()};\n"

    def is_laid_out(self) -> SqlFlow[bool]:
        seen: object = ()
        while True:
            reply: Reply = yield SqlRequest(IS_LAID_OUT, {}, rows=True)
            triggers, table = reply.rows[0]
            # Just as a partition is sealed, a statement may find the name of the new table and not yet its trigger. If
            # the next one finds the same table, none was sealed in between, and there is no trigger.
            if triggers or table == seen:
                return bool(triggers)
            seen = table

    def lay_out(self) -> SqlFlow[None]:
        yield SqlRequest(LAYOUT, {})

    def purge(self, limit: int) -> SqlFlow[int]:
        """Drop what can be dropped; delete row by row what has expired before its partition was sealed."""
        return (yield from self._purge(_REMOVE, limit, PURGE_WAIT))

    def background_purge(self, limit: int) -> SqlFlow[int]:
        return (yield from self._purge(_REMOVE_NEAR, limit, BACKGROUND_WAIT))

    def _purge(self, remove: str, limit: int, wait: str) -> SqlFlow[int]:
        deletion = SqlRequest(remove, {"limit": max(limit, 0)})
        reply: Reply
        try:
            dropped, stuck = yield from self.turn(wait)
        except Exception:
            # Something of the caller's is in the way, perhaps for long. The current partition need not grow meanwhile:
            # whoever purges in batches is told once there is nothing left to delete.
            reply = yield deletion
            if reply.written >= limit > 0:
                return reply.written
            raise
        reply = yield deletion
        removed = reply.written
        if stuck is not None and removed < limit:
            reply = yield SqlRequest(removing(stuck), {"limit": limit - removed})
            removed += reply.written
        return dropped + removed

    def turn(self, wait: str, retry: float = turning.RETRY_SECONDS) -> SqlFlow[tuple[int, str | None]]:
        """Seal the current partition if it is due, and drop those whose records have all expired.

        Return about how many records went, and a partition that cannot be dropped for long, if there is one.
        """
        turned = yield from _look()
        if turned is None or not turned.is_allowed:
            return 0, None
        if abs(turned.age) >= self.seconds:
            yield SqlRequest(turning.sealing(period=self.seconds, wait=wait, retry=retry), {})
            turned = (yield from _look()) or turned
        records = 0
        for _ in range(STEPS_EACH * min(turned.sealed, DROPS_MAX)):
            before = turned.note
            yield SqlRequest(turning.dropping(period=self.seconds, wait=wait, retry=retry), {})
            turned = (yield from _look()) or turned
            if turned.note == before or not turned.has_gone_on:
                break
            if turned.has_dropped:
                records += turned.records
                logging.getLogger("onefold").info("dropped a partition of %s: about %d records", TABLE, turned.records)
        return records, turned.stuck

    def facts(self, database: Database) -> SqlFlow[dict[str, Any]]:
        from onefold.stores.postgres.facts import oldest_in

        found: dict[str, Any] = yield from super().facts(database)
        found["partitions_wanted"] = self.period, self.seconds
        if found.get("current_partition_age") is not None:
            # What a sealed partition holds goes with it.
            found |= yield from sql_facts.expired(database, oldest_in(f"ONLY {TABLE}"))
        return found


class PartitionedNotifying(Partitioned, NotifyingPostgres):
    """The same for a store that tells of the ends of its records."""


class Turned(NamedTuple):
    """What `turning.LOOK` returns."""

    age: float
    is_allowed: bool
    sealed: int
    note: str | None
    backend: int

    @property
    def has_gone_on(self) -> bool:
        """Return whether a partition was dropped last, or its records were moved."""
        return (self.note or "").startswith((turning.DROPPED, turning.MOVED))

    @property
    def has_dropped(self) -> bool:
        """Return whether this session has dropped a partition last. Behind a pooler it may have been another session's.

        Then its records are not counted, rather than twice.
        """
        what, *rest = (self.note or "").split(" ")
        return what == turning.DROPPED and int(rest[1]) == self.backend

    @property
    def records(self) -> int:
        """Return about how many records were dropped or moved last."""
        return int((self.note or "").split(" ")[1])

    @property
    def stuck(self) -> str | None:
        """Return a partition that cannot be dropped for long, and has records that have expired."""
        what, _, which = (self.note or "").partition(" ")
        return which if what == turning.STUCK and which and self.sealed else None


def _look() -> SqlFlow[Turned | None]:
    """Return how the partitions are; None if there are none."""
    reply: Reply = yield SqlRequest(turning.LOOK, {}, rows=True)
    return Turned(*reply.rows[0]) if reply.rows and reply.rows[0][0] is not None else None
