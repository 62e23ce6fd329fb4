"""A card is charged, and the worker is killed before it can say so. Run it: python examples/card_charge.py

The effect is a call to someone else, which no transaction of ours can include. So the handler passes a key on, the same
on each attempt, and **the provider deduplicates on it**, as real ones do with their Idempotency-Key. The provider here
is a stand-in with a ledger of its own; the worker is a real process, and its death a real SIGKILL.
It needs `pip install onefold`, and no extra.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import tempfile
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from onefold import Guard, Policy, current

# Long leases are for long handlers; a short one keeps this example short. A duplicate waits until it is over.
POLICY: Final = Policy(keep="forever", lease="2s", wait="30s", after_crash="rerun")

# Far longer than a process needs to start; it bounds the wait for one that does not.
PATIENCE: Final = 60.0


class Provider:
    """Someone else's service: one charge for one idempotency key, however often it is asked."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        with closing(sqlite3.connect(ledger)) as connection, connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS charges (idempotency_key TEXT PRIMARY KEY, reference TEXT, amount INTEGER)"
            )
            connection.execute("CREATE TABLE IF NOT EXISTS calls (idempotency_key TEXT)")

    def charge(self, reference: str, amount: int, idempotency_key: str) -> str:
        with closing(sqlite3.connect(self._ledger)) as connection, connection:
            connection.execute("INSERT INTO calls VALUES (?)", (idempotency_key,))
            connection.execute("INSERT OR IGNORE INTO charges VALUES (?, ?, ?)", (idempotency_key, reference, amount))
        return f"ch_{idempotency_key[:8]}"

    def count(self) -> tuple[int, int]:
        """How often it was called, and how often it charged."""
        with closing(sqlite3.connect(self._ledger)) as connection:
            calls, charges = connection.execute(
                "SELECT (SELECT COUNT(*) FROM calls), (SELECT COUNT(*) FROM charges)"
            ).fetchone()
        return calls, charges


def deliver(folder: Path, doomed: Connection | None = None) -> str:
    """What a worker does with the message `pay_7f3a`. One that is doomed gets no further than the charge."""
    provider = Provider(folder / "provider.db")
    with Guard(f"sqlite:///{folder / 'onefold.db'}", policy=POLICY) as guard:

        @guard.idempotent("charge", key="payment_id")
        def charge(payment_id: str, amount: int) -> str:
            receipt = provider.charge(payment_id, amount, idempotency_key=current().key_for("gateway"))
            if doomed is not None:
                doomed.send(receipt)
                doomed.recv()  # for ever: it is killed here
            return receipt

        return charge("pay_7f3a", 4200)


def main(folder: Path) -> None:
    provider = Provider(folder / "provider.db")
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=deliver, args=(folder, there), daemon=True)
    worker.start()
    there.close()

    assert here.poll(PATIENCE), "the worker did not get to the charge"
    receipt = here.recv()
    worker.kill()
    worker.join()
    print(f"the worker charged the card ({receipt}) and was killed, before its record and its ack")
    assert provider.count() == (1, 1)

    again = deliver(folder)
    calls, charges = provider.count()
    print(f"the queue delivered again: {calls} calls with one key, {charges} charge ({again})")
    assert (calls, charges) == (2, 1)
    assert again == receipt

    assert deliver(folder) == receipt
    print("and again: replayed, nobody was called")
    assert provider.count() == (2, 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
