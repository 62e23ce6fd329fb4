"""Leases, TTLs and ages are measured by the store's clock. Expired records are free, and are purged."""

from __future__ import annotations

import math

from msgspec.structs import replace

from onefold.stores.base import GONE, Record, State
from onefold.testing.promises._case import Case, claim_of, every


class Durations(Case):
    """Reads return the remaining durations, counted from the write that set them."""

    def test_lease_ttl_and_age_are_counted_from_the_claim(self) -> None:
        owner = self.claimed(lease=self.long, ttl=2 * self.long, age=3 * self.long)
        before = self.found(owner)
        assert self.about(before.lease_left, self.long)
        assert self.about(before.ttl_left, 2 * self.long)
        assert self.about(before.age, 3 * self.long)

        self.wait_out_short()

        after = self.found(owner)
        self._passed(before.lease_left, after.lease_left)
        self._passed(before.ttl_left, after.ttl_left)
        self._passed(after.age, before.age)

    def test_the_record_in_the_way_is_shown_with_what_is_left_now(self) -> None:
        owner = self.claimed()
        before = self.found(owner)

        self.wait_out_short()

        shown = self.refused_by(self.store.claim(self.entry()), owner)
        self._passed(before.lease_left, shown.lease_left)
        self._passed(before.ttl_left, shown.ttl_left)
        self._passed(shown.age, before.age)

    def test_age_goes_on_over_every_write_of_the_owner(self) -> None:
        for state, key in every(State):
            owner = self.claimed(key, age=3 * self.long)
            assert self.store.extend(claim_of(owner)) is True
            if state is State.OPEN:
                assert self.store.release(claim_of(owner), self.released()) is True
            elif state is not State.RUNNING:
                assert self.store.finish(claim_of(owner), self.ending(state=state)) is True

            assert self.about(self.found(owner).age, 3 * self.long)

    def test_a_ttl_is_counted_from_the_last_write(self) -> None:
        for state, key in every((State.DONE, State.FAILED, State.HELD)):
            owner = self.claimed(key, ttl=9 * self.long)
            assert self.store.finish(claim_of(owner), self.ending(state=state, ttl=5 * self.long)) is True
            assert self.about(self.found(owner).ttl_left, 5 * self.long)

    def test_a_lease_that_is_over_changes_nothing_by_itself(self) -> None:
        owner = self.claimed(lease=self.short)
        self.wait_out_short()

        # The caller decides: the store neither frees the address, nor refuses the owner.
        shown = self.refused_by(self.store.claim(self.entry()), owner)
        assert shown.is_abandoned
        assert self.store.extend(claim_of(owner, lease=self.long)) is True
        assert self.about(self.found(owner).lease_left, self.long)

    def test_an_owner_may_finish_or_release_after_its_lease(self) -> None:
        finished, released = self.claimed("finished", lease=self.short), self.claimed("released", lease=self.short)
        self.wait_out_short()

        assert self.store.finish(claim_of(finished), self.ending()) is True
        assert self.store.release(claim_of(released)) is True

        assert self.found(finished).state is State.DONE
        self.absent(released.address)

    def _passed(self, more: float, less: float) -> None:
        """Check that about the time of `wait_out_short` has passed between the two: a slow machine may add to it."""
        assert self.short < more - less < self.long / 4


class Expirations(Case):
    """An expired record counts as free; whether a read still shows it is up to the store."""

    def test_an_expired_record_is_free(self) -> None:
        written = {state: self.claimed(key, state=state, ttl=self.short, notes=b"old") for state, key in every(State)}
        self.wait_out_short()

        for entry in written.values():
            self.absent(entry.address)
            next_one = self.claimed(entry.address.key)

            record = self.found(next_one)
            assert (record.token, record.revision, record.notes) == (next_one.token, 1, None)
            assert not record.is_expired

    def test_the_ttl_of_an_ending_and_of_a_release_ends_too(self) -> None:
        finished, released = self.claimed("finished", ttl=math.inf), self.claimed("released", ttl=math.inf)
        # Sent once: on a real clock, the second answer may come after the TTL.
        assert self.once.finish(claim_of(finished), self.ending(ttl=self.short)) is True
        assert self.once.release(claim_of(released), self.released(ttl=self.short)) is True

        self.wait_out_short()

        self.free(finished.address)
        self.free(released.address)

    def test_forever_stays(self) -> None:
        claimed, extended, finished, released = (
            self.claimed(way, ttl=math.inf if way == "claimed" else self.long)
            for way in ("claimed", "extended", "finished", "released")
        )
        assert self.store.extend(claim_of(extended, ttl=math.inf)) is True
        assert self.store.finish(claim_of(finished), self.ending(ttl=math.inf)) is True
        assert self.store.release(claim_of(released), self.released(ttl=math.inf)) is True

        self.wait_out_short()

        self.store.purge(100)
        for entry in (claimed, extended, finished, released):
            assert self.found(entry).ttl_left == math.inf
            assert isinstance(self.store.claim(self.entry(entry.address.key)), Record)

    def test_taking_over_an_expired_record_writes_it_or_finds_it_gone(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.once.extend(claim_of(owner, ttl=self.short)) is True
        seen = replace(seen, revision=seen.revision + 1)
        self.wait_out_short()
        successor = self.entry()

        # Sent once: between the two answers the record may disappear.
        answer = self.once.claim(successor, replacing=seen)

        if answer is None:
            assert self.found(successor).token == successor.token
        else:
            assert answer is GONE
            self.free(owner.address)


class Purges(Case):
    """A purge removes expired records, up to a limit, and nothing else."""

    def test_purge_removes_only_what_has_expired(self) -> None:
        needed = [
            self.claimed("running", lease=self.short, ttl=self.long),
            self.claimed("held", state=State.HELD, ttl=math.inf),
            self.claimed("done", state=State.DONE, ttl=self.long),
            self.claimed("open", state=State.OPEN, ttl=self.long),
        ]
        over = self.expiring("over-1", "over-2", "over-3")
        self.wait_out_short()
        before = [self.found(entry) for entry in needed]

        self._counts(self.store.purge(100), 3)
        self._counts(self.store.purge(100), 0)

        for record in before:
            self.untouched(record)
        for entry in over:
            self.free(entry.address)

    def test_purge_respects_its_limit(self) -> None:
        self.expiring("over-1", "over-2", "over-3", "over-4", "over-5")
        self.wait_out_short()

        self._counts(self.store.purge(2), 2)
        self._counts(self.store.purge(2), 2)
        self._counts(self.store.purge(2), 1)
        self._counts(self.store.purge(2), 0)

    def test_purge_of_nothing_removes_nothing(self) -> None:
        self._counts(self.store.purge(10), 0)

    def _counts(self, removed: int, expected: int) -> None:
        """Check the count; a store whose records vanish by themselves may find fewer."""
        assert type(removed) is int
        assert 0 <= removed <= expected if self.expires_by_itself else removed == expected
