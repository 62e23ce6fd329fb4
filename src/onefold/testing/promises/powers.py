"""Capabilities that not every store has: many addresses in one round trip, and lists for tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from onefold.stores.base import Address, Batching, Browsable, Close, Entry, Query, Record, State
from onefold.testing.promises._case import Case, claim_of
from onefold.testing.promises._twice import at_rest

# The most that a guard sends in one round trip.
BATCH = 1_000

# The possible states of an address's record when a batch comes; see `_prepared`.
SITUATIONS = ("free", "own", "taken", "extended", "open", "done", "failed", "held", "stale", "expired")


class Batches(Case):
    """A batch does to each address what the single operation does, and answers in the order of the requests."""

    def test_an_empty_batch_has_no_answers(self) -> None:
        self.needs(Batching)

        assert self.store.claim_all([]) == []
        assert self.store.extend_all([]) == []
        assert self.store.close_all([]) == []

    def test_claiming_all_equals_claiming_each(self) -> None:
        self.needs(Batching)

        self._equal(
            lambda entries: [self.store.claim(entry) for entry in entries],
            self.store.claim_all,
        )

    def test_extending_all_equals_extending_each(self) -> None:
        self.needs(Batching)

        def claims(entries: Sequence[Entry]) -> list[Any]:
            return [claim_of(entry, lease=5 * self.long, ttl=7 * self.long) for entry in entries]

        self._equal(
            lambda entries: [self.store.extend(claim) for claim in claims(entries)],
            lambda entries: self.store.extend_all(claims(entries)),
        )

    def test_finishing_all_equals_finishing_each(self) -> None:
        self.needs(Batching)
        ending = self.ending(notes=b"notes", remark="remark", ttl=5 * self.long)

        self._equal(
            lambda entries: [self.store.finish(claim_of(entry), ending) for entry in entries],
            lambda entries: self.store.close_all([Close(claim_of(entry), ending) for entry in entries]),
        )

    def test_releasing_all_equals_releasing_each(self) -> None:
        self.needs(Batching)

        self._equal(
            lambda entries: [self.store.release(claim_of(entry)) for entry in entries],
            lambda entries: self.store.close_all([Close(claim_of(entry)) for entry in entries]),
        )

    def test_leaving_all_open_equals_leaving_each_open(self) -> None:
        self.needs(Batching)
        released = self.released(attempt=3, notes=b"notes", remark="remark", ttl=5 * self.long)

        self._equal(
            lambda entries: [self.store.release(claim_of(entry), released) for entry in entries],
            lambda entries: self.store.close_all([Close(claim_of(entry), released) for entry in entries]),
        )

    def test_closing_all_takes_every_way_to_close_in_one_batch(self) -> None:
        self.needs(Batching)
        done, failed, opened, forgotten = (self.claimed(key) for key in ("done", "failed", "open", "forgotten"))
        another, absent = self.claimed("another"), self.entry("absent")
        before = self.found(another)

        answers = self.store.close_all(
            [
                Close(claim_of(done), self.ending(result=b"one")),
                Close(claim_of(self.entry("another")), self.ending(result=b"stale")),
                Close(claim_of(opened), self.released(attempt=4)),
                Close(claim_of(absent), self.ending()),
                Close(claim_of(forgotten)),
                Close(claim_of(failed), self.ending(state=State.FAILED, result=b"two")),
            ]
        )

        assert answers == [True, False, True, False, True, True]
        assert (self.found(done).state, self.found(done).result) == (State.DONE, b"one")
        assert (self.found(failed).state, self.found(failed).result) == (State.FAILED, b"two")
        assert (self.found(opened).state, self.found(opened).attempt) == (State.OPEN, 4)
        self.absent(forgotten.address)
        self.absent(absent.address)
        self.untouched(before)

    def test_a_batch_may_be_as_large_as_a_guard_sends(self) -> None:
        self.needs(Batching)
        entries = [self.entry(f"key-{number}") for number in range(BATCH)]
        taken = self.claimed("key-700")

        answers = self.store.claim_all(entries)

        assert [number for number, answer in enumerate(answers) if answer is not None] == [700]
        self.refused_by(answers[700], taken)
        expected = [number != 700 for number in range(BATCH)]
        assert self.store.extend_all([claim_of(entry) for entry in entries]) == expected
        assert self.store.close_all([Close(claim_of(entry), self.ending()) for entry in entries]) == expected

    def _equal(self, single: Callable[[list[Entry]], list[Any]], batch: Callable[[list[Entry]], list[Any]]) -> None:
        """Check that two sets of addresses in equal states, handled in two ways, are in equal states afterwards."""
        singly, together = self._prepared("single"), self._prepared("batch")
        self.wait_out_short()

        answers, batch_answers = single(singly), batch(together)

        for situation, one, other in zip(SITUATIONS, answers, batch_answers, strict=True):
            assert self._plain(one) == self._plain(other), situation
        for situation, one, other in zip(SITUATIONS, singly, together, strict=True):
            self._assert_alike(situation, self.store.read(one.address), self.store.read(other.address))

    def _prepared(self, prefix: str) -> list[Entry]:
        """Return an entry for each state, whose record is in that state."""
        entries = {situation: self.entry(f"{prefix}-{situation}") for situation in SITUATIONS}
        for situation, entry in entries.items():
            if situation in ("taken", "expired"):
                self.claimed(entry.address.key, ttl=self.short if situation == "expired" else self.long)
            elif situation != "free":
                self.written(self.store.claim(entry))
        for state in (State.DONE, State.FAILED, State.HELD):
            assert self.store.finish(claim_of(entries[state]), self.ending(state=state)) is True
        assert self.store.extend(claim_of(entries["extended"]), b"notes") is True
        assert self.store.release(claim_of(entries["open"]), self.released()) is True
        self.taken_over(entries["stale"])
        return list(entries.values())

    def _assert_alike(self, situation: str, one: Record | None, other: Record | None) -> None:
        assert self._plain(one) == self._plain(other), situation
        if one is not None and other is not None:
            assert self.about(one.lease_left, other.lease_left) or one.state is not State.RUNNING, situation
            assert self.about(one.ttl_left, other.ttl_left), situation

    def _plain(self, answer: Any) -> Any:
        """Return an answer without the fields that tell the two sets apart; an expired record may be shown or not."""
        if not isinstance(answer, Record):
            return answer
        if answer.is_expired:
            return None
        return replace(at_rest(answer), address=self.address(), token=b"")


class Browsing(Case):
    """Records in the order of their addresses: by scope, operation and key, byte for byte, page by page."""

    def test_browsing_an_empty_store_finds_nothing(self) -> None:
        self.needs(Browsable)

        assert self.store.browse(Query(), 10) == []

    def test_browsing_shows_records_as_they_are_read(self) -> None:
        self.needs(Browsable)
        owner = self.claimed(attempt=3, notes=b"notes", fingerprint=b"payload", remark="remark")
        assert self.store.finish(claim_of(owner), self.ending()) is True

        (shown,) = self.store.browse(Query(), 10)

        assert at_rest(shown) == at_rest(self.found(owner))
        self.untouched(shown)

    def test_browsing_goes_in_the_order_of_addresses(self) -> None:
        self.needs(Browsable)
        addresses = self._populated()

        assert self._browsed(Query()) == sorted(addresses, key=lambda address: address.parts)

    def test_browsing_goes_page_by_page(self) -> None:
        self.needs(Browsable)
        addresses = sorted(self._populated(), key=lambda address: address.parts)

        for size in (1, 2, 5, len(addresses)):
            pages: list[Address] = []
            while page := self._browsed(Query(after=pages[-1] if pages else None), size):
                assert len(page) == min(size, len(addresses) - len(pages))
                pages += page
            assert pages == addresses

    def test_a_page_may_begin_after_an_address_that_is_gone(self) -> None:
        self.needs(Browsable)
        entries = [self.claimed(f"key-{number}") for number in range(5)]
        assert self.store.release(claim_of(entries[2])) is True

        found = self._browsed(Query(after=entries[2].address))

        assert found == [entries[3].address, entries[4].address]

    def test_browsing_filters_by_each_part_of_the_address(self) -> None:
        self.needs(Browsable)
        addresses = sorted(self._populated(), key=lambda address: address.parts)

        for part in ("scope", "operation", "key"):
            for wanted in {getattr(address, part) for address in addresses}:
                expected = [address for address in addresses if getattr(address, part) == wanted]
                assert self._browsed(Query(**{part: wanted})) == expected
        assert self._browsed(Query(key="KEY-B")) == []
        assert self._browsed(Query(key="key%")) == []
        assert self._browsed(Query(scope="", operation="aa", key="key-b")) == [Address("", "aa", "key-b")]

    def test_browsing_filters_by_state(self) -> None:
        self.needs(Browsable)
        entries = {state: self.in_state(state, f"key-{state}") for state in State}

        for state, entry in entries.items():
            assert self._browsed(Query(state=state)) == [entry.address]
            assert self._browsed(Query(key=entry.address.key, state=state)) == [entry.address]
        assert self._browsed(Query(key=entries[State.DONE].address.key, state=State.HELD)) == []

    def test_filters_and_pages_go_together(self) -> None:
        self.needs(Browsable)
        addresses = sorted(self._populated(), key=lambda address: address.parts)
        wanted = [address for address in addresses if address.operation == "b"]

        first = self._browsed(Query(operation="b"), 2)
        assert first == wanted[:2]

        assert self._browsed(Query(operation="b", after=first[-1])) == wanted[2:]

    def _populated(self) -> list[Address]:
        """Write records in another order than theirs. By bytes upper case comes first, and UTF-16 pairs last."""
        addresses = [
            Address(scope, operation, key)
            for scope in ("z", "", "scope")
            for operation in ("b", "aa")
            for key in ("key-b", "key-a", "k", "é", "Key", "\U0001f600", "\uff5e")
        ]
        for address in addresses:
            self.written(self.store.claim(self.entry(address=address)))
        return addresses

    def _browsed(self, query: Query, limit: int = 100) -> list[Address]:
        return [record.address for record in self.store.browse(query, limit)]
