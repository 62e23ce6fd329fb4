"""The service as Flask views, each guarded by the decorator."""

from __future__ import annotations

from typing import Any

import flask

from onefold import Guard
from onefold.http.flask import idempotent
from tests.http_service.behaviour import CONFIG, METHODS, RULES, Boom, behave, options_of, raises_below

app = flask.Flask("service")


def view(rest: str) -> flask.Response:
    query = flask.request.query_string.decode()
    answer = behave(flask.request.path, query, flask.request.get_data())
    if raises_below(query):
        raise Boom("below the decorator")
    response = flask.Response(answer.parts if answer.streamed else answer.whole, status=answer.status)
    for name, value in answer.headers:
        if name == "Set-Cookie":
            response.headers.add(name, value)
        else:
            response.headers[name] = value
    return response


for prefix, rule in RULES.items():
    guarded: Any = idempotent(guard=Guard(CONFIG["store"], policy=rule.policy), **options_of(prefix))(view)
    app.add_url_rule(f"/{prefix}/<path:rest>", prefix, guarded, methods=METHODS, provide_automatic_options=False)
