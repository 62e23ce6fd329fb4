"""Read the bodies of requests' responses, and note how far their readers have read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache, wraps
from itertools import chain
from typing import Any, Final

import requests
import urllib3

from onefold.http.client._answers import Answer, breaking_off, watching
from onefold.http.client._retrying import ANSWER_MAX, PROBLEM_MAX, is_problem

READ_BYTES: Final = 1 << 16


def problem(response: requests.Response) -> bytes | None:
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


def read_problem(response: requests.Response) -> None:
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
    """Return the part of a long response that was read, then the rest; everything else is urllib3's own."""

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


def monitor(response: requests.Response, answer: Answer) -> None:
    """Note when a response was read to its end. If a streamed one breaks off, its reader has to ask again."""
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
