"""Of many concurrent claims of the same address, one wins. Each is sent twice here too, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import SkipTest

from onefold.stores.base import GONE, Entry, Gone, Record
from onefold.testing.promises._case import Case, claim_of
from onefold.testing.promises._processes import race_in_processes

Answer = Record | Gone | None

PROCESSES = 4
# Each process races for this many addresses: some of the races will be close.
ADDRESSES = 25


class Races(Case):
    """Races between the threads of one process, or the tasks of one event loop."""

    def test_of_many_racing_claims_exactly_one_wins(self) -> None:
        for number in range(self.rounds):
            entries = self._entries(f"key-{number}")

            answers = self._race([_claiming(entry) for entry in entries])

            self._one_has_won(entries, answers)

    def test_of_many_racing_take_overs_exactly_one_wins(self) -> None:
        for number in range(self.rounds):
            seen = self.found(self.claimed(f"key-{number}"))
            entries = self._entries(f"key-{number}")

            answers = self._race([_claiming(entry, seen) for entry in entries])

            self._one_has_won(entries, answers)

    def test_racing_copies_of_one_claim_all_succeed(self) -> None:
        for number in range(self.rounds):
            entry = self.entry(f"key-{number}")

            answers = self._race([_claiming(entry)] * self.racers)

            assert answers == [None] * self.racers
            assert self.found(entry).revision == 1

    def test_either_the_owner_finishes_or_another_takes_over(self) -> None:
        self._one_of_two(lambda claim: lambda store: store.finish(claim, self.ending()))

    def test_either_the_owner_extends_or_another_takes_over(self) -> None:
        self._one_of_two(lambda claim: lambda store: store.extend(claim))

    def test_either_the_owner_releases_or_another_takes_over(self) -> None:
        self._one_of_two(lambda claim: lambda store: store.release(claim))

    def test_racing_purges_remove_each_record_once(self) -> None:
        needed = self.claimed("needed")
        self.expiring(*(f"over-{number}" for number in range(20)))
        self.wait_out_short()

        removed = self._race([lambda store: store.purge(10)] * self.racers)

        total = sum(removed) + self.store.purge(100)
        assert total <= 20 if self.expires_by_itself else total == 20
        assert self.found(needed).token == needed.token

    def _entries(self, key: str) -> list[Entry]:
        """Return one entry for each racer, and each of them twice."""
        return [entry for _ in range(self.racers) for entry in [self.entry(key)] * 2]

    def _one_has_won(self, entries: Sequence[Entry], answers: Sequence[Answer]) -> None:
        winner = one_winner(entries, answers)
        assert self.found(entries[0]).token == winner

    def _one_of_two(self, own: Callable[[Any], Callable[[Any], Any]]) -> None:
        """Race the owner against many who saw its record before."""
        for number in range(self.rounds):
            owner = self.claimed(f"key-{number}")
            seen = self.found(owner)
            entries = self._entries(f"key-{number}")
            asks = [own(claim_of(owner))] * 2

            mine, theirs = _split(self._race([*asks, *(_claiming(entry, seen) for entry in entries)]))

            assert mine[0] is mine[1], "the owner's operation, sent twice, was answered in two ways"
            if mine[0]:
                assert None not in theirs, "the owner and another have both won"
            else:
                self._one_has_won(entries, theirs)


class ProcessRaces(Case):
    """Races between several processes that share the store."""

    def test_of_claims_racing_in_processes_exactly_one_wins(self) -> None:
        keys = [f"key-{number}" for number in range(ADDRESSES)]

        self._one_wins_each(self._source(), keys, [None] * ADDRESSES)

    def test_of_take_overs_racing_in_processes_exactly_one_wins(self) -> None:
        keys = [f"key-{number}" for number in range(ADDRESSES)]

        self._one_wins_each(self._source(), keys, [self.found(self.claimed(key)) for key in keys])

    def _one_wins_each(self, source: Any, keys: Sequence[str], seen: Sequence[Record | None]) -> None:
        rivals = [[self.entry(key) for key in keys] for _ in range(PROCESSES)]

        answers = race_in_processes(source, rivals, seen, is_async=self._is_async)

        for number in range(len(keys)):
            racing = [entries[number] for entries in rivals]
            winner = one_winner(racing, [of_process[number] for of_process in answers])
            assert self.found(racing[0]).token == winner

    def _source(self) -> Any:
        # It may be known only once the store is open: the file of this very test, for instance.
        assert self.store is not None
        source = self.process_source()
        if source is None:
            raise SkipTest("process_source() is None: this store is not shared between processes")
        return source


def one_winner(entries: Sequence[Entry], answers: Sequence[Answer]) -> bytes:
    """Return the token that has won; all others were shown its record."""
    winners = {entry.token for entry, answer in zip(entries, answers, strict=True) if answer is None}
    assert len(winners) == 1, f"{len(winners)} of {len({entry.token for entry in entries})} claims have won"
    (winner,) = winners
    for entry, answer in zip(entries, answers, strict=True):
        assert answer is not GONE, "the record was never gone"
        assert (answer is None) == (entry.token == winner), "one claim, sent twice, was answered in two ways"
        assert answer is None or answer.token == winner, "a loser was shown a record that is not the winner's"
    return winner


def _claiming(entry: Entry, seen: Record | None = None) -> Callable[[Any], Any]:
    return lambda store: store.claim(entry, replacing=seen)


def _split(answers: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return answers[:2], answers[2:]
