"""Links over SQLAlchemy: one on a connection or session that somebody holds, one on what an engine lends to a store.

The objects of a session are not touched, and nothing is flushed.

Async engines have a sync engine inside. `AsyncConnectionShell` runs a connection there, so that nothing is written
twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event, exc
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from onefold._concurrency.interrupts import brought_to_its_end
from onefold.errors import NotInTransaction
from onefold.stores.reserved import connecting
from onefold.stores.sql.connection import Database, ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sqlalchemy.drivers import driver_of, end_at_once, raw

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

Held = Connection | Session

LOST: Final = ErrorInfo(ErrorClass.LOST, "the connection to the database was lost")
EXHAUSTED: Final = ErrorInfo(
    ErrorClass.DOWN, "all connections of the engine's pool are in use. Keep transactions short, or raise pool_size"
)


_databases: WeakKeyDictionary[Any, Database] = WeakKeyDictionary()


def database_of(engine: Engine) -> Database:
    """The database of an engine, as the SQL stores see it. Engines that differ in their options only have the same."""
    known = _databases.get(engine.dialect)
    sql = driver_of(engine.dialect).sql
    if known is None:
        known = _databases[engine.dialect] = _database(engine)
    if known.sql is not sql:
        # Which server it is shows with the first connection.
        known = _databases[engine.dialect] = known._replace(sql=sql)
    return known


def _database(engine: Engine) -> Database:
    driver = driver_of(engine.dialect)
    if driver.gives_up is not None:
        event.listen(engine, "handle_error", _note)
    if driver.may_be_torn is not None:
        event.listen(engine, "handle_error", _drop_torn)

    def classify(error: BaseException) -> ErrorInfo | None:
        if isinstance(error, exc.TimeoutError):
            return EXHAUSTED
        if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
            return LOST
        # SQLAlchemy names the driver's error as the cause of its own, where it is looked at next.
        return driver.classify(error)

    # Without the options, among which there may be a password, too.
    name = engine.url.set(query={}).render_as_string(hide_password=True)
    return Database(driver.sql, name, classify, driver.lock, driver.unlock)


class HeldConnection:
    """On a connection or session: what is sent joins its transaction, or begins one."""

    def __init__(self, held: Held, tx: Any = None) -> None:
        # What a handler gets: the held one, or its async shell.
        self.connection: Any = held if tx is None else tx
        self.held = held
        self._inside: Inside | None = None
        self._savepoint: Any = None

    def send(self, request: SqlRequest) -> Reply:
        return self.enter().send(request)

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]

    def enter(self) -> Inside:
        """Be inside a transaction. Raises `NotInTransaction` where everything would be committed at once."""
        if self._inside is None:
            self._inside = Inside(self.held)
        return self._inside

    def open(self) -> None:
        """Take a connection from the engine, and begin as SQLAlchemy does it: nothing is sent yet."""
        self.held.begin()
        if isinstance(self.held, Session):
            self.held.connection()

    def begin(self) -> None:
        if not self.held.in_transaction():
            self.open()
        try:
            self.enter()
        except NotInTransaction:
            # The engine is in autocommit mode, and this is to be a transaction.
            self.held.rollback()
            self._leave_autocommit()
            self.enter()

    def _leave_autocommit(self) -> None:
        if isinstance(self.held, Session):
            usual = self.held.get_bind().dialect.default_isolation_level
            self.held.connection(execution_options={"isolation_level": usual})
        else:
            self.held.execution_options(isolation_level=self.held.default_isolation_level)

    def run(self, statement: str) -> None:
        # By SQLAlchemy's own means: a session has to forget the objects whose rows are rolled back.
        if statement.startswith("SAVEPOINT "):
            self._savepoint = self.held.begin_nested()
        elif statement.startswith("ROLLBACK TO SAVEPOINT "):
            self._savepoint.rollback()
        else:
            self.enter().connection.exec_driver_sql(statement)

    def commit(self) -> None:
        self.held.commit()
        self._inside = None

    def rollback(self) -> None:
        self.held.rollback()
        self._inside = None

    @property
    def is_torn(self) -> bool:
        return self._inside is not None and self._inside.is_torn

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.IDLE if self._inside is None else self._inside.transaction_status()

    def close(self) -> None:
        self.held.close()
        self._inside = None

    def spoil(self) -> None:
        """Close the driver's connection. SQLAlchemy refuses everything until its user has rolled back."""
        if self._inside is not None and not self._inside.connection.closed:
            self._inside.connection.invalidate()

    def abandon(self) -> None:
        """End the connection of an async driver, from outside of what waits for it."""
        if self._inside is not None:
            _end_at_once(self._inside.connection)


def _end_at_once(connection: Connection) -> None:
    if not (connection.closed or connection.invalidated):
        end_at_once(raw(connection))


