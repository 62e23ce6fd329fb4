"""Let a worker die at a chosen point, as SIGKILL would end it: from then on nothing of it reaches the store.

The store of the guard is wrapped. At the point the wrapper raises `Crash`, which no flow catches, and refuses further
requests of the dead delivery. The store keeps its state of that moment, until the lease ends. An uncommitted
transaction is rolled back, as a database does when a connection ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

import msgspec

from onefold import AsyncGuard, Guard, State, StoreUnavailable, UsageError
from onefold.stores.base import Commit
from onefold.testing.swap import use

Point = Literal["before_claim", "after_claim", "after_step", "after_handler", "after_finish"]

POINTS: Final[tuple[str, ...]] = get_args(Point)

OPERATIONS: Final = (
    *("claim", "extend", "finish", "release", "read", "purge"),
    *("claim_all", "extend_all", "close_all", "annotate", "browse"),
)

# The operations of a transaction, and those of them that come after the handler.
AFTER_HANDLER: Final = ("check_open", "finish", "release", "rollback", "commit")
IN_TRANSACTIONS: Final = ("begin", "claim", "read", "save", *AFTER_HANDLER)


class Crash(BaseException):
    """The worker is dead. Not an `Exception`, so that no handler and no retry takes it for an error."""


@contextmanager
def crash_at(point: Point, guard: Guard | AsyncGuard, *, step: str | None = None) -> Iterator[None]:
    """Let the first delivery that reaches this point inside the block die there; the block ends with it.

    - `before_claim`: nothing has reached the store.
    - `after_claim`: the address is claimed, the handler did not start.
    - `after_step`: the step that `step=` names has run, and the store knows it; the handler did not continue.
    - `after_handler`: the handler has ended, and the store was not told.
    - `after_finish`: the store was told, and the caller never got an answer.

    Afterwards the guard works as before: move the clock past the lease, and deliver again. A transactional handler
    leaves all or nothing: it is committed at `after_finish`, and rolled back before; it keeps no log of steps, and so
    it never reaches `after_step`. A block in which no delivery reaches the point fails with an `AssertionError`.
    """
    _check(point, step, guard)
    fate = Fate(point, step)
    doomed: Any = Doomed(guard.store, fate)
    with use(guard, doomed):
        try:
            yield
        except Crash as crash:
            if crash is not fate.crash:
                raise
    assert fate.crash is not None, f"no delivery got to {fate}: nothing crashed. {_advice(fate, guard)}"


def _advice(fate: Fate, guard: Guard | AsyncGuard) -> str:
    if not fate.was_asked:
        return (
            f"Nothing in the block used {guard!r}: pass the guard of the handler as guard=. "
            "What runs by within(connection) is not seen here"
        )
    if fate.step is None:
        return "A replay runs nothing: deliver a new key in the block"
    return "A finished step is not run again, and a transactional handler has no log of steps"


def _check(point: object, step: object, guard: object) -> None:
    if point not in POINTS:
        raise UsageError(f"point={point!r} is not one of {', '.join(map(repr, POINTS))}")
    if not isinstance(guard, (Guard, AsyncGuard)):
        kind = type(guard).__name__
        raise UsageError(f"guard= is a {kind}, not a guard: pass the guard of the handler: crash_at({point!r}, guard)")
    if point == "after_step" and not (step and isinstance(step, str)):
        raise UsageError(f"step={step!r}: name the step after which to die: crash_at('after_step', guard, step='pay')")
    if point != "after_step" and step is not None:
        raise UsageError(f"step={step!r} belongs to 'after_step', but the point is {point!r}")


class Fate:
    """The point at which the worker dies, and whether it is dead."""

    def __init__(self, point: str, step: str | None = None) -> None:
        self.point = point
        self.step = step
        self.crash: Crash | None = None
        # Whether anything was sent to the store of the guard at all.
        self.was_asked = False
        # By token: the steps that an earlier attempt had finished. They do not run again.
        self._replayed: dict[bytes, frozenset[str]] = {}

    def __str__(self) -> str:
        return f"{self.point!r}" if self.step is None else f"{self.point!r} of step={self.step!r}"

    def before(self, operation: str, subject: Any, notes: Any) -> None:
        """Act before an operation is sent."""
        self.was_asked = True
        if self.crash is not None:
            # A heartbeat is not a delivery: it takes this for a store that is down, and `Crash` would end its thread.
            beats = operation == "extend_all" or (operation == "extend" and notes is None)
            raise StoreUnavailable("the worker has crashed") if beats else self.crash
        first = self.point == "before_claim" and operation in ("claim", "claim_all", "read")
        if first or (self.point == "after_handler" and _ends(operation, subject)):
            self.die()

    def after(self, operation: str, subject: Any, notes: Any, reply: Any) -> None:
        """Act on the reply of the store: the worker dies before it gets it."""
        if self.point == self._reached(operation, subject, notes) and _applied(reply):
            self.die()

    def _reached(self, operation: str, subject: Any, notes: Any) -> str:
        """Return the point that this operation reaches, if the store has applied it."""
        if _ends(operation, subject):
            return "after_finish"
        if operation in ("claim", "claim_all"):
            for entry in subject if operation == "claim_all" else [subject]:
                self._replayed[entry.token] = _steps_in(entry.notes)
            return "after_claim"
        if operation == "extend" and self.step in _steps_in(notes) - self._replayed.get(subject.token, frozenset()):
            return "after_step"
        return ""

    def die(self) -> None:
        self.crash = Crash(f"crashed {self.point.replace('_', ' ')}" + (f" {self.step!r}" if self.step else ""))
        raise self.crash


class FateInside:
    """The fate inside one transaction, where only a COMMIT changes the store."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate
        # Whether a handler may run: a replay is committed too.
        self._won = False

    def before(self, operation: str, _subject: Any, _argument: Any) -> None:
        self._fate.was_asked = True
        if self._fate.crash is not None:
            raise self._fate.crash
        if operation == "begin":
            self._won = False
        first = self._fate.point == "before_claim" and operation == "begin"
        ended = self._won and operation in AFTER_HANDLER
        if first or (ended and self._fate.point == "after_handler"):
            self._fate.die()

    def after(self, operation: str, _subject: Any, _argument: Any, reply: Any) -> None:
        claimed = operation == "claim" and reply is None
        self._won = self._won or claimed
        committed = self._won and operation == "commit" and reply is Commit.DONE
        if (claimed and self._fate.point == "after_claim") or (committed and self._fate.point == "after_finish"):
            self._fate.die()


