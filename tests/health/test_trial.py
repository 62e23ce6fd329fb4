"""The trial of a store: it notices a store that breaks its contract, and leaves nothing behind however it ends."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from onefold import Record, StoreUnavailable
from onefold.health import Grade, Report, examine
from onefold.health.examine import ROUND_TRIP_SLOW
from onefold.stores.base import Address, Claim, Ending, Entry, Gone, Released
from onefold.stores.memory import MemoryStore
from tests.health.tools import GREEN, RED, UNKNOWN, YELLOW, checks_of


class Foreign:
    """A store of somebody else's, which tells nothing about its server."""

    def __init__(self) -> None:
        self.inside = MemoryStore()

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self.inside.claim(entry, replacing=replacing)

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self.inside.extend(claim, notes)

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self.inside.finish(claim, ending)

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self.inside.release(claim, released)

    def read(self, address: Address) -> Record | None:
        return self.inside.read(address)

    def purge(self, limit: int) -> int:
        return self.inside.purge(limit)


def grades(report: Report) -> dict[str, Grade]:
    return {check.name: check.grade for check in report.checks}


def test_a_store_that_tells_nothing_gets_the_general_checks() -> None:
    store = Foreign()

    report = examine(store)

    assert grades(report) == {"server": UNKNOWN, "trial": GREEN, "round trip": GREEN, "clock": UNKNOWN}
    assert report.reached
    assert len(store.inside) == 0


def test_the_memory_store_is_green_and_says_what_it_is_for() -> None:
    found = checks_of("memory:")

    assert {check.grade for check in found.values()} == {GREEN}
    assert "for tests" in found["durability"].reason


class GivesEverybodyTheClaim(Foreign):
    def claim(self, entry: Entry, *, replacing: Record | None = None) -> None:
        seen = self.inside.read(entry.address)
        assert self.inside.claim(entry, replacing=replacing or seen) is None


class LosesResults(Foreign):
    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self.inside.finish(claim, Ending(state=ending.state, ttl=ending.ttl))


class ForgetsAtOnce(Foreign):
    def read(self, address: Address) -> None:
        self.inside.read(address)


class KeepsWhatIsReleased(Foreign):
    def release(self, claim: Claim, released: Released | None = None) -> bool:
        self.inside.read(claim.address)
        return True


class CannotFinish(Foreign):
    def finish(self, claim: Claim, ending: Ending) -> bool:
        return False


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (GivesEverybodyTheClaim, "a second claim of a running key was not refused"),
        (LosesResults, "the result was not kept"),
        (ForgetsAtOnce, "the result was not kept"),
        (KeepsWhatIsReleased, "a record that was removed is still there"),
        (CannotFinish, "the owner could not finish its work"),
    ],
)
def test_a_broken_promise_is_red_and_nothing_is_left_behind(broken: type[Foreign], message: str) -> None:
    store = broken()

    report = examine(store)

    trial = next(check for check in report.checks if check.name == "trial")
    assert trial.grade is RED
    assert message in trial.reason
    assert report.reached
    assert len(store.inside) == (broken is KeepsWhatIsReleased)


class Fails(Foreign):
    """It fails at one operation; `after` says that the operation was applied, and only its answer was lost."""

    def __init__(self, at: str, error: Exception, *, after: bool) -> None:
        super().__init__()
        self._at, self._error, self._after = at, error, after

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("inside", "_at", "_error", "_after") or name != self._at:
            return found

        def failing(*args: Any, **kwargs: Any) -> Any:
            self._at = ""
            if self._after:
                found(*args, **kwargs)
            raise self._error

        return failing


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", ["claim", "extend", "finish", "release"])
def test_a_store_that_fails_in_the_middle_is_red_and_nothing_is_left_behind(at: str, after: bool) -> None:
    store = Fails(at, StoreUnavailable("the server went away"), after=after)

    report = examine(store)

    assert grades(report)["trial"] is RED
    # There were no facts either: it cannot be reached.
    assert not report.reached
    assert len(store.inside) == 0


def test_an_error_that_is_no_store_unavailable_breaks_the_contract_and_its_words_are_not_shown() -> None:
    report = examine(Fails("finish", KeyError("password=geheim"), after=False))

    trial = next(check for check in report.checks if check.name == "trial")
    assert trial.grade is RED
    assert "KeyError" in trial.reason
    assert "geheim" not in str(report)


class Tells(Foreign):
    def facts(self) -> dict[str, object]:
        raise KeyError("password=geheim")


def test_a_store_that_raises_when_it_is_asked_is_tried_all_the_same_and_its_words_are_not_shown() -> None:
    report = examine(Tells())

    assert report.checks[0].grade is UNKNOWN
    assert "KeyError" in report.checks[0].reason
    assert grades(report)["trial"] is GREEN
    assert "geheim" not in str(report)


class Slow(Foreign):
    def read(self, address: Address) -> Record | None:
        time.sleep(ROUND_TRIP_SLOW * 1.1)
        return super().read(address)


def test_a_slow_round_trip_is_yellow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["onefold.health.examine"], "ROUND_TRIP_SLOW", ROUND_TRIP_SLOW)

    assert grades(examine(Slow()))["round trip"] is YELLOW
