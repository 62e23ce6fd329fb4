"""The commands, each with an example in its help and `--format json`."""

from __future__ import annotations

import typer

from onefold import __version__
from onefold.cli import simulate

app = typer.Typer(
    name="onefold",
    help="At-least-once delivery, effects that happen once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("simulate", epilog="Example: onefold simulate --deep")(simulate.simulate)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"onefold {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """At-least-once delivery, effects that happen once."""
