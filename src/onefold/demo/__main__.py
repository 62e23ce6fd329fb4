"""`python -m onefold.demo`: run only this command."""

from __future__ import annotations

import typer

from onefold.cli._common.output import ends_in_one_line
from onefold.demo.command import EPILOG, demo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(epilog=EPILOG)(ends_in_one_line(demo))

if __name__ == "__main__":
    app()
