"""No line that a command says shows the password of a URL, wherever on the command line that URL was written.

A URL in the wrong place (the file of `lint`, a digest) is quoted by whoever refuses it, and is no URL to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from onefold.stores.opening import without_password

_URL: Final = re.compile(r"[\w+.-]+://\S*[@?]\S*")

# A URL with a password, as it is typed; before it may stand the name of an option. Any character may be in a password.
_TYPED: Final = re.compile(r"([\w+.-]+)://([^:/?#@]*):.*@", re.DOTALL)

# What was typed for this run of a command: the beginnings of URLs after which a password comes.
_beginnings: list[tuple[str, str]] = []


def remember_typed(arguments: Sequence[str]) -> None:
    """Note the arguments of the command line that is about to be run."""
    _beginnings[:] = [(found[1], found[2]) for one in arguments if (found := _TYPED.search(one))]


def masked(line: str) -> str:
    """Return the line without the passwords of the URLs that it quotes, whole, escaped, or cut."""
    for scheme, user in _beginnings:
        begins = rf"({re.escape(scheme)}:/{{1,2}}{re.escape(user)}:)(?!\*\*\*@)"
        # To the last @ of the line: a password may have one. Without any it was cut, and all that follows is of it.
        line = re.sub(rf"{begins}(?:.*@|.*\Z)", _without_rest, line, flags=re.DOTALL)
    return _URL.sub(lambda url: without_password(url[0]), line)


def _without_rest(quoted: re.Match[str]) -> str:
    return f"{quoted[1]}***{'@' if quoted[0].endswith('@') else ''}"
