"""Claims and take-overs: who gets an address, and who is shown the record in the way."""

from __future__ import annotations

import math
import os

from msgspec.structs import replace

from onefold.stores.base import GONE, Entry, Record, State
from onefold.testing.promises._case import Case, claim_of, every
from onefold.testing.promises._twice import at_rest


class Claims(Case):
    """A claim is written if the address is free, or if its record is still exactly `replacing`."""

    def test_a_claim_on_a_free_address_is_written(self) -> None:
        entry = self.entry()

        self.written(self.store.claim(entry))

        record = self.found(entry)
        assert (record.token, record.state, record.revision) == (entry.token, State.RUNNING, 1)

    def test_a_claim_can_write_every_state_at_once(self) -> None:
        for state, key in every(State):
            entry = self.claimed(key, state=state, result=b"result")

            record = self.found(entry)
            assert (record.token, record.state, record.result) == (entry.token, state, b"result")

    def test_a_claim_on_a_taken_address_is_refused_and_shows_the_record(self) -> None:
        for state, key in every(State):
            owner = self.in_state(state, key, fingerprint=b"payload", attempt=3)
            before = self.found(owner)

            shown = self.refused_by(self.store.claim(self.entry(key)), owner)

            assert (shown.state, shown.fingerprint) == (state, b"payload")
            self.untouched(before)

    def test_a_claim_takes_no_look_at_fingerprints(self) -> None:
        owner = self.claimed(fingerprint=b"one payload")

        self.refused_by(self.store.claim(self.entry(fingerprint=b"one payload")), owner)
        self.refused_by(self.store.claim(self.entry(fingerprint=b"another")), owner)
        self.taken_over(owner, fingerprint=b"another")

    def test_a_claim_that_arrives_again_late_changes_nothing(self) -> None:
        entry = self.claimed()
        assert self.store.extend(claim_of(entry), b"notes") is True
        self.written(self.store.claim(entry))
        assert self.found(entry).notes == b"notes"

        assert self.store.finish(claim_of(entry), self.ending()) is True
        ended = self.found(entry)
        self.written(self.store.claim(entry))

        self.untouched(ended)


