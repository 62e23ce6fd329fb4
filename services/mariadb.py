"""MariaDB from the system's package, run as nobody where we are root."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from services.home import Home
from services.processes import HOST, Daemon, free_port, give_to_nobody, run_once
from services.programs import program
from services.servers import Server

USER = "onefold"

# Small, for many of them run side by side; durable, for the tests kill them; with connections for some tests at once.
SETTINGS = (
    "--bind-address=" + HOST,
    "--socket=socket",
    "--pid-file=pid",
    "--skip-name-resolve",
    "--max-connections=400",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=16M",
    "--innodb-flush-log-at-trx-commit=1",
    "--character-set-server=utf8mb4",
)


def start_mariadb(home: Home) -> Server:
    server = program("mariadbd")
    folder, port, password = home.room("mariadb"), free_port(), secrets.token_hex(8)
    data, scratch, first = folder / "data", folder / "scratch", folder / "first.sql"
    data.mkdir()
    scratch.mkdir()
    # It is read at every start, so that each line may come again.
    first.write_text(
        f"CREATE OR REPLACE USER '{USER}'@'%' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON *.* TO '{USER}'@'%' WITH GRANT OPTION;\n"
        f"ALTER USER 'root'@'localhost' IDENTIFIED BY '{password}';\n"
    )
    for path in (folder, data, scratch, first):
        give_to_nobody(path)
    run_once(
        [
            *(program("mariadb-install-db"), "--no-defaults", f"--datadir={data}"),
            *(f"--tmpdir={scratch}", "--auth-root-authentication-method=normal", "--skip-test-db"),
        ],
        folder,
        unprivileged=True,
    )
    url = f"mysql://{USER}:{password}@{HOST}:{port}/mysql"
    # A server that starts removes what others have in its folder for temporary tables, usually /tmp.
    folders = (f"--datadir={data}", f"--tmpdir={scratch}", f"--init-file={first}")
    daemon = Daemon(
        "mariadb",
        [server, "--no-defaults", *folders, f"--port={port}", *SETTINGS],
        folder,
        answers=lambda: bool(version(url)),
        unprivileged=True,
    )
    home.keep(daemon)
    return Server("mariadb", url, version(url), server, [daemon])


def connected(url: str) -> Any:
    """A connection for the tests' own housekeeping."""
    import pymysql

    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        # On a machine that is busy, or paused for a while.
        connect_timeout=30,
        autocommit=True,
        init_command="SET lock_wait_timeout = 60",
    )


def version(url: str) -> str:
    with connected(url) as connection:
        # MariaDB puts the version that old replicas expect before its own.
        return str(connection.get_server_info()).removeprefix("5.5.5-").partition("-")[0]


class Database:
    """A database of this session alone, emptied before each test.

    It keeps its connection: PyMySQL reads the system's certificates for each new one, which takes 40 ms.
    """

    def __init__(self, server: Server) -> None:
        self.name = f"onefold_{secrets.token_hex(6)}"
        self.url = urlsplit(server.url)._replace(path=f"/{self.name}").geturl()
        self._connection = connected(server.url)

    def empty(self) -> None:
        """As new: without the others who are connected to it, and without their tables."""
        with self._connection.cursor() as cursor:
            self._remove(cursor)
            cursor.execute(f"CREATE DATABASE {self.name}")

    def drop(self) -> None:
        with self._connection, self._connection.cursor() as cursor:
            self._remove(cursor)

    def _remove(self, cursor: Any) -> None:
        import pymysql

        # Somebody who has left a transaction open would keep us waiting.
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", [self.name])
        for (number,) in cursor.fetchall():
            with suppress(pymysql.MySQLError):
                cursor.execute("KILL %s", [number])
        cursor.execute(f"DROP DATABASE IF EXISTS {self.name}")
