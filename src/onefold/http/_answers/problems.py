"""Build a response for every refusal: problem details (RFC 9457) with a stable code, and a link to the policy. Pure."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from onefold import (
    ClaimLost,
    Held,
    InProgress,
    KeyReused,
    MissingKey,
    OnefoldError,
    ProbeFailed,
    RememberedFailure,
    ResultNotKept,
    StoreUnavailable,
)
from onefold.errors import MEANINGS, Meaning
from onefold.http._requests.keys import HEADER
from onefold.http._shared.messages import Answer, Refused, Unauthorized
from onefold.keys import KEY_MAX

# The draft describes three of them; the others are ours.
TITLES: Final = {
    "key_missing": "Idempotency-Key is missing",
    "key_malformed": "Idempotency-Key is malformed",
    "body_incomplete": "The request is incomplete",
    "no_room": "There is no room for the request at the moment",
    "caller_unknown": "The caller of this request is unknown",
    "unauthorized": "The credentials of this request are missing or invalid",
    "key_reused": "Idempotency-Key is already used",
    "in_progress": "A request is outstanding for this Idempotency-Key",
    "held": "The outcome of the request with this Idempotency-Key is unknown",
    "claim_lost": "The request took too long and was taken over",
    "outcome_unknown": "The outcome of the request with this Idempotency-Key cannot be determined at the moment",
    "store_unavailable": "Idempotency cannot be guaranteed at the moment",
    "result_not_kept": "The request was processed before, but its response was not kept",
    "failed": "The request failed for good",
}

BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401
UNAVAILABLE: Final = 503

# The first match counts; the text never contains a key, a payload or the name of a machine.
CODES: Final[tuple[tuple[type[OnefoldError], str, str], ...]] = (
    (MissingKey, "key_malformed", f"{HEADER} cannot be used: it has more than {KEY_MAX} bytes, or is not text."),
    (
        KeyReused,
        "key_reused",
        "This key was used before with another host, method, path, query, media type or body. Use a new key.",
    ),
    (
        InProgress,
        "in_progress",
        "The first request with this key is still being processed. Send the same request again later.",
    ),
    (
        Held,
        "held",
        "The outcome of the first request with this key is unknown, and is being investigated. It is not run again.",
    ),
    (
        ClaimLost,
        "claim_lost",
        "Another request with this key has taken over. Send the same request again to get its response.",
    ),
    (
        ProbeFailed,
        "outcome_unknown",
        "It is not known yet whether the first request with this key took effect. Send the same request again later.",
    ),
    (StoreUnavailable, "store_unavailable", "Nothing was processed. Send the same request again later."),
    (RememberedFailure, "failed", "The request with this key failed. It is not run again."),
    (
        ResultNotKept,
        "result_not_kept",
        "The request was processed before. It is not run again, and its response was not kept.",
    ),
)

# For an error that does not say how long: the store may be back in a moment.
RETRY_AFTER: Final = 1.0


def of_refusal(refused: Refused, policy_url: str | None, key_location: str = HEADER) -> Answer:
    """Build the response to a refused request. `key_location` is where the key belongs, as the client knows it."""
    title = _naming(TITLES[refused.code], key_location)
    if refused.code == "no_room":
        return problem(refused.code, UNAVAILABLE, str(refused), policy_url, title=title, retry_after=RETRY_AFTER)
    if isinstance(refused, Unauthorized):
        answer = problem(refused.code, UNAUTHORIZED, str(refused), policy_url, title=title)
        # RFC 9110: every 401 says how to authenticate.
        return Answer(
            answer.status, [*answer.headers, (b"www-authenticate", refused.challenge.encode("ascii"))], answer.body
        )
    return problem(refused.code, BAD_REQUEST, str(refused), policy_url, title=title)


def of_error(
    error: OnefoldError, policy_url: str | None, key_location: str = HEADER, *, reused: int | None = None
) -> Answer:
    """Build the response for an error. One that only a programmer can fix is raised: the server logs it, as a 500.

    `key_location` is where the key belongs. `reused` is the status for a key that was used with another request, if it
    is not the draft's.
    """
    meaning = _meaning(error)
    for kind, code, detail in CODES:
        if isinstance(error, kind):
            status = reused if kind is KeyReused and reused is not None else meaning.http
            # The sender that lost the claim gets the response of the one that took over.
            again = meaning.retry_after or kind is ClaimLost
            wait = getattr(error, "retry_after", RETRY_AFTER) if again else None
            title = _naming(TITLES[code], key_location)
            return problem(code, status, _naming(detail, key_location), policy_url, title=title, retry_after=wait)
    raise error


def _naming(text: str, key_location: str) -> str:
    """Name the location of the key: its header, another one, "The field id", or "The key" if a function reads it."""
    name = key_location.removeprefix("The ")
    this = f"value of the {name}" if key_location.startswith("The field ") else name
    return text.replace(f"this {HEADER}", f"this {this}").replace(HEADER, key_location)


def problem(
    code: str,
    status: int,
    detail: str,
    policy_url: str | None = None,
    *,
    retry_after: float | None = None,
    title: str | None = None,
) -> Answer:
    """Build a problem as JSON; `type` is the published policy, if there is one."""
    body = msgspec.json.encode(
        {
            "type": policy_url or "about:blank",
            "title": title or TITLES[code],
            "status": status,
            "detail": detail,
            "code": code,
        }
    )
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-language", b"en"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(retry_after))).encode()))
    if policy_url:
        headers.append((b"link", f'<{policy_url}>; rel="describedby"'.encode("latin-1")))
    return Answer(status, headers, body)


def _meaning(error: OnefoldError) -> Meaning:
    return next(MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS)
