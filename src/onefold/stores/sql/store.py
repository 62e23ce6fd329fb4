"""A store on a database server, over any driver: each operation is one flow on a connection borrowed from a pool.

It looks for the tables on first use, and creates them where allowed. Every operation may be sent twice, so one whose
connection turns out dead is sent again on a new one; a second loss is `StoreUnavailable`.

The rules are generators of requests (`_concurrency.generators`), written once; `SqlStore` and `AsyncSqlStore` run them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from onefold._concurrency.generators import Flow, run, run_async
from onefold._concurrency.interrupts import heard
from onefold._concurrency.users_errors import passing, passing_async
from onefold._model import Address, Claim, Close, Ending, Entry, Gone, Record, Released, State
from onefold.errors import StoreUnavailable
from onefold.stores import background_purge
from onefold.stores.base import Query, Sample, StoredRecord
from onefold.stores.reserved import came_to_nothing, unsent
from onefold.stores.sql.connection import (
    AsyncStoresPool,
    Database,
    ErrorClass,
    StoresPool,
    cause_of,
    down,
    lacks_tables,
)
from onefold.stores.sql.joined import AsyncSqlTransaction, SqlTransaction
from onefold.stores.sql.joined_rules import is_known
from onefold.stores.sql.locked import Leases, all_known
from onefold.stores.sql.pool import reserve, run_on, run_on_async
from onefold.stores.sql.tables import ensure
from onefold.transactions import RecordColumn

T = TypeVar("T")

# A flow that needs a connection.
OnConnection = Callable[[Any], Flow[T]]

# On Python 3.11 accessing an enum's members is slow.
RUNNING: Final = State.RUNNING

# The database picks the victim of a deadlock; the same victim twice is rare, eight times is a design flaw.
CONFLICTS_MAX: Final = 8

# An annotation waits for a connection no longer than the end of a claim with this lease: somebody waits for an answer.
ANNOTATION_SECONDS: Final = 1.0

# After these a connection to the same or to another server may do better; those that are idle are like the failed one.
NEW_CONNECTION: Final = (ErrorClass.LOST, ErrorClass.READ_ONLY)

# Somebody may drop the tables after a store has found them; one more look is enough to notice, and to create them.
LOOKS_MAX: Final = 2


class SqlRules:
    """The operations of a store, for sync and async alike."""

    # The first runs a generator on a connection borrowed from a pool. The second runs one, and re-raises a cancellation
    # that a driver has swallowed.
    _run_on: Callable[..., Any]
    _run_heard: Callable[..., Any]

    def __init__(self, database: Database, pool: Any, *, ours: bool = True) -> None:
        """Initialize; `ours` says whether the pool may be closed with the store."""
        self.database = database
        self._pool = pool
        self._ours = ours
        # Never lent to a handler: renewing a claim must not depend on connections that handlers may hold.
        self._renewals = pool.reserve()
        self._leases = Leases()
        self._looked = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.database.name!r})"

    def _for_endings(self, claims: Sequence[Claim], *, many: bool = False) -> Any:
        """Return the pool for operations that end or renew these claims."""
        raise NotImplementedError

    def _is_ready(self, entry: Entry) -> bool:
        """Return whether nothing has to be done before or after this claim: as for nearly all of them.

        Then it is sent at once; an error goes to the flow of the operation, which may send it again.
        """
        return self._looked and entry.state is RUNNING and not self._leases.meet(entry.lease) and self._renewals.is_held

    def _claim(
        self, entry: Entry, replacing: Record | None, failed: list[Exception] | None = None
    ) -> Flow[Record | Gone | None]:
        if entry.state is RUNNING:
            yield from self._reserve([entry])
        answer: Record | Gone | None
        answer = yield from self._send(lambda _: self.database.sql.claim(entry, replacing), self._pool, failed=failed)
        if entry.state is State.DONE:
            yield from self._purge_a_little(1)
        return answer

    def _claim_all(self, entries: Sequence[Entry]) -> Flow[list[Record | Gone | None]]:
        if any(entry.state is RUNNING for entry in entries):
            yield from self._reserve(entries)
        answers = yield from self._send(lambda _: self.database.sql.claim_all(entries), self._pool)
        yield from self._purge_a_little(sum(entry.state is State.DONE for entry in entries))
        return answers

    def _extend(self, claim: Claim, notes: bytes | None) -> Flow[bool]:
        try:
            pool = self._for_endings([claim])
            return (yield from self._send(lambda _: self.database.sql.extend(claim, notes), pool))
        except StoreUnavailable as error:
            self._check_for_reserve(error)
        return (yield from self._send(lambda _: reserve.extended(self.database.sql, claim, notes), self._renewals))

    def _extend_all(self, claims: Sequence[Claim]) -> Flow[list[bool]]:
        """Renew the leases on the connection reserved for it."""
        shortest = self._leases.shortest
        found = yield from self._send(lambda _: self.database.sql.extend_all(claims, shortest), self._renewals)
        return all_known(found)

    def _close(self, claim: Claim, by: Ending | Released | None, failed: list[Exception] | None = None) -> Flow[bool]:
        """End a claim, on the reserved connection if handlers hold all others."""
        claims = [claim]

        def flow_on(_connection: Any) -> Flow[bool]:
            sql = self.database.sql
            return sql.finish(claim, by) if isinstance(by, Ending) else sql.release(claim, by)

        try:
            answer = yield from self._send(flow_on, self._for_endings(claims), failed=failed)
        except StoreUnavailable as error:
            self._check_for_reserve(error)
        else:
            yield from self._purge_a_little(1, claims)
            return answer
        close = Close(claim, by)
        return (yield from self._send(lambda _: reserve.closed(self.database.sql, close), self._renewals))

    def _close_all(self, closes: Sequence[Close]) -> Flow[list[bool]]:
        claims = [close.claim for close in closes]
        try:
            pool = self._for_endings(claims, many=not self.database.sql.closes_in_one)
            answers = yield from self._send(lambda _: self.database.sql.close_all(closes), pool)
        except StoreUnavailable as error:
            self._check_for_reserve(error)
        else:
            yield from self._purge_a_little(len(closes), claims)
            return answers
        return (yield from self._send(lambda _: reserve.all_closed(self.database.sql, closes), self._renewals))

    def _read(self, address: Address) -> Flow[Record | None]:
        return self._send(lambda _: self.database.sql.read(address), self._pool)

    def _annotate(self, seen: Record, notes: bytes) -> Flow[Record | Gone | None]:
        pool = self._for_endings([Claim(seen.address, seen.token, ANNOTATION_SECONDS)])
        return self._send(lambda _: self.database.sql.annotate(seen, notes), pool)

    def _purge(self, limit: int) -> Flow[int]:
        return self._send(lambda _: self.database.sql.purge(limit), self._pool)

    def _browse(self, query: Query, limit: int) -> Flow[list[Record]]:
        return self._send(lambda _: self.database.sql.browse(query, limit), self._pool)

    def _reserve(self, entries: Sequence[Entry]) -> Flow[None]:
        """Open the connection for renewals. Without it no claim is made: nothing could keep it alive.

        If a wait in progress on it may be too long for these leases, let it end first.
        """
        shortest = min(entry.lease for entry in entries if entry.state is RUNNING)
        if self._leases.meet(shortest) or not self._renewals.is_held:
            with unsent():
                yield from self._send(_say_nothing, self._renewals, look=False)
            self._leases.cared_for(shortest)

    def _check_for_reserve(self, error: StoreUnavailable) -> None:
        """Raise the error again, unless the pool gave no connection and the reserved one may serve."""
        if error.reached or not self._renewals.is_held:
            raise error

    def _purge_a_little(self, ended: int = 1, claims: Sequence[Claim] = ()) -> Flow[None]:
        """Purge a batch, now and then, after deliveries have ended: those of these claims, or of a transaction."""
        due = self._batches_due(ended)
        if due:
            yield from self._purge_batches(due, claims)

    def _batches_due(self, ended: int = 1) -> int:
        """Return how many batches to purge now, after this many deliveries have ended."""
        return background_purge.batches_due(ended) if self.database.purges else 0

    def _purge_batches(self, due: int, claims: Sequence[Claim]) -> Flow[None]:
        pool = self._for_endings(claims) if claims else self._pool
        with background_purge.ignore_errors(self.database.name):
            while due and (yield from self._send(self.background_purge, pool)) == background_purge.BATCH:
                due -= 1

    @property
    def purges(self) -> bool:
        """Return whether expired records are removed in the background."""
        return self.database.purges

    def background_purge(self, _connection: Any) -> Flow[int]:
        return self.database.sql.background_purge(background_purge.BATCH)

    def _send(
        self, flow_on: OnConnection[T], pool: Any, *, look: bool = True, failed: list[Exception] | None = None
    ) -> Flow[T]:
        """Run the work on a connection of the pool, once the tables exist; retry where that may help.

        `failed` holds the error of an attempt that was made already. In a list, which is emptied: a frame that keeps an
        error keeps what the error's own traceback keeps.
        """
        attempts: Attempts | None = None
        while True:
            if look and not self._looked:
                yield from self._look()
            try:
                if failed:
                    raise failed.pop()
                return (yield partial(self._run_on, pool, flow_on))  # type: ignore[no-any-return]
            except Exception as error:  # noqa: BLE001 - what is not the driver's is raised again there
                self._forget_tables(error)
                attempts = attempts or Attempts(self.database, LOOKS_MAX if look else 1)
                if attempts.failed(error) in NEW_CONNECTION:
                    yield pool.drop_idle

    def _forget_tables(self, error: Exception) -> None:
        """Look for the tables again, and create them, if the error says that they are missing."""
        if lacks_tables(error, self.database):
            self._looked = False

    def _look(self) -> Flow[None]:
        if not self._looked:
            yield partial(self._run_heard, self._send(self._meet, self._pool, look=False))
            self._looked = True

    def _needs_tables(self, record: RecordColumn) -> bool:
        """Return whether our tables are needed although the caller's own rows are the records."""
        return self.database.sql.rows_of(record).needs_tables

    def _meet(self, connection: Any) -> Flow[None]:
        return ensure(self.database, connection)

    def _ask(self, flow_of: Callable[[Database], Flow[T]]) -> Flow[T]:
        return self._send(lambda _: flow_of(self.database), self._pool, look=False)

    def _facts(self) -> Flow[dict[str, Any]]:
        from onefold.stores.sql.facts import facts_of

        return self._send(lambda _: facts_of(self.database), self._pool, look=False)


