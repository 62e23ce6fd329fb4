"""The Idempotency-Key header: for ASGI, WSGI, Django and Flask, per route, and a client that retries safely.

`Answer` is the stored response to a request, for a probe or a person who settles one by hand: `Done(Answer(201, []))`.
`Request` and `Body` are what functions get that are passed as `scope=`, `key=`, `required=` or `fingerprint=`.
A scope function raises `Unauthorized` to refuse a request with 401. A function passed as `refusal=` gets a `Refusal`.
"""

from onefold.http._answers.refusals import Refusal
from onefold.http._shared.messages import Answer, Body, Request, Unauthorized

__all__ = ["Answer", "Body", "Refusal", "Request", "Unauthorized"]
