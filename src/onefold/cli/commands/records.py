"""`onefold ls`, `show` and `held`: read records. They change nothing."""

from __future__ import annotations

import heapq
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Annotated, Any, Final

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from onefold import Record, State
from onefold.cli._common.find import check_spelling, find_to_read, no_record, records, wanted, watched
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    Format,
    FormatOption,
    JsonArray,
    LimitOption,
    Listing,
    OperationOption,
    Refusal,
    ScopeOption,
    about,
    note,
    on_terminal,
    visible,
)
from onefold.cli._common.raw_record import raw_lines, raw_record
from onefold.cli._common.record_text import (
    COLUMNS,
    STYLES,
    behind_dead_bypass,
    facts,
    lines,
    name,
    remark,
    row,
    summary,
)
from onefold.cli._common.samples import ExactOption, unsettled
from onefold.cli._common.store_option import ENVIRONMENT, StoreOption, the_store
from onefold.stores.base import Browsable, Query, ShowsStored

KeyArgument = Annotated[str | None, typer.Argument(metavar="KEY", show_default=False, help="The key.")]
DigestOption = Annotated[
    str | None,
    typer.Option("--digest", show_default=False, help="Instead of the key: the 12 digits that stand for it in logs."),
]

KeyForOption = Annotated[
    list[str] | None,
    typer.Option(
        "--key-for",
        metavar="NAME",
        show_default=False,
        help="Also show the key that the handler got from current().key_for(NAME). May be repeated.",
    ),
]

RawOption = Annotated[
    bool,
    typer.Option("--raw", help="Show what the store keeps, byte by byte, as docs/record-format.md describes it."),
]

# A screen or two; ask for more with an option.
LIMIT: Final = 50

# How many are printed at a time, under one heading on a terminal.
BATCH: Final = 100

# The fields of one record begin in this column.
MARGIN: Final = 13

HELD_COLUMNS: Final = ("scope", "operation", "key", "digest", "attempt", "age", "remark", "resolve")


