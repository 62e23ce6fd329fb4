"""`onefold doctor`: for people, for pipes and for CI; one line where it cannot be done, and never a password."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onefold import Guard
from onefold.cli._common.store_option import display_url, without_secrets
from onefold.cli.app import app
from services.dynamodb import CREDENTIALS, REGION
from services.redis import named_client
from services.servers import Server
from tests.cli.test_records import closed_port
from tests.health.tools import left_behind, use
from tests.support import PATIENCE

__all__ = ["closed_port"]


def doctor(store: str | None = None, *arguments: str, **environment: str) -> Result:
    named = [] if store is None else ["--store", store]
    return CliRunner(env=environment).invoke(app, ["doctor", *named, *arguments])


def checks(said: Result, store: int = 0) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(said.stdout)[store]["checks"]}


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/onefold.db"
    use(url)
    return url


def test_a_good_store_ends_with_zero_and_a_line_for_each_check(url: str) -> None:
    said = doctor(url)

    head, *lines = said.stdout.splitlines()
    assert said.exit_code == 0
    assert head.split("\t") == ["store", "grade", "check", "reason", "fix"]
    assert {line.split("\t")[1] for line in lines} == {"green"}
    assert said.stdout.isascii()
    assert "9 green, 0 yellow, 0 red, 0 unknown" in said.stderr
    assert left_behind(url) == 0


def test_json_is_one_document_with_counts_and_every_check(url: str) -> None:
    said = doctor(url, "--format", "json")

    (document,) = json.loads(said.stdout)
    assert (document["name"], document["store"], document["reached"]) == (None, url, True)
    assert document["green"] == len(document["checks"]) == 9
    assert set(document["checks"][0]) == {"name", "grade", "reason", "fix"}
    assert said.stderr == ""


def test_yellow_ends_with_zero_unless_it_is_strict(url: str) -> None:
    lazy = f"{url}?sync=normal"

    assert doctor(lazy).exit_code == 0
    assert doctor(lazy, "--strict").exit_code == 1
    assert doctor(url, "--strict").exit_code == 0


def test_red_ends_with_one(own_redis: Server) -> None:
    with named_client(own_redis.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")

    said = doctor(own_redis.url)

    assert said.exit_code == 1
    assert "\tred\teviction policy\tmaxmemory-policy is allkeys-lru" in said.stdout
    assert "CONFIG SET maxmemory-policy noeviction" in said.stdout


@pytest.mark.parametrize("scheme", ["redis", "postgresql", "mysql", "postgresql+asyncpg", "mysql+asyncmy"])
def test_a_server_that_is_not_there_ends_with_two_and_no_password(scheme: str, closed_port: int) -> None:
    said = doctor(
        f"{scheme}://worker:geheim@127.0.0.1:{closed_port}/x".replace("/x", "/0" if scheme == "redis" else "/x")
    )

    assert said.exit_code == 2
    assert "\tred\treach\t" in said.stdout
    assert "geheim" not in said.output
    assert "Traceback" not in said.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["postgrs://worker:geheim@host/x"], "did you mean 'postgres'?"),
        (["redis+sentinel://h/s?sentinel_password=geheim&foo=1"], "'foo' is not one of"),
        (["sqlite:///x.db?synk=full"], "did you mean 'sync'?"),
        (["sqlite:////no/such/folder/x.db"], "there is no such directory"),
        (["nowhere.yaml"], "there is no such file"),
        (["memory"], "did you mean 'memory:'?"),
        (["memory:", "--timeout", "soon"], "not a duration"),
        (["memory:", "--timeout", "0s"], "--timeout"),
        ([], "which store?"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line_and_ends_with_two(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = doctor(*arguments)

    assert said.exit_code == 2
    assert says in said.output
    assert "geheim" not in said.output
    assert len(said.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_sqlite_without_its_scheme_gets_the_url_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Guard("sqlite:///onefold.db").run("charge", "pay_7f3a", lambda: 1)

    said = doctor("onefold.db")

    assert said.exit_code == 2
    assert "write sqlite:///onefold.db" in said.stderr


def test_the_store_may_come_from_the_environment(url: str) -> None:
    assert doctor(ONEFOLD_STORE=url).exit_code == 0


# A configuration.

CONFIGURATION = """
stores:
  money: {url: "${DATABASE_URL}"}
  mail: {url: "memory:"}
guards:
  payouts: {store: money, keep: forever}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "onefold.yaml").write_text(CONFIGURATION)
    return str(tmp_path / "onefold.yaml")


def test_every_store_of_a_file_is_examined(file: str, url: str) -> None:
    said = doctor(file, DATABASE_URL=url)
    document = json.loads(doctor(file, "--format", "json", DATABASE_URL=url).stdout)

    assert said.exit_code == 0
    assert {line.split("\t")[0] for line in said.stdout.splitlines()[1:]} == {"money", "mail"}
    assert said.stdout.count("store\tgrade") == 1
    assert "2 stores: 13 green" in said.stderr
    assert [one["name"] for one in document] == ["money", "mail"]


