"""Services as several worker processes on one database: the example's wallet, and one that tells somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from onefold import AsyncGuard, Policy, current
from onefold.http.asgi import IdempotencyMiddleware, by_header
from tests.http_service.process import KEEPS_SECONDS, Service, started
from tests.support import PROJECT

EXAMPLES: Final = PROJECT / "examples"

# A crash is over when its lease is; short, so that a test is.
LEASE: Final = 1.0

HEALTH_SECONDS: Final = 20


@contextlib.contextmanager
def serving(folder: Path, app: str = "create_app", *options: str) -> Iterator[Service]:
    """One of the applications below."""
    environment = {"PAYMENTS_DB": str(folder / "payments.db"), "PAYMENTS_FOLDER": str(folder)}
    command = [sys.executable, "-m", "uvicorn", "--factory", f"tests.http_service.payments:{app}", *options]
    # A worker that is slow to start, or that waits for its processor, is not taken for one that hangs. But for as long
    # nobody replaces one that was killed just as it was asked for its health.
    patient = [f"--timeout-keep-alive={KEEPS_SECONDS}", f"--timeout-worker-healthcheck={HEALTH_SECONDS}"]
    (folder / "effects").touch()
    with started(
        command,
        lambda port: ["--host", "127.0.0.1", "--port", str(port), *patient],
        folder,
        environment,
        # Who waits so patiently for a worker does not hear that it is to end.
        ends_by=signal.SIGKILL,
    ) as service:
        yield service


def create_app() -> Any:
    """The example, as it is."""
    return _example().create_app()


def create_stopping() -> Any:
    """Both services below, each with a short lease, behind one port: to start one server is slow enough."""
    wallet = _wallet()
    others = {"/notify": _notifier("rerun"), "/notify-and-hold": _notifier("hold")}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await others.get(scope.get("path", ""), wallet)(scope, receive, send)

    return app


def _wallet() -> Any:
    """The example, which does not get to the end of a payment that is to stop."""
    from starlette.middleware import Middleware

    app = _example().create_app(policy=Policy(lease=LEASE))
    # The last one is the innermost: below the one that claims.
    app.user_middleware.append(Middleware(StopsOnce))
    return app


def _notifier(after_crash: Any) -> Any:
    """Tells somebody else, which no transaction of ours can include."""
    policy = Policy(lease=LEASE, after_crash=after_crash)
    guard = AsyncGuard(f"sqlite:///{os.environ['PAYMENTS_DB']}", policy=policy)
    return IdempotencyMiddleware(StopsOnce(notify), guard=guard, scope=by_header("X-Api-Key"))


async def notify(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    with (_folder() / "effects").open("a") as effects:
        effects.write(f"{scope['path']} {current().key_for('gateway')} 0\n")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"told"})


class StopsOnce:
    """A request that names a place stays there, before its handler or after it, until its process is killed.

    Once for each name of a story, in all workers: its retries go through.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope.get("headers", [])}
        story = headers.get("x-story", "")
        if not story or not _is_first(story):
            await self._app(scope, receive, send)
            return
        if headers["x-stop"] == "before the handler":
            await _stay(story)

        async def stopping(message: Any) -> None:
            await _stay(story)
            await send(message)

        await self._app(scope, receive, stopping)


def _is_first(story: str) -> bool:
    try:
        os.close(os.open(_folder() / f"first-{story}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


async def _stay(story: str) -> None:
    (_folder() / f"{story}.part").write_text(str(os.getpid()))
    (_folder() / f"{story}.part").rename(_folder() / f"stopped-{story}")
    await asyncio.Event().wait()


def payments(folder: Path) -> tuple[int, int]:
    """How many there were, and what is left to asha."""
    with closing(sqlite3.connect(folder / "payments.db")) as connection:
        found = connection.execute("SELECT (SELECT count(*) FROM payment), balance FROM wallet WHERE account = 'asha'")
        count, balance = found.fetchone()
    return int(count), int(balance)


def _example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    import payments_api  # type: ignore[import-not-found]

    return payments_api


def _folder() -> Path:
    return Path(os.environ["PAYMENTS_FOLDER"])
