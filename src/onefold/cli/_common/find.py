"""Find records by key or digest, page by page: a store of any size in bounded memory."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from onefold import Record
from onefold.cli._common.output import WRONG_USAGE, Listing, Refusal, counting, visible
from onefold.cli._common.record_text import COLUMNS, STYLES, row
from onefold.cli._common.samples import look_around
from onefold.maintenance import pages
from onefold.stores.base import Address, Browsable, Query, Sampling

PAGE_FIRST: Final = pages.PAGE_FIRST
PAGE_MAX: Final = pages.PAGE_MAX
PAGE_BYTES: Final = pages.PAGE_BYTES

# How many candidates are listed if a key names several records.
CANDIDATES_MAX: Final = 20

# If nothing matches, this many records are read, and this many of their operations are named: one page, and one line.
LOOKED_AT_MAX: Final = 1_000
NAMED_MAX: Final = 10

# In how many operations and scopes a key that looks like a digest is looked up.
PLACES_MAX: Final = 100

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
    """Return the records that the options name. Raise `Refusal` before any store is opened."""
    if (key is None) == (digest is None):
        raise Refusal("which record? Pass its KEY, or --digest with the twelve digits of a log line", WRONG_USAGE)
    if digest is not None and not DIGEST.fullmatch(digest.lower()):
        raise Refusal(f"--digest {visible(digest)} is not a digest, which has twelve hexadecimal digits", WRONG_USAGE)
    return Wanted(key, None if digest is None else digest.lower(), operation, scope)


def find_to_read(store: Browsable, which: Wanted, *, exact: bool) -> Iterator[Record]:
    """Yield the records of this key, or of this digest; a key that no record has may be a digest.

    Only for reading: a tenant can choose a key that is the digest of another's record. In a large store a digest is
    looked for among some of the records, unless `exact` is set. Raise `Refusal` if it is not among them.
    """
    digest = which.digest if which.key is None else which.key.lower()
    if exact or not isinstance(store, Sampling) or digest is None or not DIGEST.fullmatch(digest):
        return find(store, which, or_digest=True)
    looked = look_around(store, which.query)
    if which.key is not None:
        places = list(dict.fromkeys(one.address.parts[:2] for one in looked.records))[:PLACES_MAX]
        with_key = _read(store, [Address(*place, which.key) for place in places])
        if with_key:
            return iter(with_key)
    seen = watched(looked.records, f"looking for {digest}")
    found = _read(store, [one.address for one in seen if one.address.digest == digest])
    if not found and not looked.complete:
        raise _not_seen(which, len(looked.records))
    return iter(found)


def _read(store: Any, addresses: Iterable[Address]) -> list[Record]:
    """Return the whole records: a sample leaves out what may be large."""
    return [record for record in map(store.read, addresses) if record is not None]


def _not_seen(which: Wanted, count: int) -> Refusal:
    return Refusal(
        f"there is no record of {which} among the {count:,} that were looked at (what is held or running, the newest, "
        "and a sample of the others), but the store has more. Narrow it down with --operation and --scope ('' for "
        "none), or read all of them with --exact, which takes a while"
    )


def find(store: Browsable, which: Wanted, *, or_digest: bool = False) -> Iterator[Record]:
    """Yield the records of this key in every operation and scope, or of this digest.

    With `or_digest`, a key that no record has may be a digest: see `find_to_read`.
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
    return _only(list(itertools.islice(find(store, which), CANDIDATES_MAX + 1)), which)


def find_each(store: Browsable, keys: Sequence[str], digests: Sequence[str], query: Query) -> list[Record]:
    """Return the one record of each key and digest. Raises `Refusal` if one has none, or more than one."""
    which = [wanted(key, None, query.operation, query.scope) for key in dict.fromkeys(keys)]
    found = [find_one(store, one) for one in which]
    if digests:
        sought = {one.digest: one for one in (wanted(None, one, query.operation, query.scope) for one in digests)}
        seen = watched(records(store, query), f"looking for {', '.join(map(str, sought))}")
        matching = [record for record in seen if record.address.digest in sought]
        found += [_only([x for x in matching if x.address.digest == digest], sought[digest]) for digest in sought]
    return list({record.address: record for record in found}.values())


def _only(found: Sequence[Record], which: Wanted) -> Record:
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


def check_spelling(store: Browsable, query: Query, *, done: str) -> None:
    """Refuse a scope or operation that no record has, whatever its state: "nothing is held" would hide the typo."""
    named = query._replace(state=None)
    if not _has_records(store, named) and _has_records(store, Query()):
        raise Refusal(unmatched(store, named, done=done))


def _has_records(store: Browsable, query: Query) -> bool:
    return next(iter(records(store, query)), None) is not None


def unmatched(store: Browsable, query: Query, *, of: str = "", done: str) -> str:
    """Return a message that no record has the scope or operation of a query; empty if the query names neither."""
    options = [("--scope", query.scope), ("--operation", query.operation)]
    named = " ".join(f"{option} {shlex.quote(visible(value))}" for option, value in options if value is not None)
    if not named:
        return ""
    said = f"no record{of and f' of {of}'} matches {named}: nothing was {done}"
    found = list(itertools.islice(records(store, query._replace(operation=None)), LOOKED_AT_MAX + 1))
    operations = sorted({visible(record.address.operation) for record in found})
    if not operations and query.scope is not None:
        check = "A scope is matched exactly, and `onefold ls` shows those in use: check its spelling, and the store"
        return f"{said}. {check}"
    if query.operation is None or not operations:
        return said
    if len(found) <= LOOKED_AT_MAX and len(operations) <= NAMED_MAX:
        return f"{said}. Its operations are {', '.join(operations)}"
    are = "is" if len(operations[:NAMED_MAX]) == 1 else "are"
    return f"{said}. Among its operations {are} {', '.join(operations[:NAMED_MAX])}; `onefold stats` names all"
