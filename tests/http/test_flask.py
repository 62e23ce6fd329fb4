"""Views of Flask: after their authentication, with what Flask makes of them; and a whole application."""

# Flask-Login has no types.
# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import flask
import flask_login
import pytest

from onefold import Done, Guard, Policy, UsageError, current
from onefold.http import Answer
from onefold.http.flask import IdempotencyMiddleware, by_header, by_user, idempotent, single_tenant

View = TypeVar("View", bound=Callable[..., Any])


@pytest.fixture
def app() -> flask.Flask:
    app = flask.Flask("shop")
    app.config.update(SECRET_KEY="for tests only")
    return app


@pytest.fixture
def paid() -> list[str]:
    return []


def post(app: flask.Flask, **wanted: Any) -> Any:
    headers = {"Idempotency-Key": "key", **wanted.pop("headers", {})}
    return app.test_client().post("/pay", headers=headers, **{"data": b"{}", **wanted})


def replays(*answers: Any) -> list[bool]:
    return [one.headers.get("Idempotent-Replayed") == "true" for one in answers]


def guarded(**options: Any) -> Callable[[View], View]:
    return idempotent(**{"guard": Guard("memory:"), "scope": single_tenant, **options})


@pytest.mark.parametrize(
    ("answer", "status"),
    [("text", 200), ({"paid": True}, 200), (("made", 201, {"X-Order": "7"}), 201), (flask.Response(status=204), 204)],
    ids=str,
)
def test_whatever_a_view_returns_is_replayed(app: flask.Flask, paid: list[str], answer: Any, status: int) -> None:
    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        paid.append(current().key)
        return answer

    first, second = post(app), post(app)

    assert (first.status_code, second.status_code) == (status, status)
    assert (second.data, second.headers.get("X-Order")) == (first.data, first.headers.get("X-Order"))
    assert second.headers.get("Content-Type") == first.headers.get("Content-Type")
    assert replays(first, second) == [False, True]
    assert paid == ["key"]


def test_an_async_view_is_async(app: flask.Flask) -> None:
    pytest.importorskip("asgiref")

    @app.post("/pay")
    @guarded()
    async def pay() -> str:
        return "paid"

    assert [post(app).text, post(app).text] == ["paid", "paid"]


def test_what_flask_makes_of_an_error_is_remembered(app: flask.Flask, paid: list[str]) -> None:
    class Declined(Exception):
        pass

    @app.errorhandler(Declined)
    def declined(_error: Exception) -> Any:
        return {"declined": True}, 402

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        paid.append("once")
        if flask.request.data == b"404":
            flask.abort(404)
        raise Declined

    missing = [post(app, data=b"404", headers={"Idempotency-Key": "missing"}) for _ in range(2)]
    refused = [post(app, headers={"Idempotency-Key": "refused"}) for _ in range(2)]

    assert [one.status_code for one in missing] == [404, 404]
    assert [one.json for one in refused] == [{"declined": True}] * 2
    assert replays(*missing, *refused) == [False, True] * 2
    assert paid == ["once", "once"]


@pytest.mark.parametrize(("policy", "second"), [(Policy(), 500), (Policy(after_crash="hold"), 409)])
def test_what_nobody_makes_an_answer_of_is_released_or_held(
    app: flask.Flask, paid: list[str], policy: Policy, second: int
) -> None:
    @app.post("/pay")
    @guarded(guard=Guard("memory:", policy=policy))
    def pay() -> Any:
        paid.append("once")
        raise RuntimeError("boom")

    assert [post(app).status_code, post(app).status_code] == [500, second]
    assert len(paid) == (2 if second == 500 else 1)


def test_a_probe_answers_in_the_place_of_a_view_that_failed(app: flask.Flask) -> None:
    policy = Policy(after_crash=lambda _current: Done(Answer(200, [], b"the bank says yes")))

    @app.post("/pay")
    @guarded(guard=Guard("memory:", policy=policy))
    def pay() -> Any:
        raise RuntimeError("boom")

    assert [post(app).data, post(app).data] == [b"the bank says yes"] * 2