class Inside:
    """The transaction in which a connection or session is, to be told from the next one."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.connection = held.connection() if isinstance(held, Session) else held
        if not self.connection.in_transaction():
            # As SQLAlchemy does it by itself with the first statement.
            self.connection.begin()
        self.driver = driver_of(self.connection.dialect)
        self.driver.enter(self.connection)
        self._whole = held.get_transaction()
        self._part = held.get_nested_transaction()
        self._given_up: Callable[[], bool] | None = None
        if self.driver.gives_up is not None:
            _watched.add(self)

    def send(self, request: SqlRequest) -> Reply:
        return self.driver.send(self.connection, request)

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        return [self.send(request) for request in requests]

    def failed(self, error: BaseException) -> None:
        """A statement failed, of whoever is in this transaction."""
        if self.driver.gives_up is not None and self.driver.gives_up(error):
            part = self.connection.get_nested_transaction()
            # Whoever rolls back to a savepoint from before can go on.
            self._given_up = lambda: part is None or part.is_active

    @property
    def is_torn(self) -> bool:
        if self.driver.is_torn is None or self.connection.closed or self.connection.invalidated:
            return False
        return self.driver.is_torn(raw(self.connection))

    def transaction_status(self) -> TransactionStatus:
        if self.connection.invalidated:
            return TransactionStatus.BROKEN
        if self._held.get_transaction() is not self._whole:
            return TransactionStatus.IDLE
        if isinstance(self._held, Session) and not self._held.is_active:
            # A flush failed and has rolled back already. The session refuses everything until its user rolls back, too.
            return TransactionStatus.ABORTED
        if self._part is not None and not self._part.is_active:
            return TransactionStatus.IDLE
        if self._given_up is not None and self._given_up():
            return TransactionStatus.ABORTED
        return self.driver.transaction_status(raw(self.connection))


# The transactions whose drivers do not tell when the server gives them up.
_watched: WeakSet[Inside] = WeakSet()


def _note(context: ExceptionContext) -> None:
    for inside in list(_watched):
        if inside.connection is context.connection:
            inside.failed(context.original_exception)


def _drop_torn(context: ExceptionContext) -> None:
    """Have SQLAlchemy drop a connection on which a statement was interrupted, be it a handler's or anybody's.

    SQLAlchemy does so after Ctrl-C by itself, and not after an `Exception` of a signal's handler. Back in the pool, its
    next user would get the answer that nobody has read.
    """
    connection = context.connection
    if context.sqlalchemy_exception is not None or connection is None or connection.closed or connection.invalidated:
        return
    may_be_torn = driver_of(connection.dialect).may_be_torn
    if may_be_torn is not None and may_be_torn(raw(connection)):
        context.is_disconnect = True
        context.invalidate_pool_on_disconnect = False


class Source:
    """An engine, and what a transaction of ours on it begins with: a connection, or a session."""

    def __init__(self, engine: Engine, opened: Callable[[], HeldConnection]) -> None:
        self.engine = engine
        self.in_autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.driver = driver_of(engine.dialect)
        self.opened = opened


class StoresConnection:
    """On what an engine lends: statements that are committed at once, and transactions of ours."""

    def __init__(self, source: Source) -> None:
        self.connection: Any = None
        self._source = source
        self._transaction: HeldConnection | None = None
        # For statements that are committed at once; kept for the next one.
        self._alone: Connection | None = None
        # For several that are committed together.
        self._many: Connection | None = None

    def send(self, request: SqlRequest) -> Reply:
        if self._transaction is not None:
            return self._transaction.send(request)
        alone = self.open_alone()
        reply = self._source.driver.send(alone, request)
        alone.commit()
        return reply

    def open_alone(self) -> Connection:
        if self._alone is None:
            source = self._source
            engine = source.in_autocommit if source.driver.alone_in_autocommit else source.engine
            with connecting():
                self._alone = engine.connect()
        return self._alone

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    @property
    def is_closed(self) -> bool:
        """Whether the next statement has to take a connection from the engine."""
        return self._transaction is None and self._alone is None

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        if self._transaction is not None:
            return self._transaction.send_all(requests)
        connection = self.open_many()
        with connection:
            # An engine in autocommit mode has no transactions. Here it does without: everything may be sent twice.
            with suppress(NotInTransaction):
                self._source.driver.enter(connection)
            replies = [self._source.driver.send(connection, request) for request in requests]
            connection.commit()
        return replies

    def open_many(self) -> Connection:
        if self._many is None or self._many.closed:
            with connecting():
                self._many = self._source.engine.connect()
        return self._many

    def begin(self) -> None:
        self.open_transaction()
        self.enter()

    def open_transaction(self) -> None:
        self.close()
        self._transaction = self._source.opened()
        self.connection = self._transaction.connection
        self._transaction.open()

    def enter(self) -> None:
        self._open.begin()

    def run(self, statement: str) -> None:
        self._open.run(statement)

    def commit(self) -> None:
        self._open.commit()

    def rollback(self) -> None:
        self._open.rollback()

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.IDLE if self._transaction is None else self._transaction.transaction_status()

    @property
    def is_torn(self) -> bool:
        return self._transaction is not None and self._transaction.is_torn

    def spoil(self) -> None:
        if self._transaction is not None:
            self._transaction.spoil()

    def abandon(self) -> None:
        if self._transaction is not None:
            self._transaction.abandon()
        for connection in (self._alone, self._many):
            if connection is not None:
                _end_at_once(connection)

    def close(self) -> None:
        """Give everything back to the engine's pool, which rolls back what is open."""
        apart, self._alone, self._many = (self._alone, self._many), None, None
        transaction, self._transaction = self._transaction, None
        for connection in apart:
            if connection is not None:
                connection.close()
        if transaction is None:
            return
        if self._source.driver.unlock is not None and transaction.transaction_status() is not TransactionStatus.IDLE:
            # What was interrupted may hold a lock that only the end of the connection gives up.
            transaction.held.invalidate()
        transaction.close()

    @property
    def _open(self) -> HeldConnection:
        assert self._transaction is not None, "no transaction was begun"
        return self._transaction


