"""A view inside a claim, blocking: what Django's and Flask's adapters share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple, Unpack

from onefold import Guard, OnefoldError
from onefold.http._deliveries import deliver
from onefold.http._exchange import Ask, Exchange, Options, known
from onefold.http._messages import Answer
from onefold.http._rules import NotFinal, ServerFailed
from onefold.http.wsgi import blocking


class Views:
    """A guard, and the rules of the header, for views."""

    def __init__(self, *, guard: Guard, **options: Unpack[Options]) -> None:
        self.guard = blocking(guard)
        self.exchange = Exchange(**known(type(self).__name__, options))
        self._policy = self.exchange.policy(self.guard)

    def deliver(self, asked: Ask, play: Callable[[], Answer]) -> Answer | None:
        """Run the view once for this key. None: it ran now, and its own answer stands; else the answer to send instead.

        `play` raises `ServerFailed` from an error of the view that its framework is to see; it comes out of here.
        """
        made: list[Answer] = []
        failures: list[ServerFailed] = []

        def perform() -> Answer:
            try:
                made.append(self.exchange.settled(play()))
            except ServerFailed as failure:
                failures.append(failure)
                made.append(self.exchange.broken(failure))
            return made[0]

        try:
            outcome = deliver(self.guard, asked, perform, self._policy)
        except NotFinal as unsettled:
            failures = [unsettled] if isinstance(unsettled, ServerFailed) else []
        except OnefoldError as error:
            return self.exchange.refused(error)
        else:
            # A probe may have answered in the place of a view that failed.
            if outcome.replayed or not made or outcome.value is not made[0]:
                return self.exchange.replay(outcome)
        if failures and failures[0].__cause__ is not None:
            raise failures[0].__cause__ from None
        return None


class Captured(NamedTuple):
    """A streaming body as far as it was read: in whole, or up to the limit."""

    head: list[bytes]
    # None: it was longer than the limit.
    whole: bytes | None
    rest: Iterator[bytes]

    @property
    def parts(self) -> Iterator[bytes]:
        """All of it, for who sends it."""
        return chain(self.head, self.rest)


def captured(parts: Iterator[bytes], limit: int) -> Captured:
    """Read a stream to its end, before anybody sees it, or until it is longer than what is remembered."""
    head, size = [], 0
    for part in parts:
        head.append(part)
        size += len(part)
        if size > limit:
            return Captured(head, None, parts)
    return Captured(head, b"".join(head), parts)
