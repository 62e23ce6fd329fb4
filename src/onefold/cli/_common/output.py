"""The common output of commands: one line per error, output for people and pipes.

On a terminal a table; in a pipe one line per row, tab-separated, complete and without colour. Data goes to standard
output, messages about it to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, NoReturn, ParamSpec

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from onefold import MissingKey, OnefoldError, UsageError
from onefold.cli._common.masking import masked
from onefold.durations import FOREVER, UNITS, as_text

P = ParamSpec("P")

FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 128 + signal.SIGINT
# The reader of our pipe is gone, as with `head`: other tools die of the signal, whose status this is.
PIPE_CLOSED: Final = 128 + 13

# Below two of a unit the next smaller one is shown: "90s" says more than "1m".
FEW: Final = 2

# Between two columns; and if a terminal leaves less than this for the last one, the rows are printed as blocks.
GAP: Final = 2
LAST_COLUMN_MIN: Final = 24


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


ScopeOption = Annotated[
    str | None, typer.Option("--scope", show_default=False, help="Only this tenant or caller ('': those without one).")
]
OperationOption = Annotated[
    str | None, typer.Option("--operation", show_default=False, help="Only this operation, such as charge.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="The output format.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="The maximum number of records to print.")]


class Refusal(Exception):
    """A command cannot continue; its message is the one line to print, `status` the exit status."""

    def __init__(self, line: str, status: int = FAILED) -> None:
        super().__init__(line)
        self.status = status


def ends_in_one_line(command: Callable[P, None]) -> Callable[P, None]:
    """Turn any error of the command into one line on standard error and an exit status, never a traceback."""

    @functools.wraps(command)
    def ending(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _write_what_can_be_written()
            command(*args, **kwargs)
            sys.stdout.flush()
        except Refusal as refusal:
            _stop(str(refusal), refusal.status)
        except OnefoldError as error:
            _stop(str(error), WRONG_USAGE if isinstance(error, (UsageError, MissingKey)) else FAILED)
        except KeyboardInterrupt:
            _hush()
            if sys.stderr.isatty():
                typer.echo(err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _hush()
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            _hush()
            _stop(str(error), FAILED)
        except RecursionError:
            _stop("the input is nested too deeply to be read", WRONG_USAGE)
        except UnicodeEncodeError as error:
            # A shell passes any bytes on; bytes that are not text were decoded to halves of surrogate pairs.
            _stop(f"{error.object!a} is not text in UTF-8", WRONG_USAGE)

    return ending


def _stop(line: str, status: int) -> NoReturn:
    note(line)
    raise typer.Exit(status) from None


def _write_what_can_be_written() -> None:
    """Write escapes for characters that the terminal cannot show: `\\xe9` instead of a traceback for `é`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _hush() -> None:
    """Discard buffered output: at exit Python would try to write it once more, and wait or complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def note(line: str) -> None:
    """Print one line about the work, next to the data."""
    typer.echo(f"onefold: {visible(' '.join(masked(line).split()))}", err=True)


def on_terminal() -> bool:
    return sys.stdout.isatty()


class Listing:
    """Rows, printed page by page as they come: a table on a terminal, tab-separated lines in a pipe."""

    def __init__(self, columns: Sequence[str], *, styles: Mapping[str, str] | None = None, err: bool = False) -> None:
        self._columns = columns
        # The colour of a state, on a terminal.
        self._styles = styles or {}
        self._err = err
        self._begun = False

    def add(self, rows: Sequence[Sequence[str]]) -> None:
        if not rows:
            return
        if (sys.stderr if self._err else sys.stdout).isatty():
            self._print_table([[visible(cell) for cell in row] for row in rows])
            return
        lines = [*([] if self._begun else [self._columns]), *rows]
        self._begun = True
        typer.echo("\n".join("\t".join(visible(cell) or "-" for cell in line) for line in lines), err=self._err)

    def _print_table(self, rows: Sequence[Sequence[str]]) -> None:
        """Print a table without empty columns; fold only the last one: the others are for copying.

        On a terminal that is too narrow for the table, each row is a block, with a line for each column.
        """
        shown = [index for index in range(len(self._columns)) if any(row[index] for row in rows)]
        console = Console(highlight=False, stderr=self._err)
        cells = [[row[index] for index in shown] for row in rows]
        if not fits([self._columns[index] for index in shown], cells, console.width):
            self._print_blocks(rows, console)
            return
        table = Table(box=None, pad_edge=False)
        for index in shown:
            table.add_column(self._columns[index], no_wrap=index != shown[-1], overflow="fold")
        for row in rows:
            # As `Text`, because a key may contain characters that would be markup in a string.
            table.add_row(*(Text(row[index], style=self._style(index, row[index])) for index in shown))
        console.print(table, crop=False)

    def _print_blocks(self, rows: Sequence[Sequence[str]], console: Console) -> None:
        for row in rows:
            if self._begun:
                console.print()
            self._begun = True
            styles = [self._style(index, cell) for index, cell in enumerate(row)]
            for line in block(self._columns, row, styles):
                # The terminal wraps it, so that a long key is copied without a break.
                console.print(line, soft_wrap=True)

    def _style(self, index: int, cell: str) -> str:
        return self._styles.get(cell, "") if self._columns[index] == "state" else ""


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Return whether a table is readable at this width: only its last column may be folded, and not to a ribbon."""
    widths = [max(cell_len(line[index]) for line in (columns, *rows)) for index in range(len(columns))]
    return sum(widths[:-1]) + GAP * (len(widths) - 1) + min(widths[-1], LAST_COLUMN_MIN) <= width


def block(columns: Sequence[str], row: Sequence[str], styles: Sequence[str] = ()) -> list[Text]:
    """Return one row as lines, each with the name of a column and its cell; empty cells are left out."""
    margin = max(map(cell_len, columns)) + GAP
    return [
        Text(f"{name:<{margin}}", style="bold").append(Text(cell, style=f"not bold {style}".strip()))
        for name, cell, style in zip(columns, row, styles or [""] * len(row), strict=True)
        if cell
    ]


class JsonArray:
    """One JSON array, written element by element."""

    def __init__(self) -> None:
        self._begun = False

    def add(self, elements: Sequence[object]) -> None:
        if elements:
            typer.echo("," if self._begun else "[")
            typer.echo(",\n".join(f"  {json.dumps(element, allow_nan=False)}" for element in elements), nl=False)
            self._begun = True

    def end(self) -> None:
        typer.echo("\n]" if self._begun else "[]")


def print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


@contextlib.contextmanager
def counting(what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error for work without a known end; call the result with the count so far."""
    text = TextColumn(f"{{task.description}}: {{task.completed:,}} {unit}")
    columns = (SpinnerColumn(), text, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None)
        yield lambda count: progress.update(task, completed=count)


def visible(text: str) -> str:
    """Escape characters that a terminal would interpret or hide: keys come from outside."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def about(duration: float) -> str:
    """Format a measured duration, as exactly as a person wants it: "45s", "119m", "3d", "forever"."""
    if duration == FOREVER:
        return "forever"
    whole = max(duration, 0.0)
    for unit in ("d", "h", "m"):
        if whole >= FEW * UNITS[unit]:
            return as_text(whole // UNITS[unit] * UNITS[unit])
    return as_text(float(int(whole)))
