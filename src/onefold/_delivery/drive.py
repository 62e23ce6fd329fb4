"""Perform the steps of a flow: one driver blocks, the other awaits.

A flow is a generator: it yields a step and is sent the reply. `drive` performs steps blocking, `drive_async` awaiting;
the rules see no other difference. What a store raises is thrown into the flow; what a handler raises is
data (`Ended`), because it is the user's and must surface unmasked.

An interrupt (KeyboardInterrupt, a cancelled task) that hits an operation of the guard's own store must not leave it
half done: the operation is sent again, which is safe because every operation is idempotent by its token, and the
interrupt propagates after the clean-up. Inside a transaction nothing is ever sent again: the transaction may be over,
and a later statement would be committed by itself. There the flow is abandoned, and the store makes sure that nothing
of it can be committed.

What is raised here has this frame in its traceback. So the frame forgets it: otherwise whatever an interrupt left
behind, such as a place in a pool, would be free only after the garbage collector has found the cycle.

If a handler forks, its child may return here as well. The claim and the transaction are the parent's: the child leaves
them alone.
"""

from __future__ import annotations

import time
from typing import Any, Final, Protocol, TypeVar

import msgspec

from onefold._concurrency import forks
from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import (
    after_raising,
    as_answer,
    cancellations,
    perform_async,
    spoil,
    spoil_async,
    struck,
    unmasked,
)
from onefold._concurrency.users_errors import as_raised
from onefold._concurrency.waiters import ROOMS
from onefold._delivery import waiting
from onefold._delivery.steps import (
    Ended,
    Found,
    LeaseLeft,
    Left,
    Pausing,
    Running,
    Step,
    Took,
    Unwatching,
    Waiting,
    Watching,
)
from onefold._delivery.waiting import Seat
from onefold._handlers.returned import SUSPENDED, mistake, mistaken_probe
from onefold._model import Claim, Record
from onefold.errors import UsageError

T = TypeVar("T")

# A handler that has not returned.
NOTHING: Final = object()

IN_A_CHILD: Final = (
    "a handler has forked, and the child process returned from it, too. The delivery belongs to the parent, and the "
    "child has not touched it. End the child in the handler, with os._exit()"
)


class SupportsDriving(Protocol):
    """Declare what the drivers use of a `DeliveryContext`: store, heartbeat, and the way in and out of a handler."""

    store: Any
    # Sync or async, like the driver; None inside a transaction, where there is no claim to keep alive.
    heartbeat: Any
    # Deliveries inside the handler, on its transaction; None without one.
    nest: Any
    # Whether the store works inside a transaction; then it has `spoil`, and if async also `abandon`.
    joined: bool

    @property
    def transaction_around(self) -> Any:
        """Return our own transaction in which a store on a caller's connection works, if there is one."""

    def around(self) -> Any: ...
    def enter(self, running: Running) -> Any: ...
    def leave(self, current: Any) -> Left: ...
    def put_back(self, around: Any, current: Any) -> Left: ...