def test_a_held_request_that_somebody_resolves_with_a_plain_value(app: flask.Flask) -> None:
    guard = Guard("memory:", policy=Policy(after_crash="hold"))

    @app.post("/pay")
    @guarded(guard=guard)
    def pay() -> Any:
        raise RuntimeError("boom")

    assert post(app).status_code == 500
    guard.resolve("http", "key", Done({"id": 17}), by="asha", reason="asked the bank")
    answer = post(app)

    assert (answer.status_code, answer.json, replays(answer)) == (200, {"id": 17}, [True])


# Streams.


def test_a_stream_is_read_to_its_end_and_one_beyond_the_limit_only_to_the_limit(app: flask.Flask) -> None:
    read: list[int] = []
    seen_at_the_end: list[int] = []

    def parts() -> Iterator[bytes]:
        for number in range(100):
            read.append(number)
            yield b"p" * 100

    @app.after_request
    def look(response: flask.Response) -> flask.Response:
        seen_at_the_end.append(len(read))
        return response

    @app.post("/pay")
    @guarded(body_max=1_000)
    def pay() -> Any:
        return flask.Response(parts())

    first, second = post(app), post(app)

    assert len(first.data) == 10_000
    assert seen_at_the_end[0] == 11
    assert (second.data, second.headers["Idempotent-Body"]) == (b"", "omitted")
    assert replays(first, second) == [False, True]


def test_a_file_is_replayed(app: flask.Flask, tmp_path: Any) -> None:
    (tmp_path / "receipt.txt").write_bytes(b"a receipt")

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return flask.send_file(tmp_path / "receipt.txt")

    with post(app) as first, post(app) as second:
        assert (first.data, second.data) == (b"a receipt", b"a receipt")
        assert replays(first, second) == [False, True]


def test_a_stream_is_closed_once_it_was_sent(app: flask.Flask) -> None:
    closed = []

    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"one ", b"two"])

        def close(self) -> None:
            closed.append(True)

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return flask.Response(Parts())

    with post(app) as answer:
        assert answer.data == b"one two"
    assert closed == [True]


# Bodies.


def test_a_form_reaches_the_view(app: flask.Flask) -> None:
    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return flask.request.form["amount"]

    answers = [post(app, data={"amount": amount}) for amount in ("5", "5", "6")]

    assert [one.status_code for one in answers] == [200, 200, 422]
    assert answers[0].data == b"5"


def test_a_form_that_was_read_before_is_a_bug_and_not_an_empty_body(app: flask.Flask) -> None:
    @app.before_request
    def look() -> None:
        assert flask.request.form["amount"]

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        raise AssertionError

    app.config["TESTING"] = True
    with pytest.raises(UsageError, match="read before"):
        post(app, data={"amount": "5"})


def chunked(data: bytes) -> dict[str, Any]:
    """A body without a length, as a server hands it over that ends it itself."""
    more = {"wsgi.input_terminated": True, "CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked"}
    return {"input_stream": io.BytesIO(data), "data": None, "environ_overrides": more}


FORM = "application/x-www-form-urlencoded"
READERS: dict[str, Callable[[], object]] = {
    "the form": lambda: flask.request.form,
    "the form, and then the data": lambda: (flask.request.form, flask.request.data),
    "the data of a form": lambda: flask.request.data,
    "the form, and then all of it": lambda: (flask.request.form, flask.request.get_data()),
    "all of it, and keeps nothing": lambda: (flask.request.get_data(cache=False), flask.request.get_data()),
    "a part of the stream": lambda: (flask.request.stream.read(3), flask.request.data),
    "the stream": lambda: (flask.request.stream.read(), flask.request.data),
}


