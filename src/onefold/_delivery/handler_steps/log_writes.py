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
        # Held while the log is written. A `with` statement cannot leave it held after an interrupt.
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
    """Store the log of a run's steps when it is this step's turn. The reply is whether the claim is still ours."""

    claim: Claim
    # The `StepLog`, which knows its content, and which part of it the store has.
    log: Any
    name: str

    def send(self, store: Any) -> bool:
        came = time.monotonic()
        with self.log.turns.threads:
            # Each of those before it may have waited for a silent server.
            if time.monotonic() - came > self.claim.lease:
                raise NotAnswered("the log of other steps was not stored before the lease ended")
            while (notes := self.log.unwritten(self.name)) is not None:
                if not self.log.written(notes, kept=store.extend(self.claim, notes)):
                    return False
            return True

    async def send_async(self, store: Any) -> bool:
        # The driver limits the wait, including the wait for its turn.
        async with self.log.turns.tasks:
            while (notes := self.log.unwritten(self.name)) is not None:
                if not self.log.written(notes, kept=await store.extend(self.claim, notes)):
                    return False
            return True
