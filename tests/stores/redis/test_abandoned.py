"""How long Redis keeps the claim of a worker that died: as long as it can matter, and not longer.

Under `rerun` that is lease + keep: its attempts, its finished steps and its fingerprint matter as long as a duplicate
can come. A claim that may become held stays until somebody looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import Guard, Held, State, Unknown, current
from onefold.keys import address
from onefold.testing import crash_at
from tests.support import Died, end_lease, eventually

ADDRESS = address("charge", "k")

# What the server says of a key that does not expire.
FOREVER = -1

# In milliseconds.
KEEP = 3_600_000
LEASE = 600_000


@pytest.fixture(params=["redis", "valkey"])
def guard(request: pytest.FixtureRequest) -> Iterator[Guard]:
    with Guard(str(request.getfixturevalue(f"{request.param}_url")), keep="1h", lease="10m") as guard:
        yield guard


def ttl(guard: Guard) -> int:
    """The milliseconds after which the server removes the record."""
    stored = guard.store.stored(ADDRESS)
    assert stored is not None
    return int(stored.columns["pttl"])


def abandon(guard: Guard, **fields: Any) -> None:
    """Let a worker die in its handler, without a word to the store."""
    with crash_at("after_handler", guard):
        guard.run("charge", "k", lambda: None, **fields)


def abandon_again(guard: Guard, attempt: int, **fields: Any) -> None:
    """Let the next worker take it over when the lease is over, and die as well."""
    end_lease(guard.store, ADDRESS)
    abandon(guard, **fields)
    record = guard.read("charge", "k")
    assert record is not None
    assert (record.state, record.attempt) == (State.RUNNING, attempt)


def test_an_abandoned_claim_stays_for_its_lease_and_keep(guard: Guard) -> None:
    abandon(guard)

    assert KEEP < ttl(guard) <= LEASE + KEEP


def test_heartbeats_do_not_add_up(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten a second, of a lease that no pause of the machine outlasts.
    monkeypatch.setattr("onefold._heartbeat.beats.BEATS_PER_LEASE", LEASE // 100)
    lefts: list[int] = []
    store = guard.store

    def beats() -> bool:
        record = guard.read("charge", "k")
        return record is not None and record.revision >= 4

    def handler() -> None:
        assert eventually(beats)
        lefts.append(store.stored(ADDRESS).columns["pttl"])

    with crash_at("after_handler", guard):
        guard.run("charge", "k", handler)

    assert len(lefts) == 1
    assert all(KEEP < left <= LEASE + KEEP for left in (*lefts, ttl(guard)))


def test_a_take_over_begins_anew_and_adds_nothing(guard: Guard) -> None:
    abandon(guard)
    for attempt in (2, 3):
        abandon_again(guard, attempt)

    assert KEEP < ttl(guard) <= LEASE + KEEP


def test_a_finished_step_does_not_prolong_it(guard: Guard) -> None:
    with crash_at("after_step", guard, step="reserve"):
        guard.run("charge", "k", lambda: current().step("reserve", lambda: 1))

    assert KEEP < ttl(guard) <= LEASE + KEEP


def test_what_is_skipped_after_a_crash_stays_as_long(guard: Guard) -> None:
    abandon(guard, after_crash="skip")

    assert KEEP < ttl(guard) <= LEASE + KEEP


def test_a_claim_that_was_released_stays_for_keep(guard: Guard) -> None:
    with contextlib.suppress(Died):
        guard.run("charge", "k", _dies)
    record = guard.read("charge", "k")

    assert record is not None
    assert record.state is State.OPEN
    assert KEEP - LEASE < ttl(guard) <= KEEP


def _dies() -> None:
    raise Died


def test_a_clean_failure_leaves_nothing(guard: Guard) -> None:
    with contextlib.suppress(ValueError):
        guard.run("charge", "k", lambda: int("no number"))

    assert guard.store.stored(ADDRESS) is None


@pytest.mark.parametrize(
    "fields",
    [{"after_crash": "hold"}, {"after_crash": lambda _running: Unknown()}, {"rerun_within": "12h"}],
    ids=["hold", "a probe", "rerun_within"],
)
def test_what_may_become_held_stays_until_somebody_looks(guard: Guard, fields: dict[str, Any]) -> None:
    abandon(guard, **fields)

    assert ttl(guard) == FOREVER


def test_what_is_held_stays_until_somebody_looks(guard: Guard) -> None:
    abandon(guard, max_attempts=1)
    end_lease(guard.store, ADDRESS)

    with pytest.raises(Held):
        guard.run("charge", "k", pytest.fail, max_attempts=1)
    assert ttl(guard) == FOREVER
