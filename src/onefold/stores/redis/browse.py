"""List records for tools, in the order of their addresses, although Redis keeps keys in no order.

A page scans every key of the database (SCAN, on each primary), and keeps the first addresses that it needs. To avoid a
scan for each page of a long listing, it keeps more of them, for the following pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final, NamedTuple

from onefold._model import Address, Record
from onefold.stores.base import Query
from onefold.stores.redis import records
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.routing import RedisFlow, Topology, dispatch, send_to

# How many keys a server scans before it serves others: a fraction of a millisecond.
SCAN_COUNT: Final = b"1000"

# Addresses kept for later pages: some megabytes, and a million records are listed in fifty scans.
LISTED_MAX: Final = 20_000

# How long a later page may be served from an earlier scan.
LISTING_SECONDS: Final = 10.0


class Listing(NamedTuple):
    """The remainder of a page, for the next: the query, where the page ended, and the following addresses."""

    query: Query
    rest: list[Address]
    # Nothing comes after the rest.
    complete: bool


def browse(
    topology: Topology, keys: Keys, query: Query, limit: int, left: Listing | None
) -> RedisFlow[tuple[list[Record], Listing]]:
    """Return one page, and the listing for the next."""
    # A new listing must show the current records.
    goes_on = left is not None and query.after is not None and left.query == query
    listing = left if left is not None and goes_on else Listing(query, [], complete=False)
    page: list[Record] = []
    while len(page) < limit:
        if not listing.rest:
            if listing.complete:
                break
            listing = yield from _scan(topology, keys, listing.query)
            continue
        wanted = limit - len(page)
        chosen, rest = listing.rest[:wanted], listing.rest[wanted:]
        page += yield from _read(topology, keys, chosen, query)
        # The query of the next scan, if one is needed: it continues after the last address read.
        listing = Listing(query._replace(after=chosen[-1]), rest, listing.complete)
    # The next page begins after the last record shown, not after one that was gone when it was read.
    return page, listing._replace(query=query._replace(after=page[-1].address if page else query.after))


def _scan(topology: Topology, keys: Keys, query: Query) -> RedisFlow[Listing]:
    """Return the first addresses that match the query."""
    found: set[tuple[str, str, str]] = set()
    complete = True
    pattern = keys.pattern(query.scope, query.operation)
    for node in topology.nodes():
        cursor = b"0"
        while True:
            command = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCAN_COUNT, b"TYPE", b"string")
            cursor, names = yield from send_to(node, command)
            addresses = _wanted(filter(None, map(keys.address, names)), query)
            if query.state is not None:
                addresses = [record.address for record in (yield from _read(topology, keys, addresses, query))]
            found.update(address.parts for address in addresses)
            if len(found) > 2 * LISTED_MAX:
                found, complete = set(heapq.nsmallest(LISTED_MAX, found)), False
            if cursor == b"0":
                break
    first = heapq.nsmallest(LISTED_MAX, found)
    return Listing(query, [Address(*parts) for parts in first], complete and len(first) == len(found))


def _read(topology: Topology, keys: Keys, addresses: list[Address], query: Query) -> RedisFlow[list[Record]]:
    """Return those of these records that still exist, in the requested state."""
    replies = yield from dispatch(topology, [records.read(keys.of(address)) for address in addresses])
    found = (records.record(address, reply) for address, reply in zip(addresses, replies, strict=True) if reply)
    return [record for record in found if query.state is None or record.state is query.state]


def _wanted(addresses: Iterable[Address], query: Query) -> list[Address]:
    after = None if query.after is None else query.after.parts
    return [
        address
        for address in addresses
        if (query.scope is None or address.scope == query.scope)
        and (query.operation is None or address.operation == query.operation)
        and (query.key is None or address.key == query.key)
        and (after is None or address.parts > after)
    ]
