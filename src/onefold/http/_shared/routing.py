"""Recognize what a router answered by itself: no handler has run, so that nothing is remembered. Pure.

Three answers are a router's: 405; a redirect to the same URL with, or without, the slash at the end of its path; and a
404 where the framework says that no route has matched. Any other answer is the application's: what is taken for a
router's though a handler made it is not remembered, and each retry has its effect again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import SplitResultBytes, unquote_to_bytes, urlsplit

from onefold.http._shared.messages import Answer, Request

# A handler that has done something sends its client on with 302 or 303, and these are not here.
REDIRECTS: Final = frozenset({301, 307, 308})
NOT_FOUND: Final = 404
METHOD_NOT_ALLOWED: Final = 405

# Of these it counts whether the framework has found a route.
TOLD_BY_THE_FRAMEWORK: Final = REDIRECTS | {NOT_FOUND}

# What some frameworks leave out of a URL, and others do not.
DEFAULT_PORT: Final = re.compile(r":(80|443)?$")


def is_of_routing(answer: Answer, request: Request, *, unmatched: bool | None) -> bool:
    """Whether a router made this answer to the request.

    `unmatched` is what the framework tells: it has found no route, or (False) a handler has run. None: nothing.
    """
    if answer.status in REDIRECTS:
        places = [value for name, value in answer.headers if name.lower() == b"location"]
        return unmatched is not False and len(places) == 1 and _adds_or_takes_a_slash(places[0], request)
    return answer.status == METHOD_NOT_ALLOWED or (answer.status == NOT_FOUND and unmatched is True)


def _adds_or_takes_a_slash(location: bytes, request: Request) -> bool:
    """Whether this is where the request was sent, but for the slash at the end of the path.

    A router keeps the host and the query as they are.
    """
    try:
        there = urlsplit(location.strip())
    except ValueError:
        return False
    if there.fragment or unquote_to_bytes(there.query) != unquote_to_bytes(request.query):
        return False
    return _is_same_host(there, request) and any(_differs_by_a_slash(there, path) for path in _paths_of(request))


def _is_same_host(there: SplitResultBytes, request: Request) -> bool:
    if not there.netloc:
        return not there.scheme
    return _host(there.netloc.decode("latin-1")) == _host(request.host)


def _host(text: str) -> str:
    return DEFAULT_PORT.sub("", text.strip().lower())


def _paths_of(request: Request) -> list[str]:
    """Return the path that was sent, and what a mount that takes its prefix away has left: its router knows no more."""
    left = request.path_below_mounts
    return [request.path] if left is None else [request.path, left]


def _differs_by_a_slash(there: SplitResultBytes, path: str) -> bool:
    # A URL of nothing but a host has the path "/"; a path that does not begin there is none of a router's.
    found = unquote_to_bytes(there.path) or b"/"
    # ASGI decodes a path as UTF-8, WSGI as Latin-1.
    candidates = [path.encode(encoding, "replace") for encoding in ("utf-8", "latin-1")]
    return any(found != here and found.rstrip(b"/") == here.rstrip(b"/") for here in candidates)


def unmatched_asgi(scope: Mapping[str, Any]) -> bool | None:
    """Whether a router of Starlette (and so FastAPI's) has seen this scope, and matched none of its routes.

    False: it has found a handler. None: nobody knows.
    """
    if "router" not in scope:
        return None
    endpoint = scope.get("endpoint")
    try:
        return endpoint is None or _matches_nothing(endpoint, scope)
    except Exception:  # noqa: BLE001 - routes that are not Starlette's, of which nobody knows
        return None


def _matches_nothing(endpoint: Any, scope: Mapping[str, Any]) -> bool | None:
    """Whether a mount has matched, and no route inside of it.

    The scope does not tell: a middleware inside of the mount may have handed on a copy, in which a route was found. So
    the routes are asked.
    """
    routes = getattr(endpoint, "routes", None)
    if routes is None:
        # Another application may have a router of its own.
        return False if inspect.isroutine(endpoint) or inspect.isclass(endpoint) else None
    for route in routes:
        match, found = route.matches(dict(scope))
        if match.name == "FULL":
            return _matches_nothing(found.get("endpoint"), {**scope, **found})
    return True


def unmatched_wsgi(environ: Mapping[str, Any]) -> bool | None:
    """Whether Flask has seen this request, and found no rule for it. False: it has found a view. None: nobody knows."""
    request = environ.get("werkzeug.request")
    if getattr(request, "routing_exception", None) is not None:
        return True
    return False if getattr(request, "url_rule", None) is not None else None
