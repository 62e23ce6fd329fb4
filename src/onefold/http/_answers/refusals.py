"""Let an application write its own responses to refused requests: a function of a `Refusal`. Pure.

A function that fails changes nothing for the client: it gets the problem document, and the log has the error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from onefold import UsageError
from onefold.http._answers.sendable import BODILESS, check_length, headers_of, status_of
from onefold.http._shared import options as _options
from onefold.http._shared.messages import REFUSED, Answer

LOG = logging.getLogger("onefold.http")

# What the headers of a problem say about its own body.
OF_THE_BODY: Final = frozenset({b"content-type", b"content-language", b"content-length"})


class Refusal(NamedTuple):
    """What a client is about to be told, for a function that is passed as `refusal=`."""

    # Stable, and for programs: "in_progress", "key_reused" …
    code: str
    status: int
    title: str
    detail: str
    # Those of the problem document: Retry-After, Link, WWW-Authenticate, Cache-Control and the like.
    headers: list[tuple[bytes, bytes]]


# It returns a value for a JSON body, a whole `Answer`, or None for the problem document.
RefusalFunction = Callable[[Refusal], Any]


def own_answer(problem: Answer, make: RefusalFunction | None) -> Answer:
    """Return the application's own response in place of this problem; the problem itself if there is none."""
    if make is None:
        return problem
    document = msgspec.json.decode(problem.body)
    refusal = Refusal(document["code"], problem.status, document["title"], document["detail"], problem.headers)
    try:
        return _answer_of(make(refusal), problem, refusal.code)
    except Exception:
        LOG.exception("refusal= failed for %r, and the problem document was sent instead", refusal.code)
        return problem


def _answer_of(given: Any, problem: Answer, code: str) -> Answer:
    if given is None:
        return problem
    _options.check_not_async("refusal", given)
    if not isinstance(given, Answer):
        kept = [(name, value) for name, value in problem.headers if name not in OF_THE_BODY]
        body = msgspec.json.encode(given)
        given = Answer(problem.status, [(b"content-type", b"application/json"), *kept], body)
    status, headers = status_of(given.status), headers_of(given.headers)
    if not isinstance(given.body, bytes) or (given.body and status in BODILESS):
        raise UsageError(f"refusal= returned an Answer whose body cannot be sent with the status {status}")
    check_length(status, headers, len(given.body), is_head=False)
    # Our client has to know it from an answer of the application: an intent must not end with it.
    mark = (REFUSED.lower().encode(), code.encode())
    return with_length(Answer(status, [*headers, mark], given.body, given.cut))


def with_length(answer: Answer) -> Answer:
    """Return the answer with the length of its body, unless it has one, or no body by its status."""
    if answer.status in BODILESS or any(name.lower() == b"content-length" for name, _value in answer.headers):
        return answer
    return Answer(
        answer.status, [*answer.headers, (b"content-length", str(len(answer.body)).encode())], answer.body, answer.cut
    )
