"""Say which path an ASGI request was sent to, whatever mounts it has come through. Pure.

A mount of Starlette leaves `path` as it is, and one of Litestar takes its own prefix away, and changes the slash at the
end. `raw_path`, which most servers give, is what the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote


class Path(NamedTuple):
    """The path of a request, and what a retry has to repeat of it: mostly the same."""

    whole: str
    compared: str | list[str]


def path_of(scope: Mapping[str, Any]) -> Path:
    """Return the whole path, with the prefixes of all mounts.

    Where something above has written another path into the scope, that is the path; what was sent is compared besides,
    because it may say whose request it is.
    """
    path: str = scope["path"]
    sent = _sent(scope)
    if sent is None:
        root = str(scope.get("root_path") or "").rstrip("/")
        return Path(path, path if f"{path}/".startswith(f"{root}/") else root + path)
    if sent.rstrip("/").endswith(path.rstrip("/")):
        # Nothing is missing, or a mount has taken its prefix away.
        return Path(sent, sent)
    if path.endswith(sent):
        # A server has put its own prefix before it.
        return Path(path, path)
    return Path(path, [path, sent])


def _sent(scope: Mapping[str, Any]) -> str | None:
    """Return the path as the client sent it, if the server says so. Some give it with its query."""
    raw = scope.get("raw_path")
    if not isinstance(raw, bytes) or not raw:
        return None
    # As servers decode it, but for bytes that are no UTF-8: to them, different ones would look the same.
    return unquote(raw.partition(b"?")[0].decode("latin-1"), errors="surrogateescape")
