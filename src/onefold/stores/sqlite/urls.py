"""Read the URL of an SQLite file: `sqlite:///relative.db` or `sqlite:////absolute/path.db`."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote, urlsplit

from onefold._checks import yes_or_no
from onefold.errors import UsageError
from onefold.stores.opening import without_password
from onefold.stores.urls import options_of

OPTIONS: Final = ("sync", "busy_timeout", "auto_schema", "purge")


def parsed(url: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the options of a URL. Raises `UsageError` for one that cannot be meant."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # Two slashes, followed by an invalid host name.
        raise _misread(url) from None
    if parts.netloc or parts.fragment or not parts.path.startswith("/"):
        raise _misread(url)
    options: dict[str, Any] = {**options_of(parts.query, OPTIONS, without_password(url))}
    for name in ("auto_schema", "purge"):
        if name in options:
            options[name] = yes_or_no(options[name], name)
    return unquote(parts.path[1:]), options


def _misread(url: str) -> UsageError:
    return UsageError(
        f"{without_password(url)!r}: write sqlite:///relative.db or sqlite:////absolute/path.db, with %23 for # "
        "and %3F for ? in the path"
    )
