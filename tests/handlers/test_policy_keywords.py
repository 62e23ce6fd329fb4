"""Fields of a policy are keywords of every call: they change the guard's policy, and leave its other fields alone."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Held, Policy, PolicyFields, Record, Unknown, UsageError
from onefold._guard import options

DAY = 86_400.0

# How each call takes its keywords: it delivers the key "k" of the operation "charge" once.
CALLS: dict[str, Callable[..., Any]] = {
    "run": lambda guard, **fields: guard.run("charge", "k", lambda: 1, **fields),
    "run_batch": lambda guard, **fields: guard.run_batch("charge", ["k"], key=str, handler=int_of, **fields),
    "idempotent": lambda guard, **fields: guard.idempotent("charge", key="key", **fields)(int_of)("k"),
}


def int_of(key: str) -> int:
    return 1


def found(guard: Guard) -> Record:
    record = guard.read("charge", "k")
    assert record is not None
    return record


@pytest.mark.parametrize("call", CALLS)
def test_a_field_changes_the_guards_policy_and_leaves_the_rest(call: str) -> None:
    guard = Guard("memory:", keep="1d", max_result_bytes=0)

    CALLS[call](guard, keep="7d")

    assert found(guard).ttl_left == pytest.approx(7 * DAY, abs=60)
    assert found(guard).omitted, "max_result_bytes is the guard's"


@pytest.mark.parametrize("call", CALLS)
def test_fields_change_a_whole_policy_too(call: str) -> None:
    guard = Guard("memory:", max_result_bytes=0)

    CALLS[call](guard, policy=Policy(keep="1d"), keep="7d")

    assert found(guard).ttl_left == pytest.approx(7 * DAY, abs=60)
    assert not found(guard).omitted, "a whole policy replaces the guard's"


def test_a_guard_takes_fields_and_a_policy() -> None:
    assert Guard("memory:", keep="forever").policy == Policy(keep=math.inf)
    assert Guard("memory:", policy=Policy(lease="1m"), keep="forever").policy == Policy(keep=math.inf, lease=60)


def test_one_operation_may_be_stricter_than_its_guard() -> None:
    guard = Guard("memory:")

    @guard.idempotent("charge", key="payment_id", after_crash="hold")
    def charge(payment_id: str) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        charge("pay_1")
    with pytest.raises(Held):
        charge("pay_1")
    with pytest.raises(TimeoutError):
        guard.run("mail", "m_1", lambda: charge.__wrapped__("pay_1"))
    assert guard.run("mail", "m_1", lambda: "sent").value == "sent"


def test_async_calls_take_fields() -> None:
    async def main() -> float:
        async with AsyncGuard("memory:", keep="1d") as guard:
            await guard.run("charge", "k", paid, keep="7d")
            record = await guard.read("charge", "k")
        assert record is not None
        return record.ttl_left

    async def paid() -> int:
        return 1

    assert asyncio.run(main()) == pytest.approx(7 * DAY, abs=60)


def test_a_call_that_repeats_its_fields_makes_one_policy() -> None:
    guard = Guard("memory:")

    chosen = [guard._asked(None, {"keep": "7d"}, Guard.run) for _ in range(2)]

    assert chosen[0] is chosen[1]
    guard.policy = Policy(lease="1m")
    assert guard._asked(None, {"keep": "7d"}, Guard.run) == Policy(lease="1m", keep="7d")


def test_probes_that_are_made_for_each_call_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "VARIANTS_MAX", 3)
    guard = Guard("memory:")

    for number in range(10):
        guard.run("charge", number, lambda: 1, after_crash=lambda _current: Unknown())
    guard.run("charge", "listed", lambda: 1, ambiguous_errors=[TimeoutError])

    assert len(guard._variants) <= 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda guard: guard.run("o", "k", int, kep="7d"), r"kep= is neither an argument of run\(\).*mean 'keep'"),
        (lambda guard: guard.run("o", "k", int, paylod=1), r"paylod= is neither an argument of run\(\).*'payload'"),
        (lambda guard: guard.run("o", "k", int, fingerprint=1), r"run\(\).* Pass the payload itself as payload="),
        (lambda guard: guard.idempotent("o", key="k", payload="k"), "Name the arguments .* with fingerprint="),
        (lambda guard: guard.idempotent("o", key="k", fingerprnt="k"), "did you mean 'fingerprint'"),
        (lambda guard: guard.run_batch("o", [], key=str, handler=str, hanlder=1), r"run_batch\(\).*'handler'"),
        (lambda guard: guard.within(object(), recrd=1), r"within\(\).*'record'"),
        (lambda guard: guard.within(object()).run("o", "k", int, fingerprint=1), "payload="),
        (lambda _: Guard("memory:", polcy=1), r"Guard\(\).*'policy'"),  # type: ignore[call-arg]
        (lambda _: Policy(keeep="7d"), "keeep= is not a field of a policy: did you mean 'keep'"),  # type: ignore[call-arg]
        (lambda _: Policy().replace(fingerprint=1), "fingerprint= is not a field of a policy$"),  # type: ignore[call-arg]
        (lambda guard: guard.run("o", "k", int, keep="soon"), "keep='soon'"),
    ],
)
def test_a_wrong_keyword_is_refused_by_its_name(wrong: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wrong(Guard("memory:"))


def test_the_keywords_are_those_of_a_policy() -> None:
    fields = set(PolicyFields.__optional_keys__)

    assert fields == set(Policy.__slots__)
    for call in (Guard, Guard.run, Guard.run_batch, Guard.idempotent, Guard.transactional, Guard.within):
        own = {name for name, one in inspect.signature(call).parameters.items() if one.kind is one.KEYWORD_ONLY}
        assert own & fields == set(), "a keyword means one thing"


def test_a_decorated_function_shows_its_policy() -> None:
    guard = Guard("memory:", keep="forever")

    class Shop:
        @guard.idempotent("refund", key="key", lease="2m")
        def refund(self, key: str) -> int:
            return 1

    @guard.idempotent("charge", key="key")
    def charge(key: str) -> int:
        return 1

    assert charge.policy is guard.policy
    assert Shop.refund.policy == Shop().refund.policy == Policy(keep="forever", lease="2m")


def test_a_decorated_async_function_shows_its_policy() -> None:
    guard = AsyncGuard("memory:", after_crash="hold")

    @guard.idempotent("charge", key="key", policy=Policy(keep="7d"))
    async def charge(key: str) -> int:
        return 1

    assert charge.policy == Policy(keep="7d")


@pytest.mark.parametrize("field", ["keep_result", "keep_error_text", "cancel_when_lost", "count_duplicates"])
@pytest.mark.parametrize("given", ["no", "false", "", None, 0, 1, []])
def test_a_field_that_is_on_or_off_is_a_truth_value(field: str, given: Any) -> None:
    with pytest.raises(UsageError, match=f"{field}=.* is neither True nor False"):
        Guard("memory:").run("charge", "k", pytest.fail, **{field: given})


@pytest.mark.parametrize("field", ["ambiguous_errors", "final_errors"])
@pytest.mark.parametrize("given", [None, 5, True, object()])
def test_a_field_of_exceptions_is_several(field: str, given: Any) -> None:
    with pytest.raises(UsageError, match=f"{field}=.* has to be several exceptions"):
        Guard("memory:").run("charge", "k", pytest.fail, **{field: given})


@pytest.mark.parametrize("field", ["keep", "lease", "wait", "rerun_within"])
def test_a_duration_that_no_clock_counts_is_refused(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field}=.* is not a duration"):
        Policy(**{field: 10**400})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("good", "wrong"), [({"max_attempts": 1}, True), ({"max_attempts": 1}, 1.0), ({"keep": 1}, True)]
)
def test_what_is_refused_is_refused_after_an_equal_value_too(good: dict[str, Any], wrong: Any) -> None:
    guard = Guard("memory:")
    guard.run("charge", "k", lambda: 1, **good)

    with pytest.raises(UsageError):
        guard.run("charge", "other", pytest.fail, **dict.fromkeys(good, wrong))