@pytest.mark.parametrize("sent", ["with its length", "chunked"])
@pytest.mark.parametrize("reads", READERS)
def test_a_form_of_which_a_hook_left_nothing_is_never_compared_as_empty(
    app: flask.Flask, reads: str, sent: str
) -> None:
    app.before_request(lambda: (READERS[reads](), None)[1])
    app.config["TESTING"] = True

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        raise AssertionError

    with pytest.raises(UsageError, match="read before"):
        post(app, content_type=FORM, **({"data": b"amount=5"} if sent == "with its length" else chunked(b"amount=5")))


# What leaves a body that is no form where it is, or keeps it.
LOOKS: dict[str, Callable[[], object]] = {
    **{name: READERS[name] for name in ("the form", "the form, and then the data", "the data of a form")},
    "the form, and then all of it": READERS["the form, and then all of it"],
    "the values": lambda: flask.request.values,
    "the files": lambda: flask.request.files,
    "all of it": lambda: flask.request.get_data(cache=True),
    "the document": lambda: flask.request.get_json(silent=True),
}


@pytest.mark.parametrize("sent", ["with its length", "chunked"])
@pytest.mark.parametrize("reads", LOOKS)
def test_what_is_no_form_is_still_there_after_a_look_for_one(app: flask.Flask, reads: str, sent: str) -> None:
    """As a protection against forged requests looks for its token in every request."""
    app.before_request(lambda: (LOOKS[reads](), None)[1])

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return {"amount": flask.request.json["amount"]}

    bodies = [b'{"amount": %d}' % amount for amount in (5, 5, 6)]
    wanted = [{"data": body} if sent == "with its length" else chunked(body) for body in bodies]
    answers = [post(app, content_type="application/json", **one) for one in wanted]

    assert [one.status_code for one in answers] == [200, 200, 422]
    assert answers[0].json == {"amount": 5}


@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
@pytest.mark.parametrize("reads", LOOKS)
def test_an_empty_body_without_a_length_that_is_no_form_was_not_read(
    app: flask.Flask, reads: str, kind: str | None
) -> None:
    app.before_request(lambda: (LOOKS[reads](), None)[1])

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return "paid"

    answers = [post(app, content_type=kind, **chunked(b"")) for _ in range(2)]

    assert [one.status_code for one in answers] == [200, 200]
    assert replays(*answers) == [False, True]


@pytest.mark.parametrize("sent", ["with its length", "chunked"])
@pytest.mark.parametrize("reads", ["all of it, and keeps nothing", "the stream"])
def test_what_is_no_form_and_was_read_is_never_compared_as_empty(app: flask.Flask, reads: str, sent: str) -> None:
    app.before_request(lambda: (READERS[reads](), None)[1])
    app.config["TESTING"] = True

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        raise AssertionError

    with pytest.raises(UsageError, match="read before"):
        post(app, content_type="text/plain", **({"data": b"5"} if sent == "with its length" else chunked(b"5")))


@pytest.mark.parametrize("kind", [FORM, "application/json", "text/plain"])
@pytest.mark.parametrize("reads", [None, *READERS])
def test_a_body_that_is_empty_is_no_body_that_was_read(app: flask.Flask, kind: str, reads: str | None) -> None:
    if reads is not None:
        app.before_request(lambda: (READERS[reads](), None)[1])

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return "paid"

    answers = [post(app, data=b"", content_type=kind) for _ in range(2)]
    if reads is None:
        answers += [post(app, content_type=kind, **chunked(b"")) for _ in range(2)]

    assert [one.status_code for one in answers] == [200] * len(answers)
    assert replays(*answers)[1:] == [True] * (len(answers) - 1)


def test_a_hook_that_keeps_the_body_before_it_reads_the_form_does_no_harm(app: flask.Flask) -> None:
    app.before_request(lambda: (flask.request.get_data(), flask.request.form, flask.request.data, None)[3])

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return flask.request.form["amount"]

    answers = [post(app, data={"amount": amount}) for amount in ("5", "5", "6")]

    assert [one.status_code for one in answers] == [200, 200, 422]
    assert answers[0].data == b"5"


