"""MySQL and MariaDB: what both drivers' modules have to know of a caller's connection. Nothing here sends anything."""

from __future__ import annotations

from typing import Any, Final

from onefold.errors import NotInTransaction, StoreUnavailable
from onefold.stores.mysql.transaction_state import IN_TRANSACTION
from onefold.stores.sql.connection import Database, Kind, cause_of
from onefold.stores.sql.dialect import Ask

# Host, port or socket, and database: as the connection was opened.
Place = tuple[Any, ...]

# Where the tables were looked at.
looked: Final[set[Place]] = set()

WHICH_DATABASE: Final = Ask("SELECT DATABASE()", {}, rows=True)


def enter(connection: Any) -> None:
    """Be inside a transaction. With autocommit off the first statement begins one, and that may be ours."""
    if not connection.get_autocommit():
        connection.server_status |= IN_TRANSACTION
    elif not connection.server_status & IN_TRANSACTION:
        raise not_in_transaction()


def not_in_transaction() -> NotInTransaction:
    return NotInTransaction(
        "this connection is in autocommit mode, and no transaction is open: the record and the work would not be "
        "committed together. Nothing ran. Call begin() before, or connect with autocommit=False"
    )


def lacks_tables(error: Exception, database: Database) -> bool:
    trouble = cause_of(error, database)
    return trouble is not None and trouble.kind is Kind.NO_TABLES


def cannot_make(database: Database) -> StoreUnavailable:
    return StoreUnavailable(
        f"{database.name}: there are no tables of Onefold, and they cannot be made from here: that needs another "
        "connection, which failed. Nothing ran. Make them with the command `onefold schema URL --apply`"
    )
