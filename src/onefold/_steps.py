"""The steps that a flow may ask for, and the two drivers that perform them.

A flow is a generator: it yields a step and is sent the reply. `drive` performs steps blocking, `drive_async` awaiting;
nothing else in the rules knows of colours. What a store raises is thrown into the flow; what a handler raises is
data (`Ended`), because it is the user's and must surface unmasked.

An interrupt (KeyboardInterrupt, a cancelled task) that hits a store operation must not tear it: the operation is sent
again, which is safe because every operation is idempotent by its token, and the interrupt goes on after the clean-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Protocol, TypeVar

import msgspec

from onefold._model import Address, Claim, Close, Ending, Entry, Memory, Record
from onefold.errors import UsageError

T = TypeVar("T")


class Step(msgspec.Struct, frozen=True, gc=False):
    """Something that a flow asks its driver to do."""


class Ask(Step, frozen=True):
    """A step that one operation of the store performs."""

    def send(self, store: Any) -> Any:
        """The reply, or in colour the awaitable of it."""
        raise NotImplementedError


class Claiming(Ask, frozen=True):
    entry: Entry
    replacing: Record | None = None

    def send(self, store: Any) -> Any:
        return store.claim(self.entry, replacing=self.replacing)


class Reading(Ask, frozen=True):
    address: Address

    def send(self, store: Any) -> Any:
        return store.read(self.address)


class Extending(Ask, frozen=True):
    claim: Claim
    notes: bytes | None = None

    def send(self, store: Any) -> Any:
        return store.extend(self.claim, self.notes)


class Closing(Ask, frozen=True):
    """A step that ends a claim."""

    claim: Claim
    by: Any


class Finishing(Closing, frozen=True):
    by: Ending

    def send(self, store: Any) -> Any:
        return store.finish(self.claim, self.by)


class Releasing(Closing, frozen=True):
    by: Memory | None = None

    def send(self, store: Any) -> Any:
        return store.release(self.claim, self.by)


class ClaimingAll(Ask, frozen=True):
    steps: Sequence[Claiming]

    def send(self, store: Any) -> Any:
        return store.claim_all([step.entry for step in self.steps])


class ClosingAll(Ask, frozen=True):
    steps: Sequence[Closing]

    def send(self, store: Any) -> Any:
        return store.close_all([Close(step.claim, step.by) for step in self.steps])


class Once(Ask, frozen=True):
    """A step that must not be sent twice."""


class Beginning(Once, frozen=True):
    """Open a transaction."""

    def send(self, store: Any) -> Any:
        return store.begin()


class Saving(Once, frozen=True):
    """Set a savepoint before the handler, so that its writes can be undone alone."""

    def send(self, store: Any) -> Any:
        return store.save()


class Committing(Once, frozen=True):
    """Commit; the reply is a `Commit`."""

    def send(self, store: Any) -> Any:
        return store.commit()


class RollingBack(Once, frozen=True):
    """Undo the transaction, or what followed the savepoint. True: the database asks to try it again."""

    error: BaseException
    to_savepoint: bool = False

    def send(self, store: Any) -> Any:
        return store.rollback(self.error, to_savepoint=self.to_savepoint)


class StillOpen(Once, frozen=True):
    """Raise where the handler has ended the transaction that it was to leave open."""

    def send(self, store: Any) -> Any:
        return store.check_open()


class Watching(Step, frozen=True):
    """From now on the heartbeat keeps these claims alive, until the flow ends.

    The reply is how long the first to end is certainly still ours.
    """

    claims: Sequence[Claim]


class LeaseLeft(Step, frozen=True):
    """How long the claim is certainly still ours, by the worker's own monotonic clock."""

    claim: Claim


class Running(Step, frozen=True):
    """Call the handler (or a probe) as the owner of this entry; the reply is how it `Ended`.

    Without an entry it is a part of a handler that is already inside (`current().step`).
    """

    call: Callable[..., Any]
    entry: Entry | None = None
    # False in seen mode, and where the store is down: there is nothing to keep alive and no log of steps.
    claimed: bool = True
    probing: bool = False
    cancel_when_lost: bool = False


class Pausing(Step, frozen=True):
    """Wait; the reply is how long it took."""

    seconds: float


class Ended(msgspec.Struct, frozen=True):
    """How a handler ended. `started` is False where an interrupt came before its first line."""

    value: Any = None
    error: BaseException | None = None
    notes: bytes | None = None
    started: bool = True


Flow = Generator[Step, Any, T]


class Hands(Protocol):
    """What a driver works with: the guard's store and heartbeat, and the way in and out of a handler."""

    store: Any

    def enter(self, running: Running) -> Any: ...
    def leave(self, current: Any) -> bytes | None: ...
    def watch(self, claims: Sequence[Claim], sent: float) -> float: ...
    def unwatch(self, claims: Sequence[Claim]) -> None: ...
    def lease_left(self, claim: Claim) -> float: ...
    def rescue(self, running: Running, error: BaseException) -> BaseException: ...


