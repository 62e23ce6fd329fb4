"""Register the commands, each with an example in its help and `--format json`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, NamedTuple, cast

import typer
from typer.core import TyperGroup

from onefold import __version__
from onefold.cli._common.masking import remember_typed
from onefold.cli._common.output import WRONG_USAGE, ends_in_one_line, note
from onefold.cli.commands import records, simulate
from onefold.cli.commands.copy import copy
from onefold.cli.commands.doctor import doctor
from onefold.cli.commands.erase import erase
from onefold.cli.commands.forget import forget
from onefold.cli.commands.import_table import import_table
from onefold.cli.commands.lint import lint
from onefold.cli.commands.purge import purge
from onefold.cli.commands.redrive import redrive
from onefold.cli.commands.resolve import resolve
from onefold.cli.commands.schema import schema
from onefold.cli.commands.size import size_command
from onefold.cli.commands.stats import stats
from onefold.cli.commands.top import top
from onefold.cli.commands.trace import trace
from onefold.demo.command import demo
from onefold.report.command import report
from onefold.stores.opening import without_password

# An argument that may hold a password, with any character in it; and one that may hold one in its options.
_CREDENTIALS: Final = re.compile(r"://.*@", re.DOTALL)
_URL: Final = re.compile(r"[\w+.-]+://\S*|\bmemory:")
_FILE: Final = re.compile(r"\.(ya?ml|toml)\b")

# The base class of `typer.BadParameter`. Typer has its own click, or uses yours.
USAGE_ERROR: Final = cast("type[Exception]", typer.BadParameter.__bases__[0])


class OneLine(TyperGroup):
    """Reports mistakes in a command line in one line, like any other error, and how to get help."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **options: Any) -> Any:
        remember_typed(args)
        with _usage_in_one_line():
            return super().make_context(info_name, args, *rest, **options)

    def invoke(self, ctx: Any) -> Any:
        with _usage_in_one_line():
            return super().invoke(ctx)


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    try:
        yield
    except USAGE_ERROR as error:
        if "NoArgsIsHelp" in type(error).__name__:
            raise
        context = getattr(error, "ctx", None)
        name = f" {context.info_name}" if context is not None and context.parent is not None else ""
        said = _without_passwords(str(error.format_message()).rstrip())  # type: ignore[attr-defined]
        if "No such option: --" in said and context is not None and context.parent is None:
            said = f"{said.rstrip('.')}: options follow their command, as in onefold held --store URL"
        if "extra argument" in said and context is not None:
            said = f"{said.rstrip('.')}{_how_to_name_a_store(said, context.command)}"
        note(f"{said}{'' if said.endswith(('.', '?')) else '.'} See onefold{name} --help")
        raise typer.Exit(WRONG_USAGE) from None


def _how_to_name_a_store(said: str, command: Any) -> str:
    """Return what to write instead, if the argument that a command does not take is a store or a configuration."""
    if not (_URL.search(said) or _FILE.search(said)):
        return ""
    options = {option for parameter in command.params for option in parameter.opts}
    if "--store" in options:
        return f": use --store {'URL' if _URL.search(said) else 'FILE'}"
    return ": use --from URL --to URL" if "--from" in options else ""


def _without_passwords(said: str) -> str:
    return _URL.sub(lambda url: without_password(url[0]), _CREDENTIALS.sub("://***@", said))


app = typer.Typer(
    name="onefold",
    cls=OneLine,
    help="At-least-once delivery, effects that happen once.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    # In a pipe no boxes, neither around the help nor around an error.
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
)


class Tables(Enum):
    """How a command treats a store without tables."""

    NONE = "uses no store"
    # Reports in one line that there are none, and exits with 1.
    NEEDS = "uses tables that exist, and creates none"
    REPORTS = "says whether tables exist, and creates none"
    CREATES = "creates tables in the store that it writes to; a dry run creates none"


class Command(NamedTuple):
    """One command: its function, what it does about tables, and an example of its use."""

    function: Callable[..., None]
    tables: Tables
    example: str


# In the order of the help.
COMMANDS: Final[dict[str, Command]] = {
    "demo": Command(demo, Tables.CREATES, "onefold demo --store sqlite:///onefold.db"),
    "ls": Command(records.ls, Tables.NEEDS, "onefold ls --store sqlite:///onefold.db --state running"),
    "show": Command(records.show, Tables.NEEDS, "onefold show pay_7f3a --store sqlite:///onefold.db"),
    "held": Command(records.held, Tables.NEEDS, "onefold held --store sqlite:///onefold.db"),
    "resolve": Command(
        resolve,
        Tables.NEEDS,
        "onefold resolve pay_7f3a --operation charge --rerun --reason 'the bank has no trace'",
    ),
    "forget": Command(forget, Tables.NEEDS, "onefold forget pay_7f3a --operation charge"),
    "erase": Command(
        erase, Tables.NEEDS, "onefold erase --store postgresql://localhost/shop --scope tenant-42 --dry-run"
    ),
    "redrive": Command(
        redrive, Tables.NEEDS, "onefold redrive --broker amqp://localhost --dead-letters refunds.dead --send"
    ),
    "stats": Command(stats, Tables.NEEDS, "onefold stats --store sqlite:///onefold.db"),
    "report": Command(
        report,
        Tables.NEEDS,
        "onefold report absorbed.jsonl --amount amount --html report.html --store sqlite:///onefold.db",
    ),
    "top": Command(top, Tables.NEEDS, "onefold top --store postgresql://localhost/shop --interval 5s"),
    "copy": Command(
        copy, Tables.CREATES, "onefold copy --from redis://localhost:6379/0 --to postgresql://localhost/shop"
    ),
    "import": Command(
        import_table,
        Tables.CREATES,
        "onefold import --from sqlite:///shop.db --table processed --key message_id --operation charge --to redis://localhost",
    ),
    "doctor": Command(doctor, Tables.REPORTS, "onefold doctor --store redis://localhost:6379/0 --strict"),
    "purge": Command(purge, Tables.NEEDS, "onefold purge --store postgresql://localhost/shop --every 60s"),
    "schema": Command(schema, Tables.CREATES, "onefold schema --store sqlite:///onefold.db --apply"),
    "trace": Command(trace, Tables.NONE, "onefold trace app.jsonl gateway.jsonl worker.jsonl --svg leaks.svg"),
    "lint": Command(lint, Tables.NONE, "onefold lint onefold.yaml --format github"),
    "size": Command(size_command, Tables.NONE, "onefold size --rate 2000/s --keep 30d --store postgres"),
    "simulate": Command(simulate.simulate, Tables.NONE, "onefold simulate --deep"),
}

for name, command in COMMANDS.items():
    app.command(name, epilog=f"Example: {command.example}")(ends_in_one_line(command.function))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"onefold {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Make at-least-once delivery safe: effects happen once."""