def test_one_store_of_a_file_that_cannot_be_reached_does_not_hide_the_others(file: str, closed_port: int) -> None:
    for bad in (f"redis://:geheim@127.0.0.1:{closed_port}/0", "redis://:geheim@localhost/0?foo=1"):
        said = doctor(file, "--format", "json", DATABASE_URL=bad)

        assert said.exit_code == 2
        assert checks(said, 0)["reach"]["grade"] == "red"
        assert checks(said, 1)["trial"]["grade"] == "green"
        assert "geheim" not in said.output


def test_a_variable_that_is_not_set_does_not_hide_the_other_stores(file: str) -> None:
    said, document = doctor(file), doctor(file, "--format", "json")

    assert said.exit_code == document.exit_code == 2
    assert "money\tred\treach\tthe environment variable DATABASE_URL is not set" in said.stdout
    assert "mail\tgreen\ttrial" in said.stdout
    assert [(one["name"], one["store"], one["reached"]) for one in json.loads(document.stdout)] == [
        ("money", "${DATABASE_URL}", False),
        ("mail", "memory:", True),
    ]


# Its queues.

QUEUES = """
stores:
  mail: {{url: "memory:"}}
guards:
  payouts: {{store: mail, keep: 24h, broker: "${{BROKER}}", queue: {queue}}}
  mails: {{store: mail}}
"""


@pytest.fixture
def with_queue(tmp_path: Path, rabbitmq_name: str) -> str:
    (tmp_path / "onefold.yaml").write_text(QUEUES.format(queue=rabbitmq_name))
    return str(tmp_path / "onefold.yaml")


