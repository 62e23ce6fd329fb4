"""BabelQueue: sequences of deliveries, its own and ours, on our stores, in seen and in claim mode; and its runtime.

Its own come from its conformance suite, where `ONEFOLD_CONFORMANCE` points at it; ours cover the same rules without it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from babelqueue import BabelQueue, idempotency
from babelqueue.codec import EnvelopeCodec

from onefold import AsyncGuard, Guard, InProgress, Policy, StoreUnavailable, UsageError
from onefold.queues.babelqueue import CannotWork, IdempotencyStore, wrap
from tests.support import PATIENCE, PROJECT, ProxyStore, eventually

CONFORMANCE = Path(os.environ.get("ONEFOLD_CONFORMANCE", PROJECT.parent / "shared" / "conformance"))
SUITE = CONFORMANCE / "babelqueue" / "idempotency.json"

# Of ours: `id` runs, `id!` runs and raises, `id=` is skipped, `-id` is forgotten before it runs; `?` has no id.
OURS = {
    "what was done is not done again": "a a= a=",
    "each id is a message of its own": "a b c a= b= c=",
    "what raised runs again until it succeeds": "a! a! a a=",
    "the failure of one is nothing to another": "a b! a= b b=",
    "what has no id runs each time": "? ? a ? a=",
    "what is forgotten runs once more": "a a= -a a=",
    "forgetting one forgets no other": "a b -a b= a=",
}


def delivery(said: str) -> dict[str, Any]:
    """One delivery of ours, in the words of the suite."""
    skipped = said.endswith("=")
    return {
        "meta_id": said.strip("!=-?"),
        "expect_effect": "skip" if skipped else "run",
        "outcome": "throw" if said.endswith("!") else "ok",
        "forget_before": said.startswith("-"),
    }


def sequences() -> list[Any]:
    ours = {name: [delivery(said) for said in sequence.split()] for name, sequence in OURS.items()}
    cases = [
        {
            "name": name,
            "deliveries": sequence,
            "expected_effects": sum(one["expect_effect"] == "run" for one in sequence),
        }
        for name, sequence in ours.items()
    ]
    if SUITE.exists():
        cases += json.loads(SUITE.read_text(encoding="utf-8"))["sequences"]["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return "memory:"
        case "sqlite":
            return f"sqlite:///{tmp_path}/records.db"
        case name:
            return str(request.getfixturevalue(f"{name}_url"))


@pytest.fixture(params=["claim", "seen"])
def guard(request: pytest.FixtureRequest, store: str) -> Iterator[Guard]:
    with Guard(store, policy=Policy(mode=request.param)) as guard:
        yield guard


class Handled(Exception):
    """The handler throws, as the sequence says."""


def play(
    case: Mapping[str, Any],
    wrapper: Callable[[Callable[..., Any]], Callable[..., None]],
    forget: Callable[[str], object],
) -> int:
    """Every delivery of a sequence; how often the handler was called."""
    calls: list[str] = []
    outcome = ["ok"]

    def handler(data: Any, meta: Mapping[str, Any]) -> None:
        calls.append(str(meta.get("id")))
        if outcome[0] == "throw":
            raise Handled

    wrapped = wrapper(handler)
    for delivery in case["deliveries"]:
        if delivery.get("forget_before"):
            forget(delivery["meta_id"])
        before, outcome[0] = len(calls), delivery.get("outcome", "ok")
        if outcome[0] == "throw":
            with pytest.raises(Handled):
                wrapped({}, {"id": delivery["meta_id"]})
        else:
            wrapped({}, {"id": delivery["meta_id"]})
        assert len(calls) - before == (1 if delivery["expect_effect"] == "run" else 0)
    return len(calls)


@pytest.mark.parametrize("case", sequences())
def test_wrap_honours_every_sequence(guard: Guard, case: Mapping[str, Any]) -> None:
    forget = IdempotencyStore(guard).forget

    assert play(case, lambda handler: wrap(guard, handler), forget) == case["expected_effects"]


@pytest.mark.parametrize("case", sequences())
def test_the_sdks_own_wrap_works_on_a_store_of_ours(store: str, case: Mapping[str, Any]) -> None:
    with Guard(store) as guard:
        ours = IdempotencyStore(guard)

        assert play(case, lambda handler: idempotency.wrap(ours, handler), ours.forget) == case["expected_effects"]


def test_a_store_of_ours_is_one_of_the_sdks() -> None:
    with Guard("memory:") as guard:
        ours = IdempotencyStore(guard)
        ours.remember("id-A")
        ours.remember("id-A")

        assert isinstance(ours, idempotency.IdempotencyStore)
        assert ours.seen("id-A")
        ours.forget("id-A")
        ours.forget("id-A")
        assert not ours.seen("id-A")


def test_of_eight_deliveries_at_once_one_runs_and_the_others_wait_for_it() -> None:
    runs, gate = [], threading.Event()

    def handler(data: Any, meta: Any) -> None:
        runs.append(meta["id"])
        gate.wait(PATIENCE)

    with Guard("memory:") as guard:
        wrapped = wrap(guard, handler)
        threads = [threading.Thread(target=wrapped, args=({}, {"id": "id-A"})) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: bool(runs))
        gate.set()
        for thread in threads:
            thread.join(PATIENCE)

    assert runs == ["id-A"]


def test_a_duplicate_that_has_waited_long_enough_is_tried_again_by_the_runtime() -> None:
    with Guard("memory:") as guard:
        second = wrap(guard, lambda data, meta: pytest.fail("it ran"), wait=0.01)

        def first(data: Any, meta: Any) -> None:
            with pytest.raises(InProgress):
                threading_run(lambda: second({}, {"id": "id-A"}))

        wrap(guard, first)({}, {"id": "id-A"})


def threading_run(call: Callable[[], None]) -> None:
    """In another thread, as another worker; its error comes out here."""
    errors: list[BaseException] = []

    def caught() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join(PATIENCE)
    if errors:
        raise errors[0]


def test_the_signature_is_the_handlers_own() -> None:
    def handler(data: Any, meta: Any, envelope: Any) -> None: ...

    with Guard("memory:") as guard:
        wrapped = wrap(guard, handler)

    assert wrapped.__name__ == "handler"
    assert wrapped.__wrapped__ is handler  # type: ignore[attr-defined]


def test_an_async_handler_is_refused_at_once() -> None:
    async def handler(data: Any, meta: Any) -> None: ...

    with Guard("memory:") as guard, pytest.raises(UsageError, match="its work would be lost"):
        wrap(guard, handler)
    with pytest.raises(UsageError, match="takes Guard"):
        wrap(AsyncGuard("memory:"), lambda data, meta: None)  # type: ignore[arg-type]


def test_a_guard_that_is_closed_stops_the_runtime_and_buries_no_message() -> None:
    app = BabelQueue("memory://", queue="orders", max_attempts=1, dead_letter=True)
    body = EnvelopeCodec.encode(EnvelopeCodec.make("urn:babel:orders:created", {}, queue="orders"))
    guard = Guard("memory:")
    app.register("urn:babel:orders:created", wrap(guard, lambda data, meta: pytest.fail("it ran"), operation="charge"))
    guard.close()
    app.transport.publish("orders", body)

    with pytest.raises(CannotWork, match="charge: this guard is closed"):
        app.consume(max_messages=1)

    transport: Any = app.transport
    assert transport.size("orders.dlq") == 0


def test_a_store_that_is_away_is_told_by_its_cause_and_by_no_key(caplog: pytest.LogCaptureFixture) -> None:
    class Down(ProxyStore):
        def claim(self, *_: Any, **__: Any) -> Any:
            raise StoreUnavailable("the server refuses this login")

    with Guard(Down()) as guard:
        wrapped = wrap(guard, lambda data, meta: None, operation="charge")
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                wrapped({}, {"id": "secret-id"})

    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("charge [key ")
    assert line.endswith("StoreUnavailable: the server refuses this login")
    assert "secret-id" not in caplog.text
