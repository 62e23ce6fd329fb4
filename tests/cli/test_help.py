"""Every command explains itself: an example that parses, `--format`, a place in docs/cli.md with all options."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from onefold.cli._common.masking import masked, remember_typed
from onefold.cli.app import COMMANDS, app
from tests.support import PATIENCE, PROJECT

PAGE = PROJECT / "docs" / "cli.md"
EXAMPLE = "Example: "


@pytest.mark.parametrize("password", ["geheim", "ge(heim", "ge heim", "ge@heim", "ge)/heim"])
def test_a_store_in_the_wrong_place_is_named_without_its_password(password: str) -> None:
    ended = CliRunner().invoke(app, ["held", f"postgresql://me:{password}@host/shop?sslpassword=ge(heim"])

    assert ended.exit_code == 2
    assert "heim" not in ended.output
    assert "***@host/shop" in ended.output
    assert "--store" in ended.output


@pytest.mark.parametrize("password", ["geheim", "ge heim", "ge@heim", "ge/heim", "ge'heim", "ge[heim", "ge\theim"])
@pytest.mark.parametrize(
    "command",
    [["lint"], ["trace"], ["trace", "--svg"], ["show", "--digest"], ["held", "--scope"], ["erase", "--scope"]],
    ids=" ".join,
)
def test_a_command_that_takes_a_store_for_something_else_does_not_show_its_password(
    command: list[str], password: str
) -> None:
    url = f"redis://me:{password}@127.0.0.1:1/0?password=geheim"

    ended = CliRunner().invoke(app, [*command, url])

    assert ended.exit_code != 0
    assert isinstance(ended.exception, SystemExit)
    assert "heim" not in ended.output


def test_a_line_shows_no_password_of_a_url_that_was_typed() -> None:
    remember_typed(["--store=redis://me:ge heim@host/0", "xyz://:a@heim@host"])

    assert masked("redis://me:ge heim@host/0: no file") == "redis://me:***@host/0: no file"
    assert masked("'redis:/me:ge heim@host/0' is a path") == "'redis:/me:***@host/0' is a path"
    assert masked("store='redis://me:ge he") == "store='redis://me:***"
    assert masked("from xyz://:a@heim@host") == "from xyz://:***@host"
    assert masked("redis://me:***@host and redis://other, as told") == "redis://me:***@host and redis://other, as told"
    assert masked("mail me@host: redis://me:1/0") == "mail me@host: redis://me:***"
    assert masked("mysql://you:geheim@host?password=geheim") == "mysql://you:***@host?password=***"
    remember_typed([])


def commands_of(group: typer.Typer) -> dict[str, Any]:
    found: dict[str, Any] = getattr(get_command(group), "commands", {})
    return found


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def parses(commands: dict[str, Any], line: str) -> bool:
    """Whether a line such as `onefold ls --all` can be typed; nothing of it is run."""
    program, name, *arguments = shlex.split(line)
    try:
        commands[name].make_context(name, arguments)
    except Exception:
        return False
    return program == "onefold"


def faults(commands: dict[str, Any], name: str, page: str) -> list[str]:
    """What this command owes its users."""
    command, found = commands[name], []
    if not (command.help or "").strip():
        found.append("no help")
    example = (command.epilog or "").removeprefix(EXAMPLE)
    if example == (command.epilog or "") or not example.startswith(f"onefold {name}") or not parses(commands, example):
        found.append("no example")
    if "--format" not in options_of(command):
        found.append("no --format")
    if f"\n## `onefold {name}`\n" not in page:
        found.append("no heading")
    found += [f"{option} is not in the page" for option in sorted(options_of(command)) if f"{option}" not in page]
    return found


BASH = """
PATH="$1:$PATH"
eval "$(onefold --show-completion)"
complete -p onefold
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_onefold_completion onefold
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["re"], {"redrive", "report", "resolve"}),
        pytest.param([""], set(COMMANDS), marks=pytest.mark.more),
        pytest.param(["resolve", "--rer"], {"--rerun"}, marks=pytest.mark.more),
        (["ls", "--state", "h"], {"held"}),
    ],
)
def test_bash_completes_what_is_typed(typed: list[str], offered: set[str], tmp_path: Path) -> None:
    command = ["bash", "--norc", "-c", BASH, "bash", str(Path(sys.executable).parent), "onefold", *typed]

    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, cwd=tmp_path)

    registered, *found = said.stdout.splitlines()
    assert registered == "complete -o default -F _onefold_completion onefold"
    assert set(found) == offered


