"""Rows 36 to 38 of the edge cases: a replay is equal and of the same type, or says that it cannot be."""

from __future__ import annotations

import asyncio
import enum
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypedDict

import attrs
import msgspec
import pydantic
import pytest

from onefold import AsyncGuard, Guard, Policy, ResultNotKept, ResultUnreadable, State, events
from onefold.codecs import MsgspecCodec
from tests.support import Handler, Heard

EAST = timezone(timedelta(hours=2))


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str = "eur"


@dataclass
class Receipt:
    number: int
    paid: Money
    lines: list[Money] = field(default_factory=list)
    note: str | None = None


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Options(TypedDict, total=False):
    dark: bool
    size: int


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    number: int = pydantic.Field(alias="orderNumber")
    at: datetime
    colour: Colour = Colour.RED
    tags: tuple[str, ...] = ()


@attrs.frozen
class Parcel:
    weight: float
    sender: uuid.UUID


class Ticket(msgspec.Struct):
    seat: str
    price: Money


ONE = uuid.UUID(int=1)
ORDER = Order(orderNumber=7, at=datetime(2026, 1, 2, 3, tzinfo=UTC), tags=("a", "b"))
MONEY = Money(Decimal("1.10"))

STORABLE: list[tuple[Any, Any]] = [
    (Receipt(1, MONEY, [MONEY, Money(Decimal(0), "usd")]), Receipt),
    ([MONEY, MONEY], list[Money]),
    ({"a": MONEY}, dict[str, Money]),
    (Decimal("10.00"), Decimal),
    (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), datetime),
    (datetime(2026, 1, 2, 3, tzinfo=EAST), datetime),
    (datetime(2026, 1, 2, 3, 4, 5, 6), datetime),  # noqa: DTZ001 - without a zone is what it is about
    (date(2026, 1, 2), date),
    (time(1, 2, 3), time),
    (timedelta(days=1, microseconds=1), timedelta),
    (ONE, uuid.UUID),
    (Colour.RED, Colour),
    (Level.LOW, Level),
    ((1, "a", MONEY), tuple[int, str, Money]),
    ((1, 2, 3), tuple[int, ...]),
    (Point(1, 2.5), Point),
    ([Point(1)], list[Point]),
    (Options(dark=False), Options),
    (ORDER, Order),
    ([ORDER], list[Order]),
    (Parcel(1.5, ONE), Parcel),
    (Ticket("4a", MONEY), Ticket),
    ({1, 2}, set[int]),
    (frozenset({"a"}), frozenset[str]),
    (b"\x00\xff", bytes),
    (None, Receipt | None),
    (MONEY, Money | None),
    ("red", Literal["red", "blue"]),
    ({"deep": [{"er": None}, 1.5, True, b"x"]}, Any),
    (2**63, int),
    (-0.0, float),
]


class Opaque:
    """No codec knows it."""


def versions(before: Any, after: Any, value: Any) -> tuple[Guard, Callable[[], Any]]:
    """A guard that remembers a value of the first version of a type, and the replay by the second version."""
    guard = Guard("memory:")
    stored = guard.run("charge", "pay_1", Handler(value), returns=before)
    assert stored.recorded
    return guard, lambda: guard.run("charge", "pay_1", pytest.fail, returns=after).value


# Row 36.


@pytest.mark.parametrize("value", [None, 0, False, "", [], {}, 0.0, b""])
def test_a_falsy_result_is_replayed_exactly_and_never_runs_again(value: Any) -> None:
    guard, handler = Guard("memory:"), Handler(value)
    decorated = guard.idempotent("decorated", key="number")(lambda number: handler())

    outcomes = [guard.run("charge", "pay_1", handler) for _ in range(3)]
    values = [decorated(1), decorated(1)]

    assert handler.starts == 2
    assert [outcome.replayed for outcome in outcomes] == [False, True, True]
    for found in (*(outcome.value for outcome in outcomes), *values):
        assert found == value
        assert type(found) is type(value)


# Row 37.


@pytest.mark.parametrize(("value", "returns"), STORABLE, ids=lambda part: repr(part)[:40])
def test_a_result_is_replayed_equal_and_of_the_same_type(value: Any, returns: Any) -> None:
    guard = Guard("memory:")

    first = guard.run("charge", "pay_1", Handler(value), returns=returns)
    again = guard.run("charge", "pay_1", pytest.fail, returns=returns)

    assert first.value is value
    assert (again.value, again.replayed, again.omitted) == (value, True, False)
    assert type(again.value) is type(value)


def test_types_are_kept_all_the_way_down() -> None:
    guard = Guard("memory:")
    guard.run("charge", "pay_1", Handler(Receipt(1, MONEY, [MONEY])), returns=Receipt)

    again: Receipt = guard.run("charge", "pay_1", pytest.fail, returns=Receipt).value

    assert repr(again) == repr(Receipt(1, MONEY, [MONEY]))


