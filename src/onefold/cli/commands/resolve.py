"""`onefold resolve`: say what happened to records that are held. It shows them first, and asks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple

import typer
from msgspec.structs import replace

from onefold import Done, Guard, InProgress, Policy, Record, State, UsageError
from onefold.cli._common import asking
from onefold.cli._common.asking import YesOption
from onefold.cli._common.durations import seconds_of
from onefold.cli._common.find import check_spelling, find_each, records, wanted, watched
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    Listing,
    OperationOption,
    Refusal,
    ScopeOption,
    note,
    print_json,
)
from onefold.cli._common.progress import summed_up
from onefold.cli._common.record_text import COLUMNS, behind_dead_bypass, facts, name, remark, result_of, row
from onefold.cli._common.resolution import Resolution, json_type, login, meaning, resolution_of, said, word
from onefold.cli._common.store_option import StoreOption, the_store
from onefold.cli.commands.forget import still_running
from onefold.cli.commands.records import print_record
from onefold.health.report import counted
from onefold.stores.base import Browsable, Query

KeysArgument = Annotated[list[str] | None, typer.Argument(metavar="KEY...", show_default=False, help="The keys.")]
DigestsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--digest",
        show_default=False,
        help="Instead of a key: the 12 digits that stand for it in logs. May be repeated.",
    ),
]
ValueOption = Annotated[str | None, typer.Option(metavar="JSON", help="The result that duplicates get, for --done.")]
ErrorOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", show_default="the reason", help="The error text that duplicates get, for --failed."),
]
ReasonOption = Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Why. Kept in the record.")]
ByOption = Annotated[
    str | None, typer.Option(metavar="NAME", show_default="your login name", help="Who. Kept in the record.")
]
OlderOption = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="TIME",
        show_default=False,
        help="Instead of keys: only those first claimed longer ago, such as 2h.",
    ),
]
RemarkOption = Annotated[
    str | None,
    typer.Option("--remark", metavar="TEXT", show_default=False, help="Instead of keys: only with this in the remark."),
]

# The policy is not known here, and a record that a person has settled must not run again by itself.
KEEP: Final = "forever"

# How many are resolved at a time, and how many of them are shown before.
CHOSEN_MAX: Final = 10_000
SHOWN_MAX: Final = 200

UNREADABLE: Final = "a function whose return type it does not fit raises ResultUnreadable for every duplicate"

# How many records of an operation are looked at for the type of its results.
SAMPLE: Final = 50

SHOWN: Final = tuple(column for column in COLUMNS if column not in ("state", "left"))


def resolve(
    keys: KeysArgument = None,
    is_done: Annotated[bool, typer.Option("--done", help="The effect happened.")] = False,
    value: ValueOption = None,
    is_failed: Annotated[bool, typer.Option("--failed", help="It failed for good.")] = False,
    error: ErrorOption = None,
    is_rerun: Annotated[bool, typer.Option("--rerun", help="It did not happen: the next delivery may run.")] = False,
    reason: ReasonOption = "",
    by: ByOption = None,
    keep: Annotated[str, typer.Option(help="How long the record is kept from now on, such as 30d.")] = KEEP,
    digest: DigestsOption = None,
    operation: OperationOption = None,
    scope: ScopeOption = None,
    older_than: OlderOption = None,
    remark: RemarkOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be resolved; write nothing.")] = False,
    yes: YesOption = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Settle records that are held: say what happened. Your name, the time and the reason are added to each record.

    Takes exactly one of --done, --failed and --rerun, and a --reason; and either keys, or at least one of --operation,
    --scope, --older-than and --remark, for all held records that match.

    A record whose worker died, and that no delivery has marked as held since, is settled by its key in the same way. A
    manual resolution can be corrected in the same way, too. A bypass that died is refused: the outcome that it was
    meant to replace stands.

    A record that changes meanwhile is left, and named. Exits with 1 if one was left, or if you answered no.
    """
    resolution = resolution_of(
        is_done=is_done, value=value, is_failed=is_failed, error=error, is_rerun=is_rerun, reason=reason
    )
    which = _chosen(keys, digest, Query(scope=scope, operation=operation), older_than, remark)
    who = login() if by is None else said(by, "say who you are: --by NAME is kept in the record")
    if not (yes or dry_run):
        asking.check_terminal()
    with opened(the_store(store), policy=Policy(keep=keep)) as guard:
        found = which.find(guard.store)
        work = Work(guard, resolution, who, reason, [Result(record, problem=_problem(record)) for record in found])
        if len(found) == 1 and work.results[0].problem:
            raise Refusal(work.results[0].problem)
        if not found:
            check_spelling(guard.store, which.query, done="resolved")
        _warn_of_type(guard.store, work)
        if not (yes or dry_run) and work.todo:
            _preview([result.record for result in work.todo], err=True)
            asking.confirm(work.question)
        try:
            if not dry_run:
                work.do()
        finally:
            _print(work, format, dry_run=dry_run)
    if work.left and len(found) == 1:
        raise Refusal(work.left[0].problem)
    _sum_up(work, dry_run=dry_run)
    if work.left:
        raise typer.Exit(FAILED)


