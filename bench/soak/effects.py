"""What messages do: money is moved, and every call is noted. Looked at by plain SQL, without a line of the library.

In transactional mode the effects are rows beside the records, written through `tx`. In claim mode they happen in the
bank, another system, whose business is not ours: it must never refuse, and it charges a key only once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.soak.plan import ACCOUNTS, Message, account

# Words that SQLite, PostgreSQL and MariaDB all understand.
TABLES: Final = (
    "CREATE TABLE wallet (account VARCHAR(40) PRIMARY KEY, balance INTEGER NOT NULL)",
    # Every effect as it happened.
    "CREATE TABLE calls (message VARCHAR(40) NOT NULL, bank_key VARCHAR(200) NOT NULL, amount INTEGER NOT NULL)",
)
CHARGES: Final = (
    "CREATE TABLE charges (bank_key VARCHAR(200) PRIMARY KEY, message VARCHAR(40) NOT NULL, amount INTEGER NOT NULL)"
)

MOVE_MONEY: Final = "UPDATE wallet SET balance = balance + ? WHERE account = ?"
NOTE: Final = "INSERT INTO calls VALUES (?, ?, ?)"

# Writers that wait for the bank's file.
BANK_PATIENCE: Final = 120.0


class Effects(NamedTuple):
    """All that happened: message and key of each call, the message of each charge, the money."""

    calls: list[tuple[str, str]]
    charges: list[str]
    balances: dict[str, int]


class Ledger:
    """The wallet and the calls in one database; `connect` opens it, `mark` is how its driver writes a parameter."""

    tables: tuple[str, ...] = TABLES

    def __init__(self, connect: Callable[[], Any], mark: str = "?") -> None:
        self.connect = connect
        self._mark = mark

    def create(self) -> None:
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            for table in self.tables:
                cursor.execute(table)
            for number in range(ACCOUNTS):
                self.execute(cursor, "INSERT INTO wallet VALUES (?, 0)", account(number))
            connection.commit()

    def credit(self, tx: Any, message: Message) -> None:
        """The effect of transactional mode, in a transaction that somebody else begins and ends."""
        with closing(tx.cursor()) as cursor:
            self.move_money(cursor, message)
            self.note(cursor, message, message.id)

    async def credit_async(self, tx: Any, message: Message) -> None:
        """The same on a connection of psycopg that is awaited."""
        async with tx.cursor() as cursor:
            await cursor.execute(self._marked(MOVE_MONEY), (message.amount, message.account))
            await cursor.execute(self._marked(NOTE), (message.id, message.id, message.amount))

    def move_money(self, cursor: Any, message: Message) -> None:
        self.execute(cursor, MOVE_MONEY, message.amount, message.account)

    def note(self, cursor: Any, message: Message, key: str) -> None:
        self.execute(cursor, NOTE, message.id, key, message.amount)

    def execute(self, cursor: Any, statement: str, *values: object) -> None:
        cursor.execute(self._marked(statement), values)

    def _marked(self, statement: str) -> str:
        return statement.replace("?", self._mark)

    def seen(self) -> Effects:
        with closing(self.connect()) as connection:
            calls = _rows(connection, "SELECT message, bank_key FROM calls")
            balances = dict(_rows(connection, "SELECT account, balance FROM wallet"))
            return Effects(calls, self._charges(connection), balances)

    def _charges(self, _connection: Any) -> list[str]:
        return []


class Bank(Ledger):
    """The system downstream: it notes each call, and moves the money of each key once."""

    tables = (*TABLES, CHARGES)

    def __init__(self, path: Path) -> None:
        super().__init__(partial(sqlite_connection, path))

    def charge(self, connection: sqlite3.Connection, message: Message, key: str) -> None:
        cursor = connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        self.note(cursor, message, key)
        self.execute(cursor, "INSERT OR IGNORE INTO charges VALUES (?, ?, ?)", key, message.id, message.amount)
        if cursor.rowcount:
            self.move_money(cursor, message)
        cursor.execute("COMMIT")

    def _charges(self, connection: sqlite3.Connection) -> list[str]:
        return [message for (message,) in _rows(connection, "SELECT message FROM charges")]


def sqlite_connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BANK_PATIENCE, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    # A kill takes nothing back from the operating system, and the bank's own power cuts are not ours to prove.
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def _rows(connection: Any, statement: str) -> list[Any]:
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())
