"""The essay on the double charge: its three operations, its two rules for keys, and its two places for the record.

It has no code. Its operations are "set the order to paid", "add 10 to the balance" and "send the welcome mail"; its
worker charges a card and dies before it acknowledges.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from onefold import TX, Guard, MissingKey, current
from onefold.stores.memory import MemoryStore
from onefold.testing import Clock, crash_at
from tests.support import PATIENCE, Elsewhere, eventually


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guard(clock: Clock) -> Iterator[Guard]:
    with Guard(MemoryStore(clock=clock)) as guard:
        yield guard


def test_a_charge_whose_worker_died_before_the_ack_is_delivered_again_and_charged_once(
    guard: Guard, clock: Clock
) -> None:
    """The card network deduplicates on the key that it gets: that is the essay's advice for a call to others."""
    card: dict[str, int] = {}

    @guard.idempotent("charge", key="order")
    def charge(order: str, amount: int) -> None:
        card.setdefault(current().key_for("card"), amount)

    with crash_at("after_handler", guard):
        charge("order-1", 4200)
    clock.advance("31s")
    charge("order-1", 4200)

    assert list(card.values()) == [4200]


def test_set_to_paid_needs_no_guard_and_add_ten_does(guard: Guard) -> None:
    status, unguarded, guarded = [""], [0], [0]

    def add(balance: list[int]) -> None:
        balance[0] += 10

    for _delivery in range(2):
        status[0] = "paid"
        add(unguarded)
        guard.run("add", "message-1", lambda: add(guarded))

    assert (status, unguarded, guarded) == (["paid"], [20], [10])


def test_the_welcome_mail_goes_out_once(guard: Guard) -> None:
    sent: list[str] = []

    for _delivery in range(2):
        guard.run("welcome", "message-1", lambda: sent.append("welcome"))

    assert sent == ["welcome"]


def test_the_id_of_a_message_is_the_key_and_the_id_of_its_trace_is_not(guard: Guard) -> None:
    """A trace spans several messages: taken for the key, it would drop all but the first of them."""
    messages = [{"id": "m-1", "trace": "t-1"}, {"id": "m-2", "trace": "t-1"}]
    effects: dict[str, list[str]] = {"id": [], "trace": []}

    for field, done in effects.items():
        for message in messages:
            guard.run(field, message[field], lambda done=done, message=message: done.append(message["id"]))  # type: ignore[misc]

    assert effects == {"id": ["m-1", "m-2"], "trace": ["m-1"]}


def test_two_equal_purchases_are_two_and_a_key_made_of_the_payload_would_lose_one(guard: Guard) -> None:
    bought: dict[str, int] = {"minted": 0, "hashed": 0}
    payload = b'{"customer": 7, "item": "lamp"}'

    def buy(how: str) -> None:
        bought[how] += 1

    for key in ("k-1", "k-2"):
        guard.run("minted", key, lambda: buy("minted"), payload=payload)
        guard.run("hashed", hashlib.sha256(payload).hexdigest(), lambda: buy("hashed"), payload=payload)

    assert bought == {"minted": 2, "hashed": 1}


def test_the_receiver_never_mints_a_key(guard: Guard) -> None:
    for nothing in (None, ""):
        with pytest.raises(MissingKey):
            guard.run("charge", nothing, lambda: pytest.fail("it ran"))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["seen", "claim"])
def test_recorded_after_the_work_a_crash_between_the_two_runs_it_again(guard: Guard, clock: Clock, mode: str) -> None:
    """The window of the seen-set: harmless if the work is "set to paid"."""
    runs: list[str] = []

    def deliver() -> None:
        guard.run("set-paid", "message-1", lambda: runs.append("paid"), mode=mode)  # type: ignore[arg-type]

    with crash_at("after_handler", guard):
        deliver()
    clock.advance("31s")
    deliver()
    deliver()

    assert runs == ["paid", "paid"]


def test_recorded_with_the_work_there_is_no_window(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE charges (id TEXT)")

    with Guard(f"sqlite:///{path}") as guard:

        @guard.transactional("charge", key="id")
        def charge(id: str, *, tx: sqlite3.Connection = TX) -> None:  # noqa: A002
            tx.execute("INSERT INTO charges VALUES (?)", (id,))

        for point in ("after_handler", "after_finish"):
            with crash_at(point, guard):
                charge("message-1")
        charge("message-1")

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT id FROM charges").fetchall() == [("message-1",)]


def check_then_write(done: set[str], work: Callable[[], None], both_have_looked: threading.Barrier) -> None:
    """What the essay warns of: between the look and the note there is room for another."""
    if "message-1" not in done:
        both_have_looked.wait(PATIENCE)
        work()
        done.add("message-1")


def test_two_deliveries_at_once_slip_through_a_check_and_not_through_a_claim(guard: Guard) -> None:
    """The second insert is a conflict, which is caught and means that it is already handled."""
    done: set[str] = set()
    charges: dict[str, list[int]] = {"checked": [], "claimed": []}
    barrier, inside, gate = threading.Barrier(2), threading.Event(), threading.Event()

    def charge_slowly() -> None:
        inside.set()
        gate.wait(PATIENCE)
        charges["claimed"].append(1)

    looked = [Elsewhere(lambda: check_then_write(done, lambda: charges["checked"].append(1), barrier)) for _ in "12"]
    first = Elsewhere(lambda: guard.run("charge", "message-1", charge_slowly))
    assert inside.wait(PATIENCE)
    second = Elsewhere(lambda: guard.run("charge", "message-1", lambda: charges["claimed"].append(2), wait=PATIENCE))
    gate.set()
    for one in looked:
        one.result()

    assert (first.result().replayed, second.result().replayed) == (False, True)
    assert charges == {"checked": [1, 1], "claimed": [1]}
    assert eventually(lambda: done == {"message-1"})
