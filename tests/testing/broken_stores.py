"""Stores that break one promise each, and the promises of the contract that have to notice it."""

from __future__ import annotations

import math
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import fields, replace

from onefold.stores.base import GONE, Address, Claim, Close, Ending, Entry, Gone, Query, Record, Released, State
from onefold.stores.memory import MemoryStore, Row
from onefold.testing.promises.contents import SAME
from tests.support import PATIENCE

Answer = Record | Gone | None

BROKEN: dict[type[MemoryStore], tuple[str, ...]] = {}


def noticed_by(*promises: str) -> Callable[[type[MemoryStore]], type[MemoryStore]]:
    """Register a broken store with the promises that it breaks; their names are given without "test_"."""

    def register(store: type[MemoryStore]) -> type[MemoryStore]:
        BROKEN[store] = tuple(f"test_{promise}" for promise in promises)
        return store

    return register


# Claims


@noticed_by("a_claim_on_a_free_address_is_written", "a_new_token_counts_from_one")
class CountsFromZero(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        answer = super()._claim(entry, replacing, now)
        row = self._rows.get(entry.address)
        if answer is None and row is not None and row.token == entry.token and row.revision == 1:
            self._rows[entry.address] = replace(row, revision=0)
        return answer


@noticed_by("a_claim_can_write_every_state_at_once", "every_field_of_a_claim_comes_back")
class WritesEveryClaimAsRunning(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        return super()._claim(replace(entry, state=State.RUNNING), replacing, now)


@noticed_by("a_claim_on_a_taken_address_is_refused_and_shows_the_record")
class TakesOpenForFree(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        row = self._rows.get(entry.address)
        if row is not None and row.state is State.OPEN:
            del self._rows[entry.address]
        return super()._claim(entry, replacing, now)


@noticed_by("a_claim_takes_no_look_at_fingerprints")
class TakesAFingerprintForTheToken(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        row = self._rows.get(entry.address)
        if row is not None and row.fingerprint is not None and row.fingerprint == entry.fingerprint:
            return None
        return super()._claim(entry, replacing, now)


@noticed_by("a_claim_that_arrives_again_late_changes_nothing", "a_take_over_that_arrives_again_late_changes_nothing")
class ClaimsAgain(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        row = self._rows.get(entry.address)
        if row is not None and row.token == entry.token and (replacing is None or replacing.token != entry.token):
            del self._rows[entry.address]
            replacing = None
        return super()._claim(entry, replacing, now)


@noticed_by("a_claim_on_a_free_address_is_written", "racing_copies_of_one_claim_all_succeed")
class ForgetsItsOwnToken(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        shown = self.__dict__.setdefault("_seen", set())
        row = self._rows.get(entry.address)
        if row is not None and row.token == entry.token and replacing is None and entry.token in shown:
            return super()._claim(replace(entry, token=b"another"), None, now)
        shown.add(entry.token)
        return super()._claim(entry, replacing, now)


# Take-overs


@noticed_by("a_take_over_replaces_the_whole_record")
class MergesTheOldRecord(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        if replacing is not None and entry.notes is None:
            entry = replace(entry, notes=replacing.notes)
        return super()._claim(entry, replacing, now)


@noticed_by("a_record_can_be_replaced_in_every_state")
class NeverReplacesDone(MemoryStore):
    def _is_still(self, row: Row, replacing: Record) -> bool:
        return super()._is_still(row, replacing) and row.state is not State.DONE


@noticed_by(
    "a_take_over_is_refused_if_the_owner_has_extended",
    "a_take_over_is_refused_if_the_owner_has_finished",
    "a_take_over_is_refused_if_the_owner_has_left_the_record_open",
    "a_take_over_compares_the_revision",
    "marking_held_is_refused_if_the_owner_has_extended",
    "marking_held_is_refused_if_the_owner_has_finished",
)
class ComparesOnlyTheToken(MemoryStore):
    def _is_still(self, row: Row, replacing: Record) -> bool:
        return row.token == replacing.token


@noticed_by(
    "a_take_over_is_refused_if_another_has_claimed_since",
    "a_take_over_compares_the_token",
    "marking_held_is_refused_if_another_has_taken_over",
)
class ComparesOnlyTheRevision(MemoryStore):
    def _is_still(self, row: Row, replacing: Record) -> bool:
        return row.revision == replacing.revision


@noticed_by("a_take_over_compares_the_revision")
class TakesALaterRevisionForTheSame(MemoryStore):
    def _is_still(self, row: Row, replacing: Record) -> bool:
        return row.token == replacing.token and row.revision <= replacing.revision


@noticed_by("a_take_over_compares_nothing_else")
class ComparesTheState(MemoryStore):
    def _is_still(self, row: Row, replacing: Record) -> bool:
        return super()._is_still(row, replacing) and row.state is replacing.state


@noticed_by("a_take_over_of_nothing_is_gone_and_writes_nothing", "marking_held_is_gone_if_the_owner_has_released")
class WritesOverNothing(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        answer = super()._claim(entry, replacing, now)
        return super()._claim(entry, None, now) if answer is GONE else answer


@noticed_by("a_take_over_of_nothing_is_gone_and_writes_nothing")
class WritesAlthoughItSaysGone(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        answer = super()._claim(entry, replacing, now)
        if answer is GONE:
            super()._claim(entry, None, now)
        return answer


@noticed_by(
    "either_the_owner_finishes_or_another_takes_over",
    "either_the_owner_extends_or_another_takes_over",
    "either_the_owner_releases_or_another_takes_over",
    "of_many_racing_take_overs_exactly_one_wins",
)
class ComparesNothing(MemoryStore):
    """Whoever comes, in whatever order, has won."""

    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        self._rows.pop(entry.address, None)
        return super()._claim(entry, None, now)

    def _mine(self, claim: Claim, now: float) -> Row | None:
        return self._rows.get(claim.address)


# Marks


@noticed_by(
    "marking_held_is_refused_if_the_owner_has_extended",
    "marking_held_is_refused_if_the_owner_has_finished",
    "the_owner_turns_held_into_done",
)
class TakesAMarkForItsOwn(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        row = self._rows.get(entry.address)
        if (
            row is not None
            and row.token == entry.token
            and replacing is not None
            and not self._is_still(row, replacing)
        ):
            return None
        return super()._claim(entry, replacing, now)


@noticed_by("marking_held_keeps_the_owners_token_and_counts_as_a_write")
class MarksWithoutCounting(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        answer = super()._claim(entry, replacing, now)
        if answer is None and replacing is not None and replacing.token == entry.token:
            self._rows[entry.address] = replace(self._rows[entry.address], revision=replacing.revision)
        return answer


@noticed_by(
    "marking_held_keeps_the_owners_token_and_counts_as_a_write", "a_take_over_is_refused_if_the_owner_has_finished"
)
class ShowsWhatWasSeenBefore(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        answer = super()._claim(entry, replacing, now)
        return replacing if isinstance(answer, Record) and replacing is not None else answer


@noticed_by("the_owner_turns_held_into_done")
class TakesHeldForFinal(MemoryStore):
    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        row = self._mine(claim, now)
        if row is not None and row.state is State.HELD and ending.state is not State.HELD:
            return False
        return super()._finish(claim, ending, now)


# Owners


class Careless(MemoryStore):
    """Takes every token for the owner's, where `careless` says so."""

    careless = ""
    _now_in = ""

    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        self._now_in = "finish"
        return super()._finish(claim, ending, now)

    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        self._now_in = "extend"
        return super()._extend(claim, notes, now)

    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        self._now_in = "release"
        return super()._release(claim, released, now)

    def _mine(self, claim: Claim, now: float) -> Row | None:
        return self._alive(claim.address, now) if self._now_in == self.careless else super()._mine(claim, now)


@noticed_by(
    "a_stale_token_cannot_finish",
    "a_token_does_not_come_back_after_its_release",
    "a_held_record_that_is_resolved_refuses_its_owner",
)
class FinishesForAnybody(Careless):
    careless = "finish"


@noticed_by("a_stale_token_cannot_extend", "a_token_does_not_come_back_after_its_release")
class ExtendsForAnybody(Careless):
    careless = "extend"


@noticed_by("a_stale_token_cannot_release", "a_token_does_not_come_back_after_its_release")
class ReleasesForAnybody(Careless):
    careless = "release"


@noticed_by("finish_writes_the_whole_ending_and_keeps_the_rest")
class FinishDropsTheFingerprint(MemoryStore):
    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        ours = super()._finish(claim, ending, now)
        if ours:
            self._rows[claim.address] = replace(self._rows[claim.address], fingerprint=None)
        return ours


@noticed_by("finish_clears_what_the_ending_leaves_out")
class FinishKeepsOldNotes(MemoryStore):
    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        row = self._mine(claim, now)
        if row is not None and ending.notes is None:
            ending = replace(ending, notes=row.notes)
        return super()._finish(claim, ending, now)


@noticed_by("a_held_record_is_finished_forever", "forever_stays")
class CapsForever(MemoryStore):
    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        return super()._finish(claim, replace(ending, ttl=min(ending.ttl, 1e9)), now)


@noticed_by("finish_of_an_absent_record_is_refused_and_writes_nothing")
class FinishesNothing(MemoryStore):
    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        if claim.address not in self._rows:
            self._claim(Entry(address=claim.address, token=claim.token, state=ending.state), None, now)
        return super()._finish(claim, ending, now)


@noticed_by("extend_can_end_the_lease")
class NeverShortensALease(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        row = self._rows.get(claim.address)
        left = 0.0 if row is None else row.leased_until - now
        return super()._extend(replace(claim, lease=max(claim.lease, left)), notes, now)


@noticed_by("extend_renews_lease_and_ttl")
class ExtendsOnlyTheLease(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        row = self._rows.get(claim.address)
        return super()._extend(claim if row is None else replace(claim, ttl=row.expires - now), notes, now)


@noticed_by("extend_keeps_the_notes_until_there_are_new_ones")
class ExtendClearsTheNotes(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        ours = super()._extend(claim, notes, now)
        if ours:
            self._rows[claim.address] = replace(self._rows[claim.address], notes=notes)
        return ours


@noticed_by("notes_never_become_shorter_under_one_token")
class ExtendTakesLateNotes(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        ours = super()._extend(claim, notes, now)
        if ours and notes is not None:
            self._rows[claim.address] = replace(self._rows[claim.address], notes=notes)
        return ours


@noticed_by("extend_of_a_held_record_keeps_only_the_notes")
class ExtendsWhatIsHeld(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        ours = super()._extend(claim, notes, now)
        if ours:
            self._rows[claim.address] = replace(self._rows[claim.address], expires=now + claim.ttl)
        return ours


@noticed_by("extend_of_an_ended_record_is_refused_and_changes_nothing")
class ExtendRevives(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        row = self._mine(claim, now)
        if row is not None and row.state not in (State.RUNNING, State.HELD):
            self._rows[claim.address] = replace(row, state=State.RUNNING)
        return super()._extend(claim, notes, now)


@noticed_by("extend_of_an_ended_record_is_refused_and_changes_nothing")
class ExtendCountsWhatItRefuses(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        row = self._mine(claim, now)
        ours = super()._extend(claim, notes, now)
        if row is not None and not ours:
            self._rows[claim.address] = replace(row, revision=row.revision + 1)
        return ours


@noticed_by("extend_of_an_absent_record_is_refused_and_writes_nothing")
class ExtendsNothing(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        if claim.address not in self._rows:
            self._claim(Entry(address=claim.address, token=claim.token), None, now)
        return super()._extend(claim, notes, now)


@noticed_by("release_frees_the_address", "a_take_over_of_nothing_is_gone_and_writes_nothing")
class ReleaseAlwaysLeavesAMemory(MemoryStore):
    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        return super()._release(claim, released or Released(ttl=math.inf, attempt=1), now)


@noticed_by("release_forgets_a_record_in_every_state")
class ReleasesOnlyWhatRuns(MemoryStore):
    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        row = self._mine(claim, now)
        if row is not None and row.state is State.DONE:
            return False
        return super()._release(claim, released, now)


@noticed_by("release_of_an_absent_record_has_succeeded_before", "release_frees_the_address")
class ReleaseOfNothingFails(MemoryStore):
    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        return self._mine(claim, now) is not None and super()._release(claim, released, now)


@noticed_by("release_with_notes_leaves_the_record_open")
class ReleaseHasNoMemory(MemoryStore):
    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        return super()._release(claim, None, now)


@noticed_by("a_release_without_notes_clears_them")
class ReleaseKeepsOldNotes(MemoryStore):
    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        row = self._mine(claim, now)
        if row is not None and released is not None and released.notes is None:
            released = replace(released, notes=row.notes)
        return super()._release(claim, released, now)


# Revisions


class Uncounted(MemoryStore):
    """Does not count what `_put_back_after` is called after."""

    def _put_back(self, address: Address, before: Row | None) -> None:
        if before is not None and address in self._rows:
            self._rows[address] = replace(self._rows[address], revision=before.revision)


@noticed_by("the_revision_counts_every_write_of_one_token", "a_take_over_is_refused_if_the_owner_has_extended")
class ExtendsWithoutCounting(Uncounted):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        before = self._rows.get(claim.address)
        ours = super()._extend(claim, notes, now)
        self._put_back(claim.address, before)
        return ours


@noticed_by("the_revision_counts_every_write_of_one_token", "a_take_over_is_refused_if_the_owner_has_finished")
class FinishesWithoutCounting(Uncounted):
    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        before = self._rows.get(claim.address)
        ours = super()._finish(claim, ending, now)
        self._put_back(claim.address, before)
        return ours


@noticed_by(
    "a_release_that_leaves_the_record_open_counts_as_a_write",
    "a_take_over_is_refused_if_the_owner_has_left_the_record_open",
)
class ReleasesWithoutCounting(Uncounted):
    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        before = self._rows.get(claim.address)
        ours = super()._release(claim, released, now)
        self._put_back(claim.address, before)
        return ours


@noticed_by("a_new_token_counts_from_one", "a_take_over_replaces_the_whole_record")
class CountsOn(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        answer = super()._claim(entry, replacing, now)
        if answer is None and replacing is not None:
            self._rows[entry.address] = replace(self._rows[entry.address], revision=replacing.revision + 1)
        return answer


# Addresses


class FoldedRows(OrderedDict[Any, Row]):
    """Takes two addresses for one where they fold to the same."""

    def __init__(self, fold: Callable[[Address], Any]) -> None:
        super().__init__()
        self._fold = fold

    def get(self, address: Any, default: Any = None) -> Any:
        return super().get(self._fold(address), default)

    def __getitem__(self, address: Any) -> Row:
        return super().__getitem__(self._fold(address))

    def __setitem__(self, address: Any, row: Row) -> None:
        super().__setitem__(self._fold(address), row)

    def __delitem__(self, address: Any) -> None:
        super().__delitem__(self._fold(address))

    def move_to_end(self, address: Any, last: bool = True) -> None:
        super().move_to_end(self._fold(address), last)


class Folds(MemoryStore):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rows = FoldedRows(self._folded)

    def _folded(self, address: object) -> Any:
        # What the sweep takes out of the rows is folded already.
        return self.fold(address) if isinstance(address, Address) else address

    def fold(self, address: Address) -> Any:
        raise NotImplementedError


@noticed_by("keys_that_look_alike_stay_apart", "what_is_done_to_one_address_is_not_done_to_its_likes")
class FoldsTheCaseOfKeys(Folds):
    def fold(self, address: Address) -> Any:
        return (address.scope, address.operation, address.key.casefold())


@noticed_by("keys_that_look_alike_stay_apart")
class TrimsKeys(Folds):
    def fold(self, address: Address) -> Any:
        return (address.scope, address.operation, address.key.rstrip(" "))


@noticed_by("keys_that_look_alike_stay_apart")
class NormalizesKeys(Folds):
    def fold(self, address: Address) -> Any:
        return (address.scope, address.operation, unicodedata.normalize("NFC", address.key))


@noticed_by("operations_that_look_alike_stay_apart")
class DropsAccentsOfOperations(Folds):
    def fold(self, address: Address) -> Any:
        return (address.scope, address.operation.encode("ascii", "ignore"), address.key)


@noticed_by("scopes_that_look_alike_stay_apart")
class TakesNoScopeForNull(Folds):
    def fold(self, address: Address) -> Any:
        return (address.scope or "null", address.operation, address.key)


@noticed_by("separators_do_not_join_the_parts_of_an_address")
class JoinsWithColons(Folds):
    def fold(self, address: Address) -> Any:
        return f"{address.scope}:{address.operation}:{address.key}"


@noticed_by("addresses_of_the_greatest_length_stay_apart")
class CutsLongAddresses(Folds):
    def fold(self, address: Address) -> Any:
        return address.packed[:255]


# Fields


def loses(field: str, nothing: Any, *promises: str) -> None:
    """Register a store that forgets one field of a claim."""

    class Loses(MemoryStore):
        def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
            return super()._claim(replace(entry, **{field: nothing}), replacing, now)

    Loses.__name__ = Loses.__qualname__ = f"Loses_{field}"
    noticed_by("every_field_of_a_claim_comes_back", *promises)(Loses)


loses("age", 0.0, "lease_ttl_and_age_are_counted_from_the_claim")
for _field in fields(Entry):
    # A new field of the record is among them by itself.
    if _field.name in SAME and _field.name not in ("address", "token", "state"):
        loses(_field.name, _field.default)


class Rewrites(MemoryStore):
    """Stores bytes otherwise than they came."""

    def rewritten(self, stored: bytes | None) -> bytes | None:
        raise NotImplementedError

    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        entry = replace(entry, result=self.rewritten(entry.result), notes=self.rewritten(entry.notes))
        return super()._claim(entry, replacing, now)

    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        return super()._extend(claim, None if notes is None else self.rewritten(notes), now)

    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        ending = replace(ending, result=self.rewritten(ending.result), notes=self.rewritten(ending.notes))
        return super()._finish(claim, ending, now)

    def _release(self, claim: Claim, released: Released | None, now: float) -> bool:
        if released is not None:
            released = replace(released, notes=self.rewritten(released.notes))
        return super()._release(claim, released, now)


@noticed_by("results_come_back_byte_for_byte", "notes_come_back_byte_for_byte")
class TakesEmptyForNone(Rewrites):
    def rewritten(self, stored: bytes | None) -> bytes | None:
        return stored or None


@noticed_by("a_claim_without_the_optional_fields_comes_back_without_them", "results_come_back_byte_for_byte")
class TakesNoneForEmpty(Rewrites):
    def rewritten(self, stored: bytes | None) -> bytes | None:
        return stored or b""


@noticed_by("results_come_back_byte_for_byte", "notes_come_back_byte_for_byte", "every_field_of_a_claim_comes_back")
class TakesBytesForText(Rewrites):
    def rewritten(self, stored: bytes | None) -> bytes | None:
        return stored if stored is None else stored.decode(errors="replace").encode()


@noticed_by("results_come_back_byte_for_byte", "notes_come_back_byte_for_byte")
class CutsLargeBytes(Rewrites):
    def rewritten(self, stored: bytes | None) -> bytes | None:
        return stored if stored is None else stored[:65_535]


# Clocks


@noticed_by("lease_ttl_and_age_are_counted_from_the_claim", "the_record_in_the_way_is_shown_with_what_is_left_now")
class StandsStill(MemoryStore):
    def __init__(self, **options: Any) -> None:
        super().__init__(clock=lambda: 0.0)


@noticed_by("lease_ttl_and_age_are_counted_from_the_claim")
class CountsMilliseconds(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        return super()._claim(replace(entry, lease=entry.lease / 1_000), replacing, now)


@noticed_by("the_record_in_the_way_is_shown_with_what_is_left_now")
class ShowsTheLeaseAsItWasWritten(MemoryStore):
    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Answer:
        answer = super().claim(entry, replacing=replacing)
        return replace(answer, lease_left=answer.lease_left + answer.age) if isinstance(answer, Record) else answer


@noticed_by("age_goes_on_over_every_write_of_the_owner")
class ExtendBeginsAnew(MemoryStore):
    def _extend(self, claim: Claim, notes: bytes | None, now: float) -> bool:
        ours = super()._extend(claim, notes, now)
        if ours:
            self._rows[claim.address] = replace(self._rows[claim.address], began=now)
        return ours


@noticed_by("a_ttl_is_counted_from_the_last_write", "the_ttl_of_an_ending_and_of_a_release_ends_too")
class FinishNeverShortensAStay(MemoryStore):
    def _finish(self, claim: Claim, ending: Ending, now: float) -> bool:
        row = self._mine(claim, now)
        if row is not None:
            ending = replace(ending, ttl=max(ending.ttl, row.expires - now))
        return super()._finish(claim, ending, now)


@noticed_by("a_lease_that_is_over_changes_nothing_by_itself")
class FreesAfterTheLease(MemoryStore):
    def _claim(self, entry: Entry, replacing: Record | None, now: float) -> Answer:
        row = self._alive(entry.address, now)
        if row is not None and row.token != entry.token and row.state is State.RUNNING and row.leased_until <= now:
            del self._rows[entry.address]
        return super()._claim(entry, replacing, now)


@noticed_by("a_lease_that_is_over_changes_nothing_by_itself", "an_owner_may_finish_or_release_after_its_lease")
class RefusesLateOwners(MemoryStore):
    def _mine(self, claim: Claim, now: float) -> Row | None:
        row = super()._mine(claim, now)
        return None if row is None or (row.state is State.RUNNING and row.leased_until < now) else row


@noticed_by(
    "an_expired_record_is_free",
    "the_ttl_of_an_ending_and_of_a_release_ends_too",
    "taking_over_an_expired_record_writes_it_or_finds_it_gone",
)
class NeverForgets(MemoryStore):
    def _alive(self, address: Address, now: float) -> Row | None:
        return self._rows.get(address)

    def _is_still(self, row: Row, replacing: Record) -> bool:
        return super()._is_still(row, replacing) and row.expires > self._clock()


@noticed_by("purge_removes_only_what_has_expired", "forever_stays", "racing_purges_remove_each_record_once")
class PurgesWhatIsNeeded(MemoryStore):
    def purge(self, limit: int) -> int:
        removed = super().purge(limit)
        # As it is locked, another purge does not see its rows change while it goes through them.
        with self._mutex:
            self._rows.clear()
        return removed


@noticed_by("purge_removes_only_what_has_expired")
class PurgesByTheLease(MemoryStore):
    def purge(self, limit: int) -> int:
        now = self._clock()
        for address in [address for address, row in self._rows.items() if row.leased_until <= now < row.expires][:1]:
            del self._rows[address]
        return super().purge(limit)


@noticed_by("purge_respects_its_limit")
class PurgesWithoutALimit(MemoryStore):
    def purge(self, limit: int) -> int:
        return super().purge(10_000)


@noticed_by("purge_of_nothing_removes_nothing")
class PurgeCountsOneMore(MemoryStore):
    def purge(self, limit: int) -> int:
        return super().purge(limit) + 1


@noticed_by("purge_removes_only_what_has_expired", "racing_purges_remove_each_record_once")
class PurgeOnlyCounts(MemoryStore):
    def purge(self, limit: int) -> int:
        with self._mutex:
            now = self._clock()
            return len([row for row in self._rows.values() if row.expires <= now][:limit])


# Races


@noticed_by("of_many_racing_claims_exactly_one_wins", "of_many_racing_take_overs_exactly_one_wins")
class LooksAndThenWrites(MemoryStore):
    """Between its look and its write it waits until the other racers have looked too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Eight racers, each of whom sends twice.
        self._all_have_looked = threading.Barrier(16)

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Answer:
        with self._mutex:
            scratch = MemoryStore(clock=self._clock)
            scratch._rows = self._rows.copy()
        answer = scratch.claim(entry, replacing=replacing)
        if threading.current_thread() is not threading.main_thread():
            self._all_have_looked.wait(PATIENCE)
        if answer is None:
            self._rows[entry.address] = scratch._rows[entry.address]
        return answer


# Batches


@noticed_by("an_empty_batch_has_no_answers")
class AnswersAnEmptyBatch(MemoryStore):
    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return super().extend_all(claims) or [False]


@noticed_by("claiming_all_equals_claiming_each", "a_batch_may_be_as_large_as_a_guard_sends")
class ClaimsAllWhateverIsThere(MemoryStore):
    def claim_all(self, entries: Sequence[Entry]) -> list[Answer]:
        super().claim_all(entries)
        return [None] * len(entries)


@noticed_by("claiming_all_equals_claiming_each", "a_batch_may_be_as_large_as_a_guard_sends")
class AnswersBackwards(MemoryStore):
    def claim_all(self, entries: Sequence[Entry]) -> list[Answer]:
        return super().claim_all(entries)[::-1]


@noticed_by("extending_all_equals_extending_each")
class ExtendsAllWithoutRenewing(MemoryStore):
    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return super().extend_all([replace(claim, lease=1.0) for claim in claims])


@noticed_by(
    "finishing_all_equals_finishing_each",
    "closing_all_takes_every_way_to_close_in_one_batch",
    "a_batch_may_be_as_large_as_a_guard_sends",
)
class ClosesAllForAnybody(MemoryStore):
    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        owned = [
            close if row is None else replace(close, claim=replace(close.claim, token=row.token))
            for close in closes
            for row in [self._rows.get(close.claim.address)]
        ]
        return super().close_all(owned)


@noticed_by("releasing_all_equals_releasing_each", "closing_all_takes_every_way_to_close_in_one_batch")
class ClosesAllWithoutForgetting(MemoryStore):
    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        left = Released(ttl=math.inf, attempt=1)
        return super().close_all([replace(close, by=close.by or left) for close in closes])


@noticed_by("leaving_all_open_equals_leaving_each_open", "closing_all_takes_every_way_to_close_in_one_batch")
class ClosesAllWithoutAMemory(MemoryStore):
    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        return super().close_all(
            [replace(close, by=None if isinstance(close.by, Released) else close.by) for close in closes]
        )


@noticed_by("a_batch_may_be_as_large_as_a_guard_sends")
class ExtendsOnlyTheFirstHundred(MemoryStore):
    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        return super().extend_all(claims[:100]) + [False] * len(claims[100:])


# Annotations


@noticed_by("an_annotation_changes_the_notes_and_nothing_else")
class AnnotatesWithoutTheRemark(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        answer = super().annotate(record, notes)
        self._rows[record.address] = replace(self._rows[record.address], remark="")
        return answer


@noticed_by("an_annotation_keeps_what_a_record_has_not")
class AnnotatesAnOmittedResult(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        answer = super().annotate(record, notes)
        self._rows[record.address] = replace(self._rows[record.address], omitted=False, result=b"")
        return answer


@noticed_by("annotations_do_not_move_the_end_of_a_record")
class AnnotatesByReplacing(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        return self.claim(replace(record, notes=notes).as_entry(record.token), replacing=record)


@noticed_by("a_record_that_is_kept_forever_stays_so")
class AnnotatesForAYear(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        answer = super().annotate(record, notes)
        row = self._rows[record.address]
        self._rows[record.address] = replace(row, expires=min(row.expires, 366 * 86_400.0))
        return answer


@noticed_by(
    "an_annotation_of_what_has_changed_is_answered_with_the_record",
    "of_many_racing_annotations_exactly_one_is_written",
)
class AnnotatesWithoutTheRevision(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        return super().annotate(self.read(record.address) or record, notes)


@noticed_by("an_annotation_of_another_owners_record_is_answered_with_it")
class AnnotatesWithoutTheToken(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        row = self._rows.get(record.address)
        return super().annotate(
            record if row is None else replace(record, token=row.token, revision=row.revision), notes
        )


@noticed_by("an_annotation_never_writes_a_record_that_is_gone")
class AnnotatesWhatIsGone(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        if super().annotate(record, notes) is GONE:
            self.claim(replace(record, notes=notes).as_entry(record.token))
        return GONE


@noticed_by("the_owner_may_still_repeat_its_finish")
class AnnotatesWithATokenOfItsOwn(MemoryStore):
    def annotate(self, record: Record, notes: bytes) -> Answer:
        row = self._rows[record.address]
        if row.token == record.token:
            self._rows[record.address] = replace(row, token=b"of an annotation", notes=notes)
        return None


# Browsing


@noticed_by("browsing_an_empty_store_finds_nothing")
class ShowsAGhost(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        address = Address("", "ghost", "ghost")
        ghost = Record(
            address=address, token=b"", revision=1, state=State.DONE, attempt=1, lease_left=0, ttl_left=1, age=0
        )
        return super().browse(query, limit) or [ghost]


@noticed_by("browsing_shows_records_as_they_are_read")
class BrowsesWithoutFingerprints(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        return [replace(record, fingerprint=None) for record in super().browse(query, limit)]


@noticed_by("browsing_goes_in_the_order_of_addresses", "browsing_goes_page_by_page")
class BrowsesInTheOrderOfADictionary(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        found = super().browse(query, 10_000)
        return sorted(found, key=lambda record: [part.casefold() for part in record.address.parts])[:limit]


@noticed_by("browsing_goes_page_by_page")
class BrowsesWithoutALimit(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        return super().browse(query, 10_000)


@noticed_by("a_page_may_begin_after_an_address_that_is_gone")
class NeedsTheLastAddressOfAPage(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        known = query.after is None or query.after in self._rows
        return super().browse(query if known else query._replace(after=None), limit)


@noticed_by("browsing_filters_by_each_part_of_the_address")
class BrowsesWithoutTheScope(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        return super().browse(query._replace(scope=None), limit)


@noticed_by("browsing_filters_by_each_part_of_the_address")
class TakesNoScopeForAny(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        return super().browse(query._replace(scope=query.scope or None), limit)


@noticed_by("browsing_filters_by_each_part_of_the_address", "filters_and_pages_go_together")
class BrowsesWithoutTheOperation(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        return super().browse(query._replace(operation=None), limit)


@noticed_by("browsing_filters_by_state")
class BrowsesWithoutTheState(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        return super().browse(query._replace(state=None), limit)


@noticed_by("filters_and_pages_go_together")
class FiltersAfterTheLimit(MemoryStore):
    def browse(self, query: Query, limit: int) -> list[Record]:
        found = super().browse(Query(after=query.after), limit)
        return [record for record in found if query.operation in (None, record.address.operation)]
