"""A dead letter, the interface of a broker's dead letters, and which of them are wanted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from onefold.queues._shared.bypasses import BYPASS_HEADER
from onefold.queues._shared.dead_letters import (
    DIGEST_HEADER,
    DROPPED_HEADER,
    OPERATION_HEADER,
    REASON_HEADER,
    TIME_HEADER,
)

# What a letter says about itself on every broker. A message that goes back carries none of it: an earlier permission
# to bypass would be used once more.
ABOUT_LETTERS: Final = frozenset(
    {REASON_HEADER, DIGEST_HEADER, OPERATION_HEADER, TIME_HEADER, DROPPED_HEADER, BYPASS_HEADER}
)

UNKNOWN_ORIGIN: Final = "it does not say where it came from: name the place with --back-to"


class NotSent(Exception):
    """This letter cannot be sent back, and stays; others may be."""


class BrokerLost(Exception):
    """The broker does not answer, refuses the login, or has no such dead letters."""


class Letter(NamedTuple):
    """A dead letter."""

    # Where it is among the dead letters, in the broker's own terms.
    position: str
    body: bytes
    headers: Mapping[str, Any]
    # Where it came from; empty if that is not known, and then `problem` says why.
    origin: str
    # How long ago it was buried; None if the broker does not tell.
    age: float | None
    # Its reason, if it was the broker that buried it.
    broker_reason: str = ""
    problem: str = UNKNOWN_ORIGIN
    # What whoever looks at it has to know.
    warning: str = ""
    native: Any = None

    @property
    def reason(self) -> str:
        return text(self.headers.get(REASON_HEADER, self.broker_reason))

    @property
    def operation(self) -> str:
        return text(self.headers.get(OPERATION_HEADER, ""))

    @property
    def digest(self) -> str:
        """Return the digest of its record; empty if it has no key, or the broker buried it."""
        return text(self.headers.get(DIGEST_HEADER, ""))


class DeadLetters(Protocol):
    """The dead letters of one queue, stream or topic."""

    def letters(self) -> Iterator[Letter]:
        """Yield those that are there now, the oldest first; not those that come meanwhile."""

    def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
        """Send it back, with these headers instead of those about a letter, and return once that is confirmed.

        Raises `NotSent` if the place does not exist or does not take it.
        """

    def remove(self, letter: Letter) -> None:
        """Remove it from the dead letters, for good."""

    def close(self) -> None:
        """Leave the others where they are, and disconnect."""


Open = Callable[[str, str], DeadLetters]


class Wanted(NamedTuple):
    """Which letters are meant."""

    # In the reason, whatever the case.
    matching: str = ""
    operation: str | None = None
    digests: frozenset[str] = frozenset()
    older_than: float | None = None
    newer_than: float | None = None
    limit: int = 1_000

    def matches(self, letter: Letter) -> bool:
        """Return whether a letter is one of them. One of unknown age is neither older nor newer than anything."""
        return (
            self.matching.lower() in letter.reason.lower()
            and self.operation in (None, letter.operation)
            and (not self.digests or letter.digest in self.digests)
            and (self.older_than is None or (letter.age is not None and letter.age >= self.older_than))
            and (self.newer_than is None or (letter.age is not None and letter.age <= self.newer_than))
        )


def chosen(letters: Iterator[Letter], wanted: Wanted) -> Iterator[Letter]:
    """Yield the letters that are wanted, up to the limit."""
    left = wanted.limit
    for letter in letters:
        if wanted.matches(letter):
            yield letter
            left -= 1
            if not left:
                return


def text(value: object) -> str:
    """Return the value of a header as text; a broker may have bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def kept(headers: Mapping[str, Any], ours: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the headers that a message had before it became a letter; `ours` are those of this broker's letters."""
    return {name: value for name, value in headers.items() if name not in ABOUT_LETTERS and name not in ours}
