"""The rules of Idempotency-Key without a framework: the key, what is final, what is replayed, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onefold import (
    AsyncGuard,
    ClaimLost,
    Done,
    Guard,
    Held,
    InProgress,
    InsideItself,
    KeyReused,
    MissingKey,
    NotInTransaction,
    OnefoldError,
    Outcome,
    OutcomeUnknown,
    Policy,
    ProbeFailed,
    RememberedFailure,
    ResultNotKept,
    ResultUnreadable,
    StoreUnavailable,
    UsageError,
)
from onefold._model import Address
from onefold.errors import MEANINGS
from onefold.events import subscribe
from onefold.http._answers.rules import RULES, NotFinal, ServerFailed, is_final, replayed, settled
from onefold.http._exchange.deliveries import deliver, deliver_async
from onefold.http._exchange.rules import Exchange, GuardRequest
from onefold.http._requests.keys import KEY_BODY_MAX, body_field, header_key, parsed
from onefold.http._shared.messages import SPOOL_MAX, Answer, Body, Refused, Request
from onefold.http.scopes import by_header, single_tenant
from onefold.keys import KEY_MAX
from tests.support import PROJECT, in_time

CONFORMANCE = Path(os.environ.get("ONEFOLD_CONFORMANCE", PROJECT.parent / "shared" / "conformance"))


def request(method: str = "POST", path: str = "/pay", query: bytes = b"", **headers: str | list[str]) -> Request:
    pairs = [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, values in headers.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    return Request(method, path, query, pairs)


@pytest.fixture
def body() -> Iterator[Body]:
    with closing(Body()) as body:
        yield body


# The key.


def vectors() -> list[Any]:
    folder = CONFORMANCE / "structured-fields"
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [
        pytest.param(one, id=f"{file.stem}: {one['name']}") for file in files for one in json.loads(file.read_text())
    ]


@pytest.mark.skipif(not vectors(), reason="the structured-field vectors are not beside the project")
@pytest.mark.parametrize("vector", vectors())
def test_the_header_is_parsed_as_the_structured_field_tests_say(vector: dict[str, Any]) -> None:
    raw = ", ".join(vector["raw"]).encode("utf-8")
    expected = vector.get("expected", [None])[0]
    is_key = isinstance(expected, str) and expected.strip() != "" and len(expected) <= KEY_MAX

    if vector.get("must_fail") or (expected is None or not is_key):
        with pytest.raises(Refused):
            parsed(raw, strict=True)
    else:
        assert parsed(raw, strict=True) == expected


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        (b'"8e03978e-40d5-43dd-bc93-6894a57f9324"', "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        (b'  "a key"  ', "a key"),
        (rb'"a \"b\" \\"', r'a "b" \\'[:-1]),
        (b'"key";version=2', "key"),
        (b"pay:7f3a/x=1", "pay:7f3a/x=1"),
        (b"k" * KEY_MAX, "k" * KEY_MAX),
    ],
)
def test_a_quoted_and_a_bare_key_are_the_same_key(value: bytes, key: str) -> None:
    assert parsed(value) == key


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"   ",
        b'""',
        b'"   "',
        b"k" * (KEY_MAX + 1),
        b'"' + b"k" * (KEY_MAX + 1) + b'"',
        b"two keys",
        b"one, two",
        b'"one", "two"',
        b'"open',
        b'a"b',
        b"caf\xc3\xa9",
        b'"caf\xc3\xa9"',
        b"tab\there",
        b"nul\x00",
        b"esc\x1b[31m",
    ],
)
def test_what_cannot_be_a_key_is_refused(value: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parsed(value)

    assert refused.value.code == "key_malformed"


def test_strict_takes_only_the_quoted_form() -> None:
    assert parsed(b'"key"', strict=True) == "key"
    for value in (b"key", b"8e03978e", b"1", b"?1", b":aGVsbG8=:"):
        with pytest.raises(Refused):
            parsed(value, strict=True)


def test_a_header_that_was_sent_twice_is_refused(body: Body) -> None:
    exchange = Exchange(scope=single_tenant)

    with pytest.raises(Refused, match="2 times"):
        exchange.passes(request(Idempotency_Key=["a", "a"]))


@pytest.mark.parametrize(
    ("kind", "content", "key"),
    [
        ("application/json", b'{"id": "evt_1", "type": "paid"}', "evt_1"),
        ("application/json; charset=utf-8", b'{"id": 17}', "17"),
        ("application/x-www-form-urlencoded", b"id=evt_1&type=paid", "evt_1"),
        ("application/json", b'{"type": "paid"}', None),
        ("application/json", b'["evt_1"]', None),
        ("application/json", b"", None),
        ("text/plain", b"not json", None),
    ],
)
def test_a_webhooks_key_comes_from_a_field_of_its_body(kind: str, content: bytes, key: str | None, body: Body) -> None:
    body.add(content)

    assert body_field("id")(request(Content_Type=kind), body) == key


def test_a_nested_field_and_another_header_can_be_the_key(body: Body) -> None:
    body.add(b'{"event": {"id": "evt_1"}}')

    assert body_field("event.id")(request(), body) == "evt_1"
    assert header_key("X-Event-Id")(request(X_Event_Id="evt_2"), body) == "evt_2"


@pytest.mark.parametrize(
    "content",
    [
        b'{"id": ""}',
        b'{"id": true}',
        b'{"id": 1.5}',
        b'{"id": {"a": 1}}',
        b'{"id": ' + b"9" * 300 + b"}",
        b'{"id": ' + b"[" * 100_000,
        b'{"id": "' + b"k" * (KEY_MAX + 1) + b'"}',
        b'{"id": 1}' + b" " * KEY_BODY_MAX,
    ],
    ids=lambda content: str(content[:20]),
)
def test_a_field_that_cannot_be_a_key_is_refused(content: bytes, body: Body) -> None:
    body.add(content)

    with pytest.raises(Refused):
        body_field("id")(request(), body)


# Which requests.


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_other_methods_pass_untouched_even_with_a_key_that_is_none(method: str) -> None:
    assert Exchange(scope=single_tenant, required=True).passes(request(method, Idempotency_Key="two keys"))


def test_a_key_is_optional_unless_the_path_needs_one(body: Body) -> None:
    exchange = Exchange(scope=single_tenant, required=["/pay", "/orders/*"])

    assert exchange.passes(request(path="/notes"))
    assert not exchange.passes(request(path="/notes", Idempotency_Key="key"))
    for path in ("/pay", "/orders/7"):
        with pytest.raises(Refused) as refused:
            exchange.passes(request(path=path))
        assert refused.value.code == "key_missing"


def test_the_fingerprint_is_method_path_query_and_body(body: Body) -> None:
    exchange = Exchange(scope=single_tenant)
    body.add(b"one")
    with closing(Body()) as other:
        other.add(b"two")
        asked = [
            exchange.guard_request(request(method, path, query, Idempotency_Key="key"), content)
            for method, path, query, content in (
                ("POST", "/pay", b"", body),
                ("PATCH", "/pay", b"", body),
                ("POST", "/refund", b"", body),
                ("POST", "/pay", b"a=1", body),
                ("POST", "/pay", b"", other),
            )
        ]

        other_path = exchange.guard_request(request(path="/pay/", Idempotency_Key="key"), body)
        small = exchange.guard_request(request("patch", Idempotency_Key="key"), body)

    fingerprints = [ask.payload for ask in asked if ask is not None]
    assert len(fingerprints) == 5
    assert all(fingerprints.count(one) == 1 for one in fingerprints)
    # A slash at the end makes another path, and the case of a method no other method.
    assert other_path is not None
    assert other_path.payload not in fingerprints
    assert small is not None
    assert small.payload == fingerprints[1]


def test_a_large_body_is_hashed_in_full_and_read_again(body: Body) -> None:
    parts = [bytes([number]) * 300_000 for number in range(2 * SPOOL_MAX // 300_000)]
    for part in parts:
        body.add(part)

    assert b"".join(body.chunks()) == b"".join(parts)
    assert b"".join(body.chunks()) == b"".join(parts)
    assert body.size == sum(map(len, parts))


# Whose key.


def test_a_credential_becomes_a_keyed_digest_and_never_stands_in_clear() -> None:
    of = by_header("X-Api-Key", secret="s")
    asha, riya = of(request(X_Api_Key="sk_asha")), of(request(X_Api_Key="sk_riya"))

    assert asha != riya
    assert asha == of(request(X_Api_Key="sk_asha"))
    assert "sk_asha" not in str(asha)
    assert asha != by_header("X-Api-Key", secret="another")(request(X_Api_Key="sk_asha"))


@pytest.mark.parametrize("headers", [{}, {"X_Api_Key": " "}, {"X_Api_Key": ["a", "b"]}])
def test_a_key_without_a_caller_is_refused(headers: Any, body: Body) -> None:
    exchange = Exchange(scope=by_header("X-Api-Key"))

    with pytest.raises(Refused) as refused:
        exchange.guard_request(request(Idempotency_Key="key", **headers), body)

    assert refused.value.code == "caller_unknown"


@pytest.mark.parametrize("caller", [None, "", " ", "t" * 256, "nul\0", "half\ud800"])
def test_a_caller_that_is_nobody_in_particular_is_refused(caller: str | None, body: Body) -> None:
    exchange = Exchange(scope=lambda _request: caller)

    with pytest.raises(Refused) as refused:
        exchange.guard_request(request(Idempotency_Key="key"), body)

    assert refused.value.code == "caller_unknown"


def test_a_caller_that_is_no_text_is_a_bug(body: Body) -> None:
    with pytest.raises(UsageError, match="returned a int"):
        Exchange(scope=lambda _request: 42).guard_request(request(Idempotency_Key="key"), body)  # type: ignore[arg-type, return-value]


def test_there_is_no_default_for_the_caller() -> None:
    with pytest.raises(TypeError, match="scope"):
        Exchange()  # type: ignore[call-arg]


# What is final.

STATUSES = [
    *(200, 201, 204, 301, 302, 303, 307, 308, 400, 401, 402, 403, 404, 405, 408, 409, 415, 422, 425, 429),
    *(500, 502, 503),
]


@pytest.mark.parametrize(
    ("rules", "final"),
    [
        ("below_500", {200, 201, 204, 301, 302, 303, 400, 402, 404, 405, 409, 415, 422}),
        ("stripe", {200, 201, 204, 301, 302, 303, 402, 409, 500, 502, 503}),
        ("success_only", {200, 201, 204}),
    ],
)
def test_each_rule_says_which_answers_are_final(rules: Any, final: set[int]) -> None:
    assert {status for status in STATUSES if is_final(rules, status)} == final


def test_what_an_endpoint_itself_answers_is_saved_by_stripes_rules_unless_it_says_who_or_when() -> None:
    """In FastAPI's route class: whatever validates has passed before the claim."""
    saved = {status for status in STATUSES if is_final("stripe", status, begun=True)}

    assert saved == set(STATUSES) - {307, 308, 401, 403, 408, 425, 429}