class RenewalConnection(StoresConnection):
    """On a connection outside of the engine's pool, opened as the pool opens its own."""

    def __init__(self, engine: Engine) -> None:
        # A pool like the engine's, with its events and its way to connect; it is never lent to anybody else.
        self._apart = Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
        super().__init__(Source(self._apart, lambda: HeldConnection(self._apart.connect())))
        # A connection of SQLite may belong to the thread that opened it, and opening another takes no server's place.
        self._keeps = engine.dialect.name != "sqlite"
        self._broken = False

    def open(self) -> None:
        """Connect now: when claims are to be renewed, there may be no room left on the server."""
        self._broken = not self._keeps
        if self._keeps:
            self.open_alone()

    def open_many(self) -> Connection:
        return self.open_alone()

    def send(self, request: SqlRequest) -> Reply:
        with self._kept():
            return super().send(request)

    def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        with self._kept():
            # One by one, on the connection that is open: each renewal is good by itself.
            return [StoresConnection.send(self, request) for request in requests]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        self._broken = True
        yield
        self._broken = not self._keeps

    def transaction_status(self) -> TransactionStatus:
        return TransactionStatus.BROKEN if self._broken else super().transaction_status()

    def close(self) -> None:
        super().close()
        self._apart.dispose()


class AsyncConnectionShell:
    """A connection, async: SQLAlchemy lets the sync code inside of an async engine wait for the event loop."""

    spoils_gently = False

    def __init__(self, sync: HeldConnection | StoresConnection) -> None:
        self.sync = sync
        self.connection: Any = sync.connection

    async def send(self, request: SqlRequest) -> Reply:
        if isinstance(self.sync, StoresConnection) and self.sync.is_closed:
            await self._in_one_piece(self.sync.open_alone)
        return await _awaited(self.sync.send, request)

    async def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        if isinstance(self.sync, StoresConnection) and not self.sync.in_transaction:
            await self._in_one_piece(self.sync.open_many)
        return await _awaited(self.sync.send_all, requests)

    async def begin(self) -> None:
        assert isinstance(self.sync, StoresConnection), "a caller begins their own transactions"
        await self._in_one_piece(self.sync.open_transaction)
        await _awaited(self.sync.enter)
        self.connection = self.sync.connection

    async def _in_one_piece(self, opens: Callable[[], object]) -> None:
        """Take a connection: SQLAlchemy leaves one to the garbage collector whose `connect` is cancelled."""
        await brought_to_its_end(greenlet_spawn(opens), self.abandon)

    async def take(self, *, many: bool) -> None:
        """Take the connection for the first statement, or for many, now; a cancellation is heard at once.

        What the engine gives after that goes back to it.
        """
        import asyncio

        assert isinstance(self.sync, StoresConnection), "a caller has their own connection"
        task = asyncio.ensure_future(greenlet_spawn(self.sync.open_many if many else self.sync.open_alone))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            give_back(task, self.close)
            raise

    async def run(self, statement: str) -> None:
        await _awaited(self.sync.run, statement)

    async def commit(self) -> None:
        await _awaited(self.sync.commit)

    async def rollback(self) -> None:
        await _awaited(self.sync.rollback)

    def transaction_status(self) -> TransactionStatus:
        return self.sync.transaction_status()

    async def close(self) -> None:
        # A cancelled task, too, has to give its connection back.
        await brought_to_its_end(_awaited(self.sync.close), self.abandon)

    async def spoil(self) -> None:
        await _awaited(self.sync.spoil)

    def abandon(self) -> None:
        self.sync.abandon()


def give_back(task: asyncio.Task[Any], close: Callable[[], Awaitable[None]]) -> None:
    """Close what a task opens after nobody waits for it any more."""

    async def closing() -> None:
        with suppress(Exception):
            await task
            await close()

    late = task.get_loop().create_task(closing())
    _late.add(late)
    late.add_done_callback(_late.discard)


# Kept from the garbage collector until they have ended: the event loop does not do it.
_late: Final[set[Any]] = set()


async def _awaited(work: Callable[..., T], *values: Any) -> T:
    try:
        return await greenlet_spawn(work, *values)
    except Exception:
        raise
    except BaseException as interrupt:
        # A cursor in one of these frames would keep SQLite's lock, although its connection is closed, until the
        # garbage collector comes by.
        clear_frames(interrupt.__traceback__)
        raise
