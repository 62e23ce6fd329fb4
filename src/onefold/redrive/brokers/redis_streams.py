"""Redis Streams, with redis-py: the dead letters of a stream, which are read by their ids and stay meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import redis
from redis import exceptions

from onefold.queues._redis_streams.consumer import BODY_FIELD, ENTRY_ID_HEADER, GROUP_HEADER, STREAM_HEADER
from onefold.redrive.letters import BrokerLost, Letter, NotSent, kept, text

OURS: Final = frozenset({STREAM_HEADER, GROUP_HEADER, ENTRY_ID_HEADER})

TIMEOUT: Final = 30.0
PAGE: Final = 100


def open_letters(url: str, name: str) -> Letters:
    try:
        client = redis.Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT)
    except ValueError as error:
        raise BrokerLost(f"the broker's URL cannot be used ({type(error).__name__})") from None
    with ExitStack() as opened, _told():
        opened.callback(client.close)
        try:
            found = Letters(client, name)
        except TypeError:
            raise BrokerLost("the broker's URL has an option that the client does not know") from None
        opened.pop_all()
    return found


class Letters:
    """The dead letters of one stream."""

    def __init__(self, client: Any, stream: str) -> None:
        self._client = client
        self._stream = stream
        kind = text(client.type(stream))
        if kind != "stream":
            raise BrokerLost(f"there is no stream {stream}" if kind == "none" else f"{stream} is a {kind}, no stream")
        newest = client.xrevrange(stream, count=1)
        self._last = text(newest[0][0]) if newest else ""

    def letters(self) -> Iterator[Letter]:
        begin = "-"
        while self._last:
            with _told():
                page = self._client.xrange(self._stream, begin, self._last, count=PAGE)
            for entry_id, fields in page:
                yield _letter(text(entry_id), fields)
            if len(page) < PAGE:
                return
            begin = f"({text(page[-1][0])}"

    def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
        # One by one: two names that are not text may look the same as text.
        fields = {name: one for name, one in letter.native.items() if kept({text(name): one}, OURS)} | dict(headers)
        if not fields:
            raise NotSent("it has no fields")
        with _told():
            try:
                # Not to a stream that does not exist: nobody reads it.
                added = self._client.xadd(to, fields, nomkstream=True)
            except exceptions.ResponseError as error:
                raise NotSent(f"{to} does not take it: {error}") from None
        if added is None:
            raise NotSent(f"there is no stream {to}")

    def remove(self, letter: Letter) -> None:
        with _told():
            self._client.xdel(self._stream, letter.position)

    def close(self) -> None:
        self._client.close()


def _letter(entry_id: str, fields: Mapping[Any, Any]) -> Letter:
    headers = {text(name): text(value) for name, value in fields.items() if text(name) != BODY_FIELD}
    body = next((value for name, value in fields.items() if text(name) == BODY_FIELD), b"")
    milliseconds = entry_id.partition("-")[0]
    age = max(time.time() - int(milliseconds) / 1000, 0.0) if milliseconds.isdecimal() else None
    return Letter(entry_id, body, headers, headers.get(STREAM_HEADER, ""), age, native=fields)


@contextmanager
def _told() -> Iterator[None]:
    """Turn an error of the client into one line."""
    try:
        yield
    except exceptions.AuthenticationError:
        raise BrokerLost("Redis refuses the login") from None
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise BrokerLost(f"Redis cannot be reached, or was lost: {type(error).__name__}") from None
    except exceptions.ResponseError as error:
        raise BrokerLost(f"Redis refuses it: {error}") from None