def drive(flow: Flow[T], hands: Hands) -> T:
    """Perform a flow's steps, blocking."""
    reply: Any = None
    failure: Exception | None = None
    interrupt: BaseException | None = None
    handed: BaseException | None = None
    watched: list[Claim] = []
    sent = 0.0
    try:
        while True:
            step = flow.send(reply) if failure is None else flow.throw(failure)
            reply = failure = None
            if isinstance(step, Ask):
                sent = time.monotonic()
                reply, failure, stop = _ask(step, hands)
                interrupt = interrupt or stop
            elif isinstance(step, Running):
                reply = Ended(error=interrupt, started=False) if interrupt else _run(step, hands)
                handed = reply.error
            elif isinstance(step, Pausing):
                if interrupt:
                    raise interrupt
                began = time.monotonic()
                time.sleep(step.seconds)
                reply = time.monotonic() - began
            else:
                reply = _attend(step, hands, watched, sent)
    except StopIteration as end:
        if interrupt is None:
            return end.value  # type: ignore[no-any-return]
    except Exception as error:
        # A generator cannot raise StopIteration, but a handler can; it must surface as what it is.
        if interrupt is None and not (isinstance(handed, StopIteration) and error.__cause__ is handed):
            raise
    finally:
        flow.close()
        if watched:
            hands.unwatch(watched)
    raise interrupt or handed  # type: ignore[misc]


async def drive_async(flow: Flow[T], hands: Hands) -> T:
    """Perform a flow's steps, awaiting."""
    reply: Any = None
    failure: Exception | None = None
    interrupt: BaseException | None = None
    watched: list[Claim] = []
    sent = 0.0
    try:
        while True:
            step = flow.send(reply) if failure is None else flow.throw(failure)
            reply = failure = None
            if isinstance(step, Ask):
                sent = time.monotonic()
                reply, failure, stop = await _ask_async(step, hands)
                interrupt = interrupt or stop
            elif isinstance(step, Running):
                reply = Ended(error=interrupt, started=False) if interrupt else await _run_async(step, hands)
            elif isinstance(step, Pausing):
                if interrupt:
                    raise interrupt
                began = time.monotonic()
                await _sleep(step.seconds)
                reply = time.monotonic() - began
            else:
                reply = _attend(step, hands, watched, sent)
    except StopIteration as end:
        if interrupt is None:
            return end.value  # type: ignore[no-any-return]
    except Exception:
        if interrupt is None:
            raise
    finally:
        flow.close()
        if watched:
            hands.unwatch(watched)
    raise interrupt


def _attend(step: Step, hands: Hands, watched: list[Claim], sent: float) -> Any:
    if isinstance(step, Watching):
        watched.extend(step.claims)
        return hands.watch(step.claims, sent)
    if isinstance(step, LeaseLeft):
        return hands.lease_left(step.claim)
    raise AssertionError(f"no driver knows the step {step!r}")


def _run(step: Running, hands: Hands) -> Ended:
    current = hands.enter(step)
    try:
        value = step.call(current) if step.probing else step.call()
    except BaseException as error:  # noqa: BLE001 - the user's own, handed on as it is
        return Ended(error=error, notes=hands.leave(current))
    notes = hands.leave(current)
    return (
        Ended(error=_not_run(value), notes=notes) if isinstance(value, UNSTARTED) else Ended(value=value, notes=notes)
    )


async def _run_async(step: Running, hands: Hands) -> Ended:
    current = hands.enter(step)
    try:
        value = step.call(current) if step.probing else step.call()
        if hasattr(value, "__await__"):
            value = await value
    except BaseException as error:  # noqa: BLE001 - the user's own, handed on as it is
        return Ended(error=hands.rescue(step, error), notes=hands.leave(current))
    notes = hands.leave(current)
    return (
        Ended(error=_not_run(value), notes=notes) if isinstance(value, UNSTARTED) else Ended(value=value, notes=notes)
    )


# What a lambda can hand back instead of running it.
UNSTARTED = (CoroutineType, GeneratorType, AsyncGeneratorType)


def _not_run(value: Any) -> UsageError:
    if isinstance(value, (CoroutineType, GeneratorType)):
        value.close()
    if isinstance(value, CoroutineType):
        return UsageError("the handler is async, and this guard is not: nothing ran. Use an AsyncGuard")
    return UsageError("the handler is a generator: nothing of it ran. Return a value instead of yielding")


# A reply, or what the store raised; and an interrupt that came meanwhile.
Asked = tuple[Any, Exception | None, BaseException | None]


def _ask(step: Ask, hands: Hands) -> Asked:
    """One operation of the store. An interrupt is answered by sending it again: it must not stay half done."""
    try:
        return step.send(hands.store), None, None
    except Exception as error:  # noqa: BLE001 - thrown into the flow, which knows what it means there
        return None, error, None
    except BaseException as interrupt:
        if isinstance(step, Once):
            raise
        reply, failure, _ = _ask(step, hands)
        return reply, failure, interrupt


async def _ask_async(step: Ask, hands: Hands) -> Asked:
    """The same, awaited. It is sent again in a task that a further cancellation of ours does not reach."""
    try:
        return await step.send(hands.store), None, None
    except Exception as error:  # noqa: BLE001 - thrown into the flow, which knows what it means there
        return None, error, None
    except BaseException as interrupt:
        if isinstance(step, Once):
            raise
        task = await _to_its_end(step.send(hands.store))
        failure = task.exception()
        if isinstance(failure, Exception):
            return None, failure, interrupt
        return task.result(), None, interrupt


async def _to_its_end(awaitable: Any) -> Any:
    import asyncio

    task = asyncio.ensure_future(awaitable)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue
    return task


async def _sleep(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)
