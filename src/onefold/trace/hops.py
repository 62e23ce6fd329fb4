"""Write a hop's log for `onefold trace`: one line of JSON for each delivery that it sees. Never the key itself.

`docs/trace.md` defines the format, so that a hop in another language can write it too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from onefold import Event, UsageError
from onefold.keys import checked_key
from onefold.metrics.table import outcome

# Only of the key: two hops have to write the same digits, and not every hop knows the operation. More digits than in
# other logs, because a trace compares millions of keys, and a collision would look like a leak.
DIGITS: Final = 16

LOGGER: Final = "onefold.hops"

# Identifies the current message: {"delivery": …, "request": …}.
About = Callable[[], Mapping[str, str | None]]


def digest(key: object) -> str:
    """Return the digest that stands for a key in the lines of all hops: the first 16 digits of its SHA-256."""
    return hashlib.sha256(checked_key(key).encode()).hexdigest()[:DIGITS]


class Hop:
    """A place that messages pass. Call it with the key of each one; or let it listen to the events of a guard.

    `sends=True` marks a producer: its lines name this instance, so that a restart can be told from a retry. `about`
    returns the ids of the current message, which an event cannot know. Lines go to the logger `onefold.hops`, at INFO,
    or to `write`.
    """

    def __init__(
        self,
        name: str,
        *,
        sends: bool = False,
        about: About | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        if not name:
            raise UsageError(f"Hop({name!r}) has to name a place that messages pass, such as Hop('gateway')")
        self.name = name
        self._about = about
        self._write = logging.getLogger(LOGGER).info if write is None else write
        self._producer = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}" if sends else None

    def __call__(
        self,
        key: object,
        *,
        delivery: str | None = None,
        request: str | None = None,
        scope: str | None = None,
    ) -> None:
        """Log that a message with this key has passed. Raise `MissingKey` if the key is unusable.

        `delivery` stays the same from hop to hop and from attempt to attempt; `request` is new for each attempt.
        """
        self._log(digest(key), {"scope": scope, "delivery": delivery, "request": request})

    def hear(self, event: Event) -> None:
        """Log each delivery that ends: for `subscribe(hop.hear)` or `Guard(on_event=hop.hear)`."""
        ended = outcome(event)
        if ended is None:
            return
        ids = {} if self._about is None else dict(self._about())
        # The digest of the record, as for `onefold show`.
        about_it = {"operation": event.operation, "record": event.digest, "outcome": ended}
        self._log(digest(event.address.key), {"scope": event.address.scope or None, **ids, **about_it})

    def _log(self, key: str, facts: Mapping[str, Any]) -> None:
        line = {"ts": time.time(), "hop": self.name, "key": key, "producer": self._producer, **facts}
        self._write(msgspec.json.encode({name: fact for name, fact in line.items() if fact is not None}).decode())
