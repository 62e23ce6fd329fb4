"""Check arguments where they are given; each error names the argument and the fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from onefold.durations import Duration, seconds
from onefold.errors import UsageError

T = TypeVar("T")


def positive(duration: Duration, name: str) -> float:
    found = seconds(duration, name)
    if found == 0:
        raise UsageError(f"{name}={duration!r} is zero: it has to be more")
    return found


def finite(found: float, name: str) -> float:
    if math.isinf(found):
        raise UsageError(f'{name}="forever" would wait for a dead worker forever: give it an end')
    return found


def at_least(least: int, number: Any, name: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(f"{name}={number!r} has to be a whole number, {least} or more")
    return number


def one_of(chosen: T, allowed: Sequence[str], name: str) -> T:
    if chosen not in allowed:
        raise UsageError(
            f"{name}={chosen!r} is not one of {', '.join(map(repr, allowed))}{did_you_mean(chosen, allowed)}"
        )
    return chosen


YES_OR_NO: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def yes_or_no(word: str, name: str) -> bool:
    """Parse a URL option that is on or off."""
    if word.lower() not in YES_OR_NO:
        raise UsageError(f"{name}={word!r} has to be yes or no")
    return YES_OR_NO[word.lower()]


def error_classes(kinds: Iterable[Any], name: str) -> tuple[type[Exception], ...]:
    """Return the classes, if they can be raised again as answers: no names, and no interrupts."""
    found = error_kinds(kinds, name)
    for kind in found:
        if isinstance(kind, str) or not issubclass(kind, Exception):
            raise UsageError(f"{name}= holds {kind!r}: what is remembered has to be a subclass of Exception")
    return found


def error_kinds(kinds: Iterable[Any], name: str) -> tuple[Any, ...]:
    if isinstance(kinds, (str, type)):
        raise UsageError(f"{name}= takes several exceptions: write {name}=({getattr(kinds, '__name__', kinds)},)")
    found = tuple(kinds)
    for kind in found:
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise UsageError(f"{name}= holds {kind!r}, which is neither an exception class nor the dotted name of one")
    return found


# How alike two words are, from 0 to 1, for one to be offered instead of the other.
ALIKE: Final = 0.6


def did_you_mean(word: object, known: Iterable[str], alike: float = ALIKE) -> str:
    """Return the tail of an error message: empty, or a question with the closest known word."""
    import difflib

    nearest = difflib.get_close_matches(str(word), list(known), n=1, cutoff=alike)
    return f": did you mean {nearest[0]!r}?" if nearest else ""
