"""Handle one exchange of the Idempotency-Key header: what is asked, refused and remembered. Pure, no framework.

An adapter creates a `Request`, lets the exchange say what to ask the guard, runs its application inside that, and sends
the resulting `Answer`. It follows draft-ietf-httpapi-idempotency-key-header-07.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Required, TypedDict, cast

from onefold import (
    SCOPE_MAX,
    AsyncGuard,
    Guard,
    OnefoldError,
    Outcome,
    Policy,
    RememberedFailure,
    ResultNotKept,
    StoreUnavailable,
    UsageError,
)
from onefold.http._answers import problems as _problems
from onefold.http._answers import rules as _rules
from onefold.http._answers.sendable import is_sendable
from onefold.http._requests import fingerprints as _fingerprints
from onefold.http._requests.keys import HeaderKey, RequestKey
from onefold.http._shared import messages as _messages
from onefold.http._shared import options as _options
from onefold.http._shared import routing as _routing
from onefold.http._shared.messages import Answer, Refused, Request, Spooled
from onefold.http.scopes import ScopeOf, single_tenant
from onefold.keys import checked_operation

METHODS: Final = ("POST", "PATCH")

# A response up to this size is remembered whole.
BODY_MAX: Final = 1 << 20

# The host name: part of the request, which a retry repeats; part of the caller's identity; or neither.
HOSTS: Final = ("compare", "separate", "ignore")

SCOPES: Final = "by_header('X-Api-Key'), by_user, single_tenant, or a function of a request"

# For keys that are not in the body.
_NO_BODY: Final = Spooled()

# Tells an operator why requests are refused. It contains the digest of a key, but no bodies and headers.
LOG = logging.getLogger("onefold.http")

RequiredFor = bool | Iterable[str] | Callable[[Request], bool]


class GuardRequest(NamedTuple):
    """The request of an adapter to its guard. `scope` is the caller, inside the scope that the guard may have."""

    operation: str
    key: str
    scope: str | None
    fingerprint: list[Any]


class Options(TypedDict, total=False):
    """The options of every middleware, route and view. `docs/http.md` explains each."""

    # Whose key it is: `by_header("X-Api-Key")`, `by_user`, `single_tenant`, or a function. There is no default.
    scope: Required[ScopeOf]
    # Which responses are final: "below_500" (the default), "stripe", "success_only".
    rules: str
    # True, path patterns or a function: who must send a key. Elsewhere it is optional.
    required: RequiredFor
    # POST and PATCH by default.
    methods: Iterable[str]
    # `header_key(...)`, `body_field(...)` or a function, if the key is not in the Idempotency-Key header.
    key: RequestKey
    # Only the quoted form of the header.
    strict: bool
    # How the host name counts: "compare" (the default), "separate", "ignore".
    host: str
    operation: str
    # Where the policy is published: every refusal links to it.
    policy_url: str
    # A response with a larger body is remembered without it.
    body_max: int
    # Whether `text/event-stream` is guarded too.
    event_streams: bool


class Exchange:
    """The rules of one middleware, route or view. Raises `UsageError` for invalid options."""

    def __init__(
        self,
        *,
        scope: ScopeOf,
        rules: str = "below_500",
        required: RequiredFor = False,
        methods: Iterable[str] = METHODS,
        key: RequestKey | None = None,
        strict: bool = False,
        host: str = "compare",
        operation: str = "http",
        policy_url: str | None = None,
        body_max: int = BODY_MAX,
        event_streams: bool = False,
        begun: bool = False,
    ) -> None:
        _options.check_function("scope", scope, 1, SCOPES)
        _options.check_yes_or_no("strict", strict)
        _options.check_yes_or_no("event_streams", event_streams)
        _options.check_bytes("body_max", body_max)
        _options.check_link("policy_url", policy_url)
        if key is not None:
            _options.check_function("key", key, 2, _keys_like(key))
        if key is not None and strict:
            raise UsageError("strict= is for the Idempotency-Key header, and key= names another place")
        self.rules = _rules.checked(rules)
        self._host = _options.one_of("host", host, HOSTS)
        self.operation = checked_operation(operation)
        self.policy_url = policy_url
        self.body_max = body_max
        self.event_streams = event_streams
        # Set by a route, not an option: its endpoint has begun when the claim is made.
        self._begun = begun
        self.always_required = required is True
        self._scope = scope
        self._required = _required(required)
        self._methods = _options.methods("methods", methods)
        self._key = HeaderKey(strict=strict) if key is None else key
        # How refusals refer to the key.
        self._key_location: str = getattr(self._key, "key_location", "The key")

    def guards_any(self, methods: Iterable[str]) -> bool:
        """Return whether a route with these methods has requests to look at."""
        return not self._methods.isdisjoint(methods)

    def passes(self, request: Request) -> bool:
        """Return whether the request passes through untouched, which is known before its body is read.

        Raises `Refused`.
        """
        if request.method not in self._methods:
            return True
        return not getattr(self._key, "needs_body", True) and self._keyless(request, self._key_of(request, _NO_BODY))

    def guard_request(self, request: Request, body: Spooled) -> GuardRequest | None:
        """Return what to ask the guard. None: it has no key, and needs none. Raises `Refused`."""
        key = self._key_of(request, body)
        if self._keyless(request, key):
            return None
        # With its slash: `/items` and `/items/` may be two routes, and one must not get the other's response.
        payload = [request.method, request.compared_path, request.query, *self._more_compared(request, body)]
        return GuardRequest(self.operation, cast("str", key), self._caller_at(request), payload)

    def _key_of(self, request: Request, body: Spooled) -> str | None:
        """Return the key. If a function returns an invalid one, that is not the fault of the sender."""
        key: Any = self._key(request, body)
        if key is None or isinstance(key, str):
            return key
        if isinstance(key, (int, uuid.UUID)) and not isinstance(key, bool):
            return str(key)
        _options.check_not_async("key", key)
        raise UsageError(f"key= has to give the key as a str, or None, and gave a {type(key).__name__}")

    def _keyless(self, request: Request, key: str | None) -> bool:
        if key is not None:
            return False
        required: object = self._required(request)
        if required is not True and required is not False:
            _options.check_not_async("required", required)
        if required:
            raise Refused("key_missing", getattr(self._key, "missing", "This request needs a key, and has none."))
        return True

    def _caller(self, request: Request) -> str | None:
        """Return the scope. An unidentified caller would be shared by strangers: only `single_tenant` allows that."""
        if self._scope is single_tenant:
            return None
        caller: Any = self._scope(request)
        if caller is None or caller == "":
            raise Refused("caller_unknown", "A request with a key needs a caller, and this one has none.")
        if not isinstance(caller, str):
            _options.check_not_async("scope", caller)
            raise UsageError(f"scope= has to give the caller's name as a str, and gave a {type(caller).__name__}")
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
            raise Refused("caller_unknown", "The name of a host has no @.")
        return _checked_caller(f"{caller or ''}@{host}")

    def _more_compared(self, request: Request, body: Spooled) -> tuple[str, bytes, str]:
        """Return media type, content, and host name. A machine's address does not count: several may serve one API."""
        host = _fingerprints.host_of(request) if self._host == "compare" else ""
        return *_fingerprints.content_of(request, body), "" if _fingerprints.is_address(host) else host

    def policy(self, guard: Guard | AsyncGuard) -> Policy:
        """Return the guard's policy, for responses.

        What a guard from a file refuses is raised now, not for each request.
        """
        guard.idempotent(self.operation, key="key")
        if guard.policy.mode == "seen":
            raise UsageError(
                'mode="seen" makes no claim: of requests with one key that come at the same time all would run. Give '
                'HTTP a guard with mode="claim"'
            )
        return _rules.policy_for(guard.policy, self.body_max)

    def answered(self, request: Request, answer: Answer, *, unmatched: bool | None = None) -> Answer:
        """Return the answer to remember for this request. Raises `NotFinal` if there is none.

        `unmatched`: the framework has found no route for it. False: a handler has run. None: it does not say.
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
        return self.settled(_problems.of_error(RememberedFailure(), self.policy_url, self._key_location))

    def replay(self, outcome: Outcome[Answer]) -> Answer:
        """Return the response to a duplicate."""
        value: object = outcome.value
        if value is None and not outcome.omitted:
            # Settled by somebody who said only that it is done.
            value = _messages.plain_answer(None)
        if outcome.omitted or not isinstance(value, Answer) or not is_sendable(value):
            # Skipped after a crash, too large for the store, or a probe returned something else.
            return _problems.of_error(ResultNotKept(), self.policy_url, self._key_location)
        return _rules.replayed(value)

    def refused(self, why: Refused | OnefoldError) -> Answer:
        """Return the response to a refused request. Raises what only a programmer can fix."""
        if isinstance(why, Refused):
            LOG.info("refused: %s", why.code)
            return _problems.of_refusal(why, self.policy_url, self._key_location)
        answer = _problems.of_error(why, self.policy_url, self._key_location, reused=_rules.REUSED.get(self.rules))
        LOG.log(logging.WARNING if isinstance(why, StoreUnavailable) else logging.INFO, "refused: %s", why)
        return answer


def known(owner: str, options: Options, *, has_endpoint: bool = False) -> Options:
    """Return the options of this middleware, route or view; an unknown one is refused under its own name."""
    _options.check_names(owner, options, ("guard", *Options.__annotations__))
    if "scope" not in options:
        raise UsageError(f"{owner} needs scope=, which says whose key it is: {SCOPES}")
    if getattr(options["scope"], "needs_endpoint", False) and not has_endpoint:
        raise UsageError(f"{owner} knows no arguments of an endpoint: by_argument is for FastAPI's idempotent_route")
    return options


def _checked_caller(caller: str) -> str:
    if "\0" in caller or len(caller.encode("utf-8", "replace")) > SCOPE_MAX:
        raise Refused("caller_unknown", f"The caller's name has more than {SCOPE_MAX} bytes, or is not text.")
    return caller


def _keys_like(given: object) -> str:
    """Return what to write instead of this."""
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
