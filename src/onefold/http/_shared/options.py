"""Check the options of a middleware, a route or a view when they are given, and suggest a correction. Pure.

An unchecked option fails at each request or, worse, silently guards nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from onefold import UsageError
from onefold._checks import did_you_mean

# RFC 9110: methods and names of headers are tokens.
TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

# A method may be custom; one that is close to one of these is a typo.
METHODS_KNOWN: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
SLIP: Final = 0.75

# How frameworks write a path parameter: `{id}`, `<int:id>`, `[id]`, `[[...id]]`, `:id`.
PLACEHOLDER: Final = re.compile(r"\{[^}]*\}|<[^>]*>|\[+[^\]]*\]+|(?<=/):[A-Za-z_]\w*[?*+]?")

# Characters of a regular expression that occur in no path: a group, a class, repetition, both anchors.
EXPRESSION: Final = re.compile(r"\(\?|\\|^\^|\$$|(?<!\*)\.[*+]|\[[^\]]*\][*+?{]")

# Our functions that create option values.
MAKERS: Final = {
    "by_header": "by_header('X-Api-Key')",
    "by_argument": "by_argument('user')",
    "body_field": "body_field('id')",
    "header_key": "header_key('X-Event-Id')",
}


def check_names(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an unknown option."""
    names = list(known)
    for name in given:
        if name not in names:
            raise UsageError(f"{owner} has no option {name!r}{nearest(name, names)}")


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the tail of an error: the closest known word, or all of them."""
    choices = list(known)
    return did_you_mean(word, choices) or f": it is one of {', '.join(choices)}"


def check_function(option: str, given: Any, arguments: int, write: str) -> None:
    """Refuse anything that cannot be called with this many arguments, or that has to be awaited."""
    maker = getattr(given, "__name__", "")
    if maker in MAKERS and str(getattr(given, "__module__", "")).startswith("onefold.http."):
        raise UsageError(f"{option}={maker} is not called: write {option}={MAKERS[maker]}")
    if not callable(given):
        raise UsageError(f"{option}={given!r:.60} is not a function: write {write}")
    if inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(getattr(given, "__call__", None)):  # noqa: B004
        raise UsageError(f"{option}= is an async function, and nobody awaits it: write a plain function")
    try:
        inspect.signature(given).bind(*[None] * arguments)
    except ValueError:
        # It is written in C, and has no signature.
        return
    except TypeError as error:
        raise UsageError(f"{option}= is a function that cannot be called ({error}): write {write}") from error


def check_not_async(option: str, found: object) -> None:
    """Refuse an awaitable returned by a function that looks plain."""
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()
        raise UsageError(f"{option}= returned an awaitable, which nobody awaits: it has to be a plain function")


def check_yes_or_no(option: str, given: object) -> None:
    if not isinstance(given, bool):
        raise UsageError(f"{option}={given!r:.60} is neither True nor False")


def check_bytes(option: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise UsageError(f"{option}={given!r:.60} is not a number of bytes: write {option}=1_048_576, or 0 for no body")


def one_of(option: str, given: object, choices: tuple[str, ...]) -> str:
    """Return one of these words."""
    if given not in choices:
        near = did_you_mean(given, choices)
        raise UsageError(f"{option}={given!r:.60} is not one of {', '.join(map(repr, choices))}{near}")
    return str(given)


def check_link(option: str, given: object) -> None:
    """Check that a URL can be put into a header."""
    if given is None:
        return
    if not isinstance(given, str) or not re.fullmatch(r"[!#-;=?-~]+", given):
        raise UsageError(f"{option}={given!r:.60} is not a URL: write {option}='https://example.com/idempotency'")


def header_name(maker: str, name: object) -> str:
    """Return the name of a header. An invalid one would never be found."""
    if not isinstance(name, str) or not TOKEN.fullmatch(name):
        raise UsageError(f"{maker}({name!r:.60}) has to name a header: write {MAKERS[maker]}")
    return name


def methods(option: str, given: Any) -> frozenset[str]:
    """Return the methods, in upper case."""
    example = f"{option}=['POST', 'PATCH']"
    if isinstance(given, str):
        raise UsageError(f"{option}={given!r:.60} takes several methods: write {option}=[{given.upper()!r:.60}]")
    found = _several(option, given, f"write {example}")
    if not found:
        raise UsageError(f"{option}= names no method, so nothing would be guarded: write {example}")
    return frozenset(_method(option, one, example) for one in found)


def _method(option: str, given: object, example: str) -> str:
    if not isinstance(given, str) or not TOKEN.fullmatch(given):
        raise UsageError(f"{option}= has {given!r:.60}, which is not an HTTP method: write {example}")
    method = given.upper()
    near = "" if method in METHODS_KNOWN else did_you_mean(method, METHODS_KNOWN, SLIP)
    if near:
        raise UsageError(f"{option}= has {given!r}{near}")
    return method


def paths(option: str, given: Any) -> tuple[str, ...]:
    """Return the paths. An impossible one is refused: it would silently match no request."""
    if isinstance(given, str):
        raise UsageError(f"{option}={given!r} takes several paths: write {option}=[{given!r}]")
    found = _several(option, given, f"write paths such as {option}=['/payments']")
    for one in found:
        if not isinstance(one, str):
            raise UsageError(f"{option}= has {one!r:.60}, which is not a path: write '/payments'")
        if not one.startswith(("/", "*")):
            raise UsageError(f"{option}= has {one!r}, but a path begins with a slash: write {_path_of(one)!r}")
    return found


def patterns(option: str, given: Any) -> tuple[str, ...]:
    """Return the path patterns, in which `*` matches any text."""
    found = given if isinstance(given, str) else _several(option, given, f"write paths such as {option}=['/payments']")
    for one in () if isinstance(found, str) else found:
        if isinstance(one, str):
            _check_pattern(option, one)
    return paths(option, found)


def _check_pattern(option: str, one: str) -> None:
    """Refuse a pattern that looks valid, but matches no path: nobody would be asked for a key."""
    if EXPRESSION.search(one):
        raise UsageError(
            f"{option}= has {one!r}, a regular expression, which no path matches. `*` stands for any text: '/orders/*'"
        )
    if PLACEHOLDER.search(one):
        raise UsageError(f"{option}= has {one!r}, but `*` stands for any text: write {PLACEHOLDER.sub('*', one)!r}")
    path = re.split(r"[?#]", one, maxsplit=1)[0].strip()
    if path != one:
        raise UsageError(f"{option}= has {one!r}, but a path ends before its query: write {path!r}")
    if unquote(one) != one:
        raise UsageError(f"{option}= has {one!r}, but a path is compared without escapes: write {unquote(one)!r}")


def matching(chosen: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a predicate for these paths. A trailing slash makes no difference, in the pattern or in the request."""
    both = [(pattern, bare(pattern)) for pattern in chosen]

    def matches(path: str) -> bool:
        shorter = bare(path)
        return any(fnmatchcase(path, whole) or fnmatchcase(shorter, short) for whole, short in both)

    return matches


def bare(path: str) -> str:
    """Return the path without a trailing slash: for most frameworks both are one, or one redirects to the other."""
    return path.rstrip("/") or "/"


def _path_of(text: str) -> str:
    """Return the intended path of a text without its slash, or of a whole URL."""
    return "/" + (urlsplit(text).path if "://" in text else text).lstrip("/")


def _several(option: str, given: Any, write: str) -> tuple[Any, ...]:
    try:
        return tuple(given)
    except TypeError:
        raise UsageError(f"{option}={given!r:.60} is not understood: {write}") from None