def test_a_key_with_another_request_is_422_as_the_draft_has_it_and_400_by_stripes_rules() -> None:
    reused = KeyReused.about(Address("", "http", "key"))
    answers = {rules: Exchange(scope=single_tenant, rules=rules).refused(reused) for rules in RULES}

    assert {rules: one.status for rules, one in answers.items()} == {
        "below_500": 422,
        "stripe": 400,
        "success_only": 422,
    }
    assert all(json.loads(one.body)["status"] == one.status for one in answers.values())
    assert {json.loads(one.body)["code"] for one in answers.values()} == {"key_reused"}


def test_a_server_error_is_an_outcome_that_nobody_knows_and_a_429_is_not() -> None:
    with pytest.raises(ServerFailed):
        settled("below_500", Answer(500, []))
    with pytest.raises(NotFinal) as released:
        settled("below_500", Answer(429, []))

    assert not isinstance(released.value, ServerFailed)
    policy = Exchange(scope=single_tenant).policy(Guard("memory:", policy=Policy(after_crash="hold")))
    assert ServerFailed in policy.ambiguous_errors
    assert NotFinal not in policy.ambiguous_errors


def test_what_a_guard_remembers_is_not_what_http_remembers() -> None:
    policy = Exchange(scope=single_tenant).policy(Guard("memory:", policy=Policy(final_errors=(Exception,))))

    assert policy.final_errors == ()


