"""Run a sync view inside a claim: what the adapters of Django and Flask share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain
from typing import Final, NamedTuple, Unpack

from onefold import Guard, OnefoldError
from onefold.http._answers.rules import NotFinal, ServerFailed
from onefold.http._exchange.deliveries import deliver
from onefold.http._exchange.rules import Exchange, GuardRequest, Options, known
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
        """Run the view once for this key. None: it ran now, and its own response stands; else the response to send.

        `play` raises `ServerFailed` from an error of the view that its framework has to see; it propagates from here.
        `is_unmatched` says, after the run, whether the framework has found no view. A decorated one is found.
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
            outcome = deliver(self.guard, guard_request, perform, self._policy)
        except NotFinal as unsettled:
            failures = [unsettled] if isinstance(unsettled, ServerFailed) else []
        except OnefoldError as error:
            return self.exchange.refused(error)
        else:
            # A probe may have answered in place of a view that failed.
            if outcome.replayed or not made or outcome.value is not made[0]:
                return self.exchange.replay(outcome)
        if failures and failures[0].__cause__ is not None:
            raise failures[0].__cause__
        return None


# How long a stream is read before it is sent. One that has not ended by then is passed on, and its body is not kept.
READ_SECONDS: Final = 30.0


class Captured(NamedTuple):
    """A streaming body as far as it was read: in whole, or up to the limit."""

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
        """Take this part. False: it was the last one that fits."""
        self.parts.append(part)
        self._size += len(part)
        return self._size <= self._limit and time.monotonic() < self._ends


def captured(parts: Iterator[bytes], limit: int) -> Captured:
    """Read a stream to its end before it is sent, or until it is longer than what is remembered."""
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
