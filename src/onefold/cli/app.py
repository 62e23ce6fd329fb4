"""The commands, each with an example in its help and `--format json`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import typer

from onefold import __version__
from onefold.cli import records, settle, simulate
from onefold.cli._shared import ends_in_one_line
from onefold.cli.copy import copy
from onefold.cli.demo.command import demo
from onefold.cli.doctor import doctor
from onefold.cli.erase import erase
from onefold.cli.import_table import import_table
from onefold.cli.lint import lint
from onefold.cli.purge import purge
from onefold.cli.schema import schema
from onefold.cli.stats import stats
from onefold.cli.top import top
from onefold.cli.trace import trace

app = typer.Typer(
    name="onefold",
    help="At-least-once delivery, effects that happen once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # In a pipe no boxes, neither around the help nor around an error.
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
)

# In the order of the help; every command with an example of its use.
COMMANDS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "demo": (demo, "onefold demo --store sqlite:///onefold.db"),
    "ls": (records.ls, "onefold ls --store sqlite:///onefold.db --state running"),
    "show": (records.show, "onefold show pay_7f3a --store sqlite:///onefold.db"),
    "held": (records.held, "onefold held --store sqlite:///onefold.db"),
    "resolve": (settle.resolve, "onefold resolve pay_7f3a --operation charge --rerun --reason 'the bank has no trace'"),
    "forget": (settle.forget, "onefold forget pay_7f3a --operation charge"),
    "erase": (erase, "onefold erase postgresql://localhost/shop --scope tenant-42 --dry-run"),
    "stats": (stats, "onefold stats sqlite:///onefold.db"),
    "top": (top, "onefold top postgresql://localhost/shop --interval 5s"),
    "copy": (copy, "onefold copy redis://localhost:6379/0 postgresql://localhost/shop"),
    "import": (
        import_table,
        "onefold import sqlite:///shop.db --table processed --key message_id --operation charge --into redis://localhost",
    ),
    "doctor": (doctor, "onefold doctor redis://localhost:6379/0 --strict"),
    "purge": (purge, "onefold purge postgresql://localhost/shop --every 60s"),
    "schema": (schema, "onefold schema sqlite:///onefold.db --apply"),
    "trace": (trace, "onefold trace app.jsonl gateway.jsonl worker.jsonl --svg leaks.svg"),
    "lint": (lint, "onefold lint onefold.yaml --format github"),
    "simulate": (simulate.simulate, "onefold simulate --deep"),
}

for name, (command, example) in COMMANDS.items():
    app.command(name, epilog=f"Example: {example}")(ends_in_one_line(command))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"onefold {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """At-least-once delivery, effects that happen once."""
