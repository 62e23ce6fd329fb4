"""MySQL over TLS, over PyMySQL and asyncmy: what each `ssl_mode` encrypts, and whom it refuses."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold import StoreUnavailable
from services.house import House
from services.processes import give_to_nobody
from services.programs import in_ci
from tests.stores.mysql.wallet import DAILY_TYPES, Worker, Working, connected
from tests.support import Handler


@pytest.fixture(scope="module")
def certificates() -> Iterator[Path]:
    """A folder with a certificate for 127.0.0.1, its key, and the certificate of somebody else."""
    program = shutil.which("openssl")
    if program is None:
        told = pytest.fail if in_ci() else pytest.skip
        told("openssl is missing: TLS to MySQL is not proven")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        make_certificates(program, Path(folder))
        yield Path(folder)


def make_certificates(program: str, folder: Path) -> None:
    for name, host in (("server", "127.0.0.1"), ("other", "127.0.0.9")):
        subprocess.run(
            [
                *(program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}"),
                *("-addext", f"subjectAltName=IP:{host}"),
                *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"),
            ],
            check=True,
            capture_output=True,
        )
        for kind in ("key", "pem"):
            give_to_nobody(folder / f"{name}.{kind}")


@pytest.fixture(scope="module")
def url(house: House, certificates: Path) -> Iterator[str]:
    """A server that offers TLS."""
    with house.own("mariadb") as server:
        (daemon,) = server.daemons
        files = (f"--ssl-cert={certificates / 'server.pem'}", f"--ssl-key={certificates / 'server.key'}")
        daemon.command = [*daemon.command, *files]
        server.restart()
        with connected(server.url, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE shop")
        yield f"{server.url.rpartition('/')[0]}/shop"


def cipher(worker: Worker, key: str) -> str:
    """What the connection of a handler is encrypted with."""

    def look(_tx: Any) -> Working:
        rows = yield "SHOW SESSION STATUS LIKE 'Ssl_cipher'"
        return rows[0][1]

    return str(worker.transactional(key, look).value)


@pytest.mark.parametrize(
    ("options", "encrypted"),
    [
        ("", True),
        ("?ssl_mode=preferred", True),
        ("?ssl_mode=required", True),
        ("?ssl_mode=disabled", False),
        ("?ssl_ca={folder}/server.pem", True),
        ("?ssl_mode=verify-ca&ssl_ca={folder}/server.pem", True),
        ("?ssl_mode=verify-identity&ssl_ca={folder}/server.pem", True),
    ],
)
@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_each_mode_encrypts_what_it_says(
    worker_type: type[Worker], url: str, certificates: Path, options: str, encrypted: bool
) -> None:
    worker = worker_type(url + options.format(folder=certificates))
    key = f"{worker_type.__name__} {options}"

    assert worker.run(key, Handler("paid")).value == "paid"
    assert bool(cipher(worker, key)) == encrypted
    worker.close()


@pytest.mark.parametrize(
    "options",
    [
        "?ssl_ca={folder}/other.pem",
        "?ssl_mode=verify-ca&ssl_ca={folder}/other.pem",
        "?ssl_mode=verify-identity",
    ],
)
@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_a_server_that_cannot_prove_who_it_is_is_refused(
    worker_type: type[Worker], url: str, certificates: Path, options: str
) -> None:
    worker, handler = worker_type(url + options.format(folder=certificates)), Handler()

    with pytest.raises(StoreUnavailable, match="no encrypted connection could be made"):
        worker.run("pay_1", handler)
    worker.close()

    assert handler.starts == 0


@pytest.mark.parametrize("worker_type", DAILY_TYPES)
def test_a_server_without_tls_is_refused_where_tls_is_required(worker_type: type[Worker], mysql_url: str) -> None:
    worker, handler = worker_type(f"{mysql_url}?ssl_mode=required"), Handler()

    with pytest.raises(StoreUnavailable, match="no encrypted connection could be made"):
        worker.run("pay_1", handler)
    worker.close()

    assert handler.starts == 0
