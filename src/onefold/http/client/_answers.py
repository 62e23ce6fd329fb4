"""Decide when a response counts: after it was read to its end, and after its redirect, if it is one, was followed.

A client that closes a response early, or gets an error while reading it (a dropped connection, a timeout, a
cancellation, an encoding that cannot be decoded), has no response and will ask again. Until then the request keeps its
key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from weakref import WeakMethod

from onefold.http.client._callers import Caller
from onefold.http.client._retrying import settles

# Clients follow these, if they have a Location.
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

# Responses without a body, whatever their headers say.
BODYLESS: Final = frozenset({204, 304})


class Answer:
    """One response to a request, while it is read and, if it is a redirect, followed."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes | None, on_reopened: Callable[[], None]):
        # The redirect to follow, if it is one: its target may fail, and then there is no response.
        self.leads_on = status in REDIRECTS and "Location" in headers
        self._is_final = settles(status, headers, body)
        self._has_ended = False
        self._has_broken_off = False
        # Weak: a request holds its response.
        self._on_reopened = WeakMethod(on_reopened)
        # The last to send or read; None: nobody waits for anything more.
        self._caller: Caller | None = Caller()
        # Whether somebody is inside a call that reads from it at this moment.
        self._is_being_read = False

    @property
    def is_settled(self) -> bool:
        """Return whether its request is settled for good."""
        return self._is_final and self._has_ended and not self.leads_on

    @property
    def is_awaited_elsewhere(self) -> bool:
        """Return whether another task or thread is reading or following it: then an equal request is not a retry."""
        return self._is_left_elsewhere and self._is_in_use

    @property
    def is_in_doubt(self) -> bool:
        """Return whether another task or thread has it, and may continue reading or have dropped it: we cannot tell."""
        return not self.leads_on and self._is_left_elsewhere and not self._is_in_use

    @property
    def _is_left_elsewhere(self) -> bool:
        # Its reader, in another thread, may end it at any moment: look once.
        reader = self._caller
        is_pending = self.leads_on or (self._is_final and not self._has_ended)
        return is_pending and reader is not None and reader.is_elsewhere

    @property
    def _is_in_use(self) -> bool:
        reader = self._caller
        return self._is_being_read or (reader is not None and reader.is_in_call)

    def ended(self) -> None:
        """Note that it was read to its end. A response that was closed before has none."""
        if self._has_broken_off:
            return
        self._has_ended = True
        if not self.leads_on:
            self._caller = None

    def broke_off(self) -> None:
        """Note that it cannot be read to its end, or cannot be followed."""
        was_settled, self._has_ended, self._has_broken_off, self._caller = self.is_settled, False, True, None
        reopened = self._on_reopened() if was_settled else None
        if reopened is not None:
            reopened()

    def closed(self) -> None:
        """Note that nobody continues reading."""
        if not self._has_ended:
            self.broke_off()

    def not_followed(self) -> None:
        """Note that a redirect was returned, and is itself the response."""
        self.leads_on = False
        if self._has_ended:
            self._caller = None

    def left_to_reader(self) -> None:
        """Note that the client returns it before it is read, so that its call no longer counts as reading it."""
        if self._caller is not None and not self.leads_on:
            self._caller.leaves_call()

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Mark that somebody reads from it in this block: until then an equal request elsewhere is not a retry."""
        if not self._is_being_read and self._caller is not None:
            self._caller = Caller()
        outer, self._is_being_read = self._is_being_read, True
        try:
            yield
        finally:
            self._is_being_read = outer

    @contextmanager
    def handed_out(self) -> Iterator[None]:
        """Mark that its reader is processing a part of it, which we cannot observe."""
        outer, self._is_being_read = self._is_being_read, False
        try:
            yield
        finally:
            self._is_being_read = outer


@contextmanager
def breaking_off(answer: Answer) -> Iterator[None]:
    """Watch a part of a response being read: on an exception, the response has no end."""
    try:
        with answer.being_read():
            yield
    except GeneratorExit:
        # Its reader has stopped, maybe after its end.
        answer.closed()
        raise
    except BaseException:
        answer.broke_off()
        raise


@contextmanager
def watching(answer: Answer) -> Iterator[None]:
    """Watch a response being read to its end."""
    with breaking_off(answer):
        yield
    answer.ended()
