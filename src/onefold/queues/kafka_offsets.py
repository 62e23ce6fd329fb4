"""Keep Kafka offsets in your own database: written in the transaction of the work, and never going back.

    offsets = Offsets(engine.begin, group="wallet")

A group's offsets in Kafka expire when it is idle for a week, and a reset group reads everything again, or nothing.
Offsets kept here match the work: `handle.subscribe` starts there. The SQL is plain, for every driver of `within`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from onefold import UsageError
from onefold._concurrency.generators import Flow, run, run_async
from onefold.queues._kafka.offsets import Delivery, Partition

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")

# How each driver writes a placeholder; the others use a percent sign.
MARKS: Final = {"sqlite3": "?", "aiosqlite": "?", "asyncpg": "${}", "sqlalchemy": ":v{}"}

COLUMNS: Final = "consumer_group, topic, partition_number, next_offset"
WHERE: Final = "consumer_group = {} AND topic = {} AND partition_number = {}"


class Statement(NamedTuple):
    """An SQL statement with braces for placeholders, and its values."""

    text: str
    values: Sequence[Any]


class Offsets:
    """The position of a group in each partition. `transaction` opens a transaction for reading: `engine.begin`."""

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
        _Sender(tx).send(Statement(self.schema, ()))

    async def create_async(self, tx: Any) -> None:
        await _AsyncSender(tx).send(Statement(self.schema, ()))

    def save(self, tx: Any, topic: str, partition: int, next_offset: int) -> None:
        """Write the next offset in this transaction. An offset below the stored one changes nothing."""
        run(self._save(topic, partition, next_offset), _Sender(tx))

    async def save_async(self, tx: Any, topic: str, partition: int, next_offset: int) -> None:
        await run_async(self._save(topic, partition, next_offset), _AsyncSender(tx))

    def saving(self, deliveries: Sequence[Delivery]) -> Callable[[Any, Collection[int]], None]:
        """Return a function that saves, in a transaction, the offsets below the first unfinished message of a poll."""

        def save(tx: Any, finished: Collection[int]) -> None:
            run(self._save_all(prefix(deliveries, finished)), _Sender(tx))

        return save

    def saving_async(self, deliveries: Sequence[Delivery]) -> Callable[[Any, Collection[int]], Awaitable[None]]:
        async def save(tx: Any, finished: Collection[int]) -> None:
            await run_async(self._save_all(prefix(deliveries, finished)), _AsyncSender(tx))

        return save

    def load(self, partitions: Iterable[tuple[str, int]]) -> dict[Partition, int]:
        """Return the next offset of each of these; leave out those that were never written."""
        with self._transaction() as tx:
            return run(self._load(partitions), _Sender(tx))

    async def load_async(self, partitions: Iterable[tuple[str, int]]) -> dict[Partition, int]:
        async with self._transaction() as tx:
            return await run_async(self._load(partitions), _AsyncSender(tx))

    def _load(self, partitions: Iterable[tuple[str, int]]) -> Flow[dict[Partition, int]]:
        found: dict[Partition, int] = {}
        for one in partitions:
            row = yield self._select(*one)
            if row is not None:
                found[Partition(*one)] = row[0]
        return found

    def _save_all(self, offsets: Mapping[Partition, int]) -> Flow[None]:
        for partition, following in offsets.items():
            yield from self._save(*partition, following)

    def _save(self, topic: str, partition: int, next_offset: int) -> Flow[None]:
        whose = (self._group, topic, partition)
        if (yield self._select(topic, partition)) is None:
            insert = f"INSERT INTO {self._table} ({COLUMNS}) VALUES ({{}}, {{}}, {{}}, {{}})"  # noqa: S608
            yield Statement(insert, (*whose, next_offset))
        else:
            # The condition, not the value read before, keeps a late worker from going back.
            update = f"UPDATE {self._table} SET next_offset = {{}} WHERE {WHERE} AND next_offset < {{}}"  # noqa: S608
            yield Statement(update, (next_offset, *whose, next_offset))

    def _select(self, topic: str, partition: int) -> Statement:
        select = f"SELECT next_offset FROM {self._table} WHERE {WHERE}"  # noqa: S608 - a checked name
        return Statement(select, (self._group, topic, partition))


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


class _Sender:
    """A blocking transaction, on which a statement gets its first row as the reply, or None."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx

    def send(self, statement: Statement) -> Any:
        sql, mark = _written(self._tx, statement)
        if mark == MARKS["sqlalchemy"]:
            return _first(self._tx.execute(sql, _named(statement.values)))
        cursor = self._tx.cursor()
        try:
            cursor.execute(sql, tuple(statement.values))
            return None if cursor.description is None else cursor.fetchone()
        finally:
            cursor.close()


class _AsyncSender:
    """The async `_Sender`. An AsyncGuard on SQLite provides sqlite3's own connection, which blocks."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx

    async def send(self, statement: Statement) -> Any:
        sql, mark = _written(self._tx, statement)
        if mark == MARKS["asyncpg"]:
            return await self._tx.fetchrow(sql, *statement.values)
        if mark == MARKS["sqlalchemy"]:
            return _first(await self._tx.execute(sql, _named(statement.values)))
        cursor = await _now(self._tx.cursor())
        try:
            await _now(cursor.execute(sql, tuple(statement.values)))
            return None if cursor.description is None else await _now(cursor.fetchone())
        finally:
            await _now(cursor.close())


def _written(tx: Any, statement: Statement) -> tuple[Any, str]:
    """Return the statement as this transaction's driver takes it, and how that writes a placeholder."""
    names = [kind.__module__.partition(".")[0] for kind in type(tx).__mro__]
    mark = next((MARKS[name] for name in names if name in MARKS), "%s")
    text = statement.text.format(*(mark.format(number) for number in range(1, len(statement.values) + 1)))
    if mark != MARKS["sqlalchemy"]:
        return text, mark
    from sqlalchemy import text as as_text

    return as_text(text), mark


def _named(values: Sequence[Any]) -> dict[str, Any]:
    return {f"v{number}": value for number, value in enumerate(values, 1)}


def _first(result: Any) -> Any:
    return result.fetchone() if result.returns_rows else None


async def _now(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
