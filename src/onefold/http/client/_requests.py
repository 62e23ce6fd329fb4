"""requests: an adapter that keeps one key over all retries of a call."""

from __future__ import annotations

from typing import Any, Final

from onefold import UsageError
from onefold.http.client._intent import current_intent
from onefold.http.client._retrying import HEADER, METHODS, Call, Retries, Wanted, mint, plan

try:
    import requests
    import tenacity
    from requests.adapters import HTTPAdapter
except ImportError as missing:
    raise UsageError("Adapter needs requests: pip install 'onefold[client]' requests") from missing

# What the wire does. A broken certificate is a connection error too, and never gets better.
LOST: Final = (
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    requests.exceptions.ChunkedEncodingError,
)
NOT_LOST: Final = (requests.exceptions.SSLError,)


class Adapter(HTTPAdapter):
    """`session.mount("https://", Adapter())`. A response's `onefold` is a `Sent`: its key, and every attempt."""

    def __init__(self, *, retries: Retries = Retries(), **options: Any) -> None:  # noqa: B008
        super().__init__(**options)
        self._plan = plan(retries, LOST, NOT_LOST)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        if request.method not in METHODS:
            return super().send(request, *args, **kwargs)
        body, around = _whole_body(request), current_intent()
        given: Any = request.headers.get(HEADER)
        if around is not None:
            key = around.key_for(request.method or "", request.url or "", body, given=given)
        else:
            key = str(given or mint())
        request.headers[HEADER] = key
        call = Call(key)
        try:
            retrying = tenacity.Retrying(**self._plan)
            response: requests.Response = retrying(self._once, call, request, args, kwargs)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        if around is not None:
            around.heard(
                response.status_code, response.headers, b"" if _is_streamed(args, kwargs) else response.content
            )
        return _told(response, call)

    def _once(self, call: Call, request: requests.PreparedRequest, args: Any, kwargs: Any) -> requests.Response:
        if call.unwanted is not None:
            call.unwanted.close()
        try:
            response = super().send(request, *args, **kwargs)
            if not _is_streamed(args, kwargs):
                # Here, and not by the session: an answer that breaks off is asked for again.
                _ = response.content
        except LOST as error:
            call.failed(error)
            raise
        call.answered(response, response.status_code, response.headers)
        return response


def _is_streamed(args: Any, kwargs: Any) -> bool:
    return bool(args[0] if args else kwargs.get("stream"))


def _whole_body(request: requests.PreparedRequest) -> bytes:
    """The body as bytes, so that it can be sent again."""
    body: Any = request.body
    if body is None or isinstance(body, (bytes, str)):
        return body.encode() if isinstance(body, str) else body or b""
    whole = body.read() if hasattr(body, "read") else b"".join(body)
    request.body = whole.encode() if isinstance(whole, str) else whole
    request.prepare_content_length(request.body)
    request.headers.pop("Transfer-Encoding", None)
    return request.body or b""


def _told(response: requests.Response, call: Call) -> requests.Response:
    response.onefold = call.sent(response.headers)  # type: ignore[attr-defined]
    return response
