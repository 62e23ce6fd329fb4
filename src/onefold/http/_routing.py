"""Recognize what a router answered by itself: no handler has run, so that nothing is remembered. Pure.

Three answers are a router's: 405; a redirect to the same path with, or without, the slash at its end; and a 404 where
the framework says that no route has matched. Any other answer is the application's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

from onefold.http._messages import Answer

# A handler that has done something sends its client on with 302 or 303, and these are not here.
REDIRECTS: Final = frozenset({301, 307, 308})
NOT_FOUND: Final = 404
METHOD_NOT_ALLOWED: Final = 405


def is_of_routing(answer: Answer, path: str, *, unmatched: bool) -> bool:
    """Whether a router made this answer to a request for `path`. `unmatched`: the framework has found no route."""
    if answer.status in REDIRECTS:
        return any(_differs_by_a_slash(value, path) for name, value in answer.headers if name.lower() == b"location")
    return answer.status == METHOD_NOT_ALLOWED or (answer.status == NOT_FOUND and unmatched)


def _differs_by_a_slash(location: bytes, path: str) -> bool:
    try:
        there = unquote_to_bytes(urlsplit(location.strip()).path)
    except ValueError:
        return False
    # ASGI decodes a path as UTF-8, WSGI as Latin-1.
    for encoding in ("utf-8", "latin-1"):
        here = path.encode(encoding, "replace")
        if there != here and there.rstrip(b"/") == here.rstrip(b"/"):
            return True
        if there.endswith(b"/") != here.endswith(b"/") and _is_end_of(here.rstrip(b"/"), there.rstrip(b"/")):
            return True
    return False


def _is_end_of(path: bytes, end: bytes) -> bool:
    """Whether it is what a mount that takes its prefix away has left of the path: its router knows no more."""
    return bool(end) and path.endswith(end)


def unmatched_asgi(scope: Mapping[str, Any]) -> bool:
    """Whether a router of Starlette (and so FastAPI's) has seen this scope, and matched none of its routes."""
    if "router" not in scope:
        return False
    endpoint = scope.get("endpoint")
    try:
        return endpoint is None or _matches_nothing(endpoint, scope)
    except Exception:  # noqa: BLE001 - routes that are not Starlette's, of which nobody knows: it is the application's
        return False


def _matches_nothing(endpoint: Any, scope: Mapping[str, Any]) -> bool:
    """Whether a mount has matched, and no route inside of it.

    The scope does not tell: a middleware inside of the mount may have handed on a copy, in which a route was found. So
    the routes are asked.
    """
    routes = getattr(endpoint, "routes", None)
    if routes is None:
        return False
    for route in routes:
        match, found = route.matches(dict(scope))
        if match.name == "FULL":
            return _matches_nothing(found.get("endpoint"), {**scope, **found})
    return True


def unmatched_wsgi(environ: Mapping[str, Any]) -> bool:
    """Whether Flask has seen this request, and found no rule for it."""
    return getattr(environ.get("werkzeug.request"), "routing_exception", None) is not None
