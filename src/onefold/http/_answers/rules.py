"""Decide which responses are final, and which headers belong to one delivery only. Pure.

Everything that decides about a stored response is here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

from onefold import Policy
from onefold._concurrency.users_errors import text_of
from onefold.http._answers.sendable import BODILESS
from onefold.http._shared import options as _options
from onefold.http._shared.messages import Answer

Rules = Literal["below_500", "stripe", "success_only"]

RULES: Final = ("below_500", "stripe", "success_only")

# The methods that are guarded. The others have the same effect when they are repeated; Stripe's keys are for all that
# change something, so that a repeated DELETE gets the first response instead of a 404.
METHODS: Final[dict[Rules, tuple[str, ...]]] = {
    "below_500": ("POST", "PATCH"),
    "stripe": ("POST", "PUT", "PATCH", "DELETE"),
    "success_only": ("POST", "PATCH"),
}

# The work is to be done at another path, to which the client sends the same key: nothing has happened here.
ELSEWHERE: Final = frozenset({307, 308})

# Plus: the caller is not known yet, or asked too early or too often. The same request may get another response.
NEVER_FINAL: Final = ELSEWHERE | {401, 403, 408, 425, 429}

# Plus: HTTP's own status codes for a request that is refused as it stands, before any work. Frameworks use them for
# validation. Stripe saves none of these, so that a client may correct its request under the same key.
REFUSED: Final = NEVER_FINAL | {400, 404, 405, 406, 411, 412, 413, 414, 415, 417, 421, 422, 426, 428, 431}

SERVER_ERROR: Final = 500

# The status for a key with another request, if it is not the draft's 422.
REUSED: Final[dict[str, int]] = {"stripe": 400}

# It may never end, and is guarded only on request.
EVENT_STREAM: Final = b"text/event-stream"

SUCCESS: Final = range(200, 300)

# Specific to one connection or one moment: a replay has its own.
OF_ONE_DELIVERY: Final = frozenset(
    {
        b"age",
        b"alt-svc",
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-connection",
        b"server-timing",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

# Specific to one browser, login or session: a replay must not change that of a client that resends the key.
OF_ONE_CLIENT: Final = frozenset(
    {
        b"authentication-control",
        b"authentication-info",
        b"clear-site-data",
        b"dpop-nonce",
        b"optional-www-authenticate",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"sec-session-challenge",
        b"sec-session-registration",
        b"secure-session-challenge",
        b"secure-session-registration",
        b"set-cookie",
        b"set-cookie2",
        b"set-login",
        b"www-authenticate",
    }
)

NOT_REPLAYED: Final = OF_ONE_DELIVERY | OF_ONE_CLIENT

REPLAYED: Final = (b"idempotent-replayed", b"true")
CUT: Final = (b"idempotent-body", b"omitted")


class NotFinal(Exception):
    """The handler's response is sent, but not remembered: the next request with this key runs again."""


class ServerFailed(NotFinal):
    """The handler returned a server error: whether its effect happened is unknown."""


def is_own(error: BaseException) -> bool:
    """Return whether an application raised it itself: an `Exception`, or the cancellation of its own task.

    By its name, so that asyncio is not imported for applications that do not use it.
    """
    return isinstance(error, Exception) or type(error).__name__ == "CancelledError"


def failed_with(what: BaseException | int) -> ServerFailed:
    """Return the failure named after the handler's own error, or its status: held records, and logs, show that name."""
    if isinstance(what, int):
        return _failure_named(f"HTTP {what}", __name__)()
    kind = type(what)
    return _failure_named(kind.__qualname__, kind.__module__)(text_of(what))


@lru_cache(maxsize=256)
def _failure_named(name: str, module: str) -> type[ServerFailed]:
    about = {"__doc__": ServerFailed.__doc__, "__module__": module, "__qualname__": name}
    return type(name.rpartition(".")[2], (ServerFailed,), about)


def checked(rules: str) -> Rules:
    return _options.one_of("rules", rules, RULES)  # type: ignore[return-value]


def is_final(rules: Rules, status: int, *, begun: bool = False) -> bool:
    """Return whether this response is remembered and replayed.

    `begun`: it is the endpoint's own, because all validation has passed before the claim. Otherwise a 422 may come from
    the endpoint, or from the framework that has not called it.
    """
    match rules:
        case "stripe":
            return status not in (NEVER_FINAL if begun else REFUSED)
        case "success_only":
            return status in SUCCESS
        case "below_500":
            return status < SERVER_ERROR and status not in NEVER_FINAL


def settled(rules: Rules, answer: Answer, *, begun: bool = False) -> Answer:
    """Return the response to remember. Raises `NotFinal` if there is none."""
    if not is_final(rules, answer.status, begun=begun):
        raise failed_with(answer.status) if answer.status >= SERVER_ERROR else NotFinal
    return Answer(answer.status, _of_every_delivery(answer), answer.body, answer.cut)


def _of_every_delivery(answer: Answer) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in answer.headers if name.lower() not in NOT_REPLAYED]
    if len(kept) == len(answer.headers):
        return kept
    left_out = _of_this_connection(answer)
    return [(name, value) for name, value in kept if name.lower() not in left_out] if left_out else kept


def _of_this_connection(answer: Answer) -> set[bytes]:
    """Return the headers that `Connection` names: they are hop-by-hop, too."""
    named = [value for name, value in answer.headers if name.lower() == b"connection"]
    return {token.strip().lower() for value in named for token in value.split(b",")}


def replayed(kept: Answer) -> Answer:
    """Return a remembered response as a duplicate gets it."""
    marks = [REPLAYED, CUT] if kept.cut else [REPLAYED]
    # It may have been written by a probe or a person.
    headers = _of_every_delivery(kept)
    if kept.status in BODILESS:
        return Answer(kept.status, [*headers, *marks], b"", kept.cut)
    length = (b"content-length", str(len(kept.body)).encode())
    return Answer(kept.status, [*headers, length, *marks], kept.body, kept.cut)


def policy_for(policy: Policy, body_max: int) -> Policy:
    """Return the guard's policy for responses: a 5xx is an unknown outcome, and a whole response fits.

    The rules determine what is final, instead of `final_errors`.
    """
    room = max(policy.max_result_bytes, body_max + HEADERS_ROOM)
    return policy.replace(
        ambiguous_errors=(*policy.ambiguous_errors, ServerFailed), final_errors=(), max_result_bytes=room
    )


# Room for status and headers next to the body: servers themselves refuse more than this.
HEADERS_ROOM: Final = 1 << 17