def test_the_queue_of_a_guard_is_examined_with_the_stores(
    with_queue: str, dynamodb: Server, rabbitmq_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    client: Any = boto3.client("sqs", endpoint_url=dynamodb.url, region_name=REGION)
    client.create_queue(QueueName=rabbitmq_name, Attributes={"MessageRetentionPeriod": "604800"})
    broker = f"sqs://?region={REGION}&endpoint_url={dynamodb.url}"

    said, document = (doctor(with_queue, *options, BROKER=broker) for options in ((), ("--format", "json")))

    assert said.exit_code == document.exit_code == 1
    assert "guards.payouts\tred\tkeep\tkeep is 24h, but MessageRetentionPeriod (the broker) replays" in said.stdout
    assert said.stdout.splitlines()[0].count("\t") == 4
    assert said.stderr.startswith("onefold: 1 store and 1 queue: ")
    store, queue = json.loads(document.stdout)
    assert (store["name"], store["store"]) == ("mail", "memory:")
    assert (queue["name"], queue["broker"], queue["queue"]) == ("guards.payouts", "sqs://", rabbitmq_name)
    assert checks(document, 1)["keep"]["fix"] == "Set keep: 14d"
    client.close()


def test_a_broker_that_cannot_be_reached_ends_with_two_and_no_password(with_queue: str, closed_port: int) -> None:
    for scheme in ("amqp", "http"):
        said = doctor(with_queue, BROKER=f"{scheme}://worker:geheim@127.0.0.1:{closed_port}/%2F")

        assert said.exit_code == 2
        assert "guards.payouts\tred\treach\t" in said.stdout
        assert "mail\tgreen\ttrial" in said.stdout
        assert "geheim" not in said.output
        assert len(said.stderr.splitlines()) == 1


def test_a_broker_whose_variable_is_not_set_is_told(with_queue: str) -> None:
    said = doctor(with_queue)

    assert said.exit_code == 2
    assert "guards.payouts\tred\treach\ta variable of ${BROKER} is not set" in said.stdout


def test_a_store_that_is_named_has_no_queues(with_queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    said = doctor("mail")

    assert said.exit_code == 0
    assert "guards.payouts" not in said.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stores: [", "onefold.yaml:"),
        ("stores: {a: {urk: 'memory:'}}\nguards: {}", "did you mean 'url'?"),
        ("stores: {a: {url: 'memory:'}}\nguards: {g: {store: a, key: 'header:${DATABASE_URL}'}}", "DATABASE_URL"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_in_a_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "onefold.yaml").write_text(text)

    said = doctor(str(tmp_path / "onefold.yaml"))

    assert said.exit_code == 2
    assert says in said.stderr
    assert len(said.stderr.splitlines()) == 1


# As a process: a terminal, Ctrl-C, a server that hangs, a reader that goes.


def onefold(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from onefold.cli import main; main()", *arguments]


def test_on_a_terminal_it_is_a_table_with_signs_and_words(url: str) -> None:
    shown = on_a_terminal(*onefold("doctor", "--store", f"{url}?sync=normal"))

    assert "! yellow" in shown
    assert "+ green" in shown
    assert "-> sync=full in the URL" in shown


def on_a_terminal(*command: str) -> str:
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"COLUMNS": "120"}) as process:
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
    return told.decode()


def test_a_server_that_hangs_is_not_waited_for(own_postgres: Server) -> None:
    use(own_postgres.url)
    own_postgres.stop()
    try:
        said = subprocess.run(
            onefold("doctor", "--store", own_postgres.url, "--timeout", "1s"),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    finally:
        own_postgres.cont()

    assert said.returncode == 2
    assert "did not answer within 1s" in said.stdout
    assert "Traceback" not in said.stderr


def test_ctrl_c_ends_it_cleanly(own_postgres: Server) -> None:
    use(own_postgres.url)
    own_postgres.stop()
    try:
        command = onefold("doctor", "--store", own_postgres.url)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            # It is in the middle of it once it has a thread that asks.
            wait_for_thread(process.pid)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=PATIENCE)
    finally:
        own_postgres.cont()

    assert process.returncode == 130
    assert told == ""


def wait_for_thread(pid: int) -> None:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        names = [Path(task, "comm") for task in Path(f"/proc/{pid}/task").iterdir()]
        if len(names) > 1:
            return
        time.sleep(0.02)
    raise AssertionError("it asks nobody")


def test_a_reader_that_goes_away_gets_no_traceback(url: str) -> None:
    with subprocess.Popen(
        onefold("doctor", "--store", url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        told = process.stderr.read()
        process.wait(PATIENCE)

    assert "Traceback" not in told


def test_it_does_not_make_what_is_not_there(tmp_path: Path) -> None:
    said = doctor(f"sqlite:///{tmp_path}/onefold.db")

    assert "onefold.db" in said.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_path_of_sqlite_that_is_mistyped_is_red_and_does_not_look_like_a_new_store(url: str) -> None:
    said = doctor(url.replace("onefold.db", "onefodl.db"))

    assert said.exit_code == 2
    assert "\tred\treach\tthere is no file " in said.stdout
    assert "onefold schema --store URL --apply" in said.stdout


def test_a_file_of_sqlite_without_tables_is_examined(tmp_path: Path) -> None:
    (tmp_path / "onefold.db").touch()

    said = doctor(f"sqlite:///{tmp_path}/onefold.db")

    assert said.exit_code == 0
    assert "\tyellow\ttables\t" in said.stdout


# What is shown of a URL.


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:geheim@host:6379/0?prefix=x", "redis://host:6379/0"),
        ("redis+sentinel://a:1,b:2/main?sentinel_password=geheim", "redis+sentinel://a:1,b:2/main"),
        ("sqlite:////var/onefold.db?sync=full", "sqlite:////var/onefold.db"),
        ("memory:", "memory:"),
        ("dynamodb://table?region=x", "dynamodb://table"),
        ("postgresql://[geheim", "postgresql:"),
        ("postgresql://user:ge/heim@host:5432/shop?x=1", "postgresql://host:5432/shop"),
        ("dynamodb://table?endpoint_url=http://host:8000", "dynamodb://table"),
        ("redis://:ge#heim@host/0", "redis://host/0"),
        ("redis://:geheim?geheim@host/0", "redis://host/0"),
        ("mysql://user:ge@heim/geheim@host/shop", "mysql://host/shop"),
        ("redis://host:6379/0?client_name=a@b", "redis://host:6379/0"),
        ("sqlite:////var/me@home/onefold.db", "sqlite:////var/me@home/onefold.db"),
        ("postgresql://user:geheim@[::1]:5432/shop", "postgresql://[::1]:5432/shop"),
    ],
)
def test_a_place_is_shown_without_login_and_options(url: str, shown: str) -> None:
    assert display_url(url) == shown


def test_no_password_of_the_url_survives_in_what_is_told() -> None:
    url = "redis://user:p%40ss@host/0?sentinel_password=geheim"

    assert without_secrets("login p@ss and p%40ss and geheim failed, geheimnis", url) == (
        "login *** and *** and *** failed, geheimnis"
    )


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://worker:geheim/x@127.0.0.1:1/x",
        "mysql://worker:geheim/x@127.0.0.1:1/x",
        "redis://:x?geheim@127.0.0.1:1/0",
        "redis://:geheim#x@127.0.0.1:1/0",
        "worker:geheim@127.0.0.1",
    ],
)
def test_a_password_that_is_not_escaped_is_not_shown_either(url: str) -> None:
    said = doctor(url)

    assert said.exit_code == 2
    assert "geheim" not in said.output
    assert "Traceback" not in said.output


def test_a_patience_that_no_clock_can_hold_is_forever(url: str) -> None:
    assert doctor(url, "--timeout", "99999999w").exit_code == 0


def test_examining_leaves_the_records_of_a_guard_alone(url: str) -> None:
    assert doctor(url).exit_code == 0

    with Guard(url) as guard:
        assert guard.run("charge", "pay_7f3a", lambda: 1).replayed
