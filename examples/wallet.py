"""A wallet consumer with duplicates on the wire. Run it: python examples/wallet.py

The effect is a row in a database that you own, so the record goes into the same transaction: both commit, or neither.

A late duplicate gets the balance that was stored with the first delivery, and not the current one. It asks again for an
answer that it has not heard: "1500 after this credit" is that answer, and stays it. The balance of now, with the
credits of others in it, answers no question that this message asks, would be different for each retry, and would make a
client that compares it believe that its credit was another amount. Who wants the current balance reads it.
It needs `pip install onefold`, and no extra.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from onefold import TX, Guard

# What a queue delivers: five messages, and two of them twice. The id is minted by the sender, and kept over retries.
WIRE: Final[Sequence[dict[str, Any]]] = (
    {"id": "txn-001", "account": "riya", "amount": 1500},
    {"id": "txn-002", "account": "rahul", "amount": 900},
    {"id": "txn-003", "account": "riya", "amount": 200},
    {"id": "txn-003", "account": "riya", "amount": 200},
    {"id": "txn-004", "account": "asha", "amount": 4500},
    {"id": "txn-005", "account": "rahul", "amount": 100},
    {"id": "txn-005", "account": "rahul", "amount": 100},
)


def main(folder: Path) -> None:
    path = folder / "wallet.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
        connection.execute("CREATE TABLE effects (id TEXT NOT NULL)")

    with Guard(f"sqlite:///{path}") as guard:

        @guard.transactional("credit", key="id")
        def credit(id: str, account: str, amount: int, *, tx: sqlite3.Connection = TX) -> int:  # noqa: A002
            tx.execute("INSERT INTO effects VALUES (?)", (id,))
            tx.execute(
                "INSERT INTO wallet VALUES (?, ?) "
                "ON CONFLICT (account) DO UPDATE SET balance = balance + excluded.balance",
                (account, amount),
            )
            (balance,) = tx.execute("SELECT balance FROM wallet WHERE account = ?", (account,)).fetchone()
            return int(balance)

        print(f"{len(WIRE)} deliveries of {len({message['id'] for message in WIRE})} messages")
        for message in WIRE:
            outcome = credit.outcome(**message)
            what = "absorbed" if outcome.replayed else "applied"
            print(f"  {message['id']}  {message['account']:5}  +{message['amount']:<4}  {what:8}  {outcome.value}")

        # Others were credited since: the answer to this message is still the first one.
        late = credit.outcome(**WIRE[0])
        print(f"  {WIRE[0]['id']} once more: {late.value}, as it was then")
        assert (late.replayed, late.value) == (True, 1500)

    with closing(sqlite3.connect(path)) as connection:
        effects = connection.execute("SELECT id, COUNT(*) FROM effects GROUP BY id").fetchall()
        balances = dict(connection.execute("SELECT account, balance FROM wallet"))
    print(f"effects {sum(times for _, times in effects)}, balances {balances}")
    assert effects == [(f"txn-00{number}", 1) for number in range(1, 6)]
    assert balances == {"riya": 1700, "rahul": 1000, "asha": 4500}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
