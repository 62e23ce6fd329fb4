"""The command `onefold report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from onefold import Record, State
from onefold.cli._common.find import watched
from onefold.cli._common.opening import opened
from onefold.cli._common.output import WRONG_USAGE, Format, FormatOption, Listing, Refusal, note, print_json
from onefold.cli._common.record_text import result_of
from onefold.cli._common.store_option import StoreOption, the_store
from onefold.maintenance.pages import records
from onefold.report.absorbed import batches
from onefold.report.figures import AmountOf, Figures, Report, added_up, as_amount, counted
from onefold.report.page import page
from onefold.stores.base import Query

# A key that came often is in many batches: its record is read once.
KNOWN_MAX: Final = 10_000

COLUMNS: Final = ("operation", "absorbed", "refused")
AMOUNTS: Final = ("saved", "unknown")

# A record does not count those that were refused while it was running.
UNTOLD: Final = "?"

ABOUT: Final = (
    "absorbed: duplicates that were answered from their record. Without it, each would have run again.",
    "refused: duplicates that came while the first was running. They come again, and are counted then.",
)
ABOUT_AMOUNTS: Final = (
    "saved: the sum of the named field, once for each absorbed duplicate of a delivery that succeeded.",
    "unknown: absorbed duplicates whose record is gone, or has no such field. They are not in the sum.",
)


def report(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", show_default=False, help="Files that onefold.report.Absorbed wrote; none: the records."
        ),
    ] = None,
    amount: Annotated[
        str | None,
        typer.Option(
            "--amount",
            metavar="FIELD",
            show_default=False,
            help="Add up this field of the records: noted, or a result's.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", show_default=False, help="Write a page (HTML) to this file, too.")
    ] = None,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Report what would have happened without Onefold: the duplicates that were absorbed, by operation.

    With --amount, the records in the store are read, and the report says how much money did not move twice. Without a
    file, the counts are those in the records, which have them under count_duplicates=True; with files, these are not
    added.

    A file that a program still writes to can be read. Exits with 2 if one cannot be read.
    """
    found = _of_files(logs, amount, store) if logs else _of_records(amount, store)
    _print(found, format, with_amounts=amount is not None)
    if html is not None:
        try:
            html.write_text(_page(found, with_amounts=amount is not None), encoding="utf-8")
        except OSError as error:
            raise Refusal(f"{html}: {error.strerror}. The page was not written", WRONG_USAGE) from error


def _of_files(logs: Sequence[Path], amount: str | None, store: str | None) -> Report:
    with _amounts(amount, store) as amount_of:
        try:
            # Named twice, it would count twice.
            return added_up(batches(dict.fromkeys(logs)), amount_of)
        except OSError as error:
            raise Refusal(f"{error.filename}: {error.strerror}. Nothing was reported", WRONG_USAGE) from error


def _of_records(amount: str | None, store: str | None) -> Report:
    with opened(the_store(store)) as guard:
        found = watched(records(guard.store, Query()), "reading")
        return counted(found, lambda record: None if amount is None else _amount_in(record, amount))


@contextmanager
def _amounts(field: str | None, store: str | None) -> Iterator[AmountOf]:
    """Yield what tells the amount of a delivery, from its record in the store."""
    if field is None:
        yield lambda _: None
        return
    with opened(the_store(store)) as guard:

        @lru_cache(KNOWN_MAX)
        def of_key(operation: str, key: str, scope: str) -> Decimal | None:
            return _amount_in(guard.read(operation, key, scope=scope or None), field)

        yield lambda one: of_key(one.operation, one.key, one.scope)


def _amount_in(record: Record | None, field: str) -> Decimal | None:
    if record is None or record.state is not State.DONE:
        return None
    if field in record.noted:
        return as_amount(record.noted[field])
    _, result = result_of(record)
    return as_amount(result.get(field)) if isinstance(result, dict) else None


def _print(found: Report, format_: Format, *, with_amounts: bool) -> None:
    if format_ is Format.JSON:
        print_json(document(found, with_amounts=with_amounts))
    else:
        Listing(_columns(with_amounts=with_amounts)).add(_rows(found, with_amounts=with_amounts))
    note(headline(found, with_amounts=with_amounts))
    if found.broken:
        note(f"{found.broken:,} lines could not be read, and were left out")


def headline(found: Report, *, with_amounts: bool) -> str:
    """Return the report in a sentence."""
    total = found.total
    saved = f", and {total.saved:,} would have moved twice" if with_amounts else ""
    if with_amounts and total.unknown:
        saved += f", not counting {total.unknown:,} whose amount is unknown"
    times = "once" if total.absorbed == 1 else f"{total.absorbed:,} times"
    return f"without Onefold, handlers would have run {times} more{saved}"


def document(found: Report, *, with_amounts: bool) -> dict[str, Any]:
    """Return the report for programs. Amounts are text, because they are exact."""
    return {
        "begin": _iso(found.begin),
        "end": _iso(found.end),
        "operations": [
            {"operation": name, **_facts(found, figures, with_amounts=with_amounts)}
            for name, figures in found.operations.items()
        ],
        **_facts(found, found.total, with_amounts=with_amounts),
        "broken": found.broken,
    }


def _facts(found: Report, figures: Figures, *, with_amounts: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"absorbed": figures.absorbed, "refused": None if found.of_records else figures.refused}
    return facts | {"saved": str(figures.saved), "unknown": figures.unknown} if with_amounts else facts


def _columns(*, with_amounts: bool) -> tuple[str, ...]:
    return COLUMNS + AMOUNTS if with_amounts else COLUMNS


def _rows(found: Report, *, with_amounts: bool) -> list[list[str]]:
    return [_row(found, name, figures, with_amounts=with_amounts) for name, figures in found.operations.items()]


def _row(found: Report, name: str, figures: Figures, *, with_amounts: bool) -> list[str]:
    cells = [name, str(figures.absorbed), UNTOLD if found.of_records else str(figures.refused)]
    return [*cells, str(figures.saved), str(figures.unknown)] if with_amounts else cells


def _page(found: Report, *, with_amounts: bool) -> str:
    notes: Sequence[str] = ABOUT + ABOUT_AMOUNTS if with_amounts else ABOUT
    sentence = headline(found, with_amounts=with_amounts)
    return page(
        f"{sentence[0].upper()}{sentence[1:]}.",
        _period(found),
        _columns(with_amounts=with_amounts),
        _rows(found, with_amounts=with_amounts),
        _row(found, "all", found.total, with_amounts=with_amounts),
        [*notes, *([f"{found.broken:,} lines could not be read."] if found.broken else [])],
    )


def _period(found: Report) -> str:
    if found.begin is not None:
        return f"From {_iso(found.begin)} to {_iso(found.end)}."
    if found.of_records and found.operations:
        return "As the records count their duplicates, each since it was finished."
    return "Nothing was absorbed."


def _iso(second: float | None) -> str | None:
    return None if second is None else datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds")
