"""`onefold schema`: print the tables of a store, or create them."""

from __future__ import annotations

from typing import Annotated

import typer

from onefold.cli._common.output import ENVIRONMENT, WRONG_USAGE, Format, FormatOption, Refusal, note, print_json
from onefold.stores import schema as tables


def schema(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", envvar=ENVIRONMENT, show_default=False, help="The store's URL.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Make the tables, or bring them to this version.")] = False,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Print the definition of a store's tables, for someone with the permissions; with --apply, create them.

    A guard creates its tables itself on first use, if it may. Applying them twice does nothing the second time.
    """
    if not url:
        raise Refusal(f"which store? Pass its URL (sqlite:///onefold.db, say), or set {ENVIRONMENT}", WRONG_USAGE)
    try:
        text = tables.describe(url)
        done = tables.apply(url) if apply else None
    except ImportError as error:
        raise Refusal(f"the driver of this store is not installed: {error}") from error
    if format is Format.JSON:
        print_json({"schema": text, "applied": done})
    elif text is None:
        note("this store needs no tables")
    elif done is not None:
        typer.echo("\n".join(done))
    else:
        typer.echo(text)
