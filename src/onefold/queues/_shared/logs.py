"""Report what happens to a consumer's messages: in its log, by queue, operation and digest, and to listeners.

It never shows a key, a body, or the text of a handler's own error. A store that is down makes every message wait: each
cause is logged once a minute, with a count.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from onefold import StoreUnavailable, UsageError
from onefold.events import Kind, tell
from onefold.queues._shared.verdict import Later
from onefold.stores.base import Address

SELDOM: Final = 60.0

# How many causes are remembered; then the oldest is forgotten, and logged once more.
CAUSES_MAX: Final = 1_000

# The cause is the same, whichever message waits for it, and for how long.
_VARYING: Final = re.compile(r"\[key [0-9a-f]+\]|\d+")


def address_of(guard: Any, operation: str, key: str | None, scope: str | None = None) -> Address:
    """Return the address of a message's record. Without a usable key: only the operation, and an empty key."""
    try:
        return guard.address(operation, key, scope=scope)  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 - the problem was reported before; log the message all the same
        return Address("", operation, "")


def found_at(queue: str, address: Address) -> str:
    """Return how a message is identified: `charges: charge [key 5a1f…]`."""
    shown = queue if queue.isprintable() else ascii(queue)
    whose = f"{address.operation} [key {address.digest}]" if address.key else address.operation
    return f"{shown}: {whose}" if queue else whose


def buried(address: Address, reason: str) -> None:
    """Report that a message went to the dead letters, or was dropped in its broker's way."""
    tell(Kind.BURIED, address, detail=reason)


@dataclass
class _Told:
    at: float
    since: int = 0


class Waits:
    """Reports why messages wait, for the consumers of one guard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: OrderedDict[str, _Told] = OrderedDict()
        # Handlers may run in several threads.
        self._one_at_a_time = threading.Lock()

    def tell(self, log: logging.Logger, where: str, later: Later, *, delay: float | None = None) -> None:
        """Log one line: what waits, for how long, and why. The driver's own error is logged at DEBUG."""
        error, pause = later.error, later.delay if delay is None else delay
        when = f"again in {pause:.3g} s" if pause else "to be tried again"
        if not isinstance(error, (StoreUnavailable, UsageError)):
            # A person has to look at a held message; that another worker is running it is normal.
            level = logging.WARNING if later.limited and self._is_new(later.reason) else logging.INFO
            log.log(level, "%s: %s: %s", where, when, later.reason)
            return
        log.debug("%s: the error that made it wait", where, exc_info=error)
        before = self._before(_VARYING.sub("", later.reason))
        if before is None:
            return
        level = logging.WARNING if isinstance(error, StoreUnavailable) else logging.ERROR
        more = f" ({before} more since this was last logged)" if before else ""
        log.log(level, "%s: %s: %s%s", where, when, later.reason, more)

    def _is_new(self, cause: str) -> bool:
        with self._one_at_a_time:
            is_new = cause not in self._told
            self._note(cause)
        return is_new

    def _before(self, cause: str) -> int | None:
        """Return how many were left out since the last log line; None if that was a moment ago."""
        with self._one_at_a_time:
            told = self._told.get(cause)
            if told is None:
                self._note(cause)
                return 0
            if self._clock() - told.at < SELDOM:
                told.since += 1
                return None
            before = told.since
            self._note(cause)
            return before

    def _note(self, cause: str) -> None:
        self._told[cause] = _Told(self._clock())
        self._told.move_to_end(cause)
        if len(self._told) > CAUSES_MAX:
            self._told.popitem(last=False)


_waits: WeakKeyDictionary[Any, Waits] = WeakKeyDictionary()


def waits_of(guard: Any) -> Waits:
    """Return the instance that all consumers of a guard share."""
    return _waits.setdefault(guard, Waits())
