"""Try out a store: one record is claimed, refused to others, finished, read and removed, and timed.

Its address has an operation of its own, with a random key and a TTL of a minute, so that a killed trial leaves nothing
for long. It removes its record however it ends.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from onefold import Record, State
from onefold.stores.base import Address, Claim, Ending, Entry, Store

# Reserved: no handler may have this name.
OPERATION: Final = "onefold-doctor"

# DynamoDB accepts no lease shorter than ten seconds.
LEASE: Final = 15.0
TTL: Final = 60.0

# The median of a few, so that one slow answer does not count.
READS: Final = 5

RESULT: Final = b"onefold-doctor"


class Broken(Exception):
    """The store answered, and the answer is wrong."""


class Trial(NamedTuple):
    """The result of a trial. `broken` is empty if the store kept its promises."""

    round_trip: float
    broken: str = ""


def tried(store: Store) -> Trial:
    """Try the store out. Raise `StoreUnavailable` if the store does."""
    round_trip = _round_trip(store)
    try:
        _keep_promises(store, Address("", OPERATION, secrets.token_hex(16)))
    except Broken as error:
        return Trial(round_trip, str(error))
    return Trial(round_trip)


def _round_trip(store: Store) -> float:
    """Return the median time of a few reads; the first one, which may have to connect, does not count."""
    address = Address("", OPERATION, secrets.token_hex(16))
    store.read(address)
    times = []
    for _ in range(READS):
        began = time.perf_counter()
        store.read(address)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _keep_promises(store: Store, address: Address) -> None:
    mine, other = _entry(address), _entry(address)
    claim = Claim(address, mine.token, LEASE, TTL)
    with _removed(store, claim, Claim(address, other.token, LEASE, TTL)):
        _expect(store.claim(mine) is None, "a new key was refused")
        _expect(_is(store.claim(other), mine, State.RUNNING), "a second claim of a running key was not refused")
        _expect(store.extend(claim), "the owner could not renew its lease")
        _expect(
            store.finish(claim, Ending(state=State.DONE, ttl=TTL, result=RESULT)),
            "the owner could not finish its work",
        )
        _expect(_is(store.claim(other), mine, State.DONE), "a duplicate of a finished key was not refused")
        found = store.read(address)
        _expect(
            _is(found, mine, State.DONE) and found is not None and found.result == RESULT, "the result was not kept"
        )
        _expect(store.release(claim), "the owner could not remove its record")
        _expect(store.read(address) is None, "a record that was removed is still there")


@contextmanager
def _removed(store: Store, *claims: Claim) -> Iterator[None]:
    """Remove the records of these claims at the end, whatever happens inside, as far as the store still answers."""
    try:
        yield
    except BaseException:
        for claim in claims:
            with suppress(Exception):
                store.release(claim)
        raise


def _entry(address: Address) -> Entry:
    return Entry(address=address, token=secrets.token_bytes(16), lease=LEASE, ttl=TTL)


def _is(found: object, entry: Entry, state: State) -> bool:
    return isinstance(found, Record) and found.token == entry.token and found.state is state


def _expect(held: bool, otherwise: str) -> None:  # noqa: FBT001 - it reads as a sentence
    if not held:
        raise Broken(otherwise)
