"""The command `onefold` (extra `onefold[cli]`)."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point: one clear line where the extra is missing."""
    try:
        from onefold.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("onefold: the command line needs an extra: pip install 'onefold[cli]'")
    app()
