"""BabelQueue delivers one message twice, and the card is charged once. Run it: python examples/babelqueue_charge.py

Without an argument the queue is in memory. With the URL of a Redis, such as redis://localhost:6379/0, queue and records
are there, and two worker processes race for the same message, as two machines would.
It needs `pip install 'onefold[babelqueue,redis]'`.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from babelqueue import BabelQueue
from babelqueue.codec import EnvelopeCodec

from onefold import Guard, current
from onefold.queues.babelqueue import wrap

URN: Final = "urn:babel:orders:created"

# How often the producer publishes the same body: it got no answer the first times.
PUBLISHED: Final = 4

WORKERS: Final = 2

# Longer than a process needs to start and to empty the queue; it bounds the wait for it.
PATIENCE: Final = 90.0


class CardGateway:
    """Someone else's service; here, a file with the charges that it made."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger

    def charge(self, order: int, amount: int, idempotency_key: str) -> None:
        with self._ledger.open("a", encoding="utf-8") as ledger:
            ledger.write(f"order {order}: {amount} under {idempotency_key[:8]}\n")

    def charges(self) -> list[str]:
        return self._ledger.read_text(encoding="utf-8").splitlines() if self._ledger.exists() else []


def consumer(broker: str, queue: str, guard: Guard, ledger: Path) -> BabelQueue:
    """A worker: its handler is wrapped, and that is all."""
    app, gateway = BabelQueue(broker, queue=queue), CardGateway(ledger)

    def on_order_created(data: Mapping[str, Any], _meta: Mapping[str, Any]) -> None:
        gateway.charge(data["order_id"], data["amount"], idempotency_key=current().key_for("card"))

    app.register(URN, wrap(guard, on_order_created, operation="charge"))
    return app


def work(broker: str, queue: str, ledger: Path) -> None:
    with Guard(broker) as guard:
        consumer(broker, queue, guard, ledger).consume(max_messages=PUBLISHED, timeout=2.0)


def publish(app: BabelQueue, queue: str) -> None:
    """The same body again and again: what a producer does that gets no answer."""
    body = EnvelopeCodec.encode(EnvelopeCodec.make(URN, {"order_id": 1042, "amount": 4200}, queue=queue))
    for _ in range(PUBLISHED):
        app.transport.publish(queue, body)
    print(f"published {PUBLISHED} times: the message for order 1042")


def in_memory(folder: Path, ledger: Path) -> None:
    with Guard(f"sqlite:///{folder / 'onefold.db'}") as guard:
        app = consumer("memory://", "orders", guard, ledger)
        publish(app, "orders")
        print(f"delivered: {app.consume(max_messages=PUBLISHED)} times")


def in_two_processes(broker: str, ledger: Path) -> None:
    queue = f"orders-{uuid.uuid4().hex}"
    publish(BabelQueue(broker, queue=queue), queue)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(broker, queue, ledger), daemon=True) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    print(f"{WORKERS} worker processes have emptied the queue: {[worker.exitcode for worker in workers] == [0, 0]}")


def main(folder: Path, broker: str) -> None:
    ledger = folder / "ledger.txt"
    if broker == "memory://":
        in_memory(folder, ledger)
    else:
        in_two_processes(broker, ledger)
    charges = CardGateway(ledger).charges()
    print(f"charged: {charges}")
    assert len(charges) == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary), sys.argv[1] if len(sys.argv) > 1 else "memory://")
