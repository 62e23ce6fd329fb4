"""Decide when an answer counts: after it was read to its end, and after its redirect, if it is one, was followed.

Whoever closes an answer early, or gets an error while it is read (a cut, a timeout, a cancellation, an encoding that
cannot be decoded), has no answer and will ask again. So the request has to keep its key until then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakMethod, ref

from onefold.http.client._retrying import settles

# Clients follow these, if they have a Location.
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

# Answers without a body, whatever their headers say.
BODYLESS: Final = frozenset({204, 304})


class Answer:
    """One answer to a request, while it is read and, if it is a redirect, followed."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes | None, on_reopened: Callable[[], None]):
        # The redirect that is to be followed, if it is one: its target may fail, and then there is no answer.
        self.leads_on = status in REDIRECTS and "Location" in headers
        self._is_final = settles(status, headers, body)
        self._has_ended = False
        # Weak, both: a request holds its answer, and what is remembered must not keep a task.
        self._on_reopened = WeakMethod(on_reopened)
        # Who has asked; None: nobody waits for anything more.
        self._asker: ref[Any] | None = ref(_asker())

    @property
    def is_settled(self) -> bool:
        """Whether nothing else can come of its request."""
        return self._is_final and self._has_ended and not self.leads_on

    @property
    def is_awaited_elsewhere(self) -> bool:
        """Whether another task or thread is still reading it, or following it: then an equal request is no retry."""
        is_awaited = self.leads_on or (self._is_final and not self._has_ended)
        asker = self._asker() if is_awaited and self._asker is not None else None
        return asker is not None and asker is not _asker() and not _is_over(asker)

    def ended(self) -> None:
        """Note that it was read to its end."""
        self._has_ended = True

    def broke_off(self) -> None:
        """Note that it cannot be read to its end, or not be followed."""
        was_settled, self._has_ended, self._asker = self.is_settled, False, None
        reopened = self._on_reopened() if was_settled else None
        if reopened is not None:
            reopened()

    def closed(self) -> None:
        """Note that nobody reads on."""
        if not self._has_ended:
            self.broke_off()

    def not_followed(self) -> None:
        """Note that a redirect was handed out, and is itself the answer."""
        self.leads_on = False


@contextmanager
def breaking_off(answer: Answer) -> Iterator[None]:
    """Watch a part of an answer being read: whatever is raised inside, it has no end."""
    try:
        yield
    except BaseException:
        answer.broke_off()
        raise


@contextmanager
def watching(answer: Answer) -> Iterator[None]:
    """Watch an answer being read to its end."""
    with breaking_off(answer):
        yield
    answer.ended()


def _asker() -> Any:
    """Return the running task, or the thread outside of one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread() if task is None else task


def _is_over(asker: Any) -> bool:
    return asker.done() if isinstance(asker, asyncio.Future) else not asker.is_alive()