def test_of_a_part_of_a_body_nothing_runs(app: flask.Flask) -> None:
    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        raise AssertionError

    # As a server hands it over that ends the body itself, when its client has gone.
    cut = {"wsgi.input_terminated": True, "CONTENT_LENGTH": "8"}
    answer = post(app, data=None, input_stream=io.BytesIO(b"amou"), environ_overrides=cut)

    assert (answer.status_code, answer.json["code"]) == (400, "body_incomplete")


def test_json_that_was_read_before_is_still_there(app: flask.Flask) -> None:
    @app.before_request
    def look() -> None:
        assert flask.request.json

    @app.post("/pay")
    @guarded()
    def pay() -> Any:
        return {"amount": flask.request.json["amount"]}

    answers = [app.test_client().post("/pay", json={"amount": n}, headers={"Idempotency-Key": "k"}) for n in (5, 5, 6)]

    assert [one.status_code for one in answers] == [200, 200, 422]


# Whose key it is.


def test_the_user_of_flask_login_is_the_caller(app: flask.Flask, paid: list[str]) -> None:
    manager = flask_login.LoginManager(app)

    class User(flask_login.UserMixin):
        def __init__(self, name: str) -> None:
            self.id = name

    @manager.request_loader
    def load(request: Any) -> Any:
        name = request.headers.get("X-User")
        return User(name) if name else None

    @app.post("/pay")
    @guarded(scope=by_user)
    def pay() -> Any:
        paid.append(current().scope)
        return "paid"

    users = ["asha", "riya", "asha", ""]
    answers = [post(app, headers={"X-User": name}) for name in users]

    assert replays(*answers) == [False, False, True, False]
    assert (answers[3].status_code, answers[3].json["code"]) == (400, "caller_unknown")
    assert paid == ["asha", "riya"]


def test_a_login_above_is_asked_first_and_never_remembered(app: flask.Flask) -> None:
    flask_login.LoginManager(app).request_loader(lambda _request: None)

    @app.post("/pay")
    @flask_login.login_required
    @guarded(scope=by_user)
    def pay() -> Any:
        raise AssertionError

    assert post(app, headers={"Idempotency-Key": "two keys"}).status_code == 401


# The whole application below the middleware.


def test_the_middleware_guards_every_view_and_remembers_after_the_teardown(app: flask.Flask, paid: list[str]) -> None:
    guard = Guard("memory:")
    app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, guard=guard, scope=by_header("X-Api-Key")
    )

    @app.teardown_request
    def commit(_error: BaseException | None) -> None:
        if flask.request.headers.get("X-Fail"):
            raise RuntimeError("the commit failed")

    @app.post("/pay")
    def pay() -> Any:
        paid.append(flask.request.form["amount"])
        flask.session["seen"] = True
        return "paid"

    asha = {"X-Api-Key": "asha"}
    with pytest.raises(RuntimeError, match="the commit failed"):
        post(app, data={"amount": "5"}, headers={**asha, "X-Fail": "1"})
    first, second = (post(app, data={"amount": "5"}, headers=asha) for _ in range(2))

    assert replays(first, second) == [False, True]
    assert ("Set-Cookie" in first.headers, "Set-Cookie" in second.headers) == (True, False)
    assert paid == ["5", "5"]


def test_flask_login_is_not_asked_by_a_middleware_that_stands_outside_of_flask() -> None:
    app = flask.Flask("shop")
    flask_login.LoginManager(app)
    app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, guard=Guard("memory:"), scope=by_user
    )

    with pytest.raises(UsageError, match=r"the middleware is outside. Decorate the view with @idempotent"):
        app.test_client().post("/pay", headers={"Idempotency-Key": "key"})
