"""Which answers are final, and which headers belong to one delivery only. Pure.

Everything that decides over a stored answer is here.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import Final, Literal

from onefold import Policy, UsageError
from onefold.http._messages import Answer

Rules = Literal["below_500", "stripe", "success_only"]

RULES: Final = ("below_500", "stripe", "success_only")

# The work is to be done at another path, to which the client comes with the same key: nothing has happened here.
ELSEWHERE: Final = frozenset({307, 308})

# And: who asked is not known yet, or it was asked too early or too often. The same request may get another answer.
NEVER_FINAL: Final = ELSEWHERE | {401, 403, 408, 425, 429}

SERVER_ERROR: Final = 500

# It may never end, and is guarded only where that is asked for.
EVENT_STREAM: Final = b"text/event-stream"

SUCCESS: Final = range(200, 300)

# Answers without a body, and without a length.
EMPTY: Final = frozenset({204, 304})

# Of one connection, one moment, or one browser: a replay has its own, or none.
NOT_REPLAYED: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"set-cookie",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

REPLAYED: Final = (b"idempotent-replayed", b"true")
CUT: Final = (b"idempotent-body", b"omitted")


class NotFinal(Exception):
    """The handler's answer is sent, and not remembered: the next request with this key runs again."""


class ServerFailed(NotFinal):
    """The handler answered with a server error: whether its effect happened, nobody knows."""


def failed_with(what: BaseException | int) -> ServerFailed:
    """The failure under the name of the handler's own error, or of its status: a held record, and logs, name that."""
    name = f"HTTP {what}" if isinstance(what, int) else type(what).__name__
    return _failure_named(name)()


@lru_cache(maxsize=256)
def _failure_named(name: str) -> type[ServerFailed]:
    return type(name, (ServerFailed,), {"__doc__": ServerFailed.__doc__})


def checked(rules: str) -> Rules:
    if rules not in RULES:
        near = difflib.get_close_matches(str(rules), RULES, n=1)
        question = f": did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"rules={rules!r:.60} is none of {', '.join(map(repr, RULES))}{question}")
    return rules  # type: ignore[return-value]


def is_final(rules: Rules, status: int) -> bool:
    """Whether this answer is remembered and replayed."""
    match rules:
        case "stripe":
            return True
        case "success_only":
            return status in SUCCESS
        case "below_500":
            return status < SERVER_ERROR and status not in NEVER_FINAL


def settled(rules: Rules, answer: Answer) -> Answer:
    """What is remembered of an answer. Raises `NotFinal` where nothing is."""
    if not is_final(rules, answer.status):
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
    length = [] if kept.status in EMPTY else [(b"content-length", str(len(kept.body)).encode())]
    # Also a probe, or a person, may have written it.
    return Answer(kept.status, [*_of_every_delivery(kept), *length, *marks], kept.body, kept.cut)


def policy_for(policy: Policy, body_max: int) -> Policy:
    """The guard's policy, where an answer of 5xx is an outcome that nobody knows, and where a whole answer fits.

    What is final is said by the rules, in the place of `remember`.
    """
    room = max(policy.result_bytes_max, body_max + HEADERS_ROOM)
    return policy.but(unknown=(*policy.unknown, ServerFailed), remember=(), result_bytes_max=room)


# For status and headers beside the body: servers refuse more than this themselves.
HEADERS_ROOM: Final = 1 << 17
