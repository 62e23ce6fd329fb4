"""requests: an adapter that keeps one key over all retries of a call."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any, Final

from onefold import UsageError
from onefold.http.client._handler_keys import HandlerCall, Minted, Request, keyed
from onefold.http.client._intent import current_intent, intent
from onefold.http.client._retrying import (
    ANSWER_MAX,
    HEADER,
    METHODS,
    Call,
    Retries,
    Wanted,
    is_problem,
    plan,
    unwanted,
)

try:
    import requests
    import tenacity
    import urllib3
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

# These come before the first byte of a request: the server has seen nothing of it.
NOT_SENT: Final = (
    urllib3.exceptions.NewConnectionError,
    urllib3.exceptions.ConnectTimeoutError,
    urllib3.exceptions.ProxyError,
    urllib3.exceptions.EmptyPoolError,
    urllib3.exceptions.ClosedPoolError,
)

READ_BYTES: Final = 1 << 16


class Adapter(HTTPAdapter):
    """`session.mount("https://", Adapter())`. A response's `onefold` is a `Sent`: its key, and every attempt."""

    def __init__(self, *, retries: Retries = Retries(), **options: Any) -> None:  # noqa: B008
        super().__init__(**options)
        self._plan = plan(retries, LOST, NOT_LOST)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        if request.method not in METHODS:
            return super().send(request, *args, **kwargs)
        asked, around = _asked(request, _whole_body(request)), current_intent()
        if around is not None:
            return self._call(request, args, kwargs, Call(around.key_for(asked)), around)
        with keyed(asked) as chosen:
            return self._call(request, args, kwargs, Call(chosen.key), chosen)

    def _call(
        self,
        request: requests.PreparedRequest,
        args: Any,
        kwargs: Any,
        call: Call,
        around: intent | HandlerCall | Minted,
    ) -> requests.Response:
        request.headers[HEADER] = call.key
        try:
            retrying = tenacity.Retrying(**self._plan, before_sleep=_let_go)
            response: requests.Response = retrying(self._once, call, request, args, kwargs)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        around.heard(response.status_code, response.headers, _problem(response))
        return _told(response, call)

    def _once(self, call: Call, request: requests.PreparedRequest, args: Any, kwargs: Any) -> requests.Response:
        try:
            response = super().send(request, *args, **kwargs)
            try:
                if not _is_streamed(args, kwargs):
                    # Here, and not by the session: an answer that breaks off is asked for again.
                    _ = response.content
                elif is_problem(response.headers):
                    _read_problem(response)
            except BaseException:
                response.close()
                raise
        except LOST as error:
            call.failed(error, sent=_was_sent(error))
            raise
        call.answered(response, response.status_code, response.headers)
        return response


def _asked(request: requests.PreparedRequest, body: bytes) -> Request:
    given, kind = request.headers.get(HEADER), request.headers.get("Content-Type") or ""
    return Request(request.method or "", request.url or "", body, _as_text(kind), _as_text(given) if given else None)


def _as_text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _let_go(state: tenacity.RetryCallState) -> None:
    """Close the answer that is asked for again: its connection must not be taken while nobody reads from it."""
    response = unwanted(state)
    if response is not None:
        response.close()


def _was_sent(error: BaseException) -> bool:
    """Whether anything of the request can have reached the server. What requests raises wraps what urllib3 has met."""
    if isinstance(error, (requests.exceptions.ConnectTimeout, requests.exceptions.ProxyError)):
        return False
    met: Any = error.args[0] if error.args else None
    reason = met.reason if isinstance(met, urllib3.exceptions.MaxRetryError) else met
    if isinstance(reason, urllib3.exceptions.SSLError):
        # A certificate is looked at before the first byte.
        return not isinstance(reason.args[0] if reason.args else None, ssl.SSLCertVerificationError)
    return not isinstance(reason, NOT_SENT)


def _problem(response: requests.Response) -> bytes | None:
    """Return the decoded body of a problem document; None where it was not read. Of others nothing is needed."""
    if not is_problem(response.headers):
        return b""
    body: Any = vars(response)["_content"]
    if not isinstance(body, bytes):
        return None
    # urllib3 hands out an encoding that it does not know as it came.
    return body if _is_decoded(response) else None


def _is_decoded(response: requests.Response) -> bool:
    named = (response.headers.get("Content-Encoding") or "identity").lower().split(",")
    return all(one.strip() in ("identity", *urllib3.HTTPResponse.CONTENT_DECODERS) for one in named)


def _read_problem(response: requests.Response) -> None:
    """Read a short problem document of a streamed answer; it is streamed from memory. A longer one stays a stream."""
    parts: list[bytes] = []
    stream, size = response.iter_content(READ_BYTES), 0
    for part in stream:
        parts.append(part)
        size += len(part)
        if size > ANSWER_MAX:
            response.raw = _Rest(parts, stream, response.raw)
            return
    vars(response)["_content"] = b"".join(parts)


class _Rest:
    """What was read of a long answer, and then the rest of it; everything else is urllib3's own."""

    def __init__(self, parts: list[bytes], stream: Iterator[bytes], raw: Any) -> None:
        self._parts, self._stream, self._raw = parts, stream, raw

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield from self._parts
        yield from self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


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