def test_only_the_header_can_be_strict() -> None:
    with pytest.raises(UsageError, match="key= reads the key from elsewhere"):
        Exchange(scope=single_tenant, key=body_field("id"), strict=True)


@pytest.mark.parametrize("path", ["", "event..id", "."])
def test_a_field_needs_a_name(path: str) -> None:
    with pytest.raises(UsageError, match="body_field"):
        body_field(path)


def test_without_http_sf_nobody_finds_out_on_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefold.http._requests.keys.find_spec", lambda _name: None)

    with pytest.raises(UsageError, match=r"onefold\[http\]"):
        Exchange(scope=single_tenant)


def test_a_wrong_rule_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="'below_500', 'stripe', 'success_only'"):
        Exchange(scope=single_tenant, rules="below500")


# What is replayed.


def test_a_replay_has_the_headers_as_first_sent_but_for_those_of_one_delivery() -> None:
    sent = [
        (b"content-type", b"application/json"),
        (b"Location", b"/orders/7"),
        (b"X-Twice", b"1"),
        (b"X-Twice", b"2"),
        (b"Set-Cookie", b"session=secret"),
        (b"Date", b"Sun, 15 Nov 2026 10:00:00 GMT"),
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"content-length", b"2"),
    ]

    again = replayed(settled("below_500", Answer(201, sent, b"{}")))

    assert again.headers == [
        (b"content-type", b"application/json"),
        (b"Location", b"/orders/7"),
        (b"X-Twice", b"1"),
        (b"X-Twice", b"2"),
        (b"content-length", b"2"),
        (b"idempotent-replayed", b"true"),
    ]
    assert (again.status, again.body) == (201, b"{}")


