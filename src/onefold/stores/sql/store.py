"""A store on a database server, over any driver: each operation is one talk on a connection that a pool lends.

It looks at the tables on first use, and makes them where it may. Every operation may be sent twice, so that one whose
connection turns out dead is sent again on a new one; a second loss is `StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar

from onefold._interrupts import heard
from onefold._model import Address, Claim, Close, Ending, Entry, Gone, Memory, Record, State
from onefold.errors import StoreUnavailable
from onefold.stores import background_purge as trickle
from onefold.stores.base import Query
from onefold.stores.reserved import came_to_nothing, unsent
from onefold.stores.sql import reserve
from onefold.stores.sql.connection import (
    AsyncLink,
    AsyncStoresPool,
    Database,
    Kind,
    Lends,
    LendsAwaited,
    Link,
    StoresPool,
    cause_of,
    down,
    no_tables,
)
from onefold.stores.sql.dialect import Ask, Talk, carry, carry_async
from onefold.stores.sql.joined import AsyncSqlTransaction, SqlTransaction
from onefold.stores.sql.joined_rules import is_known
from onefold.stores.sql.locked import Leases, all_known
from onefold.stores.sql.records import VERSION

T = TypeVar("T")

# On Python 3.11 an enum gives its members out slowly.
RUNNING: Final = State.RUNNING

# A deadlock is the database's own choice of a victim; the same victim twice is rare, eight times is a design.
CONFLICTS_MAX: Final = 8

# Somebody may drop the tables of a store that has found them; once more is enough to find out, and to make them.
LOOKS_MAX: Final = 2


class SqlStore:
    """A `Store`, `Batching`, `Browsable` and `Joinable`; safe to share between threads, and over a fork."""

    def __init__(self, database: Database, pool: StoresPool) -> None:
        self.database = database
        self._pool = pool
        # No handler is ever lent this one: a claim must not depend on what handlers may hold.
        self._renewals = pool.reserve()
        self._leases = Leases()
        self._looked = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.database.name!r})"

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if entry.state is RUNNING:
            self._reserve([entry])
        return self._end(lambda: self.database.sql.claim(entry, replacing), int(entry.state is State.DONE))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        try:
            return self._do(lambda: self.database.sql.extend(claim, notes))
        except StoreUnavailable as error:
            self._is_for_reserve(error)
        return self._do(lambda: reserve.extended(self.database.sql, claim, notes), self._renewals)

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._close(lambda: self.database.sql.finish(claim, ending), Close(claim, ending))

    def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        return self._close(lambda: self.database.sql.release(claim, memory), Close(claim, memory))

    def read(self, address: Address) -> Record | None:
        return self._do(lambda: self.database.sql.read(address))

    def purge(self, limit: int) -> int:
        return self._do(lambda: self.database.sql.purge(limit))

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        ended = sum(entry.state is State.DONE for entry in entries)
        if any(entry.state is RUNNING for entry in entries):
            self._reserve(entries)
        return self._end(lambda: self.database.sql.claim_all(entries), ended)

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Renew the leases, on the connection that is reserved for it."""
        return all_known(self._do(lambda: self.database.sql.extend_all(claims, self._leases.shortest), self._renewals))

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        try:
            return self._end(lambda: self.database.sql.close_all(closes), len(closes))
        except StoreUnavailable as error:
            self._is_for_reserve(error)
        return self._do(lambda: reserve.all_closed(self.database.sql, closes), self._renewals)

    def browse(self, query: Query, limit: int) -> list[Record]:
        return self._do(lambda: self.database.sql.browse(query, limit))

    def facts(self) -> dict[str, Any]:
        """What the database says of itself; the tables are looked for, and never made."""
        from onefold.stores.sql.facts import facts_of

        return self._sent(lambda link: carry(facts_of(self.database), link))

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is the database's or ours. Any other came from outside, as a signal's handler's."""
        return is_known(error, self.database)

    @property
    def auto_schema(self) -> bool:
        """Whether missing tables are created on first use, and older ones upgraded."""
        return self.database.auto_schema

    @auto_schema.setter
    def auto_schema(self, wanted: bool) -> None:
        self.database = self.database._replace(auto_schema=wanted)

    def schema_exists(self) -> bool:
        """Return whether the tables exist. Create and change nothing."""
        return self._sent(lambda link: carry(self.database.sql.form(), link)) > 0

    @contextmanager
    def transaction(self) -> Iterator[SqlTransaction]:
        """A transaction in this database, on connections that nobody else uses meanwhile."""
        self._look()
        transaction = self._new_transaction()
        try:
            yield transaction
        except StoreUnavailable as error:
            self._forget_tables(error)
            raise
        finally:
            transaction.let_go()
        self._purge_a_little()

    def close(self) -> None:
        """Close the connections. Whoever uses the store after that opens new ones."""
        self._renewals.let_go()
        self._pool.drop_idle()

    def _reserve(self, entries: Sequence[Entry]) -> None:
        """Open the connection for renewals. Without it no claim is made: nobody could keep it alive.

        And where a wait that is under way on it may be too long for these leases, see it come to its end.
        """
        shortest = min(entry.lease for entry in entries if entry.state is RUNNING)
        if self._leases.meet(shortest) or not self._renewals.is_held:
            with unsent():
                self._sent(lambda _link: None, self._renewals)
            self._leases.cared_for(shortest)

    def _close(self, talk: Callable[[], Talk[bool]], close: Close) -> bool:
        """End a claim: on the reserved connection where handlers hold all others."""
        try:
            return self._end(talk)
        except StoreUnavailable as error:
            self._is_for_reserve(error)
        return self._do(lambda: reserve.closed(self.database.sql, close), self._renewals)

    def _is_for_reserve(self, error: StoreUnavailable) -> None:
        """Raise it again, unless the pool gave no connection and the one that is reserved may serve."""
        if error.reached or not self._renewals.is_held:
            raise error

    def _end(self, talk: Callable[[], Talk[T]], ended: int = 1) -> T:
        """What ends a delivery, or several, and a little of a purge after it."""
        answer = self._do(talk)
        self._purge_a_little(ended)
        return answer

    def _purge_a_little(self, ended: int = 1) -> None:
        due = trickle.portions(ended) if self.database.purges else 0
        if due == 0:
            return
        with trickle.forgiven(self.database.name):
            while due and self._do(lambda: self.database.sql.trickle(trickle.PORTION)) == trickle.PORTION:
                due -= 1

    def _do(self, talk: Callable[[], Talk[T]], pool: Lends | None = None) -> T:
        for _ in range(LOOKS_MAX):
            self._look()
            try:
                return self._sent(lambda link: carry(talk(), link), pool)
            except StoreUnavailable as error:
                missing = error
                if not self._forget_tables(error):
                    raise
        raise missing

    def _forget_tables(self, error: StoreUnavailable) -> bool:
        """Whether the tables were missing: then they are looked for again, and made."""
        if not are_missing(error, self.database):
            return False
        self._looked = False
        return True

    def _sent(self, work: Callable[[Link], T], pool: Lends | None = None) -> T:
        attempts, pool = Attempts(self.database), pool or self._pool
        while True:
            try:
                with pool.lend() as link:
                    return work(link)
            except Exception as error:  # noqa: BLE001 - what is not the driver's is raised again there
                if attempts.failed(error) is Kind.LOST:
                    pool.drop_idle()

    def _look(self) -> None:
        if not self._looked:
            self._sent(self._meet)
            self._looked = True

    def _meet(self, link: Link) -> None:
        ensure(self.database, link)

    def _new_transaction(self) -> SqlTransaction:
        return SqlTransaction(self.database, self._pool)


