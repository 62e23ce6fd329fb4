"""Random headers, and random requests by the schema: never a server error, and never an unguarded run."""

from __future__ import annotations

import asyncio
import collections
import io
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, current
from onefold.http import asgi, wsgi
from onefold.http.asgi import single_tenant
from tests.http_service.payments import serving
from tests.http_service.visitor import Visitor

COUNT = 10_000
SEED = 20_261_115

# Far more than a request needs.
PATIENCE = 120.0

# What structured fields are made of, and what they are not.
PIECES = [
    b'"', b"\\", b";", b",", b"=", b":", b"?1", b"@", b"%", b"(", b")", b"*", b" ", b"\t", b"\0", b"\x7f", b"\x80",
    b"\xff",
    b"a", b"key", b"1", b"-1.5", b"\xc3\xa9", b"8e03978e-40d5-43dd-bc93-6894a57f9324", b";a=1", b';b="c"', b"9" * 20,
    b'%"f%c3%bc"', b"@1659578233", b":aGk=:", b"\r", b"\n", b"k" * 254,
]  # fmt: skip


def values() -> Iterator[bytes]:
    chance = random.Random(SEED)
    for number in range(COUNT):
        match number % 4:
            case 0:
                yield chance.randbytes(chance.randrange(0, 40))
            case 1:
                yield b"".join(chance.choices(PIECES, k=chance.randrange(0, 8)))
            case 2:
                inside = b"".join(chance.choices(PIECES, k=chance.randrange(0, 4)))
                yield b'"' + inside + b'"' + b"".join(chance.choices(PIECES, k=chance.randrange(0, 3)))
            case _:
                yield bytes(chance.randrange(0x20, 0x7F) for _ in range(chance.randrange(0, 300)))


class Seen:
    """The answers, and whether every run knew its key."""

    def __init__(self) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()
        self.keys: list[str] = []

    def check(self) -> None:
        assert set(self.statuses) == {200, 400}
        assert min(self.statuses.values()) > COUNT / 10
        assert all(0 < len(key.encode()) <= 255 for key in self.keys)
        # Each key ran once, however often it came.
        assert len(self.keys) == len(set(self.keys))


def test_ten_thousand_random_headers_on_asgi() -> None:
    seen = Seen()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        seen.keys.append(current().key)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def story() -> None:
        middleware = asgi.IdempotencyMiddleware(app, guard=AsyncGuard("memory:"), scope=single_tenant)
        for value in values():
            visitor = Visitor(middleware, key=None, headers=[(b"idempotency-key", value)])
            seen.statuses[(await visitor.visit()).status] += 1

    asyncio.run(story())

    seen.check()


def test_ten_thousand_random_headers_on_wsgi() -> None:
    seen = Seen()

    def app(_environ: Any, start_response: Any) -> list[bytes]:
        seen.keys.append(current().key)
        start_response("200 OK", [])
        return [b""]

    def start_response(status: str, _headers: Any, _exc_info: Any = None) -> Any:
        seen.statuses[int(status[:3])] += 1

    middleware = wsgi.IdempotencyMiddleware(app, guard=Guard("memory:"), scope=single_tenant)
    for value in values():
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/pay",
            "CONTENT_LENGTH": "2",
            "wsgi.input": io.BytesIO(b"{}"),
            "HTTP_IDEMPOTENCY_KEY": value.decode("latin-1"),
        }
        answer: Any = middleware(environ, start_response)
        assert list(answer) is not None
        if hasattr(answer, "close"):
            answer.close()

    seen.check()


@pytest.mark.more
@pytest.mark.parametrize(("seed", "examples"), [(1, 8), (2, 100)])
def test_schemathesis_finds_no_server_error_in_the_example(tmp_path: Path, seed: int, examples: int) -> None:
    checks = "not_a_server_error,status_code_conformance,response_schema_conformance"
    with serving(tmp_path) as service:
        found = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"),
                *("--checks", checks, "--max-examples", f"{examples}", "--seed", f"{seed}"),
                *("--header", "X-Api-Key: shop"),
                *("--phases", "examples,coverage,fuzzing", "--generation-database", "none", "--no-color"),
                # How fast this machine is, and whether it rests for a while, is not what is tested.
                *("--request-timeout", f"{PATIENCE:g}", "--suppress-health-check", "too_slow"),
            ],
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE * 5,
            check=False,
        )

    assert found.returncode == 0, found.stdout
    assert "Tested: 2" in found.stdout