def test_what_is_not_a_number_is_replayed_as_such() -> None:
    guard = Guard("memory:")
    guard.run("charge", "pay_1", Handler([math.nan, math.inf]), returns=list[float])
    guard.run("charge", "pay_2", Handler(math.nan))

    found: list[float] = guard.run("charge", "pay_1", Handler(), returns=list[float]).value

    assert (math.isnan(found[0]), found[1]) == (True, math.inf)
    assert math.isnan(guard.run("charge", "pay_2", pytest.fail).value)


def test_the_annotation_of_a_function_is_the_type_of_its_replay() -> None:
    guard, async_guard = Guard("memory:"), AsyncGuard("memory:")

    @guard.idempotent("charge", key="number")
    def charge(number: int) -> Receipt:
        return Receipt(number, MONEY)

    @async_guard.idempotent("charge", key="number")
    async def charge_async(number: int) -> list[Order]:
        return [ORDER]

    async def twice() -> list[list[Order]]:
        return [await charge_async(1), await charge_async(1)]

    assert charge(1) == charge(1) == Receipt(1, MONEY)
    assert asyncio.run(twice()) == [[ORDER], [ORDER]]


@dataclass
class BigReceipt(Receipt):
    more: int = 0


@pytest.mark.parametrize(
    ("value", "returns"),
    [
        (Opaque(), Any),
        (MONEY, Any),
        ((1, 2), Any),
        ([{"at": date(2026, 1, 2)}], Any),
        (BigReceipt(1, MONEY), Receipt),
        ("seven", int),
        (2**70, int),
        ("\ud800", str),
        (Options(dark=True, extra=1), Options),  # type: ignore[typeddict-unknown-key]
    ],
    ids=lambda part: repr(part)[:40],
)
def test_a_value_that_turns_out_unstorable_ends_done_without_a_result(value: Any, returns: Any) -> None:
    heard = Heard()
    guard = Guard("memory:", on_event=heard)
    charge = guard.idempotent("charge", key="number", returns=returns)(lambda number: value)

    first = charge(1)
    outcome = charge.outcome(1)

    assert first is value
    assert (outcome.value_or(None), outcome.replayed, outcome.omitted) == (None, True, True)
    with pytest.raises(ResultNotKept, match="It did not run again"):
        charge(1)
    assert heard.kinds[:3] == ["started", "omitted", "finished"]


