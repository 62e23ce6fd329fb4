"""Count how often a message has failed, for brokers that do not, and say how long it waits after each time. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from onefold import StoreUnavailable
from onefold.queues._shared.verdict import Later

# The same as `Policy.max_attempts`: then the message goes to the dead letters.
ATTEMPTS: Final = 5

# The delay between two attempts, doubled each time.
FAILED_DELAY: Final = 1.0
FAILED_DELAY_MAX: Final = 60.0
DOUBLINGS_MAX: Final = 10

# How many failing messages a consumer counts if the broker does not: the oldest are forgotten.
FAILING_MAX: Final = 10_000


def delay_after(attempt: int, first: float = FAILED_DELAY) -> float:
    """Return how long a message waits after its failed attempt of this number, counted from 1."""
    return min(first * 2.0 ** min(attempt - 1, DOUBLINGS_MAX), FAILED_DELAY_MAX)


def less_often(later: Later, *, waited: float, given_back: int = 0) -> Later:
    """Wait twice as long each time for a store that is down, a minute at most.

    Every message of the queue comes meanwhile, and each of them asks the store. `given_back`: how often the broker has
    delivered it; 0 if it has waited in place.
    """
    if not isinstance(later.error, StoreUnavailable):
        return later
    longer = delay_after(given_back) if given_back else min(waited, FAILED_DELAY_MAX)
    return later._replace(delay=max(later.delay, longer))


def times_failed(attempt: int, what: str) -> str:
    """Return the reason for a dead letter."""
    return f"it failed {'once,' if attempt == 1 else f'{attempt} times, the last time'} with {what}"


class Failures:
    """The failed attempts of the messages of one consumer, as far as it remembers."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, message: Hashable, before: int = 0) -> int:
        """Return the number of this failed attempt. `before`: how many the broker knows of."""
        attempt = max(self._counts.pop(message, 0), before) + 1
        self._counts[message] = attempt
        if len(self._counts) > FAILING_MAX:
            self._counts.popitem(last=False)
        return attempt

    def forget(self, message: Hashable) -> None:
        """Count it as new: it is done, or it is a dead letter, which may be moved back."""
        self._counts.pop(message, None)