class AsyncSqlStore:
    """The same store, awaited; it survives a new event loop."""

    def __init__(self, database: Database, pool: AsyncStoresPool) -> None:
        self.database = database
        self._pool = pool
        # No handler is ever lent this one: a claim must not depend on what handlers may hold.
        self._renewals = pool.reserve()
        self._leases = Leases()
        self._looked = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.database.name!r})"

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if entry.state is RUNNING:
            await self._reserve([entry])
        return await self._end(lambda: self.database.sql.claim(entry, replacing), int(entry.state is State.DONE))

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        soon = reserve.Soon(self._pool, [claim])
        try:
            return await self._do(lambda: self.database.sql.extend(claim, notes), soon)
        except StoreUnavailable as error:
            self._is_for_reserve(error)
        return await self._do(lambda: reserve.extended(self.database.sql, claim, notes), self._renewals)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return await self._close(lambda: self.database.sql.finish(claim, ending), Close(claim, ending))

    async def release(self, claim: Claim, memory: Memory | None = None) -> bool:
        return await self._close(lambda: self.database.sql.release(claim, memory), Close(claim, memory))

    async def read(self, address: Address) -> Record | None:
        return await self._do(lambda: self.database.sql.read(address))

    async def purge(self, limit: int) -> int:
        return await self._do(lambda: self.database.sql.purge(limit))

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        ended = sum(entry.state is State.DONE for entry in entries)
        if any(entry.state is RUNNING for entry in entries):
            await self._reserve(entries)
        return await self._end(lambda: self.database.sql.claim_all(entries), ended)

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Renew the leases, on the connection that is reserved for it."""
        return all_known(
            await self._do(lambda: self.database.sql.extend_all(claims, self._leases.shortest), self._renewals)
        )

    async def close_all(self, closes: Sequence[Close]) -> list[bool]:
        many = not self.database.sql.closes_in_one
        soon = reserve.Soon(self._pool, [close.claim for close in closes], many=many)
        try:
            return await self._end(lambda: self.database.sql.close_all(closes), len(closes), soon)
        except StoreUnavailable as error:
            self._is_for_reserve(error)
        return await self._do(lambda: reserve.all_closed(self.database.sql, closes), self._renewals)

    async def browse(self, query: Query, limit: int) -> list[Record]:
        return await self._do(lambda: self.database.sql.browse(query, limit))

    async def facts(self) -> dict[str, Any]:
        """Return what the database says of itself; look for the tables, and never create them."""
        from onefold.stores.sql.facts import facts_of

        return await self._sent(lambda link: carry_async(facts_of(self.database), link))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSqlTransaction]:
        """A transaction in this database, on connections that nobody else uses meanwhile."""
        await self._look()
        transaction = self._new_transaction()
        try:
            yield transaction
        except StoreUnavailable as error:
            self._forget_tables(error)
            raise
        finally:
            await transaction.let_go()
        await heard(self._purge_a_little())

    async def aclose(self) -> None:
        """Close the connections. Whoever uses the store after that opens new ones."""
        await self._renewals.let_go()
        await self._pool.drop_idle()

    async def _reserve(self, entries: Sequence[Entry]) -> None:
        """The same, awaited."""
        shortest = min(entry.lease for entry in entries if entry.state is RUNNING)
        if self._leases.meet(shortest) or not self._renewals.is_held:
            with unsent():
                await self._sent(_look_at_nothing, self._renewals)
            self._leases.cared_for(shortest)

    async def _close(self, talk: Callable[[], Talk[bool]], close: Close) -> bool:
        """The same, awaited."""
        try:
            return await self._end(talk, 1, reserve.Soon(self._pool, [close.claim]))
        except StoreUnavailable as error:
            self._is_for_reserve(error)
        return await self._do(lambda: reserve.closed(self.database.sql, close), self._renewals)

    def _is_for_reserve(self, error: StoreUnavailable) -> None:
        """The same."""
        if error.reached or not self._renewals.is_held:
            raise error

    async def _end(self, talk: Callable[[], Talk[T]], ended: int = 1, soon: reserve.Soon | None = None) -> T:
        """The same, awaited."""
        answer = await self._do(talk, soon)
        await self._purge_a_little(ended, soon and soon.for_one())
        return answer

    async def _purge_a_little(self, ended: int = 1, pool: LendsAwaited | None = None) -> None:
        due = trickle.portions(ended) if self.database.purges else 0
        if due == 0:
            return
        with trickle.forgiven(self.database.name):
            while due and await self._do(lambda: self.database.sql.trickle(trickle.PORTION), pool) == trickle.PORTION:
                due -= 1

    async def _do(self, talk: Callable[[], Talk[T]], pool: LendsAwaited | None = None) -> T:
        for _ in range(LOOKS_MAX):
            await self._look()
            try:
                return await self._sent(lambda link: carry_async(talk(), link), pool)
            except StoreUnavailable as error:
                missing = error
                if not self._forget_tables(error):
                    raise
        raise missing

    def _forget_tables(self, error: StoreUnavailable) -> bool:
        """Whether the tables were missing: then they are looked for again, and made."""
        if not are_missing(error, self.database):
            return False
        self._looked = False
        return True

    async def _sent(self, work: Callable[[AsyncLink], Awaitable[T]], pool: LendsAwaited | None = None) -> T:
        attempts, pool = Attempts(self.database), pool or self._pool
        while True:
            try:
                async with pool.lend() as link:
                    return await work(link)
            except Exception as error:  # noqa: BLE001 - what is not the driver's is raised again there
                if attempts.failed(error) is Kind.LOST:
                    await pool.drop_idle()

    async def _look(self) -> None:
        if not self._looked:
            await heard(self._sent(self._meet))
            self._looked = True

    async def _meet(self, link: AsyncLink) -> None:
        await ensure_awaited(self.database, link)

    def _new_transaction(self) -> AsyncSqlTransaction:
        return AsyncSqlTransaction(self.database, self._pool)


class Attempts:
    """How often one operation is sent: once more after a lost connection, a few times after conflicts."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._left = {Kind.LOST: 1, Kind.CONFLICT: CONFLICTS_MAX}

    def failed(self, error: Exception) -> Kind:
        """Why it is to be sent again; where it is not, this raises what the caller shall see."""
        trouble = cause_of(error, self._database)
        if trouble is None or isinstance(error, StoreUnavailable):
            raise error
        left = self._left.get(trouble.kind, 0)
        if left == 0:
            problem = down(self._database, trouble)
            problem.reached = not came_to_nothing(error)
            raise problem from error
        self._left[trouble.kind] = left - 1
        return trouble.kind


