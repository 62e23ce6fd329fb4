"""WSGI: the Idempotency-Key header for Flask, Django, Pyramid and every other WSGI application.

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=Guard(url), scope=by_header("X-Api-Key"))

A response that comes in parts is passed on live (with the server's `write`), and remembered at its end: the last part
is sent, or the stream is ended, once it is remembered. A client that disconnects does not end a request that has
started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from typing import Any, Unpack

from onefold import AsyncGuard, Guard, OnefoldError, UsageError
from onefold.http._answers.capture import Capture
from onefold.http._answers.rules import NotFinal, ServerFailed, failed_with, is_own
from onefold.http._answers.status import line_of
from onefold.http._asgi.client_gone import ClientGone, has_had_its_time
from onefold.http._exchange.deliveries import deliver
from onefold.http._exchange.rules import Ended, Exchange, GuardRequest, Options, known
from onefold.http._requests.keys import body_field, header_key
from onefold.http._shared.messages import CHUNK, Answer, Body, Refused, Request
from onefold.http._shared.routing import unmatched_wsgi
from onefold.http.scopes import by_header, name_of, single_tenant
from onefold.stores.sources import StoreSource

__all__ = ["IdempotencyMiddleware", "body_field", "by_header", "by_user", "header_key", "single_tenant"]

Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class IdempotencyMiddleware:
    """Guard requests that carry an Idempotency-Key. `docs/http.md` explains each argument."""

    def __init__(self, app: App, *, guard: Guard | StoreSource, **options: Unpack[Options]) -> None:
        self.app = app
        self.exchange = Exchange(**known("IdempotencyMiddleware", options))
        self.guard = blocking(guard)
        self._policy = self.exchange.policy(self.guard)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        request = request_of(environ)
        try:
            passes = self.exchange.passes(request)
        except Refused as refused:
            return answered(self.exchange.refused(refused), start_response)
        if passes:
            return self.app(environ, start_response)
        with ExitStack() as closes:
            body = closes.enter_context(closing(Body()))
            try:
                read_body(environ, body)
                guard_request = self.exchange.guard_request(request, body)
            except Refused as refused:
                return answered(self.exchange.refused(refused), start_response)
            environ = _with_body(environ, body)
            if guard_request is None:
                return _Until(self.app(environ, start_response), closes.pop_all())
            captured = CapturedResponse(self.app, request, environ, start_response, self.exchange)
            return _Until(self._guarded(guard_request, captured, start_response), closes.pop_all())

    def _guarded(
        self, guard_request: GuardRequest, captured: CapturedResponse, start_response: StartResponse
    ) -> Iterable[bytes]:
        try:
            ended: Ended = deliver(self.guard, guard_request, captured.settled, self._policy)
        except (NotFinal, OnefoldError) as error:
            ended = error
        # Not inside our `except`: the application's exception would carry ours in its traceback.
        answer = self.exchange.instead(ended, captured.made, is_seen=captured.is_seen)
        return captured.rest() if answer is None else answered(answer, start_response)


def blocking(guard: Guard | StoreSource, needs: str = "a WSGI application needs a Guard") -> Guard:
    """Return the guard, or create one from anything that a guard takes."""
    if isinstance(guard, AsyncGuard):
        raise UsageError(f"{needs}, but this is an AsyncGuard: nobody would await it")
    return guard if isinstance(guard, Guard) else Guard(guard)


class CapturedResponse:
    """One run of the application inside a claim: its response is captured as it passes, and its end is held back."""

    def __init__(
        self, app: App, request: Request, environ: Environ, start_response: StartResponse, exchange: Exchange
    ) -> None:
        self._app = app
        self._request = request
        self._environ = environ
        self._start_response = start_response
        self._exchange = exchange
        self._begun: tuple[Any, ...] = ()
        # The server's, once the response has begun.
        self._write: Callable[[bytes], object] | None = None
        # The whole response existed when the application returned.
        self._is_at_hand = False
        self._held: list[bytes] = []
        self._capture = Capture(exchange.body_max, request.method)
        self._unmatched: bool | None = None
        self._freed: Iterator[bytes] | None = None
        self._client_gone_at: float | None = None
        self._unread = 0
        self._error: Exception | None = None
        self._failure: BaseException | None = None
        # The answer to remember, if it was made here.
        self.made: Answer | None = None

    @property
    def is_seen(self) -> bool:
        """Return whether the client has seen a part of the response."""
        return self._write is not None

    def settled(self) -> Answer:
        """Run the application to its end; return the answer to remember. Raises `NotFinal` if there is none."""
        try:
            answer = self._answer()
            self.made = self._exchange.answered(self._request, answer, unmatched=self._unmatched)
        except ServerFailed as failure:
            self.made = self._exchange.broken(failure)
        return self.made

    def _answer(self) -> Answer:
        try:
            self._run()
        except NotFinal:
            raise
        except BaseException as error:
            if not is_own(error):
                raise
            self._failure = error
            raise failed_with(error) from error
        if not self._begun:
            self._failure = RuntimeError("the application did not call start_response")
            raise failed_with(self._failure) from self._failure
        try:
            return self._capture.answer()
        finally:
            self._failure = self._capture.malformed

    def _run(self) -> None:
        answer = self._app(self._environ, self._start)
        close = getattr(answer, "close", None)
        parts = iter(answer)
        self._is_at_hand = isinstance(answer, (list, tuple))
        try:
            for part in parts:
                if self._is_endless():
                    self._freed = _chained([*self._held, part], parts, close)
                    raise NotFinal
                self._take(part)
        finally:
            if close is not None and self._freed is None:
                close()

    def rest(self) -> Iterable[bytes]:
        """Return the parts that were held back, for the server. Raise the application's own error."""
        if isinstance(self._failure, ClientGone):
            # Nobody is left to tell.
            return []
        if self._failure is not None:
            answer = self._exchange.first_failure(self.made, is_seen=self.is_seen)
            if answer is None:
                raise self._failure
            return _raising_after(answered(answer, self._start_response), self._failure)
        if self._freed is not None:
            self._start_response(*self._begun)
            return self._freed
        if self._write is None:
            self._start_response(*self._begun)
            return self._held
        self._pass_on(self._held)
        if self._error is not None:
            raise self._error
        return []

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        if exc_info is not None and self._write is not None:
            # As every server does: an error after the start of the response cannot become another response.
            raise exc_info[1].with_traceback(exc_info[2])
        # Copies: an outer layer may change them, and we remember what the application produced.
        headers = list(headers)
        self._capture.begin(status, headers)
        # Flask forgets its request at the end.
        self._unmatched = unmatched_wsgi(self._environ)
        self._begun = (status, headers, exc_info) if exc_info is not None else (status, headers)
        return self._take

    def _take(self, part: bytes) -> None:
        """Pass on each part of a stream.

        If the response has a length, hold back the newest part: it may be the last.
        """
        if not part:
            return
        if self._capture.malformed is not None:
            # As a server would: a stream whose start cannot be sent may be endless.
            raise self._capture.malformed
        self._capture.add(part)
        ready, self._held = self._held, [part]
        if self._is_stream():
            ready, self._held = [*ready, part], []
        if ready:
            if self._write is None:
                self._write = self._start_response(*self._begun)
            self._pass_on(ready)

    def _pass_on(self, parts: list[bytes]) -> None:
        assert self._write is not None
        if self._client_gone_at is not None:
            self._unread += sum(map(len, parts))
            if has_had_its_time(self._client_gone_at, self._unread):
                raise ClientGone
            return
        try:
            for part in parts:
                self._write(part)
        except OSError:
            self._client_gone_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 - raised once the response is remembered
            # This is how a server reports a disconnected client, or a failure on the way to it. The handler's effect
            # has happened anyway.
            self._client_gone_at, self._error = time.monotonic(), error

    def _is_stream(self) -> bool:
        return not self._is_at_hand and not self._capture.header(b"content-length")

    def _is_endless(self) -> bool:
        """Return whether it may never end: by default, we keep no claim for it."""
        return self._write is None and not self._exchange.event_streams and self._capture.is_event_stream


