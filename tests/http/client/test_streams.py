"""requests with `stream=True`: an answer has ended when it was received in whole, however it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import requests
import urllib3

from onefold import Guard
from onefold.http.client import Adapter, Retries
from onefold.http.client._requests.bodies import _Rest
from tests.http_service.scripted import Say, Scripted, scripted

ONCE = Retries(attempts=1)
BODY = b"a" * 1_000

# Those of urllib3, and those of requests above it.
LOST = (urllib3.exceptions.HTTPError, requests.RequestException)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


def send_in_handler(server: Scripted, times: int, read: Callable[[Any], Any]) -> list[str | None]:
    """Send equal requests, read each answer in this way, and return their keys."""

    def handle() -> None:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=ONCE))
            for _ in range(times):
                with session.post(server.url, data=b"{}", stream=True) as response, suppress(*LOST):
                    read(response)

    Guard("memory:").run("charge", "1", handle)
    return server.keys


def until_empty(read: Callable[[], bytes]) -> bytes:
    whole = b""
    while part := read():
        whole += part
    return whole


TO_THE_END: dict[str, Callable[[Any], Any]] = {
    "content": lambda response: response.content,
    "iter_content": lambda response: b"".join(response.iter_content(64)),
    "read": lambda response: response.raw.read(),
    "read more than there is": lambda response: response.raw.read(10_000),
    "read in parts": lambda response: until_empty(lambda: response.raw.read(64)),
    "read1 in parts": lambda response: until_empty(response.raw.read1),
    "readinto": lambda response: response.raw.readinto(bytearray(10_000)),
    "data": lambda response: response.raw.data,
    "lines": lambda response: list(response.raw),
    "drain_conn": lambda response: response.raw.drain_conn(),
}
BY_LENGTH: dict[str, Callable[[Any], Any]] = {
    "read as much as there is": lambda response: response.raw.read(len(BODY)),
    "read1": lambda response: response.raw.read1(len(BODY)) or response.raw.read1(),
    "the one part of iter_content": lambda response: next(response.iter_content(len(BODY))),
}
IN_CHUNKS: dict[str, Callable[[Any], Any]] = {
    "read_chunked": lambda response: b"".join(response.raw.read_chunked()),
}


def ways(*, chunked: bool) -> dict[str, Callable[[Any], Any]]:
    return TO_THE_END | (IN_CHUNKS if chunked else BY_LENGTH)


@pytest.mark.parametrize(
    ("chunked", "way"), [(chunked, way) for chunked in (False, True) for way in ways(chunked=chunked)]
)
def test_after_an_answer_that_was_received_in_whole_an_equal_request_is_a_new_one(
    server: Scripted, chunked: bool, way: str
) -> None:
    server.script = [Say(201, body=BODY, chunked=chunked)]

    first, second = send_in_handler(server, 2, ways(chunked=chunked)[way])

    assert first != second


NOT_TO_THE_END: dict[str, Callable[[Any], Any]] = {
    "read": lambda response: response.raw.read(64),
    "read nothing": lambda response: response.raw.read(0),
    "read1": lambda response: response.raw.read1(64),
    "iter_content": lambda response: next(response.iter_content(64)),
    "after it was closed": lambda response: (response.raw.close(), response.raw.read(64)),
}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("way", NOT_TO_THE_END)
def test_after_a_part_of_an_answer_an_equal_request_is_a_retry(server: Scripted, chunked: bool, way: str) -> None:
    server.script = [Say(201, body=BODY, chunked=chunked)]

    first, second = send_in_handler(server, 2, NOT_TO_THE_END[way])

    assert first == second


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("way", TO_THE_END)
def test_after_an_answer_that_was_cut_an_equal_request_is_a_retry(server: Scripted, chunked: bool, way: str) -> None:
    server.script = [Say(201, body=BODY, chunked=chunked, cut="body"), Say(201)]

    first, second = send_in_handler(server, 2, TO_THE_END[way])

    assert first == second


def test_the_rest_of_a_long_answer_begins_with_what_was_read_of_it() -> None:
    def rest() -> Any:
        return _Rest([b"one ", b"two "], iter([b"three"]), None)

    assert b"".join(rest().stream()) == rest().read() == b"one two three"
    in_parts = rest()
    assert [in_parts.read(3), in_parts.read(0), in_parts.read(3), in_parts.read()] == [b"one", b"", b" ", b"two three"]
    assert until_empty(lambda: in_parts.read(3)) == b""