class Chosen(NamedTuple):
    """The records that the options name: by key or digest, or all held ones that match."""

    keys: Sequence[str]
    digests: Sequence[str]
    query: Query
    older_than: float
    remark: str

    def find(self, store: Browsable) -> list[Record]:
        """Return them, the oldest first if they were not named. Raises `Refusal` if a key has none."""
        if self.keys or self.digests:
            return find_each(store, self.keys, self.digests, self.query)
        held = watched(records(store, self.query._replace(state=State.HELD)), "looking for what is held")
        matching = (replace(record, notes=None) for record in held if self._matches(record))
        found = list(islice(matching, CHOSEN_MAX + 1))
        if len(found) > CHOSEN_MAX:
            note(f"there are more than {CHOSEN_MAX:,}: these are the first. Run it again for the rest")
        return sorted(found[:CHOSEN_MAX], key=lambda record: -record.age)

    def _matches(self, record: Record) -> bool:
        return record.age >= self.older_than and self.remark in remark(record).lower()


def _chosen(
    keys: list[str] | None, digests: list[str] | None, query: Query, older_than: str | None, remark: str | None
) -> Chosen:
    """Return the choice. Raise `Refusal` before any store is opened."""
    narrowed = older_than is not None or remark is not None
    if keys or digests:
        if narrowed:
            raise Refusal("--older-than and --remark choose records instead of keys: pass either", WRONG_USAGE)
        for digest in digests or ():
            wanted(None, digest, query.operation, query.scope)
    elif remark is not None and not remark.strip():
        raise Refusal("--remark is empty, and would match every record", WRONG_USAGE)
    # In a script, an empty scope is often an unset variable: alone it chooses nothing.
    elif not narrowed and query.operation is None and not query.scope:
        raise Refusal(
            "which records? Pass a KEY or several, or --digest with the twelve digits of a log line, or choose among "
            "those that are held: --operation, --scope, --older-than, --remark",
            WRONG_USAGE,
        )
    age = 0.0 if older_than is None else seconds_of(older_than, "--older-than")
    return Chosen(keys or (), digests or (), query, age, (remark or "").lower())


class Result(NamedTuple):
    """One record, and what came of it."""

    record: Record
    after: Record | None = None
    # Why it was left as it is; empty if it was not.
    problem: str = ""
    resolved: bool = False


class Work:
    """The records to resolve, and those that are resolved so far."""

    def __init__(self, guard: Guard, resolution: Resolution, who: str, reason: str, results: list[Result]) -> None:
        self.guard = guard
        self.resolution = resolution
        self.who = who
        self.reason = reason
        self.results = results

    @property
    def todo(self) -> list[Result]:
        return [result for result in self.results if not (result.problem or result.resolved)]

    @property
    def left(self) -> list[Result]:
        return [result for result in self.results if result.problem]

    @property
    def resolved(self) -> int:
        return sum(result.resolved for result in self.results)

    @property
    def question(self) -> str:
        count = len(self.todo)
        them = "it" if count == 1 else f"these {count:,} records"
        return f"Resolve {them} as {word(self.resolution)}, so that {meaning(self.resolution)}?"

    def do(self) -> None:
        """Resolve them one by one; if that is interrupted, say how far it came."""
        several = len(self.results) > 1
        with summed_up(
            "resolving", "records", lambda: f"{self.resolved:,} resolved" if several and self.resolved else ""
        ) as tell:
            for index, result in enumerate(self.results):
                if not result.problem:
                    self.results[index] = self._one(result.record)
                    tell(self.resolved)

    def _one(self, record: Record) -> Result:
        """Resolve a record if it is still the one that was found."""
        address, scope = record.address, record.address.scope or None
        try:
            self.guard.resolve(
                address.operation,
                address.key,
                self.resolution,
                by=self.who,
                reason=self.reason,
                scope=scope,
                only=record,
            )
        except (UsageError, InProgress) as error:
            # The options are right: the record has changed since it was found.
            return Result(record, problem=str(error))
        return Result(record, after=self.guard.read(address.operation, address.key, scope=scope), resolved=True)


