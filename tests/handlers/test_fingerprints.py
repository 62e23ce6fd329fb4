"""Fingerprints: real values of every kind of argument, any payload that is legal, and what two releases both know."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import inspect
import ipaddress
import logging
import math
import os
import pathlib
import re
import subprocess
import sys
import types
import uuid
import zoneinfo
from collections import ChainMap, Counter, OrderedDict, UserDict, UserString, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import attrs
import msgspec
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel, SecretBytes, SecretStr, computed_field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from onefold import Guard, KeyReused, UsageError, events
from onefold._fingerprint import PARTS_MAX, Compared, compare, of_parts, recipe_of_parts
from onefold._fingerprint.canonical import NESTING_MAX, _encode_by_steps, encode
from onefold.keys import canonical

ONE, OTHER = "4111 1111 1111 1111", "5500 0000 0000 0004"

T = TypeVar("T")


# Every kind of class that an argument can be, each with a card number that its class hides in its own way.


class Secret(BaseModel):
    number: SecretStr


class SecretInBytes(BaseModel):
    number: SecretBytes

    @classmethod
    def of(cls, number: str) -> SecretInBytes:
        return cls(number=SecretBytes(number.encode()))


class Excluded(BaseModel):
    number: str = Field(exclude=True)


class Masked(BaseModel):
    number: str

    @pydantic.field_serializer("number")
    def _mask(self, number: str) -> str:
        return "**** " + number[-1:].replace("4", "1")


class MaskedWhole(BaseModel):
    number: str

    @pydantic.model_serializer
    def _mask(self) -> dict[str, str]:
        return {"number": "****"}


class Card(BaseModel):
    pass


class NumberedCard(Card):
    number: str


class Wallet(BaseModel):
    # Serialized as a Card, without the fields of what it really is.
    card: Card

    @classmethod
    def of(cls, number: str) -> Wallet:
        return cls(card=NumberedCard(number=number))


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    number: str = Field(alias="cardNumber", repr=False)


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")


class Root(RootModel[SecretStr]):
    @classmethod
    def of(cls, number: str) -> Root:
        return cls(SecretStr(number))


class Box(BaseModel, Generic[T]):
    number: T


class Nested(BaseModel):
    wallets: list[dict[str, tuple[Secret, ...]]]

    @classmethod
    def of(cls, number: str) -> Nested:
        return cls(wallets=[{"first": (Secret(number=SecretStr(number)),)}])


@pydantic_dataclass
class PydanticDataclass:
    number: SecretStr


@pydantic_dataclass(config=ConfigDict(extra="allow"))
class OpenPydanticDataclass:
    kind: str = "card"


@dataclass
class Plain:
    number: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Slotted:
    _number: str


@attrs.define
class Attrs:
    _number: str


class Struct(msgspec.Struct, omit_defaults=True, rename="camel", array_like=True):
    number: str = ONE


class Tuple(NamedTuple):
    number: str


class Typed(TypedDict):
    number: str


class Shy(str):
    def __repr__(self) -> str:
        return "****"

    __str__ = __repr__


class Numbered(enum.Enum):
    ONE = ONE
    OTHER = OTHER


KINDS: dict[str, Callable[[str], Any]] = {
    "a secret": lambda number: Secret(number=SecretStr(number)),
    "a secret in bytes": SecretInBytes.of,
    "an excluded field": lambda number: Excluded(number=number),
    "a masking serializer of a field": lambda number: Masked(number=number),
    "a masking serializer of a model": lambda number: MaskedWhole(number=number),
    "an instance of a subclass": Wallet.of,
    "an alias": lambda number: Aliased(cardNumber=number),
    "a field that was not declared": lambda number: Extra(number=number),  # type: ignore[call-arg]
    "a root model": Root.of,
    "a generic model": lambda number: Box[SecretStr](number=SecretStr(number)),
    "models in containers": Nested.of,
    "a model made without validation": lambda number: Masked.model_construct(number=number),
    "a bare secret": SecretStr,
    "a generic secret": pydantic.Secret[str],
    "a pydantic dataclass": lambda number: PydanticDataclass(SecretStr(number)),
    "an open pydantic dataclass": lambda number: OpenPydanticDataclass(number=number),  # type: ignore[call-arg]
    "a dataclass": Plain,
    "a dataclass with slots and a private field": Slotted,
    "an attrs class with a private field": Attrs,
    "a struct": Struct,
    "a named tuple": Tuple,
    "a namedtuple": namedtuple("Old", "number"),  # noqa: PYI024 - the old kind is meant
    "a typed dictionary": lambda number: Typed(number=number),
    "a text that does not show itself": Shy,
    "a member of an enum": Numbered,
    "a set": lambda number: {number, "x"},
    "a mapping": lambda number: types.MappingProxyType({"number": number}),
    "a user dictionary": lambda number: UserDict(number=number),
    "a user string": UserString,
    "a chain of mappings": lambda number: ChainMap({}, {"number": number}),
    "a deque": lambda number: deque([number]),
    "a counter": lambda number: Counter([number]),
    "bytes that can change": lambda number: bytearray(number.encode()),
    "a view of bytes": lambda number: memoryview(number.encode()),
    "a url": lambda number: pydantic.HttpUrl(f"https://user:{number[:4]}@example.com/"),
    "a path": pathlib.PurePosixPath,
    "a pattern": re.compile,
    "a key that is a number": lambda number: {int(number.replace(" ", "")): "x"},
    "a key that is a model": lambda number: {Slotted(number): "x"},
}


if sys.version_info < (3, 14):
    from pydantic import v1

    Old = v1.create_model("Old", number=(v1.SecretStr, ...))
    KINDS["a model of pydantic 1"] = lambda number: Old(number=number)


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


@pytest.mark.parametrize("kind", KINDS)
def test_two_cards_are_two_payloads_and_equal_ones_are_one(guard: Guard, kind: str) -> None:
    make, charged = KINDS[kind], []

    @guard.idempotent("charge", key="payment_id", returns=int)
    def charge(payment_id: str, card: Any) -> int:
        charged.append(card)
        return len(charged)

    assert [charge("pay_1", make(ONE)), charge("pay_1", make(ONE))] == [1, 1]
    with pytest.raises(KeyReused):
        charge("pay_1", make(OTHER))
    guard.run("charge", "pay_2", int, payload={"card": make(ONE)})
    with pytest.raises(KeyReused):
        guard.run("charge", "pay_2", int, payload={"card": make(OTHER)})


def test_what_is_computed_or_private_in_a_model_is_no_part_of_it() -> None:
    class Order(BaseModel):
        amount: int
        _seen: list[str] = PrivateAttr(default_factory=list)

        @computed_field  # type: ignore[prop-decorator]
        @property
        def number(self) -> str:
            return str(uuid.uuid4())

    one, other = Order(amount=1), Order(amount=1)
    one._seen.append("x")

    assert encode(one) == encode(other) != encode(Order(amount=2))


def test_the_tags_of_structs_tell_them_apart() -> None:
    class Visa(msgspec.Struct, tag=True):
        number: str

    class Master(msgspec.Struct, tag=True):
        number: str

    assert encode(Visa(ONE)) != encode(Master(ONE))


NOON = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)

EQUALS: dict[str, tuple[Any, ...]] = {
    "the order of keys": ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
    "kinds of mappings": ({"a": 1, "b": 2}, OrderedDict(b=2, a=1), UserDict(b=2, a=1)),
    "the order of a set": ({"a", "b", "c"}, frozenset({"c", "b", "a"})),
    "lists and tuples": ([1, [2]], (1, (2,))),
    "the zone of an instant": (NOON, NOON.astimezone(zoneinfo.ZoneInfo("Asia/Kolkata"))),
    "zeros at the end": tuple(map(decimal.Decimal, ("1", "1.0", "1.00", "100e-2"))),
    "zeros": tuple(map(decimal.Decimal, ("0", "-0", "0.00", "0e7"))),
    "ranges": (range(0, 3, 2), range(0, 4, 2)),
}


@pytest.mark.parametrize("what", EQUALS)
def test_what_is_equal_has_one_form(what: str) -> None:
    assert len({encode(value) for value in EQUALS[what]}) == 1


DIFFERENT: list[Any] = [
    *(None, True, 0, 1, -1, 1.5, 0.5, 1j, "", "1", b"1", "a", "\ud800", "\udfff", "a\ud800"),
    *(2**63, 2**64 - 1, 2**64, 2**64 + 1, -(2**63), -(2**63) - 1, 10**40, -(10**40)),
    *([], [[]], {}, [{}], {"a": 1}, {"a": 2}, {"b": 1}, {1: "a", "1": "b"}, {2**70: 2**71}, {"a": 2**70}),
    *({key: "a"} for key in (1, None, 1.5, (1, 2), "1", b"1", "\ud800")),
    *({frozenset({"x"})}, {frozenset({"x"}), frozenset({"y"})}, {1, "x"}, range(10**12)),
    *(
        dt.date(2026, 1, 2),
        dt.time(1),
        dt.timedelta(1),
        NOON,
        NOON.replace(tzinfo=None),
        zoneinfo.ZoneInfo("Asia/Tokyo"),
    ),
    *(decimal.Decimal(amount) for amount in ("0.1", "NaN", "-Infinity", f"{10**40 + 1}")),
    *(uuid.UUID(int=1), ipaddress.ip_address("10.0.0.1"), ipaddress.ip_network("10.0.0.0/8"), fractions.Fraction(1, 3)),
    *(re.compile("x", re.IGNORECASE), re.compile("x")),
]


def test_what_is_different_has_different_forms() -> None:
    forms = [encode(value) for value in DIFFERENT]

    assert len(set(forms)) == len(forms)


LETTERS = "azZ\x7f\x80é€\uffff😀"
SIZES = (0, 1, 2, 16)


def some(random: Random, leaf: Callable[[Random], Any], key: Callable[[Random], Any], depth: int = 3) -> Any:
    """Data of some shape."""
    shape = random.choice("lllad" if depth else "l")
    if shape == "l":
        return leaf(random)
    if shape == "a":
        return [some(random, leaf, key, depth - 1) for _ in range(random.choice(SIZES))]
    return {key(random): some(random, leaf, key, depth - 1) for _ in range(random.choice(SIZES))}


def text(random: Random, letters: str = LETTERS) -> str:
    return "".join(random.choices(letters, k=random.choice((0, 1, 5, 31, 32))))


def plain_leaf(random: Random) -> Any:
    number = random.randint(-(2**63), 2**64 - 1) >> random.randrange(64)
    return random.choice(
        [None, True, False, number, random.random(), text(random), text(random).encode(), -0.0, math.inf]
    )


def any_leaf(random: Random) -> Any:
    return random.choice(
        [plain_leaf(random), random.randint(-(2**200), 2**200), text(random, LETTERS + "\ud800\udfff")]
    )


def any_key(random: Random) -> Any:
    return random.choice(
        [None, random.randint(-300, 300), text(random, LETTERS + "\ud800"), (1, text(random)), b"x", 2**70]
    )


def test_both_ways_to_write_plain_data_write_the_same() -> None:
    random = Random(25)
    for _ in range(300):
        value = some(random, plain_leaf, text)

        assert _encode_by_steps(value) == encode(value) == msgspec.msgpack.Encoder(order="deterministic").encode(value)


def test_whatever_can_be_sent_has_a_form_and_only_equals_share_it() -> None:
    random = Random(25)
    seen: dict[bytes, Any] = {}
    for _ in range(500):
        value = some(random, any_leaf, any_key)

        assert encode(value) == encode(shuffled(random, value))
        assert repr(seen.setdefault(encode(value), value)) == repr(value)


def shuffled(random: Random, value: Any) -> Any:
    """The same, with the members of mappings in another order."""
    if isinstance(value, list):
        return [shuffled(random, part) for part in value]
    if isinstance(value, dict):
        return dict(random.sample([(key, shuffled(random, part)) for key, part in value.items()], len(value)))
    return value


@pytest.mark.parametrize("deep", [33, 999, NESTING_MAX])
@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_a_payload_may_be_nested_deeply(guard: Guard, deep: int, wrap: Callable[[Any], Any]) -> None:
    def nested(inner: Any) -> Any:
        for _ in range(deep):
            inner = wrap(inner)
        return inner

    guard.run("charge", "pay_1", int, payload=nested(1))

    assert guard.run("charge", "pay_1", int, payload=nested(1)).replayed
    with pytest.raises(KeyReused):
        guard.run("charge", "pay_1", int, payload=nested(2))


def test_the_form_does_not_depend_on_how_deep_the_caller_is() -> None:
    payload: Any = 1
    for _ in range(30):
        payload = [payload]

    def deeper(levels: int) -> bytes:
        return deeper(levels - 1) if levels else encode(payload)

    assert deeper(sys.getrecursionlimit() - 250) == encode(payload)


def test_a_payload_that_is_nested_a_little_can_be_read_wherever_a_flat_one_can() -> None:
    def frames_needed(payload: Any) -> int:
        """How many frames have to be free for it."""

        def deeper(levels: int) -> bytes:
            return deeper(levels - 1) if levels else encode(payload)

        for free in range(1, 200):
            with suppress(RecursionError):
                deeper(sys.getrecursionlimit() - len(inspect.stack(0)) - free)
                return free
        raise AssertionError("it cannot be read at all")

    flat, nested = frozenset({1}), 1
    for _ in range(30):
        nested = [nested]  # type: ignore[assignment]

    # msgspec is given less to do than it could: what it does not get to is written step by step.
    assert frames_needed(nested) <= frames_needed(flat) + 2


@pytest.mark.parametrize("hours", [14, -12])
@pytest.mark.parametrize("end", [dt.datetime.min.replace(tzinfo=dt.UTC), dt.datetime.max.replace(tzinfo=dt.UTC)])
def test_the_first_and_last_moments_of_the_calendar_have_a_form_in_every_time_zone(
    guard: Guard, end: dt.datetime, hours: int
) -> None:
    moment = end.replace(tzinfo=dt.timezone(dt.timedelta(hours=hours)))
    inwards = dt.timedelta(minutes=30 if end.year == 1 else -30)
    # The same moment, by another offset.
    same = (end + inwards).replace(tzinfo=dt.timezone(dt.timedelta(hours=hours) + inwards))
    other = (end + inwards).replace(tzinfo=moment.tzinfo)

    guard.run("charge", "pay_1", int, payload=moment)

    assert moment == same != other
    assert guard.run("charge", "pay_1", int, payload=same).replayed
    with pytest.raises(KeyReused):
        guard.run("charge", "pay_1", int, payload=other)


class SoftTimeLimit(Exception):
    """What a signal's handler raises, wherever the worker is."""


