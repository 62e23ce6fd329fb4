"""Run a sync view inside a claim: the common part of the Django and Flask adapters."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain
from typing import Final, NamedTuple, Unpack

from onefold import Guard, OnefoldError
from onefold.http._answers.rules import NotFinal, ServerFailed
from onefold.http._exchange.deliveries import deliver
from onefold.http._exchange.rules import Ended, Exchange, GuardRequest, Options, known
from onefold.http._shared.messages import Answer, Request
from onefold.http.wsgi import blocking

# An async view is awaited, and its guard is called in a thread.
NEEDS: Final = "views of Django and Flask need a Guard, async views and those under ASGI too"


class Views:
    """A guard, and the rules of the header, for views."""

    def __init__(self, *, guard: Guard, **options: Unpack[Options]) -> None:
        self.guard = blocking(guard, NEEDS)
        self.exchange = Exchange(**known(type(self).__name__, options))
        self._policy = self.exchange.policy(self.guard)

    def deliver(
        self,
        guard_request: GuardRequest,
        asking: Request,
        play: Callable[[], Answer],
        is_unmatched: Callable[[], bool] = lambda: False,
    ) -> Answer | None:
        """Run the view once for this key. Return None if it ran now and its response stands, else the one to send.

        `play` raises `ServerFailed` from a view's error that its framework has to see; it propagates from here.
        `is_unmatched` tells, after the run, whether the framework has found no view. A decorated one is found.
        """
        made: list[Answer] = []
        failures: list[ServerFailed] = []

        def perform() -> Answer:
            try:
                answer = play()
                made.append(self.exchange.answered(asking, answer, unmatched=is_unmatched()))
            except ServerFailed as failure:
                failures.append(failure)
                made.append(self.exchange.broken(failure))
            return made[0]

        try:
            ended: Ended = deliver(self.guard, guard_request, perform, self._policy)
        except NotFinal as unsettled:
            ended, failures = unsettled, [unsettled] if isinstance(unsettled, ServerFailed) else []
        except OnefoldError as error:
            ended = error
        answer = self.exchange.instead(ended, made[0] if made else None)
        if answer is None and failures and failures[0].__cause__ is not None:
            raise failures[0].__cause__
        return answer


# How long a stream is read before it is sent. One that has not ended by then is passed on, and its body is not kept.
READ_SECONDS: Final = 30.0


class Captured(NamedTuple):
    """A streaming body as far as it was read: the whole, or up to the limit."""

    head: list[bytes]
    # None: it was longer than the limit.
    whole: bytes | None
    rest: Iterator[bytes]

    @property
    def parts(self) -> Iterator[bytes]:
        """Yield all of it, for the sender."""
        return chain(self.head, self.rest)


class _Head:
    """The beginning of a stream, up to the limit in bytes and in time."""

    def __init__(self, limit: int) -> None:
        self.parts: list[bytes] = []
        self._limit = limit
        self._size = 0
        self._ends = time.monotonic() + READ_SECONDS

    def takes(self, part: bytes) -> bool:
        """Add this part. Return False if it was the last one that fits."""
        self.parts.append(part)
        self._size += len(part)
        return self._size <= self._limit and time.monotonic() < self._ends


def captured(parts: Iterator[bytes], limit: int) -> Captured:
    """Read a stream to its end before it is sent, or until it is longer than the limit."""
    head = _Head(limit)
    for part in parts:
        if not head.takes(part):
            return Captured(head.parts, None, parts)
    return Captured(head.parts, b"".join(head.parts), parts)


async def captured_async(parts: AsyncIterator[bytes], limit: int) -> tuple[list[bytes], bytes | None]:
    """Read an async stream like `captured`: return its beginning, and all of it if it has ended."""
    head = _Head(limit)
    async for part in parts:
        if not head.takes(part):
            return head.parts, None
    return head.parts, b"".join(head.parts)
