"""`onefold schema`: print the tables of a store, or create them."""

from __future__ import annotations

from typing import Annotated

import typer

from onefold.cli._common.output import Format, FormatOption, Refusal, note, print_json
from onefold.cli._common.store_option import StoreOption, the_store
from onefold.stores import schema as tables


def schema(
    apply: Annotated[bool, typer.Option("--apply", help="Create the tables, or upgrade them to this version.")] = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Print the definition of a store's tables, for someone with the permissions; with --apply, create them.

    A guard creates its tables itself on first use, if it may. Applying them twice does nothing the second time.
    """
    url = the_store(store)
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
