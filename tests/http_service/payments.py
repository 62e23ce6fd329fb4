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

from http_service.process import KEEPS_SECONDS, PATIENCE, Service, started
from onefold import AsyncGuard, Policy, current
from onefold.http.asgi import IdempotencyMiddleware, by_header

EXAMPLES: Final = Path(__file__).parent.parent.parent / "examples"

# A crash is over when its lease is; short, so that a test is.
LEASE: Final = 1.0


@contextlib.contextmanager
def serving(
    folder: Path, app: str = "create_app", *options: str, stop: str = "", policy: str = ""
) -> Iterator[Service]:
    """One of the applications below. `stop` is where the first request stays until its worker is killed."""
    environment = {
        "PAYMENTS_DB": str(folder / "payments.db"),
        "PAYMENTS_FOLDER": str(folder),
        "PAYMENTS_STOP": stop,
        "PAYMENTS_POLICY": policy,
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", f"http_service.payments:{app}", *options]
    # A worker that is slow to start, or that waits for its processor, is not taken for one that hangs.
    patient = [f"--timeout-keep-alive={KEEPS_SECONDS}", f"--timeout-worker-healthcheck={PATIENCE:.0f}"]
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


def create_wallet() -> Any:
    """The example with a short lease, whose first payment does not get to its end."""
    from starlette.middleware import Middleware

    app = _example().create_app(policy=Policy(lease=LEASE))
    # The last one is the innermost: below the one that claims.
    app.user_middleware.append(Middleware(StopsOnce))
    return app


def create_notifier() -> Any:
    """Tells somebody else, which no transaction of ours can include."""
    guard = AsyncGuard(
        f"sqlite:///{os.environ['PAYMENTS_DB']}",
        policy=Policy(lease=LEASE, after_crash=os.environ["PAYMENTS_POLICY"] or "rerun"),  # type: ignore[arg-type]
    )
    return IdempotencyMiddleware(StopsOnce(notify), guard=guard, scope=by_header("X-Api-Key"))


async def notify(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    with (_folder() / "effects").open("a") as effects:
        effects.write(f"{scope['path']} {current().key_for('gateway')} 0\n")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"told"})


class StopsOnce:
    """The first POST of all workers stays here, before its handler or after it, until its process is killed."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._stop = os.environ["PAYMENTS_STOP"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not self._is_first():
            await self._app(scope, receive, send)
            return
        if self._stop == "before the handler":
            await self._stay()

        async def stopping(message: Any) -> None:
            await self._stay()
            await send(message)

        await self._app(scope, receive, stopping)

    def _is_first(self) -> bool:
        try:
            os.close(os.open(_folder() / "first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    async def _stay(self) -> None:
        (_folder() / "stopped.part").write_text(str(os.getpid()))
        (_folder() / "stopped.part").rename(_folder() / "stopped")
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
