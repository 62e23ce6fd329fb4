"""Recognize responses that come from a router: no handler has run, so nothing is remembered. Pure.

Three responses are a router's: 405; a redirect to the same URL with or without its trailing slash; and a 404 if the
framework says that no route has matched. Any other response is the application's: if a handler's response is mistaken
for a router's, it is not remembered, and each retry has its effect again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import SplitResultBytes, unquote_to_bytes, urlsplit

from onefold.http._shared.messages import Answer, Request

# A handler that has done something redirects its client with 302 or 303, which are not here.
REDIRECTS: Final = frozenset({301, 307, 308})
NOT_FOUND: Final = 404
METHOD_NOT_ALLOWED: Final = 405

# For these it matters whether the framework has found a route.
TOLD_BY_THE_FRAMEWORK: Final = REDIRECTS | {NOT_FOUND}

# Default ports, which some frameworks leave out of a URL, and others do not.
DEFAULT_PORT: Final = re.compile(r":(80|443)?$")


def is_of_routing(answer: Answer, request: Request, *, unmatched: bool | None) -> bool:
    """Return whether a router made this response to the request.

    `unmatched` is what the framework reports: it has found no route, or (False) a handler has run. None: unknown.
    """
    if answer.status in REDIRECTS:
        places = [value for name, value in answer.headers if name.lower() == b"location"]
        return unmatched is not False and len(places) == 1 and _adds_or_takes_a_slash(places[0], request)
    return answer.status == METHOD_NOT_ALLOWED or (answer.status == NOT_FOUND and unmatched is True)


def _adds_or_takes_a_slash(location: bytes, request: Request) -> bool:
    """Return whether this is the URL of the request, except for the trailing slash.

    A router keeps the host and the query unchanged.
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
    """Return the path that was sent, and the rest that a prefix-stripping mount has left: its router knows no more."""
    left = request.path_below_mounts
    return [request.path] if left is None else [request.path, left]


def _differs_by_a_slash(there: SplitResultBytes, path: str) -> bool:
    # A URL with only a host has the path "/"; a router's path always begins there.
    found = unquote_to_bytes(there.path) or b"/"
    # ASGI decodes a path as UTF-8, WSGI as Latin-1.
    candidates = [path.encode(encoding, "replace") for encoding in ("utf-8", "latin-1")]
    return any(found != here and found.rstrip(b"/") == here.rstrip(b"/") for here in candidates)


def unmatched_asgi(scope: Mapping[str, Any]) -> bool | None:
    """Return whether a router of Starlette (and so FastAPI's) has seen this scope, and matched none of its routes.

    False: it has found a handler. None: unknown.
    """
    if "router" not in scope:
        return None
    endpoint = scope.get("endpoint")
    try:
        return endpoint is None or _matches_nothing(endpoint, scope)
    except Exception:  # noqa: BLE001 - routes that are not Starlette's
        return None


def _matches_nothing(endpoint: Any, scope: Mapping[str, Any]) -> bool | None:
    """Return whether a mount has matched, and no route inside it.

    The scope does not show this: a middleware inside the mount may have passed on a copy, in which a route was found.
    So the routes are checked.
    """
    routes = getattr(endpoint, "routes", None)
    if routes is None:
        # Another application may have its own router.
        return False if inspect.isroutine(endpoint) or inspect.isclass(endpoint) else None
    for route in routes:
        match, found = route.matches(dict(scope))
        if match.name == "FULL":
            return _matches_nothing(found.get("endpoint"), {**scope, **found})
    return True


def unmatched_wsgi(environ: Mapping[str, Any]) -> bool | None:
    """Return whether Flask has seen this request, and found no rule for it. False: it has found a view.

    None: unknown.
    """
    request = environ.get("werkzeug.request")
    if getattr(request, "routing_exception", None) is not None:
        return True
    return False if getattr(request, "url_rule", None) is not None else None
