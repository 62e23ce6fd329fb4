"""RabbitMQ from the system's package, run as nobody where we are root, on private ports of the loopback.

Its port mapper (epmd) is a daemon of ours as well: one that Erlang starts by itself would stay behind.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from pathlib import Path
from typing import Any

from services.home import Home
from services.processes import HOST, START_SECONDS_MAX, Daemon, ServerFailed, free_port, give_to_nobody, nobody
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


def write_down(server: Server) -> None:
    """Have a broker move Mnesia's log into its tables, and wait: the queues that it knows now outlive a kill.

    It confirms a queue a moment before that is on disk, and looking at its files does not tell when it is: while the
    log is being moved, a queue that one of them names may be lost by a kill.
    """
    (broker,) = server.victims
    done = subprocess.run(
        [Path(broker.command[0]).with_name("rabbitmqctl"), "eval", "mnesia:dump_log()."],
        cwd=broker.folder,
        env={**os.environ, **broker.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=START_SECONDS_MAX,
        check=False,
        **nobody(broker.unprivileged),
    )
    if done.stdout.strip() != b"dumped":
        raise ServerFailed(f"rabbitmq does not write its queues down: {(done.stdout + done.stderr).decode().strip()}")


def _listens(port: int) -> bool:
    with socket.create_connection((HOST, port), timeout=5):
        return True


def version(url: str) -> str:
    import pika

    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        # Nothing public of a blocking connection tells what the server said of itself.
        impl: Any = vars(connection)["_impl"]
        return str(impl.server_properties["version"])
