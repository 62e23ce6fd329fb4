"""BabelQueue: `wrap` on a store of the SDK's, with and without a guard in front, and deliberate redrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from babelqueue import BabelQueue, idempotency, is_replay, redrive
from babelqueue.codec import EnvelopeCodec

from onefold import Guard, InProgress, Policy, UsageError
from onefold.queues.babelqueue import IdempotencyStore, redriven, wrap
from tests.queues.test_babelqueue import Handled, play, sequences, threading_run
from tests.support import PATIENCE, eventually

URN = "urn:babel:orders:created"


class FailingStore(idempotency.InMemoryStore):
    """A store of the SDK's whose server has gone between two calls."""

    def remember(self, message_id: str) -> None:
        raise ConnectionError(f"away: {message_id}")


def nothing(data: Any, meta: Any) -> None: ...


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


# A store of the SDK's alone: a drop-in is `wrap(store, handler)`, and only its import differs.


@pytest.mark.parametrize("case", sequences())
def test_on_a_store_of_the_sdks_wrap_honours_every_sequence(case: Mapping[str, Any]) -> None:
    store = idempotency.InMemoryStore()

    assert play(case, lambda handler: wrap(store, handler), store.forget) == case["expected_effects"]


@pytest.mark.parametrize("case", sequences())
def test_with_a_guard_in_front_wrap_honours_every_sequence(guard: Guard, case: Mapping[str, Any]) -> None:
    store = idempotency.InMemoryStore()

    def forget(message_id: str) -> None:
        store.forget(message_id)
        IdempotencyStore(guard).forget(message_id)

    assert play(case, lambda handler: wrap(store, handler, guard=guard), forget) == case["expected_effects"]


def test_in_one_process_a_duplicate_waits_for_the_running_one_that_the_sdk_would_run_beside_it() -> None:
    runs: list[str] = []
    gate = threading.Event()

    def handler(data: Any, meta: Any) -> None:
        runs.append(meta["id"])
        gate.wait(PATIENCE)

    wrapped = wrap(idempotency.InMemoryStore(), handler)
    threads = [threading.Thread(target=wrapped, args=({}, {"id": "id-A"})) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: bool(runs))
    gate.set()
    for thread in threads:
        thread.join(PATIENCE)

    assert runs == ["id-A"]


def test_a_duplicate_that_has_waited_long_enough_on_the_sdks_store_is_tried_again_by_the_runtime() -> None:
    store = idempotency.InMemoryStore()

    def handler(data: Any, meta: Any) -> None:
        with pytest.raises(InProgress):
            threading_run(lambda: wrapped({}, {"id": "id-A"}))

    wrapped = wrap(store, handler, wait=0.01)
    wrapped({}, {"id": "id-A"})

    assert store.seen("id-A")


def test_what_fails_in_flight_frees_its_id() -> None:
    outcomes = iter([Handled(), None])

    def handler(data: Any, meta: Any) -> None:
        error = next(outcomes)
        if error is not None:
            raise error

    wrapped = wrap(idempotency.InMemoryStore(), handler, wait=0.01)
    with pytest.raises(Handled):
        wrapped({}, {"id": "id-A"})
    wrapped({}, {"id": "id-A"})

    assert next(outcomes, "none left") == "none left"


def test_of_two_processes_on_the_sdks_store_both_run_as_the_page_says() -> None:
    """Two wrappers know as little of each other as two processes do."""
    store, runs = idempotency.InMemoryStore(), []
    second = wrap(store, lambda data, meta: runs.append("second"))

    def first(data: Any, meta: Any) -> None:
        runs.append("first")
        second({}, {"id": "id-A"})

    wrap(store, first)({}, {"id": "id-A"})

    assert runs == ["first", "second"]


def test_a_guard_in_front_lets_one_of_two_processes_run(tmp_path: Path) -> None:
    store, runs, url = idempotency.InMemoryStore(), [], f"sqlite:///{tmp_path}/records.db"
    with Guard(url) as one, Guard(url) as other:
        second = wrap(store, lambda data, meta: runs.append("second"), guard=other, wait=0.01)

        def first(data: Any, meta: Any) -> None:
            runs.append("first")
            with pytest.raises(InProgress):
                threading_run(lambda: second({}, {"id": "id-A"}))

        wrap(store, first, guard=one)({}, {"id": "id-A"})
        second({}, {"id": "id-A"})

    assert runs == ["first"]
    assert store.seen("id-A"), "other SDKs still read this store"


def test_what_the_sdks_store_has_seen_before_the_guard_came_is_skipped(guard: Guard) -> None:
    store = idempotency.InMemoryStore()
    store.remember("id-A")

    wrap(store, lambda data, meta: pytest.fail("it ran"), guard=guard)({}, {"id": "id-A"})

    record = guard.read("babelqueue", "id-A")
    assert record is not None
    assert record.state == "done"


def test_an_effect_that_cannot_be_remembered_is_not_reported_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[str] = []
    app = BabelQueue("memory://", queue="orders", max_attempts=5)
    app.register(URN, wrap(FailingStore(), lambda data, meta: runs.append(meta["id"])))
    app.transport.publish("orders", EnvelopeCodec.encode(EnvelopeCodec.make(URN, {}, queue="orders")))

    app.consume(max_messages=3)

    assert len(runs) == 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == "onefold.queues.babelqueue"]
    assert "ConnectionError was raised by remember()" in line
    assert runs[0] not in line