@contextmanager
def limit_reached_in(function: str) -> Iterator[None]:
    """Raise as this function of ours returns, once."""

    def look(frame: types.FrameType, event: str, _argument: Any) -> None:
        if event == "return" and frame.f_code.co_name == function and "onefold" in frame.f_code.co_filename:
            sys.setprofile(None)
            raise SoftTimeLimit

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_signal_that_comes_as_a_payload_is_read_is_not_the_payloads_mistake(guard: Guard) -> None:
    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int) -> None: ...

    @guard.idempotent("refund", key="payment_id", fingerprint=lambda payment_id, amount: amount)
    def refund(payment_id: str, amount: int) -> None: ...

    with pytest.raises(SoftTimeLimit), limit_reached_in("of_parts"):
        charge("pay_1", 4200)
    with pytest.raises(SoftTimeLimit), limit_reached_in("of_whole"):
        refund("pay_1", 4200)
    with pytest.raises(SoftTimeLimit), limit_reached_in("of_whole"):
        guard.run("pay", "pay_1", int, payload=4200)
    with pytest.raises(SoftTimeLimit), limit_reached_in("encode"):
        canonical(4200)


def test_what_holds_itself_or_is_too_deep_is_refused_by_name(guard: Guard) -> None:
    itself: list[Any] = []
    itself.append(itself)

    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int, order: Any) -> None: ...

    with pytest.raises(UsageError, match=r"charge: the argument 'order' of .*NESTING_MAX=10000.*Nothing ran"):
        charge("pay_1", 1, itself)
    with pytest.raises(UsageError, match="NESTING_MAX=10000"):
        canonical(itself)


