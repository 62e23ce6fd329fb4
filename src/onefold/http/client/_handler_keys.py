"""The key of a request that a guarded handler sends: derived from its delivery, so that a rerun sends the same one.

The name of a request is its method, its URL and a digest of its body; equal ones are numbered. The body is part of it,
so that one key never stands for two requests: a rerun may leave one out, or send them in another order.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from email.message import Message
from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakKeyDictionary

from onefold import UsageError, current
from onefold.current import Current
from onefold.http.client._retrying import mint, settles

# A longer name is taken by its digest: `key_for` takes a short one.
NAME_MAX: Final = 1_000

# Of the digest of a body: 128 bits.
DIGEST_DIGITS: Final = 32

# How many requests without a final answer are remembered for each name, so that a retry of one gets its key.
UNSETTLED_MAX: Final = 100


class Request(NamedTuple):
    """A request that is about to be sent, whatever its client."""

    method: str
    url: str
    body: bytes
    content_type: str = ""
    # The key that it carries already.
    given: str | None = None

    @property
    def name(self) -> str:
        """The name of its key: `POST https://api.example.com/payments 44136fa355b3678a1146ad16f7e8649e`."""
        scheme, host, path, query, _ = urlsplit(self.url)
        # Credentials are changed now and then, and a fragment is not sent.
        url = urlunsplit((scheme, host.rpartition("@")[2].lower(), path or "/", query, ""))
        return f"{self.method} {url} {self.digest.hex()[:DIGEST_DIGITS]}"

    @property
    def digest(self) -> bytes:
        """A digest of the body, in which the random boundary of a multipart body does not count."""
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


class HandlerCall:
    """One request of a handler, on its way or without a final answer."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.is_on_its_way = True
        self.is_settled = False

    def heard(self, status: int, headers: Mapping[str, str], body: bytes | None) -> None:
        """Note an answer."""
        self.is_settled = settles(status, headers, body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The client has an answer, or has given up.
        self.is_on_its_way = False


class HandlerCalls:
    """The requests of one name, which are equal, that one run of a handler has sent."""

    def __init__(self) -> None:
        self.count = 0
        self.unsettled: list[HandlerCall] = []

    def next(self, delivery: Current, name: str) -> HandlerCall:
        """Return the request that this one repeats, or a new one."""
        self.unsettled = [call for call in self.unsettled if not call.is_settled][-UNSETTLED_MAX:]
        for call in self.unsettled:
            # A handler that retries by itself means the same request.
            if not call.is_on_its_way:
                call.is_on_its_way = True
                return call
        self.count += 1
        numbered = name if self.count == 1 else f"{name} #{self.count}"
        call = HandlerCall(f'"{delivery.key_for(numbered)}"')
        self.unsettled.append(call)
        return call


_calls: WeakKeyDictionary[Current, dict[str, HandlerCalls]] = WeakKeyDictionary()
_mutex = threading.Lock()


class Minted(NamedTuple):
    """A request outside of every handler, or one with a key of the caller's own: nothing is remembered of it."""

    key: str

    def heard(self, status: int, headers: Mapping[str, str], body: bytes | None) -> None:
        """Nothing follows from the answer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left behind."""


def keyed(request: Request) -> HandlerCall | Minted:
    """Choose the key of a request outside of an intent: the given one, that of the running handler, or a new one."""
    if request.given:
        return Minted(request.given)
    delivery = _running()
    if delivery is None:
        return Minted(mint())
    step = delivery.step_name
    # A step that was finished before is not run again: equal requests after it must not get its numbers.
    name = _short(request.name if step is None else f"{step}: {request.name}")
    with _mutex:
        calls = _calls.setdefault(delivery, {}).setdefault(name, HandlerCalls())
        return calls.next(delivery, name)


def _running() -> Current | None:
    try:
        delivery = current()
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
