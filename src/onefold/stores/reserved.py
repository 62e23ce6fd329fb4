"""Mark errors of connections that could not be opened, for an operation or for renewing claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from onefold.errors import StoreUnavailable

WHY: Final = "onefold: to renew its claims, a store opens a connection of its own, outside any pool"


@contextmanager
def unsent() -> Iterator[None]:
    """Mark an error of the connection for renewals: the claim that needed it was not sent."""
    try:
        yield
    except StoreUnavailable as error:
        error.reached = False
        # In the message too: logs do not show notes, and a reader of a limit error wonders which connection it was.
        error.args = (f"{error} (on the connection for renewing claims, which is opened first, outside the pool)",)
        error.add_note(WHY)
        raise


@contextmanager
def connecting() -> Iterator[None]:
    """Mark any error raised while connecting: nothing was sent."""
    try:
        yield
    except Exception as error:
        mark_unsent(error)
        raise


def mark_unsent(error: Exception) -> None:
    """Mark an error that was raised while connecting: nothing was sent."""
    with suppress(AttributeError):
        error.on_the_way = True  # type: ignore[attr-defined]


def came_to_nothing(error: BaseException) -> bool:
    """Return whether this error was raised while connecting."""
    return getattr(error, "on_the_way", False)
