"""One run of an ASGI application inside a claim: its answer is captured as it passes on, and its end is held back.

The application runs in a task of its own. What it does after its answer (background tasks) is no part of the claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

from onefold import OnefoldError, Outcome
from onefold.http._exchange import Exchange
from onefold.http._messages import Answer, Spooled
from onefold.http._rules import EVENT_STREAM, NotFinal, ServerFailed

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Ways to send a file that would go around us.
SHORTCUTS: Final = ("http.response.pathsend", "http.response.zerocopysend")


class Performance:
    """The application, the request's body to read again, and the answer as far as it has come."""

    def __init__(self, app: App, scope: Scope, body: Spooled, receive: Receive, send: Send, exchange: Exchange) -> None:
        self._app = app
        self._scope = _without_shortcuts(scope)
        self._unread = _messages_of(body)
        self._client_says = receive
        self._to_client = send
        self._exchange = exchange
        self._task: asyncio.Task[None] | None = None
        self._start: Message | None = None
        # What is remembered, if it was made here.
        self.made: Answer | None = None
        self._captured = bytearray()
        self._cut = False
        # What the client has not been sent yet.
        self._held: list[Message] = []
        # Set once the answer is whole, or the application has ended without one.
        self._settled = asyncio.Event()
        self._whole = False
        # An event stream, which nobody waits for: from here on everything goes straight through.
        self._freed = False
        self._holds_back = True
        # Whether the client has seen a part of the answer.
        self.is_seen = False
        self._client_gone = False
        self._trouble: Exception | None = None

    async def settled(self) -> Answer:
        """Run it until its answer is complete: what is remembered of it. Raises `NotFinal` where nothing is."""
        try:
            self.made = self._exchange.settled(await self._answer())
        except ServerFailed as failure:
            self.made = self._exchange.broken(failure)
        return self.made

    async def _answer(self) -> Answer:
        self._task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        self._task.add_done_callback(lambda _task: self._settled.set())
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            # The claim may end only when the application has.
            self._task.cancel()
            await asyncio.wait({self._task})
            raise
        if self._freed:
            raise NotFinal
        if not self._whole:
            raise ServerFailed from _why(self._task)
        assert self._start is not None
        headers = [(bytes(name), bytes(value)) for name, value in self._start.get("headers", ())]
        return Answer(self._start["status"], headers, b"" if self._cut else bytes(self._captured), self._cut)

    async def end(self) -> None:
        """Send what was held back, and let the application come to its end. Raises what it raised."""
        broken = not self._whole and not self._freed
        if broken and not self.is_seen:
            # Nobody has seen its beginning, so that a better answer can still be made of the error.
            self._held.clear()
        await self._flush()
        self._holds_back = False
        await self._last()
        if broken and self._task is not None:
            raise _why(self._task)
        if self._trouble is not None:
            raise self._trouble

    async def end_as(self, outcome: Outcome[Answer]) -> None:
        """The guard's outcome: the answer that was made here, or one that takes its place."""
        # A probe may have given another one, or none, in its place.
        if self.made is not None and outcome.value is self.made and not outcome.replayed:
            await self.end()
        else:
            await self._instead(self._exchange.replay(outcome))

    async def end_refused(self, error: OnefoldError) -> None:
        """The guard has refused the request, or what came of it."""
        await self._instead(self._exchange.refused(error))

    async def _instead(self, answer: Answer) -> None:
        """This answer in the place of the application's, which nobody gets; unless a part of that was seen."""
        if self.is_seen:
            await self.end()
            return
        self._held.clear()
        await send_answer(self._to_client, answer)
        self._holds_back = False
        self.forsake()
        await self._last()

    def forsake(self) -> None:
        """The client has gone: nothing more is sent to it."""
        self._client_gone = True

    async def _last(self) -> None:
        if self._task is None:
            return
        await asyncio.wait({self._task})
        if not self._task.cancelled() and self._whole:
            # What a background task raised is the server's to log.
            self._task.result()

    async def _receive(self) -> Message:
        """The body; then nothing until the answer is whole. A client that goes does not end what has started."""
        message = next(self._unread, None)
        if message is not None:
            return message
        await self._settled.wait()
        return await self._client_says() if self._freed else {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._holds_back:
            await self._pass_on(message)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            self._start = message
            if not self._exchange.event_streams and _is_event_stream(message):
                # It may never end. Without being asked to, nobody keeps a claim for it.
                await self._flush()
                self._holds_back, self._freed = False, True
                self._settled.set()
        elif message["type"] == "http.response.body" and not self._whole:
            self._capture(message.get("body", b""))
            if message.get("more_body", False):
                await self._flush()
            else:
                self._whole = True
                self._settled.set()

    def _capture(self, chunk: bytes) -> None:
        if len(self._captured) + len(chunk) > self._exchange.body_max:
            self._cut = True
            self._captured.clear()
        if not self._cut:
            self._captured += chunk

    async def _flush(self) -> None:
        while self._held:
            held, self._held = self._held, []
            for message in held:
                await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if self._client_gone:
            return
        self.is_seen = True
        try:
            await self._to_client(message)
        except OSError:
            # As servers say that the client has gone. The handler does not have to know.
            self._client_gone = True
        except Exception as error:  # noqa: BLE001 - raised once the answer is remembered
            # Somebody between us and the server has failed; what the handler did has happened all the same.
            self._client_gone, self._trouble = True, error


def reading_again(body: Spooled, receive: Receive) -> Receive:
    """The body again, and then what the client says."""
    unread = _messages_of(body)

    async def again() -> Message:
        return next(unread, None) or await receive()

    return again


def _messages_of(body: Spooled) -> Iterator[Message]:
    ahead: bytes | None = None
    for chunk in body.chunks():
        if ahead is not None:
            yield {"type": "http.request", "body": ahead, "more_body": True}
        ahead = chunk
    yield {"type": "http.request", "body": ahead, "more_body": False}


async def send_answer(send: Send, answer: Answer) -> None:
    headers = [(bytes(name), bytes(value)) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _why(task: asyncio.Task[None]) -> BaseException:
    if task.cancelled():
        return RuntimeError("the application was cancelled")
    return task.exception() or RuntimeError("the application ended without a whole answer")


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.partition(b";")[0].strip().lower() == EVENT_STREAM
        for name, value in start.get("headers", ())
    )


def _without_shortcuts(scope: Scope) -> Scope:
    extensions = scope.get("extensions") or {}
    if not any(name in extensions for name in SHORTCUTS):
        return scope
    return {**scope, "extensions": {name: value for name, value in extensions.items() if name not in SHORTCUTS}}
