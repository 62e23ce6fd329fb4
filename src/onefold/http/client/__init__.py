"""Retry HTTP requests safely: one key for all retries of a call, kept across a crash of the client on request.

    client = httpx.Client(transport=Transport())                  # httpx, AsyncTransport for its AsyncClient
    session.mount("https://", Adapter())                          # requests

    with intent("pay-order-42", store="sqlite:///intents.db"):    # the same key, also after a restart
        client.post("https://api.example.com/payments", json=order)

Each is imported on use: neither httpx nor requests is needed for the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onefold.http.client._intent import intent
from onefold.http.client._retrying import Attempt, Retries, Sent

if TYPE_CHECKING:
    from onefold.http.client._httpx.transports import AsyncTransport, Transport
    from onefold.http.client._requests.adapter import Adapter

__all__ = ["Adapter", "AsyncTransport", "Attempt", "Retries", "Sent", "Transport", "intent"]


def __getattr__(name: str) -> Any:
    if name in ("Transport", "AsyncTransport"):
        from onefold.http.client._httpx import transports

        return getattr(transports, name)
    if name == "Adapter":
        from onefold.http.client._requests.adapter import Adapter

        return Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