@pytest.mark.parametrize(
    "name",
    [
        *("Authentication-Info", "Proxy-Authentication-Info", "WWW-Authenticate", "Proxy-Authenticate", "DPoP-Nonce"),
        *("Set-Cookie", "Set-Cookie2", "Clear-Site-Data", "Sec-Session-Registration", "Set-Login", "Age", "Alt-Svc"),
        *("Authentication-Control", "Optional-WWW-Authenticate", "Proxy-Authorization", "Sec-Session-Challenge"),
        *("Secure-Session-Challenge", "Secure-Session-Registration", "Keep-Alive", "Proxy-Connection", "TE", "Trailer"),
        *("Server-Timing", "Upgrade", "Date", "Connection", "Content-Length", "Transfer-Encoding"),
    ],
)
def test_a_replay_changes_nobodys_login_cookies_or_connection(name: str) -> None:
    answer = Answer(200, [(name.encode(), b"of the first client"), (b"x-order", b"7")])

    stored = settled("below_500", answer)

    assert stored.headers == [(b"x-order", b"7")]
    # A record that was made before, or by hand, is read with the same care.
    assert b"of the first client" not in dict(replayed(answer).headers).values()
    assert (b"x-order", b"7") in replayed(answer).headers


def test_a_replay_without_a_body_has_no_length_and_one_that_was_cut_is_marked() -> None:
    assert replayed(Answer(204, [])).headers == [(b"idempotent-replayed", b"true")]
    # Of a probe: what was given with it is no body, and no server can send it.
    assert replayed(Answer(204, [], b"null")) == replayed(Answer(204, []))
    assert (b"idempotent-body", b"omitted") in replayed(Answer(200, [], cut=True)).headers


