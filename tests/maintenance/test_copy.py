"""Records from one store to another: nothing is lost, nothing is overwritten, nothing runs twice for it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from onefold import Done, Guard, Held, Policy, Record, Rerun, State, StoreUnavailable, UsageError, current
from onefold.maintenance import copy as copies
from onefold.maintenance.copy import Tally, copying
from onefold.stores.base import Address, Claim, Ending, Entry, Gone, Query
from onefold.stores.memory import MemoryStore
from tests.support import Clock, die_running

EVERYTHING = Query()


def put(store: Any, key: str, state: State = State.DONE, **fields: Any) -> Address:
    address = Address(fields.pop("scope", ""), fields.pop("operation", "charge"), key)
    assert store.claim(Entry(address=address, token=os.urandom(16), state=state, **fields)) is None
    return address


def copy(old: Any, new: Any, query: Query = EVERYTHING, *, dry_run: bool = False) -> Tally:
    tally = Tally()
    for _ in copying(old, new, query, tally=tally, dry_run=dry_run):
        pass
    return tally


def found(store: Any, address: Address) -> Record:
    record: Record | None = store.read(address)
    assert record is not None
    return record


def counts(tally: Tally) -> dict[str, int]:
    """What is not zero."""
    return {name: count for name, count in asdict(tally).items() if name != "why" and count}


# --- what is copied


FULL = {
    "attempt": 3,
    "age": 500.0,
    "ttl": 1_000.0,
    "bypasses": 2,
    "fingerprint": b"\x01\x02\x03\x04digest",
    "notes": b"\x81\xa7reserve\x01",
    "result": b"\x00\x07",
    "remark": "why: café",
}


@pytest.mark.parametrize("state", [State.DONE, State.FAILED, State.HELD, State.OPEN])
def test_a_copy_is_the_record_with_another_token(state: State) -> None:
    clock = Clock()
    old, new = MemoryStore(clock=clock), MemoryStore(clock=clock)
    address = put(old, "pay_1", state, scope="acme", **FULL)

    tally = copy(old, new)

    before, after = asdict(found(old, address)), asdict(found(new, address))
    assert counts(tally) == {"copied": 1}
    assert before.pop("token") != after.pop("token")
    assert before.pop("revision") == after.pop("revision") == 1
    assert before == after
    assert after["ttl_left"] == 1_000.0


def test_what_is_kept_forever_stays_forever_and_what_was_omitted_stays_omitted() -> None:
    old, new = MemoryStore(), MemoryStore()
    address = put(old, "pay_1", omitted=True)

    copy(old, new)

    assert math.isinf(found(new, address).ttl_left)
    assert found(new, address).omitted


def test_a_guard_on_the_new_store_replays_what_the_old_one_did() -> None:
    old, new = MemoryStore(), MemoryStore()
    Guard(old).run("charge", "pay_1", lambda: {"receipt": 17}, payload={"amount": 4200})

    copy(old, new)

    outcome = Guard(new).run("charge", "pay_1", pytest.fail, payload={"amount": 4200})
    assert (outcome.value, outcome.replayed) == ({"receipt": 17}, True)


def test_what_is_held_is_held_in_the_new_store_and_can_be_resolved_there() -> None:
    old, new = MemoryStore(), MemoryStore()
    guard = Guard(new, policy=Policy(after_crash="hold"))
    with suppress(TimeoutError):
        Guard(old, policy=Policy(after_crash="hold")).run("charge", "pay_1", _time_out)

    copy(old, new)

    with pytest.raises(Held):
        guard.run("charge", "pay_1", pytest.fail)
    guard.resolve("charge", "pay_1", Done("paid"), by="maria", reason="statement")
    assert guard.run("charge", "pay_1", pytest.fail).value == "paid"


def _time_out() -> None:
    raise TimeoutError


def test_finished_steps_are_not_done_again_in_the_new_store() -> None:
    old, new = MemoryStore(), MemoryStore()
    steps: list[str] = []

    def ship() -> str:
        current().step("reserve", lambda: steps.append("reserve"))
        if len(steps) == 1 and not steps[1:]:
            steps.append("failed")
            raise ValueError
        return "shipped"

    with suppress(ValueError):
        Guard(old).run("ship", "order_1", ship)

    copy(old, new)

    outcome = Guard(new).run("ship", "order_1", ship)
    assert (outcome.value, outcome.attempt) == ("shipped", 2)
    assert steps == ["reserve", "failed"]


def test_what_has_expired_is_not_copied() -> None:
    clock = Clock()
    old, new = MemoryStore(clock=clock), MemoryStore(clock=clock)
    put(old, "old", ttl=10.0)
    put(old, "young", ttl=100.0)
    clock.advance(50.0)

    assert counts(copy(old, new)) == {"copied": 1}
    assert [record.address.key for record in new.browse(EVERYTHING, 9)] == ["young"]
    assert new.browse(EVERYTHING, 9)[0].ttl_left == 50.0


def test_only_the_scope_and_the_operation_that_are_asked_for_are_copied() -> None:
    old, new = MemoryStore(), MemoryStore()
    for scope in ("", "acme"):
        for operation in ("charge", "mail"):
            put(old, "k", scope=scope, operation=operation)

    assert counts(copy(old, new, Query(scope="acme", operation="mail"))) == {"copied": 1}
    assert counts(copy(old, new, Query(operation="mail"))) == {"copied": 1, "there": 1}


# --- what runs


def test_what_runs_now_is_counted_and_not_copied() -> None:
    clock = Clock()
    old, new = MemoryStore(clock=clock), MemoryStore(clock=clock)
    address = put(old, "pay_1", State.RUNNING, lease=30.0, ttl=90.0)
    put(old, "pay_2")

    first = copy(old, new)
    assert old.finish(Claim(address, found(old, address).token), Ending(state=State.DONE, ttl=90.0))
    second = copy(old, new)

    assert (counts(first), first.complete) == ({"copied": 1, "running": 1}, False)
    assert (counts(second), second.complete) == ({"copied": 1, "there": 1}, True)


def test_a_run_that_was_abandoned_is_taken_over_in_the_new_store_with_its_attempts() -> None:
    clock = Clock()
    old, new = MemoryStore(clock=clock), MemoryStore(clock=clock)
    die_running(old, "charge", "pay_1", Policy(lease="30s"))
    clock.advance(31.0)

    assert counts(copy(old, new)) == {"copied": 1}

    assert found(new, Address("", "charge", "pay_1")).lease_left <= 0
    assert Guard(new).run("charge", "pay_1", lambda: "ran").attempt == 2


def test_a_late_owner_cannot_end_the_copy() -> None:
    clock = Clock()
    old, new = MemoryStore(clock=clock), MemoryStore(clock=clock)
    address = put(old, "pay_1", State.RUNNING, lease=30.0)
    clock.advance(31.0)

    copy(old, new)

    late = Claim(address, found(old, address).token, lease=30.0)
    assert not new.finish(late, Ending(state=State.DONE, ttl=90.0))
    assert not new.extend(late)
    assert found(new, address).state is State.RUNNING


def test_a_guard_that_also_reads_the_old_store_and_a_copy_meet_in_one_record() -> None:
    clock = Clock()
    old, new = MemoryStore(clock=clock), MemoryStore(clock=clock)
    die_running(old, "charge", "pay_1", Policy(lease="30s"))
    Guard(old).run("charge", "pay_2", lambda: "paid")
    clock.advance(31.0)
    copy(old, new)

    with Guard(new, migrate_from=old) as guard:
        assert guard.run("charge", "pay_1", lambda: "ran").attempt == 2
        assert guard.run("charge", "pay_2", pytest.fail).value == "paid"

    # The abandoned one was moved when it was asked for, and is in the old store no more.
    assert counts(copy(old, new)) == {"there": 1}
    assert Guard(new).run("charge", "pay_1", pytest.fail).value == "ran"


# --- again


def test_a_second_run_copies_only_what_is_new() -> None:
    old, new = MemoryStore(), MemoryStore()
    for number in range(10):
        put(old, f"a{number}")
    copy(old, new)
    for number in range(5):
        put(old, f"b{number}")
    before = {record.address: record.revision for record in new.browse(EVERYTHING, 99)}

    assert counts(copy(old, new)) == {"copied": 5, "there": 10}
    assert counts(copy(old, new)) == {"there": 15}
    assert before.items() <= {record.address: record.revision for record in new.browse(EVERYTHING, 99)}.items()


def test_what_the_new_store_knows_is_never_overwritten() -> None:
    old, new = MemoryStore(), MemoryStore()
    ended = put(old, "ended", result=b"\x00\x01")
    put(new, "ended", result=b"\x00\x02")
    runs = put(old, "runs", result=b"\x00\x01")
    put(new, "runs", State.RUNNING, lease=30.0)
    held = put(old, "held", State.HELD)
    put(new, "held", State.OPEN)

    assert counts(copy(old, new)) == {"there": 3}

    assert found(new, ended).result == b"\x00\x02"
    assert found(new, runs).state is State.RUNNING
    assert found(new, held).state is State.OPEN


def test_what_came_into_the_new_store_while_it_was_looked_at_is_not_overwritten() -> None:
    class Late(MemoryStore):
        """Somebody claims between the look and the copy."""

        def claim_all(self, entries: Any) -> list[Record | Gone | None]:
            put(self, "pay_1", result=b"\x00\x02")
            return super().claim_all(entries)

    old, new = MemoryStore(), Late()
    address = put(old, "pay_1", result=b"\x00\x01")

    assert counts(copy(old, new)) == {"there": 1}
    assert found(new, address).result == b"\x00\x02"


@pytest.mark.parametrize("state", [State.OPEN, State.HELD, State.RUNNING])
def test_what_has_ended_in_the_old_store_since_does_not_run_again_in_the_new_one(state: State) -> None:
    """A first copy while the old workers still work finds some of their deliveries unfinished."""
    old, new = MemoryStore(), MemoryStore()
    address = put(old, "pay_1", state)
    copy(old, new)
    guard = Guard(old)
    if state is State.HELD:
        guard.resolve("charge", "pay_1", Done("paid"), by="maria", reason="x")
    else:
        guard.run("charge", "pay_1", lambda: "paid")

    assert counts(copy(old, new, dry_run=True)) == {"updated": 1}
    assert found(new, address).state is state
    assert counts(copy(old, new)) == {"updated": 1}

    assert Guard(new).run("charge", "pay_1", pytest.fail).value == "paid"
    assert counts(copy(old, new)) == {"there": 1}


def test_a_deliberate_second_run_in_the_new_store_is_not_undone() -> None:
    old, new = MemoryStore(), MemoryStore()
    put(old, "pay_1")
    address = put(new, "pay_1", State.OPEN, bypasses=1)

    assert counts(copy(old, new)) == {"there": 1}
    assert found(new, address).bypasses == 1


def test_what_a_person_settled_in_the_new_store_stays_so() -> None:
    old, new = MemoryStore(), MemoryStore()
    address = put(old, "pay_1", State.HELD)
    copy(old, new)
    Guard(new).resolve("charge", "pay_1", Rerun(), by="maria", reason="no trace")

    assert counts(copy(old, new)) == {"there": 1}
    assert found(new, address).state is State.OPEN


def test_a_copy_that_was_stopped_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BATCH_MAX", 10)
    old, new = MemoryStore(), MemoryStore()
    for number in range(35):
        put(old, f"{number:02}")
    stopped = Tally()
    steps = copying(old, new, EVERYTHING, tally=stopped)
    next(steps), next(steps)

    again = copy(old, new)

    assert counts(stopped) == {"copied": 20}
    assert counts(again) == {"copied": 15, "there": 20}


def test_a_store_that_goes_away_leaves_a_true_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BATCH_MAX", 10)

    class Failing(MemoryStore):
        asked = 0

        def claim_all(self, entries: Any) -> list[Record | Gone | None]:
            self.asked += 1
            if self.asked == 3:
                raise StoreUnavailable("gone")
            return super().claim_all(entries)

    old, new, tally = MemoryStore(), Failing(), Tally()
    for number in range(35):
        put(old, f"{number:02}")

    with pytest.raises(StoreUnavailable):
        for _ in copying(old, new, EVERYTHING, tally=tally):
            pass

    assert tally.copied == len(new) == 20


def test_one_record_that_a_store_does_not_take_is_told_and_the_others_are_copied() -> None:
    class Small(MemoryStore):
        def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
            if entry.notes:
                raise UsageError("its notes are too large")
            return super().claim(entry, replacing=replacing)

        def claim_all(self, entries: Any) -> list[Record | Gone | None]:
            if any(entry.notes for entry in entries):
                raise UsageError("its notes are too large")
            return super().claim_all(entries)

    old, new = MemoryStore(), Small()
    put(old, "a"), put(old, "b", State.OPEN, notes=b"x"), put(old, "c")

    tally = copy(old, new)

    assert (counts(tally), tally.why, tally.complete) == (
        {"copied": 2, "refused": 1},
        "its notes are too large",
        False,
    )


def test_a_dry_run_counts_and_writes_nothing() -> None:
    old, new = MemoryStore(), MemoryStore()
    put(old, "a"), put(old, "b"), put(old, "c", State.RUNNING, lease=30.0)
    put(new, "b")

    assert counts(copy(old, new, dry_run=True)) == {"copied": 1, "there": 1, "running": 1}
    assert len(new) == 1


def test_a_large_record_does_not_wait_for_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BATCH_BYTES", 100)

    class Noted(MemoryStore):
        sizes: tuple[int, ...] = ()

        def claim_all(self, entries: Any) -> list[Record | Gone | None]:
            self.sizes += (len(entries),)
            return super().claim_all(entries)

    old, new = MemoryStore(), Noted()
    for number in range(6):
        put(old, f"{number}", result=b"x" * 40)

    copy(old, new)

    assert new.sizes == (3, 3)


# --- every pair of stores


def store_at(request: pytest.FixtureRequest, kind: str, tmp_path: Path, name: str) -> Any:
    url = f"sqlite:///{tmp_path}/{name}.db?sync=normal" if kind == "sqlite" else request.getfixturevalue(f"{kind}_url")
    return Guard(url)


STATES = [State.DONE, State.FAILED, State.HELD, State.OPEN]
PAIRS = [
    ("sqlite", "sqlite"),
    ("sqlite", "postgres"),
    ("redis", "postgres"),
    ("postgres", "redis"),
    ("dynamodb", "sqlite"),
    ("sqlite", "dynamodb"),
    ("sqlite", "mysql"),
    ("mysql", "valkey"),
]


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    old, new = request.param
    with store_at(request, old, tmp_path, "old") as source, store_at(request, new, tmp_path, "new") as target:
        yield source.store, target.store


@pytest.mark.parametrize("pair", PAIRS, indirect=True, ids=[f"{old} to {new}" for old, new in PAIRS])
def test_every_record_comes_over_whole_between_these_two(pair: tuple[Any, Any]) -> None:
    old, new = pair
    addresses = [
        put(old, f"käy {number}", state, scope=scope, **FULL | {"ttl": ttl})
        for number, state in enumerate(STATES)
        for scope, ttl in (("", math.inf), ("acme", 1_000.0))
    ]
    addresses.append(put(old, "abandoned", State.RUNNING, ttl=1_000.0, age=20.0, attempt=2))

    first, second = copy(old, new), copy(old, new)

    assert counts(first) == {"copied": len(addresses)}
    assert counts(second) == {"there": len(addresses)}
    for address in addresses:
        before, after = asdict(found(old, address)), asdict(found(new, address))
        for name in ("age", "ttl_left"):
            assert after.pop(name) == pytest.approx(before.pop(name), abs=20.0)
        assert before.pop("token") != after.pop("token")
        # DynamoDB's clock is known to a second or two.
        assert max(before.pop("lease_left"), after.pop("lease_left")) <= 3.0
        assert after == before | {"revision": 1}


@pytest.mark.parametrize("pair", [("sqlite", "postgres")], indirect=True, ids=["sqlite to postgres"])
def test_many_records_come_over_in_pages(pair: tuple[Any, Any]) -> None:
    old, new = pair
    addresses = [Address("", "charge", f"pay_{number:06}") for number in range(3_210)]
    entries = [Entry(address=one, token=os.urandom(16), state=State.DONE, ttl=900.0) for one in addresses]
    assert old.claim_all(entries) == [None] * len(entries)

    assert counts(copy(old, new)) == {"copied": 3_210}
    assert counts(copy(old, new)) == {"there": 3_210}
    assert [record.address for record in new.browse(EVERYTHING, 9_999)] == addresses
