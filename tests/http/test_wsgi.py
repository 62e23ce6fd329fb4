"""The WSGI middleware against applications of every manner: lists, generators, write(), errors, poor servers."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from onefold import AsyncGuard, Done, Guard, Policy, UsageError, current
from onefold.http import Answer
from onefold.http.wsgi import IdempotencyMiddleware, body_field, by_user, single_tenant
from tests.support import ProxyStore


class Client:
    """A server and its client in one: it keeps what it was sent, in the order in which it came."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        # What was written before the application returned.
        self.live = b""
        self.closed = False
        self.gone: Exception | None = None

    def post(self, body: bytes = b"{}", *, key: str | None = "key", **environ: Any) -> Client:
        self.__init__(self.app)  # type: ignore[misc]
        named = {} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}
        given: dict[str, Any] = {
            "REQUEST_METHOD": "POST",
            "SCRIPT_NAME": "",
            "PATH_INFO": "/pay",
            "QUERY_STRING": "",
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            **named,
            **environ,
        }
        parts = self.app({name: value for name, value in given.items() if value is not None}, self.start_response)
        self.live = self.body
        try:
            for part in parts:
                self.body += part
        finally:
            if hasattr(parts, "close"):
                parts.close()
        return self

    def start_response(self, status: str, headers: list[tuple[str, str]], _exc_info: Any = None) -> Any:
        self.status = int(status[:3])
        self.headers = {name.lower(): value for name, value in headers}
        return self.write

    def write(self, part: bytes) -> None:
        if self.gone is not None:
            raise self.gone
        self.body += part

    @property
    def is_replay(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


class App:
    """Counts its runs; `make` gives the answer."""

    def __init__(self, make: Callable[[Any, Any, int], Iterable[bytes]]) -> None:
        self.make = make
        self.runs = 0

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        self.runs += 1
        return self.make(environ, start_response, self.runs)


def guarded(app: Any, *, guard: Guard | None = None, **options: Any) -> Client:
    options = {"scope": single_tenant, **options}
    return Client(IdempotencyMiddleware(app, guard=guard or Guard("memory:"), **options))


HEADERS = [("Content-Type", "text/plain")]


def a_list(_environ: Any, start_response: Any, run: int) -> Iterable[bytes]:
    start_response("201 Created", HEADERS)
    return [b"run ", str(run).encode()]


def a_generator(_environ: Any, start_response: Any, run: int) -> Iterator[bytes]:
    start_response("201 Created", HEADERS)
    yield b""
    yield b"run "
    yield str(run).encode()


def a_writer(_environ: Any, start_response: Any, run: int) -> Iterable[bytes]:
    write = start_response("201 Created", HEADERS)
    write(b"run ")
    return [str(run).encode()]


def a_length(_environ: Any, start_response: Any, run: int) -> Iterable[bytes]:
    start_response("201 Created", [*HEADERS, ("Content-Length", "5")])
    return iter([b"run ", str(run).encode()])


@pytest.mark.parametrize("make", [a_list, a_generator, a_writer, a_length])
def test_every_manner_to_answer_is_passed_on_and_replayed(make: Any) -> None:
    app = App(make)
    client = guarded(app)

    first = (client.post().status, client.body, client.is_replay)
    second = (client.post().status, client.body, client.is_replay)

    assert first == (201, b"run 1", False)
    assert second == (201, b"run 1", True)
    assert client.headers["content-length"] == "5"
    assert app.runs == 1


def test_the_last_part_of_what_has_a_length_is_sent_once_it_is_remembered() -> None:
    store, seen = ProxyStore(), []
    client = guarded(App(a_length), guard=Guard(store))
    store.before["finish"] = lambda: seen.append(client.body)
    client.post()

    assert (seen, client.body) == ([b"run "], b"run 1")


def test_a_stream_is_passed_on_part_by_part() -> None:
    seen = []

    def stream(_environ: Any, start_response: Any, _run: int) -> Iterator[bytes]:
        start_response("200 OK", HEADERS)
        for number in range(3):
            seen.append(client.body)
            yield b"%d " % number

    client = guarded(App(stream))
    client.post()

    assert seen == [b"", b"0 ", b"0 1 "]
    assert client.live == b"0 1 2 "


# What breaks.


@pytest.mark.parametrize("gone", [OSError("gone"), RuntimeError("the server's own word for it")])
def test_a_client_that_goes_does_not_end_what_has_started(gone: Exception) -> None:
    app = App(a_generator)
    client = guarded(app)

    def leave(environ: Any, start_response: Any, run: int) -> Iterator[bytes]:
        start_response("201 Created", HEADERS)
        yield b"run "
        client.gone = gone
        yield str(run).encode()

    app.make = leave
    if isinstance(gone, OSError):
        client.post()
    else:
        with pytest.raises(RuntimeError, match="own word"):
            client.post()
    app.make = a_list

    assert client.post().is_replay
    assert (client.body, app.runs) == (b"run 1", 1)


def test_an_exception_before_the_first_part_can_still_become_a_500() -> None:
    def broken(_environ: Any, start_response: Any, _run: int) -> Iterator[bytes]:
        start_response("200 OK", HEADERS)
        raise RuntimeError("boom")
        yield b""

    app = App(broken)
    client = guarded(app)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            client.post()
        assert client.status == 0
    assert app.runs == 2


def test_an_exception_after_the_first_part_is_not_remembered() -> None:
    def broken(_environ: Any, start_response: Any, _run: int) -> Iterator[bytes]:
        start_response("200 OK", HEADERS)
        yield b"one"
        raise RuntimeError("boom")

    app = App(broken)
    client = guarded(app)
    with pytest.raises(RuntimeError, match="boom"):
        client.post()
    assert client.body == b"one"
    app.make = a_list
    assert (client.post().is_replay, client.body) == (False, b"run 2")


def test_an_error_page_takes_the_place_of_an_answer_that_nobody_has_seen() -> None:
    def repaired(_environ: Any, start_response: Any, _run: int) -> Iterable[bytes]:
        start_response("200 OK", HEADERS)
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            start_response("404 Not Found", HEADERS, sys.exc_info())
        return [b"nothing here"]

    client = guarded(App(repaired))
    answers = [(client.post().status, client.body, client.is_replay) for _ in range(2)]

    assert answers == [(404, b"nothing here", False), (404, b"nothing here", True)]


def test_an_error_page_after_the_beginning_is_the_error_itself() -> None:
    def late(_environ: Any, start_response: Any, _run: int) -> Iterator[bytes]:
        start_response("200 OK", HEADERS)
        yield b"one"
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            start_response("500 Oh", HEADERS, sys.exc_info())
        yield b"two"

    with pytest.raises(RuntimeError, match="boom"):
        guarded(App(late)).post()


def test_an_application_that_does_not_start_its_answer_is_a_bug_that_is_told() -> None:
    with pytest.raises(RuntimeError, match="start_response"):
        guarded(App(lambda *_: [])).post()


def test_what_fails_when_an_answer_is_closed_is_not_remembered() -> None:
    class Closes(list[bytes]):
        def close(self) -> None:
            raise RuntimeError("the commit failed")

    def teardown(environ: Any, start_response: Any, run: int) -> Iterable[bytes]:
        parts = a_list(environ, start_response, run)
        return Closes(parts) if run == 1 else parts

    app = App(teardown)
    client = guarded(app)
    with pytest.raises(RuntimeError, match="the commit failed"):
        client.post()

    assert client.body in (b"", b"run ")
    assert (client.post().is_replay, client.body) == (False, b"run 2")


def test_a_probe_answers_in_the_place_of_an_application_that_failed() -> None:
    def broken(_environ: Any, _start_response: Any, _run: int) -> Iterable[bytes]:
        raise RuntimeError("boom")

    policy = Policy(after_crash=lambda _current: Done(Answer(200, [], b"the bank says yes")))
    app = App(broken)
    client = guarded(app, guard=Guard("memory:", policy=policy))
    answers = [(client.post().status, client.body) for _ in range(2)]

    assert answers == [(200, b"the bank says yes")] * 2
    assert app.runs == 1


def test_a_probe_that_fails_is_503_and_is_asked_again() -> None:
    def broken(_environ: Any, _start_response: Any, _run: int) -> Iterable[bytes]:
        raise TimeoutError("boom")

    def ask(_current: Any) -> Any:
        raise ConnectionError("bank-3.internal")

    app = App(broken)
    client = guarded(app, guard=Guard("memory:", policy=Policy(after_crash=ask)))
    with pytest.raises(TimeoutError):
        client.post()

    assert [client.post().status for _ in range(2)] == [503, 503]
    assert (json.loads(client.body)["code"], client.headers["retry-after"], app.runs) == ("outcome_unknown", "1", 1)


def test_a_probe_that_knows_it_is_done_and_no_more_is_believed_the_first_time_too() -> None:
    def broken(_environ: Any, _start_response: Any, _run: int) -> Iterable[bytes]:
        raise RuntimeError("boom")

    client = guarded(App(broken), guard=Guard("memory:", policy=Policy(after_crash=lambda _current: Done())))
    answers = [(client.post().status, client.body) for _ in range(2)]

    assert answers == [(200, b"null")] * 2


def test_a_held_request_that_somebody_resolves_with_a_plain_value() -> None:
    def broken(_environ: Any, _start_response: Any, _run: int) -> Iterable[bytes]:
        raise RuntimeError("boom")

    guard = Guard("memory:", policy=Policy(after_crash="hold"))
    client = guarded(App(broken), guard=guard)
    with pytest.raises(RuntimeError):
        client.post()

    guard.resolve("http", "key", Done({"id": 17}), by="asha", reason="asked the bank")

    assert (client.post().status, client.body, client.is_replay) == (200, b'{"id":17}', True)
    assert client.headers["content-type"] == "application/json"


def test_a_store_that_is_down_is_503_and_nothing_runs() -> None:
    app, store = App(a_list), ProxyStore()
    store.die()
    client = guarded(app, guard=Guard(store)).post()

    assert (client.status, client.headers["retry-after"], app.runs) == (503, "1", 0)
    assert json.loads(client.body)["code"] == "store_unavailable"


def one_part(_environ: Any, start_response: Any, _run: int) -> Iterable[bytes]:
    start_response("201 Created", HEADERS)
    return [b"one"]


@pytest.mark.parametrize(("make", "status", "told"), [(one_part, 409, True), (a_generator, 201, False)])
def test_a_claim_that_was_lost_is_told_unless_a_part_was_seen(make: Any, status: int, told: bool) -> None:
    store = ProxyStore()
    store.inner.finish = lambda *_: False  # type: ignore[method-assign]
    client = guarded(App(make), guard=Guard(store)).post()

    assert (client.status, b"claim_lost" in client.body) == (status, told)


# Event streams.


@pytest.mark.parametrize("of", [list, iter])
def test_an_event_stream_is_whole_and_is_not_remembered(of: Any) -> None:
    closed = []

    def events(_environ: Any, start_response: Any, _run: int) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/event-stream; charset=utf-8")])
        return Events(of([b"data: 1\n\n", b"data: 2\n\n"]))

    class Events:
        def __init__(self, parts: Iterable[bytes]) -> None:
            self.parts = parts

        def __iter__(self) -> Iterator[bytes]:
            return iter(self.parts)

        def close(self) -> None:
            closed.append(True)

    app = App(events)
    client = guarded(app)
    for _ in range(2):
        assert (client.post().body, client.live, client.is_replay) == (b"data: 1\n\ndata: 2\n\n", b"", False)
    assert (app.runs, closed) == (2, [True, True])


# Bodies.


def echo(environ: Any, start_response: Any, _run: int) -> Iterable[bytes]:
    start_response("200 OK", HEADERS)
    return [environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))]


