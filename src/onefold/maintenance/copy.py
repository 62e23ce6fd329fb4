"""Copy records from one store to another, so that a change of the store's URL forgets nothing.

It reads the old store and never writes to it. Records that the new store already has are not overwritten, so it can be
run again at any time: after an interrupt, and for new records. Two cases are exceptions: records that a worker is
running right now stay where they are, and unfinished records in the new store are finished there when the old store has
finished them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from onefold import Record, State, UsageError
from onefold.maintenance.pages import records, weight_of
from onefold.stores.base import Batching, Browsable, Entry, Gone, Query

# One round trip takes this many, and this many bytes: below a server's limit for one message.
BATCH_MAX: Final = 500
BATCH_BYTES: Final = 2 * 2**20

ENDED: Final = (State.DONE, State.FAILED)


class Tally(msgspec.Struct):
    """The count of records so far, by what happened to them."""

    copied: int = 0
    # Copied before while unfinished, and finished in the old store since.
    updated: int = 0
    there: int = 0
    # A worker is running them: they are not copied.
    running: int = 0
    # The new store does not take them; the reason for the first.
    refused: int = 0
    why: str = ""

    @property
    def seen(self) -> int:
        return self.copied + self.updated + self.there + self.running + self.refused

    @property
    def complete(self) -> bool:
        """Return whether the new store now has everything that the old one has."""
        return not self.running and not self.refused


def copying(old: Browsable, new: Any, query: Query, *, tally: Tally, dry_run: bool = False) -> Iterator[Tally]:
    """Copy the records that the query matches, batch by batch; yield the tally after each. `dry_run` only counts.

    `new` is a `Store` and `Browsable`. Raise `StoreUnavailable` if one of the two does not answer.
    """
    pairs = beside(records(old, query), records(new, query))
    for batch in batches(pairs):
        wanted: list[Record] = []
        for record, found in batch:
            if record.is_live:
                tally.running += 1
            elif found is None:
                wanted.append(record)
            else:
                _settle(new, record, found, tally, dry_run=dry_run)
        if dry_run:
            tally.copied += len(wanted)
        else:
            _copy(new, wanted, tally)
        yield tally


def beside(ours: Iterable[Record], theirs: Iterator[Record]) -> Iterator[tuple[Record, Record | None]]:
    """Yield each of our records with theirs of the same address; both come in the order of addresses."""
    other = next(theirs, None)
    for record in ours:
        while other is not None and other.address.parts < record.address.parts:
            other = next(theirs, None)
        yield record, other if other is not None and other.address == record.address else None


def batches(pairs: Iterator[tuple[Record, Record | None]]) -> Iterator[list[tuple[Record, Record | None]]]:
    """Yield the pairs in lists that fit into one round trip."""
    batch: list[tuple[Record, Record | None]] = []
    weight = 0
    for pair in pairs:
        batch.append(pair)
        weight += weight_of(pair[0])
        if len(batch) == BATCH_MAX or weight >= BATCH_BYTES:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def written(new: Any, entries: Sequence[Entry]) -> list[Record | Gone | UsageError | None]:
    """Write entries whose addresses are free; return, for each, the existing record, or why the store refuses it."""
    answers: list[Record | Gone | UsageError | None] = []
    for start in range(0, len(entries), BATCH_MAX):
        answers += _written_together(new, entries[start : start + BATCH_MAX])
    return answers


def _written_together(new: Any, entries: Sequence[Entry]) -> list[Record | Gone | UsageError | None]:
    if isinstance(new, Batching):
        try:
            return [*new.claim_all(entries)]
        except UsageError:
            # One of them may be too large for this store. The others are not.
            pass
    return [_written_alone(new, entry) for entry in entries]


def _written_alone(new: Any, entry: Entry) -> Record | Gone | UsageError | None:
    try:
        found: Record | Gone | None = new.claim(entry)
    except UsageError as error:
        return error
    return found


def _copy(new: Any, wanted: list[Record], tally: Tally) -> None:
    answers = written(new, [record.as_moved() for record in wanted])
    for record, answer in zip(wanted, answers, strict=True):
        match answer:
            case None:
                tally.copied += 1
            case UsageError():
                tally.refused += 1
                tally.why = tally.why or str(answer)
            case Record():
                # It was written meanwhile.
                _settle(new, record, answer, tally, dry_run=False)
            case _:
                tally.there += 1


def _settle(new: Any, record: Record, found: Record, tally: Tally, *, dry_run: bool) -> None:
    if not _has_ended_since(record, found):
        tally.there += 1
    elif dry_run or new.claim(record.as_moved(), replacing=found) is None:
        tally.updated += 1
    else:
        tally.there += 1


def _has_ended_since(record: Record, found: Record) -> bool:
    """Return whether the old store has finished a record that is unfinished, and would run again, in the new one."""
    unfinished = found.state not in ENDED and not found.is_live
    # A bypass is a deliberate second run: the end of the first one says nothing about it.
    return record.state in ENDED and unfinished and found.bypasses <= record.bypasses
