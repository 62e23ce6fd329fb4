"""What stores say where the connection for renewals cannot be opened. Each driver opens it in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from onefold.errors import StoreUnavailable

WHY: Final = "onefold: to renew its claims, a store opens a connection of its own, outside of any pool"


@contextmanager
def unsent() -> Iterator[None]:
    """Mark an error of that connection: the claim that was to count on it was not sent."""
    try:
        yield
    except StoreUnavailable as error:
        error.sent = False
        error.add_note(WHY)
        raise
