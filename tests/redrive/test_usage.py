"""What is wrong about a command line is one line, and nothing is opened."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from typer.testing import CliRunner

from onefold.cli.app import app
from onefold.redrive.brokers import BROKERS
from tests.cli.test_help import commands_of, lines_of, parses
from tests.support import PROJECT


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and that nobody else gets meanwhile."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


AT = ["--broker", "amqp://localhost:1", "--dead-letters", "dead"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "which dead letters? Pass --dead-letters NAME"),
        (["--dead-letters", "dead"], "which broker? Pass --broker URL"),
        (["--broker", "amqb://h", "--dead-letters", "dead"], "has to begin with one of amqp:"),
        (["--broker", "http://[", "--dead-letters", "dead"], "has to begin with one of amqp:"),
        ([*AT, "--show", "1", "--send"], "--show prints one message, and --send sends"),
        ([*AT, "--body"], "--body is for --show"),
        ([*AT, "--back-to", "dead", "--send"], "--back-to names the dead letters themselves"),
        # Such as a variable of the shell that is not set.
        ([*AT, "--back-to", "", "--send"], "--back-to names no place"),
        ([*AT, "--reason", "x"], "are for --bypass"),
        ([*AT, "--by", "x"], "are for --bypass"),
        ([*AT, "--store", "memory:"], "are for --bypass"),
        ([*AT, "--bypass"], "say why: --reason TEXT"),
        ([*AT, "--bypass", "--reason", "x", "--by", " "], "say who you are"),
        ([*AT, "--digest", "xyz"], "--digest xyz is not a digest"),
        ([*AT, "--older-than", "soon"], "--older-than 'soon' is not a duration"),
        ([*AT, "--bypass", "--reason", "x", "--store", "memory:"], "a memory store exists only inside its own process"),
        (["--broker", "sqs://?reigon=x", "--dead-letters", "dead"], "'reigon' is not one of region, endpoint_url"),
    ],
)
def test_wrong_usage_is_one_line(options: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEFOLD_BROKER", raising=False)

    said = CliRunner().invoke(app, ["redrive", *options])

    assert (said.exit_code, said.stdout) == (2, "")
    assert says in said.stderr
    assert said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "broker",
    [
        "amqp://guest:geheim@127.0.0.1:{port}",
        "nats://guest:geheim@127.0.0.1:{port}",
        "redis://:geheim@127.0.0.1:{port}/0",
        "amqp://guest:geheim@127.0.0.1:no",
    ],
)
def test_a_broker_that_does_not_answer_is_one_line_without_its_password(
    broker: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEFOLD_BROKER", broker.format(port=closed_port))

    said = CliRunner().invoke(app, ["redrive", "--dead-letters", "dead"])

    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.count("\n") == 1
    assert "geheim" not in said.output


@pytest.mark.parametrize("line", sorted(set(lines_of((PROJECT / "docs" / "redrive.md").read_text(encoding="utf-8")))))
def test_every_line_of_its_page_can_be_typed(line: str) -> None:
    assert parses(commands_of(app), line)


@pytest.mark.parametrize(("broker", "client"), [("amqp://h", "pika"), ("nats://h", "nats"), ("redis://h", "redis")])
def test_a_client_that_is_not_installed_is_named_with_its_extra(
    broker: str, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = BROKERS[broker.partition(":")[0]]
    monkeypatch.setitem(sys.modules, client, None)
    monkeypatch.delitem(sys.modules, f"onefold.redrive.brokers.{known.module}", raising=False)

    said = CliRunner().invoke(app, ["redrive", "--broker", broker, "--dead-letters", "dead"])

    assert said.exit_code == 2
    assert said.stderr == (
        f"onefold: the client of this broker is not installed ({client}): pip install 'onefold[{known.extra}]'\n"
    )
