"""Find records by key or digest, page by page: a store of any size in bounded memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from onefold import Record
from onefold.cli._common.output import WRONG_USAGE, Listing, Refusal, counting, visible
from onefold.cli._common.record_text import COLUMNS, STYLES, row
from onefold.maintenance import pages
from onefold.stores.base import Browsable, Query

PAGE_FIRST: Final = pages.PAGE_FIRST
PAGE_MAX: Final = pages.PAGE_MAX
PAGE_BYTES: Final = pages.PAGE_BYTES

# How many candidates are listed if a key names several records.
CANDIDATES_MAX: Final = 20

DIGEST: Final = re.compile(r"[0-9a-f]{12}")


def records(store: Browsable, query: Query) -> Iterator[Record]:
    """Yield all records that match the query, in the order of their addresses."""
    return pages.records(store, query, first=PAGE_FIRST, most=PAGE_MAX, heavy=PAGE_BYTES)


def watched(found: Iterable[Record], what: str) -> Iterator[Record]:
    """Yield the records, and show their count on a terminal meanwhile."""
    with counting(what, "records") as tell:
        for count, record in enumerate(found, start=1):
            if count % PAGE_FIRST == 0:
                tell(count)
            yield record


class Wanted(NamedTuple):
    """The records that a person has named: by a key or by a digest, never by a word that could be both."""

    key: str | None
    digest: str | None
    operation: str | None
    scope: str | None

    def __str__(self) -> str:
        what = f"the digest {self.digest}" if self.key is None else visible(self.key)
        where = "" if self.operation is None else f" in operation {visible(self.operation)}"
        whose = "" if self.scope is None else f" in scope {visible(self.scope)!r}"
        return f"{what}{where}{whose}"

    @property
    def query(self) -> Query:
        return Query(scope=self.scope, operation=self.operation)


def wanted(key: str | None, digest: str | None, operation: str | None, scope: str | None) -> Wanted:
    """Return what the options name. Raises `Refusal` before any store is opened."""
    if (key is None) == (digest is None):
        raise Refusal("which record? Pass its KEY, or --digest with the twelve digits of a log line", WRONG_USAGE)
    if digest is not None and not DIGEST.fullmatch(digest.lower()):
        raise Refusal(f"--digest {visible(digest)} is not a digest: it has twelve hexadecimal digits", WRONG_USAGE)
    return Wanted(key, None if digest is None else digest.lower(), operation, scope)


def find(store: Browsable, which: Wanted, *, or_digest: bool = False) -> Iterator[Record]:
    """Yield the records of this key in every operation and scope, or of this digest.

    `or_digest`: if no record has the key, it may be a digest. Only for reading: a tenant can choose a key that is the
    digest of another's record.
    """
    if which.key is None:
        return iter(_with_digest(store, which.query, which.digest or ""))
    found = records(store, which.query._replace(key=which.key))
    first = next(found, None)
    if first is not None:
        return itertools.chain([first], found)
    digest = which.key.lower()
    return iter(_with_digest(store, which.query, digest) if or_digest and DIGEST.fullmatch(digest) else [])


def _with_digest(store: Browsable, query: Query, digest: str) -> list[Record]:
    """Scan all records, as no store knows the digest; a second record with the same digest is very unlikely."""
    seen = watched(records(store, query), f"looking for {digest}")
    return [record for record in seen if record.address.digest == digest]


def find_one(store: Browsable, which: Wanted) -> Record:
    """Return the one record of this key or digest. Raises `Refusal` if there is none, or more than one."""
    found = list(itertools.islice(find(store, which), CANDIDATES_MAX + 1))
    if not found:
        raise no_record(which)
    if len(found) > 1:
        Listing(COLUMNS, styles=STYLES, err=True).add([row(record) for record in found[:CANDIDATES_MAX]])
        count = f"{len(found)}" if len(found) <= CANDIDATES_MAX else f"more than {CANDIDATES_MAX}"
        raise Refusal(
            f"{which} names {count} records, and nothing was changed. Say which one with --operation and "
            "--scope ('' for none), or by its digest: --digest",
            WRONG_USAGE,
        )
    return found[0]


def no_record(which: Wanted) -> Refusal:
    digest = which.key is not None and DIGEST.fullmatch(which.key.lower())
    hint = f". If it is a digest from a log: --digest {which.key}" if digest else ""
    return Refusal(f"there is no record of {which}{hint}")