@pytest.mark.parametrize("size", [0, 10, 3 << 20])
def test_a_body_is_there_again(size: int) -> None:
    assert guarded(App(echo), body_max=4 << 20).post(b"a" * size).body == b"a" * size


def test_a_body_that_the_server_ends_is_read_to_its_end() -> None:
    client = guarded(App(echo))
    ended: dict[str, Any] = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}

    assert client.post(b"all of it", **ended).body == b"all of it"
    assert client.post(b"all of it").is_replay


@pytest.mark.parametrize(
    "environ",
    [
        {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked"},
        {"CONTENT_LENGTH": "many"},
        {"CONTENT_LENGTH": "-1"},
        {"CONTENT_LENGTH": "100"},
    ],
    ids=str,
)
def test_a_body_that_cannot_be_read_in_whole_runs_nothing(environ: Any) -> None:
    app = App(echo)
    client = guarded(app).post(b"some", **environ)

    assert (client.status, json.loads(client.body)["code"], app.runs) == (400, "body_incomplete", 0)


def test_without_a_length_and_without_an_end_there_is_no_body() -> None:
    assert guarded(App(echo)).post(b"", CONTENT_LENGTH=None).body == b""


def test_a_webhook_without_a_key_in_it_runs_with_its_body() -> None:
    app = App(echo)
    client = guarded(app, key=body_field("id"))

    assert client.post(b'{"type": "paid"}', key=None).body == b'{"type": "paid"}'
    assert app.runs == 1


# Where it stands.


def test_a_mounted_application_is_guarded_by_its_whole_path() -> None:
    app = App(a_list)
    client = guarded(app, required=["/v1/*"])
    paths = [("/v1", "/pay"), ("/v1", "/pay"), ("/v2", "/pay"), ("", "/v1/pay")]
    found = [(client.post(SCRIPT_NAME=mount, PATH_INFO=path).status, client.is_replay) for mount, path in paths]

    assert found == [(201, False), (201, True), (422, False), (201, True)]
    assert client.post(key=None, SCRIPT_NAME="/v1").status == 400
    assert app.runs == 1


def test_the_user_whom_the_server_names_is_the_caller() -> None:
    app = App(a_list)
    client = guarded(app, scope=by_user)
    found = [(client.post(REMOTE_USER=name).status, client.is_replay) for name in ("asha", "riya", "asha", None)]

    assert found == [(201, False), (201, False), (201, True), (400, False)]


def test_current_works_below_the_middleware() -> None:
    seen = []

    def look(environ: Any, start_response: Any, run: int) -> Iterable[bytes]:
        seen.append((current().operation, current().key))
        return a_list(environ, start_response, run)

    guarded(App(look), operation="payments").post()

    assert seen == [("payments", "key")]


def test_an_async_guard_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="needs a Guard"):
        IdempotencyMiddleware(App(a_list), guard=AsyncGuard("memory:"), scope=single_tenant)  # type: ignore[arg-type]
