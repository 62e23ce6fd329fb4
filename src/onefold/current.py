"""What a running handler may know of its own delivery: `current()`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from threading import Lock
from typing import Any, Protocol, TypeVar

import msgspec

from onefold._driver_connections import driver_connection
from onefold._flow_steps import StepLog, take_step
from onefold._model import Address, Entry, downstream
from onefold._nested import Nest
from onefold._steps import Flow
from onefold.codecs import Codec
from onefold.errors import UsageError
from onefold.events import Teller
from onefold.heartbeat import Beat

T = TypeVar("T")


class Tools(Protocol):
    """What `step` works with: the guard's own."""

    # What two deliveries have to share for one to be inside of the other: a store, or the caller's connection.
    @property
    def home(self) -> object: ...
    # The connection that the handler works on, where the guard has passed it.
    @property
    def tx(self) -> object: ...
    # The transaction that the handler runs in, if it is ours.
    @property
    def transaction(self) -> Any: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def tell(self) -> Teller: ...
    def conduct(self, flow: Flow[Any]) -> Any: ...


class Current(msgspec.Struct, eq=False, weakref=True):
    """One delivery, seen from inside its handler."""

    _entry: Entry
    _tools: Tools
    # Without a beat there is no claim: seen mode, or a store that is down.
    _beat: Beat | None
    # The delivery whose handler runs around this one.
    _outer: Current | None
    # What runs inside of its handler, on its transaction; None without one.
    _nest: Nest | None = None
    # None outside of `enter` and `leave`.
    _reset: Token[Current | None] | None = None
    _log: StepLog | None = None
    # The steps that this run has taken, or is taking, by name.
    _taken: dict[str, object] | None = None

    @property
    def beat(self) -> Beat | None:
        """The heartbeat of this claim; none without a claim."""
        return self._beat

    @property
    def operation(self) -> str:
        return self._entry.address.operation

    @property
    def key(self) -> str:
        return self._entry.address.key

    @property
    def scope(self) -> str:
        """The scope, or the empty text where there is none."""
        return self._entry.address.scope

    @property
    def attempt(self) -> int:
        """Which start of the handler this is, from 1."""
        return self._entry.attempt

    @property
    def token(self) -> str:
        """Proves this claim, in hexadecimal digits. Pass it on where a late write has to be refused."""
        return self._entry.token.hex()

    @property
    def lost(self) -> bool:
        """Whether the claim may be another's by now: it was refused, or not renewed for a whole lease."""
        return self._beat is not None and self._beat.lost

    @property
    def is_running(self) -> bool:
        """Whether the handler is still running: a task may outlive it, and belongs to no delivery then."""
        return self._reset is not None

    @property
    def step_name(self) -> str | None:
        """The name of the step that is running here, or None outside of a step."""
        found = _step.get()
        return found[1] if found is not None and found[0] is self else None

    def key_for(self, name: str) -> str:
        """The key to send to a system downstream: the same on each attempt, machine and rerun."""
        return downstream(self._entry.address, name, self._entry.bypasses)

    def step(self, name: str, call: Callable[[], T], *, returns: Any = Any) -> T:
        """Run one part of the handler, and remember its result: once it has returned, no later attempt runs it again.

        A later attempt gets the stored result. Only a part that was under way when its run died runs again: nobody
        knows whether it happened, so pass `key_for` on. It returns when its log is kept; a store that fails is asked
        until the lease is nearly over, and then `OutcomeUnknown` is raised (where a blocking driver waits for a silent
        server: when the driver gives up). Raises `ClaimLost` if the claim had gone meanwhile. Under an `AsyncGuard`
        await it. Without a claim (seen mode, a transaction, or a store that is down) there is no log, and the part
        simply runs. A name is one effect: a second step of the same name in one run raises `UsageError`, unless the
        first one failed.
        """
        self._begin(name)
        outer = _step.set((self, name))
        try:
            value: Any = self._take(name, call, returns)
        except BaseException:
            self._fail(name)
            raise
        finally:
            _step.reset(outer)
        return _awaited_in_step((self, name), value) if inspect.iscoroutine(value) else value  # type: ignore[return-value]

    def _begin(self, name: str) -> None:
        if not name or not isinstance(name, str):
            raise UsageError(f"a step's name={name!r} has to be a text such as 'reserve'")
        mine = object()
        # One operation of a dictionary: of two threads of a handler only one gets the name.
        if (self._taken or self._begin_taken()).setdefault(name, mine) is not mine:
            raise UsageError(
                f"{self.operation} [key {self._entry.address.digest}]: the step {name!r} was taken before in this run: "
                "a name is one effect, and the second step did not run. Put the item's id into its name"
            )

    def _begin_taken(self) -> dict[str, object]:
        with _making:
            if self._taken is None:
                self._taken = {}
            return self._taken

    def _fail(self, name: str) -> None:
        """Let the handler try it again: it has not happened, or its log knows it."""
        if self._taken is not None:
            self._taken.pop(name, None)

    def _take(self, name: str, call: Callable[[], T], returns: Any) -> Any:
        if self._beat is None:
            return call()
        return self._tools.conduct(take_step(self._log or self._begin_log(), name, call, returns))

    def _begin_log(self) -> StepLog:
        with _making:
            if self._log is None:
                self._log = StepLog(self._entry, self._tools.codec, self._tools.tell)
            log = self._log
        # Looked at after the log is there to be found: `_left` does it the other way round.
        if not self.is_running:
            log.end()
        return log

    def __repr__(self) -> str:
        return f"<current {self.operation} [key {self._entry.address.digest}] attempt {self.attempt}>"


