"""Which answers are final, and which headers belong to one delivery only. Pure.

Everything that decides over a stored answer is here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

from onefold import Policy
from onefold.http._answers.sendable import BODILESS
from onefold.http._shared import options as _options
from onefold.http._shared.messages import Answer

Rules = Literal["below_500", "stripe", "success_only"]

RULES: Final = ("below_500", "stripe", "success_only")

# The work is to be done at another path, to which the client comes with the same key: nothing has happened here.
ELSEWHERE: Final = frozenset({307, 308})

# And: who asked is not known yet, or it was asked too early or too often. The same request may get another answer.
NEVER_FINAL: Final = ELSEWHERE | {401, 403, 408, 425, 429}

# And: HTTP's own words for a request that was refused as it stands, before anything was done for it. Frameworks answer
# so when they validate. Stripe saves nothing of the kind, so that a client may correct its request under the same key.
REFUSED: Final = NEVER_FINAL | {400, 404, 405, 406, 411, 412, 413, 414, 415, 417, 421, 422, 426, 428, 431}

SERVER_ERROR: Final = 500

# What a key with another request is answered, where it is not the draft's 422.
REUSED: Final[dict[str, int]] = {"stripe": 400}

# It may never end, and is guarded only where that is asked for.
EVENT_STREAM: Final = b"text/event-stream"

SUCCESS: Final = range(200, 300)

# Of one connection or one moment: a replay has its own.
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

# Of one browser, one login or one session: whoever sends the key again, a replay changes none of his.
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
    """The handler's answer is sent, and not remembered: the next request with this key runs again."""


class ServerFailed(NotFinal):
    """The handler answered with a server error: whether its effect happened, nobody knows."""


def is_own(error: BaseException) -> bool:
    """Return whether an application has raised it by itself: an `Exception`, or the cancellation of a task of its own.

    By its name, because asyncio is not imported for those who do without.
    """
    return isinstance(error, Exception) or type(error).__name__ == "CancelledError"


def failed_with(what: BaseException | int) -> ServerFailed:
    """The failure under the name of the handler's own error, or of its status: a held record, and logs, name that."""
    name = f"HTTP {what}" if isinstance(what, int) else type(what).__name__
    return _failure_named(name)()


@lru_cache(maxsize=256)
def _failure_named(name: str) -> type[ServerFailed]:
    return type(name, (ServerFailed,), {"__doc__": ServerFailed.__doc__})


def checked(rules: str) -> Rules:
    return _options.one_of("rules", rules, RULES)  # type: ignore[return-value]


def is_final(rules: Rules, status: int, *, begun: bool = False) -> bool:
    """Whether this answer is remembered and replayed.

    `begun`: it is the endpoint's own, because whatever validates has passed before the claim. Else nobody can tell
    whether a 422 comes from the endpoint, or from the framework that has not called it.
    """
    match rules:
        case "stripe":
            return status not in (NEVER_FINAL if begun else REFUSED)
        case "success_only":
            return status in SUCCESS
        case "below_500":
            return status < SERVER_ERROR and status not in NEVER_FINAL


def settled(rules: Rules, answer: Answer, *, begun: bool = False) -> Answer:
    """What is remembered of an answer. Raises `NotFinal` where nothing is."""
    if not is_final(rules, answer.status, begun=begun):
        raise failed_with(answer.status) if answer.status >= SERVER_ERROR else NotFinal
    return Answer(answer.status, _of_every_delivery(answer), answer.body, answer.cut)


def _of_every_delivery(answer: Answer) -> list[tuple[bytes, bytes]]:
    left_out = NOT_REPLAYED | _of_this_connection(answer)
    return [(name, value) for name, value in answer.headers if name.lower() not in left_out]


def _of_this_connection(answer: Answer) -> set[bytes]:
    """The headers that `Connection` names: they are hop-by-hop, too."""
    named = [value for name, value in answer.headers if name.lower() == b"connection"]
    return {token.strip().lower() for value in named for token in value.split(b",")}


def replayed(kept: Answer) -> Answer:
    """A remembered answer as a duplicate gets it."""
    marks = [REPLAYED, CUT] if kept.cut else [REPLAYED]
    # Also a probe, or a person, may have written it.
    headers = _of_every_delivery(kept)
    if kept.status in BODILESS:
        return Answer(kept.status, [*headers, *marks], b"", kept.cut)
    length = (b"content-length", str(len(kept.body)).encode())
    return Answer(kept.status, [*headers, length, *marks], kept.body, kept.cut)


def policy_for(policy: Policy, body_max: int) -> Policy:
    """The guard's policy, where an answer of 5xx is an outcome that nobody knows, and where a whole answer fits.

    What is final is said by the rules, in the place of `remember`.
    """
    room = max(policy.result_bytes_max, body_max + HEADERS_ROOM)
    return policy.but(unknown=(*policy.unknown, ServerFailed), remember=(), result_bytes_max=room)


# For status and headers beside the body: servers refuse more than this themselves.
HEADERS_ROOM: Final = 1 << 17
