"""Restate: a service whose handler runs three steps, on its own server. An engine of another weight.

The server is the program of the npm package; the service runs in this process, as our handlers do.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from bench.install import NODE_FOLDER, restate_package
from bench.measure import Side
from bench.sides import AMOUNT, Handler, library, version_of
from bench.sides.steps import STEPS
from services.house import House
from services.processes import HOST, Daemon, free_port
from services.programs import Missing


class Ports(NamedTuple):
    ingress: int
    admin: int


def server_program() -> str:
    name = "restate-server"
    found = shutil.which(name) or shutil.which(name, path=NODE_FOLDER / "node_modules" / restate_package() / "bin")
    if found is None:
        raise Missing(f"restate-server is not installed: npm install {restate_package()}")
    return found


@asynccontextmanager
async def steps(house: House) -> AsyncIterator[Side]:
    restate, handler = library("restate"), Handler()
    service = restate.Service("Orders")

    @service.handler()  # type: ignore[untyped-decorator]
    async def order(ctx: Any, amount: int) -> int:
        handler()
        for name in STEPS:
            await ctx.run_typed(name, lambda: AMOUNT)
        return amount

    with _server(house) as ports:
        async with (
            _served(restate.app([service])) as url,
            restate.create_client(f"http://{HOST}:{ports.ingress}") as client,
        ):
            await asyncio.to_thread(_register, ports.admin, url)

            async def deliver(key: str) -> None:
                await client.service_call(order, arg=AMOUNT, idempotency_key=key)

            yield Side(f"a service on {version_of(server_program())}", deliver, deliver, handler.times)


@contextmanager
def _server(house: House) -> Iterator[Ports]:
    program, folder = server_program(), house.home.room("restate")
    ports, node = Ports(free_port(), free_port()), free_port()
    daemon = Daemon(
        "restate-server",
        [program, "--no-logo", "--base-dir", str(folder / "data")],
        folder,
        answers=lambda: _get(f"http://{HOST}:{ports.admin}/health") == 200 and _is_open(ports.ingress),
        environment={
            "RESTATE_LISTEN_MODE": "tcp",
            "RESTATE_BIND_IP": HOST,
            "RESTATE_ADVERTISED_HOST": HOST,
            "RESTATE_BIND_PORT": str(node),
            "RESTATE_INGRESS__BIND_PORT": str(ports.ingress),
            "RESTATE_ADMIN__BIND_PORT": str(ports.admin),
            "RESTATE_DISABLE_TELEMETRY": "true",
            "RESTATE_LOG_FILTER": "warn",
        },
    )
    house.home.keep(daemon)
    try:
        yield ports
    finally:
        daemon.end()


def _is_open(port: int) -> bool:
    return _get(f"http://{HOST}:{port}/restate/health") == 200


def _get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return int(reply.status)


def _register(admin: int, url: str) -> None:
    body = json.dumps({"uri": url}).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{admin}/deployments", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        reply.read()


@asynccontextmanager
async def _served(app: Any) -> AsyncIterator[str]:
    """Serve the handlers in this event loop, by Hypercorn, as Restate's guide does."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config, port, done = Config(), free_port(), asyncio.Event()
    config.bind = [f"{HOST}:{port}"]
    config.errorlog = None
    server = asyncio.create_task(serve(app, config, shutdown_trigger=done.wait))
    try:
        yield f"http://{HOST}:{port}"
    finally:
        done.set()
        await server
