"""Transactions of our own on MySQL or MariaDB, which a handler's statement, or its error, can end without a word."""

from __future__ import annotations

from onefold.stores._sql_joined import AsyncSqlTransaction, SqlTransaction


class MysqlTransaction(SqlTransaction):
    """On connections that are watched, so that the server need not be asked."""

    marks = False

    def _check_standing(self) -> None:
        super()._check_standing()
        connection = self.link.connection
        connection.watch.check(in_transaction=connection.in_transaction())

    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if self._begun and to_savepoint:
            # After a deadlock there is no savepoint any more.
            self._check_standing()
        elif self._begun:
            connection = self.link.connection
            connection.watch.note(error, in_transaction=connection.in_transaction())
        return super().rollback(error, to_savepoint=to_savepoint)


class AsyncMysqlTransaction(AsyncSqlTransaction):
    """The same, awaited."""

    marks = False

    async def _check_standing(self) -> None:
        await super()._check_standing()
        connection = self.link.connection
        connection.watch.check(in_transaction=connection.in_transaction())

    async def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if self._begun and to_savepoint:
            await self._check_standing()
        elif self._begun:
            connection = self.link.connection
            connection.watch.note(error, in_transaction=connection.in_transaction())
        return await super().rollback(error, to_savepoint=to_savepoint)
