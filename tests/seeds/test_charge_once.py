"""BabelQueue's example "charge once": one payment is published twice, byte for byte, and charged once.

Its payment is pay_7f3a over 4200 EUR. It prints two deliveries and one charge. It says "exactly-once effect" and, two
paragraphs later, "not exactly-once": what it has is a seen-set, which two deliveries at once pass together. Ours is a
claim.

The sequences of its conformance suite are in `tests/queues/test_babelqueue.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest
from babelqueue import BabelQueue, idempotency
from babelqueue.codec import EnvelopeCodec

from onefold import Guard
from onefold.queues.babelqueue import IdempotencyStore, wrap
from tests.support import PATIENCE, Elsewhere

URN: Final = "urn:babel:payments:charge"
QUEUE: Final = "payments"
PAYMENT: Final = {"payment_id": "pay_7f3a", "amount": 4200, "currency": "EUR"}

Wrapper = Callable[[Guard, Callable[..., Any]], Callable[..., Any]]

WRAPPERS: Final[dict[str, Wrapper]] = {
    "ours": wrap,
    "theirs on our store": lambda guard, handler: idempotency.wrap(IdempotencyStore(guard), handler),
    "theirs": lambda _guard, handler: idempotency.wrap(idempotency.InMemoryStore(), handler),
}


class Program:
    """The example's program: an application, a handler that charges, and one envelope."""

    def __init__(self, broker: str, wrapper: Wrapper, guard: Guard) -> None:
        self.app = BabelQueue(broker, queue=QUEUE)
        self.charged: list[tuple[str, int, str]] = []
        self.failures = 0
        self.app.register(URN, wrapper(guard, self.charge))

    def charge(self, data: Mapping[str, Any], _meta: Mapping[str, Any]) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the card network is down")
        self.charged.append((data["payment_id"], data["amount"], data["currency"]))

    def publish(self, body: str, times: int = 1) -> None:
        for _ in range(times):
            self.app.transport.publish(QUEUE, body)

    @staticmethod
    def body() -> str:
        return EnvelopeCodec.encode(EnvelopeCodec.make(URN, PAYMENT, queue=QUEUE))


@pytest.fixture(params=["memory", "redis"])
def broker(request: pytest.FixtureRequest) -> str:
    return "memory://" if request.param == "memory" else str(request.getfixturevalue("redis_url"))


@pytest.fixture(params=WRAPPERS)
def wrapper(request: pytest.FixtureRequest) -> Wrapper:
    return WRAPPERS[request.param]


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # The SDK has no way to close its connection to Redis.
def test_two_deliveries_of_the_same_bytes_are_handled_and_charged_once(
    broker: str, wrapper: Wrapper, guard: Guard
) -> None:
    program = Program(broker, wrapper, guard)
    program.publish(Program.body(), times=2)

    assert program.app.consume(max_messages=2, timeout=1.0) == 2
    assert program.charged == [("pay_7f3a", 4200, "EUR")]


def test_a_second_publish_of_the_same_payment_is_another_message(wrapper: Wrapper, guard: Guard) -> None:
    """`publish` mints a new id: it is not a redelivery."""
    program = Program("memory://", wrapper, guard)
    program.publish(Program.body())
    program.publish(Program.body())

    program.app.consume(max_messages=2)

    assert len(program.charged) == 2


def test_a_handler_that_raises_leaves_the_id_unrecorded_and_runs_again(wrapper: Wrapper, guard: Guard) -> None:
    program = Program("memory://", wrapper, guard)
    program.failures = 1
    body = Program.body()
    program.publish(body)

    program.app.consume(max_messages=2)
    program.publish(body)
    program.app.consume(max_messages=1)

    assert program.charged == [("pay_7f3a", 4200, "EUR")]


def test_a_message_without_an_id_runs_each_time(wrapper: Wrapper, guard: Guard) -> None:
    runs: list[Any] = []
    wrapped = wrapper(guard, lambda data, _meta: runs.append(data))

    for _ in range(2):
        wrapped({}, {"id": ""})

    assert len(runs) == 2


def test_a_store_is_three_methods_and_ours_is_one() -> None:
    with Guard("memory:") as guard:
        store = IdempotencyStore(guard)
        store.remember("m-1")
        assert store.seen("m-1")
        store.forget("m-1")
        assert not store.seen("m-1")
        assert isinstance(store, idempotency.IdempotencyStore)


@pytest.mark.parametrize(("name", "charges"), [("theirs", 2), ("ours", 1)])
def test_two_deliveries_at_once_pass_a_seen_set_and_not_a_claim(guard: Guard, name: str, charges: int) -> None:
    """The example says of itself that it is no lock for what is in flight."""
    running, gate = threading.Semaphore(0), threading.Event()
    charged: list[int] = []

    def charge(_data: Any, _meta: Any) -> None:
        running.release()
        gate.wait(PATIENCE)
        charged.append(4200)

    wrapped = WRAPPERS[name](guard, charge)
    both = [Elsewhere(lambda: wrapped({}, {"id": "m-1"})) for _ in range(2)]
    for _ in range(charges):
        assert running.acquire(timeout=PATIENCE)
    gate.set()
    for one in both:
        one.result()

    assert charged == [4200] * charges
