"""A business transaction with a record in it, on PostgreSQL: ours, and with a hand-written dedup INSERT.

The business is one UPDATE of a balance, and the balance says how often it ran.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from bench.measure import Side
from bench.sides import AMOUNT, postgres_database
from onefold import TX, AsyncGuard, Guard
from services.house import House

CREDIT: Final = "UPDATE wallet SET balance = balance + 1 WHERE account = 'a'"
CREDIT_MANY: Final = "UPDATE wallet SET balance = balance + %s WHERE account = 'a'"
DEDUP: Final = "INSERT INTO by_hand (id) VALUES (%s) ON CONFLICT DO NOTHING"
DEDUP_MANY: Final = "INSERT INTO by_hand (id) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING RETURNING id"

# Messages in a batch.
BATCH: Final = 100


@contextmanager
def wallet(house: House) -> Iterator[tuple[str, Any]]:
    """Yield the URL of a database with a wallet in it, and a connection."""
    import psycopg

    with postgres_database(house) as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE by_hand (id text PRIMARY KEY, seen timestamptz NOT NULL DEFAULT now())")
        connection.execute("CREATE TABLE wallet (account text PRIMARY KEY, balance bigint NOT NULL)")
        connection.execute("INSERT INTO wallet VALUES ('a', 0)")
        yield url, connection


def balance(connection: Any) -> int:
    return int(connection.execute("SELECT balance FROM wallet").fetchone()[0])


@contextmanager
def within(house: House) -> Iterator[Side]:
    with wallet(house) as (url, connection), Guard(url) as guard:
        # The table of the records is made on the store's own connection, never in the caller's transaction.
        guard.read("credit", "none")

        def credit() -> None:
            connection.execute(CREDIT)

        def deliver(key: str) -> None:
            with connection.transaction():
                guard.within(connection).run("credit", key, credit)

        yield Side("within", deliver, deliver, lambda: balance(connection))


@contextmanager
def transactional(house: House) -> Iterator[Side]:
    with wallet(house) as (url, connection), Guard(url) as guard:

        @guard.transactional("credit", key="payment_id")
        def credit(payment_id: str, amount: int, *, tx: Any = TX) -> None:  # noqa: ARG001 - they are what is delivered
            tx.execute(CREDIT)

        def deliver(key: str) -> None:
            credit(key, AMOUNT)

        yield Side("transactional", deliver, deliver, lambda: balance(connection))


@contextmanager
def by_hand(house: House) -> Iterator[Side]:
    with wallet(house) as (_, connection):

        def deliver(key: str) -> None:
            with connection.transaction():
                if connection.execute(DEDUP, [key]).rowcount:
                    connection.execute(CREDIT)

        yield Side("psycopg, a dedup INSERT", deliver, deliver, lambda: balance(connection))


@contextmanager
def fresh(house: House) -> Iterator[Side]:
    """A batch of 100 in one transaction; the key names the batch."""
    with wallet(house) as (url, connection), Guard(url) as guard:
        guard.read("credit", "none")

        def deliver(key: str) -> None:
            with connection.transaction():
                batch = guard.within(connection).fresh("credit", batch_of(key), key=str)
                if batch.new:
                    connection.execute(CREDIT_MANY, [len(batch.new)])

        yield Side("fresh", deliver, deliver, lambda: balance(connection) // BATCH)


@contextmanager
def fresh_by_hand(house: House) -> Iterator[Side]:
    with wallet(house) as (_, connection):

        def deliver(key: str) -> None:
            with connection.transaction():
                new = connection.execute(DEDUP_MANY, [batch_of(key)]).fetchall()
                if new:
                    connection.execute(CREDIT_MANY, [len(new)])

        yield Side("psycopg, INSERT … unnest", deliver, deliver, lambda: balance(connection) // BATCH)


@contextmanager
def one_by_one(house: House) -> Iterator[Side]:
    """The same messages without a batch: each in a transaction of its own."""
    with within(house) as single:

        def deliver(key: str) -> None:
            for message in batch_of(key):
                single.first(message)

        yield Side("within, one by one", deliver, deliver, lambda: single.ran() // BATCH)


def batch_of(key: str) -> Sequence[str]:
    """Return the 100 keys of a batch, each as long as its own."""
    return [f"{number:02d}{key[2:]}" for number in range(BATCH)]


@asynccontextmanager
async def within_async(house: House) -> AsyncIterator[Side]:
    import asyncpg

    with wallet(house) as (url, looking):
        connection = await asyncpg.connect(url)
        async with AsyncGuard(url.replace("postgresql://", "postgresql+asyncpg://")) as guard:
            await guard.read("credit", "none")

            async def credit() -> None:
                await connection.execute(CREDIT)

            async def deliver(key: str) -> None:
                async with connection.transaction():
                    await guard.within(connection).run("credit", key, credit)

            yield Side("within", deliver, deliver, lambda: balance(looking))
        await connection.close()


@asynccontextmanager
async def by_hand_async(house: House) -> AsyncIterator[Side]:
    import asyncpg

    dedup = f"{DEDUP.replace('%s', '$1')} RETURNING id"
    with wallet(house) as (url, looking):
        connection = await asyncpg.connect(url)

        async def deliver(key: str) -> None:
            async with connection.transaction():
                if await connection.fetchval(dedup, key) is not None:
                    await connection.execute(CREDIT)

        yield Side("asyncpg, a dedup INSERT", deliver, deliver, lambda: balance(looking))
        await connection.close()