def lines_of(page: str) -> Iterator[str]:
    """The commands in the console blocks of the page; what comes after a pipe is not ours."""
    for block in re.findall(r"^ *```console\n(.*?)^ *```$", page, flags=re.DOTALL | re.MULTILINE):
        yield from (line.partition(" | ")[0] for line in re.findall(r"^ *\$ (onefold .*)$", block, flags=re.MULTILINE))


@pytest.mark.parametrize("name", sorted(commands_of(app)))
def test_every_command_has_help_an_example_a_format_and_a_place_in_the_documentation(name: str) -> None:
    assert faults(commands_of(app), name, PAGE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("line", sorted(set(lines_of(PAGE.read_text(encoding="utf-8")))))
def test_every_line_of_the_documentation_can_be_typed(line: str) -> None:
    assert parses(commands_of(app), line)


def test_every_command_names_its_store_by_the_same_option() -> None:
    naming = {name: options_of(command) & {"--store", "--from", "--to"} for name, command in commands_of(app).items()}
    without = {"trace", "lint", "simulate"}

    assert {name for name, options in naming.items() if options == {"--from", "--to"}} == {"copy", "import"}
    assert {name for name, options in naming.items() if not options} == without
    assert all(options == {"--store"} for name, options in naming.items() if name not in without | {"copy", "import"})


def test_only_keys_and_files_are_named_without_an_option() -> None:
    arguments = {
        name: [parameter.name for parameter in command.params if parameter.param_type_name == "argument"]
        for name, command in commands_of(app).items()
    }

    assert {name: found for name, found in arguments.items() if found} == {
        "show": ["key"],
        "resolve": ["keys"],
        "forget": ["key"],
        "report": ["logs"],
        "trace": ["logs"],
        "lint": ["files"],
    }


@pytest.mark.parametrize("name", sorted(commands_of(app)))
def test_the_help_of_a_command_is_plain_in_a_pipe(name: str) -> None:
    said = CliRunner().invoke(app, [name, "--help"])

    assert said.exit_code == 0
    assert EXAMPLE in said.stdout
    assert said.stdout.isascii()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--bad", "See onefold --help"),
        ("hel", "See onefold --help"),
        ("ls --limit 0", "See onefold ls --help"),
        ("ls --state foo", "'foo' is not one of"),
        ("ls --lmit 3", "See onefold ls --help"),
        ("held --format xml", "'xml' is not one of"),
        ("copy", "Pass --from OLD and --to NEW"),
        ("copy redis://localhost sqlite:///x.db", "use --from URL --to URL. See onefold copy --help"),
        ("import sqlite:///x.db --to redis://localhost", "use --from URL --to URL. See onefold import --help"),
        ("doctor sqlite:///x.db", "use --store URL. See onefold doctor --help"),
        ("purge onefold.yaml", "use --store FILE. See onefold purge --help"),
        ("schema memory:", "use --store URL. See onefold schema --help"),
        ("trace", "See onefold trace --help"),
        ("show one two", "See onefold show --help"),
        ("purge --batch x", "See onefold purge --help"),
    ],
)
def test_a_command_line_that_cannot_be_used_gets_one_line_that_names_its_help(line: str, says: str) -> None:
    said = CliRunner().invoke(app, shlex.split(line))

    assert said.exit_code == 2
    assert said.stdout == ""
    assert said.stderr.startswith("onefold: ")
    assert said.stderr.count("\n") == 1
    assert says in said.stderr


def test_without_a_command_there_is_help() -> None:
    said = CliRunner().invoke(app, [])

    assert said.exit_code == 2
    assert "Commands:" in said.output


def test_a_command_that_explains_nothing_is_found() -> None:
    poor = typer.Typer()
    poor.command("mute")(lambda: None)
    poor.command("wrong", epilog="Example: onefold wrong --no-such-option")(lambda: None)

    assert faults(commands_of(poor), "mute", "") == ["no help", "no example", "no --format", "no heading"]
    assert "no example" in faults(commands_of(poor), "wrong", "")
    assert faults(commands_of(app), "ls", "\n## `onefold ls`\n")[0] == "--all is not in the page"
    assert not parses(commands_of(app), "onefold ls --no-such-option")
