"""One message is delivered four times, and the card is charged once. Run it: python examples/charge_once.py

It needs `pip install onefold`, and no extra. Two worker processes race for the same message, as two machines would: the
queue is Python's own, and the records are in an SQLite file. In place of these, use your broker and the URL of your
database.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Final

from onefold import Guard, current

MESSAGE: Final = {"payment": "pay_7f3a", "order": 1042, "amount": 4200}

# The producer got no answer, and has sent it again and again.
DELIVERIES: Final = 4

WORKERS: Final = 2

# Longer than a process needs to start and to empty the queue; it bounds the wait for it.
PATIENCE: Final = 90.0


class CardGateway:
    """Someone else's service; here, a file with the charges that it made."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger

    def charge(self, order: int, amount: int, idempotency_key: str) -> str:
        with self._ledger.open("a", encoding="utf-8") as ledger:
            ledger.write(f"order {order}: {amount} under {idempotency_key[:8]}\n")
        return f"receipt for {amount}"

    def charges(self) -> list[str]:
        return self._ledger.read_text(encoding="utf-8").splitlines()


def work(folder: Path, queue: SimpleQueue[Any], log: SimpleQueue[str]) -> None:
    """Charge what the queue delivers, until it delivers nothing more."""
    gateway = CardGateway(folder / "ledger.txt")
    # Money: by default a key is forgotten after 24 hours. A duplicate waits for the one that is running.
    with Guard(f"sqlite:///{folder / 'onefold.db'}", keep="forever", wait="30s") as guard:

        @guard.idempotent("charge", key="payment")
        def charge(payment: str, order: int, amount: int) -> str:  # noqa: ARG001 - the key
            return gateway.charge(order, amount, idempotency_key=current().key_for("card"))

        for message in iter(queue.get, None):
            outcome = charge.outcome(**message)
            log.put(f"{message['payment']}: {outcome.value}{', replayed' if outcome.replayed else ''}")


def main(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue, log = context.SimpleQueue(), context.SimpleQueue()
    for message in [MESSAGE] * DELIVERIES + [None] * WORKERS:
        queue.put(message)
    workers = [context.Process(target=work, args=(folder, queue, log), daemon=True) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)

    assert [worker.exitcode for worker in workers] == [0] * WORKERS
    told = sorted(log.get() for _ in range(DELIVERIES))
    charges = CardGateway(folder / "ledger.txt").charges()
    print(f"delivered {DELIVERIES} times to {WORKERS} worker processes:")
    print("\n".join(told))
    print(f"charged: {charges}")
    assert told.count("pay_7f3a: receipt for 4200") == len(charges) == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
