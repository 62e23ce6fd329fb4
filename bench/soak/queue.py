"""The queue: it delivers until everything is acknowledged, and strikes meanwhile. It believes no worker."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter, deque
from multiprocessing.connection import wait
from typing import Final

from bench.soak import cancelling, workers
from bench.soak.environments import Environment
from bench.soak.plan import WORKERS
from bench.soak.strikes import Outages, Strike, planned
from bench.soak.workers import Desk, Verdict, Worker

# A worker has so many deliveries in its hands; the first is the one that it works on.
IN_HAND: Final = 4

# What is given back comes again after this; what is still running has a lease to wait for.
PAUSE_FIRST: Final = 0.02
PAUSE_MAX: Final = 0.2

# After these nobody can know whether the claim, or the end, of a delivery during an outage was written.
IN_DOUBT: Final = ("busy", "later", "lost", "forgotten")


class Queue:
    """The deliveries of one run, the workers that get them, and what was seen of each message."""

    def __init__(self, desk: Desk, environment: Environment) -> None:
        self.desk = desk
        self.plan = plan = desk.plan
        self.environment = environment
        self.deliveries = dict(enumerate(plan.deliveries))
        self.unacknowledged = set(self.deliveries)
        self.ready = deque(self.deliveries)
        self.later: list[tuple[float, int]] = []
        self.tries: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        # What is held, or was not remembered, comes again at the end, when everybody has said what they had to say.
        self.parked: set[int] = set()
        # By message: kills, stops and outages while a worker had it in its hands; how often an owner was told "lost";
        # how often it ran and could not be remembered.
        self.hits: dict[str, Counter[str]] = {"kill": Counter(), "stop": Counter(), "outage": Counter()}
        self.told: Counter[str] = Counter()
        self.forgotten: Counter[str] = Counter()
        self.errors: list[str] = []
        self.workers: list[Worker] = []
        self.chance = random.Random(plan.seed + 2)
        self.strikes = planned(plan, self.chance)
        self._work = cancelling.work if plan.driver else workers.work
        self.outages = Outages(environment)

    def run(self) -> float:
        """Deliver everything; how long it took."""
        began = time.monotonic()
        try:
            for _ in range(WORKERS):
                self._start_worker()
            self._deliver_all(ends=began + self.plan.seconds_max)
            took = time.monotonic() - began
            self.counts["acknowledged"] = len(self.deliveries) - len(self.unacknowledged)
            self._let_all_wake()
            self.ready.extend(self.parked)
            self.unacknowledged |= self.parked
            self._deliver_all(ends=began + self.plan.seconds_max)
            return took
        finally:
            for worker in self.workers:
                worker.end()
            self.outages.wait()

    def _deliver_all(self, ends: float) -> None:
        while self.unacknowledged and not self.errors:
            self._hand_out()
            self._hear()
            self._strike()
            self.outages.look()
            self._wake()
            self._tell_progress()
            if time.monotonic() > ends:
                self.errors.append(f"{len(self.unacknowledged)} deliveries left after {self.plan.seconds_max:g} s")

    def _start_worker(self) -> None:
        self.workers.append(Worker(self.desk, [worker.pipe for worker in self.workers], self._work))

    def _hand_out(self) -> None:
        """One delivery to each worker in turn, so that neighbours in the queue are delivered at the same time."""
        if self._strike_is_due and self.outages.is_away:
            # A new primary could be through with everything before the old one is back, and can be struck again.
            return
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

    def _settle(self, number: int, verdict: Verdict) -> None:
        if verdict.kind == "early":
            # A claim that the store has lost is free at once.
            verdict = verdict._replace(kind="lost" if self.environment.loses else "error")
        kind = verdict.kind
        self.counts[kind.partition(",")[0]] += 1
        self._note(self.deliveries[number].id, verdict)
        if kind in ("later", "busy", "lost", "cancelled"):
            self.tries[number] += 1
            pause = min(PAUSE_FIRST * 2 ** self.tries[number], PAUSE_MAX)
            self.later.append((time.monotonic() + pause, number))
            return
        self.unacknowledged.discard(number)
        if kind in ("held", "forgotten"):
            self.parked.add(number)

    def _note(self, message: str, verdict: Verdict) -> None:
        """What this verdict explains, and whether something explains it."""
        kind, outage = verdict.kind, self.outages.touched(verdict.began, verdict.ended)
        if kind == "error":
            self.errors.append(f"{message}: {verdict.detail}")
        # Writers of one file may wait too long for each other; a server that is there has to answer.
        if kind in ("busy", "forgotten") and self.environment.has_server and not outage:
            self.errors.append(f"{message}: {kind}, and the server was there. {verdict.detail}")
        if kind.startswith("lost"):
            self.told[message] += 1
        if kind == "forgotten":
            self.forgotten[message] += 1
        if outage and kind in IN_DOUBT:
            self.hits["outage"][message] += 1

    @property
    def _strike_is_due(self) -> bool:
        acknowledged = len(self.deliveries) - len(self.unacknowledged)
        return bool(self.strikes) and self.strikes[0].after <= acknowledged

    def _strike(self) -> None:
        # One after the other: see `Outages`.
        if not self._strike_is_due or self.outages.is_away:
            return
        if self.strikes[0].kind != "server":
            self._strike_worker()
        else:
            self.counts["server"] += 1
            self.outages.begin(self._lasting(self.strikes.popleft()))

    def _lasting(self, strike: Strike) -> float:
        return strike.leases * self.plan.size.lease

    def _strike_worker(self) -> None:
        targets = [worker for worker in self.workers if worker.wakes_at is None and worker.in_hand]
        if not targets:
            return
        strike = self.strikes.popleft()
        self.counts[strike.kind] += 1
        target = self.chance.choice(targets)
        if strike.kind == "stop":
            target.stop(self._lasting(strike))
        else:
            target.end()
        # What it has acknowledged before is settled; the first of the others is the one that it was working on.
        self._drain(target)
        if target.in_hand:
            self.hits[strike.kind][self.deliveries[target.in_hand[0]].id] += 1
        # The broker sees a consumer that is silent, and delivers to others.
        self.ready.extendleft(target.in_hand)
        if strike.kind == "kill":
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
        if acknowledged * 10 // size.deliveries <= self.counts["tenths"]:
            return
        self.counts["tenths"] = acknowledged * 10 // size.deliveries
        struck = f"{self.counts['kill']} kills, {self.counts['stop']} stops"
        if self.plan.strikes_server:
            struck += f", {self.counts['server']} of the server"
        done = f"{acknowledged:,} of {size.deliveries:,}"
        print(f"{self.plan.store}, {self.plan.driver or self.plan.mode}: {done}, {struck}", file=sys.stderr, flush=True)
