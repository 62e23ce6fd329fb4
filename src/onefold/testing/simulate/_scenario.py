"""Define a simulation: how many workers, under which policy, with how many faults, on which store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, Final, Literal, get_args

import msgspec

from onefold import Policy
from onefold._concurrency.generators import Flow
from onefold._delivery.claim import deliver
from onefold._delivery.joined import transact
from onefold._delivery.migration import Old, read_through
from onefold._delivery.records import forget, resolve
from onefold._delivery.seen import look
from onefold._delivery.work import Delivery
from onefold._model import Address, DeliveryRequest, Done, Rerun
from onefold._model.policy import AFTER_CRASH, AfterCrashWord, StoreDown
from onefold._model.policy import Mode as PolicyMode
from onefold.codecs import MsgspecCodec
from onefold.events import Teller
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from onefold.testing.simulate._worker import Plan

ADDRESS = address("charge", "pay_7f3a")

# In units of the simulated clock. A lease is short compared to a keep, as in reality.
NOW = 0.0
LEASE = 10.0
KEEP = 1000.0

Mode = Literal[PolicyMode, "transactional"]
Way = Literal[AfterCrashWord, "probe"]
# A row is in a table that is only read, and all workers claim in the new store.
Left = Literal["nothing", "done", "open", "held", "abandoned", "row"]

WAYS: Final[tuple[Way, ...]] = get_args(Way)
# The record in the old store, and the faults in an everyday run: a record that can be taken over has more histories.
MIGRATING: Final[tuple[tuple[Left, int], ...]] = (
    ("nothing", 2),
    ("done", 2),
    ("held", 2),
    ("abandoned", 2),
    ("open", 1),
    ("row", 2),
)
# Under these, nothing runs twice whatever fails.
CAREFUL: Final[tuple[Way, ...]] = ("hold", "probe")


def _probe(_current: Any) -> Any:
    raise AssertionError("the simulator answers for the probe")


IN_POLICY: Final[dict[str, Any]] = {**{word: word for word in AFTER_CRASH}, "probe": _probe}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One family of histories."""

    mode: Mode = "claim"
    after_crash: Way = "rerun"
    workers: int = 2
    faults: int = 2
    # How often the heartbeat of each worker may beat.
    beats: int = 1
    # A step that every handler takes before its effect.
    steps: tuple[str, ...] = ()
    # A person resolves held records, as done or by a rerun; or forgets what is done, so that it may run again.
    person: Literal["", "done", "rerun", "forget"] = ""
    # Once, so much time may pass that everything disappears that is not kept forever.
    ages: bool = False
    # It was done before: the first and the third worker run it again on purpose, the others are ordinary duplicates.
    bypass: bool = False
    # In transactional mode deliveries are tasks, which may be cancelled at every point, once, twice, or at every turn.
    cancels: bool = False
    # A request may be delivered late, after its sender has given up on it.
    late: bool = False
    # The store may lose the record, like a cache that evicts or a replica that was behind.
    loses: bool = False
    # Two stores between which the workers are moving, and the initial record of the old one.
    migrating: Left | Literal[""] = ""
    # Finished records count the duplicates that they answer.
    counts: bool = False
    wait: float = 0.0
    # One who waits also looks by itself. Without it, a lost wake-up would leave it waiting.
    looks: bool = True
    store_down: StoreDown = "refuse"
    store: Callable[..., MemoryStore] = MemoryStore
    # The numbers of invariants that are not checked, to see what else would find the same defect.
    ignoring: frozenset[int] = frozenset()

    @property
    def is_careful(self) -> bool:
        """Whether nothing may run twice, whatever fails."""
        return self.after_crash in CAREFUL

    @property
    def name(self) -> str:
        parts: list[str] = [self.mode]
        if self.mode == "claim":
            parts.append(self.after_crash)
        parts += [f"{self.workers} workers", f"{self.faults} faults"]
        parts += [f"step {name}" for name in self.steps]
        parts += [f"person says {self.person}"] if self.person else []
        parts += [_moving_from(self.migrating)] if self.migrating else []
        parts += [word for word, is_on in self._switches() if is_on]
        return ", ".join(parts)

    def _switches(self) -> tuple[tuple[str, bool], ...]:
        return (
            ("a bypass", self.bypass),
            ("a long time", self.ages),
            ("late requests", self.late),
            ("cancelled tasks", self.cancels),
            ("a store that loses records", self.loses),
            ("counted duplicates", self.counts),
            ("waiting", self.wait > 0),
            ("never looking by itself", not self.looks),
            ("unprotected runs", self.store_down == "run"),
        )

    @property
    def policy(self) -> Policy:
        after_crash: Any = "rerun" if self.mode == "seen" else IN_POLICY[self.after_crash]
        return Policy(
            lease=LEASE,
            keep=KEEP,
            wait=self.wait,
            after_crash=after_crash,
            max_attempts=3,
            store_down=self.store_down,
            count_duplicates=self.counts,
            mode="seen" if self.mode == "seen" else "claim",
        )

    def plans(self) -> list[Plan]:
        """Return the workers in their order, and after them the person."""
        plans = [
            self.plan(f"worker {number}", bypass=self.bypass and number != 2) for number in range(1, self.workers + 1)
        ]
        if self.person:
            flow = forget if self.person == "forget" else partial(_resolve, self.person)
            name = "the person"
            plans.append(Plan(name=name, flow=flow, delivery=lambda: _make_delivery(name, self.policy)))
        return plans

    def plan(self, name: str, *, bypass: bool = False) -> Plan:
        flow: Any = {"claim": deliver, "seen": look, "transactional": transact}[self.mode]
        if self.migrating:
            flow = _deliver_counting_rows if self.migrating == "row" else _deliver_read_through
        return Plan(
            name=name, flow=flow, delivery=lambda: _make_delivery(name, self.policy, bypass=bypass), steps=self.steps
        )


