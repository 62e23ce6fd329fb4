"""`onefold stats`: count a store's records, by operation and state. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import msgspec
import typer

from onefold import OnefoldError, Record, State
from onefold.cli._common.find import watched
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    FAILED,
    Format,
    FormatOption,
    Listing,
    OperationOption,
    Refusal,
    ScopeOption,
    about,
    note,
    print_json,
)
from onefold.cli._common.samples import ExactOption, in_doubt, is_in_doubt, sample_of
from onefold.cli._common.store_option import StoresOption, Target, the_stores
from onefold.health.report import counted, in_bytes
from onefold.maintenance.pages import records
from onefold.stores.base import Inspectable, Query, Sample

# Operations are named by hand, a few dozen at most. If there are more, a key got into a name: they count as one.
OPERATIONS_MAX: Final = 1_000
OTHERS: Final = "(others)"

COLUMNS: Final = ("name", "operation", "records", *(state.value for state in State), "abandoned", "oldest", "newest")


class Count(msgspec.Struct):
    """The records of one operation: whole numbers are counted, others are estimated."""

    states: dict[State, float]
    # Running, with an ended lease.
    abandoned: float = 0
    oldest: float = 0.0
    newest: float = float("inf")

    @property
    def records(self) -> float:
        return sum(self.states.values())

    def add(self, record: Record, weight: float = 1) -> None:
        """Count one record, or as many as it stands for."""
        self.states[record.state] = self.states.get(record.state, 0) + weight
        if record.is_abandoned:
            self.abandoned += weight
        self.oldest = max(self.oldest, record.age)
        self.newest = min(self.newest, record.age)


class Stats(msgspec.Struct):
    """The content of one store."""

    name: str
    display_url: str
    operations: dict[str, Count]
    # Whether the numbers are those of a sample.
    estimated: bool = False
    # Facts that the server reports about itself; None: it does not report them.
    expired: int | None = None
    expired_for: float | None = None
    size: int | None = None

    @property
    def records(self) -> float:
        return sum(count.records for count in self.operations.values())


def stats(
    scope: ScopeOption = None,
    operation: OperationOption = None,
    exact: ExactOption = False,
    store: StoresOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Count the records of a store, or of several, by operation and state.

    A large store is estimated from a sample, and the numbers that are not counted begin with "~"; with --exact all
    records are read, page by page. It also shows the expired records that wait for a purge, and the bytes, if the
    server reports them.

    One of several that cannot be counted does not hide the others: it is named, and the exit status is 1.
    """
    documents, failed = [], False
    table, query = Listing(COLUMNS), Query(scope=scope, operation=operation)
    targets = the_stores(store)
    for target in targets:
        try:
            with opened(target.url_to_open()) as guard:
                found = _examined(guard.store, target, query, exact=exact)
        except (OnefoldError, Refusal) as error:
            if len(targets) == 1:
                raise
            failed, why = True, target.without_secrets(str(error))
            note(f"{target.name or target.place}: {why}")
            documents.append({"name": target.name or None, "store": target.place, "error": why})
            continue
        documents.append(document(found))
        if format is Format.TABLE:
            table.add([*_rows(found)])
            note(_said(found))
    if format is Format.JSON:
        print_json(documents)
    if failed:
        raise typer.Exit(FAILED)


def _examined(store: Any, target: Target, query: Query, *, exact: bool) -> Stats:
    sample = None if exact else sample_of(store, query)
    if sample is None:
        found = Stats(target.name, target.place, count(watched(records(store, query), "counting")))
    elif sample.complete:
        found = Stats(target.name, target.place, count(sample.records))
    else:
        found = Stats(target.name, target.place, estimate(sample, in_doubt(store, query)), estimated=True)
    facts = store.facts() if isinstance(store, Inspectable) else {}
    found.expired = _told(facts, "expired_count")
    waited = facts.get("expired_for")
    found.expired_for = float(waited) if isinstance(waited, (int, float)) else None
    found.size = size_of(facts)
    return found


def estimate(sample: Sample, counted_exactly: Iterable[Record] | None) -> dict[str, Count]:
    """Return the estimates of each operation. Records in doubt are counted, if all of them are known."""
    drawn = zip(sample.records, sample.weights, strict=True)
    if counted_exactly is None:
        return _added(drawn)
    others = (pair for pair in drawn if not is_in_doubt(pair[0]))
    return _added(chain(others, ((record, 1) for record in counted_exactly)))


def count(found: Iterable[Record]) -> dict[str, Count]:
    """Return the counts of each operation, in bounded memory."""
    return _added((record, 1) for record in found)


def _added(found: Iterable[tuple[Record, float]]) -> dict[str, Count]:
    counts: dict[str, Count] = {}
    for record, weight in found:
        name = record.address.operation
        if name not in counts and len(counts) >= OPERATIONS_MAX:
            name = OTHERS
        counts.setdefault(name, Count({})).add(record, weight)
    return dict(sorted(counts.items()))


def size_of(facts: Mapping[str, Any]) -> int | None:
    """Return the bytes of the records and their indexes, if a server knows them without a scan."""
    # A Redis server only knows the total size of all its keys.
    return _told(facts, "table_bytes") or _told(facts, "file_bytes")


def _told(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return int(value) if isinstance(value, (int, float)) else None


def _rows(found: Stats) -> Iterator[tuple[str, ...]]:
    for operation, one in found.operations.items():
        numbers = (one.records, *(one.states.get(state, 0) for state in State), one.abandoned)
        yield (found.name, operation, *map(_shown, numbers), about(one.oldest), about(one.newest))


def _rounded(number: float) -> int:
    """Return a number that was counted as it is, and an estimate with the digits that it deserves."""
    return number if isinstance(number, int) else round(float(f"{number:.3g}"))


def _shown(number: float) -> str:
    return f"{'' if isinstance(number, int) else '~'}{_rounded(number)}"


def _said(found: Stats) -> str:
    how = " (estimated from a sample; --exact counts them)" if found.estimated else ""
    about_ = "about " if found.estimated else ""
    parts = [f"{found.display_url}: {about_}{counted(_rounded(found.records), 'record')}{how}"]
    held = sum(one.states.get(State.HELD, 0) for one in found.operations.values())
    if held:
        parts.append(f"{_rounded(held):,} of them held (onefold held)")
    if found.expired:
        since = f", the oldest for {about(found.expired_for)}" if found.expired_for else ""
        parts.append(f"{found.expired:,} expired{since} (onefold purge)")
    if found.size is not None:
        parts.append(in_bytes(found.size))
    return ", ".join(parts)


def document(found: Stats) -> dict[str, Any]:
    """Return the document for programs. Durations are seconds."""
    return {
        "name": found.name or None,
        "store": found.display_url,
        "records": _rounded(found.records),
        "estimated": found.estimated,
        "operations": [
            {
                "operation": operation,
                "records": _rounded(one.records),
                **{state.value: _rounded(one.states.get(state, 0)) for state in State},
                "abandoned": _rounded(one.abandoned),
                "oldest": round(one.oldest, 3),
                "newest": round(one.newest, 3),
            }
            for operation, one in found.operations.items()
        ],
        "expired": found.expired,
        "expired_for": None if found.expired_for is None else round(found.expired_for, 3),
        "bytes": found.size,
    }