def ls(
    operation: OperationOption = None,
    state: Annotated[State | None, typer.Option("--state", show_default=False, help="Only this state.")] = None,
    scope: ScopeOption = None,
    limit: LimitOption = LIMIT,
    everything: Annotated[bool, typer.Option("--all", help="List all records, printed as they are read.")] = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """List the records of a store, in the order of their addresses."""
    with opened(the_store(store)) as guard:
        found = records(guard.store, Query(scope=scope, operation=operation, state=state))
        count = _print_all(found if everything else islice(found, limit), format)
        if count == 0:
            note("no record matches" if operation or state or scope is not None else "there are no records")
        elif not everything and next(found, None) is not None:
            note(f"there are more than these {count}. For all of them: --all; for more: --limit {10 * count}")


def _print_all(found: Iterator[Record], format_: Format) -> int:
    """Print them page by page; return how many there were."""
    count, array, table = 0, JsonArray(), Listing(COLUMNS, styles=STYLES)
    while batch := list(islice(found, BATCH)):
        count += len(batch)
        if format_ is Format.JSON:
            array.add([summary(record) for record in batch])
        else:
            table.add([row(record) for record in batch])
    if format_ is Format.JSON:
        array.end()
    return count


def show(
    key: KeyArgument = None,
    digest: DigestOption = None,
    operation: OperationOption = None,
    scope: ScopeOption = None,
    key_for: KeyForOption = None,
    raw: RawOption = False,
    exact: ExactOption = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Show every record of a key, field by field. If no record has this key, it may be the digest of one.

    With --key-for NAME, also show the key under which the other side (a bank, a mail server) knows it, if the handler
    has passed on current().key_for(NAME): after a bypass that of the latest run.

    In a large store a digest is looked for among what is held or running, the newest records, and some others; with
    --exact among all.

    With --raw, show the columns or bytes in the store instead, for programs in other languages that share it.

    Exits with 1 if there is none.
    """
    names, which = key_for or [], wanted(key, digest, operation, scope)
    with opened(the_store(store)) as guard:
        found = find_to_read(guard.store, which, exact=exact)
        first = next(found, None)
        if first is None:
            raise no_record(which)
        if raw:
            _print_raw(guard.store, chain([first], found), format)
            return
        if format is Format.JSON:
            array = JsonArray()
            for record in chain([first], found):
                array.add([facts(record, names)])
            array.end()
            return
        print_record(first, names)
        for record in found:
            typer.echo()
            print_record(record, names)


def _print_raw(store: object, found: Iterator[Record], format_: Format) -> None:
    if not isinstance(store, ShowsStored):
        raise Refusal(f"{type(store).__name__} cannot show what it stores")
    array = JsonArray()
    for number, record in enumerate(found):
        stored = store.stored(record.address)
        if stored is None:
            continue
        document = raw_record(record, stored)
        if format_ is Format.JSON:
            array.add([document])
            continue
        if number:
            typer.echo()
        for name_, text in raw_lines(document):
            typer.echo(f"{name_}\t{text}")
    if format_ is Format.JSON:
        array.end()


def held(
    operation: OperationOption = None,
    scope: ScopeOption = None,
    limit: LimitOption = LIMIT,
    everything: Annotated[bool, typer.Option("--all", help="List all that are held.")] = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """List what is held, oldest first, each with the command that resolves it."""
    with opened(the_store(store)) as guard:
        query = Query(scope=scope, operation=operation, state=State.HELD)
        oldest, count = _oldest(guard.store, query, sys.maxsize if everything else limit)
        _print_held(oldest, store, format)
        if count > len(oldest):
            note(f"these are the oldest {len(oldest)} of {count:,}. For all of them: --all")
        if count == 0:
            check_spelling(guard.store, query, done="found")
            note("nothing is held")
        else:
            _explain(store)
        _warn_of_abandoned(guard.store, query)


def _oldest(store: Browsable, query: Query, limit: int) -> tuple[list[Record], int]:
    """Return the oldest of all, and how many there are; never more than `limit` and a page are in memory."""
    count = 0

    def counted() -> Iterator[Record]:
        nonlocal count
        for count, record in enumerate(watched(records(store, query), "looking for what is held"), start=1):  # noqa: B007
            yield replace(record, notes=None, result=None)

    return heapq.nlargest(limit, counted(), key=lambda record: record.age), count


def _print_held(oldest: list[Record], typed: str | None, format_: Format) -> None:
    commands = [resolve_line(record, typed) for record in oldest]
    if format_ is Format.JSON:
        array = JsonArray()
        array.add([summary(one) | {"resolve": command} for one, command in zip(oldest, commands, strict=True)])
        array.end()
    elif on_terminal():
        _print_for_people(oldest, commands)
    else:
        rows = [(*_held_row(one), command) for one, command in zip(oldest, commands, strict=True)]
        Listing(HELD_COLUMNS).add(rows)


def _held_row(record: Record) -> tuple[str, ...]:
    shown = dict(zip(COLUMNS, row(record), strict=True))
    return tuple(shown[column] for column in HELD_COLUMNS[:-1])


def _print_for_people(oldest: list[Record], commands: list[str]) -> None:
    """Print two lines each: in a table cell the command would be folded, and could not be copied."""
    console = Console(highlight=False, soft_wrap=True)
    for record, command in zip(oldest, commands, strict=True):
        line = Text(name(record), style="bold")
        line.append(f"  {about(record.age)} ago", style="not bold cyan")
        line.append(f"  {visible(remark(record))}", style="not bold yellow")
        console.print(line)
        console.print(Text(f"  {command}"))


def _explain(typed: str | None) -> None:
    note(
        "find out whether the effect happened (`onefold show KEY --key-for NAME` shows the key that the other side "
        "got), then add to its line --done [--value JSON], --failed [--error TEXT] or --rerun, and --reason TEXT. "
        "For many at once: onefold resolve --operation NAME --older-than TIME --remark TEXT"
    )
    if typed and holds_password(typed) and os.environ.get(ENVIRONMENT) != typed:
        note(f"the lines leave out the store's URL, which may hold a password: add --store, or set {ENVIRONMENT}")


def _warn_of_abandoned(store: Browsable, query: Query) -> None:
    """Warn about abandoned records: the next delivery marks one as held; if none comes, only this line reports it."""
    running: Iterable[Record] | None = unsettled(store, query._replace(state=State.RUNNING))
    if running is None:
        running = records(store, query._replace(state=State.RUNNING))
    count = sum(1 for record in running if record.is_abandoned and not _stands_behind_bypass(store, record))
    if count:
        note(
            f"also running past the end of their lease: {count:,}. The next delivery decides about them. "
            "To see them: onefold ls --state running. To settle them: onefold resolve KEY ..., by their keys"
        )


def _stands_behind_bypass(store: Any, record: Record) -> bool:
    """Return whether the next delivery decides nothing: a bypass has died, and it gets the earlier outcome."""
    if not record.bypasses:
        return False
    # The index does not have the notes, in which the earlier outcome is.
    whole = store.read(record.address)
    return whole is not None and behind_dead_bypass(whole) is not None


def resolve_line(record: Record, typed: str | None) -> str:
    """Return the shell command that settles this record and no other; append the resolution to it.

    It names the store as it was typed: if it was not, the environment or the folder names it the next time, too.
    """
    address = record.address
    # The scope even if there is none: by the time this is typed, another tenant may have the only such key.
    options = [("--operation", address.operation), ("--scope", address.scope)]
    said = [word for option in options if option[1].isprintable() for word in option]
    if address.key.startswith("-") or not (address.key + address.operation + address.scope).isprintable():
        # The digest identifies it too, without a character that a shell or a terminal would misinterpret. It has its
        # own option: in place of a key it could be the key of another tenant.
        arguments = ["--digest", address.digest, *said]
    else:
        arguments = [address.key, *said]
    if typed and os.environ.get(ENVIRONMENT) != typed and not holds_password(typed):
        arguments += ["--store", typed]
    return shlex.join(["onefold", "resolve", *arguments])


def holds_password(url: str) -> bool:
    return "@" in url or "password" in url.lower()


def print_record(record: Record, key_for: Sequence[str] = (), *, err: bool = False) -> None:
    """Print a record field by field: a terminal gets the result on several lines, a pipe one line per field."""
    people = (sys.stderr if err else sys.stdout).isatty()
    console = Console(highlight=False, soft_wrap=True, stderr=err)
    for field, text in lines(record, key_for, indent=2 if people else None):
        if people:
            style = STYLES[record.state] if field == "state" else ""
            indented = Text(text.replace("\n", "\n" + " " * MARGIN), style=style)
            console.print(Text(f"{field:<{MARGIN}}", style="bold"), indented, sep="")
        else:
            typer.echo(f"{field}\t{text}", err=err)
