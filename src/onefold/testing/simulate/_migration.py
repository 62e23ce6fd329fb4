"""The world of two stores, while records move: each guard claims in one of them and reads the other as well.

Worker 1 has moved on to the new store, worker 2 still claims in the old one, and both read both. The old store may have
a record already. Whatever fails, it has to look like one store.

If the old records are rows of a table that is only read, both workers claim in the new store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from onefold._delivery.steps import Claiming, Elsewhere, Finishing, LeaseLeft, Reading, StoreStep
from onefold._model import Claim, Ending, Entry, Released, State
from onefold.codecs import MsgspecCodec
from onefold.stores.memory import MemoryStore, Row
from onefold.testing.simulate._scenario import ADDRESS, KEEP, LEASE, NOW, Scenario
from onefold.testing.simulate._statements import Violation
from onefold.testing.simulate._stories import told
from onefold.testing.simulate._worker import Choose, End, Fails, Moment, Node, Placed, Start, Watched
from onefold.testing.simulate._world import NATURE, OVER, Action

NEW: Final = 0
OLD: Final = 1
NAMES: Final = ("new", "old")

BEFORE: Final = b"whoever was there before"


class Past(msgspec.Struct, frozen=True):
    """The past events that the invariants need."""

    starts: int = 0
    # Handlers that raised, so that nothing happened; probe answers that say the same; leases that ended.
    raised: int = 0
    not_done: int = 0
    lapses: int = 0
    done: str | None = None
    # Something has left the outcome unknown. A failure of the other store has not.
    doubt: bool = False


class Mover(Placed, frozen=True):
    """One worker, and the store in which it claims."""

    home: int = NEW
    token: bytes | None = None
    lapsed: bool = False
    inside: bool = False
    # Its claim was written before anything was done.
    in_time: bool = True


class Two(msgspec.Struct, frozen=True):
    """Everything that the future depends on: the record in either store, the workers, past events."""

    rows: tuple[Row | None, Row | None]
    movers: tuple[Mover, ...]
    past: Past
    faults: int


class Migrating:
    """The possible events with two stores, and the world after each."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.careful = scenario.is_careful
        self.store: MemoryStore = scenario.store(clock=lambda: NOW)
        self.plans = scenario.plans()
        self._first = tuple(Node(plan) for plan in self.plans)
        self._last = tuple(Node(scenario.plan(f"the last delivery to the {name} store")) for name in NAMES)
        self._only_read = scenario.migrating == "row"
        self._homes = (NEW,) if self._only_read else (NEW, OLD)

    def first(self) -> Two:
        row, past = self._left_behind()
        movers = tuple(
            Mover(node, home=self._homes[number % len(self._homes)]) for number, node in enumerate(self._first)
        )
        return Two((None, row), movers, past, self.scenario.faults)

    def _left_behind(self) -> tuple[Row | None, Past]:
        """Return the initial content of the old store."""
        store, left = self.store, self.scenario.migrating
        claim = Claim(ADDRESS, BEFORE, LEASE, KEEP)
        store._rows.clear()
        if left == "nothing":
            return None, Past()
        store.claim(Entry(address=ADDRESS, token=BEFORE, lease=LEASE, ttl=KEEP))
        if left in ("done", "row"):
            value = "what was done before"
            store.finish(claim, Ending(state=State.DONE, ttl=KEEP, result=MsgspecCodec().encode(value, str)))
            return store._rows[ADDRESS], Past(starts=1, done=value)
        if left == "open":
            store.release(claim, Released(attempt=1, ttl=KEEP))
            return store._rows[ADDRESS], Past(starts=1, raised=1)
        if left == "held":
            store.finish(claim, Ending(state=State.HELD, ttl=KEEP))
            return store._rows[ADDRESS], Past(starts=1, doubt=True)
        return replace(store._rows[ADDRESS], leased_until=OVER), Past(starts=1, lapses=1, doubt=True)

    def actions(self, world: Two) -> Iterator[Action]:
        for who, mover in enumerate(world.movers):
            if mover.ended:
                continue
            moment = mover.at
            if isinstance(moment, Choose):
                faulty = moment.what == "the handler"
                ways = moment.ways if world.faults or not faulty else moment.ways[:1]
                yield from (Action(who, way, fault=faulty and way != ways[0]) for way in ways)
            else:
                yield Action(who, "goes on")
            if world.faults:
                yield Action(who, "dies", fault=True)
                if isinstance(moment, StoreStep):
                    yield from (Action(who, way, fault=True) for way in ("no answer", "answer lost", "sent twice"))
        for side, row in enumerate(world.rows):
            if row is not None and row.is_live(NOW):
                alive = any(not one.ended and one.token == row.token for one in world.movers)
                if not alive or world.faults:
                    yield Action(NATURE, f"lease ends {side}", fault=alive)

    def apply(self, world: Two, action: Action) -> Two:
        if action.fault:
            doubt = world.past.doubt or self._leaves_a_doubt(world, action)
            world = replace(world, faults=world.faults - 1, past=replace(world.past, doubt=doubt))
        if action.who == NATURE:
            return self._lease_ends(world, int(action.way[-1]))
        mover = world.movers[action.who]
        if action.way == "dies":
            return _put(world, action.who, replace(mover, dead=True, inside=False))
        moment = mover.at
        if isinstance(moment, StoreStep):
            return self._ask(world, action.who, mover, moment, action.way)
        return self._go_on(world, action.who, mover, moment, action.way)

    def _leaves_a_doubt(self, world: Two, action: Action) -> bool:
        """Return whether this fault is more than a failed other store, or a handler after which nothing happened."""
        if action.who == NATURE or action.way == "dies":
            return True
        return action.way != "raises" and not isinstance(world.movers[action.who].at, Elsewhere)

    def _lease_ends(self, world: Two, side: int) -> Two:
        row = world.rows[side]
        assert row is not None
        movers = tuple(replace(one, lapsed=True) if one.token == row.token else one for one in world.movers)
        past = replace(world.past, lapses=world.past.lapses + 1)
        return replace(_with_row(world, side, replace(row, leased_until=OVER)), movers=movers, past=past)

    def _ask(self, world: Two, who: int, mover: Mover, moment: StoreStep, way: str) -> Two:
        side = 1 - mover.home if isinstance(moment, Elsewhere) else mover.home
        step = moment.step if isinstance(moment, Elsewhere) else moment
        if self._only_read and side == OLD and not isinstance(step, Reading):
            raise Violation(6, "the table is written to, and it is somebody else's")
        reply: Any = Fails()
        if way != "no answer":
            world, reply = self._perform(world, side, step)
            if way == "sent twice":
                world, reply = self._perform(world, side, step)
            if way == "answer lost":
                reply = Fails()
        if isinstance(step, Claiming) and reply is None and step.entry.lease > 0:
            mover = replace(mover, token=step.entry.token, lapsed=False, in_time=world.past.done is None)
        if isinstance(step, Finishing):
            mover = replace(mover, inside=False)
        return self._after(world, who, mover, reply)

    def _perform(self, world: Two, side: int, step: StoreStep) -> tuple[Two, Any]:
        rows = self.store._rows
        rows.clear()
        before = world.rows[side]
        if before is not None:
            rows[ADDRESS] = before
        reply = step.send(self.store)
        row = rows.get(ADDRESS)
        world = _with_row(world, side, None if row is None else replace(row, began=0.0))
        if isinstance(step, Finishing) and reply is True and row is not None and row.state is State.DONE:
            world = replace(world, past=self._done(world.past, row))
        return world, reply

    def _done(self, past: Past, row: Row) -> Past:
        value = "" if row.result is None else str(MsgspecCodec().decode(row.result, Any))
        if past.done not in (None, value):
            raise Violation(5, f"a second ending was accepted: {value} after {past.done}")
        return replace(past, done=value)

    def _go_on(self, world: Two, who: int, mover: Mover, moment: Moment, way: str) -> Two:
        reply: Any = None
        past = world.past
        if isinstance(moment, Start):
            past = self._started(world, mover)
            mover = replace(mover, inside=True)
        elif isinstance(moment, (Watched, LeaseLeft)):
            reply = 0.0 if mover.lapsed else LEASE
        elif isinstance(moment, Choose):
            reply = way
            # If a rerun is harmless, an unknown outcome is released like an error.
            released = way == "raises" or (way == "times out" and not self.careful)
            past = replace(past, raised=past.raised + released, not_done=past.not_done + (way == "not done"))
            mover = replace(mover, inside=False)
        return self._after(replace(world, past=past), who, mover, reply)

    def _started(self, world: Two, mover: Mover) -> Past:
        past = replace(world.past, starts=world.past.starts + 1)
        if not mover.in_time:
            raise Violation(4, "a handler started from a claim that was written after done")
        if not mover.lapsed and any(one.inside and not one.lapsed for one in world.movers):
            raise Violation(3, "two handlers run, one from each store, and no lease has ended")
        allowed = 1 + past.raised + (past.not_done if self.careful else past.lapses)
        if past.starts > allowed:
            raise Violation(2 if self.careful else 1, f"{past.starts} starts, and {allowed} are accounted for")
        return past

    def _after(self, world: Two, who: int, mover: Mover, reply: Any) -> Two:
        mover = replace(mover, node=mover.node.after(reply))
        end = mover.at
        if isinstance(end, End):
            replayed = end.kind == "outcome" and end.replayed and end.recorded and not end.omitted
            if replayed and end.value != world.past.done:
                raise Violation(5, f"the replay {end.value!r} is not what was accepted: {world.past.done!r}")
            mover = Mover(mover.node, home=mover.home, token=mover.token)
        return _put(world, who, mover)

    def close(self, world: Two, lines: list[str]) -> None:
        """Check invariant 8, from both sides: a done record is replayed, and an unsettled one runs or is held."""
        for side in self._homes:
            for number, row in enumerate(world.rows):
                if row is not None and row.state is State.RUNNING:
                    world = self._lease_ends(world, number)
            world = replace(world, movers=(Mover(self._last[side], home=side),), faults=0)
            world = self._deliver_last(world, side, lines)
            end = world.movers[0].at
            assert isinstance(end, End)
            if end.kind not in ("outcome", "Held"):
                raise Violation(8, f"after all leases had ended a fresh delivery {end.story}")
            if end.kind == "Held" and not world.past.doubt:
                raise Violation(8, "nobody is in doubt whether it ran, and a fresh delivery finds it held")
            if world.past.done is not None and end.kind != "outcome":
                raise Violation(8, f"it was done, and a fresh delivery to the {NAMES[side]} store {end.story}")

    def _deliver_last(self, world: Two, side: int, lines: list[str]) -> Two:
        while not world.movers[0].ended:
            moment = world.movers[0].at
            action = Action(0, moment.ways[0] if isinstance(moment, Choose) else "goes on")
            after = self.apply(world, action)
            lines.append(self.tell(world, action, after, name=f"the last delivery to the {NAMES[side]} store"))
            world = after
        return world

    def tell(self, world: Two, action: Action, after: Two | None, *, name: str = "") -> str:
        if action.who == NATURE:
            return f"the lease in the {NAMES[int(action.way[-1])]} store ends"
        mover = world.movers[action.who]
        moment, side = mover.at, mover.home
        if isinstance(moment, Elsewhere):
            moment, side = moment.step, 1 - side
        then = None if after is None else after.movers[action.who].at
        changed = None if after is None else (world.rows[side], after.rows[side])
        where = f" in the {NAMES[side]} store" if isinstance(moment, StoreStep) else ""
        return told(name or self.plans[action.who].name, moment, action.way, then, changed) + where


def _with_row(world: Two, side: int, row: Row | None) -> Two:
    return replace(world, rows=(row, world.rows[OLD]) if side == NEW else (world.rows[NEW], row))


def _put(world: Two, who: int, mover: Mover) -> Two:
    return replace(world, movers=(*world.movers[:who], mover, *world.movers[who + 1 :]))
