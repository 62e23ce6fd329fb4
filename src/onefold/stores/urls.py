"""Parse the options of a store's URL strictly: an unknown option is refused, with the closest known one."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import parse_qsl

from onefold._checks import did_you_mean
from onefold.errors import UsageError


def options_of(query: str, known: Iterable[str], shown: str) -> dict[str, str]:
    """Return the options by name. `shown` is the URL as an error may show it: without a password."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    names = tuple(known)
    for name in options:
        if name not in names:
            raise UsageError(f"{shown!r}: {name!r} is not one of {', '.join(names)}{did_you_mean(name, names)}")
    return options
