"""The DynamoDB store beside its contract: round trips, items, sizes, leases and the clock, tools."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Policy, UsageError
from onefold._model import Address, Ending, Entry, Record, Released, State
from onefold.stores.base import Browsable, Query, Store
from onefold.stores.dynamodb import (
    ITEM_MAX,
    LEASE_MIN,
    DynamoDBStore,
    open_async_store,
)
from onefold.stores.dynamodb.clock import CLOCK_MARGIN, FRESH
from onefold.stores.dynamodb.items import address_of, text_of
from tests.stores.dynamodb.tools import DONE, Time, claim_of, counted, entry, plain_client, size_of, table_of


@pytest.fixture
def client(dynamodb_url: str) -> Iterator[Any]:
    with plain_client(dynamodb_url) as client:
        yield client


@pytest.fixture
def store(dynamodb_url: str, client: Any) -> DynamoDBStore:
    """A store whose table is there, and whose clock is known."""
    store = DynamoDBStore(table_of(dynamodb_url), client=client)
    store.now()
    return store


def items(store: DynamoDBStore, client: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.scan(TableName=store.table, ConsistentRead=True)["Items"]
    return found


def read(store: DynamoDBStore, of: Entry) -> Record:
    found = store.read(of.address)
    assert found is not None
    return found


# Round trips.


def test_each_operation_is_one_round_trip(store: DynamoDBStore, client: Any) -> None:
    sent, mine, other = counted(client), entry(), entry("other")

    assert store.claim(mine) is None
    assert isinstance(store.claim(entry()), Record)
    assert store.extend(claim_of(mine)) is True
    assert store.finish(claim_of(mine), DONE) is True
    assert isinstance(store.claim(entry()), Record)
    assert store.read(mine.address) is not None
    assert sent == ["PutItem", "PutItem", "UpdateItem", "UpdateItem", "PutItem", "GetItem"]

    sent.clear()
    assert store.claim(other) is None
    assert store.release(claim_of(other), Released(ttl=60.0, attempt=1)) is True
    assert store.release(claim_of(other)) is True
    assert store.release(claim_of(other)) is True
    assert sent == ["PutItem", "UpdateItem", "DeleteItem", "DeleteItem"]


def test_a_guard_asks_twice_for_a_new_key_and_once_for_a_duplicate(store: DynamoDBStore, client: Any) -> None:
    sent = counted(client)
    with Guard(store) as guard:
        assert guard.run("charge", "pay_7f3a", lambda: 4200).value == 4200
        assert sent == ["PutItem", "UpdateItem"]

        sent.clear()
        assert guard.run("charge", "pay_7f3a", lambda: 4200).replayed
        assert sent == ["PutItem"]


def test_an_async_guard_asks_twice_for_a_new_key_and_once_for_a_duplicate(dynamodb_url: str) -> None:
    async def run() -> tuple[list[str], list[str]]:
        store = open_async_store(f"{dynamodb_url}&timeout=60s")
        await store.now()
        sent = counted(await store._clients.get())
        # Claims are renewed and ended by a client of the store's own.
        ended = counted(await store._renewing.get())
        async with AsyncGuard(store) as guard:
            assert (await guard.run("charge", "pay_7f3a", ran)).value == 4200
            first = sent + ended
            sent.clear()
            assert (await guard.run("charge", "pay_7f3a", ran)).replayed
        await store.aclose()
        return first, sent

    async def ran() -> int:
        return 4200

    assert asyncio.run(run()) == (["PutItem", "UpdateItem"], ["PutItem"])


def test_the_first_use_costs_one_round_trip_more(dynamodb_url: str, store: DynamoDBStore, client: Any) -> None:
    sent, late = counted(client), DynamoDBStore(store.table, client=client)

    assert late.claim(entry()) is None

    assert sent == ["GetItem", "PutItem"]


def test_after_a_long_silence_the_time_is_asked_for_once(store: DynamoDBStore, client: Any) -> None:
    moved = Time(client)
    moved.of(store)
    store.now()
    sent = counted(client)

    moved.passes(FRESH + 1)
    assert store.claim(entry()) is None
    assert store.claim(entry("another")) is None

    assert sent == ["GetItem", "PutItem", "PutItem"]


def test_every_read_is_consistent(store: DynamoDBStore, client: Any) -> None:
    asked: list[bool] = []
    for action in ("GetItem", "Scan"):
        client.meta.events.register(
            f"provide-client-params.dynamodb.{action}", lambda params, **_: asked.append(params["ConsistentRead"])
        )

    DynamoDBStore(store.table, client=client).read(entry().address)
    store.browse(Query(), 10)
    store.purge(10)

    assert asked == [True] * 4


# The items.


@pytest.mark.parametrize(
    "address",
    [
        Address("", "charge", "pay_7f3a"),
        Address("acme", "charge", "a/b/c"),
        Address("a/b", "c/d", "4.6/acme/charge/x"),
        Address("🧾", "kéy", "👩‍👩‍👧"),
    ],
)
def test_an_address_is_one_text_and_back(address: Address) -> None:
    assert address_of(text_of(address)) == address


def test_a_person_can_read_the_items(store: DynamoDBStore, client: Any) -> None:
    mine = entry("pay_7f3a", address=Address("acme", "charge", "pay_7f3a"))
    store.claim(mine)
    store.finish(claim_of(mine), DONE)

    (item,) = items(store, client)

    assert item["address"] == {"S": "4.6/acme/charge/pay_7f3a"}
    assert item["state"] == {"S": "done"}
    assert abs(float(item["changed"]["N"]) - time.time()) < 60
    # What says nothing is not there: each byte is billed.
    assert sorted(item) == [
        "address", "attempt", "began", "changed", "expires", "result", "revision", "state", "token",
    ]  # fmt: skip


def test_expires_is_in_whole_seconds_and_never_too_early(store: DynamoDBStore, client: Any) -> None:
    before = time.time()
    store.claim(entry(ttl=90.0))

    (item,) = items(store, client)

    expires = int(item["expires"]["N"])
    assert before + 90 <= expires <= time.time() + 90 + 2 * CLOCK_MARGIN + 3


@pytest.mark.parametrize("moment", [1_900_000_000.0, 1_900_000_000.5, 1_900_000_000.25])
def test_numbers_are_written_as_dynamodb_keeps_them(dynamodb_url: str, client: Any, moment: float) -> None:
    given = DynamoDBStore(table_of(dynamodb_url), client=client, clock=lambda: moment)
    asked: list[dict[str, Any]] = []
    client.meta.events.register(
        "provide-client-params.dynamodb.PutItem", lambda params, **_: asked.append(params["Item"])
    )

    given.claim(entry())

    assert asked == items(given, client)


@pytest.mark.parametrize("ttl", [math.inf, 1e300])
def test_what_stays_forever_has_no_expires(store: DynamoDBStore, client: Any, ttl: float) -> None:
    mine = entry(ttl=ttl)
    store.claim(mine)
    assert "expires" not in items(store, client)[0]

    store.extend(claim_of(mine))
    store.finish(claim_of(mine), Ending(state=State.HELD, ttl=ttl))

    assert "expires" not in items(store, client)[0]
    assert read(store, mine).ttl_left == math.inf


def test_a_finished_record_is_small(store: DynamoDBStore, client: Any) -> None:
    mine = entry("x" * 36, fingerprint=bytes(36))
    store.claim(mine)
    store.finish(claim_of(mine), Ending(state=State.DONE, ttl=86_400.0))

    (item,) = items(store, client)

    # Below 1 KB a write costs one unit, whatever it is.
    assert size_of(item) < 270


# The largest item.


def test_a_result_that_does_not_fit_is_left_out_and_said_so(store: DynamoDBStore) -> None:
    finished, claimed = entry("finished"), entry("claimed", state=State.DONE, result=bytes(ITEM_MAX))
    store.claim(finished)

    assert store.finish(claim_of(finished), Ending(state=State.DONE, ttl=60.0, result=bytes(ITEM_MAX))) is True
    assert store.claim(claimed) is None

    for record in (read(store, finished), read(store, claimed)):
        assert (record.state, record.result, record.omitted) == (State.DONE, None, True)
        assert record.remark == f"{ITEM_MAX} bytes, and an item of DynamoDB holds ITEM_MAX={ITEM_MAX}"


def test_the_largest_result_that_is_kept_fits_beside_the_longest_address(store: DynamoDBStore, client: Any) -> None:
    longest = entry(
        address=Address("s" * 255, "o" * 128, "k" * 255),
        fingerprint=bytes(36),
        attempt=70_000,
        bypasses=70_000,
        remark="r" * 100,
    )
    store.claim(longest)
    result = bytes(ITEM_MAX - 4_096)

    assert store.finish(claim_of(longest), Ending(state=State.DONE, ttl=60.0, result=result)) is True

    assert read(store, longest).result == result
    assert ITEM_MAX - 4_096 < size_of(items(store, client)[0]) < ITEM_MAX


def test_notes_that_do_not_fit_are_refused_before_anything_is_sent(store: DynamoDBStore, client: Any) -> None:
    mine = entry()
    store.claim(mine)
    sent = counted(client)

    with pytest.raises(UsageError, match="ITEM_MAX"):
        store.extend(claim_of(mine), bytes(ITEM_MAX))
    with pytest.raises(UsageError, match="ITEM_MAX"):
        store.claim(entry("other", notes=bytes(ITEM_MAX)))
    with pytest.raises(UsageError, match="ITEM_MAX"):
        store.release(claim_of(mine), Released(ttl=60.0, attempt=1, notes=bytes(ITEM_MAX)))
    with pytest.raises(UsageError, match="ITEM_MAX"):
        store.finish(claim_of(mine), Ending(state=State.HELD, ttl=60.0, notes=bytes(ITEM_MAX)))

    assert sent == []


def test_a_guard_replays_a_result_that_did_not_fit_as_omitted(store: DynamoDBStore) -> None:
    with Guard(store) as guard:
        first = guard.run("report", "r1", lambda: "x" * ITEM_MAX)
        second = guard.run("report", "r1", lambda: "never")

    assert (len(first.value), first.recorded) == (ITEM_MAX, True)
    assert (second.replayed, second.omitted) == (True, True)
    assert "ITEM_MAX" in second.remark


# Leases and the clock.


def test_a_lease_below_the_least_is_refused_and_nothing_runs(store: DynamoDBStore, client: Any) -> None:
    with Guard(store, policy=Policy(lease="5s")) as guard, pytest.raises(UsageError) as refused:
        guard.run("charge", "key", lambda: pytest.fail("it ran"))

    assert "a lease of 5s is too short for DynamoDB" in str(refused.value)
    assert "lease='10s'" in str(refused.value)
    assert items(store, client) == []


def test_what_is_not_running_needs_no_lease(store: DynamoDBStore) -> None:
    assert store.claim(entry(state=State.DONE, lease=0.0)) is None


def test_a_lease_ends_after_its_time_and_not_before(store: DynamoDBStore, client: Any) -> None:
    moved = Time(client)
    owner, another = moved.of(store), moved.of(DynamoDBStore(store.table, client=client))
    mine = entry(lease=LEASE_MIN)
    owner.claim(mine)

    moved.passes(LEASE_MIN - 0.5)
    shown = another.claim(entry())
    assert isinstance(shown, Record)
    assert shown.lease_left > 0

    # Both may be wrong by a second and the margin.
    moved.passes(0.5 + 2 * (1.0 + 2 * CLOCK_MARGIN))
    shown = another.claim(entry())
    assert isinstance(shown, Record)
    assert shown.lease_left <= 0


def test_a_worker_with_a_wrong_clock_has_no_effect(
    store: DynamoDBStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, usual = entry(lease=3_000.0, ttl=9_000.0), DynamoDBStore(store.table, client=client)

    # A day ahead, by whatever a machine can say of the time of day.
    right = time.time
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: right() + 86_400.0)
        assert DynamoDBStore(store.table, client=client).claim(mine) is None
        wrong.setattr(time, "time", lambda: right() - 86_400.0)
        behind = DynamoDBStore(store.table, client=client).read(mine.address)

    assert behind is not None
    for shown in (behind, read(usual, mine)):
        assert 2_000 < shown.lease_left < 3_008
        assert 8_000 < shown.ttl_left < 9_008
        assert 0 <= shown.age < 1_000


def test_a_claim_by_a_machine_that_slept_uncounted_is_written_again(store: DynamoDBStore, client: Any) -> None:
    moved = Time(client)
    sleeper, another = moved.of(store), moved.of(DynamoDBStore(store.table, client=client))
    sleeper.now()
    another.now()
    moved.freeze(sleeper)
    moved.passes(600.0)
    sent, mine = counted(client), entry()

    assert sleeper.claim(mine) is None

    assert sent == ["PutItem", "PutItem"]
    shown = read(another, mine)
    # Whoever saw the lease as over, in between, cannot take it over any more.
    assert shown.revision == 2
    assert shown.lease_left >= mine.lease


@pytest.mark.parametrize("operation", ["extend", "finish", "release"])
def test_what_a_machine_that_slept_uncounted_writes_is_written_again(
    store: DynamoDBStore, client: Any, operation: str
) -> None:
    moved = Time(client)
    sleeper, another = moved.of(store), moved.of(DynamoDBStore(store.table, client=client))
    mine = entry()
    sleeper.claim(mine)
    another.now()
    moved.freeze(sleeper)
    moved.passes(600.0)
    operations = {
        "extend": lambda: sleeper.extend(claim_of(mine)),
        "finish": lambda: sleeper.finish(claim_of(mine), DONE),
        "release": lambda: sleeper.release(claim_of(mine), Released(ttl=60.0, attempt=1)),
    }

    assert operations[operation]() is True

    shown = read(another, mine)
    assert shown.revision == 3
    assert shown.ttl_left >= (mine.ttl if operation == "extend" else 60.0)
    assert shown.lease_left >= mine.lease or operation != "extend"


def test_a_claim_that_arrives_again_after_a_sleep_changes_nothing(store: DynamoDBStore, client: Any) -> None:
    moved = Time(client)
    sleeper, another = moved.of(store), moved.of(DynamoDBStore(store.table, client=client))
    mine = entry()
    sleeper.claim(mine)
    sleeper.finish(claim_of(mine), DONE)
    another.now()
    moved.freeze(sleeper)
    moved.passes(30.0)

    assert sleeper.claim(mine) is None

    shown = read(another, mine)
    assert (shown.state, shown.result, shown.revision) == (State.DONE, b"result", 2)


def test_a_machine_that_slept_uncounted_sees_that_a_lease_is_over(store: DynamoDBStore, client: Any) -> None:
    moved = Time(client)
    sleeper, owner = moved.of(store), moved.of(DynamoDBStore(store.table, client=client))
    sleeper.now()
    owner.claim(entry(ttl=math.inf))
    moved.freeze(sleeper)
    moved.passes(600.0)

    # The refusal brings the time along.
    shown = sleeper.claim(entry())

    assert isinstance(shown, Record)
    assert shown.lease_left < -500
    assert shown.age > 590


def test_a_claim_that_was_lost_while_its_machine_slept_is_not_won(store: DynamoDBStore, client: Any) -> None:
    moved = Time(client)
    sleeper, another = moved.of(store), moved.of(DynamoDBStore(store.table, client=client))
    sleeper.now()
    moved.freeze(sleeper)
    moved.passes(600.0)
    mine, theirs = entry(lease=LEASE_MIN, ttl=math.inf), entry()
    taken: list[Any] = []

    def take_over(**_: Any) -> None:
        # After the first write of the sleeper, and before its second.
        client.meta.events.unregister("after-call.dynamodb.PutItem", take_over)
        seen = another.read(mine.address)
        assert seen is not None
        assert seen.lease_left <= 0
        taken.append(another.claim(theirs, replacing=seen))

    client.meta.events.register("after-call.dynamodb.PutItem", take_over)
    answer = sleeper.claim(mine)

    assert taken == [None]
    assert isinstance(answer, Record)
    assert answer.token == theirs.token


# Tools.


def test_it_is_browsable_and_not_batching(store: DynamoDBStore) -> None:
    from onefold.stores.base import Batching, Joinable

    assert isinstance(store, Store)
    assert isinstance(store, Browsable)
    assert not isinstance(store, Batching)
    assert not isinstance(store, Joinable)


def test_browsing_and_purging_go_on_over_the_parts_of_a_scan(store: DynamoDBStore, client: Any) -> None:
    # A scan stops after 1 MB.
    for number in range(5):
        store.claim(entry(f"large-{number}", state=State.DONE, result=bytes(300_000), ttl=60.0))
    sent = counted(client)

    found = store.browse(Query(), 3)
    assert [record.address.key for record in found] == ["large-0", "large-1", "large-2"]
    assert sent.count("Scan") > 1

    moved = Time(client)
    late = moved.of(DynamoDBStore(store.table, client=client))
    moved.passes(120.0)
    assert late.purge(4) == 4
    assert late.purge(4) == 1


def test_browsing_for_one_address_reads_one_item(store: DynamoDBStore, client: Any) -> None:
    mine = entry()
    store.claim(mine)
    sent = counted(client)

    assert len(store.browse(Query(scope="", operation="charge", key="key"), 10)) == 1
    assert store.browse(Query(scope="", operation="charge", key="key", state=State.DONE), 10) == []
    assert store.browse(Query(scope="", operation="charge", key="key", after=mine.address), 10) == []
    assert store.browse(Query(scope="", operation="charge", key="key"), 0) == []

    assert sent == ["GetItem"] * 3


def test_purge_leaves_what_was_renewed_after_it_was_found(store: DynamoDBStore, client: Any) -> None:
    moved = Time(client)
    purger, owner = moved.of(store), moved.of(DynamoDBStore(store.table, client=client))
    mine = entry(ttl=20.0, lease=LEASE_MIN)
    owner.claim(mine)
    moved.passes(60.0)

    def renew(**_: Any) -> None:
        client.meta.events.unregister("before-call.dynamodb.DeleteItem", renew)
        assert owner.extend(claim_of(mine)) is True

    client.meta.events.register("before-call.dynamodb.DeleteItem", renew)

    assert purger.purge(10) == 0
    assert read(owner, mine).token == mine.token
