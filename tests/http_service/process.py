"""A server process with the service in it: started on a free port, stopped at the end, killed if it must be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.support import PROJECT

# Far more than a server needs to start; it bounds how long a broken one hangs.
PATIENCE: Final = 120.0

# Longer than any client keeps a connection: no server closes one under the next request.
KEEPS_SECONDS: Final = 600


# Framework, and the command that serves it.
SERVERS: Final = {
    "asgi": ["uvicorn", "tests.http_service.asgi_app:app"],
    "fastapi": ["uvicorn", "tests.http_service.fastapi_app:app"],
    "wsgi": ["gunicorn", "tests.http_service.wsgi_app:app"],
    "flask": ["waitress", "tests.http_service.flask_app:app"],
    "django": ["waitress", "tests.http_service.django_app:app"],
}

# Others, which have tests of their own.
OTHERS: Final = {
    "django views": ["waitress", "tests.http_service.django_views:app"],
    "django views on asgi": ["uvicorn", "tests.http_service.django_views:asgi"],
    "litestar": ["uvicorn", "tests.http_service.litestar_app:app"],
}

# Every stack of middlewares, on every server that is known to behave in its own way.
STACKS: Final = {
    "asgi on uvicorn with h11": ["uvicorn-h11", "tests.http_service.stack_asgi:app"],
    "asgi on uvicorn with httptools": ["uvicorn-httptools", "tests.http_service.stack_asgi:app"],
    "asgi on hypercorn": ["hypercorn", "tests.http_service.stack_asgi:app"],
    "wsgi on waitress": ["waitress", "tests.http_service.stack_wsgi:app"],
    "wsgi on gunicorn": ["gunicorn", "tests.http_service.stack_wsgi:app"],
    "django on waitress": ["waitress", "tests.http_service.stack_django:app"],
    "django on gunicorn": ["gunicorn", "tests.http_service.stack_django:app"],
    "django on uvicorn with h11": ["uvicorn-h11", "tests.http_service.stack_django:asgi"],
    "django on uvicorn with httptools": ["uvicorn-httptools", "tests.http_service.stack_django:asgi"],
    "django on hypercorn": ["hypercorn", "tests.http_service.stack_django:asgi"],
}


class Service:
    """A running server: where it is, what it did, and where its gates are."""

    def __init__(self, url: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.folder = folder
        self.process = process

    def effects(self, name: str) -> int:
        """How often the handler ran for requests of this name."""
        return sum(line.split(" ")[1] == name for line in self.lines())

    def lines(self) -> list[str]:
        """Those that are written to their end."""
        return (self.folder / "effects").read_text(encoding="utf-8").rpartition("\n")[0].splitlines()

    def gate(self, name: str) -> Path:
        """A handler that names it waits until it is there."""
        return self.folder / f"gate-{name}"

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")


def records_in(folder: Path) -> str:
    """A store in this folder. A disk that is slow for some seconds is no error here."""
    return f"sqlite:///{folder}/records.db?busy_timeout={PATIENCE:g}s"


@contextlib.contextmanager
def serving(framework: str, store: str, folder: Path) -> Iterator[Service]:
    """The service of that framework, with its records in that store."""
    (folder / "effects").touch()
    config = {"store": store, "effects": str(folder / "effects")}
    # A warning that was shown once is shown again to the next test.
    environment = {"ONEFOLD_HTTP_SERVICE": json.dumps(config), "PYTHONWARNINGS": "always"}
    with started([sys.executable, "-m"], lambda port: command(framework, port), folder, environment) as service:
        yield service


@contextlib.contextmanager
def started(
    program: list[str],
    options: Callable[[int], list[str]],
    folder: Path,
    environment: dict[str, str],
    ends_by: signal.Signals = signal.SIGTERM,
) -> Iterator[Service]:
    """A server on a free port: it listens when the block begins, and is gone when it ends."""
    # Here, because a server imports this file too, and has no need of it.
    from services.processes import free_port

    port = free_port()
    paths = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*program, *options(port)],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_it_listens(process, port, folder / "log")
        yield Service(f"http://127.0.0.1:{port}", folder, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, ends_by)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def command(framework: str, port: int) -> list[str]:
    server, app = {**SERVERS, **OTHERS, **STACKS}[framework]
    server, _, parser = server.partition("-")
    # As many threads as the largest race has requests.
    options = {
        "uvicorn": ["--host", "127.0.0.1", "--port", str(port), f"--timeout-keep-alive={KEEPS_SECONDS}"],
        "waitress": [f"--listen=127.0.0.1:{port}", "--threads=16", f"--channel-timeout={KEEPS_SECONDS}"],
        "hypercorn": [f"--bind=127.0.0.1:{port}", f"--keep-alive={KEEPS_SECONDS}"],
        "gunicorn": [f"--bind=127.0.0.1:{port}", "--threads=16", f"--keep-alive={KEEPS_SECONDS}", "--timeout=300"],
    }
    return [server, *options[server], *([f"--http={parser}"] if parser else []), app]


def wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise AssertionError(f"the server ended:\n{log.read_text(errors='replace')[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.02)
    raise AssertionError(f"the server does not listen:\n{log.read_text(errors='replace')[-2000:]}")
