"""Find the path that an ASGI request was sent to, whatever mounts it came through. Pure.

A Starlette mount leaves `path` unchanged. Litestar strips the prefix of a mount, and normalizes slashes. `raw_path`,
which most servers provide, is what the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

SLASHES: Final = re.compile("//+")

# A path in which nothing is escaped, no slash is doubled, and no query follows.
PLAIN: Final = re.compile(rb"(?:/[!-$&-.0->@-~]+)+/?|/")


class Path(NamedTuple):
    """The path of a request, and the part of it that a retry has to repeat: usually the same.

    `below` is the path that a mount has left, if a router below can know no more.
    """

    whole: str
    compared: str | list[str]
    below: str | None = None


def path_of(scope: Mapping[str, Any]) -> Path:
    """Return the whole path, with the prefixes of all mounts.

    If an outer layer has written another path into the scope, that is the path; the path that was sent is also
    compared, because it may identify the caller.
    """
    path: str = scope["path"]
    raw = scope.get("raw_path")
    if isinstance(raw, bytes) and PLAIN.fullmatch(raw) and raw.decode() == path:
        # Nothing is escaped, and no mount has changed it: so it is for most requests.
        return Path(path, path)
    root = str(scope.get("root_path") or "").rstrip("/")
    if not isinstance(raw, bytes) or not raw:
        return Path(path, path if f"{path}/".startswith(f"{root}/") else root + path)
    # Some include the query.
    escaped = raw.partition(b"?")[0].decode("latin-1")
    # Servers decode bytes that are not UTF-8 so that all of them look the same.
    sent = unquote(escaped, errors="surrogateescape")
    whole = SLASHES.sub("/", unquote(escaped))
    here = SLASHES.sub("/", path).rstrip("/")
    if whole.rstrip("/") == here:
        return Path(path, sent)
    if whole.rstrip("/").endswith(here):
        # A mount has stripped its prefix. One that writes it into `root_path` has told its router.
        is_told = whole.rstrip("/") == SLASHES.sub("/", root + path).rstrip("/")
        return Path(whole, sent, None if is_told else path)
    return Path(path, [path, sent])
