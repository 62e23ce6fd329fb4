"""Handle an interrupt (KeyboardInterrupt, a cancelled task) during an operation of a store.

An operation of the guard's own store is sent again, so that it is not left half done: that is safe, because every
operation is idempotent by its token. Inside a transaction nothing is ever sent again: the transaction may be over, and
a later statement would be committed by itself. There the delivery ends, and the store makes sure that nothing of it is
committed.

asyncio cancels a task once; anyio's cancel scopes, and so Starlette and FastAPI, cancel it again at each turn of the
event loop until it has ended. A clean-up that is awaited in the cancelled task itself would be interrupted by the
second cancellation. So it runs in its own task, and the cancelled one waits for that, within a bound. No cancellation
is ever swallowed: the caller gets it back, and raises it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from onefold.errors import OnefoldError, StoreUnavailable

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

# How long a cancelled task waits for work that must not be interrupted. A database answers in milliseconds; a
# connection that stays silent this long is closed, so that a timeout around a delivery takes effect.
CLEAN_UP_SECONDS: Final = 5.0

# How long a cancelled task waits for the reply to a request that its client library cannot take back. Without that
# reply the server may execute the request later: a claim after its own release, for example, which then stays until its
# lease ends. Nearly every reply is there within milliseconds.
REPLY_SECONDS: Final = 1.0

# How often a sync operation is sent again after interrupts. One more Ctrl-C than that is meant seriously.
SENT_AGAIN_MAX: Final = 3


class NotAnswered(StoreUnavailable):
    """The store was silent for as long as a claim was certainly still ours. The operation may have been applied."""


class When(Enum):
    """When a delivery was interrupted inside a transaction."""

    BEFORE = "before its handler: there may be a record, and there is no effect"
    INSIDE = "in its handler, and its record is taken back"
    CANCELLED = "the same, by a cancellation: it is not known whether a statement that was under way was executed"
    AFTER = "after its handler: there is an effect, and there may be a record"

    @property
    def is_inside(self) -> bool:
        """Return whether the interrupt came in the handler."""
        return self in (When.INSIDE, When.CANCELLED)


# The result of an operation: a reply or a failure, and an interrupt that came meanwhile.
Answered = tuple[Any, Exception | None, BaseException | None]


def after_raising(step: Any, context: Any, raised: BaseException) -> Answered:
    """Return the result of a sync operation that has raised; nothing at all for an interrupt that ends the delivery."""
    if isinstance(raised, Exception) and (step.outside or not _came_from_outside(raised, context)):
        return None, raised, None
    if not _may_be_repeated(step, context):
        return None, None, None
    return _asked_again(step, context.store, raised)


def _came_from_outside(error: Exception, context: Any) -> bool:
    """Return whether an error of an operation is an interrupt: neither the database's own nor ours.

    A signal handler may raise any exception, at any moment: Celery's `SoftTimeLimitExceeded`, a timeout by SIGALRM. If
    a store does not distinguish its errors from others, none of them counts as an interrupt.
    """
    return hasattr(context.store, "knows") and not context.store.knows(error)


def as_answer(failure: Exception) -> Exception:
    """Mark the failure of an operation, for the flow into which it is thrown."""
    with suppress(Exception):
        failure.is_an_answer = True  # type: ignore[attr-defined]
    return failure


def is_answer(error: Exception) -> bool:
    """Return whether an error in a flow is the failure of an operation. Any other struck as the flow went on."""
    return isinstance(error, OnefoldError) or getattr(error, "is_an_answer", False)


def _asked_again(step: Any, store: Any, interrupt: BaseException) -> Answered:
    """Send it again, even if interrupted once more: a signal may come twice, and a store answers at once.

    Only an interrupt ends the wait of a sync driver. So one that comes after CLEAN_UP_SECONDS does, and so does the one
    after SENT_AGAIN_MAX, however soon: an unknown claim stays until its lease ends.
    """
    _let_go(interrupt)
    ends = time.monotonic() + CLEAN_UP_SECONDS
    for _ in range(SENT_AGAIN_MAX):
        try:
            return step.send(store), None, interrupt
        except Exception as failure:  # noqa: BLE001 - a failure is the answer
            return None, failure, interrupt
        except BaseException:  # noqa: BLE001 - the first interrupt is the one to raise
            if time.monotonic() >= ends:
                break
    raise interrupt


def _let_go(interrupt: BaseException) -> None:
    """Free what the interrupted operation held, such as its place in a pool: the traceback would keep it."""
    trace = interrupt.__traceback__
    while trace is not None:
        # A frame that still runs is ours, or its caller's.
        with suppress(RuntimeError):
            trace.tb_frame.clear()
        trace = trace.tb_next


async def perform_async(step: Any, context: Any, interrupt: BaseException | None) -> Answered:
    """Perform one operation asynchronously. After an earlier `interrupt`, only the clean-up continues."""
    if context.joined and not step.outside:
        answered = await _ask_inside(step, context.store, interrupt)
        if answered[1] is not None and _came_from_outside(answered[1], context):
            raise answered[1]
        return answered
    task = _current_task()
    cancelled = 0 if task is None else task.cancelling()
    try:
        left = None if is_in_process(context.store) else _lease_left(step, context)
        sent = step.send_async(context.store)
        reply, failure = await (sent if left is None or task is None else _in_its_lease(sent, left, task)), None
    except Exception as error:  # noqa: BLE001 - the flow knows its meaning
        reply, failure = None, error
    except BaseException as error:
        if not _may_be_repeated(step, context):
            raise
        return await _ask_again(step, context.store, error)
    # Usually there is none, and asking costs less here.
    came = task is not None and task.cancelling() > cancelled
    return reply, failure, _swallowed(cancelled) if came else None


def _lease_left(step: Any, context: Any) -> float | None:
    """Return how long the claims of an operation are certainly ours; None if it has none that is watched."""
    # One step, or those of a batch; a claim that is yet to be made has no lease.
    claim = getattr(step, "claim", None)
    claims = [claim] if claim else [one.claim for one in getattr(step, "steps", ()) if hasattr(one, "claim")]
    return context.heartbeat.left_of(claims) if claims else None


async def _in_its_lease(sent: Awaitable[T], left: float, task: asyncio.Task[Any]) -> T:
    """Await an operation on live claims in this task, for as long as they are certainly ours.

    A silent server goes unnoticed until its connection breaks, which may take a quarter of an hour. A request that is
    sent too late is bounded like a clean-up. The rules are those of `asyncio.timeout`, without a timer of its own.
    """
    import asyncio

    from onefold._concurrency.deadlines import deadlines

    is_over = False

    def give_up() -> None:
        nonlocal is_over
        is_over = task.cancel()

    before, bounds = task.cancelling(), deadlines()
    bound = bounds.add(left if left > 0 else CLEAN_UP_SECONDS, give_up)
    try:
        reply = await sent
    except asyncio.CancelledError as error:
        if is_over and task.uncancel() <= before:
            raise NotAnswered("the store did not answer before the lease ended") from error
        raise
    except BaseException:
        _take_back(task, is_over)
        raise
    finally:
        bounds.remove(bound)
    _take_back(task, is_over)
    return reply


def _take_back(task: asyncio.Task[Any], is_over: bool) -> None:  # noqa: FBT001 - one word for both ways out
    """Take back a cancellation of ours that a client library has swallowed."""
    if is_over:
        task.uncancel()


def unmasked(error: BaseException | None, before: int) -> BaseException | None:
    """Return a cancellation that a driver has turned into an error: it would be retried as a lost connection."""
    cancelled = _swallowed(before) if error is None or isinstance(error, Exception) else None
    if cancelled is None:
        return error
    # Not as its cause, which says why a transaction is retried.
    cancelled.__context__ = error
    return cancelled


async def heard(coroutine: Awaitable[T]) -> T:
    """Await a call in which a client library may swallow a cancellation, and re-raise that afterwards."""
    before = cancellations()
    found = await coroutine
    swallowed = _swallowed(before)
    if swallowed is not None:
        raise swallowed
    return found


def cancellations() -> int:
    """Return how often this task was asked to cancel."""
    task = _current_task()
    return 0 if task is None else task.cancelling()


def _current_task() -> asyncio.Task[Any] | None:
    import asyncio

    try:
        return asyncio.current_task()
    except RuntimeError:
        # In a child that a handler has forked: the event loop is its parent's.
        return None


def _swallowed(before: int) -> BaseException | None:
    """Return a cancellation that came meanwhile and that a client library swallowed (as `asyncio.wait_for` may)."""
    import asyncio

    return asyncio.CancelledError() if cancellations() > before else None


def is_in_process(store: Any) -> bool:
    """Return whether the store's operations never wait, and so can neither be cancelled nor take long."""
    return bool(getattr(store, "in_process", False))


