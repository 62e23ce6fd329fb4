"""Redis and Valkey: a part of the keys of each primary, which SCAN returns in the order of their hashes."""

from __future__ import annotations

from typing import Final

from onefold._model import Record
from onefold.stores.base import Query, Sample
from onefold.stores.redis import records
from onefold.stores.redis.browse import SCAN_COUNT
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.routing import RedisFlow, Topology, dispatch, send_to

# A server may return nothing for a while.
ROUNDS_MAX: Final = 50


def sample(topology: Topology, keys: Keys, query: Query, limit: int) -> RedisFlow[Sample]:
    """Return all matching records if the servers have few keys, else those among the first keys of each."""
    nodes = topology.nodes()
    drawn: list[tuple[Record, float]] = []
    complete = True
    for node in nodes:
        names, ended = yield from _scan(node, max(limit // len(nodes), 1))
        size = yield from send_to(node, (b"DBSIZE",))
        weight = 1.0 if ended else max(int(size) / max(len(names), 1), 1.0)
        complete = complete and ended
        # A foreign key has no address here, and counts as seen.
        ours = (keys.address(name) for name in names if name.startswith(keys.prefix))
        addresses = [address for address in ours if address is not None]
        replies = yield from dispatch(topology, [records.read(keys.of(address)) for address in addresses])
        found = zip(addresses, replies, strict=True)
        drawn += [(records.record(address, reply), weight) for address, reply in found if reply]
    return Sample.of(drawn, query, complete=complete)


def _scan(node: object, limit: int) -> RedisFlow[tuple[list[bytes], bool]]:
    """Return at least `limit` keys, and whether these are all."""
    cursor, names = b"0", dict[bytes, None]()
    for _ in range(ROUNDS_MAX):
        cursor, page = yield from send_to(node, (b"SCAN", cursor, b"COUNT", SCAN_COUNT))
        names |= dict.fromkeys(page)
        if cursor == b"0" or len(names) >= limit:
            break
    return list(names), cursor == b"0"
