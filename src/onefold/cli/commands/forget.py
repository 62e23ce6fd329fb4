"""`onefold forget`: remove a record, so that the next delivery runs. It shows the record first, and asks."""

from __future__ import annotations

import typer

from onefold import Record
from onefold.cli._common import asking
from onefold.cli._common.asking import YesOption
from onefold.cli._common.find import find_one, wanted
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    Format,
    FormatOption,
    OperationOption,
    Refusal,
    ScopeOption,
    about,
    print_json,
)
from onefold.cli._common.record_text import facts, name
from onefold.cli._common.store_option import StoreOption, the_store
from onefold.cli.commands.records import DigestOption, KeyArgument, print_record


def forget(
    key: KeyArgument = None,
    digest: DigestOption = None,
    operation: OperationOption = None,
    scope: ScopeOption = None,
    yes: YesOption = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Remove a record, so that the next delivery will run, whatever has happened before."""
    which = wanted(key, digest, operation, scope)
    if not yes:
        asking.check_terminal()
    with opened(the_store(store)) as guard:
        record = find_one(guard.store, which)
        running = still_running(record)
        if running is not None:
            raise Refusal(running)
        address = record.address
        if not yes:
            print_record(record, err=True)
            asking.confirm("Forget it? The next delivery will run, whatever has happened before.")
            now = guard.read(address.operation, address.key, scope=address.scope or None)
            # A claim has its own token; the revision changes with a slow owner's heartbeat, and means nothing here.
            if now is None or (now.token, now.state) != (record.token, record.state):
                raise Refusal(
                    f"{name(record)} has changed in the meantime, and was left as it is now. Look at it again"
                )
        if not guard.forget(address.operation, address.key, scope=address.scope or None):
            raise Refusal(f"{name(record)} is gone already: the next delivery will run")
    if format is Format.JSON:
        print_json({"forgotten": True, "before": facts(record)})
    else:
        typer.echo(f"{name(record)}: forgotten; the next delivery will run")


def still_running(record: Record) -> str | None:
    """Return a message if a worker is running it."""
    if not record.is_live:
        return None
    left = about(record.lease_left)
    return f"{name(record)} is running, and nothing was changed. Its lease ends in {left}, unless renewed"