def test_a_store_of_ours_in_the_sdks_form_is_as_good_as_its_guard(guard: Guard) -> None:
    store = IdempotencyStore(guard, operation="charge")
    second = wrap(store, lambda data, meta: pytest.fail("it ran"), wait=0.01)

    def first(data: Any, meta: Any) -> None:
        with pytest.raises(InProgress):
            threading_run(lambda: second({}, {"id": "id-A"}))

    wrap(store, first)({}, {"id": "id-A"})

    assert store.seen("id-A")
    assert guard.read("charge", "id-A") is not None


def test_what_a_store_of_the_sdks_cannot_keep_is_refused_when_wrapping(guard: Guard) -> None:
    class AsyncStore(idempotency.InMemoryStore):
        async def seen(self, message_id: str) -> bool:  # type: ignore[override]
            return False

    store = idempotency.InMemoryStore()
    with pytest.raises(UsageError, match="keep= needs a guard"):
        wrap(store, nothing, keep="7d")
    with pytest.raises(UsageError, match="policy= needs a guard"):
        wrap(store, nothing, policy=Policy())
    with pytest.raises(UsageError, match="bypass= needs a guard"):
        wrap(store, nothing, bypass=redriven)
    with pytest.raises(UsageError, match="is async"):
        wrap(AsyncStore(), nothing)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="guard= goes in front of a store of the SDK"):
        wrap(guard, nothing, guard=guard)
    with pytest.raises(UsageError, match="takes Guard, but this is dict"):
        wrap({}, nothing)  # type: ignore[arg-type]


# Redrives.


class Shop:
    """A runtime with one wrapped handler, and what it has done."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.app = BabelQueue("memory://", queue="orders", max_attempts=1, dead_letter=True)
        self.runs: list[bool] = []
        self.app.register(URN, wrap(store, self.charge, operation="charge", **options))
        envelope = EnvelopeCodec.make(URN, {}, queue="orders")
        self.id, self.body = str(envelope["meta"]["id"]), EnvelopeCodec.encode(envelope)
        self.deliver("orders")

    def charge(self, data: Any, meta: Any) -> None:
        self.runs.append(is_replay())

    def deliver(self, queue: str, **headers: str) -> None:
        transport: Any = self.app.transport
        transport.publish_with_headers(queue, self.body, headers)
        self.app.consume(max_messages=1)

    def redriven(self, *, bypass: bool) -> list[bool]:
        """The runs after the finished message has come back from the dead letters."""
        self.app.transport.publish("orders.dlq", self.body)
        redrive.redrive(self.app.transport, "orders.dlq", to_queue="orders", bypass=bypass, timeout=0.0)
        self.app.consume(max_messages=1)
        return self.runs


def test_a_redrive_of_a_finished_message_is_absorbed_with_the_marker_too_unless_the_consumer_takes_bypasses(
    guard: Guard,
) -> None:
    shop = Shop(guard)

    assert shop.redriven(bypass=False) == [False]
    assert shop.redriven(bypass=True) == [False]


@pytest.mark.parametrize("mode", ["claim", "seen"])
def test_a_redrive_with_bypass_runs_a_finished_message_and_its_history_says_so(mode: Any) -> None:
    with Guard("memory:", policy=Policy(mode=mode)) as guard:
        shop = Shop(guard, bypass=redriven)

        assert shop.redriven(bypass=False) == [False]
        assert shop.redriven(bypass=True) == [False, True]
        record = guard.read("charge", shop.id)

    assert record is not None
    assert record.history == ("bypassed as bq-replay-bypass 1",)
    assert record.bypasses == 1


def test_a_redelivery_of_a_redriven_message_is_a_duplicate_and_another_name_runs_once_more(guard: Guard) -> None:
    shop = Shop(guard, bypass=redriven)
    marked = {"bq-replay-bypass": "1"}

    shop.deliver("orders", **marked)
    shop.deliver("orders", **marked)
    assert shop.runs == [False, True]
    shop.deliver("orders", **{"bq-replay-bypass": "ticket 4711"})
    shop.deliver("orders")

    assert shop.runs == [False, True, True]
    record = guard.read("charge", shop.id)
    assert record is not None
    assert record.history == ("bypassed as bq-replay-bypass ticket 4711", "bypassed as bq-replay-bypass 1")


def test_a_guard_in_front_of_the_sdks_store_lets_a_redrive_through_both(guard: Guard) -> None:
    store = idempotency.InMemoryStore()
    shop = Shop(store, guard=guard, bypass=redriven)
    assert store.seen(shop.id)

    assert shop.redriven(bypass=True) == [False, True]
    assert shop.redriven(bypass=True) == [False, True]


def test_a_field_of_meta_that_a_person_sets_can_be_the_bypass(guard: Guard) -> None:
    runs: list[Any] = []
    wrapped = wrap(guard, lambda data, meta: runs.append(data), bypass=lambda meta: meta.get("rerun", False))

    wrapped(1, {"id": "id-A"})
    wrapped(2, {"id": "id-A"})
    wrapped(3, {"id": "id-A", "rerun": "ticket 4711"})
    wrapped(4, {"id": "id-A", "rerun": "ticket 4711"})

    assert runs == [1, 3]


@pytest.mark.parametrize("value", ["a\nb", "x" * 300])
def test_a_marker_that_nobody_can_read_stands_in_the_history_as_its_digest(guard: Guard, value: str) -> None:
    shop = Shop(guard, bypass=redriven)

    shop.deliver("orders", **{"bq-replay-bypass": value})
    shop.deliver("orders", **{"bq-replay-bypass": value})

    assert shop.runs == [False, True]
