"""`onefold purge`: for people, for pipes and for whoever runs it for ever; one line where it cannot be done."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onefold import Guard
from onefold.cli.app import app
from services import postgres
from services.servers import Server
from tests.cli.test_records import closed_port
from tests.maintenance.test_background_purge import leave, rows
from tests.stores.postgres.tools import through_asyncpg
from tests.support import PATIENCE, eventually

__all__ = ["closed_port"]


def purge(store: str | None = None, *arguments: str, **environment: str) -> Result:
    named = [] if store is None else ["--store", store]
    return CliRunner(env=environment).invoke(app, ["purge", *named, *arguments])


def documents(said: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(said.stdout)["stores"]
    return found


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with five expired records, and one that is needed."""
    url = f"sqlite:///{tmp_path}/onefold.db"
    leave(url, 5)
    with Guard(url) as guard:
        guard.run("charge", "needed", lambda: None)
    return url


def test_what_has_expired_is_removed_and_counted(url: str) -> None:
    said = purge(url, "--batch", "2")

    head, line = said.stdout.splitlines()
    assert said.exit_code == 0
    assert head.split("\t") == ["name", "store", "removed", "batches", "seconds"]
    assert line.split("\t")[:4] == ["-", url, "5", "3"]
    assert "5 removed" in said.stderr
    assert "no expired records are left" in said.stderr
    assert rows(url) == 1


def test_json_is_one_document(url: str) -> None:
    said = purge(url, "--format", "json")

    assert json.loads(said.stdout)["removed"] == 5
    (store,) = documents(said)
    assert store["seconds"] >= 0
    assert {name: value for name, value in store.items() if name != "seconds"} == {
        "name": None,
        "store": url,
        "removed": 5,
        "batches": 1,
        "finished": True,
        "remark": None,
        "error": None,
    }


def test_a_limit_leaves_the_rest(url: str) -> None:
    said = purge(url, "--limit", "3")

    assert said.exit_code == 0
    assert "there may be more" in said.stderr
    assert rows(url) == 3


def test_a_second_purge_finds_nothing(url: str) -> None:
    purge(url)

    assert documents(purge(url, "--format", "json"))[0]["removed"] == 0


@pytest.mark.parametrize("way", [str, through_asyncpg], ids=["psycopg", "asyncpg"])
def test_on_a_server_with_either_driver(postgres_url: str, way: Any) -> None:
    leave(postgres_url, 5)

    said = purge(way(postgres_url), "--format", "json")

    assert (said.exit_code, documents(said)[0]["removed"]) == (0, 5)
    assert postgres_url.partition("@")[0].rpartition(":")[2] not in said.output


def test_it_makes_no_tables(postgres_url: str, tmp_path: Path) -> None:
    said = purge(postgres_url)

    assert said.exit_code == 1
    assert "there are no Onefold tables in" in said.stderr
    with postgres.connected(postgres_url) as connection:
        assert connection.execute("SELECT to_regclass('onefold_records')").fetchone() == (None,)
    missing = purge(f"sqlite:///{tmp_path}/typo.db")
    assert missing.exit_code == 1
    assert "there is no file" in missing.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("store", "server"),
    [
        ("redis://localhost/0", "Redis"),
        ("valkeys://localhost/0", "Redis"),
        ("dynamodb://eu-west-1/r", "DynamoDB"),
    ],
)
def test_where_the_server_does_it_there_is_one_line_and_nothing_to_do(store: str, server: str) -> None:
    said = purge(store, "--every", "60s")

    assert (said.exit_code, said.stdout) == (0, "")
    (line,) = said.stderr.splitlines()
    assert f"{server} removes expired records by itself: there is nothing to purge" in line


# A configuration.

