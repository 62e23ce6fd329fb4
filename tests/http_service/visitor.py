"""A client of an ASGI application without a server between: it sees every message, it can go, and it can break."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

Message = Any


class Visitor:
    """One request. `await visitor.visit()` is what a server would await; `visitor.sent` is what came back."""

    def __init__(
        self,
        app: Any,
        path: str = "/pay",
        *,
        key: str | None = "key",
        body: bytes | Sequence[bytes] = b"{}",
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
        **scope: Any,
    ) -> None:
        named = [] if key is None else [(b"idempotency-key", key.encode())]
        self.app = app
        self.sent: list[Message] = []
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"host", b"testserver"), *named, *headers],
            "client": ("127.0.0.1", 50_000),
            "server": ("testserver", 80),
            **scope,
        }
        parts = [body] if isinstance(body, bytes) else list(body)
        self._unsent = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
            for number, part in enumerate(parts)
        ]
        self._gone = asyncio.Event()
        # Raised instead of taking the message of this number.
        self.breaks_at: dict[int, Exception] = {}

    def go(self) -> None:
        """The client has gone."""
        self._gone.set()

    async def visit(self) -> Visitor:
        await self.app(self.scope, self.receive, self.send)
        return self

    async def receive(self) -> Message:
        if self._unsent:
            return self._unsent.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if error := self.breaks_at.get(len(self.sent)):
            raise error
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(next(one["status"] for one in self.sent if one["type"] == "http.response.start"))

    @property
    def headers(self) -> dict[str, str]:
        start = next(one for one in self.sent if one["type"] == "http.response.start")
        return {name.decode().lower(): value.decode() for name, value in start["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent if one["type"] == "http.response.body")

    @property
    def ended(self) -> bool:
        """Whether the whole answer came."""
        return any(one["type"] == "http.response.body" and not one.get("more_body") for one in self.sent)

    @property
    def is_replay(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"
