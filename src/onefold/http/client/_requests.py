"""An adapter for requests that keeps one key across all retries of a call."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, wraps
from itertools import chain
from typing import Any, Final

from onefold import UsageError
from onefold.http.client._answers import Answer, breaking_off, watching
from onefold.http.client._handler_keys import Keyed, Request, following, keyed
from onefold.http.client._intent import current_intent
from onefold.http.client._retrying import (
    ANSWER_MAX,
    HEADER,
    METHODS,
    PROBLEM_MAX,
    ClientCall,
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
    from requests.structures import CaseInsensitiveDict
except ImportError as missing:
    raise UsageError("Adapter needs requests: pip install 'onefold[client]' requests") from missing

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

READ_BYTES: Final = 1 << 16


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
            _monitor(response, redirected.heard_there(response.status_code, response.headers, _problem(response)))
        return response

    def _call(
        self, request: requests.PreparedRequest, args: Any, kwargs: Any, call: ClientCall, chosen: Keyed
    ) -> requests.Response:
        try:
            retrying = tenacity.Retrying(**self._plan, before_sleep=_let_go)
            response: requests.Response = retrying(self._once, call, request, args, kwargs)
        except Wanted as wanted:
            response = wanted.response
        except LOST as error:
            call.gave_up(error)
            raise
        _monitor(response, chosen.heard(response.status_code, response.headers, _problem(response)))
        return _told(response, call)

    def _once(self, call: ClientCall, request: requests.PreparedRequest, args: Any, kwargs: Any) -> requests.Response:
        try:
            response = super().send(request, *args, **kwargs)
            try:
                if not _is_streamed(args, kwargs):
                    # Here, and not by the session: a response that breaks off is requested again.
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


class _WholeHead(http.client.HTTPResponse):
    """A response whose headers have an end: http.client accepts one that is cut inside them."""

    def begin(self) -> None:
        fp: Any = self.fp
        lines: Any = _Lines(fp)
        self.fp = lines
        super().begin()
        if not lines.has_ended:
            self.close()
            raise http.client.RemoteDisconnected("the connection was closed inside of the headers of the answer")
        if self.fp is lines:
            self.fp = fp


class _Lines:
    """A file that notes whether the last line that was read from it is the empty one after the headers."""

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
    """The headers of a request whose key is ours. They are copied with it, and mark the key as ours.

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


def _let_go(state: tenacity.RetryCallState) -> None:
    """Close the response that is requested again: it must not hold its connection while nobody reads from it."""
    response = unwanted(state)
    if response is not None:
        response.close()


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


def _problem(response: requests.Response) -> bytes | None:
    """Return the decoded body of a problem document; None if it was not read. Other bodies are not needed."""
    if not is_problem(response.headers):
        return b""
    body: Any = vars(response)["_content"]
    if not isinstance(body, bytes) or len(body) > PROBLEM_MAX:
        return None
    # urllib3 returns an encoding that it does not know unchanged.
    return body if _is_decoded(response) else None


def _is_decoded(response: requests.Response) -> bool:
    named = (response.headers.get("Content-Encoding") or "identity").lower().split(",")
    return all(one.strip() in ("identity", *urllib3.HTTPResponse.CONTENT_DECODERS) for one in named)


def _read_problem(response: requests.Response) -> None:
    """Read a short problem document of a streamed response, and stream it from memory. A longer one stays a stream."""
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
    """The part of a long response that was read, and then the rest of it; everything else is urllib3's own."""

    def __init__(self, parts: list[bytes], stream: Iterator[bytes], raw: Any) -> None:
        self._left, self._raw = chain(parts, stream), raw

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield from self._left

    def read(self, amt: int | None = None, **_: Any) -> bytes:
        """Return the next part, at most this long, or all that is left."""
        if amt is None or amt < 0:
            return b"".join(self._left)
        part = next(self._left, b"") if amt else b""
        if part[amt:]:
            self._left = chain([part[amt:]], self._left)
        return part[:amt]

    def drain_conn(self) -> None:
        with suppress(requests.RequestException):
            self.read()

    def close(self) -> None:
        self._raw.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _monitor(response: requests.Response, answer: Answer) -> None:
    """Note when a response was read to its end. A streamed one is its reader's, who repeats what breaks off."""
    raw: Any = response.raw
    if isinstance(vars(response)["_content"], bytes) or getattr(raw, "length_remaining", None) == 0:
        answer.ended()
        return
    answer.left_to_reader()
    # Its class, not its methods: those would hold it, and a dropped one would not be closed.
    kind: Any = type(raw)
    raw.__class__ = _watched(kind)
    raw.onefold_answer = answer


# The methods that read from a urllib3 response, and the one they all read through. Not every version has all of them.
READING: Final = ("read", "read1", "_raw_read")
READING_IN_PARTS: Final = ("stream", "read_chunked")


@cache
def _watched(raws: Any) -> Any:
    """Return a class of such responses that note how far they were read."""
    methods = {name: _watched_read(getattr(raws, name)) for name in READING if hasattr(raws, name)}
    methods |= {name: _watched_parts(getattr(raws, name)) for name in READING_IN_PARTS if hasattr(raws, name)}

    def drain_conn(self: Any) -> None:
        # It hides its errors; those were seen below.
        raws.drain_conn(self)
        _note_end(self)

    def close(self: Any) -> None:
        self.onefold_answer.closed()
        raws.close(self)

    return type(raws.__name__, (raws,), {**methods, "drain_conn": drain_conn, "close": close})


def _watched_read(read: Any) -> Any:
    @wraps(read)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with breaking_off(self.onefold_answer):
            part = read(self, *args, **kwargs)
        _note_end(self)
        return part

    return watched


def _watched_parts(parts: Any) -> Any:
    @wraps(parts)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        answer = self.onefold_answer
        with watching(answer):
            for part in parts(self, *args, **kwargs):
                with answer.handed_out():
                    yield part

    return watched


def _note_end(raw: Any) -> None:
    """Note the end of a response, if it was received in whole: one that breaks off is an error instead."""
    if raw.length_remaining == 0 or raw.isclosed():
        raw.onefold_answer.ended()


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
