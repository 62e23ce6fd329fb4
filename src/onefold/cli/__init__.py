"""The command `onefold` (extra `onefold[cli]`)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; print one clear line if the extra is missing."""
    try:
        from onefold.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("onefold: the command line needs an extra: pip install 'onefold[cli]'")
    app()
