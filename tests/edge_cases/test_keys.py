"""Rows 27, 28 and 31 to 34a of the edge cases: whose key it is, and for what payload."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, KeyReused, MissingKey, Policy, UsageError
from onefold.keys import KEY_MAX, SCOPE_MAX, address, joined
from onefold.stores.memory import MemoryStore
from tests.support import Clock, Handler, Heard, die_running, elsewhere

CHARGE = address("charge", "pay_1")

RIGHT, WRONG = {"amount": 4200}, {"amount": 42}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


# Row 27.


def test_the_same_key_with_another_payload_is_refused_and_the_right_one_still_replays(store: MemoryStore) -> None:
    heard = Heard()
    guard = Guard(store, on_event=heard)
    guard.run("charge", "pay_1", Handler("paid"), payload=RIGHT)
    before = store.read(CHARGE)

    with pytest.raises(KeyReused) as refusal:
        guard.run("charge", "pay_1", pytest.fail, payload=WRONG)

    assert (refusal.value.operation, refusal.value.key) == ("charge", "pay_1")
    assert store.read(CHARGE) == before
    assert heard.events[-1].detail == "KeyReused"
    assert guard.run("charge", "pay_1", pytest.fail, payload=RIGHT).value == "paid"


def test_another_payload_while_the_right_one_runs_is_refused_at_once(store: MemoryStore) -> None:
    patient = Guard(store, policy=Policy(wait="1h"))

    def handler() -> str:
        with pytest.raises(KeyReused):
            elsewhere(lambda: patient.run("charge", "pay_1", pytest.fail, payload=WRONG))
        return "paid"

    outcome = Guard(store).run("charge", "pay_1", handler, payload=RIGHT)

    assert (outcome.value, outcome.recorded) == ("paid", True)


@pytest.mark.parametrize("way", ["rerun", "hold", "skip"])
def test_another_payload_never_takes_over_an_abandoned_claim(clock: Clock, store: MemoryStore, way: Any) -> None:
    policy = Policy(after_crash=way)
    die_running(store, "charge", "pay_1", policy, payload=RIGHT)
    clock.advance(31)
    before = store.read(CHARGE)

    with pytest.raises(KeyReused):
        Guard(store, policy=policy).run("charge", "pay_1", pytest.fail, payload=WRONG)

    assert store.read(CHARGE) == before
    assert Guard(store).run("charge", "pay_1", Handler("paid"), payload=RIGHT).attempt == 2


def test_another_payload_is_refused_also_where_it_failed_for_good_or_is_held(store: MemoryStore) -> None:
    final = Guard(store, policy=Policy(final_errors=(ValueError,)))
    held = Guard(store, policy=Policy(after_crash="hold"))
    with pytest.raises(ValueError, match="card"):
        final.run("charge", "failed", Handler(error=ValueError("card")), payload=RIGHT)
    with pytest.raises(TimeoutError):
        held.run("charge", "held", Handler(error=TimeoutError()), payload=RIGHT)

    for guard, key in ((final, "failed"), (held, "held")):
        with pytest.raises(KeyReused):
            guard.run("charge", key, pytest.fail, payload=WRONG)


def test_by_default_every_argument_but_the_key_is_the_payload(store: MemoryStore) -> None:
    guard = Guard(store)

    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int, currency: str = "eur", *, note: str = "") -> str:
        return f"{amount} {currency}"

    first = charge("pay_1", 4200)

    assert first == charge("pay_1", amount=4200, currency="eur", note="") == "4200 eur"
    others: list[dict[str, Any]] = [{"amount": 1}, {"amount": 4200, "currency": "usd"}, {"amount": 4200, "note": "x"}]
    for other in others:
        with pytest.raises(KeyReused):
            charge("pay_1", **other)


def test_the_order_of_members_does_not_make_another_payload_but_a_value_does(store: MemoryStore) -> None:
    guard = Guard(store)
    guard.run("charge", "pay_1", Handler(), payload={"a": 1, "b": {"c": 2, "d": {3, 4}}})

    assert guard.run("charge", "pay_1", pytest.fail, payload={"b": {"d": {4, 3}, "c": 2}, "a": 1}).replayed
    others: tuple[object, ...] = ({}, [], "", 0, False)
    for falsy in others:
        with pytest.raises(KeyReused):
            guard.run("charge", "pay_1", pytest.fail, payload=falsy)


def test_a_payload_named_or_computed_is_all_that_counts_and_none_opts_out(store: MemoryStore) -> None:
    guard = Guard(store)

    def pay(payment_id: str, amount: int, trace: object) -> str:
        return payment_id

    named = guard.idempotent("named", key="payment_id", fingerprint="amount")(pay)
    computed = guard.idempotent("computed", key="payment_id", fingerprint=lambda payment_id, amount, trace: amount)(pay)
    free = guard.idempotent("free", key="payment_id", fingerprint=None)(pay)

    for one in (named, computed):
        assert one("pay_1", 1, object()) == one("pay_1", 1, object()) == "pay_1"
        with pytest.raises(KeyReused):
            one("pay_1", 2, object())
    assert free("pay_1", 1, object()) == free("pay_1", 2, object()) == "pay_1"


# Row 28.


def test_another_key_with_the_same_payload_runs(store: MemoryStore) -> None:
    guard, handler = Guard(store), Handler()

    outcomes = [guard.run("order", key, handler, payload=RIGHT) for key in ("first", "second")]

    assert handler.starts == 2
    assert not any(outcome.replayed for outcome in outcomes)


# Row 31.


def test_separators_inside_scope_operation_or_key_never_make_two_records_one(store: MemoryStore) -> None:
    guard, handler = Guard(store), Handler()
    triples = [
        ("a:b", "charge", "c"),
        ("a", "charge", "b:c"),
        ("a", "b:charge", "c"),
        ("a:b:charge", "x", "c"),
        ("a\x01", "charge", "c"),
        ("a", "charge", "\x01c"),
        ("a/b", "charge", "c"),
        (None, "charge", "a:b:c"),
    ]

    for scope, operation, key in triples:
        guard.run(operation, key, handler, scope=scope)

    assert handler.starts == len(triples)
    assert len({address(operation, key, scope).packed for scope, operation, key in triples}) == len(triples)


def test_two_lists_of_key_parts_never_make_one_key() -> None:
    lists = [("a", "b"), ("ab", "c"), ("a", "bc"), ("a:b", "c"), ("a", "b:c"), ("a", "b", "c"), ("a", "1:b"), ("a1:b",)]

    assert len({joined({str(at): part for at, part in enumerate(parts)}) for parts in lists}) == len(lists)


# Row 32.


def test_tenants_with_the_same_key_have_a_record_each_and_never_read_each_others_answer(store: MemoryStore) -> None:
    tenants = ["acme", "emca", "nobody else"]
    guards = [Guard(store, scope=tenant) for tenant in tenants[:2]] + [Guard(store, scope=lambda: tenants[2])]

    @Guard(store).idempotent("refund", key="payment_id", scope=lambda payment_id, tenant: tenant, fingerprint=None)
    def refund(payment_id: str, tenant: str) -> str:
        return f"refunded by {tenant}"

    for _ in range(2):
        answers = [guard.run("charge", "pay_1", Handler(tenant)) for guard, tenant in zip(guards, tenants, strict=True)]
        refunds = [refund("pay_1", tenant) for tenant in tenants]

    assert [(answer.value, answer.replayed) for answer in answers] == [(tenant, True) for tenant in tenants]
    assert refunds == [f"refunded by {tenant}" for tenant in tenants]
    assert Guard(store).read("charge", "pay_1") is None
    assert Guard(store, scope="acme").run("charge", "pay_1", Handler("theirs"), scope="stranger").value == "theirs"


@pytest.mark.parametrize("nobody", [None, ""])
def test_a_tenant_that_went_missing_is_an_error_and_never_the_common_scope(store: MemoryStore, nobody: Any) -> None:
    charge = Guard(store).idempotent("charge", key="payment_id", scope=lambda payment_id: nobody)(
        lambda payment_id: pytest.fail("it ran")
    )

    with pytest.raises(UsageError, match=r"scope= returned .* has to name a tenant"):
        Guard(store, scope=lambda: nobody).run("charge", "pay_1", pytest.fail)
    with pytest.raises(UsageError, match=r"charge: scope= returned .* has to name a tenant"):
        charge("pay_1")
    for guard in (Guard(store), Guard(store, scope="acme")):
        problem = guard.run_batch("charge", ["pay_1"], key=str, handler=pytest.fail, scope=lambda _message: nobody)[0]
        assert isinstance(problem, UsageError)

    assert len(store) == 0


# Row 33.


def test_two_consumers_of_one_event_both_run(store: MemoryStore) -> None:
    guard, mail, stock = Guard(store), Handler("mailed"), Handler("reserved")

    for _ in range(2):
        outcomes = [guard.run("mail", "event_1", mail), guard.run("stock", "event_1", stock)]

    assert [outcome.value for outcome in outcomes] == ["mailed", "reserved"]
    assert (mail.starts, stock.starts) == (1, 1)


# Row 34.


UNUSABLE = [None, True, 1.5, "", "  \t", b"pay_1", ["pay_1"], "x" * (KEY_MAX + 1), "é" * 128, "\0", "\ud800"]


@pytest.mark.parametrize("key", UNUSABLE)
def test_a_key_that_cannot_be_used_is_missing_and_nothing_runs(store: MemoryStore, key: Any) -> None:
    with pytest.raises(MissingKey, match=r"charge: .*key.*(a str, an int or a UUID|limit is 255|NUL|surrogate)"):
        Guard(store).run("charge", key, pytest.fail)

    assert len(store) == 0


@pytest.mark.parametrize("key", [None, "", "x" * (KEY_MAX + 1)])
def test_where_a_decorated_function_got_no_usable_key_the_argument_is_named(store: MemoryStore, key: Any) -> None:
    charge = Guard(store).idempotent("charge", key="payment_id")(lambda payment_id: pytest.fail("it ran"))

    with pytest.raises(MissingKey, match="payment_id"):
        charge(key)

    assert len(store) == 0


def test_where_one_of_several_parts_of_a_key_is_missing_it_is_named(store: MemoryStore) -> None:
    charge = Guard(store).idempotent("charge", key=("tenant", "payment_id"))(
        lambda tenant, payment_id: pytest.fail("it ran")
    )

    with pytest.raises(MissingKey, match=r"charge.*payment_id"):
        charge("acme", None)


def test_a_missing_key_is_an_error_when_async_too() -> None:
    async def handler() -> None:
        pytest.fail("it ran")

    with pytest.raises(MissingKey):
        asyncio.run(AsyncGuard("memory:").run("charge", None, handler))  # type: ignore[arg-type]


def test_keys_at_their_limits_and_of_every_kind_are_taken(store: MemoryStore) -> None:
    guard, one = Guard(store), uuid.uuid4()

    for key in ("x" * KEY_MAX, "é" * 127, 7, 0, -1, one, " a "):
        assert guard.run("charge", key, Handler(), scope="s" * SCOPE_MAX).attempt == 1

    for again in ("7", str(one)):
        assert guard.run("charge", again, pytest.fail, scope="s" * SCOPE_MAX).replayed
    assert not guard.run("charge", "a", Handler(), scope="s" * SCOPE_MAX).replayed


# Row 34a.


def test_a_deploy_that_changes_the_payloads_recipe_refuses_nothing_in_flight(store: MemoryStore) -> None:
    guard = Guard(store)

    def old(payment_id: str, amount: int) -> str:
        return "paid"

    def new(payment_id: str, amount: int, currency: str = "eur") -> str:
        return "paid twice"

    before = guard.idempotent("charge", key="payment_id", fingerprint=("amount",))(old)
    after = guard.idempotent("charge", key="payment_id", fingerprint=("amount", "currency"))(new)
    grown = guard.idempotent("charge", key="payment_id")(new)
    computed = guard.idempotent("charge", key="payment_id", fingerprint=lambda *_: 1)(old)

    assert before("pay_1", 4200) == after("pay_1", 4200) == grown("pay_1", 4200) == computed("pay_1", 4200) == "paid"
    with pytest.raises(KeyReused):
        before("pay_1", 1)


def test_a_take_over_with_another_recipe_keeps_the_first_fingerprint(clock: Clock, store: MemoryStore) -> None:
    guard = Guard(store)
    die_running(store, "charge", "pay_1", payload=RIGHT)
    clock.advance(31)

    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int) -> str:
        return "paid"

    assert charge("pay_1", 4200) == "paid"
    with pytest.raises(KeyReused):
        guard.run("charge", "pay_1", pytest.fail, payload=WRONG)
    assert guard.run("charge", "pay_1", pytest.fail, payload=RIGHT).replayed