def drive(flow: Flow[T], context: SupportsDriving) -> T:  # noqa: C901 - one loop: every delivery goes through it
    """Perform a flow's steps synchronously."""
    reply: Any = None
    failure: Exception | None = None
    interrupt: BaseException | None = None
    ran: Ended | None = None
    watched: list[Claim] = []
    seat: Seat = []
    sent = 0.0
    generation = forks.generation
    try:
        while ran is None or forks.generation == generation:
            step = flow.send(reply) if failure is None else flow.throw(as_answer(failure))
            failure = None
            if step.is_sent:
                if step.counts:
                    sent = time.monotonic()
                reply = None
                try:
                    reply = step.send(context.store)
                except BaseException as error:
                    reply, failure, stop = after_raising(step, context, error)
                    if failure is None and stop is None:
                        raise
                    interrupt, stop = interrupt or stop, None
            elif type(step) is Running:
                reply = ran = Ended(error=interrupt, started=False) if interrupt else _run(step, context, seat)
                interrupt = interrupt or ran.interrupt
            elif type(step) is Watching:
                watched.extend(step.claims)
                reply = context.heartbeat.watch(step.claims, sent)
            elif isinstance(step, Pausing):
                reply = _pause(step, seat, context, sent, interrupt)
            else:
                reply = _lease(step, context, sent)
    except StopIteration as end:
        if interrupt is None:
            return end.value  # type: ignore[no-any-return]
    except Exception as error:
        if struck(error, _handed(ran), context, answered=isinstance(reply, Record)):
            spoil(context, error, ran)
        if interrupt is None and (error is _handed(ran) or as_raised(error) is error):
            reply = failure = ran = None
            raise
        interrupt = interrupt or as_raised(error)
    except BaseException as error:
        spoil(context, error, ran)
        raise
    finally:
        flow.close()
        if watched:
            context.heartbeat.unwatch(watched)
        if ROOMS:
            waiting.leave(watched, seat)
    try:
        raise _of_a_child(ran) if interrupt is None else interrupt
    finally:
        reply = failure = ran = interrupt = None


def _handed(ran: Ended | None) -> BaseException | None:
    """Return the handler's own error."""
    return None if ran is None else ran.error


def _of_a_child(ran: Ended | None) -> BaseException:
    """Return the error that ends a delivery in a child process that its handler has forked."""
    return UsageError(IN_A_CHILD) if ran is None or ran.error is None else ran.error


async def drive_async(flow: Flow[T], context: SupportsDriving) -> T:  # noqa: C901 - as `drive`
    """Perform a flow's steps asynchronously."""
    reply: Any = None
    failure: Exception | None = None
    interrupt: BaseException | None = None
    ran: Ended | None = None
    watched: list[Claim] = []
    seat: Seat = []
    sent = 0.0
    generation = forks.generation
    try:
        while ran is None or forks.generation == generation:
            step = flow.send(reply) if failure is None else flow.throw(as_answer(failure))
            failure = None
            if step.is_sent:
                sent = time.monotonic() if step.counts else sent
                reply = None
                reply, failure, stop = await perform_async(step, context, interrupt)
                interrupt, stop = interrupt or stop, None
            elif type(step) is Running:
                reply = ran = (
                    Ended(error=interrupt, started=False) if interrupt else await _run_async(step, context, seat)
                )
                interrupt = interrupt or ran.interrupt
            elif type(step) is Watching:
                watched.extend(step.claims)
                reply = context.heartbeat.watch(step.claims, sent)
            elif isinstance(step, Pausing):
                reply = await _pause_async(step, seat, context, sent, interrupt)
            else:
                reply = _lease(step, context, sent)
    except StopIteration as end:
        if interrupt is None:
            return end.value  # type: ignore[no-any-return]
    except Exception as error:
        if struck(error, _handed(ran), context, answered=isinstance(reply, Record)):
            await spoil_async(context, error, ran)
        if interrupt is None:
            reply = failure = ran = None
            raise
    except BaseException as error:
        await spoil_async(context, error, ran)
        raise
    finally:
        flow.close()
        if watched:
            context.heartbeat.unwatch(watched)
        if ROOMS:
            waiting.leave(watched, seat)
    try:
        raise _of_a_child(ran) if interrupt is None else interrupt
    finally:
        reply = failure = ran = interrupt = None


def _lease(step: Step, context: SupportsDriving, sent: float) -> float | None:
    """Perform a step about time: the heartbeat knows how long a lease is certainly still ours."""
    if isinstance(step, Unwatching):
        return context.heartbeat.unwatch(step.claims)  # type: ignore[no-any-return]
    if isinstance(step, Took):
        return time.monotonic() - sent
    assert isinstance(step, LeaseLeft), f"no driver knows the step {step!r}"
    return context.heartbeat.left(step.claim)  # type: ignore[no-any-return]


