"""Transactions of our own on MySQL or MariaDB, which a handler's statement, or its error, can end without a word."""

from __future__ import annotations

from onefold.stores._sql_joined import AsyncSqlTransaction, SqlTransaction


class MysqlTransaction(SqlTransaction):
    """On connections that are watched."""

    def check_open(self) -> None:
        super().check_open()
        connection = self.link.connection
        connection.watch.check(in_transaction=connection.in_transaction())

    def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if self._begun and to_savepoint:
            # After a deadlock there is no savepoint any more.
            self.check_open()
        elif self._begun:
            connection = self.link.connection
            connection.watch.note(error, in_transaction=connection.in_transaction())
        return super().rollback(error, to_savepoint=to_savepoint)


class AsyncMysqlTransaction(AsyncSqlTransaction):
    """The same, awaited."""

    async def check_open(self) -> None:
        await super().check_open()
        connection = self.link.connection
        connection.watch.check(in_transaction=connection.in_transaction())

    async def rollback(self, error: BaseException, *, to_savepoint: bool = False) -> bool:
        if self._begun and to_savepoint:
            await self.check_open()
        elif self._begun:
            connection = self.link.connection
            connection.watch.note(error, in_transaction=connection.in_transaction())
        return await super().rollback(error, to_savepoint=to_savepoint)