def test_what_has_no_content_is_refused_by_name_also_inside_of_others(guard: Guard) -> None:
    class Opaque: ...

    class Torn:
        @property
        def root(self) -> None:
            raise ConnectionError("the session is closed")

        __pydantic_root_model__ = True
        model_dump = None

    @guard.idempotent("charge", key="payment_id")
    def charge(payment_id: str, amount: int, order: Any) -> None: ...

    for order, why in (
        ({"a": [Opaque()]}, "Opaque is not a type"),
        (Torn(), "session is closed"),
        (iter([]), "list_iterator"),
    ):
        with pytest.raises(UsageError, match=f"the argument 'order' of .*{why}"):
            charge("pay_1", 1, order)


PROCESS = """
from onefold._fingerprint import *
class Colour(str, __import__("enum").Enum):
    RED = "red"
sets = {frozenset({"a"}), frozenset({"b"}), frozenset({"c"})}
payload = [{"b": 1, "a": {"x", "y", "z"}}, sets, {Colour.RED: {"p", "q"}}, {1: {"k", "l"}}]
print(of_parts(recipe_of_parts(["order", "more"]), ("", "charge", "pay_1"), [payload, {"s", "t", "u"}]).hex())
"""


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROCESS], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("0", "1", "2")
    }

    assert len(seen) == 1


