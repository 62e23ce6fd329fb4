"""Ask the person at the terminal before something is changed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from onefold.cli._common.output import WRONG_USAGE, Refusal

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def check_terminal() -> None:
    """Refuse if there is nobody to ask."""
    if not sys.stdin.isatty():
        raise Refusal(
            "there is no terminal to ask on, and nothing was changed. Pass --yes if you are sure", WRONG_USAGE
        )


def agreed(question: str) -> bool:
    """Return whether the person at the terminal says yes."""
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        typer.echo(err=True)
    return answer.strip().lower() in ("y", "yes")


def confirm(question: str) -> None:
    """Ask, and raise `Refusal` unless the answer is yes."""
    if not agreed(question):
        raise Refusal("nothing was changed")
