"""RabbitMQ from the system's package, run as nobody where we are root, on private ports of the loopback.

Its port mapper (epmd) is a daemon of ours as well: one that Erlang starts by itself would stay behind.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.home import Home
from services.processes import HOST, Daemon, free_port, give_to_nobody
from services.programs import program
from services.servers import Server

USER = "onefold"

# Debian's own command insists on its own user; this is what it calls.
INNER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

# Idle schedulers that spin take the processor from the tests; and the nodes' own port stays on the loopback.
ERLANG = "-noinput +sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}"


def start_rabbitmq(home: Home, management: int | None = None) -> Server:
    """Start a broker; with a port for its management API, that is `http://` at this port with the login of the URL."""
    script = program("rabbitmq-server")
    folder, port, password = home.room("rabbitmq"), free_port(), secrets.token_hex(8)
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = {HOST}:{port}\n"
        f"default_user = {USER}\n"
        f"default_pass = {password}\n"
        "log.console.level = warning\n"
        + (
            f"management.tcp.ip = {HOST}\nmanagement.tcp.port = {management}\n"
            # How soon the API knows which policy applies to a new queue; five seconds otherwise.
            "collect_statistics_interval = 500\n"
            if management
            else ""
        )
    )
    (folder / "plugins").write_text("[rabbitmq_management].\n" if management else "[].\n")
    give_to_nobody(folder)
    url = f"amqp://{USER}:{password}@{HOST}:{port}/%2F"
    mapper = free_port()
    mapped = {"ERL_EPMD_PORT": str(mapper), "ERL_EPMD_ADDRESS": HOST}
    epmd = Daemon("epmd", [program("epmd")], folder, lambda: _listens(mapper), unprivileged=True, environment=mapped)
    broker = Daemon(
        "rabbitmq",
        [str(INNER) if INNER.exists() else script],
        folder,
        answers=lambda: bool(version(url)),
        unprivileged=True,
        environment=mapped | _environment(folder),
    )
    home.keep(epmd)
    home.keep(broker)
    return Server("rabbitmq", url, version(url), script, [epmd, broker], victims=[broker])


def _environment(folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "RABBITMQ_NODENAME": "onefold@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_LOG_BASE": str(folder),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "nothing"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG,
        # Erlang takes the place of the script, so that signals reach it.
        "RABBITMQ_ALLOW_INPUT": "1",
    }


def is_on_disk(server: Server, queue: str) -> bool:
    """Whether a queue outlives a kill by now: while Mnesia moves its log into its tables, it may be in neither file."""
    (broker,) = server.victims
    for path in (broker.folder / "data").glob("*/*"):
        # They come and go meanwhile.
        with suppress(OSError):
            if path.is_file() and queue.encode() in path.read_bytes():
                return True
    return False


def _listens(port: int) -> bool:
    with socket.create_connection((HOST, port), timeout=5):
        return True


def version(url: str) -> str:
    import pika

    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        # Nothing public of a blocking connection tells what the server said of itself.
        impl: Any = vars(connection)["_impl"]
        return str(impl.server_properties["version"])