# What two releases both know.


def released(guard: Guard, signature: str, **options: Any) -> Callable[..., Any]:
    """A release of one function, with these arguments."""
    space: dict[str, Any] = {}
    exec(f"def charge({signature}): return 'charged'", space)
    return guard.idempotent("charge", key="payment_id", **options)(space["charge"])  # type: ignore[no-any-return]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(events, "_warned", set())
    return lambda: [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("payment_id, amount", "payment_id, amount, currency='EUR'"),
        ("payment_id, amount, note=''", "payment_id, amount"),
        ("payment_id, amount, note=''", "payment_id, amount, remark=''"),
        ("payment_id, amount, currency='EUR'", "payment_id, currency='EUR', *, amount"),
        ("payment_id, amount", "payment_id, **rest"),
    ],
)  # fmt: skip
def test_a_release_that_changes_the_arguments_compares_those_that_both_know(
    guard: Guard, before: str, after: str, warnings: Callable[[], list[str]]
) -> None:
    old, new = released(guard, before), released(guard, after)
    old("pay_1", amount=4200)
    new("pay_2", amount=4200)

    for one, key in ((new, "pay_1"), (old, "pay_2")):
        assert one(key, amount=4200) == "charged"
        if "rest" not in after:
            with pytest.raises(KeyReused):
                one(key, amount=9900)
    assert bool(warnings()) == (not after.startswith("payment_id, currency"))


