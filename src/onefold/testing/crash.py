"""A worker that dies at a chosen step, as SIGKILL would end it: from then on nothing of it reaches the store.

The store of the guard is wrapped. At the step the wrapper raises `Crash`, which no flow catches, and refuses whatever
the dead delivery still asks. What the store knows at that moment stays, until the lease ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

from onefold import State, StoreUnavailable, UsageError
from onefold.guard import Guard
from onefold.guard_async import AsyncGuard
from onefold.testing.swap import use

Step = Literal["before_claim", "after_claim", "after_handler", "after_finish"]

STEPS: Final[tuple[str, ...]] = get_args(Step)

OPERATIONS: Final = (
    *("claim", "extend", "finish", "release", "read", "purge"),
    *("claim_all", "extend_all", "close_all", "browse"),
)


class Crash(BaseException):
    """The worker is dead. Not an `Exception`, so that no handler and no retry takes it for an error."""


@contextmanager
def crash_at(step: Step, guard: Guard | AsyncGuard) -> Iterator[None]:
    """Let the first delivery inside that gets to this step die there; the block ends with it.

    - `before_claim`: nothing has reached the store.
    - `after_claim`: the address is claimed, the handler did not start.
    - `after_handler`: the handler has ended, and the store was not told.
    - `after_finish`: the store was told, and the caller never got an answer.

    Afterwards the guard works as before: move the clock past the lease, and deliver again. A block in which no
    delivery got to the step fails with an `AssertionError`.
    """
    if step not in STEPS:
        raise UsageError(f"step={step!r} is none of {', '.join(map(repr, STEPS))}")
    fate = Fate(step)
    doomed: Any = Doomed(guard.store, fate)
    with use(guard, doomed):
        try:
            yield
        except Crash as crash:
            if crash is not fate.crash:
                raise
    assert fate.crash is not None, f"no delivery got to {step!r}: nothing crashed"


class Fate:
    """When the worker dies, and whether it is dead."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.crash: Crash | None = None

    def before(self, operation: str, subject: Any, notes: Any) -> None:
        """Called before an operation is sent."""
        if self.crash is not None:
            # A heartbeat is no delivery: it takes this for a store that is down, and `Crash` would end its thread.
            beats = operation == "extend_all" or (operation == "extend" and notes is None)
            raise StoreUnavailable("the worker has crashed") if beats else self.crash
        first = self.step == "before_claim" and operation in ("claim", "claim_all", "read")
        if first or (self.step == "after_handler" and _ends(operation, subject)):
            self.die()

    def after(self, operation: str, subject: Any, reply: Any) -> None:
        """Called with the answer of the store, which the worker does not live to see."""
        ends = _ends(operation, subject)
        claims = operation in ("claim", "claim_all") and not ends
        reached = "after_finish" if ends else "after_claim" if claims else ""
        if self.step == reached and _applied(reply):
            self.die()

    def die(self) -> None:
        self.crash = Crash(f"crashed {self.step.replace('_', ' ')}")
        raise self.crash


class Doomed:
    """A store whose operations meet their fate. It has the colour and the powers of the store inside."""

    def __init__(self, store: Any, fate: Fate) -> None:
        # Attributes of the instance, because that is where protocols are looked for at run time.
        for operation in OPERATIONS:
            if hasattr(store, operation):
                setattr(self, operation, _doomed(operation, getattr(store, operation), fate))


def _doomed(operation: str, send: Callable[..., Any], fate: Fate) -> Callable[..., Any]:
    def doomed(subject: Any, argument: Any = None, **options: Any) -> Any:
        arguments = (subject,) if argument is None else (subject, argument)
        fate.before(operation, subject, argument)
        reply = send(*arguments, **options)
        fate.after(operation, subject, reply)
        return reply

    async def doomed_awaited(subject: Any, argument: Any = None, **options: Any) -> Any:
        arguments = (subject,) if argument is None else (subject, argument)
        fate.before(operation, subject, argument)
        reply = await send(*arguments, **options)
        fate.after(operation, subject, reply)
        return reply

    return doomed_awaited if inspect.iscoroutinefunction(send) else doomed


def _ends(operation: str, subject: Any) -> bool:
    """Whether the operation ends a delivery. In seen mode the one claim, after the handler, does."""
    if operation == "claim":
        return subject.state in (State.DONE, State.FAILED)
    return operation in ("finish", "release", "close_all")


def _applied(reply: Any) -> bool:
    """A claim was written, or an ending accepted; in a batch at least one."""
    return any(each is None or each is True for each in (reply if isinstance(reply, list) else [reply]))
