"""Mask the passwords of URLs in every line of output, wherever on the command line a URL was written.

A URL in the wrong place (as the file of `lint`, as a digest) is quoted by the code that refuses it, which does not know
that it is a URL.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from onefold.stores.opening import without_password

_URL: Final = re.compile(r"[\w+.-]+://\S*[@?]\S*")

# A URL with a password, as it is typed, perhaps after the name of an option. A password may contain any character.
_TYPED: Final = re.compile(r"([\w+.-]+)://([^:/?#@]*):.*@", re.DOTALL)

# The typed URLs of this run, up to their passwords.
_beginnings: list[tuple[str, str]] = []


def remember_typed(arguments: Sequence[str]) -> None:
    """Remember the arguments of the command line that is about to be run."""
    _beginnings[:] = [(found[1], found[2]) for one in arguments if (found := _TYPED.search(one))]


def masked(line: str) -> str:
    """Return the line without the passwords of the URLs that it quotes, whole, escaped, or cut."""
    for scheme, user in _beginnings:
        begins = rf"({re.escape(scheme)}:/{{1,2}}{re.escape(user)}:)(?!\*\*\*@)"
        # Up to the last @ of the line: a password may contain one. Without any it was cut, and everything after belongs
        # to it.
        line = re.sub(rf"{begins}(?:.*@|.*\Z)", _without_rest, line, flags=re.DOTALL)
    return _URL.sub(lambda url: without_password(url[0]), line)


def _without_rest(quoted: re.Match[str]) -> str:
    return f"{quoted[1]}***{'@' if quoted[0].endswith('@') else ''}"
