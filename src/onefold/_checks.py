"""Check arguments where they are given; each error names the argument and the fix."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from onefold.durations import Duration, seconds
from onefold.errors import UsageError

T = TypeVar("T")


def positive(duration: Duration, name: str) -> float:
    found = seconds(duration, name)
    if found == 0:
        raise UsageError(f"{name}={duration!r} has to be more than zero")
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


def true_or_false(given: Any, name: str) -> bool:
    """Refuse what is neither: the text "no" counts as true."""
    if not isinstance(given, bool):
        raise UsageError(f"{name}={given!r:.60} is neither True nor False")
    return given


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
            raise UsageError(f"{name}= holds {kind!r}: only subclasses of Exception can be remembered")
    return found


def error_kinds(kinds: Iterable[Any], name: str) -> tuple[Any, ...]:
    if isinstance(kinds, (str, type)):
        raise UsageError(f"{name}= takes several exceptions: write {name}=({getattr(kinds, '__name__', kinds)},)")
    try:
        found = tuple(kinds)
    except TypeError:
        raise UsageError(f"{name}={kinds!r:.60} has to be several exceptions: write {name}=(ValueError,)") from None
    for kind in found:
        if isinstance(kind, str):
            _check_named(kind, name)
        elif not _is_error(kind):
            raise UsageError(f"{name}= holds {kind!r}, which is neither an exception class nor the dotted name of one")
    return found


def _check_named(written: str, name: str) -> None:
    """Raise `UsageError` for the name of a class that would silently match no error."""
    module, _, last = written.rpartition(".")
    if not module or not all(part.isidentifier() for part in written.split(".")):
        raise UsageError(
            f"{name}= holds {written!r}, which names no exception by its module: write 'module.Class', such as "
            "'builtins.TimeoutError', or the class itself"
        )
    if (loaded := sys.modules.get(module)) is None:
        return
    found: Any = getattr(loaded, last, None)
    if not _is_error(found):
        known = [one for one, value in vars(loaded).items() if _is_error(value)]
        raise UsageError(f"{name}= holds {written!r}, and {module} has no such exception{did_you_mean(last, known)}")
    defined = f"{found.__module__}.{found.__qualname__}"
    if defined != written:
        raise UsageError(f"{name}= holds {written!r}, which is defined as {defined}: write {defined!r}")


def _is_error(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def probe(function: T, name: str) -> T:
    """Check that a function can be called with one argument, as far as can be seen."""
    import inspect

    try:
        inspect.signature(function).bind(None)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(
            f"{name}={getattr(function, '__name__', function)}: a probe is called with one argument, which is what "
            "current() returns in the handler"
        ) from error
    except ValueError:
        # Written in C, without a signature.
        return function
    return function


def with_article(noun: str) -> str:
    """Return the noun with its article, as a message says it: a str, an int."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def not_installed(driver: str, extra: str) -> UsageError:
    """Return the error of a store whose driver is missing, in the same words for all of them."""
    return UsageError(f"the driver {driver} is not installed: pip install 'onefold[{extra}]'")


# The attribute of an adapter's function that has the user's, for which it stands: messages name that one.
STANDS_FOR: Final = "_onefold_stands_for"

# How alike two words are, from 0 to 1, for one to be offered instead of the other.
ALIKE: Final = 0.6


def did_you_mean(word: object, known: Iterable[str], alike: float = ALIKE) -> str:
    """Return the tail of an error message: empty, or a question with the closest known word."""
    import difflib

    nearest = difflib.get_close_matches(str(word), list(known), n=1, cutoff=alike)
    return f": did you mean {nearest[0]!r}?" if nearest else ""