def test_where_nothing_can_be_compared_it_is_said_once(guard: Guard, warnings: Callable[[], list[str]]) -> None:
    old, new = released(guard, "payment_id, amount"), released(guard, "payment_id, cents")
    computed = released(guard, "payment_id, amount", fingerprint=lambda payment_id, amount: amount)
    opted_out = released(guard, "payment_id, amount", fingerprint=None)
    old("pay_1", 4200)
    opted_out("pay_1", 9900)
    assert warnings() == []

    for other in (new, new, computed):
        assert other("pay_1", 9900) == "charged"

    assert len(warnings()) == 1
    assert "charge [key" in warnings()[0]
    assert "the payload could not be compared" in warnings()[0]


def test_a_field_that_a_release_adds_is_another_payload_unless_a_function_names_those_that_stay(guard: Guard) -> None:
    class Message(BaseModel):
        amount: int

    class MessageOfTheNextRelease(Message):
        note: str | None = None

    whole = released(guard, "payment_id, message")
    named = released(guard, "payment_id, message", fingerprint=lambda payment_id, message: message.amount)
    for one, key in ((whole, "pay_1"), (named, "pay_2")):
        assert one(key, Message(amount=5)) == "charged"

    with pytest.raises(KeyReused, match="or a release has changed the shape of its payload"):
        whole("pay_1", MessageOfTheNextRelease(amount=5))
    assert named("pay_2", MessageOfTheNextRelease(amount=5)) == "charged"
    with pytest.raises(KeyReused):
        named("pay_2", MessageOfTheNextRelease(amount=6))
    # The function may come with the field: what was made without it cannot be compared, and is replayed.
    assert named("pay_1", MessageOfTheNextRelease(amount=5)) == "charged"


