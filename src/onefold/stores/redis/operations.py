"""Operations on many records, for sync and async: which calls they make, and what the replies mean."""

from __future__ import annotations

import time
from collections.abc import Sequence

from onefold._model import Claim, Close, Ending, Entry, Gone, Record
from onefold.stores.base import Query
from onefold.stores.redis import records
from onefold.stores.redis.browse import LISTING_SECONDS, Listing, browse
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.routing import RedisFlow, Topology, Wait, dispatch


class Operations:
    """The operations as dispatches. Claims and ends wait for replicas, if configured."""

    def __init__(self, keys: Keys, wait: Wait | None) -> None:
        self._keys = keys
        self._wait = wait
        self._wait_for_claims = None if wait is None else wait._replace(at_once=False)
        self._listing: tuple[float, Listing] | None = None

    def claim_all(self, topology: Topology, entries: Sequence[Entry]) -> RedisFlow[list[Record | Gone | None]]:
        calls = [records.claim(self._keys.of(entry.address), entry) for entry in entries]
        replies = yield from dispatch(topology, calls, self._wait_for_claims)
        return [records.claimed(entry.address, reply) for entry, reply in zip(entries, replies, strict=True)]

    def extend_all(self, topology: Topology, claims: Sequence[Claim]) -> RedisFlow[list[bool]]:
        replies = yield from dispatch(
            topology, [records.extend(self._keys.of(claim.address), claim) for claim in claims]
        )
        return [bool(reply) for reply in replies]

    def renewal_groups(self, topology: Topology, claims: Sequence[Claim]) -> list[list[int]]:
        """Return the indexes of the claims by primary: an unresponsive one does not delay the others."""
        groups: dict[int, list[int]] = {}
        if not topology.clustered:
            return [list(range(len(claims)))]
        for number, claim in enumerate(claims):
            try:
                primary = id(topology.node_of(self._keys.of(claim.address)))
            except topology.errors.SlotNotCoveredError:
                # The sender refreshes the topology first.
                primary = 0
            groups.setdefault(primary, []).append(number)
        return list(groups.values())

    def close_all(self, topology: Topology, closes: Sequence[Close]) -> RedisFlow[list[bool]]:
        calls = [records.close(self._keys.of(close.claim.address), close) for close in closes]
        # If everything is released, there is nothing that a failover must not lose.
        ends = any(isinstance(close.by, Ending) for close in closes)
        replies = yield from dispatch(topology, calls, self._wait if ends else None)
        return [bool(reply) for reply in replies]

    def browse(self, topology: Topology, query: Query, limit: int) -> RedisFlow[list[Record]]:
        made, left = self._listing or (0.0, None)
        if time.monotonic() - made > LISTING_SECONDS:
            made, left = time.monotonic(), None
        page, left = yield from browse(topology, self._keys, query, limit, left)
        self._listing = (made, left)
        return page