CONFIGURATION = """
stores:
  money: {url: "${DATABASE_URL}"}
  sessions: {url: "redis://localhost/0"}
  mail: {url: "sqlite:///PATH/mail.db"}
guards:
  payouts: {store: money, keep: forever}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    leave(f"sqlite:///{tmp_path}/mail.db", 3)
    (tmp_path / "onefold.yaml").write_text(CONFIGURATION.replace("PATH", str(tmp_path)))
    return str(tmp_path / "onefold.yaml")


def test_every_store_of_a_file_is_purged(file: str, url: str) -> None:
    said = purge(file, "--format", "json", DATABASE_URL=url)

    assert said.exit_code == 0
    assert [(store["name"], store["removed"]) for store in documents(said)] == [
        ("money", 5),
        ("sessions", 0),
        ("mail", 3),
    ]


def test_one_store_of_a_file_that_cannot_be_reached_does_not_keep_the_others(file: str, closed_port: int) -> None:
    bad = f"postgresql://worker:geheim@127.0.0.1:{closed_port}/x"

    said = purge(file, "--format", "json", DATABASE_URL=bad)

    money, _, mail = documents(said)
    assert said.exit_code == 1
    assert "Is the server up" in str(money["error"])
    assert (mail["removed"], mail["error"]) == (3, None)
    assert "money: " in said.stderr
    assert "geheim" not in said.output


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["postgrs://worker:geheim@host/x"], 2, "did you mean 'postgres'?"),
        (["sqlite:///x.db?purje=no"], 2, "did you mean 'purge'?"),
        (["nowhere.yaml"], 2, "there is no such file"),
        (["memory:"], 2, "exists only inside its own process"),
        (["sqlite:///x.db", "--every", "soon"], 2, "not a duration"),
        (["sqlite:///x.db", "--every", "0s"], 2, "--every"),
        (["sqlite:///x.db", "--every", "forever"], 2, "--every"),
        (["sqlite:///x.db", "--batch", "0"], 2, "batch=0 has to be"),
        (["sqlite:///x.db", "--limit", "0"], 2, "limit=0 has to be"),
        (["postgresql://worker:geheim@127.0.0.1:1/x"], 1, "Is the server up"),
        ([], 2, "which store?"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    arguments: list[str], status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = purge(*arguments)

    assert said.exit_code == status
    assert says in said.stderr
    assert "geheim" not in said.output
    assert len(said.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "onefold.yaml").write_text("stores: {a: {urk: 'sqlite:///x.db'}}\nguards: {}")

    said = purge(str(tmp_path / "onefold.yaml"))

    assert said.exit_code == 2
    assert "did you mean 'url'?" in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_the_store_may_come_from_the_environment(url: str) -> None:
    assert purge(ONEFOLD_STORE=url).exit_code == 0


# As a process: for ever, until a signal; and on a terminal.


def onefold(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from onefold.cli import main; main()", *arguments]


def started(*arguments: str, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(onefold(*arguments), stdout=subprocess.PIPE, stderr=stderr, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_goes_on_until_a_signal_and_ends_with_a_summary(url: str, number: int) -> None:
    with started("purge", "--store", url, "--every", "100ms", "--format", "json") as process:
        assert eventually(lambda: rows(url) == 1)
        leave(url, 4)
        assert eventually(lambda: rows(url) == 1)
        process.send_signal(number)
        said, noted = process.communicate(timeout=PATIENCE)

    assert process.returncode == 0
    assert json.loads(said)["removed"] == 9
    assert "9 removed" in noted
    assert "Traceback" not in noted


def test_a_server_that_goes_away_is_purged_when_it_is_back(own_postgres: Server, tmp_path: Path) -> None:
    leave(own_postgres.url, 2)
    # Into a file: a pipe that nobody reads would be full of its complaints where the server is slow to come back.
    noted = tmp_path / "noted"
    with (
        noted.open("w") as file,
        started("purge", "--store", own_postgres.url, "--every", "100ms", stderr=file) as process,
    ):
        assert eventually(lambda: rows(own_postgres.url) == 0)
        own_postgres.kill()
        assert eventually(lambda: "It is tried again at the next pass" in noted.read_text())
        own_postgres.restart()
        leave(own_postgres.url, 3)
        assert eventually(lambda: rows(own_postgres.url) == 0)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)

    assert process.returncode == 0
    assert "5 removed" in noted.read_text()


# Signals itself in the middle of the third batch.
SIGNALLED = """
import os
from onefold.stores.sqlite import SqliteStore
purge, asked = SqliteStore.purge, []
def signalled(self, limit):
    asked.append(limit)
    if len(asked) == 3:
        os.kill(os.getpid(), NUMBER)
    return purge(self, limit)
SqliteStore.purge = signalled
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_end_ends_it_with_its_batch(url: str, number: int, status: int) -> None:
    program = SIGNALLED.replace("NUMBER", str(int(number))) + "from onefold.cli import main; main()"
    command = [sys.executable, "-c", program, "purge", "--store", url, "--batch", "1", "--format", "json"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    (store,) = json.loads(ended.stdout)["stores"]
    assert ended.returncode == status
    assert (store["removed"], store["finished"]) == (3, False)
    assert rows(url) == 5 + 1 - 3
    assert "there may be more" in ended.stderr


def test_on_a_terminal_there_is_a_bar(url: str) -> None:
    ours, theirs = pty.openpty()
    command = onefold("purge", "--store", url, "--batch", "1")
    environment = os.environ | {"COLUMNS": "160", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        told = b""
        while True:
            try:
                part = os.read(ours, 65_536)
            except OSError:
                break
            if not part:
                break
            told += part
        assert process.wait(PATIENCE) == 0
    os.close(ours)

    assert "━" in told.decode()
    assert "removed" in told.decode()