class _Until:
    """A response, and the resources to close after it."""

    def __init__(self, parts: Iterable[bytes], closes: ExitStack) -> None:
        self._parts = parts
        self._closes = closes
        close = getattr(parts, "close", None)
        if close is not None:
            closes.callback(close)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)

    def close(self) -> None:
        self._closes.close()


def _chained(first: list[bytes], rest: Iterator[bytes], close: Callable[[], None] | None) -> Iterator[bytes]:
    try:
        yield from first
        yield from rest
    finally:
        if close is not None:
            close()


def _raising_after(parts: list[bytes], failure: BaseException) -> Iterator[bytes]:
    """Yield a whole response, and then raise: the client has all of it, and the server logs the error."""
    yield from parts
    raise failure


def request_of(environ: Environ) -> Request:
    headers = [
        (name[5:].replace("_", "-").encode("latin-1"), value.encode("latin-1"))
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    if environ.get("CONTENT_TYPE"):
        headers.append((b"content-type", environ["CONTENT_TYPE"].encode("latin-1")))
    path = _path_of(environ)
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    return Request(environ["REQUEST_METHOD"], path, query, headers, environ)


def _path_of(environ: Environ) -> str:
    """Return the readable path: WSGI passes UTF-8 decoded as Latin-1."""
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    try:
        return path.encode("latin-1").decode()
    except UnicodeError:
        return path


def read_body(environ: Environ, body: Body) -> None:
    """Read the whole body: its declared length, or to its end if the server ends it.

    With a part of the body, nothing may run.
    """
    stream, declared = environ["wsgi.input"], environ.get("CONTENT_LENGTH") or None
    if declared is None and not environ.get("wsgi.input_terminated"):
        if environ.get("HTTP_TRANSFER_ENCODING"):
            # Two different bodies of this kind would look the same: as if there were none.
            raise Refused("body_incomplete", "This server cannot read a body without Content-Length.")
        return
    if declared is not None and not declared.isdecimal():
        raise Refused("body_incomplete", "Content-Length is not a number.")
    left = int(declared) if declared is not None else None
    while left is None or left > 0:
        chunk = stream.read(CHUNK if left is None else min(CHUNK, left))
        if not chunk:
            break
        body.add(chunk)
        left = None if left is None else left - len(chunk)
    if left:
        raise Refused("body_incomplete", f"{left} bytes of the body are missing. Nothing was processed.")


def _with_body(environ: Environ, body: Body) -> Environ:
    again = {**environ, "wsgi.input": body.file, "CONTENT_LENGTH": str(body.size)}
    again.pop("HTTP_TRANSFER_ENCODING", None)
    return again


def by_user(request: Request) -> str | None:
    """Identify the caller by the authenticated user, as the server or a middleware above named it: `REMOTE_USER`."""
    return name_of(request.native.get("REMOTE_USER"), "by_user: REMOTE_USER", "Pass a function as scope=")


def answered(answer: Answer, start_response: StartResponse) -> list[bytes]:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
    start_response(line_of(answer.status), headers)
    return [answer.body]