class TakeOvers(Case):
    """Token and revision together answer: is it still what I saw?"""

    def test_a_take_over_replaces_the_whole_record(self) -> None:
        owner = self.claimed(attempt=3, bypasses=2, fingerprint=b"old", notes=b"old", remark="old")
        assert self.store.finish(claim_of(owner), self.ending(notes=b"old", omitted=True, remark="old")) is True

        successor = self.taken_over(owner)

        record = self.found(successor)
        assert (record.token, record.revision, record.state) == (successor.token, 1, State.RUNNING)
        assert (record.attempt, record.bypasses, record.fingerprint) == (1, 0, None)
        assert (record.notes, record.result, record.omitted, record.remark) == (None, None, False, "")

    def test_a_record_can_be_replaced_in_every_state(self) -> None:
        for state, key in every(State):
            owner = self.in_state(state, key)

            successor = self.taken_over(owner)

            assert self.found(owner).token == successor.token

    def test_a_take_over_that_arrives_again_late_changes_nothing(self) -> None:
        seen = self.found(self.claimed())
        successor = self.entry()
        self.written(self.store.claim(successor, replacing=seen))
        assert self.store.finish(claim_of(successor), self.ending()) is True
        ended = self.found(successor)

        self.written(self.store.claim(successor, replacing=seen))

        self.untouched(ended)

    def test_a_take_over_is_refused_if_the_owner_has_extended(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.extend(claim_of(owner)) is True

        self._is_refused(seen, owner)

    def test_a_take_over_is_refused_if_the_owner_has_finished(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.finish(claim_of(owner), self.ending()) is True

        shown = self._is_refused(seen, owner)

        assert (shown.state, shown.result) == (State.DONE, b"result")

    def test_a_take_over_is_refused_if_the_owner_has_left_the_record_open(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.release(claim_of(owner), self.released()) is True

        assert self._is_refused(seen, owner).state is State.OPEN

    def test_a_take_over_is_refused_if_another_has_claimed_since(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.release(claim_of(owner)) is True
        another = self.claimed()

        # The revisions are equal: only the token tells the two records apart.
        assert self.found(another).revision == seen.revision
        self._is_refused(seen, another)

    def test_a_take_over_compares_the_token(self) -> None:
        owner = self.claimed()

        self._is_refused(replace(self.found(owner), token=os.urandom(16)), owner)

    def test_a_take_over_compares_the_revision(self) -> None:
        owner = self.claimed()
        assert self.store.extend(claim_of(owner)) is True
        record = self.found(owner)

        self._is_refused(replace(record, revision=record.revision - 1), owner)
        self._is_refused(replace(record, revision=record.revision + 1), owner)

    def test_a_take_over_compares_nothing_else(self) -> None:
        owner = self.claimed(notes=b"notes", fingerprint=b"payload")
        seen = replace(self.found(owner), state=State.OPEN, attempt=7, notes=None, fingerprint=None, lease_left=-1.0)

        self.written(self.store.claim(self.entry(), replacing=seen))

    def test_a_take_over_of_nothing_is_gone_and_writes_nothing(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.release(claim_of(owner)) is True

        assert self.store.claim(self.entry(), replacing=seen) is GONE

        self.absent(owner.address)
        self.free(owner.address)

    def _is_refused(self, seen: Record, owner: Entry) -> Record:
        before = self.found(owner)
        shown = self.refused_by(self.store.claim(self.entry(), replacing=seen), owner)
        self.untouched(before)
        return shown


class Marks(Case):
    """Marking a record held keeps its owner's token, which therefore proves nothing about the mark."""

    def test_marking_held_keeps_the_owners_token_and_counts_as_a_write(self) -> None:
        owner = self.claimed(attempt=3, notes=b"notes", fingerprint=b"payload")
        seen = self.found(owner)

        self.written(self.store.claim(self._mark(seen), replacing=seen))

        record = self.found(owner)
        assert (record.token, record.revision, record.state) == (owner.token, seen.revision + 1, State.HELD)
        assert (record.attempt, record.notes, record.fingerprint) == (3, b"notes", b"payload")
        assert (record.remark, record.ttl_left) == ("held", math.inf)

    def test_marking_held_is_refused_if_the_owner_has_extended(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.extend(claim_of(owner)) is True

        assert self._mark_is_refused(seen, owner).state is State.RUNNING

    def test_marking_held_is_refused_if_the_owner_has_finished(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.finish(claim_of(owner), self.ending()) is True

        assert self._mark_is_refused(seen, owner).state is State.DONE

    def test_marking_held_is_refused_if_another_has_taken_over(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        successor = self.taken_over(owner)

        self._mark_is_refused(seen, successor)

    def test_marking_held_is_gone_if_the_owner_has_released(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        assert self.store.release(claim_of(owner)) is True

        assert self.store.claim(self._mark(seen), replacing=seen) is GONE
        self.absent(owner.address)

    def test_the_owner_turns_held_into_done(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        mark = self._mark(seen)
        self.written(self.store.claim(mark, replacing=seen))

        assert self.store.finish(claim_of(owner), self.ending()) is True

        record = self.found(owner)
        assert (record.token, record.state, record.result, record.remark) == (owner.token, State.DONE, b"result", "")
        # The mark arrives again, late.
        self.refused_by(self.store.claim(mark, replacing=seen), owner)
        self.untouched(record)

    def test_a_held_record_that_is_resolved_refuses_its_owner(self) -> None:
        owner = self.claimed()
        seen = self.found(owner)
        self.written(self.store.claim(self._mark(seen), replacing=seen))
        resolved = self.taken_over(owner, state=State.DONE, result=b"by hand")
        before = self.found(resolved)

        assert self.store.finish(claim_of(owner), self.ending()) is False
        assert self.store.extend(claim_of(owner), b"late") is False
        assert self.store.release(claim_of(owner)) is False

        self.untouched(before)

    def _mark(self, seen: Record) -> Entry:
        mark = self.entry(token=seen.token, state=State.HELD, lease=0.0, ttl=math.inf, remark="held")
        return replace(mark, attempt=seen.attempt, notes=seen.notes, fingerprint=seen.fingerprint)

    def _mark_is_refused(self, seen: Record, owner: Entry) -> Record:
        before = self.found(owner)
        shown = self.store.claim(self._mark(seen), replacing=seen)
        assert isinstance(shown, Record), f"marking a record that has changed answered {shown!r}"
        assert at_rest(shown) == at_rest(before)
        self.untouched(before)
        return shown
