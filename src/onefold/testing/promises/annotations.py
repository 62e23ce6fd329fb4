"""Notes that are changed later, and nothing else with them: a capability that not every store has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from onefold.errors import StoreUnavailable
from onefold.stores.base import GONE, Annotating, Entry, Record, State
from onefold.testing.promises._case import Case, claim_of


class Annotations(Case):
    """An annotation compares token and revision, and changes the notes: no expiry, no token, no result."""

    def test_an_annotation_changes_the_notes_and_nothing_else(self) -> None:
        self.needs(Annotating)
        for state in (State.DONE, State.FAILED):
            before = self._ended(f"key-{state}", state=state, notes=b"notes", remark="remark")

            self.written(self.store.annotate(before, b"more notes"))

            self.untouched(replace(before, notes=b"more notes", revision=before.revision + 1))

    def test_an_annotation_keeps_what_a_record_has_not(self) -> None:
        self.needs(Annotating)
        before = self._ended(result=None, omitted=True)
        assert before.notes is None

        self.written(self.store.annotate(before, b"notes"))

        self.untouched(replace(before, notes=b"notes", revision=before.revision + 1))

    def test_annotations_do_not_move_the_end_of_a_record(self) -> None:
        self.needs(Annotating)
        before = self._ended(ttl=self.long)
        self.wait_out_short()
        # As it was read before: an expiry that is counted from the write would be later by the time that has passed.
        self.written(self.once.annotate(before, b"notes"))

        found = self.found(before.address)

        assert found.ttl_left <= before.ttl_left - self.short
        assert found.age >= before.age + self.short

    def test_a_record_that_is_kept_forever_stays_so(self) -> None:
        self.needs(Annotating)
        before = self._ended(ttl=math.inf)

        self.written(self.store.annotate(before, b"notes"))

        assert self.found(before.address).ttl_left == math.inf

    def test_an_annotation_of_what_has_changed_is_answered_with_the_record(self) -> None:
        self.needs(Annotating)
        seen = self._ended()
        self.written(self.store.annotate(seen, b"another"))
        now = self.found(seen.address)

        answer = self.store.annotate(seen, b"notes")

        assert isinstance(answer, Record)
        assert (answer.token, answer.revision, answer.notes) == (now.token, now.revision, b"another")
        self.untouched(now)

    def test_an_annotation_of_another_owners_record_is_answered_with_it(self) -> None:
        self.needs(Annotating)
        seen = self._ended()
        successor = self.entry(seen.address.key)
        self.written(self.store.claim(successor, replacing=seen))

        self.refused_by(self.store.annotate(seen, b"notes"), successor)

    def test_an_annotation_never_writes_a_record_that_is_gone(self) -> None:
        self.needs(Annotating)
        forgotten = self._ended("forgotten")
        assert self.store.release(claim_of(self._entry_of(forgotten))) is True
        (expired,) = self.expiring("expired")
        seen = replace(forgotten, address=expired.address, token=expired.token, revision=2)
        self.wait_out_short()

        assert self.store.annotate(forgotten, b"notes") is GONE
        assert self.store.annotate(seen, b"notes") is GONE
        self.absent(forgotten.address)
        self.absent(expired.address)

    def test_the_owner_may_still_repeat_its_finish(self) -> None:
        self.needs(Annotating)
        owner = self.in_state(State.DONE)
        self.written(self.store.annotate(self.found(owner), b"notes"))

        assert self.store.finish(claim_of(owner), self.ending()) is True

    def test_of_many_racing_annotations_exactly_one_is_written(self) -> None:
        self.needs(Annotating)
        for round_ in range(self.rounds):
            seen = self._ended(f"key-{round_}")

            answers = self._race([self._annotating(seen, b"racer %d" % racer) for racer in range(self.racers)])

            winners = [b"racer %d" % racer for racer, answer in enumerate(answers) if answer is None]
            assert [self.found(seen.address).notes] == winners
            assert self.found(seen.address).revision == seen.revision + 1

    def _ended(self, key: str = "key", **fields: object) -> Record:
        owner = self.claimed(key, attempt=2, bypasses=1, fingerprint=b"payload")
        assert self.store.finish(claim_of(owner), self.ending(**fields)) is True
        return self.found(owner)

    def _annotating(self, seen: Record, notes: bytes) -> Callable[[Any], Any]:
        """Return a racer. It may find the record locked: then it has not written it."""

        def ask(store: Any) -> Any:
            try:
                return store.annotate(seen, notes)
            except StoreUnavailable as error:
                return error

        async def ask_async(store: Any) -> Any:
            try:
                return await store.annotate(seen, notes)
            except StoreUnavailable as error:
                return error

        return ask_async if self._is_async else ask

    def _entry_of(self, record: Record) -> Entry:
        return record.as_entry(record.token)
