"""Provide an adapter for requests that keeps one key across all retries of a call."""

from __future__ import annotations

import http.client
import ssl
from functools import cache
from typing import Any, Final

from onefold import UsageError
from onefold.http.client._handler_keys import Keyed, Request, following, keyed
from onefold.http.client._intent import current_intent
from onefold.http.client._retrying import (
    HEADER,
    METHODS,
    ClientCall,
    Retries,
    Wanted,
    is_problem,
    let_go,
    plan,
)

try:
    import requests
    import tenacity
    import urllib3
    from requests.adapters import HTTPAdapter
    from requests.structures import CaseInsensitiveDict
except ImportError as missing:
    raise UsageError("Adapter needs requests: pip install 'onefold[client]' requests") from missing

from onefold.http.client._requests.bodies import monitor, problem, read_problem

# Network errors. A broken certificate is a connection error too, and never gets better.
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


class Adapter(HTTPAdapter):
    """Mount it with `session.mount("https://", Adapter())`.

    A response's `onefold` is a `Sent`: its key, and every attempt.
    """

    # What is kept in a copy and a pickle.
    __attrs__ = [*HTTPAdapter.__attrs__, "_retries"]  # noqa: RUF012 - as there

    def __init__(self, *, retries: Retries = Retries(), **options: Any) -> None:  # noqa: B008
        super().__init__(**options)
        self._retries = retries
        self._plan = plan(retries, LOST, NOT_LOST)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._plan = plan(self._retries, LOST, NOT_LOST)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        if request.method not in METHODS:
            return self._follow(request, args, kwargs)
        asked, around = _asked(request, _whole_body(request)), current_intent()
        with keyed(asked) if around is None else around.call_for(asked) as chosen:
            return self._call(_with_key(request, chosen), args, kwargs, ClientCall(chosen.key), chosen)

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        pool.ConnectionCls = _careful(pool.ConnectionCls)
        return pool

    def _follow(self, request: requests.PreparedRequest, args: Any, kwargs: Any) -> requests.Response:
        """Send a request that needs no key. A redirect of one that has a key is settled by the response from there."""
        redirected = _redirected(request)
        with following(redirected):
            response = super().send(request, *args, **kwargs)
            if redirected is not None and not _is_streamed(args, kwargs):
                _ = response.content
        if redirected is not None:
            monitor(response, redirected.heard_there(response.status_code, response.headers, problem(response)))
        return response

    def _call(
        self, request: requests.PreparedRequest, args: Any, kwargs: Any, call: ClientCall, chosen: Keyed
    ) -> requests.Response:
        try:
            retrying = tenacity.Retrying(**self._plan, before_sleep=let_go)
            response: requests.Response = retrying(self._once, call, request, args, kwargs)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        monitor(response, chosen.heard(response.status_code, response.headers, problem(response)))
        return _told(response, call)

    def _once(self, call: ClientCall, request: requests.PreparedRequest, args: Any, kwargs: Any) -> requests.Response:
        try:
            response = super().send(request, *args, **kwargs)
            try:
                if not _is_streamed(args, kwargs):
                    # Here, and not by the session: a response that breaks off is requested again.
                    _ = response.content
                elif is_problem(response.headers):
                    read_problem(response)
            except BaseException:
                response.close()
                raise
        except LOST as error:
            call.failed(error, sent=_was_sent(error))
            raise
        call.answered(response, response.status_code, response.headers)
        return response


class _WholeHead(http.client.HTTPResponse):
    """Refuse a response that is cut inside its headers: http.client accepts it."""

    def begin(self) -> None:
        fp: Any = self.fp
        lines: Any = _Lines(fp)
        self.fp = lines
        super().begin()
        if not lines.has_ended:
            self.close()
            raise http.client.RemoteDisconnected("the connection was closed inside the headers of the response")
        if self.fp is lines:
            self.fp = fp


