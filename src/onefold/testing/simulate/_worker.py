"""One worker: the production flow, split into the moments at which something else can happen.

A worker is a function of the replies that it has received. Generators cannot be copied, but they can be replayed: each
`Node` is one such list of replies, made once and shared by every history that leads to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any

import msgspec

from onefold import StoreUnavailable
from onefold._concurrency.generators import Flow
from onefold._delivery.handler_steps.flow import StepLog, take_step
from onefold._delivery.handler_steps.log_writes import Logging
from onefold._delivery.steps import (
    Elsewhere,
    Ended,
    Extending,
    Found,
    LeaseLeft,
    Pausing,
    Running,
    StoreStep,
    Took,
    Unwatching,
    Waiting,
    Watching,
)
from onefold._delivery.work import Delivery
from onefold._model import Done, NotDone, Record, Unknown, downstream


class Start(msgspec.Struct, frozen=True):
    """The handler's first line."""

    attempt: int


class Effect(msgspec.Struct, frozen=True):
    """The effect happens, under the key that the system downstream gets. A named one belongs to a step."""

    key: str
    step: str = ""


class Returned(msgspec.Struct, frozen=True):
    """`step()` returns its result to the handler, which continues."""

    step: str


class Choose(msgspec.Struct, frozen=True):
    """A choice of the world: how a handler ends, what a probe answers. The first is the ordinary way."""

    what: str
    ways: tuple[str, ...]


class Watched(msgspec.Struct, frozen=True):
    """From here on the heartbeat may beat."""


class Pause(msgspec.Struct, frozen=True):
    """A retry is due later."""


class Waits(msgspec.Struct, frozen=True):
    """A duplicate waits for the end of another delivery: it is woken, or looks by itself."""


class Tells(msgspec.Struct, frozen=True):
    """A duplicate that has waited tells the others what it has found."""

    found: Record


class End(msgspec.Struct, frozen=True):
    """How a delivery ended: an outcome or an error, and the value that came with it."""

    kind: str
    value: Any = None
    replayed: bool = False
    omitted: bool = False
    recorded: bool = True
    # The handler's own value, even if the caller got it inside an error.
    attempt: int = 0

    @property
    def story(self) -> str:
        if self.kind != "outcome":
            return f"gets {self.kind}" + (f" with its value {self.value}" if self.value else "")
        how = "a replay of" if self.replayed else "its own"
        return f"gets {how} {self.value}" + ("" if self.recorded else ", marked as not recorded")


class Fails(msgspec.Struct, frozen=True):
    """A reply of the simulated store: it did not answer."""


class Raised(Exception):
    """The handler's own error in a simulation."""


Moment = StoreStep | Start | Effect | Returned | Choose | Watched | Pause | Waits | Tells | LeaseLeft | End
Script = Generator[Any, Any, End]


class Plan(msgspec.Struct, frozen=True):
    """The task of one worker: which flow, and what its handler does."""

    name: str
    flow: Callable[[Delivery], Flow[Any]]
    delivery: Callable[[], Delivery]
    steps: tuple[str, ...] = ()


def script(plan: Plan) -> Script:
    """Return the production flow, with its steps turned into moments."""
    delivery = plan.delivery()
    flow = plan.flow(delivery)
    reply: Any = None
    failure: Exception | None = None
    while True:
        try:
            step = flow.send(reply) if failure is None else flow.throw(failure)
        except StopIteration as end:
            return ending(end.value)
        except Exception as error:  # noqa: BLE001 - any end of a delivery is a result
            return refusal(error)
        reply = failure = None
        if isinstance(step, Running):
            reply = yield from _run(plan, delivery, step)
        elif isinstance(step, Watching):
            reply = yield Watched()
        elif isinstance(step, Unwatching):
            # A renewal may be in flight: here the heartbeat may beat until the delivery ends.
            continue
        elif isinstance(step, Took):
            # No operation takes any time here.
            reply = 0.0
        elif isinstance(step, Waiting):
            handed = yield Waits()
            reply = step.seconds, handed
        elif isinstance(step, Found):
            yield Tells(step.record)
        elif isinstance(step, Pausing):
            yield Pause()
            reply = step.seconds
        else:
            reply = yield step
            if isinstance(reply, Fails):
                reply, failure = None, _unavailable(step)