def _run(step: Running, context: SupportsDriving, seat: Seat) -> Ended:
    current, started, around = None, False, context.around()
    value: Any = NOTHING
    try:
        if seat:
            waiting.run_instead(seat)
        current, started = context.enter(step), True
        try:
            value = step.call(current) if step.probing else step.call()
        except BaseException as error:  # noqa: BLE001 - the user's own error, passed on unchanged
            return _raised(error, context.leave(current))
        left = context.leave(current)
        if value is not None and isinstance(value, SUSPENDED):
            return _returned(step, value, left)
        # As `_returned` does, without calling it.
        return Ended(value, None, left[0], True, left[1], left[2])
    except BaseException as error:  # noqa: BLE001 - an interrupt on the way in or out
        return _interrupted(step, value, error, context.put_back(around, current), started=started)


async def _run_async(step: Running, context: SupportsDriving, seat: Seat) -> Ended:
    if seat:
        waiting.run_instead(seat)
    ended = await _call_async(step, context)
    if context.nest is None:
        return ended
    error = await context.nest.ended(ended.error, context.store)
    return ended if error is ended.error else msgspec.structs.replace(ended, error=error)


async def _call_async(step: Running, context: SupportsDriving) -> Ended:
    current, started, around = None, False, context.around()
    token = step.entry.token if step.entry is not None and step.cancel_when_lost else None
    before = cancellations() if context.joined else 0
    value: Any = NOTHING
    awaits = False
    try:
        current, started = context.enter(step), True
        if token is not None:
            context.heartbeat.cancel_when_lost(token)
        try:
            returned = step.call(current) if step.probing else step.call()
            awaits = hasattr(returned, "__await__")
            value = await returned if awaits else returned
        except BaseException as error:  # noqa: BLE001 - the user's own error, passed on unchanged
            if token is not None:
                return _raised(context.heartbeat.rescue(token, error), context.leave(current))
            return _raised(unmasked(error, before) if context.joined else error, context.leave(current))
        return _returned(step, value, context.leave(current), is_async=awaits)
    except BaseException as error:  # noqa: BLE001 - an interrupt on the way in or out
        left = context.put_back(around, current)
        return _interrupted(step, value, error, left, started=started, is_async=awaits)


def _returned(step: Running, value: Any, left: Left, *, is_async: bool = False) -> Ended:
    error = None
    if isinstance(value, SUSPENDED):
        error = mistaken_probe(value) if step.probing else mistake(step.call, value, is_async=is_async)
    return Ended(value=value, error=error, notes=left[0], steps=left[1], noted=left[2])


def _interrupted(
    step: Running, value: Any, error: BaseException, left: Left, *, started: bool, is_async: bool = False
) -> Ended:
    """Return the ending after an interrupt around a handler: its value, if it has returned, or else the interrupt."""
    if value is NOTHING:
        return _raised(error, left, started=started)
    return msgspec.structs.replace(_returned(step, value, left, is_async=is_async), interrupt=error)


def _raised(error: BaseException | None, left: Left, *, started: bool = True) -> Ended:
    return Ended(error=error, notes=left[0], started=started, steps=left[1], noted=left[2])


def _pause(step: Pausing, seat: Seat, context: SupportsDriving, sent: float, interrupt: BaseException | None) -> Any:
    """Sleep, and return how long it took. After an interrupt, raise it instead."""
    if interrupt is not None:
        raise interrupt
    if isinstance(step, Waiting):
        return waiting.wait(step, seat, context, sent)
    if isinstance(step, Found):
        return waiting.share(step, seat)
    began = time.monotonic()
    time.sleep(step.seconds)
    return time.monotonic() - began


async def _pause_async(
    step: Pausing, seat: Seat, context: SupportsDriving, sent: float, interrupt: BaseException | None
) -> Any:
    import asyncio

    if interrupt is not None:
        raise interrupt
    if isinstance(step, Waiting):
        return await waiting.wait_async(step, seat, context, sent)
    if isinstance(step, Found):
        return waiting.share(step, seat)
    began = time.monotonic()
    await asyncio.sleep(step.seconds)
    return time.monotonic() - began
