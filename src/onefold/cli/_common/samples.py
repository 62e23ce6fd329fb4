"""Look at a bounded part of a store: for commands that answer at once, however many records there are."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, NamedTuple

import typer

from onefold import Record, State
from onefold.stores.base import Indexed, Query, Sample, Sampling

ExactOption = Annotated[
    bool, typer.Option("--exact", help="Read every record, however long it takes, instead of a part of a large store.")
]

# How many records are sampled: the share of an operation is known to within two per cent.
SAMPLE_MAX: Final = 5_000

# How many unsettled ones are read, and how many of the newest.
UNSETTLED_MAX: Final = 10_000
NEWEST_MAX: Final = 10_000


class Looked(NamedTuple):
    """What was looked at, and whether it was everything that matches the query."""

    records: list[Record]
    complete: bool


def sample_of(store: Any, query: Query) -> Sample | None:
    """Return a sample of the records that match; None if this store draws none."""
    return store.sample(query, SAMPLE_MAX) if isinstance(store, Sampling) else None


def is_in_doubt(record: Record) -> bool:
    """Return whether it is running or held and never expires: an index finds all of these."""
    return record.state in (State.RUNNING, State.HELD) and math.isinf(record.ttl_left)


def unsettled(store: Any, query: Query) -> list[Record] | None:
    """Return every record in doubt, with others that expire late; None if no index finds them, or too many of them."""
    found = store.unsettled(UNSETTLED_MAX) if isinstance(store, Indexed) else None
    if found is None or (len(found) == UNSETTLED_MAX and all(map(is_in_doubt, found))):
        return None
    return list(Sample.of(((one, 1.0) for one in found), query, complete=False).records)


def in_doubt(store: Any, query: Query) -> list[Record] | None:
    """Return every record in doubt; None if the store has no index to find them, or if there are too many."""
    found = unsettled(store, query)
    return None if found is None else [one for one in found if is_in_doubt(one)]


def look_around(store: Sampling, query: Query) -> Looked:
    """Return all records that match if they are few, else those that people look for: unsettled, new, and some more."""
    sample = store.sample(query, SAMPLE_MAX)
    if sample.complete:
        return Looked(list(sample.records), complete=True)
    seen = list(sample.records)
    if isinstance(store, Indexed):
        seen += store.unsettled(UNSETTLED_MAX) + store.newest(NEWEST_MAX)
    if query.operation is not None and query.scope is None:
        # Most stores have no scopes, and the records of one operation in one scope stand together.
        seen += store.sample(query._replace(scope=""), SAMPLE_MAX).records
    distinct = {one.address: (one, 1.0) for one in seen}
    return Looked(list(Sample.of(distinct.values(), query, complete=False).records), complete=False)
