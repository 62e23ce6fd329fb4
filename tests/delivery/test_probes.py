"""A probe that has no answer says nothing about the delivery: it is told as what it is, and asked again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onefold import (
    AsyncGuard,
    Done,
    Guard,
    Held,
    NotDone,
    Policy,
    ProbeFailed,
    State,
    StoreUnavailable,
    Unknown,
    UsageError,
    current,
)
from onefold.keys import address
from onefold.queues._shared.consumer import Consuming
from onefold.queues._shared.verdict import HandlerRaised, Later
from onefold.queues.keys import Message
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import BatchingProxyStore, Clock, Handler, Heard, ProxyStore, die_running

CHARGE = address("charge", "pay_1")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def probe() -> Handler:
    """A probe that cannot reach the gateway."""
    return Handler(error=ConnectionError("gateway-7.internal is down"))


def abandoned(store: MemoryStore, clock: Clock, probe: Any, key: str = "pay_1") -> Policy:
    """The policy with this probe, and a charge whose worker has died."""
    policy = Policy(after_crash=probe)
    die_running(store, "charge", key, policy)
    clock.advance(31)
    return policy


def test_it_is_an_error_of_the_probe_and_not_of_the_handler(store: MemoryStore, clock: Clock, probe: Handler) -> None:
    heard = Heard()
    guard = Guard(store, policy=abandoned(store, clock, probe), on_event=heard)

    with pytest.raises(ProbeFailed) as caught:
        guard.run("charge", "pay_1", pytest.fail)

    assert str(caught.value) == (
        f"charge [key {CHARGE.digest}]: the probe failed with ConnectionError, so it is still not known whether "
        "attempt 1 happened. The handler was not started. Deliver it again, and the probe will be asked again"
    )
    assert caught.value.__cause__ is probe.error
    assert isinstance(caught.value, StoreUnavailable)
    assert [(event.kind, event.detail) for event in heard.events] == [
        ("probed", "failed: ConnectionError"),
        ("refused", "ProbeFailed"),
    ]


@pytest.mark.parametrize("answer", [Done("receipt"), NotDone()], ids=["done", "not done"])
def test_the_next_delivery_asks_again_at_once(store: MemoryStore, clock: Clock, probe: Handler, answer: Any) -> None:
    guard = Guard(store, policy=abandoned(store, clock, probe))
    for _ in range(7):
        with pytest.raises(ProbeFailed):
            guard.run("charge", "pay_1", pytest.fail)

    probe.error, probe.value = None, answer

    # Questions are not attempts: none of the five are used up.
    assert guard.run("charge", "pay_1", lambda: f"attempt {current().attempt}").value in ("receipt", "attempt 2")
    assert probe.starts == 8


def test_one_that_cannot_say_puts_it_held(store: MemoryStore, clock: Clock, probe: Handler) -> None:
    guard = Guard(store, policy=abandoned(store, clock, probe))
    with pytest.raises(ProbeFailed):
        guard.run("charge", "pay_1", pytest.fail)

    probe.error, probe.value = None, Unknown()

    with pytest.raises(Held, match="the probe could not say"):
        guard.run("charge", "pay_1", pytest.fail)


def test_an_async_guard_does_the_same(clock: Clock) -> None:
    memory = AsyncMemoryStore(clock=clock)
    answers: list[Any] = [ConnectionError("down"), Done("receipt")]

    async def probe(_running: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def must_not_run() -> None:
        pytest.fail("it ran")

    async def story() -> None:
        guard = AsyncGuard(memory, policy=abandoned(memory.sync, clock, "hold").replace(after_crash=probe))
        with pytest.raises(ProbeFailed):
            await guard.run("charge", "pay_1", must_not_run)

        assert (await guard.run("charge", "pay_1", must_not_run)).value == "receipt"

    asyncio.run(story())


def test_after_an_error_of_the_handler_that_one_surfaces_and_the_next_delivery_asks(
    store: MemoryStore, probe: Handler
) -> None:
    heard = Heard()
    guard = Guard(store, policy=Policy(after_crash=probe), on_event=heard)

    def pay() -> None:
        current().step("reserve", lambda: "r-17")
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer") as caught:
        guard.run("charge", "pay_1", pay)
    with pytest.raises(ProbeFailed):
        guard.run("charge", "pay_1", pytest.fail)
    probe.error, probe.value = None, NotDone()

    assert "The next delivery asks it again: ConnectionError" in caught.value.__notes__[0]
    assert heard.kinds == ["started", "probed", "left", "probed", "refused"]
    assert guard.run("charge", "pay_1", lambda: current().step("reserve", pytest.fail)).value == "r-17"


def test_what_a_bypass_had_found_is_replayed_at_once(store: MemoryStore, probe: Handler) -> None:
    guard = Guard(store, policy=Policy(after_crash=probe))
    guard.run("charge", "pay_1", lambda: "receipt")

    with pytest.raises(TimeoutError):
        guard.run("charge", "pay_1", Handler(error=TimeoutError()), bypass=True)

    assert guard.run("charge", "pay_1", pytest.fail).value == "receipt"


def test_in_a_batch_the_heartbeat_does_not_give_it_a_new_lease(clock: Clock, probe: Handler) -> None:
    store = BatchingProxyStore(MemoryStore(clock=clock))
    policy = abandoned(store.inner, clock, probe, "a")
    guard = Guard(store, policy=policy)
    watched: list[str] = []

    def pay(message: str) -> str:
        heartbeat: Any = guard._context().heartbeat
        watched.extend(beat.claim.address.key for beat in heartbeat.beats.values())
        return message

    first, second = guard.run_batch("charge", ["a", "b"], key=str, handler=pay)

    assert isinstance(first, ProbeFailed)
    assert not isinstance(second, Exception)
    assert watched == ["b"]


def test_a_store_that_cannot_be_told_leaves_the_claim_until_its_lease_ends(clock: Clock, probe: Handler) -> None:
    store, heard = ProxyStore(MemoryStore(clock=clock)), Heard()
    guard = Guard(store, policy=abandoned(store.inner, clock, probe), on_event=heard)
    store.down = {"extend"}

    with pytest.raises(ProbeFailed):
        guard.run("charge", "pay_1", pytest.fail)

    assert heard.kinds == ["probed", "store_failed", "refused"]
    store.down, probe.error, probe.value = set(), None, Done("receipt")
    clock.advance(31)
    assert guard.run("charge", "pay_1", pytest.fail).value == "receipt"


def test_an_interrupt_of_the_probe_is_told_as_one_and_the_next_delivery_asks(
    store: MemoryStore, clock: Clock, probe: Handler
) -> None:
    guard = Guard(store, policy=abandoned(store, clock, probe))
    probe.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        guard.run("charge", "pay_1", pytest.fail)

    probe.error, probe.value = None, Done("receipt")

    assert guard.run("charge", "pay_1", pytest.fail).value == "receipt"


def test_a_wrong_answer_is_a_mistake_of_the_code_and_the_next_delivery_asks(store: MemoryStore, clock: Clock) -> None:
    probe = Handler(True)
    guard = Guard(store, policy=abandoned(store, clock, probe))
    with pytest.raises(UsageError, match="not True"):
        guard.run("charge", "pay_1", pytest.fail)

    probe.value = Done("receipt")

    assert guard.run("charge", "pay_1", pytest.fail).value == "receipt"


def test_one_that_raises_what_ends_an_iteration_is_no_handler_that_did(
    store: MemoryStore, clock: Clock, probe: Handler
) -> None:
    guard = Guard(store, policy=abandoned(store, clock, probe))
    probe.error = StopIteration()

    with pytest.raises(ProbeFailed):
        guard.run("charge", "pay_1", pytest.fail)


# Queues.


def message() -> Message:
    return Message(b"{}", {})


def test_a_message_comes_later_and_no_attempt_of_its_handler_is_counted(
    store: MemoryStore, clock: Clock, probe: Handler
) -> None:
    guard = Guard(store, policy=abandoned(store, clock, probe))
    consuming = Consuming(guard, "charge", pytest.fail, key=lambda _message: "pay_1", policy=guard.policy)

    verdicts = [consuming.deliver(message()) for _ in range(5)]

    why = f"ProbeFailed: charge [key {CHARGE.digest}]: the probe failed with ConnectionError, so"
    assert [isinstance(one, Later) and one.reason.startswith(why) for one in verdicts] == [True] * 5


def test_only_a_handler_that_was_called_has_failed(store: MemoryStore, probe: Handler) -> None:
    guard = Guard(store, policy=Policy(after_crash=probe))
    handler = Handler(error=TimeoutError("no answer"))
    consuming = Consuming(guard, "charge", handler, key=lambda _message: "pay_1", policy=guard.policy)

    verdicts = [type(consuming.deliver(message())) for _ in range(4)]

    assert verdicts == [HandlerRaised, Later, Later, Later]
    assert handler.starts == 1


# On every store: the end of a lease.


@pytest.mark.parametrize(
    "server",
    [
        *("postgres_url", "redis_url"),
        *(pytest.param(one, marks=pytest.mark.more) for one in ("mysql_url", "dynamodb_url")),
    ],
)
def test_it_is_asked_again_at_once_in_every_store(server: str, request: pytest.FixtureRequest) -> None:
    probe = Handler(error=ConnectionError("down"))
    with Guard(request.getfixturevalue(server), policy=Policy(after_crash=probe, wait="10s")) as guard:
        with pytest.raises(TimeoutError):
            guard.run("charge", "pay_1", Handler(error=TimeoutError()))
        with pytest.raises(ProbeFailed):
            guard.run("charge", "pay_1", pytest.fail)
        found = guard.read("charge", "pay_1")
        assert found is not None
        assert (found.state, found.attempt) == (State.RUNNING, 1)
        probe.error, probe.value = None, Done("receipt")

        assert guard.run("charge", "pay_1", pytest.fail).value == "receipt"