# What is refused, and how.


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (KeyReused.about(Address("", "http", "sk_secret")), 422, "key_reused", None),
        (InProgress.about(Address("", "http", "sk_secret"), retry_after=0.2), 409, "in_progress", b"1"),
        (InProgress.about(Address("", "http", "sk_secret"), retry_after=1.5), 409, "in_progress", b"2"),
        (Held.about(Address("", "http", "sk_secret"), remark="sk_secret"), 409, "held", None),
        (ClaimLost.about(Address("", "http", "sk_secret")), 409, "claim_lost", b"1"),
        (StoreUnavailable("sk_secret at db.internal"), 503, "store_unavailable", b"1"),
        (ProbeFailed("sk_secret at db.internal"), 503, "outcome_unknown", b"1"),
        (RememberedFailure("sk_secret"), 500, "failed", None),
        (ResultNotKept("sk_secret"), 409, "result_not_kept", None),
        (ResultUnreadable("sk_secret"), 409, "result_not_kept", None),
        (MissingKey("sk_secret"), 400, "key_malformed", None),
    ],
)
def test_every_refusal_is_a_problem_with_a_code_and_a_link(
    error: OnefoldError, status: int, code: str, retry: bytes | None
) -> None:
    exchange = Exchange(scope=single_tenant, policy_url="https://example.com/idempotency")

    answer = exchange.refused(error)

    problem, headers = json.loads(answer.body), dict(answer.headers)
    assert (answer.status, problem["status"], problem["code"]) == (status, status, code)
    assert {"type", "title", "detail"} < set(problem)
    assert headers[b"content-type"] == b"application/problem+json"
    assert headers[b"content-language"] == b"en"
    assert headers[b"link"] == b'<https://example.com/idempotency>; rel="describedby"'
    assert headers.get(b"retry-after") == retry
    assert b"secret" not in answer.body
    assert b"internal" not in answer.body


# Only a programmer can mend these: they are raised, so that the server logs them, and answers 500.
BUGS = {UsageError, InsideItself, NotInTransaction, OutcomeUnknown}


@pytest.mark.parametrize("kind", sorted((kind for kind in MEANINGS if issubclass(kind, OnefoldError)), key=str))
def test_every_error_of_ours_has_an_answer_or_is_raised(kind: type[OnefoldError]) -> None:
    exchange = Exchange(scope=single_tenant)

    if kind in BUGS:
        with pytest.raises(kind):
            exchange.refused(kind("secret"))
    else:
        # The table of the documentation is made from the same.
        assert exchange.refused(kind("secret")).status == MEANINGS[kind].http


@pytest.mark.parametrize(("value", "omitted"), [(None, True), ("what a probe gave, and no answer", False)])
def test_an_answer_that_was_not_kept_is_not_made_up(value: Any, omitted: bool) -> None:
    answer = Exchange(scope=single_tenant).replay(Outcome(kept=value, replayed=True, omitted=omitted))

    assert (answer.status, json.loads(answer.body)["code"]) == (409, "result_not_kept")
    assert (b"retry-after", b"1") not in answer.headers


PLAIN: list[Any] = [{"id": 17}, [1, 2], "receipt 17", 17, 1.5, True, None, b"bytes"]


def asked(scope: str | None = None) -> GuardRequest:
    return GuardRequest("http", "key", scope, ["POST", "/pay", b"", b"digest"])


def never() -> Any:
    raise AssertionError


async def never_awaited() -> Any:
    raise AssertionError


def held(policy: Policy) -> Guard:
    """A guard whose one request is held."""
    guard = Guard("memory:", policy=policy)

    def fail() -> Answer:
        raise ServerFailed

    with pytest.raises(ServerFailed):
        deliver(guard, asked(), fail, Exchange(scope=single_tenant).policy(guard))
    return guard


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_a_request_that_was_resolved_with_a_plain_value_is_answered_with_it(value: Any) -> None:
    exchange = Exchange(scope=single_tenant)
    guard = held(Policy(after_crash="hold"))

    guard.resolve("http", "key", Done(value), by="asha", reason="asked the bank")
    answer = exchange.replay(deliver(guard, asked(), never, exchange.policy(guard)))

    assert (answer.status, answer.body) == (200, msgspec.json.encode(value))
    assert dict(answer.headers)[b"content-type"] == b"application/json"
    assert dict(answer.headers)[b"idempotent-replayed"] == b"true"


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_and_so_it_is_where_it_is_async(value: Any) -> None:
    async def story() -> Answer:
        exchange = Exchange(scope=single_tenant)
        guard = AsyncGuard("memory:", policy=Policy(after_crash="hold"))
        policy = exchange.policy(guard)

        async def fail() -> Answer:
            raise ServerFailed

        with pytest.raises(ServerFailed):
            await deliver_async(guard, asked(), fail, policy)
        await guard.resolve("http", "key", Done(value), by="asha", reason="asked the bank")
        return exchange.replay(await deliver_async(guard, asked(), never_awaited, policy))

    answer = in_time(story())

    assert (answer.status, answer.body) == (200, msgspec.json.encode(value))