# Held while one thread of a handler begins what all of them share; for all deliveries, as it takes no time.
_making = Lock()


def _unlock_in_child() -> None:
    """Another thread may have held it when the process was forked, and is not there to give it back."""
    global _making  # noqa: PLW0603 - one of a process
    _making = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)

_current: ContextVar[Current | None] = ContextVar("onefold.current", default=None)

# The step that is running here, and whose it is: a delivery inside of a step has steps of its own.
_step: ContextVar[tuple[Current, str] | None] = ContextVar("onefold.step", default=None)


async def _awaited_in_step(step: tuple[Current, str], value: Awaitable[Any]) -> Any:
    """Await a step with its name around it."""
    outer = _step.set(step)
    try:
        return await value
    except BaseException:
        step[0]._fail(step[1])
        raise
    finally:
        _step.reset(outer)


# Whether a handler of a whole batch is running here: of its deliveries none is the current one.
_in_batch: ContextVar[bool] = ContextVar("onefold.in_batch", default=False)


class NotOneDelivery(UsageError):
    """A handler of a whole batch asked for what belongs to one delivery. The worker is wrong, and no message is."""


@contextmanager
def in_batch() -> Iterator[None]:
    """Mark that a handler works on a whole batch in here."""
    outer = _in_batch.set(True)
    try:
        yield
    finally:
        _in_batch.reset(outer)


def current() -> Current:
    """The delivery whose handler is running here. Raises `UsageError` outside of a handler, and in one of a batch."""
    found = _current.get()
    if found is None and _in_batch.get():
        raise NotOneDelivery(
            "current() is one delivery, and this handler works on a whole batch. Take the keys from the messages"
        )
    if found is None:
        raise UsageError("current() works inside a guarded handler, and none is running here")
    return found


def enter(entry: Entry, tools: Tools, beat: Beat | None, nest: Nest | None = None) -> Current:
    """Make this delivery the current one; every `enter` has its `leave`."""
    inside = Current(entry, tools, beat, _current.get(), nest)
    inside._reset = _current.set(inside)
    return inside


def leave(inside: Current | None) -> bytes | None:
    """Make the outer one current again, if one was entered; the answer is the log of finished steps."""
    if inside is None or inside._reset is None:
        return None
    _current.reset(inside._reset)
    return _left(inside)


def put_back(around: Current | None, inside: Current | None) -> bytes | None:
    """Leave after an interrupt in `enter` or `leave`: this delivery must not stay the current one of its thread."""
    entered = _current.get()
    _current.set(around)
    while entered is not None and entered is not around:
        _left(entered)
        entered = entered._outer
    return None if inside is None else _left(inside)


def around() -> Current | None:
    """Return the delivery whose handler is running here, if there is one."""
    return _current.get()


def _left(inside: Current) -> bytes | None:
    inside._reset = None
    if inside._beat is not None:
        inside._beat.cancel = None
    return inside._entry.notes if inside._log is None else inside._log.end()


def is_inside(address: Address, home: object) -> bool:
    """Whether a handler of this address, at the same store or connection, is running around us."""
    if _current.get() is None:
        return False
    return any(one._entry.address == address and _is_of(one, home) for one in _around())


def transaction_around(home: object) -> tuple[Any, Nest | None]:
    """Return the transaction that is open around us, on this store or connection, and what else runs inside of it.

    The transaction is None where it is the caller's own; both are, where none is open.
    """
    for one in _around():
        if one._nest is not None and _is_of(one, home):
            return one._tools.transaction, one._nest
    return None, None


def _is_of(one: Current, home: object) -> bool:
    """Whether a delivery is on this store or connection, or on another view of the same connection."""
    places = (one._tools.home, one._tools.tx)
    if home in places:
        return True
    own = driver_connection(home)
    return any(place is not None and driver_connection(place) is own for place in places)


def _around() -> Iterator[Current]:
    """The deliveries whose handlers are running around us, the innermost first."""
    around = _current.get()
    while around is not None:
        # A task that outlives the handler inherits its context, but not its claim.
        if around._reset is not None:
            yield around
        around = around._outer
