"""The steps that a flow asks its driver to perform: one class for each kind, and `Ended`, the reply of a handler.

A step that the store performs is a `StoreStep`: it knows which operation to call, and what an interrupt means for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from onefold._concurrency.interrupts import When
from onefold._delivery.handler_steps.left import NONE_LEFT, StepsLeft
from onefold._model import Address, Claim, Close, Ending, Entry, Record, Released


class Step(msgspec.Struct, frozen=True, gc=False):
    """A request of a flow to its driver."""

    # Whether it is a `StoreStep`. For the drivers: `isinstance` takes four times as long as an attribute.
    is_sent: ClassVar[bool] = False


class StoreStep(Step, frozen=True):
    """A step that one operation of the store performs."""

    is_sent = True
    # Whether a lease may be counted from the time at which it was sent.
    counts: ClassVar[bool] = True
    # The meaning of an interrupt for it (`_concurrency.interrupts`): whether it must not be sent twice, whether it is
    # outside the transaction in which a store works, and whether it is a clean-up, for which an interrupt waits.
    once: ClassVar[bool] = False
    outside: ClassVar[bool] = False
    cleans_up: ClassVar[bool] = False

    def send(self, store: Any) -> Any:
        """Send the step to the store; return the reply, or its awaitable if async."""
        raise NotImplementedError

    def send_async(self, store: Any) -> Any:
        """Return the awaitable of the reply."""
        return self.send(store)


class Claiming(StoreStep, frozen=True):
    entry: Entry
    replacing: Record | None = None

    def send(self, store: Any) -> Any:
        return store.claim(self.entry, replacing=self.replacing)


class Reading(StoreStep, frozen=True):
    address: Address

    def send(self, store: Any) -> Any:
        return store.read(self.address)


class Annotating(StoreStep, frozen=True):
    """Change the notes of a record that is still exactly this one, and nothing else."""

    counts = False

    record: Record
    notes: bytes

    def send(self, store: Any) -> Any:
        return store.annotate(self.record, self.notes)


class Extending(StoreStep, frozen=True):
    claim: Claim
    notes: bytes | None = None

    def send(self, store: Any) -> Any:
        return store.extend(self.claim, self.notes)


class Closing(StoreStep, frozen=True):
    """A step that ends a claim."""

    claim: Claim
    by: Any


class Finishing(Closing, frozen=True):
    by: Ending

    def send(self, store: Any) -> Any:
        return store.finish(self.claim, self.by)


class Releasing(Closing, frozen=True):
    cleans_up = True

    by: Released | None = None

    def send(self, store: Any) -> Any:
        return store.release(self.claim, self.by)


class ClaimingAll(StoreStep, frozen=True):
    steps: Sequence[Claiming]

    def send(self, store: Any) -> Any:
        return store.claim_all([step.entry for step in self.steps])


class ClosingAll(StoreStep, frozen=True):
    steps: Sequence[Closing]

    def send(self, store: Any) -> Any:
        return store.close_all([Close(step.claim, step.by) for step in self.steps])


class Elsewhere(StoreStep, frozen=True):
    """An operation of another store than the guard's own."""

    counts = False
    outside = True

    there: Any
    step: StoreStep

    def send(self, store: Any) -> Any:  # noqa: ARG002 - the guard's own store is not used
        return self.step.send(self.there)


class Once(StoreStep, frozen=True):
    """A step that must not be sent twice."""

    once = True


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

    cleans_up = True

    def send(self, store: Any) -> Any:
        return store.commit()


class RollingBack(Once, frozen=True):
    """Undo the transaction, or what followed the savepoint. The reply is whether the database asks for a retry."""

    cleans_up = True

    error: BaseException
    to_savepoint: bool = False

    def send(self, store: Any) -> Any:
        return store.rollback(self.error, to_savepoint=self.to_savepoint)


class StillOpen(Once, frozen=True):
    """Raise unless the record of this claim is still there, in the transaction that wrote it."""

    claim: Claim

    def send(self, store: Any) -> Any:
        return store.check_open(self.claim)


class Judging(Once, frozen=True):
    """Raise `InProgress` if a handler's error shows that another delivery has written the row that is the record."""

    claim: Claim
    error: BaseException

    def send(self, store: Any) -> Any:
        return store.judge(self.claim, self.error)


class Spoiling(Once, frozen=True):
    """Make sure that nothing of the transaction can be committed."""

    cleans_up = True

    def send(self, store: Any) -> Any:
        return store.spoil(When.AFTER)


class Watching(Step, frozen=True):
    """Make the heartbeat keep these claims alive, until the flow ends.

    The reply is how long the first of them is certainly still ours.
    """

    claims: Sequence[Claim]


class Unwatching(Step, frozen=True):
    """Make the heartbeat leave these claims alone, although the flow continues."""

    claims: Sequence[Claim]


class LeaseLeft(Step, frozen=True):
    """Ask how long the claim is certainly still ours, by the worker's own monotonic clock."""

    claim: Claim


class Took(Step, frozen=True):
    """Ask how long the last, failed operation of the store took."""


class Running(Step, frozen=True):
    """Call the handler (or a probe) as the owner of this entry; the reply is how it `Ended`.

    Without an entry it is a part of a handler that is already inside (`current().step`).
    """

    call: Callable[..., Any]
    entry: Entry | None = None
    probing: bool = False
    cancel_when_lost: bool = False


class Pausing(Step, frozen=True):
    """Wait; the reply is how long it took."""

    seconds: float


class Waiting(Pausing, frozen=True):
    """Wait for the end of a running delivery, until it is time to look again.

    The reply is how long it took, and the record if another waiter of this process has found that it has ended.
    """

    found: Record
    # The pause if somebody is expected to tell of the end, and the longest wait in any case.
    seconds_told: float
    at_most: float


class Found(Pausing, frozen=True):
    """Tell the other waiters of this process what was found."""

    record: Record


class Ended(msgspec.Struct, frozen=True):
    """How a handler ended. `started` is False if an interrupt came before its first line."""

    value: Any = None
    error: BaseException | None = None
    notes: bytes | None = None
    started: bool = True
    # The steps with an unknown outcome.
    steps: StepsLeft = NONE_LEFT
    # What it has noted for people, packed.
    noted: bytes | None = None
    # What came after it had returned; the driver raises it once the ending is stored.
    interrupt: BaseException | None = None


# What a handler leaves when it ends: the log of its finished steps, those with an unknown outcome, and what it noted.
Left = tuple[bytes | None, StepsLeft, bytes | None]
