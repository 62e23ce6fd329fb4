"""One run of an ASGI application inside a claim: its answer is captured as it passes on, and its end is held back.

The application runs in a task of its own. What it does after its answer (background tasks) is no part of the claim, and
begins when that has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

from onefold import OnefoldError, Outcome
from onefold.http._answers.capture import Capture
from onefold.http._answers.rules import NotFinal, ServerFailed, failed_with
from onefold.http._asgi.client_gone import ClientGone, DisconnectWatch
from onefold.http._exchange.rules import LOG, Exchange
from onefold.http._shared.messages import Answer, Request, Spooled
from onefold.http._shared.routing import TOLD_BY_THE_FRAMEWORK, unmatched_asgi

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# So long an application waits at the end of its answer until that is remembered. It may keep a transaction open beyond
# its answer, and the store may wait for that: then the application has to go on first.
REMEMBER_SECONDS: Final = 1.0

# Ways to send a file that would go around us.
SHORTCUTS: Final = ("http.response.pathsend", "http.response.zerocopysend")


class Performance:
    """The application, the request's body to read again, and the answer as far as it has come."""

    def __init__(
        self, app: App, request: Request, body: Spooled, receive: Receive, send: Send, exchange: Exchange
    ) -> None:
        self._app = app
        self._request = request
        self._scope = _without_shortcuts(request.native)
        self._unread = _messages_of(body)
        self._client_says = receive
        self._to_client = send
        self._exchange = exchange
        self._task: asyncio.Task[None] | None = None
        self._capture = Capture(exchange.body_max, request.method)
        # What is remembered, if it was made here.
        self.made: Answer | None = None
        # What the client has not been sent yet.
        self._held: list[Message] = []
        # Set once the answer is whole, or the application has ended without one.
        self._settled = asyncio.Event()
        self._whole = False
        # A stream that went on for nobody, and is told so.
        self._given_up = False
        self._may_hear_of_the_client = asyncio.Event()
        self._watch = DisconnectWatch(receive, self._give_up)
        # An event stream, which nobody waits for. Its client sees it once the claim has been given back.
        self._freed = False
        # Set once the claim has ended, and once what was held back is sent. Until then the application waits at the end
        # of its answer: what it does next may end the process, or keep it busy.
        self._claim_ended = asyncio.Event()
        self._sent = asyncio.Event()
        self._holds_back = True
        # Called once nothing more is held back: what the application does from now on is no part of the request.
        self.on_sent: Callable[[], None] = lambda: None
        # Whether the client has seen a part of the answer.
        self.is_seen = False
        self._trouble: Exception | None = None

    async def settled(self) -> Answer:
        """Run it until its answer is complete: what is remembered of it. Raises `NotFinal` where nothing is."""
        try:
            answer = await self._answer()
            unmatched = unmatched_asgi(self._scope) if answer.status in TOLD_BY_THE_FRAMEWORK else None
            self.made = self._exchange.answered(self._request, answer, unmatched=unmatched)
        except ServerFailed as failure:
            self.made = self._exchange.broken(failure)
        return self.made

    async def _answer(self) -> Answer:
        self._task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        self._task.add_done_callback(lambda _task: self._settle())
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            # The claim may end only when the application has.
            self._task.cancel()
            await asyncio.wait({self._task})
            raise
        finally:
            self._watch.end()
        if self._freed:
            raise NotFinal
        if not self._whole:
            why = self._why(self._task)
            if self._given_up:
                # Whatever the application made of it.
                why = ClientGone()
                LOG.info("a stream was ended: its client had gone")
            raise failed_with(why) from why
        return self._capture.answer()

    async def end(self) -> None:
        """Send what was held back, and let the application come to its end. Raises what it raised."""
        self._claim_ended.set()
        failure = self._failure()
        if failure is not None and not self.is_seen:
            # Nobody has seen its beginning, so that a better answer can still be made of the error.
            self._held.clear()
        await self._flush()
        self._let_on()
        await self._last()
        if failure is not None:
            raise failure
        if self._trouble is not None:
            raise self._trouble

    def _failure(self) -> BaseException | None:
        """Why there is no answer, for the server to log. Of a stream that was ended for want of a client: nothing."""
        if self._freed or self._given_up or self._task is None:
            return None
        return self._capture.malformed if self._whole else self._why(self._task)

    def _why(self, task: asyncio.Task[None]) -> BaseException:
        if task.cancelled():
            return RuntimeError("the application was cancelled")
        # It may have caught that its answer cannot be sent, and ended.
        none = self._capture.malformed or RuntimeError("the application ended without a whole answer")
        return task.exception() or none

    async def conclude(self, ended: Outcome[Answer] | NotFinal | OnefoldError) -> None:
        """End as the guard has ended: with the answer that was made here, or with one that takes its place."""
        if isinstance(ended, NotFinal):
            await self.end()
        elif isinstance(ended, OnefoldError):
            await self._instead(self._exchange.refused(ended))
        # A probe may have given another one, or none, in its place.
        elif self.made is not None and ended.value is self.made and not ended.replayed:
            await self.end()
        else:
            await self._instead(self._exchange.replay(ended))

    async def _instead(self, answer: Answer) -> None:
        """This answer in the place of the application's, which nobody gets; unless it is a stream on its way."""
        if self.is_seen or self._freed:
            await self.end()
            return
        self._claim_ended.set()
        self._held.clear()
        await send_answer(self._to_client, answer)
        self.forsake()
        self._let_on()
        await self._last()

    def forsake(self) -> None:
        """The client has gone: nothing more is sent to it."""
        self._watch.gone()
        if self._freed and self._task is not None:
            # It is guarded by nobody, and may be endless: it ends as it would without a key.
            self._task.cancel()

    def cancel(self) -> bool:
        """Cancel what the application does after its answer. Return whether there was anything to cancel."""
        return self._task is not None and self._task.cancel()

    @property
    def is_cancelled(self) -> bool:
        return self._task is not None and self._task.cancelled()

    def let_go(self) -> None:
        """Let the application go on, however the exchange has ended: nobody may wait for the end of its claim any more.

        An exchange that broke off (the guard raised what nobody expected, the loop ends) leaves an answer for nobody.
        """
        if not self._sent.is_set():
            self._held.clear()
            self.forsake()
            self._let_on()

    def _let_on(self) -> None:
        self._holds_back = False
        self._claim_ended.set()
        self._sent.set()
        self._may_hear_of_the_client.set()
        self.on_sent()

    def _settle(self) -> None:
        self._settled.set()

    def _give_up(self) -> None:
        if not self._settled.is_set():
            self._given_up = True
            self._may_hear_of_the_client.set()

    async def _last(self) -> None:
        """Wait for what the application does after its answer. Whoever cancels us cancels that, as without a key."""
        if self._task is None:
            return
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():
            try:
                await asyncio.wait({self._task})
            except asyncio.CancelledError as error:
                cancelled = error
                self._task.cancel()
        if self._task.cancelled():
            if cancelled is not None:
                raise cancelled
        elif self._whole or self._freed:
            # What a background task raised is the server's to log, and what an event stream raised, too.
            self._task.result()

    async def _receive(self) -> Message:
        """The body; then nothing until the claim has ended. A client that goes does not end what has started."""
        message = next(self._unread, None)
        if message is not None:
            return message
        await self._may_hear_of_the_client.wait()
        return await self._client_says() if self._freed else {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._given_up:
            raise ClientGone
        if message["type"] == "http.response.start":
            # A copy: whoever is above may change it, and what is remembered is what the application gave.
            message = {**message, "headers": list(message.get("headers") or ())}
        if not self._holds_back:
            await self._pass_on(message)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and not self._whole:
            if self._capture.malformed is not None:
                # As a server would: a stream whose beginning nobody can send may be endless.
                self._held.clear()
                raise self._capture.malformed
            self._capture.add(message.get("body", b""))
            if message.get("more_body", False):
                self._watch.begin()
                await self._flush()
            else:
                self._whole = True
                self._settle()
                await self._until_remembered()

    async def _until_remembered(self) -> None:
        try:
            async with asyncio.timeout(REMEMBER_SECONDS):
                await self._claim_ended.wait()
        except TimeoutError:
            LOG.warning(
                "an answer was not remembered within %g s, and its application goes on meanwhile. Does it keep a "
                "transaction open beyond its answer, for which the store waits? Commit before you answer",
                REMEMBER_SECONDS,
            )
        else:
            await self._sent.wait()

    async def _begin(self, start: Message) -> None:
        self._capture.begin(start.get("status"), start["headers"])
        if self._capture.is_event_stream and not self._exchange.event_streams:
            # It may never end. Without being asked to, nobody keeps a claim for it; and whoever has read it to its end
            # may ask again.
            self._freed = True
            self._settle()
            await self._sent.wait()

    async def _flush(self) -> None:
        while self._held:
            held, self._held = self._held, []
            for message in held:
                await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if self._watch.client_gone:
            self._watch.unread(len(message.get("body", b"")))
            # Nobody slows this stream down any more, and others have to get their turn.
            await asyncio.sleep(0)
            return
        self.is_seen = True
        try:
            await self._to_client(message)
        except OSError:
            # As servers say that the client has gone. The handler does not have to know.
            self._watch.gone()
        except Exception as error:  # noqa: BLE001 - raised once the answer is remembered
            # Somebody between us and the server has failed; what the handler did has happened all the same.
            self._watch.gone()
            self._trouble = error


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


def _without_shortcuts(scope: Scope) -> Scope:
    extensions = scope.get("extensions") or {}
    if not any(name in extensions for name in SHORTCUTS):
        return scope
    return {**scope, "extensions": {name: value for name, value in extensions.items() if name not in SHORTCUTS}}
