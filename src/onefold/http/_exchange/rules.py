"""Handle one exchange of the Idempotency-Key header: key, caller, refusals, final responses. Pure, no framework.

An adapter creates a `Request`, asks the exchange for its `GuardRequest`, runs its application inside that, and sends
the resulting `Answer`. It follows draft-ietf-httpapi-idempotency-key-header-07.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Required, Unpack, cast

from onefold import (
    AsyncGuard,
    Guard,
    OnefoldError,
    Outcome,
    Policy,
    PolicyFields,
    RememberedFailure,
    ResultNotKept,
    StoreUnavailable,
    UsageError,
)
from onefold.http._answers import problems as _problems
from onefold.http._answers import refusals as _refusals
from onefold.http._answers import rules as _rules
from onefold.http._answers.refusals import RefusalFunction
from onefold.http._answers.sendable import is_sendable
from onefold.http._requests import fingerprints as _fingerprints
from onefold.http._requests.fingerprints import RequestFingerprint
from onefold.http._requests.keys import HeaderKey, RequestKey
from onefold.http._shared import messages as _messages
from onefold.http._shared import options as _options
from onefold.http._shared import routing as _routing
from onefold.http._shared.messages import Answer, Body, Refused, Request
from onefold.http.scopes import ScopeOf, single_tenant
from onefold.keys import SCOPE_MAX, checked_operation, problem_of, undigestible

# A response up to this size is remembered whole.
BODY_MAX: Final = 1 << 20

# The host name: part of the request, which a retry repeats; part of the caller's identity; or neither.
HOSTS: Final = ("compare", "separate", "ignore")

SCOPES: Final = "by_header('X-Api-Key'), by_user, single_tenant, or a function of a request"

# Fields of a policy that would change nothing here, and what does.
NOT_HERE: Final = {
    "final_errors": "rules= decides which responses are final",
    "ambiguous_errors": "every exception and every 5xx leaves an unknown outcome",
    "max_result_bytes": "body_max= limits what is remembered of a response",
    "mode": "a request with a key is always claimed",
}

# For keys that are not in the body.
_NO_BODY: Final = Body()

# The log that shows an operator why requests are refused. It contains the digest of a key, but no bodies or headers.
LOG = logging.getLogger("onefold.http")

# How a delivery ended: with an answer, with a response that is not remembered, or without one.
Ended = Outcome[Answer] | _rules.NotFinal | OnefoldError

RequiredFor = bool | Iterable[str] | Callable[[Request], bool]


class GuardRequest(NamedTuple):
    """The request of an adapter to its guard. `scope` is the caller, inside the scope that the guard may have."""

    operation: str
    key: str
    scope: str | None
    payload: list[Any]


class Options(PolicyFields, total=False):
    """The options of every middleware, route and view. `docs/http.md` explains each.

    The fields of a policy are options, too, except those in `NOT_HERE`: they override the guard's policy, or `policy`.
    """

    # Whose key it is: `by_header("X-Api-Key")`, `by_user`, `single_tenant`, or a function. There is no default.
    scope: Required[ScopeOf]
    # Which responses are final: "below_500" (the default), "stripe", "success_only".
    rules: str
    # True, path patterns or a function: which requests must send a key. For others it is optional.
    required: RequiredFor
    # By default POST and PATCH; under "stripe" PUT and DELETE, too.
    methods: Iterable[str] | None
    # `header_key(...)`, `body_field(...)` or a function, if the key is not in the Idempotency-Key header.
    key: RequestKey
    # Whether to accept only the quoted form of the header.
    strict: bool
    # How the host name counts: "compare" (the default), "separate", "ignore".
    host: str
    operation: str
    # Where the policy is published: every refusal links to it.
    policy_url: str
    # A function of a refusal: the body of its response as JSON, a whole `Answer`, or None for the problem document.
    refusal: RefusalFunction | None
    # Whether the first caller of an application that raises gets the 500 that is remembered. By default under "stripe".
    answer_errors: bool | None
    # A response with a larger body is remembered without it.
    body_max: int
    # Whether `text/event-stream` is guarded too.
    event_streams: bool
    # A function of a request and its body: what has to be equal under one key, instead of query, media type and body.
    # None: nothing more than host, method and path.
    fingerprint: RequestFingerprint | None
    # Instead of the guard's.
    policy: Policy | None


_NAMES: Final = ("guard", *(name for name in Options.__annotations__ if name not in PolicyFields.__annotations__))
_FIELDS: Final = tuple(name for name in PolicyFields.__annotations__ if name not in NOT_HERE)


class Exchange:
    """The rules of one middleware, route or view. Raises `UsageError` for invalid options."""

    def __init__(
        self,
        *,
        scope: ScopeOf,
        rules: str = "below_500",
        required: RequiredFor = False,
        methods: Iterable[str] | None = None,
        key: RequestKey | None = None,
        strict: bool = False,
        host: str = "compare",
        operation: str = "http",
        policy_url: str | None = None,
        refusal: RefusalFunction | None = None,
        answer_errors: bool | None = None,
        body_max: int = BODY_MAX,
        event_streams: bool = False,
        fingerprint: RequestFingerprint | None = _fingerprints.whole_content,
        policy: Policy | None = None,
        begun: bool = False,
        **fields: Unpack[PolicyFields],
    ) -> None:
        _options.check_function("scope", scope, 1, SCOPES)
        _options.check_yes_or_no("strict", strict)
        _options.check_yes_or_no("event_streams", event_streams)
        _options.check_bytes("body_max", body_max)
        _options.check_link("policy_url", policy_url)
        if key is not None:
            _options.check_function("key", key, 2, _keys_like(key))
        if fingerprint is not None:
            _options.check_function("fingerprint", fingerprint, 2, "a function of a request and its body, or None")
        if key is not None and strict:
            raise UsageError("strict= is for the Idempotency-Key header, but key= reads the key from elsewhere")
        if refusal is not None:
            _options.check_function("refusal", refusal, 1, "a function of a refusal")
        self.rules = _rules.checked(rules)
        self.answers_errors = _answers_errors(self.rules, given=answer_errors)
        self._host = _options.one_of("host", host, HOSTS)
        self.operation = checked_operation(operation)
        self.policy_url = policy_url
        self._refusal = refusal
        self.body_max = body_max
        self.event_streams = event_streams
        self._fingerprint = fingerprint
        self._policy = policy
        self._fields = fields
        # Set by a route, not an option: its endpoint has begun when the claim is made.
        self._begun = begun
        self.always_required = required is True
        self._scope = scope
        self._required = _required(required)
        self._methods = methods_of(self.rules, methods)
        self._key = HeaderKey(strict=strict) if key is None else key
        # How refusals refer to the key.
        self._key_location: str = getattr(self._key, "key_location", "The key")

    def guards_any(self, methods: Iterable[str]) -> bool:
        """Return whether a route with these methods has requests to guard."""
        return not self._methods.isdisjoint(methods)

    def passes(self, request: Request) -> bool:
        """Return whether the request passes through untouched, which is known before its body is read.

        Raise `Refused` for an invalid one.
        """
        if request.method not in self._methods:
            return True
        if getattr(self._key, "needs_body", True):
            return False
        key = self._key_of(request, _NO_BODY)
        request.key_of = (self, key)
        return self._keyless(request, key)

    def guard_request(self, request: Request, body: Body) -> GuardRequest | None:
        """Return the request to the guard; None if it has no key, and needs none. Raise `Refused`."""
        known = request.key_of
        key = known[1] if known is not None and known[0] is self else self._key_of(request, body)
        if self._keyless(request, key):
            return None
        scope = self._caller_at(request)
        return GuardRequest(self.operation, cast("str", key), scope, self._compared(request, body))

    def _key_of(self, request: Request, body: Body) -> str | None:
        """Return the key. If a function returns an invalid one, that is not the sender's fault."""
        key: Any = self._key(request, body)
        if key is None or isinstance(key, str):
            return key
        if isinstance(key, (int, uuid.UUID)) and not isinstance(key, bool):
            return str(key)
        _options.check_not_async("key", key)
        raise UsageError(f"key= has to return the key as a str, or None, but returned a {type(key).__name__}")

    def _keyless(self, request: Request, key: str | None) -> bool:
        if key is not None:
            return False
        required: object = self._required(request)
        if required is not True and required is not False:
            _options.check_not_async("required", required)
        if required:
            raise Refused("key_missing", getattr(self._key, "missing", "This request needs a key, but has none."))
        return True

    def _caller(self, request: Request) -> str | None:
        """Return the scope. An unidentified caller would be shared by strangers: only `single_tenant` allows that."""
        if self._scope is single_tenant:
            return None
        caller: Any = self._scope(request)
        if caller is None or (isinstance(caller, str) and not caller.strip()):
            raise Refused("caller_unknown", "A request with a key needs a caller, but this one has none.")
        if not isinstance(caller, str):
            _options.check_not_async("scope", caller)
            raise UsageError(f"scope= has to return the caller's name as a str, but returned a {type(caller).__name__}")
        return _checked_caller(caller)

    def _caller_at(self, request: Request) -> str | None:
        """Return the caller; if each host is a tenant, the caller at this one."""
        caller = self._caller(request)
        if self._host != "separate":
            return caller
        host = _fingerprints.host_of(request)
        if not host:
            raise Refused("caller_unknown", "A request with a key needs the header Host, which says whose key it is.")
        if "@" in host:
            # No server refuses it, and `bob` at `corp.com@shop` would be `bob@corp.com` at `shop`.
            raise Refused("caller_unknown", "A host name must not contain @.")
        return _checked_caller(f"{caller or ''}@{host}")

    def _compared(self, request: Request, body: Body) -> list[Any]:
        """Return what a retry has to repeat.

        Host, method and path always count: a key must not get the response of another tenant's host, or another route.
        """
        # With its slash: `/items` and `/items/` may be two routes, and one must not get the other's response.
        route, host = [request.method, request.compared_path], self._host_compared(request)
        if self._fingerprint is _fingerprints.whole_content:
            return [*route, *self._fingerprint(request, body), host]
        if self._fingerprint is None:
            return [*route, host]
        content = self._fingerprint(request, body)
        _check_content(content)
        return [*route, host, content]

    def _host_compared(self, request: Request) -> str:
        """Return the host name. A machine's address does not count: several may serve one API."""
        host = _fingerprints.host_of(request) if self._host == "compare" else ""
        return "" if _fingerprints.is_address(host) else host

    def policy(self, guard: Guard | AsyncGuard) -> Policy:
        """Return the policy for responses: the guard's, or the one that was passed, with the fields that were passed.

        Errors of a guard from a file are raised now, not for each request.
        """
        guard.idempotent(self.operation, key="key")
        guard.check_policy(self._policy)
        chosen = (self._policy or guard.policy).replace(**self._fields)
        if chosen.mode == "seen":
            raise UsageError(
                'mode="seen" makes no claim: concurrent requests with one key would all run. Give HTTP a guard, or a '
                'policy, with mode="claim"'
            )
        return _rules.policy_for(chosen, self.body_max)

    def answered(self, request: Request, answer: Answer, *, unmatched: bool | None = None) -> Answer:
        """Return the answer to remember for this request. Raises `NotFinal` if there is none.

        `unmatched`: the framework has found no route for it. False: a handler has run. None: unknown.
        """
        if _routing.is_of_routing(answer, request, unmatched=False if self._begun else unmatched):
            raise _rules.NotFinal
        return self.settled(answer)

    def settled(self, answer: Answer) -> Answer:
        """Return the answer to remember of the application's response. Raises `NotFinal` if there is none."""
        return _rules.settled(self.rules, answer, begun=self._begun)

    def broken(self, failure: _rules.ServerFailed) -> Answer:
        """Return the answer to remember for an application that raised. Raises the failure if there is none."""
        if not _rules.is_final(self.rules, _rules.SERVER_ERROR):
            raise failure
        return self.settled(self._problem(RememberedFailure()))

    def first_failure(self, made: Answer | None, *, is_seen: bool) -> Answer | None:
        """Return the response to the first caller of an application that raised; None if the server has to make one.

        `made` is what is remembered of it, and what its replays are.
        """
        return None if made is None or is_seen or not self.answers_errors else _refusals.with_length(made)

    def instead(self, ended: Ended, made: Answer | None, *, is_seen: bool = False) -> Answer | None:
        """Return the answer to send in place of the application's own response; None if that one stands.

        `made` is the answer to remember that was made of it, if it ran and there is one. `is_seen`: the client has a
        part of it, and is not refused the rest.
        """
        if is_seen or isinstance(ended, _rules.NotFinal):
            return None
        if isinstance(ended, OnefoldError):
            return self.refused(ended)
        # A probe may have given another answer, or none.
        if made is not None and ended.value_or(None) is made and not ended.replayed:
            return None
        return self.replay(ended)

    def replay(self, outcome: Outcome[Answer]) -> Answer:
        """Return the response to a duplicate."""
        value: object = outcome.value_or(None)
        if value is None and not outcome.omitted:
            # Settled by somebody who said only that it is done.
            value = _messages.plain_answer(None)
        if outcome.omitted or not isinstance(value, Answer) or not is_sendable(value):
            # Skipped after a crash, too large for the store, or a probe returned something else.
            return self._problem(ResultNotKept())
        return _rules.replayed(value)

    def refused(self, why: Refused | OnefoldError) -> Answer:
        """Return the response to a refused request. Raise errors that only a programmer can fix."""
        if isinstance(why, Refused):
            LOG.info("refused: %s", why.code)
            return self._own(_problems.of_refusal(why, self.policy_url, self._key_location))
        answer = self._problem(why)
        LOG.log(logging.WARNING if isinstance(why, StoreUnavailable) else logging.INFO, "refused: %s", why)
        return answer

    def _problem(self, error: OnefoldError) -> Answer:
        reused = _rules.REUSED.get(self.rules)
        return self._own(_problems.of_error(error, self.policy_url, self._key_location, reused=reused))

    def _own(self, problem: Answer) -> Answer:
        return _refusals.own_answer(problem, self._refusal)


