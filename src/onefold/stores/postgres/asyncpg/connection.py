"""asyncpg: an adapter around a connection of our own, of a caller's pool, or of a caller's transaction.

asyncpg has no public way to bypass the codecs that a caller has set, or to learn the server's reply to a COMMIT. The
few private names that this needs are used here, and in `pool` and `joined`.
"""

from __future__ import annotations

from asyncio import ensure_future
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import asyncpg

from onefold._concurrency import interrupts
from onefold._concurrency.interrupts import ended
from onefold._driver_connections import register
from onefold.errors import UsageError
from onefold.stores.postgres.errors import SPOILING, meaning, one_line
from onefold.stores.sql.connection import ErrorClass, ErrorInfo, TransactionStatus
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sql.joined_rules import ABORTED
from onefold.stores.sql.records import in_numbers, located

# How long to wait for the server when closing.
CLOSE_SECONDS: Final = 5.0


class Own(asyncpg.Connection):
    """A connection of our own. asyncpg itself does not distinguish a closed connection from a lost one."""

    closed_by_hand = False

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - it is asyncpg's
        self.closed_by_hand = True
        await super().close(timeout=timeout)

    def terminate(self) -> None:
        self.closed_by_hand = True
        super().terminate()


class AsyncpgConnection:
    """An adapter around a connection. asyncpg is in autocommit mode except inside explicit transactions."""

    spoils_gently = True

    def __init__(self, connection: Any, isolation: str | None = None, where: str = "") -> None:
        # A pool lends a proxy around the connection.
        self.connection = connection
        self._inner = inner(connection)
        self._isolation = isolation
        # The qualifier of our tables; empty: the first schema of the session's search path.
        self._where = where
        # Interrupted while the server was working: the outcome of the statement is unknown.
        self._interrupted = False

    async def send(self, request: SqlRequest) -> Reply:
        statement, names = in_numbers(request.statement, self._where)
        self._check_open()
        try:
            rows, status, _ = await self._inner._execute(
                statement,
                [request.values[name] for name in names],
                0,
                None,
                return_status=True,
                ignore_custom_codec=True,
                record_class=asyncpg.Record,
            )
        except asyncpg.InFailedSQLTransactionError as error:
            # asyncpg itself does not report that an earlier statement has failed.
            raise UsageError(ABORTED) from error
        # `_marked`, without its context manager: every delivery comes here.
        except asyncpg.InternalClientError:
            self._interrupted = True
            raise
        except Exception:
            raise
        except BaseException as interrupt:
            self._interrupted = True
            if not isinstance(interrupt, GeneratorExit) and not self._inner.is_in_transaction():
                await self._settled()
            raise
        # The last word of a status such as `UPDATE 1`.
        return Reply(0, rows) if request.rows else Reply(_number(status.decode()))

    async def _settled(self) -> None:
        """Wait, within a bound, until the server has ended or executed the statement of a cancelled task.

        asyncpg asks the server to cancel it, and closing the connection would not keep the server from executing it.
        """
        await ended(ensure_future(self._inner._protocol._wait_for_cancellation()), interrupts.REPLY_SECONDS)

    async def send_all(self, requests: list[SqlRequest]) -> list[Reply]:
        if self.transaction_status() is not TransactionStatus.IDLE:
            return [await self.send(request) for request in requests]
        await self.begin()
        replies = [await self.send(request) for request in requests]
        await self.commit()
        return replies

    async def begin(self) -> None:
        self._check_open()
        # A handler that ended the last transaction by hand has left this set.
        self._inner._top_xact = None
        # Through asyncpg, so that a handler's own `tx.transaction()` becomes a savepoint.
        with self._marked():
            await self._inner.transaction(isolation=self._isolation).start()

    async def run(self, statement: str) -> None:
        self._check_open()
        with self._marked():
            await self._inner.execute(statement)

    async def commit(self) -> None:
        await self._commit("COMMIT")

    async def commit_if(self, check: str) -> None:
        """Commit unless the check fails, in one message: a query without parameters may hold several statements."""
        await self._commit(f"{located(check, self._where)}; COMMIT")

    async def _commit(self, statement: str) -> None:
        self._check_open()
        answer = await self._ended_by(statement)
        if answer != "COMMIT":
            # A transaction with a failed statement is rolled back, and asyncpg does not report it.
            raise UsageError(ABORTED)

    async def rollback(self) -> None:
        self._check_open()
        await self._ended_by("ROLLBACK")

    async def _ended_by(self, statement: str) -> str:
        try:
            with self._marked():
                return str(await self._inner.execute(statement))
        except TimeoutError as error:
            # The outcome is unknown: treat the connection as lost.
            self._interrupted = True
            raise asyncpg.ConnectionDoesNotExistError("no answer to the end of the transaction") from error
        except asyncpg.InFailedSQLTransactionError as error:
            raise UsageError(ABORTED) from error
        finally:
            self._inner._top_xact = None

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Mark the connection on an interrupt: even a BEGIN may have reached the server before asyncpg records it."""
        try:
            yield
        except asyncpg.InternalClientError:
            # A terminated server's last message arrived as we began a request: asyncpg cannot make sense of it.
            self._interrupted = True
            raise
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            raise

    def transaction_status(self) -> TransactionStatus:
        if self._interrupted:
            return TransactionStatus.BROKEN
        if self._inner.is_closed():
            return (
                TransactionStatus.CLOSED if getattr(self._inner, "closed_by_hand", False) else TransactionStatus.BROKEN
            )
        # asyncpg does not show whether a statement has failed in the transaction.
        return TransactionStatus.OPEN if self._inner.is_in_transaction() else TransactionStatus.IDLE

    async def close(self) -> None:
        if self.transaction_status() in (TransactionStatus.BROKEN, TransactionStatus.CLOSED):
            self._inner.terminate()
        else:
            await self._inner.close(timeout=CLOSE_SECONDS)

    async def spoil(self) -> None:
        if self._inner.is_closed() or not self._inner.is_in_transaction():
            return
        try:
            # asyncpg itself waits until the server has ended the interrupted statement.
            await self._inner.execute(SPOILING)
        except asyncpg.PostgresError:
            return
        except Exception:  # noqa: BLE001 - then it is ended at once
            self.abandon()

    def abandon(self) -> None:
        self._interrupted = True
        self._inner.terminate()

    def forget_transaction(self) -> None:
        """Make asyncpg trust the server's transaction status over what a handler has left behind."""
        self._inner._top_xact = None

    def _check_open(self) -> None:
        if self._inner.is_closed():
            raise asyncpg.ConnectionDoesNotExistError("the connection is closed")


def inner(connection: Any) -> Any:
    """Return the connection inside a pool's proxy."""
    return getattr(connection, "_con", connection)


register("asyncpg", inner)


def classify(error: BaseException) -> ErrorInfo | None:
    """Classify an error of asyncpg; return None for any other."""
    if isinstance(error, asyncpg.PostgresError):
        return meaning(error.sqlstate, str(error))
    if isinstance(error, asyncpg.InternalClientError):
        return ErrorInfo(ErrorClass.LOST, f"asyncpg has lost track of the connection: {one_line(str(error))}")
    if isinstance(error, asyncpg.InterfaceError):
        return ErrorInfo(ErrorClass.MISTAKE, f"asyncpg says: {one_line(str(error))}")
    return None


def _number(status: str) -> int:
    last = status.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0