async def _look_at_nothing(_link: AsyncLink) -> None:
    """For a connection that is only to be opened."""


def are_missing(error: StoreUnavailable, database: Database) -> bool:
    """Whether it was raised because the tables are not there."""
    trouble = cause_of(error, database)
    return trouble is not None and trouble.kind is Kind.NO_TABLES


def ensure(database: Database, link: Link) -> None:
    """Find the tables, or make them: of many that start together, one does."""
    version = carry(database.sql.form(), link)
    if version < VERSION and database.auto_schema:
        link.begin()
        make(database, link)
        link.commit()
    elif version == 0:
        raise no_tables(database)


def make(database: Database, link: Link) -> None:
    """Make the tables, or bring them to our version, in a transaction that is open."""
    if database.lock is not None:
        link.send(Ask(database.lock, {}, rows=True))
    carry(database.sql.upgrade(carry(database.sql.form(), link)), link)
    if database.unlock is not None:
        link.send(Ask(database.unlock, {}, rows=True))


async def ensure_awaited(database: Database, link: AsyncLink) -> None:
    """The same, awaited."""
    version = await carry_async(database.sql.form(), link)
    if version < VERSION and database.auto_schema:
        await link.begin()
        await make_awaited(database, link)
        await link.commit()
    elif version == 0:
        raise no_tables(database)


async def make_awaited(database: Database, link: AsyncLink) -> None:
    """The same, awaited."""
    if database.lock is not None:
        await link.send(Ask(database.lock, {}, rows=True))
    await carry_async(database.sql.upgrade(await carry_async(database.sql.form(), link)), link)
    if database.unlock is not None:
        await link.send(Ask(database.unlock, {}, rows=True))
