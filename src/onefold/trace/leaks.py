"""Detect leaks: pure rules over the few lines that one key, or one message, has left at its hops.

| kind | what happened |
| --- | --- |
| replaced | a message has a key at a hop that it had at no hop before |
| requests | at one hop, one key came with more than one request id |
| resent | a producer sent one key more than once: more was sent than there are keys |
| reminted | one message has several keys at its first hop: the producer minted a new one for it |
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple

ENOUGH: Final = 2


class LeakKind(enum.StrEnum):
    REPLACED = "replaced"
    REQUESTS = "requests"
    RESENT = "resent"
    REMINTED = "reminted"


class Seen(NamedTuple):
    """A key that a message had at a hop, and when it was first seen there."""

    hop: str
    key: str
    ts: float


class Leak(NamedTuple):
    """One leak, and when it shows. `before` and `after` are digests of keys; `id` is the message or request."""

    kind: LeakKind
    hop: str
    ts: float
    before: str
    after: str
    # The previous hop, if there is one.
    previous: str | None = None
    id: str = ""


def of_message(seen: Sequence[Seen], ranks: Mapping[str, float], id_: str, *, tries: bool) -> Iterator[Leak]:
    """Yield the leaks of one message, from all keys that it had anywhere.

    The hops are in the order of `ranks`, and those without a rank in the order of time. With `tries`, the id stays the
    same from attempt to attempt, so its first hop must have one key for it.
    """
    hops: dict[str, list[Seen]] = {}
    for one in sorted(seen, key=lambda one: one.ts):
        hops.setdefault(one.hop, []).append(one)
    ordered = sorted(hops, key=lambda hop: (ranks.get(hop, math.inf), hops[hop][0].ts))
    if tries:
        yield from _reminted(hops[ordered[0]], id_)
    had: set[str] = set()
    for previous, hop in pairwise(ordered):
        had.update(one.key for one in hops[previous])
        yield from _replaced(had, hops[previous], hops[hop], id_)


def _reminted(seen: Sequence[Seen], id_: str) -> Iterator[Leak]:
    first, *others = seen
    for other in others:
        yield Leak(LeakKind.REMINTED, other.hop, other.ts, first.key, other.key, id=id_)


def _replaced(had: set[str], came: Sequence[Seen], went: Sequence[Seen], id_: str) -> Iterator[Leak]:
    """Yield hops with a key that the message had at no hop before: not every attempt has to pass every hop."""
    has = {one.key for one in went}
    gone = [one.key for one in came if one.key not in has] or [one.key for one in came]
    for number, one in enumerate(new for new in went if new.key not in had):
        yield Leak(LeakKind.REPLACED, one.hop, one.ts, gone[min(number, len(gone) - 1)], one.key, came[0].hop, id_)


class Sent(NamedTuple):
    """The lines of one key at one hop within an hour; hours of a key come one after the other."""

    hop: str
    scope: str
    key: str
    hour: int
    # How often a producer sent it.
    sent: int
    first_request: str | None
    last_request: str | None
    first_producer: str | None
    last_producer: str | None


class Repeated(NamedTuple):
    """The leaks of one key at one hop within an hour."""

    hop: str
    hour: int
    scope: str
    key: str
    # Two request ids, in the hour of the second one.
    requests: tuple[str, ...]
    # How often it was sent again; and how often of these after another instance had sent it.
    resent: int
    restarted: int


def of_keys(rows: Iterable[Sent]) -> Iterator[Repeated]:
    """Yield the leaks of keys, from rows that are sorted by hop, scope, key and hour."""
    for (hop, scope, key), hours in groupby(rows, key=lambda row: row[:3]):
        requests: set[str] = set()
        producers: set[str] = set()
        told = sent_before = False
        for row in hours:
            _add(requests, row.first_request, row.last_request)
            _add(producers, row.first_producer, row.last_producer)
            ids = tuple(sorted(requests)) if len(requests) > 1 and not told else ()
            resent = max(row.sent - (not sent_before), 0)
            told, sent_before = told or bool(ids), sent_before or row.sent > 0
            if ids or resent:
                yield Repeated(hop, row.hour, scope, key, ids, resent, resent if len(producers) > 1 else 0)


def _add(found: set[str], first: str | None, last: str | None) -> None:
    """Add both, up to two: that is enough to know that there is more than one."""
    for one in (first, last):
        if one is not None and len(found) < ENOUGH:
            found.add(one)
