"""What the short ways through the core must not lose: wrong calls, long keys, old records, annotations in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from onefold import Event, Guard, MissingKey, UsageError
from onefold.stores.base import Address, Claim, Ending, Entry, State
from onefold.stores.memory import MemoryStore
from onefold.testing import Clock


def charge_on(guard: Guard, ran: list[str]) -> Any:
    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int = 1) -> None:
        ran.append(payment_id)

    return charge


@pytest.mark.parametrize(
    "call",
    [
        lambda charge: charge(),
        lambda charge: charge("pay_1", 1, 2),
        lambda charge: charge("pay_1", 1, amount=1),
        lambda charge: charge("pay_1", payment_id="pay_1"),
        lambda charge: charge("pay_1", ammount=1),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_claimed(call: Callable[[Any], object]) -> None:
    heard: list[Event] = []
    guard = Guard("memory:", on_event=heard.append)

    with pytest.raises(TypeError):
        call(charge_on(guard, []))

    assert heard == []


def test_however_its_arguments_are_passed_a_call_is_the_same() -> None:
    ran: list[str] = []
    charge = charge_on(Guard("memory:"), ran)

    charge("pay_1", 1)
    charge("pay_1")
    charge("pay_1", amount=1)
    charge(amount=1, payment_id="pay_1")

    assert ran == ["pay_1"]


def test_a_key_that_several_arguments_make_too_long_is_refused() -> None:
    @Guard("memory:").idempotent("charge", key=("tenant", "payment"))
    def charge(tenant: str, payment: str) -> None:
        pytest.fail(f"{tenant} {payment}")

    with pytest.raises(MissingKey, match=r"tenant and payment of .*charge\(\): the key has 3\d\d bytes"):
        charge("t" * 150, "p" * 150)


def test_a_record_that_got_its_end_only_when_it_was_finished_is_swept_too() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    for number in range(10):
        held = Entry(address=Address("", "charge", str(number)), token=b"%d" % number, ttl=math.inf)
        store.claim(held)
        store.finish(Claim(held.address, held.token), Ending(state=State.DONE, ttl=60.0))
    clock.advance("61s")

    for number in range(10, 20):
        store.claim(Entry(address=Address("", "charge", str(number)), token=b"new"))

    assert len(store) == 10


def test_a_function_that_is_defined_anew_is_read_anew() -> None:
    guard = Guard("memory:")
    names: dict[str, Any] = {}
    kept: list[Any] = []

    def run(key: str, returns: str, value: str) -> Any:
        exec(f"from __future__ import annotations\ndef handler() -> {returns}: return {value}", names)
        kept.append(names["handler"])
        guard.run("charge", key, names["handler"])
        return guard.run("charge", key, names["handler"]).value

    assert run("a", "tuple[int, int]", "(1, 2)") == (1, 2)
    assert run("b", "list[int]", "[1, 2]") == [1, 2]


class Disguised(str):
    """Equal to whatever it is told to be, and another text."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "charge"

    def __hash__(self) -> int:
        return hash("charge")


def test_an_operation_is_checked_although_an_equal_one_was_seen_before() -> None:
    guard = Guard("memory:")
    guard.run("charge", "pay_1", lambda: None)

    with pytest.raises(UsageError, match="has to be a name"):
        guard.run(["charge"], "pay_1", lambda: None)  # type: ignore[arg-type]
    refunded = guard.run(Disguised("refund"), "pay_1", lambda: "refunded")

    assert not refunded.replayed
    assert guard.read("refund", "pay_1") is not None
