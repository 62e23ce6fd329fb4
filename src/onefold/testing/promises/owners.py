"""Owners: the token answers "is it still mine?", for extend, finish and release."""

from __future__ import annotations

import math
from collections.abc import Callable

from onefold.stores.base import Claim, Entry, Record, State
from onefold.testing.promises._case import Case, claim_of, every

ENDED = (State.DONE, State.FAILED, State.HELD)


class Finishing(Case):
    """The owner ends its record, and the claimed fields stay in it."""

    def test_finish_writes_the_whole_ending_and_keeps_the_rest(self) -> None:
        for state, key in every(ENDED):
            owner = self.claimed(key, attempt=3, bypasses=2, fingerprint=b"payload", notes=b"old", remark="old")

            ending = self.ending(state=state, result=b"new", omitted=True, notes=b"new", remark="new")
            assert self.store.finish(claim_of(owner), ending) is True

            record = self.found(owner)
            assert (record.token, record.state) == (owner.token, state)
            assert (record.result, record.omitted, record.notes, record.remark) == (b"new", True, b"new", "new")
            assert (record.attempt, record.bypasses, record.fingerprint) == (3, 2, b"payload")
            assert self.about(record.ttl_left, self.long)

    def test_finish_clears_what_the_ending_leaves_out(self) -> None:
        owner = self.claimed(notes=b"old", remark="old")

        assert self.store.finish(claim_of(owner), self.ending(result=None)) is True

        record = self.found(owner)
        assert (record.result, record.omitted, record.notes, record.remark) == (None, False, None, "")

    def test_a_held_record_is_finished_forever(self) -> None:
        owner = self.claimed()

        assert self.store.finish(claim_of(owner), self.ending(state=State.HELD, ttl=math.inf)) is True

        assert self.found(owner).ttl_left == math.inf

    def test_finish_of_an_absent_record_is_refused_and_writes_nothing(self) -> None:
        owner = self.entry()

        assert self.store.finish(claim_of(owner), self.ending()) is False

        self.absent(owner.address)


class Extending(Case):
    """A heartbeat renews running records, and touches nothing else."""

    def test_extend_renews_lease_and_ttl(self) -> None:
        owner = self.claimed(attempt=3, bypasses=2, fingerprint=b"payload", notes=b"notes", remark="remark")

        assert self.store.extend(self._renewed(owner)) is True

        record = self.found(owner)
        assert self.about(record.lease_left, 5 * self.long)
        assert self.about(record.ttl_left, 7 * self.long)
        assert (record.token, record.state, record.attempt) == (owner.token, State.RUNNING, 3)
        assert (record.bypasses, record.fingerprint, record.remark) == (2, b"payload", "remark")

    def test_extend_can_end_the_lease(self) -> None:
        owner = self.claimed(notes=b"one")

        assert self.store.extend(claim_of(owner, lease=0.0), b"one, two") is True

        record = self.found(owner)
        assert record.lease_left <= self.short
        assert (record.state, record.token, record.notes) == (State.RUNNING, owner.token, b"one, two")

    def test_extend_keeps_the_notes_until_there_are_new_ones(self) -> None:
        owner = self.claimed(notes=b"one")

        assert self.store.extend(claim_of(owner)) is True
        assert self.found(owner).notes == b"one"
        assert self.store.extend(claim_of(owner), b"two") is True
        assert self.found(owner).notes == b"two"

    def test_notes_never_become_shorter_under_one_token(self) -> None:
        """Check that a shorter log, which is outdated, is ignored."""
        for held in (False, True):
            owner = self.claimed(f"held-{held}", notes=b"one")
            assert self.store.extend(claim_of(owner), b"one, two") is True
            if held:
                ending = self.ending(state=State.HELD, ttl=math.inf, notes=b"one, two")
                assert self.store.finish(claim_of(owner), ending) is True

            assert self.store.extend(claim_of(owner), b"one") is True
            assert self.store.extend(claim_of(owner), b"") is True

            assert self.found(owner).notes == b"one, two"

    def test_extend_of_a_held_record_keeps_only_the_notes(self) -> None:
        owner = self.claimed(notes=b"old")
        assert self.store.finish(claim_of(owner), self.ending(state=State.HELD, ttl=math.inf, notes=b"old")) is True

        assert self.store.extend(self._renewed(owner)) is True
        assert self.found(owner).notes == b"old"
        assert self.store.extend(self._renewed(owner), b"new") is True

        record = self.found(owner)
        # A late heartbeat must not make a record expire that waits for a person.
        assert (record.state, record.notes, record.ttl_left) == (State.HELD, b"new", math.inf)

    def test_extend_of_an_ended_record_is_refused_and_changes_nothing(self) -> None:
        for state, key in every((State.DONE, State.FAILED, State.OPEN)):
            owner = self.in_state(state, key)
            ended = self.found(owner)

            assert self.store.extend(self._renewed(owner)) is False
            assert self.store.extend(self._renewed(owner), b"late") is False

            self.untouched(ended)
            assert self.found(owner).revision == ended.revision

    def test_extend_of_an_absent_record_is_refused_and_writes_nothing(self) -> None:
        owner = self.entry()

        assert self.store.extend(claim_of(owner), b"notes") is False

        self.absent(owner.address)

    def _renewed(self, owner: Entry) -> Claim:
        return claim_of(owner, lease=5 * self.long, ttl=7 * self.long)


