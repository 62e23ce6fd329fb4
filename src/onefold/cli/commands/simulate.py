"""`onefold simulate`: run every interleaving of a few workers through the production code."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from onefold.cli._common.output import WRONG_USAGE, Format, FormatOption, Refusal, counting
from onefold.testing.simulate import DEEP, EVERYDAY, Report, Scenario, read_code, search, tell


def simulate(
    deep: Annotated[bool, typer.Option("--deep", help="More faults, more workers, more heartbeats.")] = False,
    story: Annotated[Path | None, typer.Option(help="Run the story in this file again ('-': standard input).")] = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Run the production code through every interleaving of a few workers, and check what must hold.

    Exits with 1 if an invariant does not hold: then the shortest history that breaks it is printed as a story.
    """
    if story is not None:
        _again(story, format)
        return
    began = time.monotonic()
    reports = [_explored(scenario) for scenario in (DEEP if deep else EVERYDAY)]
    if format is Format.JSON:
        typer.echo(json.dumps([_facts(report) for report in reports], indent=2))
    else:
        _print(reports, time.monotonic() - began)
    raise typer.Exit(1 if any(report.story for report in reports) else 0)


def _explored(scenario: Scenario) -> Report:
    """Run one search, with its progress on standard error."""
    with counting(scenario.name, "states") as tell_count:
        return search(scenario, progress=tell_count)


def _again(path: Path, format_: Format) -> None:
    try:
        code = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        scenario, actions = read_code(code)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{path} holds no story that can be run again: {error}", WRONG_USAGE) from error
    told = tell(scenario, actions)
    if format_ is Format.JSON:
        typer.echo(json.dumps({"story": str(told), "violation": told.violation or None}, indent=2))
    else:
        typer.echo(str(told))
    raise typer.Exit(1 if told.violation else 0)


def _facts(report: Report) -> dict[str, object]:
    story = None if report.story is None else {"text": str(report.story), "code": json.loads(report.story.code)}
    return {"scenario": report.scenario.name, "states": report.states, "histories": report.histories, "story": story}


def _print(reports: list[Report], seconds: float) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table("scenario", "states", "histories", "", box=None, pad_edge=False)
    for column in table.columns[1:3]:
        column.justify = "right"
    for report in reports:
        verdict = "[red]broken" if report.story else "[green]holds"
        table.add_row(report.scenario.name, f"{report.states:,}", f"{report.histories:,}", verdict)
    console.print(table)
    states, histories = sum(one.states for one in reports), sum(one.histories for one in reports)
    console.print(f"\n{histories:,} histories, {states:,} states, {len(reports)} scenarios, {seconds:.0f} s")
    for report in reports:
        if report.story is not None:
            console.print(f"\n{report.story}\nto run it again: {report.story.code}", markup=False)