def test_an_argument_that_is_added_is_no_warning(guard: Guard, warnings: Callable[[], list[str]]) -> None:
    released(guard, "payment_id, amount")("pay_1", 4200)

    released(guard, "payment_id, amount, currency='EUR'")("pay_1", 4200)

    assert warnings() == []


def test_two_functions_of_one_operation_are_named_and_compared(guard: Guard, warnings: Callable[[], list[str]]) -> None:
    @guard.idempotent("charge", key="payment_id")
    def charge_card(payment_id: str, amount: int) -> str:
        return "card"

    assert warnings() == []

    @guard.idempotent("charge", key="payment_id")
    def charge_account(payment_id: str, iban: str, amount: int) -> str:
        return "account"

    (told,) = warnings()
    assert "charge: " in told
    first, second = (_line(function) for function in (charge_card, charge_account))
    assert f"charge_card() ({__file__}:{first}) and " in told
    assert f"charge_account() ({__file__}:{second}) are both this operation" in told
    charge_card("pay_1", 4200)
    assert charge_account("pay_1", "DE1", 4200) == "card"
    with pytest.raises(KeyReused):
        charge_account("pay_1", "DE1", 9900)


def _line(guarded: Any) -> int:
    code: types.CodeType = guarded.__wrapped__.__code__
    return code.co_firstlineno


def test_one_function_that_is_decorated_twice_is_one(guard: Guard, warnings: Callable[[], list[str]]) -> None:
    def charge(payment_id: str) -> None: ...

    for _ in range(2):
        guard.idempotent("charge", key="payment_id")(charge)

    assert warnings() == []


@pytest.mark.parametrize("count", [0, 1, 3, PARTS_MAX, PARTS_MAX + 1, 500])
def test_a_fingerprint_fits_into_every_store(count: int) -> None:
    names = [f"argument_{number}" for number in range(count)]
    values: list[Any] = list(range(count))
    made = of_parts(recipe_of_parts(names), ("", "charge", "pay_1"), values)

    assert len(made) <= 128
    assert compare(made, made) is Compared.EQUAL
    for number in range(count):
        other = of_parts(
            recipe_of_parts(names), ("", "charge", "pay_1"), [*values[:number], None, *values[number + 1 :]]
        )
        assert compare(made, other) is Compared.DIFFERENT


def test_equal_payloads_of_two_keys_do_not_look_alike() -> None:
    recipe = recipe_of_parts(["amount"])
    one, other = (of_parts(recipe, ("", "charge", key), [4200]) for key in ("pay_1", "pay_2"))

    assert (one[:7], len(one)) == (other[:7], len(other))
    assert all(mine != theirs for mine, theirs in ((one[7:23], other[7:23]), (one[23:], other[23:])))
