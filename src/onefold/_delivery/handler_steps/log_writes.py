"""Write the log of one run's steps, even if several run concurrently.

Each write sends the whole log. So one write is in progress at a time, and each sends the newest log: an older one that
arrived last would make the store forget steps that have returned. A step that finds, at its turn, that another step's
write has included its own entry sends nothing: twenty concurrent steps cost about two writes.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Any

from onefold._concurrency.interrupts import NotAnswered
from onefold._delivery.steps import StoreStep
from onefold._model import Claim

if TYPE_CHECKING:
    import asyncio


class Turns:
    """The locks of one log."""

    __slots__ = ("_tasks", "adding", "threads")

    def __init__(self) -> None:
        # Held while an entry is added, never while something is sent.
        self.adding = Lock()
        # Held while the log is written. In a `with` statement an interrupt cannot leave it held.
        self.threads = Lock()
        self._tasks: asyncio.Lock | None = None

    @property
    def tasks(self) -> asyncio.Lock:
        """Return the lock that tasks hold while the log is written."""
        if self._tasks is None:
            from asyncio import Lock

            self._tasks = Lock()
        return self._tasks


class Logging(StoreStep, frozen=True):
    """Store the log of a run's steps, once it is this step's turn. The reply is whether the claim is still ours."""

    claim: Claim
    # The `StepLog`, which knows what is in it, and what of it the store has.
    log: Any
    name: str

    def send(self, store: Any) -> bool:
        came = time.monotonic()
        with self.log.turns.threads:
            # Those in front of it may each have waited for a silent server.
            if time.monotonic() - came > self.claim.lease:
                raise NotAnswered("the store has not kept the log of other steps before the lease ended")
            while (notes := self.log.unwritten(self.name)) is not None:
                if not self.log.written(notes, kept=store.extend(self.claim, notes)):
                    return False
            return True

    async def send_async(self, store: Any) -> bool:
        # The driver limits how long it waits, including for its turn.
        async with self.log.turns.tasks:
            while (notes := self.log.unwritten(self.name)) is not None:
                if not self.log.written(notes, kept=await store.extend(self.claim, notes)):
                    return False
            return True