class Releasing(Case):
    """The owner releases its record, and may leave attempts and steps for the next attempt."""

    def test_release_frees_the_address(self) -> None:
        owner = self.claimed(notes=b"old", bypasses=2)

        assert self.store.release(claim_of(owner)) is True

        self.absent(owner.address)
        next_one = self.claimed()
        record = self.found(next_one)
        assert (record.token, record.revision, record.notes, record.bypasses) == (next_one.token, 1, None, 0)

    def test_release_forgets_a_record_in_every_state(self) -> None:
        for state, key in every(State):
            owner = self.in_state(state, key)

            assert self.store.release(claim_of(owner)) is True

            self.absent(owner.address)
            self.free(owner.address)

    def test_release_of_an_absent_record_has_succeeded_before(self) -> None:
        owner = self.entry()

        assert self.store.release(claim_of(owner)) is True
        assert self.store.release(claim_of(owner), self.released()) is True

        self.absent(owner.address)

    def test_release_with_notes_leaves_the_record_open(self) -> None:
        owner = self.claimed(attempt=2, bypasses=2, fingerprint=b"payload", notes=b"old", remark="old")

        released = self.released(attempt=3, notes=b"new", remark="new", ttl=5 * self.long)
        assert self.store.release(claim_of(owner), released) is True

        record = self.found(owner)
        assert (record.token, record.state) == (owner.token, State.OPEN)
        assert (record.attempt, record.notes, record.remark) == (3, b"new", "new")
        assert (record.bypasses, record.fingerprint, record.result) == (2, b"payload", None)
        assert self.about(record.ttl_left, 5 * self.long)

    def test_a_release_without_notes_clears_them(self) -> None:
        owner = self.claimed(notes=b"old", remark="old")

        assert self.store.release(claim_of(owner), self.released(attempt=0)) is True

        record = self.found(owner)
        assert (record.attempt, record.notes, record.remark) == (0, None, "")


class Strangers(Case):
    """A token that is not the record's has no effect, whatever it was before."""

    def test_a_stale_token_cannot_finish(self) -> None:
        for stale, successor in self._taken_over():
            assert self.store.finish(claim_of(stale), self.ending(result=b"stale")) is False
            self.untouched(successor)

    def test_a_stale_token_cannot_extend(self) -> None:
        for stale, successor in self._taken_over():
            renewed = claim_of(stale, lease=5 * self.long, ttl=7 * self.long)
            assert self.store.extend(renewed) is False
            assert self.store.extend(renewed, b"stale") is False
            self.untouched(successor)

    def test_a_stale_token_cannot_release(self) -> None:
        for stale, successor in self._taken_over():
            assert self.store.release(claim_of(stale)) is False
            assert self.store.release(claim_of(stale), self.released(notes=b"stale")) is False
            self.untouched(successor)

    def test_a_token_does_not_come_back_after_its_release(self) -> None:
        owner = self.claimed()
        assert self.store.release(claim_of(owner)) is True
        another = self.found(self.claimed())

        assert self.store.finish(claim_of(owner), self.ending()) is False
        assert self.store.extend(claim_of(owner)) is False
        assert self.store.release(claim_of(owner)) is False

        self.untouched(another)

    def _taken_over(self) -> list[tuple[Entry, Record]]:
        """Return owners whose records have another owner by now: running, ended or open."""
        pairs = []
        for state, key in every(State):
            owner = self.claimed(key)
            successor = self.taken_over(owner, state=state)
            pairs.append((owner, self.found(successor)))
        return pairs


class Revisions(Case):
    """The revision counts every write under one token, from 1."""

    def test_the_revision_counts_every_write_of_one_token(self) -> None:
        owner = self.entry()
        claim = claim_of(owner)

        # Sent once each: whether a repeated operation counts is up to the store.
        assert self._revisions(
            owner,
            lambda: self.once.claim(owner) is None,
            lambda: self.once.extend(claim),
            lambda: self.once.extend(claim, b"notes"),
            lambda: self.once.finish(claim, self.ending(state=State.HELD)),
            lambda: self.once.extend(claim, b"more"),
            lambda: self.once.finish(claim, self.ending()),
        ) == [1, 2, 3, 4, 5, 6]

    def test_a_release_that_leaves_the_record_open_counts_as_a_write(self) -> None:
        owner = self.entry()

        assert self._revisions(
            owner,
            lambda: self.once.claim(owner) is None,
            lambda: self.once.release(claim_of(owner), self.released()),
        ) == [1, 2]

    def test_a_new_token_counts_from_one(self) -> None:
        owner = self.claimed()
        assert self.store.extend(claim_of(owner)) is True
        successor = self.taken_over(owner)

        assert self.found(successor).revision == 1

    def _revisions(self, owner: Entry, *writes: Callable[[], bool]) -> list[int]:
        """Return the record's revision after each write."""
        revisions = []
        for write in writes:
            assert write() is True
            revisions.append(self.found(owner).revision)
        return revisions
