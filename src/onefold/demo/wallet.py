"""The wallet: balances in a real SQLite file, and a ledger from which effects are counted afterwards.

The ledger has no unique index: an effect that happens twice is two rows in it. Nothing here knows about guards.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

# Two consumers never write for longer than a few milliseconds; it bounds how long a broken one hangs.
BUSY_TIMEOUT: Final = 10.0

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS effects (key TEXT NOT NULL, account TEXT NOT NULL, amount INTEGER NOT NULL,
                                    pid INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS deliveries (key TEXT NOT NULL, pid INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS downstream_keys (key TEXT PRIMARY KEY);
"""


class Message(NamedTuple):
    """One movement of money; its sender creates the key, which is the same on every retry."""

    key: str
    account: str
    amount: int

    def __str__(self) -> str:
        return f"{self.key} ({self.account} +{self.amount})"


# Each of them meets the duplicate of one place: the first of place 1, and so on.
MESSAGES: Final = (
    Message("txn-001", "riya", 1500),
    Message("txn-002", "rahul", 900),
    Message("txn-003", "riya", 200),
    Message("txn-004", "asha", 4500),
    Message("txn-005", "rahul", 100),
)


class ReplyLost(Exception):
    """The database has committed, and its client never got the answer."""


class Wallet:
    """One process's connection to the file.

    `after_commit` is called for each effect that a COMMIT has just made durable.
    """

    def __init__(self, path: str, after_commit: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self._connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
        self._connection.executescript(SCHEMA)
        self._after_commit = after_commit
        self._effects: list[str] = []

    @contextmanager
    def transaction(self, what: str = "the effect") -> Iterator[sqlite3.Connection]:
        """Run the block between BEGIN IMMEDIATE and COMMIT; roll back on an error. `what` names the committed work."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._effects = []
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        for effect in self._effects:
            self._after_commit(f"commits {what}: {effect}")

    def credit(self, tx: sqlite3.Connection, message: Message) -> None:
        """Apply the effect: increase the balance, and write the ledger. Twice is twice."""
        tx.execute(
            "INSERT INTO wallet VALUES (?, ?) ON CONFLICT (account) DO UPDATE SET balance = balance + excluded.balance",
            (message.account, message.amount),
        )
        (balance,) = tx.execute("SELECT balance FROM wallet WHERE account = ?", (message.account,)).fetchone()
        tx.execute("INSERT INTO effects VALUES (?, ?, ?, ?, ?)", (*message, os.getpid(), time.time()))
        self._effects.append(f"{message.account} +{message.amount} makes {balance}")

    def takes(self, tx: sqlite3.Connection, downstream_key: str) -> bool:
        """Return whether this key is new, like a system downstream that deduplicates on an Idempotency-Key."""
        return tx.execute("INSERT OR IGNORE INTO downstream_keys VALUES (?)", (downstream_key,)).rowcount == 1

    def note_delivery(self, key: str) -> None:
        """Count this call of the handler, in its own transaction, whatever happens to it."""
        self._connection.execute("INSERT INTO deliveries VALUES (?, ?, ?)", (key, os.getpid(), time.time()))


class Counted(NamedTuple):
    """The content of the file at the end."""

    deliveries: dict[str, int]
    effects: dict[str, int]
    balances: dict[str, int]


def count(path: Path) -> Counted:
    """Read the file. Anything missing counts as zero."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        return Counted(
            dict(connection.execute("SELECT key, COUNT(*) FROM deliveries GROUP BY key")),
            dict(connection.execute("SELECT key, COUNT(*) FROM effects GROUP BY key")),
            dict(connection.execute("SELECT account, balance FROM wallet")),
        )


def each_once(messages: Iterable[Message]) -> dict[str, int]:
    """Return the right balances."""
    balances: dict[str, int] = {}
    for message in messages:
        balances[message.account] = balances.get(message.account, 0) + message.amount
    return balances