def _unavailable(step: Any) -> StoreUnavailable:
    """Return the error of a store that did not answer; a store other than the worker's own was not reached."""
    return StoreUnavailable.unreached("no answer") if isinstance(step, Elsewhere) else StoreUnavailable("no answer")


def _run(plan: Plan, delivery: Delivery, running: Running) -> Generator[Any, Any, Ended]:
    assert running.entry is not None
    entry = running.entry
    if running.probing:
        return _probed((yield Choose("the probe says", ("done", "not done", "unknown", "nothing: it raises"))))
    yield Start(entry.attempt)
    log = StepLog(entry, delivery.codec, delivery.tell)
    for name in plan.steps:
        try:
            yield from _take(log, name, downstream(entry.address, name, entry.bypasses))
            yield Returned(name)
        except Exception as error:  # noqa: BLE001 - the handler does not catch it
            return Ended(error=error, notes=log.notes)
    yield Effect(downstream(entry.address, "effect", entry.bypasses))
    way = yield Choose("the handler", ("returns", "raises", "times out"))
    if way == "returns":
        return Ended(value=f"{plan.name}'s result of attempt {entry.attempt}", notes=log.notes)
    return Ended(error=Raised() if way == "raises" else TimeoutError(), notes=log.notes)


def _take(log: StepLog, name: str, key: str) -> Generator[Any, Any, Any]:
    """Run one named step of the handler, by the production flow of `current().step`."""
    flow = take_step(log, name, lambda: None, Any)
    reply: Any = None
    failure: Exception | None = None
    while True:
        try:
            step = flow.send(reply) if failure is None else flow.throw(failure)
        except StopIteration as end:
            return end.value
        reply = failure = None
        if isinstance(step, Running):
            yield Effect(key, name)
            reply = Ended(value=name)
        elif isinstance(step, Took):
            # No operation takes any time here.
            reply = 0.0
        elif isinstance(step, Pausing):
            yield Pause()
            reply = step.seconds
        elif isinstance(step, Logging):
            notes = log.unwritten(name)
            reply = yield Extending(step.claim, notes)
            if isinstance(reply, Fails):
                reply, failure = None, StoreUnavailable("no answer")
            elif notes is not None:
                log.written(notes, kept=reply)
        else:
            reply = yield step


def _probed(way: str) -> Ended:
    answers: dict[str, Any] = {"done": Done("what the probe found"), "not done": NotDone(), "unknown": Unknown()}
    return Ended(value=answers[way]) if way in answers else Ended(error=Raised())


def ending(value: Any) -> End:
    if not hasattr(value, "replayed"):
        return End("resolved")
    return End(
        "outcome",
        value=value.value_or(None),
        replayed=value.replayed,
        omitted=value.omitted,
        recorded=value.recorded,
        attempt=value.attempt,
    )


def refusal(error: Exception) -> End:
    return End(type(error).__name__, value=getattr(error, "value", None))


class Node:
    """A worker after a list of replies: its current moment, and the node that follows each reply."""

    __slots__ = ("_after", "_plan", "_replies", "at")

    def __init__(self, plan: Plan, replies: tuple[Hashable, ...] = ()) -> None:
        self._plan = plan
        self._replies = replies
        self._after: dict[Hashable, Node] = {}
        self.at: Moment = self._replay()

    def after(self, reply: Hashable) -> Node:
        found = self._after.get(reply)
        if found is None:
            found = self._after[reply] = type(self)(self._plan, (*self._replies, reply))
        return found

    def _replay(self) -> Moment:
        running = script(self._plan)
        try:
            moment = next(running)
            for reply in self._replies:
                moment = running.send(reply)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        return moment  # type: ignore[no-any-return]


class Placed(msgspec.Struct, frozen=True):
    """A worker as a world sees it: the node at which it stands, and whether it has died."""

    node: Node
    dead: bool = False

    @property
    def at(self) -> Moment:
        return self.node.at

    @property
    def ended(self) -> bool:
        return self.dead or isinstance(self.node.at, End)
