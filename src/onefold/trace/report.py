"""Build a report from logs: the traffic and the leaks of each hop in each hour. Exact, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import msgspec

from onefold import UsageError
from onefold.health.report import counted
from onefold.trace.leaks import Leak, LeakKind, Repeated, of_keys, of_message
from onefold.trace.line_database import LineDatabase
from onefold.trace.lines import HOPS_MAX, HOUR, Progress, Tally, read

# How many of each kind are shown at each hop: enough to look one up in the logs.
EXAMPLES_MAX: Final = 10

# A log of ten years from ten hops. More means invalid times.
CELLS_MAX: Final = 1_000_000

EVERY: Final = tuple(LeakKind)


class Cell(msgspec.Struct, gc=False):
    """One hop in one hour; `hour` is the second at which it begins."""

    hop: str
    hour: int
    lines: int = 0
    # Distinct ones.
    keys: int = 0
    # For producers: how many lines, with how many distinct keys.
    sent: int = 0
    sent_keys: int = 0
    replaced: int = 0
    requests: int = 0
    resent: int = 0
    # The resent ones that another instance of the producer had sent before.
    restarted: int = 0
    reminted: int = 0

    def leaks(self, kind: LeakKind) -> int:
        found: int = getattr(self, kind.value)
        return found


class Report(msgspec.Struct):
    """The content of the logs."""

    tally: Tally
    hops: list[str]
    cells: list[Cell]
    # Some of each kind.
    examples: dict[str, list[dict[str, Any]]]
    checks: list[str]
    # Ids with so many keys that they cannot be ids; only some of their keys were examined.
    crowded: list[str]

    def count(self, kind: LeakKind, hop: str | None = None) -> int:
        return sum(cell.leaks(kind) for cell in self.cells if hop in (None, cell.hop))

    @property
    def clean(self) -> bool:
        return not any(self.count(kind) for kind in LeakKind)


def examine(
    files: Sequence[str],
    *,
    order: Sequence[str] = (),
    checks: Collection[LeakKind] = EVERY,
    progress: Progress = lambda _bytes: None,
) -> Report:
    """Read all logs, and look for leaks. `order` lists the hops as messages pass them; without it, time decides.

    Raise `OSError` for a file that cannot be read, `UsageError` for one that is not a log of hops.
    """
    tally = Tally()
    with LineDatabase() as database:
        for batch in read(files, tally, progress):
            database.add(batch)
        if not tally.lines:
            raise UsageError(_nothing(files, tally))
        return Examination(database, order, checks).report(tally)


class Examination:
    """One examination of a filled database."""

    def __init__(self, database: LineDatabase, order: Sequence[str], checks: Collection[LeakKind]) -> None:
        self._database, self._checks = database, checks
        self._ranks = {hop: float(rank) for rank, hop in enumerate(order)}
        self._cells: dict[tuple[str, int], Cell] = {}
        self._examples: dict[str, list[dict[str, Any]]] = {kind.value: [] for kind in EVERY if kind in checks}
        self._shown: Counter[tuple[LeakKind, str]] = Counter()
        self._crowded: list[str] = []

    def report(self, tally: Tally) -> Report:
        hops = self._take_hours()
        _check_order(list(self._ranks), hops)
        for repeated in of_keys(self._database.by_key()):
            self._count(repeated)
        if {LeakKind.REPLACED, LeakKind.REMINTED} & set(self._checks):
            for column in ("delivery", "request"):
                self._database.keep(self._of_messages(column))
            self._take_kept()
        positions = {hop: position for position, hop in enumerate(hops)}
        cells = sorted(self._cells.values(), key=lambda cell: (cell.hour, positions[cell.hop]))
        return Report(tally, hops, cells, self._examples, [kind.value for kind in self._checks], self._crowded)

    def _take_hours(self) -> list[str]:
        """Count every hop and hour; return the hops in the order of the logs."""
        firsts: dict[str, int] = {}
        for hop, hour, first, *counts in self._database.hours():
            firsts[hop] = min(firsts.get(hop, first), first)
            if len(firsts) > HOPS_MAX:
                raise UsageError(f"more than {HOPS_MAX:,} hops, such as {hop[:40]!r}: a hop is the name of a place")
            if len(self._cells) >= CELLS_MAX:
                raise UsageError(f"lines from more than {CELLS_MAX:,} hours: is `ts` a time?")
            self._cells[hop, hour] = Cell(hop, hour * HOUR, *counts)
        return sorted(firsts, key=firsts.__getitem__)

    def _count(self, one: Repeated) -> None:
        cell = self._cells[one.hop, one.hour]
        if one.requests and LeakKind.REQUESTS in self._checks:
            cell.requests += 1
            self._show(LeakKind.REQUESTS, one, {"requests": list(one.requests)})
        if one.resent and LeakKind.RESENT in self._checks:
            cell.resent += one.resent
            cell.restarted += one.restarted
            self._show(LeakKind.RESENT, one, {"times": one.resent, "restarted": one.restarted > 0})

    def _show(self, kind: LeakKind, one: Repeated, more: dict[str, Any]) -> None:
        self._shown[kind, one.hop] += 1
        if self._shown[kind, one.hop] <= EXAMPLES_MAX:
            at = {"hop": one.hop, "hour": one.hour * HOUR}
            self._examples[kind.value].append({**at, "scope": one.scope, "key": one.key, **more})

    def _of_messages(self, column: str) -> Iterator[Leak]:
        for id_, seen, crowded in self._database.by_message(column):
            if crowded and len(self._crowded) < EXAMPLES_MAX:
                self._crowded.append(id_)
            leaks = of_message(seen, self._ranks, id_, tries=column == "delivery")
            yield from (leak for leak in leaks if leak.kind in self._checks)

    def _take_kept(self) -> None:
        for word, hop, hour, count in self._database.kept():
            cell = self._cells[hop, hour]
            if word == LeakKind.REPLACED:
                cell.replaced += count
            else:
                cell.reminted += count
        for kind in (LeakKind.REPLACED, LeakKind.REMINTED):
            if kind not in self._checks:
                continue
            for hop, ts, before, after, previous, id_ in self._database.examples(kind.value, EXAMPLES_MAX):
                came = {} if previous is None else {"after": previous}
                shown = {"hop": hop, **came, "ts": ts, "id": id_, "had": before, "has": after}
                self._examples[kind.value].append(shown)


def _check_order(order: Sequence[str], hops: Sequence[str]) -> None:
    for hop in order:
        if hop not in hops:
            raise UsageError(f"--order names {hop!r}, and the logs have the hops {', '.join(sorted(hops)[:20])}")


def _nothing(files: Sequence[str], tally: Tally) -> str:
    broken = tally.first
    first = (
        ""
        if broken is None
        else f" The first that cannot be read is line {broken.number} of {broken.file}: {broken.why}"
    )
    return (
        f"there is no line of a hop in {', '.join(files)}: {counted(tally.broken, 'line')} broken, {tally.others:,} "
        f"about something else, {tally.blank:,} blank.{first}"
    )