def _may_be_repeated(step: Any, context: Any) -> bool:
    return step.outside or not (context.joined or step.once)


async def _ask_again(step: Any, store: Any, interrupt: BaseException) -> Answered:
    """Send it again in a task that a further cancellation of ours does not reach.

    If the store does not answer in time, give up: an unknown claim stays until its lease ends.
    """
    import asyncio

    task = asyncio.ensure_future(step.send_async(store))
    if not await ended(task):
        leave(task)
        raise interrupt
    return *_result(task, interrupt), interrupt


async def _ask_inside(step: Any, store: Any, interrupt: BaseException | None) -> Answered:
    """Perform one operation inside a transaction, and never twice."""
    if interrupt is not None and not step.cleans_up:
        raise interrupt
    if is_in_process(store):
        # It never waits, so no cancellation can come in between.
        try:
            return await step.send(store), None, None
        except Exception as error:  # noqa: BLE001 - the flow knows its meaning
            return None, error, None
    task, stop = await in_one_piece(step.send(store), store.abandon, finish=step.cleans_up)
    if stop is not None and not (step.cleans_up and task.done()):
        read(task)
        del task
        raise stop
    return *_result(task, stop), stop


def _result(task: Any, interrupt: BaseException | None) -> tuple[Any, Exception | None]:
    """Return the reply or the failure of a task that has ended."""
    if task.cancelled() and interrupt is not None:
        raise interrupt
    failure = None if task.cancelled() else task.exception()
    return (None, failure) if isinstance(failure, Exception) else (task.result(), None)


