"""`onefold lint`: check a configuration against the rules, for people, for programs and for CI."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from onefold.cli._common.output import FAILED, WRONG_USAGE, Refusal, note, print_json, visible
from onefold.config import Configuration, Problem, Unusable, read
from onefold.config import schema as schema_of_file
from onefold.health.report import counted
from onefold.lint import Finding, findings, reports
from onefold.lint.settings import Settings, read_settings


class LintFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


def lint(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", show_default=False, help="onefold.yaml, or a .toml.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Ask for a documented floor (duplicates or replays) of every guard, too.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the file, for editors.")] = False,
    format: Annotated[  # noqa: A002 - the option's name
        LintFormat, typer.Option("--format", help="The output format.")
    ] = LintFormat.TEXT,
) -> None:
    """Find what will fail in production: records that expire before duplicates stop, money on a store that forgets...

    Reads only the files, and those that they name as settings: no store is opened, no code is run, and a variable in a
    store's URL need not be set. Exits with 0 if there is
    nothing to fix, 1 if there is, 2 if a file cannot be used.
    """
    if schema:
        print_json(schema_of_file())
        return
    if not files:
        raise Refusal("which file? Name it: onefold lint onefold.yaml", WRONG_USAGE)
    settings, problems = _read(files)
    read_files = [one.configuration for one in settings]
    found = findings(*read_files, strict=strict)
    _print(format, len(files), found, problems, settings)
    for configuration in read_files:
        for variable in _hiding(configuration):
            note(
                f"{configuration.file}: {variable} is not set, so the kind of its store is unknown and was not checked"
            )
        for store in configuration.unowned:
            note(
                f"{configuration.file}: stores.{store}.url names a kind of store that is not installed, so it was "
                "not checked"
            )
    if format is LintFormat.TEXT:
        _sum_up(read_files, found, problems)
    if problems or found:
        raise typer.Exit(WRONG_USAGE if problems else FAILED)


def _read(files: list[str]) -> tuple[list[Settings], list[Problem]]:
    """Read each file once, with the settings that it names, whatever is wrong with another."""
    found: list[Settings] = []
    problems: list[Problem] = []
    for file in dict.fromkeys(files):
        try:
            found.append(read_settings(read(file, to_run=False)))
            problems += found[-1].problems
        except Unusable as error:
            problems += error.problems
    return found, problems


def _hiding(configuration: Configuration) -> list[str]:
    """Return the variables without which the kind of a store is unknown."""
    hidden = [store.name for store in configuration.stores.values() if store.url is None and not store.kind]
    return [*dict.fromkeys(one for name in hidden for one in configuration.unset_of(name))]


def _print(
    format_: LintFormat, files: int, found: list[Finding], problems: list[Problem], settings: list[Settings]
) -> None:
    match format_:
        case LintFormat.JSON:
            print_json(reports.document(files, found, problems, settings))
        case LintFormat.SARIF:
            print_json(reports.sarif(found, problems))
        case LintFormat.GITHUB:
            for line in reports.github(found, problems):
                typer.echo(visible(line))
        case LintFormat.TEXT:
            for finding in found:
                typer.echo(_line(finding))


def _line(finding: Finding) -> str:
    line = visible(str(finding))
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return line
    before, code, after = line.partition(f" {finding.code} ")
    return f"{typer.style(before, bold=True)}{typer.style(code, fg='red')}{after}"


def _sum_up(read_files: list[Configuration], found: list[Finding], problems: list[Problem]) -> None:
    for problem in problems:
        note(str(problem))
    if problems:
        return
    guards = counted(sum(len(one.guards) for one in read_files), "guard")
    where = f"{guards} in {counted(len(read_files), 'file')}"
    note(f"{counted(len(found), 'finding')} among {where}" if found else f"{where}: nothing to fix")
