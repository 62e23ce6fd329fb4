"""A store of another library that knows only what is finished, and what can be added to it in one process.

A seen-set has no claims: nobody can ask it what is running elsewhere. In this process a duplicate waits for the running
one; across processes both run, and only the library's own store could change that.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import Logger
from typing import Any, Protocol, TypeGuard

from onefold import InProgress, Policy, UsageError
from onefold._checks import finite
from onefold._model.policy import check_fields
from onefold.durations import seconds
from onefold.keys import address
from onefold.queues._shared.logs import found_at

# How long a refused duplicate is told to wait.
RETRY_AFTER = 1.0


class SeenSet(Protocol):
    """A record of the ids that were processed, such as BabelQueue's `IdempotencyStore`."""

    def seen(self, message_id: str, /) -> bool: ...
    def remember(self, message_id: str, /) -> None: ...
    def forget(self, message_id: str, /) -> None: ...


def is_seen_set(store: object) -> TypeGuard[SeenSet]:
    """Return whether an object is such a store. Raise `UsageError` for an async one: each coroutine would be "seen"."""
    methods = [getattr(store, name, None) for name in ("seen", "remember", "forget")]
    if not all(map(callable, methods)):
        return False
    if any(map(inspect.iscoroutinefunction, methods)):
        raise UsageError(f"{type(store).__name__}.seen() is async, and this client is blocking: every id would be seen")
    return True


def wait_of(policy: Policy | None, fields: Mapping[str, Any], usual: float, of: Callable[..., Any]) -> float:
    """Return how long a duplicate waits. Raise `UsageError` for what a seen-set cannot keep: all else of a policy."""
    check_fields(fields, of)
    others = [name for name in fields if name != "wait"]
    if policy is not None or others:
        named = "policy=" if policy is not None else f"{others[0]}="
        raise UsageError(
            f"{named} needs a guard: a store of the SDK has neither claims nor a retention of ours. Pass guard="
        )
    return finite(seconds(fields.get("wait", usual), "wait"), "wait")


def remember(store: SeenSet, key: str, log: Logger, operation: str) -> None:
    """Remember what has been processed. An error is logged and ignored: reporting it would run the handler again."""
    try:
        store.remember(key)
    except Exception as error:  # noqa: BLE001 - an effect that happened is never reported as failed
        where = found_at("", address(operation, key))
        log.error("%s: it ran, but %s was raised by remember(): a later duplicate may run", where, type(error).__name__)


class InFlight:
    """The ids that this process is handling."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._ids: set[str] = set()
        self._freed = threading.Condition()

    @contextmanager
    def alone(self, operation: str, key: str, wait: float) -> Iterator[None]:
        """Hold an id, as soon as nobody else does. Raise `InProgress` if that takes longer than `wait`."""
        if self._pid != os.getpid():
            # What the parent was handling at the fork is not handled here, and its lock may be held forever.
            self._reset()
        ours = False
        try:
            with self._freed:
                if not self._freed.wait_for(lambda: key not in self._ids, wait):
                    raise InProgress.about(address(operation, key), retry_after=RETRY_AFTER)
                ours = True
                self._ids.add(key)
            yield
        finally:
            if ours:
                with self._freed:
                    self._ids.discard(key)
                    self._freed.notify_all()