def _moving_from(left: str) -> str:
    return "moving from a table that has its row" if left == "row" else f"moving from a store that knows it as {left}"


class Silent(Teller):
    """Writes no log: each warning would be one of millions of histories here."""

    __slots__ = ()

    def warn(self, where: Address | str, text: str, *, about: str = "") -> None:
        pass

    def warn_each(self, address: Address, text: str) -> None:
        pass


def _make_delivery(name: str, policy: Policy, *, bypass: bool = False) -> Delivery:
    tokens = (f"{name} token {number}".encode() for number in count(1))
    request = DeliveryRequest(ADDRESS, bypass=bypass)
    return Delivery(request, policy, _never_called, Any, MsgspecCodec(), Silent(), lambda: next(tokens))


def _deliver_read_through(delivery: Delivery) -> Flow[Any]:
    return read_through(deliver(delivery), Old("the other store"))


def _deliver_counting_rows(delivery: Delivery) -> Flow[Any]:
    return read_through(deliver(delivery), Old("the table", only_read=True))


def _resolve(person: str, delivery: Delivery) -> Flow[Any]:
    resolution = Done("what the person found") if person == "done" else Rerun()
    return resolve(delivery, resolution, by="maria", reason="looked it up")


def _never_called() -> None:
    raise AssertionError("the simulator runs the handler")


def _everyday() -> Iterator[Scenario]:
    for way in WAYS:
        yield Scenario(after_crash=way)
        yield Scenario(after_crash=way, steps=("reserve",))
        yield Scenario(after_crash=way, late=True)
        yield Scenario(after_crash=way, late=True, steps=("reserve", "pay"), beats=0)
        yield Scenario(after_crash=way, ages=True)
        yield Scenario(after_crash=way, workers=3, faults=0)
        yield Scenario(after_crash=way, faults=1, wait=0.01)
        yield Scenario(after_crash=way, workers=3, faults=1, wait=0.001, beats=0)
        yield Scenario(after_crash=way, bypass=True, steps=("reserve",), beats=0)
    for way in CAREFUL:
        yield Scenario(after_crash=way, person="done")
        yield Scenario(after_crash=way, person="rerun")
    yield Scenario(store_down="run")
    for left, faults in MIGRATING:
        yield Scenario(after_crash="hold", migrating=left, beats=0, faults=faults)
    yield Scenario(migrating="nothing", beats=0)
    yield from (Scenario(after_crash=way, migrating="abandoned", beats=0, faults=1) for way in ("rerun", "probe"))
    yield from (Scenario(mode="seen"), Scenario(mode="seen", workers=3, faults=0))
    yield from (Scenario(mode="transactional"), Scenario(mode="transactional", workers=3, faults=0))
    yield Scenario(mode="transactional", cancels=True, faults=1)
    yield from _counting()


def _counting() -> Iterator[Scenario]:
    """A count meets another one, a late request, an expiry, a person who forgets the record, and a bypass."""
    yield Scenario(counts=True, workers=3, beats=0)
    yield Scenario(counts=True, late=True)
    yield Scenario(counts=True, ages=True)
    yield Scenario(counts=True, person="forget", beats=0)
    yield Scenario(counts=True, bypass=True, beats=0)
    yield Scenario(counts=True, mode="seen", workers=3, faults=1)


def _deep() -> Iterator[Scenario]:
    for way in WAYS:
        yield Scenario(after_crash=way, beats=2, late=True, steps=("reserve",))
        yield Scenario(after_crash=way, faults=3)
        yield Scenario(after_crash=way, workers=3, faults=1)
        yield Scenario(after_crash=way, wait=0.01)
        yield Scenario(after_crash=way, store_down="run")
        yield Scenario(after_crash=way, bypass=True, late=True)
        yield Scenario(after_crash=way, bypass=True, workers=3, faults=1)
    for way in CAREFUL:
        yield Scenario(after_crash=way, person="rerun", steps=("reserve",), late=True)
        yield Scenario(after_crash=way, person="done", ages=True)
        yield Scenario(after_crash=way, migrating="open", beats=0)
    yield from (Scenario(after_crash=way, migrating="abandoned", beats=0) for way in ("rerun", "probe"))
    yield from (Scenario(mode="seen", faults=3), Scenario(mode="seen", workers=3, faults=2))
    yield from (Scenario(mode="transactional", faults=4), Scenario(mode="transactional", workers=3, faults=2))
    yield Scenario(mode="transactional", cancels=True, faults=2)
    yield from (Scenario(counts=True, workers=3, late=True, beats=0), Scenario(counts=True, bypass=True, workers=3))


EVERYDAY: Final = tuple(_everyday())
DEEP: Final = EVERYDAY + tuple(_deep())
