"""Bodies of 100 MiB through the HTTP adapters: python -m bench.soak_http (--megabytes 8 for a short form)

What is shown, on ASGI and on WSGI, with a real server and a real socket: a large request is hashed in full and reaches
its handler, a large answer is passed on, and the server's memory does not grow with either. 1 if it does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import httpx

from onefold import AsyncGuard, Guard
from onefold.http import asgi, wsgi
from onefold.http.asgi import single_tenant

PROJECT: Final = Path(__file__).parent.parent

MEGABYTE: Final = 1 << 20

# Beyond what it had before: the parts under way, and the remembered head of an answer. Far less than a body.
MEMORY_MAX: Final = 40 * MEGABYTE

STORE: Final = os.environ.get("SOAK_HTTP_STORE", "memory:")


def parts_of(query: str) -> Iterator[bytes]:
    """The answer that was asked for, piece by piece."""
    for _ in range(int(parse_qs(query).get("megabytes", ["0"])[0])):
        yield b"a" * MEGABYTE


async def asgi_service(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-size", str(size).encode())]})
    for part in parts_of(scope["query_string"].decode()):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def wsgi_service(environ: Any, start_response: Any) -> Iterable[bytes]:
    size = 0
    while chunk := environ["wsgi.input"].read(MEGABYTE):
        size += len(chunk)
    start_response("200 OK", [("X-Size", str(size))])
    return parts_of(environ["QUERY_STRING"])


asgi_app: Any = asgi.IdempotencyMiddleware(asgi_service, guard=AsyncGuard(STORE), scope=single_tenant)
wsgi_app: Any = wsgi.IdempotencyMiddleware(wsgi_service, guard=Guard(STORE), scope=single_tenant)

# Neither closes a kept connection under the next request, however long this machine takes to send it.
UVICORN: Final = ("uvicorn", "--host=127.0.0.1", "--port={port}", "--timeout-keep-alive=600", "--log-level=warning")
GUNICORN: Final = ("gunicorn", "--bind=127.0.0.1:{port}", "--threads=4", "--keep-alive=600", "--log-level=warning")

SERVERS: Final = {
    "asgi": (*UVICORN, "bench.soak_http:asgi_app"),
    "wsgi": (*GUNICORN, "--timeout=300", "bench.soak_http:wsgi_app"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    asked = parser.parse_args(arguments)
    wrong: list[str] = []
    for name, command in SERVERS.items():
        with tempfile.TemporaryDirectory() as folder:
            wrong += [f"{name}: {one}" for one in soak(name, command, asked.megabytes, Path(folder))]
    print("\n".join(wrong) or "all of it holds")
    return 1 if wrong else 0


def soak(name: str, command: Sequence[str], megabytes: int, folder: Path) -> list[str]:
    """What did not hold."""
    # From the tests: a server on a free port, which is gone in the end.
    from tests.http_service.process import started

    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(PROJECT)])
    options = {"PYTHONPATH": paths, "SOAK_HTTP_STORE": f"sqlite:///{folder}/records.db"}
    size = megabytes * MEGABYTE
    with (
        started(
            [sys.executable, "-m"], lambda port: [part.format(port=port) for part in command], folder, options
        ) as service,
        httpx.Client(base_url=service.url, timeout=300.0) as client,
    ):

        def post(key: str, last: bytes = b"b", **query: int) -> httpx.Response:
            body = (
                b"a" * MEGABYTE if number < megabytes - 1 else b"a" * (MEGABYTE - 1) + last
                for number in range(megabytes)
            )
            headers = {"Idempotency-Key": key, "Content-Length": str(size)}
            return client.post("/", params=query, headers=headers, content=body)

        client.post("/", headers={"Idempotency-Key": "warm"}, content=b"")
        before = peak(service.process.pid)
        first, second, other = post("upload"), post("upload"), post("upload", last=b"c")
        uploaded = peak(service.process.pid)
        download = client.post("/", params={"megabytes": megabytes}, headers={"Idempotency-Key": "d"}, content=b"")
        again = client.post("/", params={"megabytes": megabytes}, headers={"Idempotency-Key": "d"}, content=b"")
        downloaded = peak(service.process.pid)

    print(
        f"{name}: {megabytes} MiB up: +{(uploaded - before) >> 20} MiB, and down: +{(downloaded - uploaded) >> 20} MiB"
    )
    facts = {
        "the whole body reaches the handler": first.headers["x-size"] == str(size),
        "a duplicate is replayed": "idempotent-replayed" in second.headers,
        "another last byte is another request": other.status_code == 422,
        "a large answer is passed on in whole": len(download.content) == size,
        "and replayed without its body": (again.content, again.headers.get("idempotent-body")) == (b"", "omitted"),
        "memory does not grow with a request": uploaded - before < MEMORY_MAX,
        "memory does not grow with an answer": downloaded - uploaded < MEMORY_MAX,
    }
    return [fact for fact, holds in facts.items() if not holds]


def peak(pid: int) -> int:
    """The most memory that the server's processes had, in bytes; on Linux."""
    found = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            found = int(line.split()[1]) * 1024
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return found + sum(peak(int(child)) for child in children)


if __name__ == "__main__":
    sys.exit(main())