def methods_of(rules: _rules.Rules, given: Iterable[str] | None) -> frozenset[str]:
    """Return the guarded methods: those that were given, or those of the rules."""
    return _options.methods("methods", _rules.METHODS[rules] if given is None else given)


def _answers_errors(rules: _rules.Rules, *, given: bool | None) -> bool:
    """Return whether the first caller gets the 500 that is remembered of an exception."""
    is_remembered = _rules.is_final(rules, _rules.SERVER_ERROR)
    if given is None:
        return is_remembered
    _options.check_yes_or_no("answer_errors", given)
    if given and not is_remembered:
        raise UsageError(f"answer_errors=True is for rules='stripe': under {rules!r} no exception is remembered")
    return given


def known(owner: str, options: Options, *, has_endpoint: bool = False) -> Options:
    """Return the options of this middleware, route or view; an unknown one is refused under its own name."""
    for name, instead in NOT_HERE.items():
        if name in options:
            raise UsageError(f"{owner} has no option {name!r}: {instead}")
    _options.check_names(owner, options, (*_NAMES, *_FIELDS))
    if "scope" not in options:
        raise UsageError(f"{owner} needs scope=, which says whose key it is: {SCOPES}")
    if getattr(options["scope"], "needs_endpoint", False) and not has_endpoint:
        raise UsageError(f"{owner} does not see an endpoint's arguments: by_argument is for FastAPI's idempotent_route")
    return options