class _Lines:
    """Note whether the last line that was read from a file is the empty one after the headers."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.has_ended = False

    def readline(self, *limit: int) -> bytes:
        line: bytes = self._file.readline(*limit)
        self.has_ended = line in (b"\r\n", b"\n")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@cache
def _careful(connections: Any) -> Any:
    """Return a class of such connections whose responses have complete headers."""
    if getattr(connections, "response_class", None) is not http.client.HTTPResponse:
        # It is ours already, or speaks another protocol.
        return connections
    return type(connections.__name__, (connections,), {"response_class": _WholeHead})


def _asked(request: requests.PreparedRequest, body: bytes) -> Request:
    headers = {_as_text(name): _as_text(value) for name, value in request.headers.items()}
    kind, given = _as_text(request.headers.get("Content-Type") or ""), request.headers.get(HEADER)
    named = _as_text(given) if given else None
    return Request(request.method or "", request.url or "", body, kind, named, _carried(request), headers)


class _OwnHeaders(CaseInsensitiveDict):  # type: ignore[type-arg]
    """Mark the key of a request as ours. The headers are copied with it.

    The mark belongs to them, not to the key: a key that is read from them, and sent in another request, is a given one.
    """

    call: Keyed

    @classmethod
    def of(cls, headers: Any, call: Keyed) -> _OwnHeaders:
        own = cls(headers)
        own.call = call
        return own

    def copy(self) -> _OwnHeaders:
        return self.of(self, self.call)

    def __deepcopy__(self, _: object) -> _OwnHeaders:
        # Names and values are texts.
        return self.copy()

    def __reduce__(self) -> Any:
        # In another process they are headers like any others.
        return CaseInsensitiveDict, (dict(self),)


def _carried(request: requests.PreparedRequest) -> Keyed | None:
    """Return the call whose key this request carries, unless somebody has given it another one since."""
    headers: Any = request.headers
    if not isinstance(headers, _OwnHeaders):
        return None
    return headers.call if headers.get(HEADER) == headers.call.key else None


def _with_key(request: requests.PreparedRequest, chosen: Keyed) -> requests.PreparedRequest:
    """Return a copy with the key: the caller may send its own object again, even concurrently.

    That one gets the key, too, because redirects are copied from it.
    """
    sent = request.copy()
    if chosen.is_ours:
        sent.headers = _OwnHeaders.of(sent.headers, chosen)
        sent.headers[HEADER] = chosen.key
        request.headers = sent.headers.copy()
    return sent


def _as_text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _was_sent(error: BaseException) -> bool:
    """Return whether anything of the request can have reached the server.

    An error of requests wraps that of urllib3.
    """
    if isinstance(error, (requests.exceptions.ConnectTimeout, requests.exceptions.ProxyError)):
        return False
    met: Any = error.args[0] if error.args else None
    reason = met.reason if isinstance(met, urllib3.exceptions.MaxRetryError) else met
    if isinstance(reason, urllib3.exceptions.SSLError):
        # A certificate is checked before the first byte.
        return not isinstance(reason.args[0] if reason.args else None, ssl.SSLCertVerificationError)
    return not isinstance(reason, NOT_SENT)


def _redirected(request: requests.PreparedRequest) -> Keyed | None:
    """Return the call that was redirected to here, if one was."""
    carried = _carried(request)
    return carried if carried is not None and carried.redirect is not None else None


def _is_streamed(args: Any, kwargs: Any) -> bool:
    return bool(args[0] if args else kwargs.get("stream"))


def _whole_body(request: requests.PreparedRequest) -> bytes:
    """Return the body as bytes, so that it can be sent again."""
    body: Any = request.body
    if body is None or isinstance(body, (bytes, str)):
        return body.encode() if isinstance(body, str) else body or b""
    whole = body.read() if hasattr(body, "read") else b"".join(body)
    request.body = whole.encode() if isinstance(whole, str) else whole
    request.prepare_content_length(request.body)
    request.headers.pop("Transfer-Encoding", None)
    # Bytes have no position: a redirect would look for the file, to send it from there again.
    vars(request)["_body_position"] = None
    return request.body or b""


def _told(response: requests.Response, call: ClientCall) -> requests.Response:
    response.onefold = call.sent(response.headers)  # type: ignore[attr-defined]
    return response
