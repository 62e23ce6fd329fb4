"""The headers of a dead letter, by the same names on every broker with text headers; and which headers fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

# The prefix of our headers is `x-onefold-`. A sender's header that only shares the prefix is the sender's.
REASON_HEADER: Final = "x-onefold-reason"
# The digest of the key, as in logs and `onefold show`.
DIGEST_HEADER: Final = "x-onefold-digest"
DROPPED_HEADER: Final = "x-onefold-dropped-headers"
OPERATION_HEADER: Final = "x-onefold-operation"
# When it was buried, for brokers that do not tell: seconds since 1970.
TIME_HEADER: Final = "x-onefold-time"

REASON_MAX: Final = 1_000

# The pause before a dead-letter queue that does not take a message is tried again.
DEAD_LETTER_DELAY: Final = 5.0


def plain(text: str) -> str:
    """Return the text with unencodable characters replaced."""
    return text.encode(errors="replace").decode()


def fitting(
    headers: Mapping[str, Any], names: Iterable[str], size: Callable[[str, Any], float], room: float
) -> dict[str, Any]:
    """Return those of the named headers that fit, and `DROPPED_HEADER` with the names of the others.

    The smallest come first, so that the fewest are lost.
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for needed, name in sorted((size(name, headers[name]), name) for name in names):
        room -= needed
        if room >= 0:
            kept[name] = headers[name]
        else:
            dropped.append(name)
    return kept | ({DROPPED_HEADER: plain(", ".join(reversed(dropped)))[:REASON_MAX]} if dropped else {})
