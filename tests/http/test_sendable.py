"""An answer that HTTP has no form for is never final: a server would break at each replay. Its rule and adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import flask
import pytest
from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import StreamingResponse

from onefold import AsyncGuard, Done, Guard, Policy, State
from onefold.http._answers.capture import Capture
from onefold.http._answers.rules import ServerFailed
from onefold.http._answers.sendable import UnsendableAnswer
from onefold.http._shared.messages import Answer
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from onefold.http.fastapi import idempotent_route
from onefold.http.flask import idempotent
from tests.http_service.visitor import Visitor
from tests.support import in_time

HOLD = Policy(after_crash="hold")

Headers = list[tuple[Any, Any]]


def captured(status: Any, headers: Headers, *parts: bytes, method: str = "POST", limit: int = 100) -> Answer:
    capture = Capture(limit, method)
    capture.begin(status, headers)
    for part in parts:
        capture.add(part)
    return capture.answer()


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        (99, [], "not a valid status"),
        (103, [], "not a valid status"),
        (600, [], "not a valid status"),
        ("600 More", [], "not a valid status"),
        (None, [], "not a valid status"),
        ("200 OK\r\nX-Evil: 1", [], "not a status line"),
        ("200 Готово", [], "not a status line"),
        ("٢٠٠ OK", [], "not a status line"),
        (200, [(b"x own", b"1")], "not a header name"),
        (200, [(b"", b"1")], "not a header name"),
        (200, [("X-Own:", "1")], "not a header name"),
        (200, [("X-Ünder", "1")], "not a header name"),
        (200, [(b"x-own\r\nx-evil", b"1")], "not a header name"),
        (200, [(b"x-own", b"secret\r\nx-evil: 1")], "b'x-own' has a control character"),
        (200, [(b"x-own", b"\n")], "has a control character"),
        (200, [(b"x-own", b"\0")], "has a control character"),
        (200, [(b"x-own", b"\x7f")], "has a control character"),
        (200, [("X-Own", "счёт")], "cannot be sent"),
        (200, [(b"x-own", 5)], "int instead of text or bytes"),
        (200, [(b"x-own",)], "cannot be sent"),
        (200, [5], "cannot be sent"),
        (200, [(b"content-length", b"5")], "has 4 bytes, but its Content-Length is 5"),
        (200, [(b"Content-Length", b"3")], "has 4 bytes, but its Content-Length is 3"),
        (200, [(b"content-length", b"four")], "not a number of bytes"),
        (200, [(b"content-length", b"-4")], "not a number of bytes"),
        (200, [(b"content-length", b"")], "not a number of bytes"),
        (200, [(b"content-length", b"4, 4")], "not a number of bytes"),
        (200, [(b"content-length", b"4"), (b"content-length", b"5")], "has two values"),
        (200, [(b"content-length", b"0" * 21)], "not a number of bytes"),
    ],
)
def test_what_cannot_be_sent_is_a_failure(status: Any, headers: Headers, says: str) -> None:
    with pytest.raises(ServerFailed) as failed:
        captured(status, headers, b"do", b"ne")

    assert isinstance(failed.value.__cause__, UnsendableAnswer)
    assert says in str(failed.value.__cause__)
    assert "secret" not in str(failed.value.__cause__)


@pytest.mark.parametrize(
    ("status", "headers", "kept"),
    [
        (599, [], Answer(599, [], b"done")),
        ("200", [], Answer(200, [], b"done")),
        ("404 Not Found \x80", [], Answer(404, [], b"done")),
        (200, [("X-Own", "\tcafé \t")], Answer(200, [(b"X-Own", b"caf\xe9")], b"done")),
        (200, [(b"x-own", b"")], Answer(200, [(b"x-own", b"")], b"done")),
        (200, [(b"content-length", b" 004 ")] * 2, Answer(200, [(b"content-length", b"004")] * 2, b"done")),
        # What was given with these is no body.
        (204, [(b"content-length", b"9")], Answer(204, [(b"content-length", b"9")])),
        (304, [(b"content-length", b"9")], Answer(304, [(b"content-length", b"9")])),
        # Its chunks have their own lengths.
        (
            200,
            [(b"transfer-encoding", b"chunked"), (b"content-length", b"9")],
            Answer(200, [(b"transfer-encoding", b"chunked"), (b"content-length", b"9")], b"done"),
        ),
    ],
)
def test_what_can_be_sent_is_kept_in_a_form_that_every_server_sends(
    status: Any, headers: Headers, kept: Answer
) -> None:
    assert captured(status, headers, b"do", b"ne") == kept


def test_a_length_counts_all_of_a_body_that_is_not_kept() -> None:
    length = [(b"content-length", b"200")]

    assert captured(200, length, b"x" * 150, b"x" * 50).cut
    with pytest.raises(ServerFailed):
        captured(200, length, b"x" * 150, b"x" * 51)


def test_the_length_of_an_answer_to_head_is_that_of_another_one() -> None:
    assert captured(200, [(b"content-length", b"200")], method="HEAD").status == 200


def test_a_part_that_is_no_bytes_is_refused_also_where_no_body_is_kept() -> None:
    part: Any = "done"

    with pytest.raises(TypeError, match="has to be bytes, not str"):
        captured(200, [], part, limit=0)


@pytest.mark.parametrize("kept", [Answer(600, []), Answer(200, [(b"x-own", b"\r\n")]), Answer(200, [(b"x own", b"")])])
def test_a_kept_answer_that_cannot_be_sent_is_not_kept(kept: Answer) -> None:
    """Of an earlier release, a probe, or a person."""

    async def story() -> tuple[int, bytes]:
        guard = AsyncGuard("memory:", policy=Policy(after_crash=lambda _current: Done(kept)))
        app = IdempotencyMiddleware(breaks, guard=guard, scope=single_tenant)
        visitor = await Visitor(app).visit()
        return visitor.status, visitor.body

    async def breaks(_scope: Any, _receive: Any, _send: Any) -> None:
        raise TimeoutError

    status, body = in_time(story())
    assert (status, b'"result_not_kept"' in body) == (409, True)


def test_an_application_that_catches_what_cannot_be_sent_may_answer_otherwise() -> None:
    """As one may where a server refuses it."""

    async def careful(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x own", b"yes")]})
        with pytest.raises(UnsendableAnswer):
            await send({"type": "http.response.body", "body": b"done"})
        if catches == "and answers":
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"again"})

    async def story() -> tuple[Any, list[Visitor]]:
        guard = AsyncGuard("memory:", policy=HOLD)
        app = IdempotencyMiddleware(careful, guard=guard, scope=single_tenant)
        visitors = [Visitor(app) for _ in range(2)]
        for visitor in visitors:
            with suppress(UnsendableAnswer):
                await visitor.visit()
        return await guard.read("http", "key"), visitors

    catches = "and answers"
    record, (first, again) = in_time(story())
    assert (record.state, first.status, first.body) == (State.DONE, 201, b"again")
    assert (again.status, again.body, again.is_replay) == (201, b"again", True)

    catches = "and ends"
    record, (first, again) = in_time(story())
    assert (record.state, record.remark) == (State.HELD, "attempt 1 ended in UnsendableAnswer")
    assert (first.sent, again.status) == ([], 409)


# In every adapter, whose servers are in test_stacks.py: here are the ones inside of a framework.


def with_route_class(response: Callable[[], Any]) -> State:
    async def story() -> State:
        guard = AsyncGuard("memory:", policy=HOLD)
        router = APIRouter(route_class=idempotent_route(guard=guard, scope=single_tenant))
        router.add_api_route("/pay", response, methods=["POST"], response_model=None)
        app = FastAPI()
        app.include_router(router)
        visitor = Visitor(app)
        with pytest.raises(UnsendableAnswer):
            await visitor.visit()
        assert visitor.status == 500
        record = await guard.read("http", "key")
        await guard.aclose()
        assert record is not None
        assert record.remark == "attempt 1 ended in UnsendableAnswer"
        return record.state

    return in_time(story())


@pytest.mark.parametrize(
    "response",
    [
        lambda: Response(b"done", headers={"X-Own": "yes\r\nX-Evil: 1"}),
        lambda: Response(b"done", headers={"Content-Length": "200"}),
        lambda: Response(b"done", 600),
        lambda: StreamingResponse(iter([b"done"]), headers={"X Own": "yes"}),
    ],
    ids=["header", "length", "status", "stream"],
)
def test_the_route_class_holds_what_cannot_be_sent(response: Callable[[], Any]) -> None:
    assert with_route_class(response) is State.HELD


@pytest.mark.parametrize(
    "response",
    [
        lambda: flask.Response(b"done", headers={"X Own": "yes"}),
        lambda: flask.Response(b"done", 600),
        lambda: flask.Response(iter([b"done"]), headers={"Content-Length": "200"}),
    ],
    ids=["header", "status", "stream"],
)
def test_the_decorator_of_flask_holds_what_cannot_be_sent(response: Callable[[], Any]) -> None:
    app, guard = flask.Flask("shop"), Guard("memory:", policy=HOLD)
    app.add_url_rule("/pay", view_func=idempotent(guard=guard, scope=single_tenant)(response), methods=["POST"])

    first, again = [app.test_client().post("/pay", headers={"Idempotency-Key": "key"}) for _ in range(2)]

    assert (first.status_code, again.status_code, again.get_json()["code"]) == (500, 409, "held")
    guard.close()