class SqlStore(SqlRules):
    """A `Store`, `Batching`, `Browsable` and `Joinable`; safe to share between threads, and across a fork."""

    _pool: StoresPool
    _run_on = staticmethod(run_on)
    _run_heard = staticmethod(run)

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if not self._is_ready(entry):
            return run(self._claim(entry, replacing))
        try:
            with self._pool.acquire() as conn:
                return run(self.database.sql.claim(entry, replacing), conn)
        except Exception as error:  # noqa: BLE001 - the flow knows its meaning
            return run(self._claim(entry, replacing, [error]))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return run(self._extend(claim, notes))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        if not self._looked:
            return run(self._close(claim, ending))
        try:
            with self._pool.acquire() as conn:
                answer = run(self.database.sql.finish(claim, ending), conn)
        except Exception as error:  # noqa: BLE001 - the flow knows its meaning
            return run(self._close(claim, ending, [error]))
        if due := self._batches_due():
            run(self._purge_batches(due, [claim]))
        return answer

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return run(self._close(claim, released))

    def read(self, address: Address) -> Record | None:
        return run(self._read(address))

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return run(self._annotate(record, notes))

    def purge(self, limit: int) -> int:
        return run(self._purge(limit))

    def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return run(self._claim_all(entries))

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Renew the leases on the connection reserved for it."""
        return run(self._extend_all(claims))

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return run(self._close_all(closes))

    def browse(self, query: Query, limit: int) -> list[Record]:
        return run(self._browse(query, limit))

    def stored(self, address: Address) -> StoredRecord | None:
        """Return the row of this address, column by column."""
        return run(self._send(lambda _: self.database.sql.stored(address), self._pool))

    def sample(self, query: Query, limit: int) -> Sample:
        """Return some records from all over the table; all of them, if there are few."""
        return run(self._send(lambda _: self.database.sql.sampler().sample(query, limit), self._pool))

    def unsettled(self, limit: int) -> list[Record]:
        """Return the records that are kept longest, except those that are finished and kept forever."""
        return run(self._send(lambda _: self.database.sql.sampler().unsettled(limit), self._pool))

    def newest(self, limit: int) -> list[Record]:
        """Return about `limit` of the newest records, where the database knows them."""
        return run(self._send(lambda _: self.database.sql.sampler().newest(limit), self._pool))

    def facts(self) -> dict[str, Any]:
        """Return the facts of the database; look for the tables, and never create them."""
        return run(self._facts())

    def ask(self, flow_of: Callable[[Database], Flow[T]]) -> T:
        """Run statements that only read tables which are not ours. Ours are neither looked for nor created."""
        return run(self._ask(flow_of))

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is the database's or ours. Any other came from outside, as from a signal handler."""
        return is_known(error, self.database)

    @property
    def auto_schema(self) -> bool:
        """Return whether missing tables are created on first use, and older ones upgraded."""
        return self.database.auto_schema

    @auto_schema.setter
    def auto_schema(self, wanted: bool) -> None:
        self.database = self.database._replace(auto_schema=wanted)

    def schema_exists(self) -> bool:
        """Return whether the tables exist. Create and change nothing."""
        return run(self._send(lambda _: self.database.sql.schema_version(), self._pool, look=False)) > 0

    def transaction(self) -> Any:
        """Open a transaction in this database, on connections that are not shared meanwhile."""
        return self.row_transaction(None)

    @passing
    def row_transaction(self, record: RecordColumn | None) -> Iterator[SqlTransaction]:
        """Open a transaction whose records are the caller's own rows; with None they are ours."""
        needs_tables = record is None or self._needs_tables(record)
        if needs_tables and not self._looked:
            run(self._look())
        transaction = self._new_transaction()
        if record is not None:
            transaction.keep_in_rows(record)
        try:
            yield transaction
        except StoreUnavailable as error:
            self._forget_tables(error)
            raise
        finally:
            transaction.let_go()
        if needs_tables and (due := self._batches_due()):
            run(self._purge_batches(due, ()))

    def close(self) -> None:
        """Close the connections that are ours. Later use of the store opens new ones."""
        self._renewals.let_go()
        if self._ours:
            self._pool.drop_idle()

    def _for_endings(self, claims: Sequence[Claim], *, many: bool = False) -> Any:
        # Only the pool itself can bound a blocking wait for it.
        del claims, many
        return self._pool

    def _new_transaction(self) -> SqlTransaction:
        return SqlTransaction(self.database, self._pool)


