"""`current()`: what a running handler may know about its own delivery."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

import msgspec

from onefold._concurrency.generators import Flow
from onefold._concurrency.users_errors import passing
from onefold._delivery.handler_steps.flow import StepLog, handler_ended, take_step
from onefold._delivery.handler_steps.left import NONE_LEFT
from onefold._delivery.steps import Left
from onefold._driver_connections import driver_connection
from onefold._handlers.nested import Nest
from onefold._heartbeat.beats import Beat
from onefold._model import Address, Entry, downstream
from onefold._model.notes import RESERVED, add_fields
from onefold.codecs import Codec
from onefold.errors import UsageError
from onefold.events import Teller

T = TypeVar("T")


class SupportsCurrent(Protocol):
    """Declare what `Current` uses of a `DeliveryContext`: where the handler works, and how its steps are run."""

    # The thing that two deliveries share if one is inside the other: a store, or the caller's connection.
    @property
    def home(self) -> object: ...
    # The connection that the handler works on, if the guard has passed it.
    @property
    def tx(self) -> object: ...
    # The transaction that the handler runs in, if it is ours.
    @property
    def transaction(self) -> Any: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def tell(self) -> Teller: ...
    # Whether its steps are async.
    @property
    def awaits(self) -> bool: ...
    def conduct(self, flow: Flow[Any]) -> Any: ...


class Current(msgspec.Struct, eq=False, weakref=True):
    """One delivery, seen from inside its handler."""

    _entry: Entry
    _context: SupportsCurrent
    # Without a beat there is no claim: seen mode, or a store that is down.
    _beat: Beat | None
    # The delivery whose handler surrounds this one.
    _outer: Current | None
    # Deliveries inside its handler, on its transaction; None without one.
    _nest: Nest | None = None
    # None outside `enter` and `leave`.
    _reset: Token[Current | None] | None = None
    _log: StepLog | None = None
    # The steps that this run has taken, or is taking, by name.
    _taken: dict[str, object] | None = None
    # What the handler has noted, as JSON.
    _noted: bytes | None = None

    @property
    def beat(self) -> Beat | None:
        """Return the heartbeat of this claim, or None without a claim."""
        return self._beat

    @property
    def operation(self) -> str:
        return self._entry.address.operation

    @property
    def key(self) -> str:
        return self._entry.address.key

    @property
    def scope(self) -> str:
        """The scope, or the empty string if there is none."""
        return self._entry.address.scope

    @property
    def attempt(self) -> int:
        """The number of this attempt, counted from 1."""
        return self._entry.attempt

    @property
    def token(self) -> str:
        """The proof of this claim, in hexadecimal digits, for a system that has to refuse late writes.

        It is random: compare it for equality with the token that was written last, not for which is later.
        """
        return self._entry.token.hex()

    @property
    def lost(self) -> bool:
        """True if another delivery may own the claim by now: it was refused, or not renewed for a whole lease."""
        return self._beat is not None and self._beat.lost

    @property
    def is_running(self) -> bool:
        """True if the handler, or a step begun here, is still running.

        A task may outlive both; it then belongs to no delivery.
        """
        step = _step.get()
        return self._reset is not None or (step is not None and step.delivery is self and step.is_running)

    @property
    def step_name(self) -> str | None:
        """The name of the step that is running here, or None outside a step."""
        found = _step.get()
        return found.name if found is not None and found.delivery is self else None

    def key_for(self, name: str) -> str:
        """Return the key to send to a system downstream: the same on each attempt, machine and rerun."""
        return downstream(self._entry.address, name, self._entry.bypasses)

    def note(self, **fields: object) -> None:
        """Keep a few fields with the record, for audits: `current().note(prior_balance=1500)`.

        They are stored with the outcome of this run (done, failed or held), and `onefold show` prints them; a run that
        is released or dies leaves none. A second call adds to the first. A field that JSON cannot express, or with
        which there would be more than NOTED_BYTES_MAX bytes, is left out with a warning: an effect that happened must
        not fail for it. Costs no round trip in claim mode; in a transaction, that of a result.
        """
        with _making:
            noted, left_out = add_fields(self._noted, fields)
            self._noted = noted
        for name, why in left_out:
            text = f"current().note({name}=…) was left out of the record: {why}"
            self._context.tell.warn(self._entry.address, text, about=f"note {name}")

    def step(self, name: str, call: Callable[[], T], *, returns: Any = Any) -> T:
        """Run one part of the handler, and remember its result: once it has returned, no later attempt runs it again.

        A later attempt gets the stored result. Only a part that was in progress when its run died runs again: nobody
        knows whether it happened, so pass on `key_for`. The call returns once its log is stored; if the store fails,
        the write is retried until the lease is nearly over, and then `OutcomeUnknown` is raised (if a blocking driver
        waits for a silent server: when the driver gives up). Raises `ClaimLost` if the claim was lost meanwhile. Under
        an `AsyncGuard`, await it. Without a claim (seen mode, a transaction, or a store that is down) there is no log,
        and the part simply runs. A name stands for one effect: a second step with the same name in one run raises
        `UsageError`, unless the first one failed. So does a step that is begun after its handler has ended: it does not
        run. Inside it `current()` is this delivery, whichever thread or task runs it.
        """
        _check_call(name, call)
        self._begin(name)
        if self._context.awaits:
            return self._step_async(name, call, returns)  # type: ignore[return-value]
        here = StepHere(self, name)
        try:
            self._enter_step(here)
            return self._take(name, call, returns)  # type: ignore[no-any-return]
        except BaseException:
            self._fail(name)
            raise
        finally:
            try:
                here.leave()
            finally:
                # Once more, for an interrupt that has kept it from its work.
                here.leave()

    async def _step_async(self, name: str, call: Callable[[], Any], returns: Any) -> Any:
        here = StepHere(self, name)
        try:
            self._enter_step(here)
            value = self._take(name, call, returns)
            return await value if inspect.isawaitable(value) else value
        except BaseException:
            self._fail(name)
            raise
        finally:
            try:
                here.leave()
            finally:
                # Once more, for an interrupt that has kept it from its work.
                here.leave()

    def _enter_step(self, here: StepHere) -> None:
        """Begin a step, and make this delivery the current one while it runs: a thread does not inherit it."""
        if self._reset is None:
            raise handler_ended(self._entry.address, here.name)
        if self._taken is not None:
            self._taken[here.name] = _BEGUN
        here.enter()

    def _begin(self, name: str) -> None:
        if self._reset is None:
            raise handler_ended(self._entry.address, name)
        mine = object()
        # A single dictionary operation: of two threads of a handler only one gets the name.
        if (self._taken or self._begin_taken()).setdefault(name, mine) is not mine:
            raise UsageError(
                f"{self.operation} [key {self._entry.address.digest}]: the step {name!r} was used before in this run: "
                "a name stands for one effect, and the second step did not run. Put the item's id into its name"
            )

    def _begin_taken(self) -> dict[str, object]:
        with _making:
            if self._taken is None:
                self._taken = {}
            return self._taken

    def _fail(self, name: str) -> None:
        """Let the handler retry the step: it has not happened, or its log has it."""
        if self._taken is not None:
            self._taken.pop(name, None)

    def _take(self, name: str, call: Callable[[], T], returns: Any) -> Any:
        if self._beat is None:
            return call()
        return self._context.conduct(take_step(self._log or self._begin_log(), name, call, returns))

    def _begin_log(self) -> StepLog:
        with _making:
            if self._log is None:
                self._log = StepLog(self._entry, self._context.codec, self._context.tell)
            log = self._log
        # Checked after the log is there to be found: `_left` does it the other way round.
        if self._reset is None:
            log.end()
        return log

    def __repr__(self) -> str:
        return f"<current {self.operation} [key {self._entry.address.digest}] attempt {self.attempt}>"


# Held while one thread of a handler sets up what all of them share; one lock for all deliveries, as it takes no time.
_making = Lock()


def _unlock_in_child() -> None:
    """Replace the lock: another thread may have held it when the process was forked, and cannot release it here."""
    global _making  # noqa: PLW0603 - one of a process
    _making = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)

_current: ContextVar[Current | None] = ContextVar("onefold.current", default=None)

# Marks a step that has begun. One that has not is a coroutine that nobody has awaited yet.
_BEGUN: Final = object()


class StepHere:
    """The step that is running here, and its delivery: a delivery inside a step has its own steps.

    No context manager of a generator: if an interrupt kept it from being left, it would be left when the interrupt's
    traceback is garbage, and would make an ended delivery current again.
    """

    __slots__ = ("_outer", "around", "delivery", "is_running", "name")

    def __init__(self, delivery: Current, name: str) -> None:
        self.delivery = delivery
        self.name = name
        # The delivery that was current here: another one, if a delivery inside the handler runs a step of the outer
        # one.
        self.around = _current.get()
        self._outer = _step.get()
        # A task that was started in it may outlive it.
        self.is_running = True

    def enter(self) -> None:
        _step.set(self)
        _current.set(self.delivery)

    def leave(self) -> None:
        """Make current again what was so before. It may be repeated."""
        self.is_running = False
        # A coroutine that nobody awaits any longer is closed anywhere. Its mark goes last, so that an interrupt before
        # that leaves it to be repeated.
        if _step.get() is self:
            _current.set(self.around)
            _step.set(self._outer)


_step: ContextVar[StepHere | None] = ContextVar("onefold.step", default=None)


def _check_call(name: str, call: object) -> None:
    if not name or not isinstance(name, str):
        raise UsageError(f"a step's name={name!r} has to be a string such as 'reserve'")
    if name in RESERVED:
        raise UsageError(f"a step's name={name!r} is one of Onefold's own: choose another")
    if callable(call):
        return
    if inspect.iscoroutine(call):
        call.close()
        raise UsageError(
            f"the step {name!r} was given a coroutine, and did not run: a step that is finished must not be called "
            f"again. Pass the function: await current().step({name!r}, pay), or with arguments "
            f"await current().step({name!r}, lambda: pay(order))"
        )
    raise UsageError(f"the step {name!r} needs a function to call, not {type(call).__name__}: nothing ran")


class Batch:
    """One call of a handler for a whole batch."""

    # A task or thread may outlive it; it then belongs to no batch.
    is_running = True


# The batch whose handler is running here: none of its deliveries is the current one.
_batch: ContextVar[Batch | None] = ContextVar("onefold.batch", default=None)


class NotOneDelivery(UsageError):
    """A batch handler asked for something that belongs to one delivery. The worker is wrong, not a message."""


@passing
def in_batch() -> Iterator[None]:
    """Mark that a handler works on a whole batch in this block."""
    batch = Batch()
    outer = _batch.set(batch)
    try:
        yield
    finally:
        batch.is_running = False
        _batch.reset(outer)


def _is_in_batch() -> bool:
    batch = _batch.get()
    return batch is not None and batch.is_running


def current() -> Current:
    """Return the delivery whose handler is running here. Raises `UsageError` outside a handler.

    It also raises in a handler that gets a whole batch, and in a task that outlives its handler, such as a background
    task.
    """
    found = _current.get()
    if found is None and _is_in_batch():
        raise NotOneDelivery(
            "current() is one delivery, and this handler works on a whole batch. Take the keys from the messages"
        )
    if found is None:
        raise UsageError("current() works inside a guarded handler, and none is running here")
    if not found.is_running:
        raise UsageError(
            f"{found.operation} [key {found._entry.address.digest}]: current() works inside a guarded handler, and the "
            "one that was running here has ended. Take what you need of it in the handler (`current().key_for(...)`), "
            "and pass it on"
        )
    return found


def enter(entry: Entry, context: SupportsCurrent, beat: Beat | None, nest: Nest | None = None) -> Current:
    """Make this delivery the current one; every `enter` has its `leave`."""
    inside = Current(entry, context, beat, _current.get(), nest)
    inside._reset = _current.set(inside)
    return inside


def leave(inside: Current | None) -> Left:
    """Make the outer delivery current again, if one was entered; return what is left of its steps."""
    if inside is None or inside._reset is None:
        return _NOTHING
    _current.reset(inside._reset)
    inside._reset = None
    if inside._log is not None or inside._taken is not None:
        return _left(inside)
    # As `_left` does, without calling it: most handlers take no steps.
    if inside._beat is not None:
        inside._beat.cancel = None
    return inside._entry.notes, NONE_LEFT, inside._noted


def put_back(around: Current | None, inside: Current | None) -> Left:
    """Leave after an interrupt in `enter` or `leave`: this delivery must not stay the current one of its thread."""
    entered = _current.get()
    _current.set(around)
    while entered is not None and entered is not around:
        _left(entered)
        entered = entered._outer
    return _NOTHING if inside is None else _left(inside)


# Returns the delivery whose handler is running here, if there is one.
around: Final[Callable[[], Current | None]] = _current.get


_NOTHING: Final = (None, NONE_LEFT, None)


def _left(inside: Current) -> Left:
    inside._reset = None
    if inside._beat is not None:
        inside._beat.cancel = None
    notes, steps = (inside._entry.notes, NONE_LEFT) if inside._log is None else inside._log.end()
    if inside._taken is None:
        return notes, steps, inside._noted
    unbegun = (name for name, begun in sorted(inside._taken.copy().items()) if begun is not _BEGUN)
    return notes, steps._replace(unbegun=tuple(unbegun)), inside._noted


def is_inside(address: Address, home: object) -> bool:
    """Return whether a handler of this address, at the same store or connection, is running around us."""
    if _current.get() is None:
        return False
    return any(one._entry.address == address and _is_of(one, home) for one in _around())


def transaction_around(home: object) -> tuple[Any, Nest | None]:
    """Return the transaction that is open around us, on this store or connection, and what else runs inside it.

    The transaction is None if it is the caller's own; both are None if none is open.
    """
    for one in _around():
        if one._nest is not None and _is_of(one, home):
            return one._context.transaction, one._nest
    return None, None


def _is_of(one: Current, home: object) -> bool:
    """Return whether a delivery is on this store or connection, or on another view of the same connection."""
    places = (one._context.home, one._context.tx)
    if home in places:
        return True
    own = driver_connection(home)
    return any(place is not None and driver_connection(place) is own for place in places)


def _around() -> Iterator[Current]:
    """Yield the deliveries whose handlers are running around us, the innermost first."""
    step = _step.get()
    for innermost in (_current.get(), None if step is None else step.around):
        around = innermost
        while around is not None:
            # A task that outlives the handler inherits its context, but not its claim.
            if around._reset is not None:
                yield around
            around = around._outer