def struck(error: Exception, handed: BaseException | None, context: Any, *, answered: bool) -> bool:
    """Return whether an error that ends a delivery inside a transaction interrupted it, so that a record may exist.

    `handed` is the handler's own error, after which its record was removed; `answered` says that the delivery was
    answered from the existing record, with an error of any class.
    """
    if handed is not None and (handed is error or handed is error.__cause__):
        return False
    return not answered and context.joined and _came_from_outside(error, context)


def spoil(context: Any, interrupt: BaseException, ended: Any) -> None:
    """Make sure, after an interrupt inside a transaction, that nothing written in it can be committed.

    `ended` is how the handler ended, if it has run. The store knows what an interrupt in the handler means.
    """
    if context.joined:
        when = _when(interrupt, ended)
        context.store.spoil(when)
        if (around := context.transaction_around) is not None:
            around.spoil(when)


async def spoil_async(context: Any, interrupt: BaseException, ended: Any) -> None:
    """Spoil an async transaction; a further cancellation does not interrupt it."""
    import asyncio

    if context.joined:
        when = _when(interrupt, ended)
        if when is When.INSIDE and isinstance(interrupt, asyncio.CancelledError):
            when = When.CANCELLED
        await brought_to_its_end(_spoiled(context, when), context.store.abandon)