class AsyncSqlStore(SqlRules):
    """The async counterpart; it survives a new event loop."""

    _pool: AsyncStoresPool
    _run_on = staticmethod(run_on_async)

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if not self._is_ready(entry):
            return await run_async(self._claim(entry, replacing))
        try:
            async with self._pool.acquire() as conn:
                return await run_async(self.database.sql.claim(entry, replacing), conn)
        except Exception as error:  # noqa: BLE001 - the flow knows its meaning
            return await run_async(self._claim(entry, replacing, [error]))

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return await run_async(self._extend(claim, notes))

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        if not self._looked:
            return await run_async(self._close(claim, ending))
        try:
            async with self._for_endings([claim]).acquire() as conn:
                answer = await run_async(self.database.sql.finish(claim, ending), conn)
        except Exception as error:  # noqa: BLE001 - the flow knows its meaning
            return await run_async(self._close(claim, ending, [error]))
        if due := self._batches_due():
            await run_async(self._purge_batches(due, [claim]))
        return answer

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return await run_async(self._close(claim, released))

    async def read(self, address: Address) -> Record | None:
        return await run_async(self._read(address))

    async def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return await run_async(self._annotate(record, notes))

    async def purge(self, limit: int) -> int:
        return await run_async(self._purge(limit))

    async def claim_all(self, entries: Sequence[Entry]) -> list[Record | Gone | None]:
        return await run_async(self._claim_all(entries))

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        """Renew the leases on the connection reserved for it."""
        return await run_async(self._extend_all(claims))

    async def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return await run_async(self._close_all(closes))

    async def browse(self, query: Query, limit: int) -> list[Record]:
        return await run_async(self._browse(query, limit))

    async def facts(self) -> dict[str, Any]:
        """Return the facts of the database; look for the tables, and never create them."""
        return await run_async(self._facts())

    async def ask(self, flow_of: Callable[[Database], Flow[T]]) -> T:
        """Run statements that only read tables which are not ours. Ours are neither looked for nor created."""
        return await run_async(self._ask(flow_of))

    def transaction(self) -> Any:
        """Open a transaction in this database, on connections that are not shared meanwhile."""
        return self.row_transaction(None)

    @passing_async
    async def row_transaction(self, record: RecordColumn | None) -> AsyncIterator[AsyncSqlTransaction]:
        """Open a transaction whose records are the caller's own rows; with None they are ours."""
        needs_tables = record is None or self._needs_tables(record)
        if needs_tables and not self._looked:
            await run_async(self._look())
        transaction = self._new_transaction()
        if record is not None:
            transaction.keep_in_rows(record)
        try:
            yield transaction
        except StoreUnavailable as error:
            self._forget_tables(error)
            raise
        finally:
            await transaction.let_go()
        if needs_tables and (due := self._batches_due()):
            await heard(run_async(self._purge_batches(due, ())))

    async def aclose(self) -> None:
        """Close the connections that are ours. Later use of the store opens new ones."""
        await self._renewals.let_go()
        if self._ours:
            await self._pool.drop_idle()

    @staticmethod
    async def _run_heard(work: Flow[T]) -> T:
        return await heard(run_async(work))

    def _for_endings(self, claims: Sequence[Claim], *, many: bool = False) -> Any:
        return reserve.Soon(self._pool, claims, many=many)

    def _new_transaction(self) -> AsyncSqlTransaction:
        return AsyncSqlTransaction(self.database, self._pool)


class Attempts:
    """The retry budget of one operation: once on a new connection, a few times after conflicts."""

    def __init__(self, database: Database, looks: int) -> None:
        self._database = database
        self._left = {
            **dict.fromkeys(NEW_CONNECTION, 1),
            ErrorClass.CONFLICT: CONFLICTS_MAX,
            ErrorClass.NO_TABLES: looks - 1,
        }

    def failed(self, error: Exception) -> ErrorClass:
        """Return the reason to send it again; if there is none, raise the error for the caller."""
        info = cause_of(error, self._database)
        if info is None or isinstance(error, StoreUnavailable):
            raise error
        left = self._left.get(info.kind, 0)
        if left == 0:
            problem = down(self._database, info)
            problem.reached = not came_to_nothing(error)
            raise problem from error
        self._left[info.kind] = left - 1
        return info.kind


def _say_nothing(_connection: Any) -> Flow[None]:
    """Send nothing: the connection only has to be opened."""
    yield from ()
