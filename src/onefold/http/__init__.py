"""The Idempotency-Key header: for ASGI, WSGI, Django and Flask, per route, and a client that retries safely.

`Answer` is the stored response to a request, for a probe or a person who settles one by hand: `done(Answer(201, []))`.
"""

from onefold.http._shared.messages import Answer

__all__ = ["Answer"]