def test_a_plain_value_is_one_replay_for_who_counts_them() -> None:
    guard = held(Policy(after_crash="hold"))
    guard.resolve("http", "key", Done({"id": 17}), by="asha", reason="asked the bank")
    told: list[str] = []
    unsubscribe = subscribe(lambda event: told.append(event.kind.value))

    deliver(guard, asked(), never, Exchange(scope=single_tenant).policy(guard))

    unsubscribe()
    assert told == ["replayed"]


def test_what_neither_is_an_answer_nor_reads_back_plainly_stays_refused() -> None:
    class Receipt(msgspec.Struct):
        id: int

    guard = held(Policy(after_crash="hold"))
    guard.resolve("http", "key", Done(Receipt(17)), by="asha", reason="asked the bank", returns=Receipt)

    with pytest.raises(ResultUnreadable, match="Answer"):
        deliver(guard, asked(), never, Exchange(scope=single_tenant).policy(guard))


def test_a_record_that_goes_between_the_two_questions_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = held(Policy(after_crash="hold"))
    guard.resolve("http", "key", Done({"id": 17}), by="asha", reason="asked the bank")
    run = guard.run

    def forgets(*given: Any, **options: Any) -> Any:
        try:
            return run(*given, **options)
        finally:
            guard.forget("http", "key")

    monkeypatch.setattr(guard, "run", forgets)

    with pytest.raises(ResultUnreadable):
        deliver(guard, asked(), never, Exchange(scope=single_tenant).policy(guard))


def test_the_own_response_stands_if_it_was_made_here_is_not_final_or_was_seen() -> None:
    exchange, made, other = Exchange(scope=single_tenant), Answer(201, []), Answer(202, [])
    lost = ClaimLost.about(Address("", "http", "key"))

    assert exchange.instead(Outcome(kept=made), made) is None
    assert exchange.instead(NotFinal(), None) is None
    assert exchange.instead(lost, made, is_seen=True) is None
    # The held-back end of a body that the client has begun to read is not dropped for an error, either.
    assert exchange.instead(UsageError("only a programmer can fix this"), made, is_seen=True) is None
    assert exchange.instead(Outcome(kept=other, replayed=True), None, is_seen=True) is None


def test_another_response_is_sent_for_a_refusal_a_replay_and_what_a_probe_answered() -> None:
    exchange, made, other = Exchange(scope=single_tenant), Answer(201, []), Answer(202, [])
    ends: list[tuple[Outcome[Answer] | OnefoldError, Answer | None]] = [
        (ClaimLost.about(Address("", "http", "key")), made),
        (Outcome(kept=other, replayed=True), None),
        (Outcome(kept=made, replayed=True), made),
        (Outcome(kept=other), made),
        (Outcome(kept=other), None),
    ]

    found = [exchange.instead(ended, own) for ended, own in ends]

    assert [None if answer is None else answer.status for answer in found] == [409, 202, 201, 202, 202]
    with pytest.raises(UsageError):
        exchange.instead(UsageError("only a programmer can fix this"), made)


def test_refusals_are_logged_without_keys_and_bodies(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange(scope=single_tenant)
    caplog.set_level("INFO", "onefold.http")

    exchange.refused(Refused("key_malformed", "sk_secret is wrong"))
    exchange.refused(KeyReused.about(Address("", "http", "sk_secret")))
    exchange.refused(StoreUnavailable("the store is down"))

    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert "key_malformed" in caplog.text
    assert Address("", "http", "sk_secret").digest in caplog.text
    assert "sk_secret" not in caplog.text
