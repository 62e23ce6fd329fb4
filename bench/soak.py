"""Eight processes, one file, random kills: whether the effects are those that `docs/guarantees.md` promises.

A queue in the parent delivers each message at least once, many of them twice, to workers that are killed (and, in claim
mode, stopped past their lease) at random moments. A delivery comes back until it is acknowledged. At the end every
message is looked up in what the effects left behind, never in what a worker says.

It exits with 1 on the first promise that does not hold, and keeps the files as evidence. `--without-guard` must fail.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from rich.console import Console
from rich.table import Table

from onefold import TX, ClaimLost, Guard, InProgress, OnHold, Outcome, Policy, StoreUnavailable, current
from onefold.stores.sqlite import SqliteStore

Mode = Literal["transactional", "rerun", "hold"]

WORKERS: Final = 8
ACCOUNTS: Final = 20

# How long a worker is stopped, in leases: past its own, and past the redelivery that takes its message over.
STOPPED: Final = 1.4

# A worker has so many deliveries in its hands; the first is the one that it works on.
IN_HAND: Final = 4

# What is given back comes again after this; what is still running has a lease to wait for.
PAUSE_FIRST: Final = 0.02
PAUSE_MAX: Final = 0.2

# A handler takes up to this long before its effect, and after it: room for a kill.
HANDLER_PAUSE: Final = 0.002

# The bank is another system, and its own business; it must never refuse.
BANK_PATIENCE: Final = 120.0

# How many lines of evidence a person wants to read.
EVIDENCE_MAX: Final = 20


class Size(NamedTuple):
    """How much of everything."""

    deliveries: int
    messages: int
    kills: int
    stops: int
    # Longer than eight writers wait for the file, so that leases end by kills and stops and not in a queue. Whoever
    # outlives one all the same is told, and counted.
    lease: float


FULL: Final = Size(deliveries=20_000, messages=14_000, kills=40, stops=8, lease=1.5)
SHORT: Final = Size(deliveries=2_000, messages=1_400, kills=8, stops=2, lease=0.6)


class Message(NamedTuple):
    id: str
    account: str
    amount: int


class Plan(NamedTuple):
    """One run: what is delivered, in which mode, where, and how."""

    mode: Mode
    size: Size
    seed: int
    place: Path
    sync: Literal["full", "normal"]
    guarded: bool
    seconds_max: float

    @property
    def messages(self) -> list[Message]:
        chance = random.Random(self.seed)
        return [
            Message(f"m-{number:05}", f"account-{chance.randrange(ACCOUNTS):02}", chance.randint(1, 100))
            for number in range(self.size.messages)
        ]

    @property
    def deliveries(self) -> list[Message]:
        """Every message once and some again: half of the duplicates at any time, half right behind their original."""
        chance, messages = random.Random(self.seed + 1), self.messages
        again = chance.choices(messages, k=self.size.deliveries - len(messages))
        late, at_once = again[::2], Counter(again[1::2])
        shuffled = [(message, 1 + at_once.pop(message, 0)) for message in messages]
        shuffled += [(message, 1) for message in late]
        chance.shuffle(shuffled)
        return [message for message, times in shuffled for _ in range(times)]

    @property
    def policy(self) -> Policy:
        if self.mode == "transactional":
            return Policy(keep="forever")
        # No message can be hit so often that its attempts are used up.
        attempts = 1 + self.size.kills + self.size.stops + WORKERS
        return Policy(keep="forever", lease=self.size.lease, after_crash=self.mode, attempts_max=attempts)

    @property
    def records(self) -> Path:
        return self.place / "records.db"

    @property
    def bank(self) -> Path:
        """The effects: beside the records in transactional mode, in a system of its own in claim mode."""
        return self.records if self.mode == "transactional" else self.place / "bank.db"

    @property
    def journal(self) -> Path:
        return self.place / "starts.log"


# The effects.

SCHEMA: Final = (
    "CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)",
    # Every effect as it happened; the bank of claim mode charges a key only once.
    "CREATE TABLE calls (message TEXT NOT NULL, key TEXT NOT NULL, amount INTEGER NOT NULL)",
    "CREATE TABLE charges (key TEXT PRIMARY KEY, message TEXT NOT NULL, amount INTEGER NOT NULL)",
)


def open_bank(plan: Plan) -> None:
    with closing(sqlite3.connect(plan.bank, isolation_level=None)) as bank:
        bank.execute("PRAGMA journal_mode = WAL")
        for statement in SCHEMA:
            bank.execute(statement)
        accounts = [(f"account-{number:02}", 0) for number in range(ACCOUNTS)]
        bank.executemany("INSERT INTO wallet VALUES (?, ?)", accounts)


def move_money(bank: sqlite3.Connection, message: Message) -> None:
    bank.execute("UPDATE wallet SET balance = balance + ? WHERE account = ?", (message.amount, message.account))


def charge(bank: sqlite3.Connection, key: str, message: Message) -> None:
    """What the system downstream does with one call: it notes it, and moves the money of each key once."""
    bank.execute("BEGIN IMMEDIATE")
    bank.execute("INSERT INTO calls VALUES (?, ?, ?)", (message.id, key, message.amount))
    charged = bank.execute("INSERT OR IGNORE INTO charges VALUES (?, ?, ?)", (key, message.id, message.amount))
    if charged.rowcount:
        move_money(bank, message)
    bank.execute("COMMIT")


# The workers.

Deliver = Callable[[Message], Outcome[None] | None]


def work(plan: Plan, inbox: Connection, others: Sequence[Connection]) -> None:
    """One worker: deliver, acknowledge, until the queue is closed or somebody kills us."""
    # The parent decides when it is over, also when a person does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Inherited: while we hold them open, nobody would notice the end of the parent.
    for other in others:
        other.close()
    with contextlib.suppress(EOFError, BrokenPipeError), Guard(lambda: _store(plan), policy=plan.policy) as guard:
        deliver = _crediting(plan, guard) if plan.mode == "transactional" else _charging(plan, guard)
        while True:
            number, message = inbox.recv()
            inbox.send((number, _verdict(deliver, message, guard)))


def _store(plan: Plan) -> SqliteStore:
    return SqliteStore(plan.records, sync=plan.sync)


def _verdict(deliver: Deliver, message: Message, guard: Guard) -> str:
    """What a consumer tells its broker; see the table of errors in `docs/guarantees.md`."""
    began = time.monotonic()
    try:
        outcome = deliver(message)
    except InProgress:
        return "later"
    except OnHold:
        return "held"
    except ClaimLost:
        if time.monotonic() - began < guard.policy.lease:
            return "error: its claim was taken over before its lease had ended"
        record = guard.read("charge", message.id)
        return "lost, done" if record is not None and record.state == "done" else "lost"
    except StoreUnavailable as error:
        return f"busy: {error}"
    except Exception as error:  # noqa: BLE001 - the parent reports it
        return f"error: {error!r}"
    return "replayed" if outcome is not None and outcome.replayed else "ran"


def _crediting(plan: Plan, guard: Guard) -> Deliver:
    def credit(id: str, account: str, amount: int, *, tx: sqlite3.Connection = TX) -> None:  # noqa: A002 - a word of the trade
        message = Message(id, account, amount)
        move_money(tx, message)
        tx.execute("INSERT INTO calls VALUES (?, ?, ?)", (id, id, amount))

    if plan.guarded:
        guarded = guard.transactional("charge", key="id")(credit)
        return lambda message: guarded.outcome(*message)

    def unguarded(message: Message) -> None:
        with guard.store.transaction() as transaction:
            transaction.begin()
            credit(*message, tx=transaction.tx)
            transaction.commit()

    return unguarded


def _charging(plan: Plan, guard: Guard) -> Deliver:
    bank = sqlite3.connect(plan.bank, timeout=BANK_PATIENCE, isolation_level=None)
    # A kill takes nothing back from the operating system, and the bank's own power cuts are not ours to prove.
    bank.execute("PRAGMA synchronous = OFF")
    journal = os.open(plan.journal, os.O_WRONLY | os.O_APPEND)

    def handler(message: Message) -> None:
        os.write(journal, f"{message.id}\n".encode())
        time.sleep(random.uniform(0, HANDLER_PAUSE))
        charge(bank, current().key_for("bank") if plan.guarded else uuid.uuid4().hex, message)
        time.sleep(random.uniform(0, HANDLER_PAUSE))

    if plan.guarded:
        return lambda message: guard.run("charge", message.id, lambda: handler(message), fingerprint=list(message))
    return handler


# The queue.


class Worker:
    """A process, and the deliveries that it has not acknowledged, in the order in which it was given them."""

    def __init__(self, plan: Plan, others: Sequence[Connection]) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=work, args=(plan, theirs, [*others, self.pipe]), daemon=True)
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


class Queue:
    """Delivers until everything is acknowledged, and strikes at random moments."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.deliveries = dict(enumerate(plan.deliveries))
        self.unacknowledged = set(self.deliveries)
        self.ready = deque(self.deliveries)
        self.later: list[tuple[float, int]] = []
        self.tries: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        # What is on hold comes again at the end, when everybody has said what they had to say.
        self.parked: set[int] = set()
        # By message: kills and stops while a worker had it in its hands, and how often an owner was told "lost".
        self.hits: dict[str, Counter[str]] = {"kill": Counter(), "stop": Counter()}
        self.told: Counter[str] = Counter()
        self.errors: list[str] = []
        self.workers: list[Worker] = []
        self.chance = random.Random(plan.seed + 2)
        self.strikes = self._strikes()

    def _strikes(self) -> deque[tuple[int, str]]:
        """After how many acknowledgements which strike comes. Nobody is stopped inside a transaction on purpose:
        it would only stop all others too."""
        size = self.plan.size
        kinds = ["kill"] * size.kills + ["stop"] * (0 if self.plan.mode == "transactional" else size.stops)
        # The last tenth is left in peace, so that a strike always finds somebody at work.
        return deque(sorted((self.chance.randrange(size.deliveries * 9 // 10), kind) for kind in kinds))

    def run(self) -> float:
        """Deliver everything; how long it took."""
        began = time.monotonic()
        try:
            for _ in range(WORKERS):
                self._start_worker()
            self._deliver_all(ends=began + self.plan.seconds_max)
            took = time.monotonic() - began
            self._let_all_wake()
            self.ready.extend(self.parked)
            self.unacknowledged |= self.parked
            self._deliver_all(ends=began + self.plan.seconds_max)
            return took
        finally:
            for worker in self.workers:
                worker.end()

    def _deliver_all(self, ends: float) -> None:
        while self.unacknowledged and not self.errors:
            self._hand_out()
            self._hear()
            self._strike()
            self._wake()
            self._tell_progress()
            if time.monotonic() > ends:
                self.errors.append(f"{len(self.unacknowledged)} deliveries left after {self.plan.seconds_max:g} s")

    def _start_worker(self) -> None:
        self.workers.append(Worker(self.plan, [worker.pipe for worker in self.workers]))

    def _hand_out(self) -> None:
        """One delivery to each worker in turn, so that neighbours in the queue are delivered at the same time."""
        now = time.monotonic()
        # To the front, so that what a stopped worker has in its hands is taken over before that continues.
        self.ready.extendleft(number for moment, number in self.later if moment <= now)
        self.later = [(moment, number) for moment, number in self.later if moment > now]
        for _ in range(IN_HAND):
            for worker in self.workers:
                if self.ready and worker.wakes_at is None and len(worker.in_hand) < IN_HAND:
                    self._give(worker, self.ready.popleft())

    def _give(self, worker: Worker, number: int) -> None:
        if number in self.unacknowledged:
            self.counts["sent"] += 1
            worker.in_hand.append(number)
            worker.pipe.send((number, self.deliveries[number]))

    def _hear(self) -> None:
        pipes = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(pipes), timeout=0.01):
            self._drain(pipes[pipe])  # type: ignore[index]
        for worker in self.workers:
            if worker.process.exitcode is not None:
                self.errors.append(f"a worker ended by itself, with {worker.process.exitcode}")

    def _drain(self, worker: Worker) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while worker.pipe.poll():
                number, verdict = worker.pipe.recv()
                worker.in_hand.remove(number)
                self._settle(number, verdict)

    def _settle(self, number: int, verdict: str) -> None:
        message = self.deliveries[number]
        kind = verdict.partition(":")[0]
        self.counts[kind.partition(",")[0]] += 1
        if kind.startswith("lost"):
            self.told[message.id] += 1
        if kind == "error":
            self.errors.append(f"{message.id}: {verdict}")
        if kind in ("later", "busy", "lost"):
            self.tries[number] += 1
            pause = min(PAUSE_FIRST * 2 ** self.tries[number], PAUSE_MAX)
            self.later.append((time.monotonic() + pause, number))
            return
        self.unacknowledged.discard(number)
        if kind == "held":
            self.parked.add(number)

    def _strike(self) -> None:
        acknowledged = len(self.deliveries) - len(self.unacknowledged)
        if not self.strikes or self.strikes[0][0] > acknowledged:
            return
        targets = [worker for worker in self.workers if worker.wakes_at is None and worker.in_hand]
        if not targets:
            return
        _, kind = self.strikes.popleft()
        self.counts[kind] += 1
        target = self.chance.choice(targets)
        if kind == "stop":
            target.stop(STOPPED * self.plan.size.lease)
        else:
            target.end()
        # What it has acknowledged before is settled; the first of the others is the one that it was working on.
        self._drain(target)
        if target.in_hand:
            self.hits[kind][self.deliveries[target.in_hand[0]].id] += 1
        # The broker sees a consumer that is silent, and delivers to others.
        self.ready.extendleft(target.in_hand)
        if kind == "kill":
            self.workers.remove(target)
            target.pipe.close()
            self._start_worker()

    def _wake(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.wakes_at is not None and worker.wakes_at <= now:
                worker.wake()

    def _let_all_wake(self) -> None:
        """Who is still stopped has something to finish, or to be told."""
        for worker in self.workers:
            if worker.wakes_at is not None:
                time.sleep(max(worker.wakes_at - time.monotonic(), 0.0))
                worker.wake()
        ends = time.monotonic() + self.plan.seconds_max
        while any(worker.in_hand for worker in self.workers) and not self.errors and time.monotonic() < ends:
            self._hear()

    def _tell_progress(self) -> None:
        acknowledged, size = len(self.deliveries) - len(self.unacknowledged), self.plan.size
        if acknowledged * 10 // size.deliveries > self.counts["tenths"]:
            self.counts["tenths"] = acknowledged * 10 // size.deliveries
            kills, stops = self.counts["kill"], self.counts["stop"]
            progress = f"{self.plan.mode}: {acknowledged:,} of {size.deliveries:,}, {kills} kills, {stops} stops"
            print(progress, file=sys.stderr, flush=True)


# The verdict.


class Found(NamedTuple):
    """What a run left behind, by message."""

    starts: Counter[str]
    calls: Counter[str]
    keys: dict[str, set[str]]
    charges: Counter[str]
    balances: dict[str, int]
    states: dict[str, str]


def look(plan: Plan) -> Found:
    with closing(sqlite3.connect(plan.bank)) as bank:
        calls = bank.execute("SELECT message, key FROM calls").fetchall()
        charges = Counter(message for (message,) in bank.execute("SELECT message FROM charges"))
        balances = dict(bank.execute("SELECT account, balance FROM wallet"))
    keys: dict[str, set[str]] = {}
    for message, key in calls:
        keys.setdefault(message, set()).add(key)
    states: dict[str, str] = {}
    if plan.guarded:
        with closing(sqlite3.connect(plan.records)) as records:
            states = dict(records.execute("SELECT key, state FROM onefold_records"))
    starts = Counter(plan.journal.read_text().split())
    return Found(starts, Counter(message for message, _ in calls), keys, charges, balances, states)


def violations(plan: Plan, queue: Queue, found: Found) -> Iterator[str]:
    """Every message that breaks a promise, with what was seen of it."""
    yield from queue.errors
    if queue.errors:
        return
    if queue.strikes:
        yield f"{len(queue.strikes)} strikes never came: this run proves less than it says"
    for message in plan.messages:
        for what in _wrong(plan, queue, found, message.id):
            seen = f"effects {found.calls[message.id]}, record {found.states.get(message.id)}"
            if plan.mode != "transactional":
                seen += f", starts {found.starts[message.id]}, told lost {queue.told[message.id]}"
            seen += "".join(f", {kind}s that hit it {hits[message.id]}" for kind, hits in queue.hits.items())
            yield f"{message.id}: {what} ({seen})"
    if plan.mode != "hold":
        yield from _balances(plan, found)
    if len(_held(found)) > queue.counts["kill"]:
        yield f"{len(_held(found))} messages are held, and there were {queue.counts['kill']} kills"


def _wrong(plan: Plan, queue: Queue, found: Found, id_: str) -> Iterator[str]:
    starts, calls = found.starts[id_], found.calls[id_]
    # Without a guard there are no records, and only the effects count.
    state = found.states.get(id_) if plan.guarded else "done"
    if plan.mode == "transactional":
        if calls != 1:
            yield "its effect did not happen exactly once"
        if state != "done":
            yield "it has an effect, but no record"
        return
    if plan.mode == "hold":
        if calls > 1 or starts > 1:
            yield "it ran twice under hold"
        if state not in ("done", "held"):
            yield "it is neither done nor held"
        if state == "done" and not calls:
            yield "it is done without an effect"
        # A worker that was only stopped turns held into done when it continues.
        if state == "held" and not queue.hits["kill"][id_]:
            yield "it is held, and no kill hit it"
        return
    if state != "done" or not calls:
        yield "it is not done"
    if found.charges[id_] != 1 or len(found.keys.get(id_, ())) != 1:
        yield "downstream, its key is not one"
    # A second start follows a worker that died, or one that outlived its lease and was told so.
    if starts > 1 + queue.hits["kill"][id_] + queue.told[id_]:
        yield "a start that nothing explains"


def _balances(plan: Plan, found: Found) -> Iterator[str]:
    expected: Counter[str] = Counter()
    for message in plan.messages:
        expected[message.account] += message.amount
    for account, balance in found.balances.items():
        if balance != expected[account]:
            yield f"{account} has {balance}, and should have {expected[account]}"


def _held(found: Found) -> list[str]:
    return [message for message, state in found.states.items() if state == "held"]


# The command.


def soak(plan: Plan) -> tuple[dict[str, str], list[str]]:
    """One run: its counts as a person reads them, and what it broke."""
    open_bank(plan)
    plan.journal.touch()
    queue = Queue(plan)
    took = queue.run()
    found = look(plan)
    counts, size = queue.counts, plan.size
    extra = sum(starts - 1 for starts in found.starts.values() if starts > 1)
    claims = plan.mode != "transactional"
    row = {
        "deliveries": f"{size.deliveries:,}",
        "sent, with redeliveries": f"{counts['sent']:,}",
        "kills": str(counts["kill"]),
        "stops past the lease": str(counts["stop"]),
        "ran": f"{counts['ran']:,}",
        "replayed": f"{counts['replayed']:,}",
        "given back for later": f"{counts['later']:,}",
        "store busy": f"{counts['busy']:,}",
        "told that the claim was lost": str(counts["lost"]),
        "handlers started again": str(extra) if claims else "-",
        "effects": f"{found.calls.total():,}",
        "effects downstream, by key": f"{found.charges.total():,}" if claims else "-",
        "messages done": f"{sum(state == 'done' for state in found.states.values()):,}",
        "messages held": str(len(_held(found))),
        "seconds": f"{took:.1f}",
        "deliveries/s": f"{size.deliveries / took:,.0f}",
    }
    return row, list(violations(plan, queue, found))


def main(arguments: Sequence[str] | None = None) -> int:
    # So that it leaves by the same door as always, where the workers are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    asked = _asked(arguments)
    size = SHORT if asked.short else FULL
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"seed {asked.seed}, {WORKERS} processes, {size.messages:,} messages, sync={asked.sync}")
    rows: list[dict[str, str]] = []
    for mode in asked.modes:
        place = Path(tempfile.mkdtemp(prefix=f"onefold-soak-{mode}-", dir=asked.directory))
        plan = Plan(mode, size, asked.seed, place, asked.sync, not asked.without_guard, asked.seconds_max)
        row, wrong = soak(plan)
        rows.append(row | {"": "[red]broken" if wrong else "[green]holds"})
        if wrong:
            console.print(f"{mode}: {len(wrong)} violations; the files are in {place}", style="red")
            console.print("\n".join(f"  {line}" for line in wrong[:EVIDENCE_MAX]))
        else:
            shutil.rmtree(place)
    console.print(_table(asked.modes, rows))
    return 1 if any("broken" in row[""] for row in rows) else 0


def _table(modes: Sequence[str], rows: Sequence[dict[str, str]]) -> Table:
    table = Table("", *modes, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _asked(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="2,000 deliveries and 8 kills, as CI runs it")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1_000_000), help="repeat a run's order and strikes"
    )
    parser.add_argument("--sync", choices=("full", "normal"), default="full", help="how the records are synced")
    parser.add_argument("--without-guard", action="store_true", help="show what happens then: it must fail")
    parser.add_argument("--mode", dest="modes", action="append", choices=get_args(Mode), help="only this one")
    parser.add_argument("--directory", help="where the files go (a temporary directory)")
    parser.add_argument("--seconds-max", type=float, default=900.0, help="when to give a run up")
    asked = parser.parse_args(arguments)
    asked.modes = asked.modes or get_args(Mode)
    return asked


if __name__ == "__main__":
    sys.exit(main())