async def _spoiled(context: Any, when: When) -> None:
    # Looked up first: it depends on the current context.
    around = context.transaction_around
    await context.store.spoil(when)
    if around is not None:
        await around.spoil(when)


def _when(interrupt: BaseException, ended: Any) -> When:
    if ended is None or not ended.started:
        return When.BEFORE
    return When.INSIDE if interrupt is ended.error else When.AFTER


async def in_one_piece(
    coroutine: Coroutine[Any, Any, T], abandon: Callable[[], object], *, finish: bool, within: float | None = None
) -> tuple[asyncio.Task[T], BaseException | None]:
    """Await work in its own task; return that task, and the caller's cancellation, if one came.

    A cancellation reaches the work once, or with `finish` not at all. If the work has not ended after CLEAN_UP_SECONDS,
    or `within` seconds, `abandon` has to make sure, without waiting, that the work has no effect, and the task is left
    alone.
    """
    import asyncio

    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError as cancelled:
        if not finish:
            task.cancel()
        if not await ended(task, within):
            abandon()
            leave(task)
        # Its traceback would keep the work alive, and with it a cursor, and with that an SQLite lock.
        return task, cancelled.with_traceback(None)
    return task, None


async def ended(task: asyncio.Task[Any], within: float | None = None) -> bool:
    """Wait for a task despite cancellations; return False if it takes longer than CLEAN_UP_SECONDS, or `within`."""
    import asyncio

    clock = asyncio.get_running_loop().time
    ends = clock() + (CLEAN_UP_SECONDS if within is None else within)
    with _shield():
        while not task.done() and (left := ends - clock()) > 0:
            try:
                await asyncio.wait({task}, timeout=left)
            except asyncio.CancelledError:
                # The caller already holds one cancellation, and raises it.
                continue
    return task.done()


def _shield() -> AbstractContextManager[Any]:
    """Return anyio's own shield, where anyio is in use.

    Its scopes would wake the waiting task at each turn of the event loop: a processor is busy until the store answers.
    """
    # Another thread may be importing it right now.
    scope = getattr(sys.modules.get("anyio"), "CancelScope", None)
    return nullcontext() if scope is None else scope(shield=True)


async def replied(coroutine: Coroutine[Any, Any, T], abandon: Callable[[], object] = bool) -> T:
    """Await the reply to a request; a cancellation propagates after it, or after REPLY_SECONDS.

    Then `abandon` closes the connection, unless a cancellation does that by itself.
    """
    return await brought_to_its_end(coroutine, abandon, within=REPLY_SECONDS)


async def brought_to_its_end(
    coroutine: Coroutine[Any, Any, T], abandon: Callable[[], object], *, within: float | None = None
) -> T:
    """Await work that no cancellation interrupts, such as a clean-up. The cancellation propagates after it."""
    task, cancelled = await in_one_piece(coroutine, abandon, finish=True, within=within)
    if cancelled is not None:
        read(task)
        raise cancelled
    return task.result()


def leave(task: asyncio.Task[Any]) -> None:
    """Cancel a task that nobody waits for any more."""
    task.cancel()
    _left.add(task)
    task.add_done_callback(_left.discard)
    task.add_done_callback(read)


def read(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's result, so that asyncio does not warn about an exception that was never retrieved."""
    if task.done() and not task.cancelled():
        task.exception()


# Referenced until they have ended: the event loop does not keep them from the garbage collector.
_left: Final[set[Any]] = set()


async def closed_for_sure(close: Callable[[], Awaitable[None]], abandon: Callable[[], object]) -> None:
    """Close a connection gracefully; at once, if that fails or is cancelled."""
    try:
        await close()
    except Exception:  # noqa: BLE001 - closing a connection that may be broken: its error would help nobody
        abandon()
    except BaseException:
        abandon()
        raise
