"""Choose the key of a request: the given one, one derived from the delivery whose handler sends it, or a new one.

In a handler the name of a request consists of its method, its URL, a digest of its body, and its account; equal ones
are numbered. So a rerun sends the same keys, and one key never stands for two requests: a rerun may omit one, or send
them in another order. Follow-up requests (a redirect, a challenge, a retry) keep the key.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from typing import Any, Final, Self
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

from onefold import UsageError, current
from onefold.current import Current, NotOneDelivery
from onefold.http.client._answers import Answer
from onefold.http.client._identity import caller, for_whom
from onefold.http.client._retrying import mint

# A longer name is replaced by its digest: `key_for` takes a short one.
NAME_MAX: Final = 1_000

# Hexadecimal digits of a body's digest: 128 bits.
DIGEST_DIGITS: Final = 32

# How many requests without a final response are remembered per name, so that a retry of one gets its key.
UNSETTLED_MAX: Final = 100

# After these the same request may come again with other credentials.
UNAUTHORIZED: Final = frozenset({401, 403})

# A client repeats the request at the target of these; a PATCH also after 301. After the others it sends a GET.
SENT_ON: Final = frozenset({307, 308})
MOVED: Final = 301

PORTS: Final = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, eq=False)
class Request:
    """A request that is about to be sent, for any client."""

    method: str
    url: str
    body: bytes
    content_type: str = ""
    # The key that it already carries.
    given: str | None = None
    # The call whose key it carries, if that key is ours: the client's object was sent before, or copied from one.
    carried: Keyed | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        """Return the name of its key: `POST https://api.example.com/payments 44136fa355b3678a1146ad16f7e8649e`."""
        scheme, host, path, query, _ = urlsplit(self.url)
        # Credentials change from time to time, and a fragment is not sent.
        url = urlunsplit((scheme, host.rpartition("@")[2].lower(), path or "/", query, ""))
        name, whose = f"{self.method} {url} {self.digest.hex()[:DIGEST_DIGITS]}", for_whom(self.headers)
        return f"{name} {whose}" if whose else name

    @cached_property
    def digest(self) -> bytes:
        """Return a digest of the body, ignoring the random boundary of a multipart body."""
        parts = [self.body]
        if boundary := _boundary(self.content_type):
            parts = self.body.split(b"--" + boundary)
        whole = hashlib.sha256()
        if len(parts) > 1:
            whole.update(b"multipart")
            for part in parts:
                whole.update(len(part).to_bytes(8))
                whole.update(part)
        else:
            whole.update(self.body)
        return whole.digest()


class Keyed:
    """One request under one key, until its response is final: retried, redirected, sent again with credentials."""

    def __init__(self, key: str, request: Request, position: object = None, *, is_ours: bool = True) -> None:
        self.key = key
        # The caller's own key is used as it is.
        self.is_ours = is_ours
        # The place it is sent from: the delivery and its step, or an intent. The same object elsewhere is another
        # request.
        self.position = position
        self.method = request.method
        self.names: set[str] = set()
        self.callers: set[str] = set()
        self._answer: Answer | None = None
        self._is_led_on = False
        self._digest = request.digest
        self._url = request.url
        self._leads_to: str | None = None
        self._is_unauthorized = False
        self.go_on(request)

    @property
    def is_settled(self) -> bool:
        """Return whether its response is final, and was read to its end."""
        return self._answer is not None and self._answer.is_settled

    @property
    def is_busy(self) -> bool:
        """Return whether it is in flight, or its response is being read or followed elsewhere: no retry yet."""
        return self.is_on_its_way or (self._answer is not None and self._answer.is_awaited_elsewhere)

    @property
    def is_in_doubt(self) -> bool:
        """Return whether its response is held elsewhere, and may have been dropped: a retry cannot be recognized."""
        return not self.is_on_its_way and self._answer is not None and self._answer.is_in_doubt

    @property
    def redirect(self) -> Answer | None:
        """Return the redirect that is being followed by GET, if any: the response from there settles it."""
        return self._answer if self._is_led_on and not self.is_settled else None

    def go_on(self, request: Request) -> None:
        """Note that it is sent, or sent again."""
        self.is_on_its_way, self._answer, self._is_led_on = True, None, False
        self._url = request.url
        self.names.add(request.name)
        self.callers.add(caller(request.headers))

    def heard(self, status: int, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Note a response, and return it. The body is that of a problem document, decoded; None if it was not read."""
        self._is_unauthorized = status in UNAUTHORIZED
        goes_on = status in SENT_ON or (status == MOVED and self.method != "POST")
        location = headers.get("Location") if goes_on else None
        self._leads_to = _target(self._url, location) if location else None
        answer = self._answer = Answer(status, headers, body, self.reopened)
        self._is_led_on = answer.leads_on
        return answer

    def heard_there(self, status: int, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Note the response from its redirect's target, and return it."""
        self._answer = Answer(status, headers, body, self.reopened)
        return self._answer

    def reopened(self) -> None:
        """Note that its response broke off, after it had counted as final."""

    def again(self) -> Self:
        """Mark it as sent once more: until then no equal request is a retry of it."""
        self.is_on_its_way = True
        return self

    def is_continued_by(self, request: Request, position: object) -> bool:
        """Return whether this request follows from the one that was sent, and is not a new one.

        Raise if that is ambiguous.
        """
        if self.is_on_its_way or self.position != position:
            return False
        if self.is_sent_on_as(request) and self._leads_to == _plain(request.url):
            return True
        if self.is_busy or self.is_settled or request.name not in self.names:
            return False
        self.check_known(request)
        return True

    def is_sent_on_as(self, request: Request) -> bool:
        """Return whether a client may make this request from the received redirect, wherever that leads."""
        if self._leads_to is None or self.method != request.method:
            return False
        # Some omit the body after 301.
        return not request.body or request.digest == self._digest

    def check_known(self, request: Request) -> None:
        """Raise `UsageError` if it is ambiguous whether an equal request is a retry, or a second one."""
        if self.is_in_doubt:
            raise UsageError(
                f"this {request.method} is equal to an earlier one, sent with the key {self.key}, whose answer another "
                "thread or task has neither read to its end nor closed: a retry has to send the same key, a second "
                "request another one, and nobody can tell which it is. Nothing was sent. Close an answer that is not "
                "read to its end (`with` does), or name the key in the header Idempotency-Key"
            )

    def is_retried_by(self, who: str) -> bool:
        """Return whether an equal request by this caller is a retry: another caller's is another request."""
        # In this order: another thread may read its response to the end meanwhile, and then it is not busy any more.
        if self.is_busy or self.is_settled:
            return False
        # Credentials that were refused are renewed. Without credentials, callers cannot be told apart.
        return self._is_unauthorized or not who or who in self.callers or "" in self.callers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The client has a response, or has given up.
        self.is_on_its_way = False


class HandlerCall(Keyed):
    """One request of a handler."""

    def __init__(self, key: str, request: Request, position: object, equals: HandlerCalls) -> None:
        self._equals = equals
        super().__init__(key, request, position)

    def go_on(self, request: Request) -> None:
        super().go_on(request)
        self._equals.remember(self)

    def reopened(self) -> None:
        with _mutex:
            self._equals.remember(self)


class HandlerCalls:
    """The equal requests of one name that one run of a handler has sent."""

    def __init__(self) -> None:
        self.count = 0
        self.unsettled: list[HandlerCall] = []

    def remember(self, call: HandlerCall) -> None:
        if call not in self.unsettled:
            self.unsettled.append(call)

    def next(self, delivery: Current, name: str, request: Request, position: object) -> HandlerCall:
        """Return the request that this one repeats, or a new one."""
        self.unsettled = [call for call in self.unsettled if not call.is_settled][-UNSETTLED_MAX:]
        who = caller(request.headers)
        retried = [call for call in self.unsettled if call.is_retried_by(who)]
        if retried:
            # A handler that retries by itself means the same request. An ambiguous one comes last: equal requests may
            # swap keys.
            call = min(retried, key=lambda call: call.is_in_doubt)
            call.check_known(request)
            call.go_on(request)
            return call
        self.count += 1
        numbered = name if self.count == 1 else f"{name} #{self.count}"
        return HandlerCall(f'"{delivery.key_for(numbered)}"', request, position, self)


class DeliveryCalls:
    """The requests that one run of a handler has sent."""

    def __init__(self) -> None:
        self.by_name: dict[str, HandlerCalls] = {}
        self.by_key: WeakValueDictionary[str, HandlerCall] = WeakValueDictionary()

    def next(self, delivery: Current, request: Request, position: tuple[Any, str | None]) -> HandlerCall:
        step = position[1]
        # A step that was finished before is not run again: equal requests after it must not get its numbers.
        name = _short(request.name if step is None else f"{step}: {request.name}")
        call = self.by_name.setdefault(name, HandlerCalls()).next(delivery, name, request, position)
        self.by_key[call.key] = call
        return call


_calls: WeakKeyDictionary[Current, DeliveryCalls] = WeakKeyDictionary()

# Reentrant: the garbage collector may close an unread response while this is held.
_mutex = threading.RLock()


def keyed(request: Request) -> Keyed:
    """Choose the key of a request outside an intent: the given one, that of the running handler, or a new one."""
    delivery = _running(request)
    position = _position(delivery)
    # Its body is digested here, not while holding the lock.
    _ = request.name
    with _mutex:
        carried = request.carried
        if request.given and carried is None:
            return _given(delivery, request, position)
        if carried is not None and carried.is_continued_by(request, position):
            carried.go_on(request)
            return carried
        if delivery is None:
            return Keyed(mint(), request, position)
        return _calls.setdefault(delivery, DeliveryCalls()).next(delivery, request, position)


@contextmanager
def following(redirected: Keyed | None) -> Iterator[None]:
    """Watch the request to a redirect's target, if it is one: on an exception, there is no response."""
    try:
        yield
    except BaseException:
        if redirected is not None and (answer := redirected.redirect) is not None:
            answer.broke_off()
        raise


def _given(delivery: Current | None, request: Request, position: object) -> Keyed:
    """Use the given key. One that was copied by hand from a request of this handler continues that request."""
    key = request.given or ""
    calls = _calls.get(delivery) if delivery is not None else None
    copied = calls.by_key.get(key) if calls is not None else None
    if copied is not None and (copied.is_continued_by(request, position) or request.name in copied.names):
        copied.go_on(request)
        return copied
    return Keyed(key, request, is_ours=False)


def _position(delivery: Current | None) -> tuple[ReferenceType[Current] | None, str | None]:
    # Weak: remembering a delivery must not keep it alive.
    return (None, None) if delivery is None else (ref(delivery), delivery.step_name)


def _running(request: Request) -> Current | None:
    """Return the running delivery, if there is one. Raises `UsageError` in a batch, unless a key is given."""
    try:
        delivery = current()
    except NotOneDelivery:
        if request.given and request.carried is None:
            return None
        raise NotOneDelivery(
            f"this {request.method} was sent by a handler of a whole batch: it belongs to no single delivery, and a "
            "rerun would send it with another key, which is a second operation. Nothing was sent. Name its key in the "
            "header Idempotency-Key, derived from the message's own key, or send it inside a guard.run() or an intent()"
        ) from None
    except UsageError:
        return None
    return delivery if delivery.is_running else None


def _short(name: str) -> str:
    encoded = name.encode(errors="surrogatepass")
    return name if len(encoded) <= NAME_MAX else f"sha256:{hashlib.sha256(encoded).hexdigest()}"


def _boundary(content_type: str) -> bytes:
    if not content_type.strip().lower().startswith("multipart/"):
        return b""
    parsed = Message()
    parsed["Content-Type"] = content_type
    found = parsed.get_param("boundary")
    return found.encode(errors="surrogateescape") if isinstance(found, str) else b""


def _target(url: str, location: str) -> str | None:
    try:
        return _plain(urljoin(url, location))
    except ValueError:
        # No client can follow it.
        return None


def _plain(url: str) -> str:
    """Return a URL in canonical form, so that two URLs of the same target compare equal."""
    scheme, host, path, query, _ = urlsplit(url)
    host = host.rpartition("@")[2].lower().removesuffix(PORTS.get(scheme.lower(), "-"))
    return unquote(urlunsplit((scheme.lower(), host, path or "/", query, "")))
