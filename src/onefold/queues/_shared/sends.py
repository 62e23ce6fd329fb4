"""Send a message until the broker has confirmed it. Written once, for sync and async clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from onefold._concurrency.generators import Flow

# The pause between two attempts, doubled each time.
SEND_DELAY: Final = 0.1
SEND_DELAY_MAX: Final = 5.0


def pauses(tries: int) -> list[float]:
    """Return how long a sender waits between its attempts."""
    return [min(SEND_DELAY * 2**number, SEND_DELAY_MAX) for number in range(tries - 1)]


def confirmed(
    publish: Callable[[], Any],
    sleep: Callable[[float], Any],
    lost: tuple[type[BaseException], ...],
    is_worth_another_try: Callable[[BaseException], bool],
    pauses: Sequence[float],
) -> Flow[None]:
    """Publish a message until the broker has confirmed it, with a pause after each error of a lost connection.

    Raise the client's own error after the last attempt, or at once if a retry is pointless.
    """
    for pause in (*pauses, None):
        try:
            yield publish
        except lost as error:
            if pause is None or not is_worth_another_try(error):
                raise
            yield partial(sleep, pause)
        else:
            return
