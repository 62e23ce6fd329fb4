"""Run an ASGI application inside a claim: its response is captured as it passes, and its end is held back.

The application runs in its own task. Work after its response (background tasks) is not part of the claim, and begins
when the claim has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

from onefold._concurrency.deadlines import deadlines
from onefold.http._answers.capture import Capture
from onefold.http._answers.rules import NotFinal, ServerFailed, failed_with
from onefold.http._asgi.client_gone import ClientGone, DisconnectMonitor
from onefold.http._asgi.tasks import WatchedTask
from onefold.http._exchange.rules import LOG, Ended, Exchange
from onefold.http._shared.messages import Answer, Body, Request
from onefold.http._shared.routing import TOLD_BY_THE_FRAMEWORK, unmatched_asgi

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# How long an application waits at the end of its response until that is remembered. It may keep a transaction open
# beyond its response, and the store may wait for that: then the application has to continue first.
REMEMBER_SECONDS: Final = 1.0

# ASGI extensions for sending a file that would bypass us.
SHORTCUTS: Final = ("http.response.pathsend", "http.response.zerocopysend")


class CapturedResponse:
    """The application, the request's body to read again, and the response received so far."""

    def __init__(
        self, app: App, request: Request, body: Body, receive: Receive, send: Send, exchange: Exchange
    ) -> None:
        self._app = app
        self._request = request
        self._scope = _without_shortcuts(request.native)
        self._unread = _messages_of(body)
        self._client_says = receive
        self._to_client = send
        self._exchange = exchange
        self._running: WatchedTask | None = None
        self._capture = Capture(exchange.body_max, request.method)
        # The answer to remember, if it was produced here.
        self.made: Answer | None = None
        # Messages that have not been sent to the client yet.
        self._held: list[Message] = []
        # Whether the response is complete, or the application has ended without one; and who waits for that.
        self._is_settled = False
        self._on_settled: asyncio.Future[None] | None = None
        self._whole = False
        # A stream that continued without a client, and is notified of that.
        self._given_up = False
        self._may_hear_of_the_client = asyncio.Event()
        self._monitor = DisconnectMonitor(receive, self._give_up)
        # An event stream, which is not waited for. Its client sees it once the claim has been released.
        self._freed = False
        # Whether the claim has ended, and whether the held-back messages are sent. Until then the application waits at
        # the end of its response: its next step may end the process, or keep it busy.
        self._is_claim_ended = False
        self._is_sent = False
        self._may_go_on = asyncio.Event()
        self._holds_back = True
        # Whether the request was given up, so that nobody else waits for the application's work after its response.
        self.is_alone = False
        # The application, if it may be at work after its response, and somebody else has to wait for it.
        self.rest: asyncio.Task[None] | None = None
        # Called once nothing is held back any more: later work is not part of the request.
        self.on_sent: Callable[[], None] = lambda: None
        # Whether the client has seen a part of the response; the task that is sending to it now, if any; and whether we
        # have cancelled that.
        self.is_seen = False
        self._sending: asyncio.Task[Any] | None = None
        self._is_interrupted = False
        self._error: Exception | None = None

    async def settled(self) -> Answer:
        """Run until the response is complete; return the answer to remember. Raises `NotFinal` if there is none."""
        try:
            answer = await self._answer()
            unmatched = unmatched_asgi(self._scope) if answer.status in TOLD_BY_THE_FRAMEWORK else None
            self.made = self._exchange.answered(self._request, answer, unmatched=unmatched)
        except ServerFailed as failure:
            self.made = self._exchange.broken(failure)
        return self.made

    async def _answer(self) -> Answer:
        self._on_settled = asyncio.get_running_loop().create_future()
        self._running = WatchedTask(self._app(self._scope, self._receive, self._send), self._settle)
        task = self._running.task
        try:
            await self._on_settled
        except asyncio.CancelledError:
            # The claim may end only when the application has.
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._monitor.end()
        if self._freed:
            raise NotFinal
        if not self._whole:
            why = self._why(task)
            if self._given_up:
                # Whatever the application made of it.
                why = ClientGone()
                LOG.info("a stream was ended: its client had disconnected")
            raise failed_with(why) from why
        return self._capture.answer()

    async def end(self) -> None:
        """Send the held-back messages, and let the application finish. Raise the application's own error."""
        self._is_claim_ended = True
        failure = self._failure()
        if failure is not None and not self.is_seen:
            # The start has not been sent, so the error can still become a better response: a remembered one, or the
            # server's.
            self._held.clear()
            await self._send_failure()
        await self._flush()
        self._let_on()
        await self._leave_rest()
        if failure is not None:
            raise failure
        if self._error is not None:
            raise self._error

    async def _send_failure(self) -> None:
        """Send what is remembered of an application that raised, and is what its duplicates get."""
        answer = self._exchange.first_failure(self.made, is_seen=self.is_seen)
        if answer is not None:
            await send_answer(self._pass_on, answer)

    def _failure(self) -> BaseException | None:
        """Return why there is no response, for the server to log; None for a stream that ended for lack of a client."""
        if self._freed or self._given_up or self._running is None:
            return None
        return self._capture.malformed if self._whole else self._why(self._running.task)

    def _why(self, task: asyncio.Task[None]) -> BaseException:
        if task.cancelled():
            return RuntimeError("the application was cancelled")
        # It may have noticed that its response cannot be sent, and ended.
        none = self._capture.malformed or RuntimeError("the application ended without a complete response")
        return task.exception() or none

    async def conclude(self, ended: Ended) -> None:
        """End as the guard has ended: with the response produced here, or with one that replaces it."""
        answer = self._exchange.instead(ended, self.made, is_seen=self.is_seen or self._freed)
        if answer is None:
            await self.end()
        else:
            await self._instead(answer)

    async def _instead(self, answer: Answer) -> None:
        """Send this instead of the application's response, which is dropped."""
        self._is_claim_ended = True
        self._held.clear()
        await send_answer(self._pass_on, answer)
        self.stop_sending()
        self._let_on()
        await self._leave_rest()
        if self._error is not None:
            raise self._error

    def stop_sending(self) -> None:
        """Stop sending: the client has disconnected."""
        self._monitor.gone()
        if self._freed and self._running is not None:
            # It is unguarded, and may be endless: it ends as it would without a key.
            self._running.task.cancel()

    def give_up_sending(self) -> None:
        """Stop sending, also a message that is being sent: the request was cancelled.

        With it, the layers around us were: one of them may never take the message.
        """
        self.stop_sending()
        if self._sending is not None:
            self._is_interrupted = True
            self._sending.cancel()

    def let_go(self) -> None:
        """Let the application continue, however the exchange ended: nothing may wait for the end of its claim any more.

        An exchange that broke off (the guard raised something unexpected, the loop ends) leaves a response without a
        receiver.
        """
        if not self._is_sent:
            self._held.clear()
            self.stop_sending()
            self._let_on()

    def _let_on(self) -> None:
        self._holds_back = False
        self._is_claim_ended = self._is_sent = True
        self._may_go_on.set()
        self._may_hear_of_the_client.set()
        self.on_sent()

    def _settle(self) -> None:
        self._is_settled = True
        if self._on_settled is not None and not self._on_settled.done():
            self._on_settled.set_result(None)

    def _give_up(self) -> None:
        if not self._is_settled:
            self._given_up = True
            self._may_hear_of_the_client.set()

    async def _leave_rest(self) -> None:
        """Leave the application's work after its response to the request, which waits for it; or wait here."""
        if self._running is None:
            return
        if self.is_alone:
            await self.last()
        else:
            self.rest = self._running.task

    async def last(self, on_cancelled: Callable[[], None] = lambda: None) -> None:
        """Wait for the application's work after its response. Cancelling us cancels that, as without a key."""
        if self._running is None:
            return
        task = self._running.task
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await self._running.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                task.cancel()
                on_cancelled()
        if task.cancelled():
            if cancelled is not None:
                raise cancelled
        elif self._whole or self._freed:
            # Raise the error of a background task or an event stream, for the server to log.
            task.result()

    async def _receive(self) -> Message:
        """Return the body; then wait until the claim has ended.

        A disconnect does not end a request that has started.
        """
        message = next(self._unread, None)
        if message is not None:
            return message
        await self._may_hear_of_the_client.wait()
        return await self._client_says() if self._freed else {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._given_up:
            raise ClientGone
        if message["type"] == "http.response.start":
            # A copy: an outer layer may change it, and we remember what the application produced.
            message = {**message, "headers": list(message.get("headers") or ())}
        if not self._holds_back:
            await self._pass_on(message)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and not self._whole:
            if self._capture.malformed is not None:
                # As a server would: a stream whose start cannot be sent may be endless.
                self._held.clear()
                raise self._capture.malformed
            self._capture.add(message.get("body", b""))
            if message.get("more_body", False):
                self._monitor.begin()
                await self._flush()
            else:
                self._whole = True
                self._settle()
                await self._until_remembered()

    async def _until_remembered(self) -> None:
        bounds = deadlines()
        bound = bounds.add(REMEMBER_SECONDS, self._go_on_anyway)
        try:
            await self._may_go_on.wait()
        finally:
            bounds.remove(bound)

    def _go_on_anyway(self) -> None:
        if self._is_claim_ended:
            return
        LOG.warning(
            "a response was not remembered within %g s, and its application continues. Does it keep a "
            "transaction open after its response, for which the store waits? Commit before you respond",
            REMEMBER_SECONDS,
        )
        self._may_go_on.set()

    async def _begin(self, start: Message) -> None:
        self._capture.begin(start.get("status"), start["headers"])
        if self._capture.is_event_stream and not self._exchange.event_streams:
            # It may never end: by default, we keep no claim for it; and a client that has read it to its end may ask
            # again.
            self._freed = True
            self._settle()
            await self._may_go_on.wait()

    async def _flush(self) -> None:
        while self._held:
            held, self._held = self._held, []
            for message in held:
                await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if self._monitor.client_gone:
            self._monitor.unread(len(message.get("body", b"")))
            # Nothing slows this stream down any more, and others have to get their turn.
            await asyncio.sleep(0)
            return
        self.is_seen = True
        task = self._sending = asyncio.current_task()
        try:
            await self._to_client(message)
        except asyncio.CancelledError:
            if not self._is_interrupted or (task is not None and task.cancelling() > 1):
                raise
        except OSError:
            # This is how servers report a disconnected client. The handler need not know.
            self._monitor.gone()
        except Exception as error:  # noqa: BLE001 - raised once the response is remembered
            # A layer between us and the server has failed; the handler's effect has happened anyway.
            self._monitor.gone()
            self._error = error
        finally:
            self._sending = None
            if self._is_interrupted and task is not None:
                self._is_interrupted = False
                task.uncancel()


def reading_again(body: Body, receive: Receive) -> Receive:
    """Return a `receive` that replays the body, and then receives from the client."""
    unread = _messages_of(body)

    async def again() -> Message:
        return next(unread, None) or await receive()

    return again


def _messages_of(body: Body) -> Iterator[Message]:
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
