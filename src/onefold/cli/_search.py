"""Records by key or digest, and page by page: a store of any size in a bounded memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final

from onefold import Record
from onefold.cli._shared import WRONG_USAGE, Listing, Refusal, counting, visible
from onefold.cli._words import COLUMNS, STYLES, row
from onefold.retention import pages
from onefold.stores.base import Browsable, Query

PAGE_FIRST: Final = pages.PAGE_FIRST
PAGE_MAX: Final = pages.PAGE_MAX
PAGE_BYTES: Final = pages.PAGE_BYTES

# As many candidates are listed where a key names several records.
CANDIDATES_MAX: Final = 20

DIGEST: Final = re.compile(r"[0-9a-f]{12}")


def records(store: Browsable, query: Query) -> Iterator[Record]:
    """All that the query asks for, in the order of addresses."""
    return pages.records(store, query, first=PAGE_FIRST, most=PAGE_MAX, heavy=PAGE_BYTES)


def watched(found: Iterable[Record], what: str) -> Iterator[Record]:
    """The same records, with their count on a terminal while somebody waits for them."""
    with counting(what, "records") as tell:
        for count, record in enumerate(found, start=1):
            if count % PAGE_FIRST == 0:
                tell(count)
            yield record


def find(store: Browsable, key: str, *, operation: str | None, scope: str | None) -> Iterator[Record]:
    """The records of this key in every operation and scope; where there is none, those of this digest."""
    query = Query(scope=scope, operation=operation)
    found = records(store, query._replace(key=key))
    first = next(found, None)
    if first is not None:
        return itertools.chain([first], found)
    return iter(_with_digest(store, query, key.lower()) if DIGEST.fullmatch(key.lower()) else [])


def _with_digest(store: Browsable, query: Query, digest: str) -> list[Record]:
    """No store knows the digest, so all records are looked at; a second one of the same digest is very unlikely."""
    seen = watched(records(store, query), f"looking for {digest}")
    return [record for record in seen if record.address.digest == digest]


def find_one(store: Browsable, key: str, *, operation: str | None, scope: str | None) -> Record:
    """The one record of this key. Raises `Refusal` where there is none, or more than one."""
    found = list(itertools.islice(find(store, key, operation=operation, scope=scope), CANDIDATES_MAX + 1))
    if not found:
        raise no_record(key, operation=operation, scope=scope)
    if len(found) > 1:
        Listing(COLUMNS, styles=STYLES, err=True).add([row(record) for record in found[:CANDIDATES_MAX]])
        count = f"{len(found)}" if len(found) <= CANDIDATES_MAX else f"more than {CANDIDATES_MAX}"
        raise Refusal(
            f"{visible(key)} names {count} records, and nothing was changed. Say which one with --operation and "
            "--scope ('' for none), or by its digest",
            WRONG_USAGE,
        )
    return found[0]


def no_record(key: str, *, operation: str | None, scope: str | None) -> Refusal:
    where = "" if operation is None else f" in operation {visible(operation)}"
    whose = "" if scope is None else f" in scope {visible(scope)!r}"
    return Refusal(f"there is no record of {visible(key)}{where}{whose}")