def _checked_caller(caller: str) -> str:
    if problem_of(caller, SCOPE_MAX):
        raise Refused("caller_unknown", f"The caller's name has more than {SCOPE_MAX} bytes, or is not text.")
    return caller


def _check_content(content: object) -> None:
    """Refuse what a fingerprint function must not return. Nothing has run."""
    if content is None:
        raise UsageError(
            "fingerprint= returned None, as a function without a return does: return what has to be equal, or pass "
            "fingerprint=None to compare only host, method and path"
        )
    _options.check_not_async("fingerprint", content)
    found = undigestible({"content": content})
    if found is not None:
        raise UsageError(
            f"fingerprint= returned what cannot be compared ({found[1]}). Nothing ran. Return text, bytes, numbers, or "
            "lists and dictionaries of them"
        )


def _keys_like(given: object) -> str:
    """Return a suggestion for the error message."""
    name = given if isinstance(given, str) else "id"
    return f"body_field({name!r}), header_key({name!r}), or a function of a request and its body"


def _required(required: RequiredFor) -> Callable[[Request], bool]:
    if isinstance(required, bool):
        return lambda _request: required
    if callable(required):
        _options.check_function("required", required, 1, "True, paths, or a function of a request")
        return required
    matches = _options.matching(_options.patterns("required", required))
    return lambda request: matches(request.path)
