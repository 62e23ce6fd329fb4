"""Keep a client's intent across its crash: the key and the digest of the request, under a name.

It ends when a final response was received and its block was left without an error. Until then, entering an intent of
this name (in another process after a crash, say) sends the same key, and is refused if the request differs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Final, Self

from onefold import (
    AsyncGuard,
    Guard,
    InProgress,
    KeyReused,
    Outcome,
    OutcomeUnknown,
    Policy,
    Record,
    StoreUnavailable,
    UsageError,
)
from onefold._concurrency.generators import Flow, run, run_async
from onefold.durations import Duration, as_text, seconds
from onefold.http._shared.intents import OPERATION
from onefold.http.client._handler_keys import Keyed, Request
from onefold.http.client._identity import for_whom
from onefold.http.client._retrying import mint

# Creating a key takes no time; a process that finds another one doing it waits that long, and then takes over.
POLICY: Final = Policy(keep="forever", lease=10, wait=15)

# Checking whether a key is still ours does not wait for another process.
LOOKING: Final = POLICY.replace(wait=0)

# A record that was moved to another store between two reads is read again.
FORGET_ROUNDS: Final = 3


class intent:  # noqa: N801 - it is written as a verb: with intent("pay-order-42", store=...)
    """Keep one POST or PATCH under one key, whatever happens to the process.

    `with intent("pay-order-42", store="sqlite:///intents.db"):` or, around an async client, `async with`. `store` is
    anything that a guard takes, or a guard. A block that ends without an error but without a request raises
    `UsageError`.
    `server_keeps` is how long the server remembers a key, by its published policy. An older intent raises
    `OutcomeUnknown` and sends nothing: the server would treat it as a new request.
    """

    def __init__(self, name: str, *, store: Any, server_keeps: Duration = "24h") -> None:
        self.name = name
        self._server_keeps = seconds(server_keeps, "server_keeps")
        # The last request sent inside it.
        self._call: Keyed | None = None
        # Whether one of our clients sent a request inside it, or somebody has ended it by hand.
        self._is_used = False
        self._store = store
        self._sent: list[Any] | None = None
        self._key: str | None = None
        self._guard: Guard | AsyncGuard | None = None
        self._outer: Token[intent | None] | None = None

    def __enter__(self) -> Self:
        self._guard = self._sync_guard()
        return self._entered()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._left()
        assert isinstance(self._guard, Guard)
        try:
            if error is None and self.settled:
                run(self._forget(self._guard, _nothing_kept))
        finally:
            if self._guard is not self._store:
                self._guard.close()
        if error is None:
            self._check_used()

    async def __aenter__(self) -> Self:
        self._guard = self._async_guard()
        return self._entered()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._left()
        assert isinstance(self._guard, AsyncGuard)
        try:
            if error is None and self.settled:
                await run_async(self._forget(self._guard, _nothing_kept_async))
        finally:
            if self._guard is not self._store:
                await self._guard.aclose()
        if error is None:
            self._check_used()

    def end(self) -> None:
        """End it by hand, once its outcome is known: the next one of this name is a new request."""
        guard, self._is_used = self._sync_guard(), True
        try:
            run(self._end(guard, _nothing_kept))
        finally:
            if guard is not self._store:
                guard.close()

    async def aend(self) -> None:
        """End it by hand, async. See `end`."""
        guard, self._is_used = self._async_guard(), True
        try:
            await run_async(self._end(guard, _nothing_kept_async))
        finally:
            if guard is not self._store:
                await guard.aclose()

    def key_for(self, request: Request) -> str:
        """Return the key of this request: created once, stored before it is sent.

        Raise `KeyReused` for another request.
        """
        self._is_used = True
        if not isinstance(self._guard, Guard):
            raise UsageError("this intent was entered with `async with`, and the client is a blocking one")
        return run(self._key_for(request, self._guard, mint))

    async def key_for_async(self, request: Request) -> str:
        """Return the key of this request, async. See `key_for`."""
        self._is_used = True
        if not isinstance(self._guard, AsyncGuard):
            raise UsageError("this intent was entered with `with`, and the client is an async one")
        return await run_async(self._key_for(request, self._guard, _mint_async))

    def _key_for(self, request: Request, guard: Any, mint: Callable[[], Any]) -> Flow[str]:
        if self._is_sent_on(request):
            return self._key or ""
        payload = self._payload(request)
        try:
            found = yield partial(guard.run, OPERATION, self.name, mint, returns=str, payload=payload, policy=POLICY)
        except KeyReused as reused:
            raise self._another(reused) from None
        record = (yield partial(guard.read, OPERATION, self.name)) if found.replayed else None
        return self._kept(found, record)

    @property
    def settled(self) -> bool:
        """Return whether a final response was received, and read to its end."""
        return self._call is not None and self._call.is_settled

    def call_for(self, request: Request) -> Keyed:
        """Return the call of this request. Until its response is settled, the intent does not end."""
        call = self._call = Keyed(self.key_for(request), request, self)
        return call

    async def call_for_async(self, request: Request) -> Keyed:
        """Return the call of this request, async. See `call_for`."""
        call = self._call = Keyed(await self.key_for_async(request), request, self)
        return call

    def _end(self, guard: Any, nothing_kept: Callable[[], Any]) -> Flow[None]:
        if self._key:
            # Inside its block it knows its own key, and ends no other.
            yield from self._forget(guard, nothing_kept)
        else:
            yield partial(guard.forget, OPERATION, self.name)

    def _forget(self, guard: Any, nothing_kept: Callable[[], Any]) -> Flow[None]:
        """Forget our own key. A slow sender may find a newer one under the name, which is not ours to end."""
        look = partial(guard.run, OPERATION, self.name, nothing_kept, returns=str, payload=self._sent, policy=LOOKING)
        for _ in range(FORGET_ROUNDS):
            record = yield partial(guard.read, OPERATION, self.name)
            if record is None or record.state != "done":
                return
            try:
                # Our key is never created again: if it is found after the read, it existed at the read.
                found = yield look
            except (_NothingKept, InProgress, KeyReused):
                return
            if found.value != self._key or (yield partial(guard.forget, OPERATION, self.name, only=record)):
                return

    def _sync_guard(self) -> Guard:
        if isinstance(self._store, AsyncGuard):
            raise UsageError("an AsyncGuard keeps an intent inside `async with`")
        return self._store if isinstance(self._store, Guard) else Guard(self._store)

    def _async_guard(self) -> AsyncGuard:
        if isinstance(self._store, Guard):
            raise UsageError("a Guard keeps an intent inside `with`; for `async with` pass an AsyncGuard or a URL")
        return self._store if isinstance(self._store, AsyncGuard) else AsyncGuard(self._store)

    def _entered(self) -> Self:
        self._call, self._is_used, self._sent, self._key = None, False, None, None
        self._outer = _current.set(self)
        return self

    def _left(self) -> None:
        assert self._outer is not None
        _current.reset(self._outer)

    def _check_used(self) -> None:
        """Raise if no request was sent inside it: one sent another way had no key of ours, and would run twice."""
        if not self._is_used:
            raise UsageError(
                f"intent({self.name!r}) was left, and no POST or PATCH passed through it: anything that was sent was "
                "sent without its key, and a retry would happen twice. Send it inside the block, with a client that "
                "uses our Transport, AsyncTransport or Adapter. A thread does not inherit the block: start it with "
                "contextvars.copy_context().run"
            )

    def _is_sent_on(self, request: Request) -> bool:
        """Return whether it is our own request, redirected to another target. Another key is another intent."""
        if request.carried is not None:
            # The client's object was sent before, here or elsewhere: its key was not given by the user.
            sent = request.carried
            return sent.key == self._key and (sent.is_sent_on_as(request) or request.name in sent.names)
        if request.given is None:
            return False
        if request.given != self._key:
            raise UsageError(f"intent({self.name!r}) has a key of its own: send the request without one")
        return True

    def _payload(self, request: Request) -> list[Any]:
        payload: list[Any] = [request.method, request.url, request.digest]
        if whose := for_whom(request.headers):
            payload.append(whose)
        if self._sent not in (None, payload):
            raise UsageError(
                f"intent({self.name!r}) is one request, but another one was sent inside it. Nothing was sent"
            )
        self._sent = payload
        return payload

    def _another(self, reused: KeyReused) -> KeyReused:
        """Return the refusal of another request under a name whose intent has not ended."""
        error = KeyReused(
            f"intent({self.name!r}) was begun with another method, URL or body, or for another account, and has no "
            "final answer yet. Nothing was sent now. Send the first request again, inside this intent, to get its "
            f"answer; or find out from the server what happened, then end it: {self._ending()}. "
            "The next request under this name is then a new operation"
        )
        error.operation, error.key, error.scope = reused.operation, reused.key, reused.scope
        return error

    def _ending(self) -> str:
        """Return the line of code that ends it by hand, sync or async."""
        named = f"intent({self.name!r}, store=…)"
        return f"await {named}.aend()" if isinstance(self._guard, AsyncGuard) else f"{named}.end()"

    def _kept(self, found: Outcome[str], record: Record | None) -> str:
        """Return the key, if a restart would find it again, and if the server still remembers it."""
        if not found.recorded:
            raise StoreUnavailable(f"intent({self.name!r}) could not be stored for after a crash. Nothing was sent")
        if record is not None and record.age >= self._server_keeps:
            raise OutcomeUnknown(
                f"intent({self.name!r}) is {_old(record.age)} old, and the server remembers a key for "
                f"{as_text(self._server_keeps)} (server_keeps): its outcome is unknown. Nothing was sent. "
                f"Ask the server, then end the intent: {self._ending()}"
            )
        self._key = found.value
        return found.value


class _NothingKept(Exception):
    """There is no key under this name."""


def _nothing_kept() -> str:
    raise _NothingKept


async def _nothing_kept_async() -> str:
    raise _NothingKept


async def _mint_async() -> str:
    return mint()


def _old(age: float) -> str:
    """Format an age for people: nobody wants the milliseconds of a day."""
    return as_text(float(round(age)) if age >= 1 else age)


_current: ContextVar[intent | None] = ContextVar("onefold_intent", default=None)


def current_intent() -> intent | None:
    """Return the intent that is entered around us."""
    return _current.get()