def _problem(record: Record) -> str:
    """Return why it cannot be resolved; empty if it can."""
    running, earlier = still_running(record), behind_dead_bypass(record)
    if running is not None:
        return running
    if earlier is not None:
        return (
            f"{name(record)} is {earlier.state.value}, and a bypass of it died: there is nothing to resolve, and "
            "nothing was changed. Duplicates still get the earlier ending. Bypass it again in code to run it once more "
            "(with the same keys downstream), or `onefold forget` it for good"
        )
    if record.state is not State.HELD and not record.is_abandoned and not record.was_resolved:
        return f"{name(record)} is {record.state.value}, not held: there is nothing to resolve"
    return ""


def _warn_of_type(store: Browsable, work: Work) -> None:
    """Warn of a value unlike the other results of its operation: a function that returns those could not read it."""
    if not isinstance(work.resolution, Done):
        return
    value = work.resolution.value
    given = "missing" if value is None else json_type(value)
    for scope, operation in sorted({result.record.address.parts[:2] for result in work.todo}):
        sample = islice(records(store, Query(scope=scope, operation=operation)), SAMPLE)
        results = [result_of(record)[1] for record in sample if record.state is State.DONE and not record.was_resolved]
        kinds = sorted({json_type(result) for result in results if result is not None})
        if kinds and given not in kinds:
            then = "every duplicate gets None" if value is None else UNREADABLE
            note(f"careful: --value is {given}, and other results of {operation} are {' or '.join(kinds)}: {then}")


def _preview(found: Sequence[Record], *, err: bool) -> None:
    if len(found) == 1:
        print_record(found[0], err=err)
        return
    cells = [dict(zip(COLUMNS, row(record), strict=True)) for record in found[:SHOWN_MAX]]
    Listing(SHOWN, err=err).add([[line[column] for column in SHOWN] for line in cells])
    if len(found) > SHOWN_MAX:
        note(f"and {len(found) - SHOWN_MAX:,} more")


def _print(work: Work, format_: Format, *, dry_run: bool) -> None:
    """Print what was done so far, even if it ended early."""
    if len(work.results) == 1 and not (work.resolved or dry_run):
        return
    if format_ is Format.JSON:
        print_json(_document(work, dry_run=dry_run))
    elif dry_run:
        _preview([result.record for result in work.todo], err=False)
    else:
        more = f"; {meaning(work.resolution)}" if len(work.results) == 1 else ""
        for result in work.results:
            if result.resolved:
                typer.echo(f"{name(result.record)}: resolved as {word(work.resolution)}{more}")


def _document(work: Work, *, dry_run: bool) -> dict[str, Any]:
    return {
        "resolved": word(work.resolution),
        "by": work.who,
        "reason": work.reason,
        "dry_run": dry_run,
        "count": len(work.todo) if dry_run else work.resolved,
        "left": len(work.left),
        "records": [
            {
                "before": facts(result.record),
                "after": None if result.after is None else facts(result.after),
                "problem": result.problem or None,
            }
            for result in work.results
        ],
    }


def _sum_up(work: Work, *, dry_run: bool) -> None:
    for result in work.left:
        note(result.problem)
    if not work.results:
        note("nothing that is held matches: nothing was resolved. To correct what was resolved before, name its keys")
    elif dry_run or len(work.results) > 1:
        count, how = (len(work.todo), "would be ") if dry_run else (work.resolved, "")
        left = f"; {len(work.left):,} left as {'it is' if len(work.left) == 1 else 'they are'}" if work.left else ""
        note(f"{counted(count, 'record')} {how}resolved as {word(work.resolution)}: {meaning(work.resolution)}{left}")
