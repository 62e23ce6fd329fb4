"""What the service does with a request, whatever framework it came through; and the rules under each prefix."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from onefold import Policy
from onefold.http._requests.keys import body_field
from onefold.http.scopes import by_header

CONFIG: dict[str, Any] = json.loads(os.environ.get("ONEFOLD_HTTP_SERVICE", "{}"))

POLICY_URL = "https://example.com/idempotency"

# Longer than a test on a slow machine keeps a gate shut; it bounds how long a handler hangs that nobody lets go on.
GATE_SECONDS_MAX = 300.0


class Rule(NamedTuple):
    """The arguments of one prefix."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    policy: Policy = Policy()


RULES: dict[str, Rule] = {
    "below": Rule(),
    "stripe": Rule({"rules": "stripe"}),
    "success": Rule({"rules": "success_only"}),
    "strict": Rule({"strict": True}),
    "needed": Rule({"required": True, "policy_url": POLICY_URL}),
    "hook": Rule({"key": body_field("id")}),
    "small": Rule({"body_max": 1_000}),
    "streams": Rule({"event_streams": True}),
    "hold": Rule(policy=Policy(after_crash="hold")),
    # Longer than anybody is kept waiting.
    "waits": Rule(policy=Policy(wait=100)),
    "waits-a-little": Rule(policy=Policy(wait=1)),
}

METHODS = ["GET", "HEAD", "POST", "PATCH", "OPTIONS"]


def options_of(prefix: str) -> dict[str, Any]:
    """Every prefix is an operation of its own, so that their keys do not meet."""
    return {"scope": by_header("X-Api-Key"), "operation": prefix, **RULES[prefix].options}


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    parts: Iterator[bytes]
    # It comes in parts, some of them later.
    streamed: bool

    @property
    def whole(self) -> bytes:
        return b"".join(self.parts)


class Boom(Exception):
    """The handler raises, or somebody below the middleware."""


def wishes(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}


def behave(path: str, query: str, body: bytes) -> Answer:
    """Do as the query says: note the effect, wait, raise, or answer."""
    wish = wishes(query)
    note(f"{path} {wish.get('name', '')} {len(body)}")
    if "gate" in wish:
        wait_for(wish["gate"])
    if wish.get("raise") == "handler":
        raise Boom("as it was asked")
    status = int(wish.get("status", 200))
    headers = [("Content-Type", wish.get("type", "text/plain; charset=utf-8")), ("X-Effect", str(effects()))]
    if "cookie" in wish:
        headers.append(("Set-Cookie", f"session={wish['cookie']}"))
    if "padding" in wish:
        headers.append(("X-Padding", "p" * int(wish["padding"])))
    if wish.get("encoding") == "gzip":
        headers.append(("Content-Encoding", "gzip"))
    return Answer(status, headers, parts_of(status, wish), streamed=int(wish.get("parts", 1)) > 1)


def parts_of(status: int, wish: dict[str, str]) -> Iterator[bytes]:
    if status == 204:
        return
    size, count = int(wish.get("size", 0)), int(wish.get("parts", 1))
    text = wish.get("text", f"effect {effects()}").encode()
    for number in range(count):
        if number == 1 and "between" in wish:
            wait_for(wish["between"])
        if number == 1 and wish.get("raise") == "middle":
            raise Boom("in the middle of the answer")
        part = (b"%d:" % number if count > 1 else b"") + (text if not size else (text * size)[:size])
        yield gzip.compress(part) if wish.get("encoding") == "gzip" else part


def raises_below(query: str) -> bool:
    """Whether a middleware between ours and the handler raises, once the handler has run."""
    return wishes(query).get("raise") == "below"


def note(line: str) -> None:
    with open(CONFIG["effects"], "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def effects() -> int:
    with open(CONFIG["effects"], encoding="utf-8") as file:
        return len(file.readlines())


def wait_for(gate: str) -> None:
    """Until the test opens the gate; bounded, so that a broken test ends."""
    ends = time.monotonic() + GATE_SECONDS_MAX
    while not os.path.exists(gate) and time.monotonic() < ends:
        time.sleep(0.005)