class Doomed:
    """A store whose operations meet their fate, sync or async, with the capabilities of the store inside."""

    def __init__(self, store: Any, fate: Fate) -> None:
        # Attributes of the instance, because protocols are checked there at run time.
        for operation in OPERATIONS:
            if hasattr(store, operation):
                setattr(self, operation, _doomed(operation, getattr(store, operation), fate))
        if hasattr(store, "transaction"):
            self.transaction = lambda: _Transaction(store.transaction(), fate)


class DoomedTransaction:
    """A transaction of the inner store, whose operations meet their fate."""

    def __init__(self, transaction: Any, fate: FateInside) -> None:
        self._inside = transaction
        for operation in IN_TRANSACTIONS:
            setattr(self, operation, _doomed(operation, getattr(transaction, operation), fate))

    def __getattr__(self, name: str) -> Any:
        # Everything else, such as `spoil` after an interrupt, is that transaction's.
        return getattr(self._inside, name)


class _Transaction:
    """The context manager of a store's transaction; not by contextlib, which changes the errors that pass through."""

    def __init__(self, opened: Any, fate: Fate) -> None:
        self._opened, self._fate = opened, fate

    def __enter__(self) -> DoomedTransaction:
        return DoomedTransaction(self._opened.__enter__(), FateInside(self._fate))

    def __exit__(self, *raised: object) -> Any:
        return self._opened.__exit__(*raised)

    async def __aenter__(self) -> DoomedTransaction:
        return DoomedTransaction(await self._opened.__aenter__(), FateInside(self._fate))

    async def __aexit__(self, *raised: object) -> Any:
        return await self._opened.__aexit__(*raised)


def _doomed(operation: str, send: Callable[..., Any], fate: Fate | FateInside) -> Callable[..., Any]:
    def doomed(subject: Any = None, argument: Any = None, **options: Any) -> Any:
        fate.before(operation, subject, argument)
        reply = send(*_given(subject, argument), **options)
        fate.after(operation, subject, argument, reply)
        return reply

    async def doomed_async(subject: Any = None, argument: Any = None, **options: Any) -> Any:
        fate.before(operation, subject, argument)
        reply = await send(*_given(subject, argument), **options)
        fate.after(operation, subject, argument, reply)
        return reply

    return doomed_async if inspect.iscoroutinefunction(send) else doomed


def _given(*arguments: Any) -> Iterator[Any]:
    return (argument for argument in arguments if argument is not None)


def _ends(operation: str, subject: Any) -> bool:
    """Return whether the operation ends a delivery. In seen mode the one claim, after the handler, does."""
    if operation == "claim":
        return subject.state in (State.DONE, State.FAILED)
    return operation in ("finish", "release", "close_all")


def _steps_in(notes: bytes | None) -> frozenset[str]:
    """Return the names of the finished steps in these notes, which may hold more than a log."""
    try:
        return frozenset(msgspec.msgpack.decode(notes or b"", type=dict[str, msgspec.Raw]))
    except msgspec.MsgspecError:
        return frozenset()


def _applied(reply: Any) -> bool:
    """Return whether a claim was written, or an ending accepted; in a batch at least one."""
    return any(each is None or each is True for each in (reply if isinstance(reply, list) else [reply]))
