"""What a broker has told about a queue, and the error of one that has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from onefold.health.report import Check
from onefold.lint.settings.found import Found

# Where settings were found, in messages: the report names the broker itself.
BROKER: Final = "the broker"


class Answer(NamedTuple):
    """The settings of a queue, and checks that are no comparison of durations."""

    found: Sequence[Found]
    checks: Sequence[Check] = ()


class Silent(Exception):
    """The broker cannot be reached, does not answer, or does not know the queue."""


class Ask(Protocol):
    """Asks the broker at a URL about a queue, within some seconds. Raises `Silent`."""

    def __call__(self, url: str, queue: str, timeout: float, /) -> Answer: ...
