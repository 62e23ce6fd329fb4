"""Iterate over all records of a store, page by page: a store of any size in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onefold import Record
from onefold.stores.base import Browsable, Query

# Pages start small and grow, because every page costs a query; they shrink while their content is heavy. Light pages
# may be followed by a heavy one, which bounds their size.
PAGE_FIRST: Final = 100
PAGE_MAX: Final = 1_000
PAGE_BYTES: Final = 16 * 2**20


def records(
    store: Browsable,
    query: Query,
    *,
    first: int = PAGE_FIRST,
    most: int = PAGE_MAX,
    heavy: int = PAGE_BYTES,
) -> Iterator[Record]:
    """Yield all records that match the query, in the order of their addresses; expired ones are left out."""
    size = first
    while True:
        page = store.browse(query, size)
        # A store may still return an expired record; it counts as gone.
        yield from (record for record in page if not record.is_expired)
        if len(page) < size:
            return
        query = query._replace(after=page[-1].address)
        weight = sum(map(weight_of, page))
        size = max(size // 2, 1) if weight > heavy else min(size * 2, most)


def weight_of(record: Record) -> int:
    """Return the size of the fields that can be large."""
    return len(record.result or b"") + len(record.notes or b"")
