"""`onefold stats`: count a store's records, by operation and state. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
from onefold.cli._common.store_option import StoresOption, Target, the_stores
from onefold.health.report import counted, in_bytes
from onefold.maintenance.pages import records
from onefold.stores.base import Inspectable, Query

# Operations are named by hand, a few dozen at most. If there are more, a key got into a name: they count as one.
OPERATIONS_MAX: Final = 1_000
OTHERS: Final = "(others)"

COLUMNS: Final = ("name", "operation", "records", *(state.value for state in State), "abandoned", "oldest", "newest")


class Count(msgspec.Struct):
    """The records of one operation."""

    states: dict[State, int]
    # Running, with an ended lease.
    abandoned: int = 0
    oldest: float = 0.0
    newest: float = float("inf")

    @property
    def records(self) -> int:
        return sum(self.states.values())

    def add(self, record: Record) -> None:
        self.states[record.state] = self.states.get(record.state, 0) + 1
        self.abandoned += record.is_abandoned
        self.oldest = max(self.oldest, record.age)
        self.newest = min(self.newest, record.age)


class Stats(msgspec.Struct):
    """The content of one store."""

    name: str
    display_url: str
    operations: dict[str, Count]
    # Facts that the server reports about itself; None: it does not report them.
    expired: int | None = None
    expired_for: float | None = None
    size: int | None = None

    @property
    def records(self) -> int:
        return sum(count.records for count in self.operations.values())


def stats(
    scope: ScopeOption = None,
    operation: OperationOption = None,
    store: StoresOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Count the records of a store, or of several, by operation and state.

    It goes through all of them, page by page. It also shows the expired records that wait for a purge, and the bytes,
    if the server reports them.

    One of several that cannot be counted does not hide the others: it is named, and the exit status is 1.
    """
    documents, failed = [], False
    table, query = Listing(COLUMNS), Query(scope=scope, operation=operation)
    targets = the_stores(store)
    for target in targets:
        try:
            with opened(target.url_to_open()) as guard:
                found = _examined(guard.store, target, query)
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


def _examined(store: Any, target: Target, query: Query) -> Stats:
    found = Stats(target.name, target.place, count(watched(records(store, query), "counting")))
    facts = store.facts() if isinstance(store, Inspectable) else {}
    found.expired = _told(facts, "expired_count")
    waited = facts.get("expired_for")
    found.expired_for = float(waited) if isinstance(waited, (int, float)) else None
    found.size = size_of(facts)
    return found


def count(found: Iterable[Record]) -> dict[str, Count]:
    """Return the counts of each operation, in bounded memory."""
    counts: dict[str, Count] = {}
    for record in found:
        name = record.address.operation
        if name not in counts and len(counts) >= OPERATIONS_MAX:
            name = OTHERS
        counts.setdefault(name, Count({})).add(record)
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
        yield (found.name, operation, *map(str, numbers), about(one.oldest), about(one.newest))


def _said(found: Stats) -> str:
    parts = [f"{found.display_url}: {counted(found.records, 'record')}"]
    held = sum(one.states.get(State.HELD, 0) for one in found.operations.values())
    if held:
        parts.append(f"{held:,} of them held (onefold held)")
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
        "records": found.records,
        "operations": [
            {
                "operation": operation,
                "records": one.records,
                **{state.value: one.states.get(state, 0) for state in State},
                "abandoned": one.abandoned,
                "oldest": round(one.oldest, 3),
                "newest": round(one.newest, 3),
            }
            for operation, one in found.operations.items()
        ],
        "expired": found.expired,
        "expired_for": None if found.expired_for is None else round(found.expired_for, 3),
        "bytes": found.size,
    }
