"""Send dead letters back, one by one. At every point a kill loses nothing: the order of its steps sees to that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from onefold.redrive.letters import DeadLetters, Letter, NotSent

# Returns the headers that a letter gets; raises `NotSent`.
Headers = Callable[[Letter], Mapping[str, str]]


class Sent(NamedTuple):
    """What became of a letter: why it stays; empty if it is back where it came from."""

    letter: Letter
    to: str
    problem: str = ""


def planned(letter: Letter, to: str | None) -> Sent:
    """Return where a letter would go; without a place, why it stays."""
    where = to or letter.origin
    return Sent(letter, where, "" if where else letter.problem)


def sending(dead: DeadLetters, letters: Iterable[Letter], to: str | None, headers: Headers) -> Iterator[Sent]:
    """Send the letters back in their order, and yield what became of each.

    1. Its permission to bypass is written, if it gets one: the same, if it was written before.
    2. It is published, and the broker confirms that.
    3. It is removed from the dead letters.

    A kill before 2 leaves it where it is. One between 2 and 3 leaves it in both places, and its next redrive is a
    duplicate, with the same permission.
    """
    for letter in letters:
        plan = planned(letter, to)
        if not plan.problem:
            try:
                dead.send(letter, plan.to, headers(letter))
            except NotSent as error:
                plan = plan._replace(problem=str(error))
            else:
                dead.remove(letter)
        yield plan


def plainly(_letter: Letter) -> Mapping[str, str]:
    """Send it back as it came: what is finished is absorbed."""
    return {}
