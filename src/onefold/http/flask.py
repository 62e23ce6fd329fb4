"""Flask: the Idempotency-Key header for a whole application, or for single views after their authentication.

app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=guard, scope=by_header("X-Api-Key"))

@app.post("/payments")
@login_required
@idempotent(guard=guard, scope=by_user)
def pay(): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, Unpack

from onefold import Guard, UsageError
from onefold.http._answers.capture import Capture
from onefold.http._answers.rules import NotFinal, failed_with, is_own
from onefold.http._exchange.rules import Options, known
from onefold.http._exchange.views import Views, captured
from onefold.http._requests.forms import MULTIPART, URLENCODED
from onefold.http._requests.keys import body_field, header_key
from onefold.http._shared.messages import Answer, Body, Refused, Request
from onefold.http.scopes import by_header, name_of, single_tenant
from onefold.http.wsgi import IdempotencyMiddleware

try:
    import flask
except ImportError as missing:
    raise UsageError("onefold.http.flask needs Flask: pip install 'onefold[http]' flask") from missing

__all__ = ["IdempotencyMiddleware", "body_field", "by_header", "by_user", "header_key", "idempotent", "single_tenant"]

View = TypeVar("View", bound=Callable[..., Any])

# Media types that Flask's parser reads to the end without keeping anything.
FORMS: Final = (URLENCODED, MULTIPART)


def idempotent(*, guard: Guard, **options: Unpack[Options]) -> Callable[[View], View]:
    """Decorate a view, below the route and below the decorators that authenticate.

    A streaming response is read to its end (or to the limit of what is remembered) before it is sent; for one that is
    passed on live, use the middleware.
    """
    views = Views(guard=guard, **known("idempotent", options))

    def decorate(view: View) -> View:
        @functools.wraps(view)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return _exchanged(views, lambda: flask.current_app.ensure_sync(view)(*args, **kwargs))

        return guarded  # type: ignore[return-value]

    return decorate


def _exchanged(views: Views, view: Callable[[], Any]) -> Any:
    asking = request_of(flask.request)
    try:
        passes = views.exchange.passes(asking)
        guard_request = None if passes else views.exchange.guard_request(asking, Body(_body_of(flask.request)))
    except Refused as refused:
        return _response(views.exchange.refused(refused))
    if guard_request is None:
        return view()
    responses: list[flask.Response] = []
    instead = views.deliver(guard_request, asking, lambda: _played(views, view, responses))
    return responses[0] if instead is None else _response(instead)


def _played(views: Views, view: Callable[[], Any], responses: list[flask.Response]) -> Answer:
    app = flask.current_app
    try:
        try:
            response = app.make_response(view())
        except Exception as error:  # noqa: BLE001 - Flask makes a response of it, or raises it again
            response = app.make_response(_handled(views, error))
        responses.append(response)
        return _captured(response, views)
    except NotFinal:
        raise
    except BaseException as error:
        if not is_own(error):
            raise
        raise failed_with(error) from error


def _handled(views: Views, error: Exception) -> Any:
    """Return what Flask makes of a view's error: of one that it has no handler for, too, if that is remembered.

    Flask logs it and tells its subscribers then. If it is to propagate exceptions, as in tests, it is raised.
    """
    try:
        return flask.current_app.handle_user_exception(error)
    except Exception as unhandled:
        if not views.exchange.answers_errors:
            raise
        return flask.current_app.handle_exception(unhandled)


def _captured(response: flask.Response, views: Views) -> Answer:
    capture = Capture(views.exchange.body_max, flask.request.method.upper())
    capture.begin(response.status_code, response.headers)
    if capture.is_event_stream and not views.exchange.event_streams:
        # It may never end: by default, we keep no claim for it.
        raise NotFinal
    response.direct_passthrough = False
    found = captured(iter(response.iter_encoded()), views.exchange.body_max)
    if not response.is_sequence:
        # The previous iterable keeps its own `close`, which the response calls at its end.
        response.call_on_close(getattr(response.response, "close", lambda: None))
        response.response = found.parts
    capture.add_whole(found.whole)
    return capture.answer()


def request_of(request: Any) -> Request:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
    return Request(request.method, request.root_path + request.path, request.query_string, headers, request)


def _body_of(request: flask.Request) -> bytes:
    """Return the whole body. If it was read before, Flask keeps only the unread rest: of a form, nothing."""
    was_read, was_kept = "stream" in vars(request), "_cached_data" in vars(request)
    body = request.get_data(cache=True)
    missing = (request.content_length or 0) - len(body)
    is_chunked = "Transfer-Encoding" in request.headers
    if was_read and (missing > 0 or (is_chunked and _is_gone(request, body, was_kept=was_kept))):
        raise UsageError(
            "the body was read before its view (request.form or request.data, say), so it can no longer be compared. "
            "Put @idempotent above what reads it, call request.get_data() before that, or use the middleware"
        )
    if missing > 0:
        raise Refused("body_incomplete", f"{missing} bytes of the body are missing. Nothing was processed.")
    return body


def _is_gone(request: flask.Request, body: bytes, *, was_kept: bool) -> bool:
    """Return whether somebody has read this body, or a part of it, and left us the rest. Its length is unknown."""
    with suppress(AttributeError, OSError, ValueError):
        # Some streams report their position.
        if request.stream.tell() > len(body):
            return True
    found = vars(request)
    if request.mimetype in FORMS or found.get("form") or found.get("files"):
        # Reading the form has consumed it, unless all of it was kept before.
        return not (was_kept and body)
    # For any other media type, accessing the form leaves the stream as it is.
    return not (body or was_kept or "form" in found)


def _response(answer: Answer) -> flask.Response:
    response = flask.Response(answer.body, status=answer.status)
    response.headers.clear()
    for name, value in answer.headers:
        response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    return response


def by_user(_request: Request) -> str | None:
    """Identify the caller by the user that Flask-Login knows."""
    try:
        from flask_login import current_user
    except ImportError as error:
        raise UsageError("by_user asks Flask-Login, which is not installed. Pass a function as scope=") from error
    if not flask.has_request_context():
        raise UsageError(
            "by_user: Flask-Login knows the caller only inside Flask, and the middleware is outside. Decorate the view "
            "with @idempotent, or use by_header"
        )
    if not current_user.is_authenticated:
        raise Refused("caller_unknown", "A request with a key needs a caller: authenticate first.")
    return name_of(current_user.get_id(), "by_user: the get_id() of Flask-Login's user", "Pass a function as scope=")
