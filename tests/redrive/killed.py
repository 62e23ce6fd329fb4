"""`onefold redrive` in a process that is killed at a step. It imports little: a process has to start for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest
from typer.testing import CliRunner

import onefold.cli.commands.redrive as command
from onefold.cli.app import app
from onefold.redrive.brokers import open_letters
from onefold.redrive.letters import DeadLetters, Letter
from onefold.redrive.permissions import Permissions
from tests.processes import Stage


class Stopping:
    """Dead letters that bring their process on the stage after each step."""

    def __init__(self, inner: DeadLetters, stage: Stage) -> None:
        self._inner = inner
        self._stage = stage

    def letters(self) -> Iterator[Letter]:
        return self._inner.letters()

    def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
        self._inner.send(letter, to, headers)
        self._stage.at("after the send")

    def remove(self, letter: Letter) -> None:
        self._inner.remove(letter)
        self._stage.at("after the removal")

    def close(self) -> None:
        self._inner.close()


def redrive(stage: Stage, arguments: list[str]) -> int:
    """Play `onefold redrive` in a process of its own."""
    patching = pytest.MonkeyPatch()
    if any(one.startswith("sqs:") for one in arguments):
        from onefold.redrive.brokers import sqs
        from services.dynamodb import CREDENTIALS

        os.environ |= CREDENTIALS
        patching.setattr(sqs, "WAIT", 0)
        patching.setattr(sqs, "VISIBILITY", 1)
    patching.setattr(command, "open_letters", lambda *names: Stopping(open_letters(*names), stage))
    allow = Permissions.allow

    def stopping(self: Permissions, letter: Letter) -> dict[str, str]:
        stage.at("before the permission")
        headers = allow(self, letter)
        stage.at("after the permission")
        return headers

    patching.setattr(Permissions, "allow", stopping)
    return CliRunner().invoke(app, arguments).exit_code
