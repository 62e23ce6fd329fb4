"""The workers: processes that deliver through a guard and say what became of it, until somebody kills them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from bench.soak.effects import Bank, Ledger
from bench.soak.plan import Message, Plan
from onefold import TX, ClaimLost, Guard, Held, InProgress, Outcome, StoreUnavailable, current

# A handler takes up to this long before its effect, and after it: room for a kill.
HANDLER_PAUSE: Final = 0.002

OPERATION: Final = "charge"

Deliver = Callable[[Message], Outcome[None] | None]


class Desk(NamedTuple):
    """What a worker works with: the store, and where its effects happen."""

    plan: Plan
    url: str
    effects: Ledger


class Verdict(NamedTuple):
    """What a consumer tells its broker, and from when to when it was at it."""

    kind: str
    began: float
    ended: float
    detail: str = ""


class Worker:
    """A process, and the deliveries that it has not acknowledged, in the order in which it was given them."""

    def __init__(self, desk: Desk, others: Sequence[Connection], work: Callable[..., None]) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=work, args=(desk, theirs, [*others, self.pipe]), daemon=True)
        self.process.start()
        theirs.close()
        self.in_hand: deque[int] = deque()
        # When it will be continued, if it is stopped.
        self.wakes_at: float | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> None:
        """SIGKILL, also if it is stopped; nothing if it is dead."""
        self.process.kill()
        self.process.join()

    def stop(self, seconds: float) -> None:
        """Stop it for so long, and come back when it has really stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)
        self.wakes_at = time.monotonic() + seconds

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.wakes_at = None


# From here on: inside the process.


def work(desk: Desk, inbox: Connection, others: Sequence[Connection]) -> None:
    """One worker: deliver, acknowledge, until the queue is closed or somebody kills us."""
    # The parent decides when it is over, also when a person does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Inherited: while we hold them open, nobody would notice the end of the parent.
    for other in others:
        other.close()
    with contextlib.suppress(EOFError, BrokenPipeError), Guard(desk.url, policy=desk.plan.policy) as guard:
        deliver = _crediting(desk, guard) if desk.plan.mode == "transactional" else _charging(desk, guard)
        while True:
            number, message = inbox.recv()
            inbox.send((number, _verdict(deliver, message, guard)))


def _verdict(deliver: Deliver, message: Message, guard: Guard) -> Verdict:
    began, moment = time.monotonic(), time.time()
    kind, _, detail = _became(deliver, message, guard, moment).partition(": ")
    return Verdict(kind, began, time.monotonic(), detail)


def _became(deliver: Deliver, message: Message, guard: Guard, moment: float) -> str:
    """What became of one delivery; see the table of errors in `docs/guarantees.md`."""
    try:
        outcome = deliver(message)
    except InProgress:
        return "later"
    except Held:
        return "held"
    except ClaimLost:
        # By the stores' own clock: it goes on while a machine is paused, and the other one does not.
        if time.time() - moment < guard.policy.lease:
            return "early: its claim was taken over before its lease had ended"
        return "lost, done" if _is_done(message, guard) else "lost"
    except StoreUnavailable as error:
        return f"busy: {error}"
    except Exception as error:  # noqa: BLE001 - the parent reports it
        return f"error: {error!r}"
    if outcome is None or not outcome.replayed:
        return "ran" if outcome is None or outcome.recorded else "forgotten"
    return "replayed"


def _is_done(message: Message, guard: Guard) -> bool:
    try:
        record = guard.read(OPERATION, message.id)
    except StoreUnavailable:
        return False
    return record is not None and record.state == "done"


def _crediting(desk: Desk, guard: Guard) -> Deliver:
    def credit(id: str, account: str, amount: int, *, tx: Any = TX) -> None:  # noqa: A002 - a word of the trade
        desk.effects.credit(tx, Message(id, account, amount))

    if desk.plan.guarded:
        guarded = guard.transactional(OPERATION, key="id")(credit)
        return lambda message: guarded.outcome(*message)

    def unguarded(message: Message) -> None:
        with guard.store.transaction() as transaction:
            transaction.begin()
            credit(*message, tx=transaction.tx)
            transaction.commit()

    return unguarded


def _charging(desk: Desk, guard: Guard) -> Deliver:
    bank, plan = desk.effects, desk.plan
    assert isinstance(bank, Bank)
    connection = bank.connect()
    journal = os.open(plan.journal, os.O_WRONLY | os.O_APPEND)

    def handler(message: Message) -> None:
        os.write(journal, f"{message.id}\n".encode())
        time.sleep(random.uniform(0, HANDLER_PAUSE))
        bank.charge(connection, message, current().key_for("bank") if plan.guarded else uuid.uuid4().hex)
        time.sleep(random.uniform(0, HANDLER_PAUSE))

    if plan.guarded:
        return lambda message: guard.run(OPERATION, message.id, lambda: handler(message), payload=list(message))
    return handler
