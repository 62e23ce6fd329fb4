"""The tools of every promise: a store of its own, short names for entries and claims, and passing time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from unittest import SkipTest

from msgspec.structs import replace

from onefold.stores.base import Address, Claim, Ending, Entry, Gone, Record, Released, State
from onefold.testing.promises._twice import EveryPower, Twice, at_rest

T = TypeVar("T")


class Case:
    """One instance serves one test: it opens the store on first use, and closes it afterwards."""

    unit: float = 0.1
    racers: int = 8
    rounds: int = 3
    expires_by_itself: bool = False

    # Whether the store's operations are async.
    _is_async: bool = False
    _opened: Any = None
    _twice: Twice | None = None

    def pass_time(self, seconds: float) -> None:
        """Let the store's clock advance. Override it for a clock that can be moved."""
        time.sleep(seconds)

    def process_source(self) -> Any:
        """Return how another process opens the same records; None if it cannot."""
        return None

    def teardown_method(self) -> None:
        """Close the store. If you override it, call it too."""
        if self._twice is not None:
            self._close()
            self._twice = None

    @property
    def store(self) -> Twice:
        """Return the store, with each operation sent twice."""
        if self._twice is None:
            self._twice = Twice(self._open())
        return self._twice

    @property
    def once(self) -> EveryPower:
        """Return the store itself, for the few promises that count operations."""
        return self.store.once

    # Sync or async: the contract of each adds these.

    def _open(self) -> EveryPower:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _race(self, asks: Sequence[Callable[[Any], Any]]) -> list[Any]:
        """Send all of these at the same time; return the answers in order."""
        raise NotImplementedError

    # The words of the promises.

    @property
    def short(self) -> float:
        """Return a duration that is over once `wait_out_short` returns."""
        return self.unit

    @property
    def long(self) -> float:
        """Return a duration that no test outlasts, not even a quarter of it on a machine that pauses."""
        return max(1_000 * self.unit, 1_000.0)

    def wait_out_short(self) -> None:
        self.pass_time(2 * self.short)

    def address(self, key: str = "key") -> Address:
        return Address("scope", "operation", key)

    def entry(self, key: str = "key", **fields: Any) -> Entry:
        """Return a running entry with a new token; the fields change it."""
        usual: dict[str, Any] = {"address": self.address(key), "lease": self.long, "ttl": 2 * self.long}
        return Entry(**({"token": os.urandom(16)} | usual | fields))

    def ending(self, **fields: Any) -> Ending:
        usual: dict[str, Any] = {"state": State.DONE, "ttl": self.long, "result": b"result"}
        return Ending(**(usual | fields))

    def released(self, **fields: Any) -> Released:
        return Released(**({"ttl": self.long, "attempt": 1} | fields))

    def claimed(self, key: str = "key", **fields: Any) -> Entry:
        """Return an entry that is written."""
        entry = self.entry(key, **fields)
        self.written(self.store.claim(entry))
        return entry

    def in_state(self, state: State, key: str = "key", **fields: Any) -> Entry:
        """Return an entry whose record was brought into this state by its owner."""
        entry = self.claimed(key, **fields)
        if state is State.OPEN:
            assert self.store.release(claim_of(entry), self.released()) is True
        elif state is not State.RUNNING:
            assert self.store.finish(claim_of(entry), self.ending(state=state)) is True
        return entry

    def expiring(self, *keys: str) -> list[Entry]:
        """Return entries whose records expire during `wait_out_short`, and not before all are written.

        Their ends are sent once: on a real clock, the second answer may come after the TTL.
        """
        entries = [self.claimed(key) for key in keys]
        for entry in entries:
            assert self.once.finish(claim_of(entry), self.ending(ttl=self.short)) is True
        return entries

    def taken_over(self, entry: Entry, **fields: Any) -> Entry:
        """Return the entry of a second worker, which has replaced the record of the first."""
        successor = self.entry(entry.address.key, **fields)
        self.written(self.store.claim(successor, replacing=self.found(entry)))
        return successor

    def found(self, of: Entry | Address) -> Record:
        """Return the record, which has to exist."""
        address = of.address if isinstance(of, Entry) else of
        record = self.store.read(address)
        assert record is not None, f"there is no record of {address}"
        assert record.address == address
        return record

    def written(self, answer: Record | Gone | None) -> None:
        assert answer is None, f"the claim was not written: {answer!r}"

    def refused_by(self, answer: Record | Gone | None, owner: Entry) -> Record:
        """Check that the claim was answered with this owner's record, as it is in the store."""
        assert isinstance(answer, Record), f"the record in the way was not shown: {answer!r}"
        assert answer.token == owner.token
        assert at_rest(answer) == at_rest(self.found(owner))
        return answer

    def absent(self, address: Address) -> None:
        record = self.store.read(address)
        assert record is None or record.is_expired, f"there should be no record: {record!r}"

    def free(self, address: Address) -> None:
        """Check that the address is free: the next claim is written."""
        self.written(self.store.claim(self.entry(address=address)))

    def untouched(self, before: Record) -> None:
        """Check that the record is unchanged; only time may have passed."""
        after = self.found(before.address)
        assert at_rest(after) == at_rest(before)
        assert self.about(after.ttl_left, before.ttl_left)
        assert self.about(after.age, before.age)
        if before.state is State.RUNNING:
            assert self.about(after.lease_left, before.lease_left)

    def about(self, found: float, expected: float) -> bool:
        """Return whether two durations are equal, except for the time that the test itself takes."""
        return found == expected or abs(found - expected) < self.long / 4

    def needs(self, power: type) -> None:
        assert self.store is not None
        if not isinstance(self._opened, power):
            raise SkipTest(f"this store is not {power.__name__}")


def claim_of(entry: Entry, **fields: Any) -> Claim:
    return replace(entry.as_claim(), **fields)


def every(states: Iterable[State]) -> list[tuple[State, str]]:
    """Return each state with its own key."""
    return [(state, f"key-{state}") for state in states]
