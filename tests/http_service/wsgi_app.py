"""The service on bare WSGI, below the middleware."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onefold import Guard
from onefold.http._answers.status import line_of
from onefold.http.wsgi import IdempotencyMiddleware
from tests.http_service.behaviour import CONFIG, RULES, Boom, behave, options_of, raises_below


def service(environ: Any, start_response: Any) -> Iterable[bytes]:
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    answer = behave(environ["PATH_INFO"], environ["QUERY_STRING"], body)
    if answer.streamed:
        start_response(line_of(answer.status), answer.headers)
        return answer.parts
    whole = answer.whole
    length = [] if answer.status == 204 else [("Content-Length", str(len(whole)))]
    start_response(line_of(answer.status), [*answer.headers, *length])
    return [whole]


def broken(environ: Any, start_response: Any) -> Iterable[bytes]:
    parts = service(environ, start_response)
    if raises_below(environ["QUERY_STRING"]):
        raise Boom("below the middleware")
    return parts


guarded = {
    prefix: IdempotencyMiddleware(broken, guard=Guard(CONFIG["store"], policy=rule.policy), **options_of(prefix))
    for prefix, rule in RULES.items()
}


def app(environ: Any, start_response: Any) -> Iterable[bytes]:
    return guarded.get(environ["PATH_INFO"].split("/")[1], guarded["below"])(environ, start_response)
