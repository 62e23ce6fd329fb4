"""Keep Kafka offsets in your own database: written in the transaction of the work, and never going back.

    offsets = Offsets(engine.begin, group="wallet")

A group's offsets in Kafka expire when it is idle for a week, and a reset group reads everything again, or nothing.
Those kept here are where the work really is: `handle.subscribe` starts there. The SQL is plain, for every driver of
`within`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Final

from onefold import UsageError
from onefold.queues._kafka.offsets import Delivery, Partition

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")

# How each driver writes a placeholder; the others use a percent sign.
MARKS: Final = {"sqlite3": "?", "aiosqlite": "?", "asyncpg": "${}", "sqlalchemy": ":v{}"}

COLUMNS: Final = "consumer_group, topic, partition_number, next_offset"
WHERE: Final = "consumer_group = {} AND topic = {} AND partition_number = {}"


class Offsets:
    """Where a group is in each partition. `transaction` opens a transaction for reading: `engine.begin`."""

    def __init__(self, transaction: Callable[[], Any], *, group: str, table: str = "onefold_offsets") -> None:
        if not callable(transaction):
            raise UsageError("Offsets(transaction, ...) takes a function that opens a transaction: engine.begin, ...")
        if not NAME.fullmatch(table):
            raise UsageError(f"table={table!r} is not the plain name of a table")
        self._transaction = transaction
        self._group = group
        self._table = table

    @property
    def schema(self) -> str:
        """Return the statement that creates the table, for a migration."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self._table} (consumer_group VARCHAR(255) NOT NULL, topic VARCHAR(249) "
            "NOT NULL, partition_number INTEGER NOT NULL, next_offset BIGINT NOT NULL, "
            "PRIMARY KEY (consumer_group, topic, partition_number))"
        )

    def create(self, tx: Any) -> None:
        """Create the table if there is none."""
        _ask(tx, self.schema, ())

    async def create_async(self, tx: Any) -> None:
        await _ask_async(tx, self.schema, ())

    def save(self, tx: Any, topic: str, partition: int, next_offset: int) -> None:
        """Write the next offset in this transaction. A lower one than the existing one changes nothing."""
        found = _ask(tx, *self._select(topic, partition))
        _ask(tx, *self._write(found, topic, partition, next_offset))

    async def save_async(self, tx: Any, topic: str, partition: int, next_offset: int) -> None:
        found = await _ask_async(tx, *self._select(topic, partition))
        await _ask_async(tx, *self._write(found, topic, partition, next_offset))

    def saving(self, deliveries: Sequence[Delivery]) -> Callable[[Any, Collection[int]], None]:
        """Return a function of a transaction and the finished indexes of a poll, which saves what is below the rest."""

        def save(tx: Any, finished: Collection[int]) -> None:
            for partition, following in prefix(deliveries, finished).items():
                self.save(tx, *partition, following)

        return save

    def saving_async(self, deliveries: Sequence[Delivery]) -> Callable[[Any, Collection[int]], Awaitable[None]]:
        async def save(tx: Any, finished: Collection[int]) -> None:
            for partition, following in prefix(deliveries, finished).items():
                await self.save_async(tx, *partition, following)

        return save

    def load(self, partitions: Iterable[tuple[str, int]]) -> dict[Partition, int]:
        """Return the next offset of each of these; those that were never written are left out."""
        with self._transaction() as tx:
            found = {Partition(*one): _ask(tx, *self._select(*one)) for one in partitions}
        return {partition: row[0] for partition, row in found.items() if row is not None}

    async def load_async(self, partitions: Iterable[tuple[str, int]]) -> dict[Partition, int]:
        async with self._transaction() as tx:
            found = {Partition(*one): await _ask_async(tx, *self._select(*one)) for one in partitions}
        return {partition: row[0] for partition, row in found.items() if row is not None}

    def _select(self, topic: str, partition: int) -> tuple[str, Sequence[Any]]:
        select = f"SELECT next_offset FROM {self._table} WHERE {WHERE}"  # noqa: S608 - a checked name
        return select, (self._group, topic, partition)

    def _write(self, found: Any, topic: str, partition: int, next_offset: int) -> tuple[str, Sequence[Any]]:
        whose = (self._group, topic, partition)
        if found is None:
            insert = f"INSERT INTO {self._table} ({COLUMNS}) VALUES ({{}}, {{}}, {{}}, {{}})"  # noqa: S608
            return insert, (*whose, next_offset)
        # The condition, and not what was read a moment ago, keeps a late worker from going back.
        update = f"UPDATE {self._table} SET next_offset = {{}} WHERE {WHERE} AND next_offset < {{}}"  # noqa: S608
        return update, (next_offset, *whose, next_offset)


def prefix(deliveries: Sequence[Delivery], finished: Collection[int]) -> dict[Partition, int]:
    """Return the next offset of each partition, below the first unfinished message of the poll."""
    following: dict[Partition, int] = {}
    stopped: set[Partition] = set()
    for number, (spot, *_) in enumerate(deliveries):
        if number not in finished:
            stopped.add(spot.partition)
        elif spot.partition not in stopped:
            following[spot.partition] = spot.offset + 1
    return following


def _ask(tx: Any, statement: str, values: Sequence[Any]) -> Any:
    """Return the first row, or None."""
    sql, mark = _written(tx, statement, len(values))
    if mark == MARKS["sqlalchemy"]:
        result = tx.execute(sql, {f"v{number}": value for number, value in enumerate(values, 1)})
        return result.fetchone() if result.returns_rows else None
    cursor = tx.cursor()
    try:
        cursor.execute(sql, tuple(values))
        return None if cursor.description is None else cursor.fetchone()
    finally:
        cursor.close()


async def _ask_async(tx: Any, statement: str, values: Sequence[Any]) -> Any:
    sql, mark = _written(tx, statement, len(values))
    if mark == MARKS["asyncpg"]:
        return await tx.fetchrow(sql, *values)
    if mark == MARKS["sqlalchemy"]:
        result = await tx.execute(sql, {f"v{number}": value for number, value in enumerate(values, 1)})
        return result.fetchone() if result.returns_rows else None
    # An AsyncGuard on SQLite provides sqlite3's own connection, which blocks.
    cursor = await _now(tx.cursor())
    await _now(cursor.execute(sql, tuple(values)))
    row = None if cursor.description is None else await _now(cursor.fetchone())
    await _now(cursor.close())
    return row


def _written(tx: Any, statement: str, count: int) -> tuple[Any, str]:
    names = [kind.__module__.partition(".")[0] for kind in type(tx).__mro__]
    mark = next((MARKS[name] for name in names if name in MARKS), "%s")
    text = statement.format(*(mark.format(number) for number in range(1, count + 1)))
    if mark != MARKS["sqlalchemy"]:
        return text, mark
    from sqlalchemy import text as as_text

    return as_text(text), mark


async def _now(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
