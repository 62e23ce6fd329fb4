"""The world between two moments, and the events that can happen next.

A `World` is a value: the record, the position of each worker, and the past events that the invariants need. Two
histories that lead to equal worlds have equal futures, so that each world is explored once. The store is the production
`MemoryStore`; its clock stands at zero, and time passes by changing the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from onefold._delivery import earlier_ending
from onefold._delivery.steps import Claiming, Extending, LeaseLeft, Reading, StoreStep
from onefold._delivery.waiting import ENDED
from onefold._model import Claim, Entry, Record, State
from onefold.codecs import MsgspecCodec
from onefold.stores.memory import MemoryStore, Row
from onefold.testing.simulate._scenario import ADDRESS, KEEP, LEASE, NOW, Scenario
from onefold.testing.simulate._statements import Past, Statements, Violation
from onefold.testing.simulate._stories import told
from onefold.testing.simulate._worker import (
    Choose,
    Effect,
    End,
    Fails,
    Moment,
    Node,
    Placed,
    Returned,
    Start,
    Tells,
    Waits,
    Watched,
)

# Not a worker: time, the network.
NATURE = -1

OVER = -1.0

# The result before the first worker comes, if there is a bypass.
EARLIER = "the earlier result"


class Action(NamedTuple):
    """A possible next event: who, and in which way; `fault` says whether it counts as a fault."""

    who: int
    way: str
    fault: bool = False


class Worker(Placed, frozen=True):
    """One worker, as the world sees it."""

    beats: int = 0
    # Its heartbeat has the claim in its care.
    watched: bool = False
    # Its handler is running.
    inside: bool = False
    # Its lease has ended by the store's clock, and was not renewed since.
    lapsed: bool = False
    # Another handler started while its own was running.
    overlapped: bool = False
    # Its heartbeat was refused.
    lost: bool = False
    # Seen mode: it looked when the record was already done.
    late: bool = False
    # The claim that it holds, as far as it knows; how many were written before it; the steps finished before it.
    claim: Claim | None = None
    order: int = 0
    steps: frozenset[str] = frozenset()
    # The outcome of its claim is unknown.
    doubt: bool = False
    # Its claim is a bypass.
    bypass: bool = False
    # What was done when it found the record that answers it: between that and its end it may be counted.
    found: str | None = None
    # The life of the record in which it made its first request.
    epoch: int = -1
    # It has waited, and has no answer yet. A wake-up may be on its way to it, with the record that another has found.
    waiting: bool = False
    woken: bool = False
    handed: Record | None = None


class World(msgspec.Struct, frozen=True):
    """Everything that the future depends on."""

    row: Row | None
    workers: tuple[Worker, ...]
    past: Past
    faults: int
    # Requests whose senders have given up, and which may still arrive.
    late: tuple[StoreStep, ...] = ()
    # Whether the long time may still pass.
    ages: bool = False


class Physics:
    """The possible events in a world of claims and leases, and the world after each."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.statements = Statements(scenario)
        self.store: MemoryStore = scenario.store(clock=lambda: NOW)
        self.plans = scenario.plans()
        self.names = [plan.name for plan in self.plans]
        self._first = tuple(Node(plan) for plan in self.plans)
        self._last = Node(scenario.plan("the last delivery"))

    def first(self) -> World:
        workers = tuple(Worker(node, beats=self.scenario.beats) for node in self._first)
        if self.scenario.bypass:
            return World(self._done_before(), workers, Past(starts=1, done=EARLIER), self.scenario.faults)
        return World(None, workers, Past(), self.scenario.faults, ages=self.scenario.ages)

    def _done_before(self) -> Row:
        result = MsgspecCodec().encode(EARLIER, Any)
        entry = Entry(address=ADDRESS, token=b"an earlier run", state=State.DONE, ttl=KEEP, result=result)
        assert self.store.claim(entry) is None
        return replace(self.store._rows[ADDRESS], began=0.0)

    def actions(self, world: World) -> Iterator[Action]:
        """Yield everything that can happen next; a world without an action is a final one."""
        for who, worker in enumerate(world.workers):
            if not worker.ended and not self._is_idle_person(world, who):
                yield from self._ways(world, who, worker)
        yield from self._time(world)
        for number in range(len(world.late)):
            yield Action(NATURE, f"late {number}")

    def _is_idle_person(self, world: World, who: int) -> bool:
        """Return whether the person has nothing to resolve, or to forget."""
        if who < self.scenario.workers or world.workers[who].node is not self._first[who]:
            return False
        wanted = State.DONE if self.scenario.person == "forget" else State.HELD
        return world.row is None or world.row.state is not wanted

    def _ways(self, world: World, who: int, worker: Worker) -> Iterator[Action]:
        moment = worker.at
        faulty = world.faults > 0
        if isinstance(moment, Choose):
            for number, way in enumerate(moment.ways):
                fault = number > 0 and moment.what == "the handler"
                if faulty or not fault:
                    yield Action(who, way, fault)
        elif isinstance(moment, Waits):
            yield from self._wake_ups(worker, who, faulty=faulty)
        else:
            yield Action(who, "goes on")
        if worker.watched and worker.beats and not worker.lost:
            yield Action(who, "beats")
        if not faulty:
            return
        yield Action(who, "dies", fault=True)
        if isinstance(moment, StoreStep):
            for way in ("no answer", "answer lost", "sent twice"):
                yield Action(who, way, fault=True)
            if self.scenario.late:
                yield Action(who, "arrives late", fault=True)

    def _wake_ups(self, worker: Worker, who: int, *, faulty: bool) -> Iterator[Action]:
        """Yield how a wait may end. A wake-up may be late, lost or doubled; a spurious one is a look by itself."""
        if self.scenario.looks:
            yield Action(who, "looks by itself")
        if worker.woken:
            yield Action(who, "is woken")
        if worker.woken and faulty:
            yield Action(who, "is woken twice", fault=True)
            yield Action(who, "is not woken", fault=True)

    def _time(self, world: World) -> Iterator[Action]:
        row = world.row
        if row is None:
            return
        alive = any(not one.ended and one.claim is not None and one.claim.token == row.token for one in world.workers)
        if row.is_live(NOW) and (not alive or world.faults):
            yield Action(NATURE, "lease ends", fault=alive)
        if self.scenario.loses and world.faults:
            yield Action(NATURE, "loss", fault=True)
        if world.ages and row.expires != float("inf") and (not alive or row.state is not State.RUNNING):
            yield Action(NATURE, "long time")

    def apply(self, world: World, action: Action) -> World:
        """Return the world after the action. Raises `Violation` if an invariant does not hold."""
        if action.fault:
            world = replace(world, faults=world.faults - 1)
        if action.who == NATURE:
            return self._nature(world, action.way)
        worker = world.workers[action.who]
        if action.way == "dies":
            return _put(world, action.who, replace(worker, dead=True, inside=False))
        if action.way == "beats":
            return self._beat(world, action.who, worker)
        moment = worker.at
        if isinstance(moment, StoreStep):
            return self._ask(world, action.who, worker, moment, action.way)
        return self._go_on(world, action.who, worker, moment, action.way)

    def _nature(self, world: World, way: str) -> World:
        row = world.row
        if way == "long time":
            assert row is not None
            past = self.statements.expired(world.past, row)
            workers = tuple(replace(one, lapsed=True) for one in world.workers)
            return replace(world, row=None, past=past, workers=workers, ages=False)
        if way == "loss":
            return replace(world, row=None)
        if way == "lease ends":
            assert row is not None
            workers = tuple(
                replace(one, lapsed=True) if one.claim is not None and one.claim.token == row.token else one
                for one in world.workers
            )
            return replace(world, row=replace(row, leased_until=OVER), workers=workers)
        number = int(way.removeprefix("late "))
        step = world.late[number]
        world = replace(world, late=world.late[:number] + world.late[number + 1 :])
        return self._perform(world, step)[0]

    def _beat(self, world: World, who: int, worker: Worker) -> World:
        assert worker.claim is not None
        world, ours = self._perform(world, Extending(worker.claim))
        lapsed = worker.lapsed if not ours else world.row is None or world.row.leased_until <= NOW
        return _put(world, who, replace(worker, beats=worker.beats - 1, lost=not ours, lapsed=lapsed))

    def _ask(self, world: World, who: int, worker: Worker, step: StoreStep, way: str) -> World:
        worker = self.statements.asking(worker, step, world.past)
        reply: Any = Fails()
        if way == "arrives late":
            world = replace(world, late=(*world.late, step))
        elif way != "no answer":
            world, reply = self._perform(world, step)
            if way == "sent twice":
                world, reply = self._perform(world, step)
            if way == "answer lost":
                reply = Fails()
        if self.scenario.counts and isinstance(step, (Claiming, Reading)):
            worker = replace(worker, found=world.past.done)
        if isinstance(step, Claiming) and reply is None and step.entry.state is State.RUNNING and worker.claim is None:
            entry = step.entry
            claim = Claim(ADDRESS, entry.token, entry.lease, entry.ttl)
            doubt = step.replacing is not None and step.replacing.state is State.RUNNING
            bypass = earlier_ending.is_bypass(entry)
            worker = replace(worker, claim=claim, order=world.past.claims, steps=world.past.steps, doubt=doubt)
            worker = replace(worker, bypass=bypass, doubt=doubt and not bypass)
        return self._after(world, who, worker, reply)

    def _perform(self, world: World, step: StoreStep) -> tuple[World, Any]:
        """Perform one operation of the production store."""
        rows = self.store._rows
        rows.clear()
        if world.row is not None:
            rows[ADDRESS] = world.row
        reply = step.send(self.store)
        row = rows.get(ADDRESS)
        if row is not None:
            # The age of a record matters only to `rerun_within`, which no scenario sets.
            row = replace(row, began=0.0)
        past = self.statements.performed(world.past, step, world.row, row, reply)
        return replace(world, row=row, past=past), reply

    def _go_on(self, world: World, who: int, worker: Worker, moment: Moment, way: str) -> World:
        reply: Any = None
        past = world.past
        if isinstance(moment, Start):
            past = self.statements.started(past, worker, world.workers)
            others = tuple(
                replace(one, overlapped=True) if one.inside and 0 < one.order < worker.order else one
                for one in world.workers
            )
            world = replace(world, workers=others)
            overlapped = any(one.inside and one.order > worker.order > 0 for one in others)
            worker = replace(worker, inside=True, overlapped=overlapped, waiting=False, woken=False, handed=None)
        elif isinstance(moment, Effect):
            past = self.statements.happened(past, worker, moment)
        elif isinstance(moment, Returned):
            past = self.statements.returned(past, worker, moment)
        elif isinstance(moment, Watched):
            worker = replace(worker, watched=True)
            reply = 0.0 if worker.lapsed else LEASE
        elif isinstance(moment, Waits):
            if way == "is not woken":
                return _put(world, who, replace(worker, woken=False, handed=None))
            # Whoever is woken may be handed what another has found; who looks by itself was not told yet.
            reply = worker.handed if way != "looks by itself" else None
            if self.scenario.counts and reply is not None:
                worker = replace(worker, found=past.done)
            worker = worker if way == "is woken twice" else replace(worker, woken=False, handed=None)
        elif isinstance(moment, Tells):
            if moment.found.state in ENDED:
                world = replace(world, workers=tuple(_woken(one, moment.found) for one in world.workers))
                worker = world.workers[who]
        elif isinstance(moment, LeaseLeft):
            reply = 0.0 if worker.lapsed or worker.lost else LEASE
        elif isinstance(moment, Choose):
            reply = way
            past = self.statements.chosen(past, way)
            doubt = {"times out": True, "not done": False}.get(way, worker.doubt)
            worker = replace(worker, inside=False, doubt=doubt)
        return self._after(replace(world, past=past), who, worker, reply)

    def _after(self, world: World, who: int, worker: Worker, reply: Any) -> World:
        worker = replace(worker, node=worker.node.after(reply))
        if isinstance(worker.at, Waits):
            worker = replace(worker, waiting=True)
        if isinstance(worker.at, End):
            self.statements.ended(world.past, worker)
            if worker.claim is not None or worker.waiting:
                # Its own delivery has ended, or it has looked and leaves the next look to another.
                world = replace(world, workers=tuple(_woken(one) for one in world.workers))
            # Nothing of an ended worker matters any more but that it has ended, and that its claim may lie about.
            worker = Worker(worker.node, claim=worker.claim)
        return _put(world, who, worker)

    def close(self, world: World, lines: list[str]) -> None:
        """Check invariant 8: when the leases have passed, a fresh delivery settles it, described in `lines`."""
        if any(not worker.ended and isinstance(worker.at, Waits) for worker in world.workers):
            raise Violation(8, "somebody waits for ever")
        self.statements.over(world.past, faults_used=self.scenario.faults - world.faults)
        row = world.row
        if row is not None and row.state is State.RUNNING:
            world = replace(world, row=replace(row, leased_until=OVER))
        world = replace(world, workers=(Worker(self._last),), faults=0, late=())
        while not world.workers[0].ended:
            moment = world.workers[0].at
            way = moment.ways[0] if isinstance(moment, Choose) else "goes on"
            after = self.apply(world, Action(0, way))
            lines.append(told("the last delivery", moment, way, after.workers[0].at, (world.row, after.row)))
            world = after
        self.statements.settled(world.past, world.workers[0].at)

    def tell(self, world: World, action: Action, after: World | None) -> str:
        """Write one line of a story."""
        if action.who == NATURE:
            if action.way.startswith("late "):
                step = world.late[int(action.way.removeprefix("late "))]
                return f"a late request arrives: {type(step).__name__.lower()}"
            stories = {"lease ends": "the lease ends", "long time": "a long time passes"}
            return stories.get(action.way, "the store loses the record")
        moment = world.workers[action.who].at
        then = after.workers[action.who].at if after is not None else None
        changed = None if after is None else (world.row, after.row)
        return told(self.names[action.who], moment, action.way, then, changed)


def _woken(worker: Worker, found: Record | None = None) -> Worker:
    """Return a worker to which a wake-up is on its way, if it waits."""
    if not worker.waiting or worker.ended:
        return worker
    return replace(worker, woken=True, handed=worker.handed or found)


def _put(world: World, who: int, worker: Worker) -> World:
    workers = (*world.workers[:who], worker, *world.workers[who + 1 :])
    return replace(world, workers=workers)