def test_a_result_that_is_not_kept_is_logged_once_an_operation_without_its_value(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_warned", set())
    guard = Guard("memory:")

    for key in ("pay_1", "pay_2"):
        guard.run("charge", key, lambda: MONEY)
    guard.run("charge", "pay_3", lambda: MONEY, policy=Policy(keep_result=False))
    guard.run("large", "pay_1", lambda: "secret" * 100, policy=Policy(max_result_bytes=10))
    guard.run("quiet", "pay_1", lambda: MONEY, policy=Policy(keep_result=False))

    logged = [one.getMessage() for one in caplog.records if one.name == "onefold"]
    assert [message.partition(" [key ")[0] for message in logged] == ["charge", "large"]
    assert "a Money was not kept" in logged[0]
    assert "pass returns=" in logged[0]
    assert not any(hidden in "".join(logged) for hidden in ("1.10", "secret", "pay_"))


@pytest.mark.parametrize("made", [bytearray, memoryview])
def test_what_a_codec_makes_reaches_every_store_as_bytes(made: type[Any]) -> None:
    class Buffered(MsgspecCodec):
        def encode(self, value: Any, type_: Any) -> Any:
            return made(super().encode(value, type_))

    guard = Guard("memory:", codec=Buffered())
    guard.run("charge", "pay_1", lambda: "receipt")
    kept = guard.read("charge", "pay_1")

    assert kept is not None
    assert type(kept.result) is bytes


def test_a_codec_that_makes_no_bytes_loses_the_result_and_not_the_effect() -> None:
    class Text(MsgspecCodec):
        def encode(self, value: Any, type_: Any) -> Any:
            return super().encode(value, type_).hex()

    guard, handler = Guard("memory:", codec=Text()), Handler("receipt")
    outcomes = [guard.run("charge", "pay_1", handler) for _ in range(2)]

    assert handler.starts == 1
    assert [(one.replayed, one.omitted) for one in outcomes] == [(False, False), (True, True)]
    assert "str instead of bytes" in outcomes[1].remark


def test_a_codec_of_the_users_own_that_fails_does_not_lose_the_effect() -> None:
    class Locked(MsgspecCodec):
        def encode(self, value: Any, returns: Any) -> bytes:
            raise PermissionError("no key to encrypt with")

    guard = Guard("memory:", codec=Locked())

    outcomes = [guard.run("charge", "pay_1", Handler("paid")) for _ in range(2)]

    assert [(outcome.value_or(None), outcome.omitted) for outcome in outcomes] == [("paid", False), (None, True)]
    assert "no key to encrypt with" in outcomes[1].remark


# Row 38.


class ModelBefore(pydantic.BaseModel):
    number: int
    total: int


class ModelRenamed(pydantic.BaseModel):
    number: int
    amount: int = 0


class ModelGrown(ModelBefore):
    note: str = "none"


Before = make_dataclass("Receipt", [("number", int), ("total", int)])
Renamed = make_dataclass("Receipt", [("number", int), ("amount", int, field(default=0))])
Grown = make_dataclass("Receipt", [("number", int), ("total", int), ("note", str, field(default="none"))])
Retyped = make_dataclass("Receipt", [("number", int), ("total", str)])
Shrunk = make_dataclass("Receipt", [("number", int)])
Needy = make_dataclass("Receipt", [("number", int), ("total", int), ("buyer", str)])
StructBefore = msgspec.defstruct("Receipt", [("number", int), ("total", int)])
StructRenamed = msgspec.defstruct("Receipt", [("number", int), ("amount", int, 0)])
ArrayBefore = msgspec.defstruct("Receipt", [("number", int), ("total", int)], array_like=True)
ArrayShrunk = msgspec.defstruct("Receipt", [("number", int)], array_like=True)
AttrsBefore = attrs.make_class("Receipt", {"number": attrs.field(type=int), "total": attrs.field(type=int)})
AttrsRenamed = attrs.make_class(
    "Receipt", {"number": attrs.field(type=int), "amount": attrs.field(type=int, default=0)}
)


class PairBefore(NamedTuple):
    number: int
    total: int


class PairShrunk(NamedTuple):
    number: int


ColourAfter = enum.Enum("ColourAfter", {"BLUE": "blue"})

REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "a renamed field with a default": (Before, Renamed, Before(1, 5), "total"),
    "the same inside a list": (list[Before], list[Renamed], [Before(1, 5)], "total"),  # type: ignore[valid-type]
    "the same of a struct": (StructBefore, StructRenamed, StructBefore(1, 5), "total"),
    "the same of an attrs class": (AttrsBefore, AttrsRenamed, AttrsBefore(1, 5), "total"),
    "the same of a pydantic model": (ModelBefore, ModelRenamed, ModelBefore(number=1, total=5), "total"),
    "a field that was removed": (Before, Shrunk, Before(1, 5), "total"),
    "a field of another type": (Before, Retyped, Before(1, 5), "total"),
    "a new field without a default": (Before, Needy, Before(1, 5), "buyer"),
    "a place that was removed": (ArrayBefore, ArrayShrunk, ArrayBefore(1, 5), r"(\[1\]|length)"),
    "a place of a tuple that was removed": (PairBefore, PairShrunk, PairBefore(1, 5), "length"),
    "a member of an enum that was removed": (Colour, ColourAfter, Colour.RED, "red"),
    "a member of an enum inside": (dict[str, Colour], dict[str, ColourAfter], {"of": Colour.RED}, "red"),
    "another type": (Before, int, Before(1, 5), "int"),
    "a type that was removed": (Before, Any, Before(1, 5), "Any"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_older_version_stored_is_refused_by_name_and_never_a_wrong_object(case: str) -> None:
    before, after, value, named = REFUSED[case]
    guard, replay = versions(before, after, value)

    with pytest.raises(ResultUnreadable, match=rf"does not fit .*{named}.* It did not run again"):
        replay()

    record = guard.read("charge", "pay_1")
    assert record is not None
    assert record.state is State.DONE
    assert guard.run("charge", "pay_1", pytest.fail, returns=before).value == value


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [(Before, Grown, Before(1, 5)), (ModelBefore, ModelGrown, ModelBefore(number=1, total=5))],
)
def test_a_new_field_with_a_default_reads_what_an_older_version_stored(before: Any, after: Any, value: Any) -> None:
    _, replay = versions(before, after, value)

    found = replay()

    assert type(found) is after
    assert (found.number, found.total, found.note) == (1, 5, "none")


def test_bytes_that_are_no_result_at_all_are_refused_and_run_nothing() -> None:
    class Garbled(MsgspecCodec):
        def encode(self, value: Any, returns: Any) -> bytes:
            return b"\xc1 garbage"

    guard = Guard("memory:", codec=Garbled())
    guard.run("charge", "pay_1", Handler())

    for returns in (Receipt, Any):
        with pytest.raises(ResultUnreadable):
            guard.run("charge", "pay_1", pytest.fail, returns=returns)
