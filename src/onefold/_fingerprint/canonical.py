"""Encode equal values to the same bytes, whatever their types: the input of fingerprints. Pure.

The form is MessagePack with the members of mappings and sets in order, as `msgspec` writes it for plain data, which
most payloads are. Everything else is converted to the same form here: models and other classes by the actual values of
their fields (never by a serializer's output), integers of any size, text with lone surrogates, mappings with any keys.
Nothing here is ever read back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from types import NoneType
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.msgpack import Ext

# No JSON parser in Python reads deeper; and a value that contains itself must come to an end.
NESTING_MAX: Final = 10_000

# Deeper values are written iteratively: msgspec's own depth depends on how deep its caller is.
FAST_NESTING_MAX: Final = 32

LEAVES: Final = frozenset({str, int, float, bool, NoneType, bytes})

# From this many members on it is faster to check all types first.
MANY: Final = 16

# Types for which MessagePack has no form.
WHOLE_NUMBER: Final = 1
TEXT: Final = 2

# The errors of msgspec for plain data: large numbers, surrogates, keys that are not text; and a nearly full stack.
REFUSALS: Final = (OverflowError, ValueError, TypeError, RecursionError)

# For plain data only: see `are_plain`.
encode_plain: Final = msgspec.msgpack.Encoder(order="deterministic").encode


def encode(value: object) -> bytes:
    """Return the canonical form. Raises `TypeError` for a value without one, `ValueError` for one nested too deeply."""
    try:
        if type(value) in LEAVES or are_plain((value,)):
            return encode_plain(value)
    except REFUSALS:
        pass
    return _encode_by_steps(value)


def encode_each(values: Sequence[object]) -> list[bytes]:
    """Return the canonical form of each value."""
    try:
        if LEAVES.issuperset(map(type, values)) or are_plain(values):
            return list(map(encode_plain, values))
    except REFUSALS:
        pass
    return [encode(value) for value in values]


def has_no_form(value: object) -> bool:
    """Return whether a value cannot be encoded, after encoding it has failed once.

    An error that does not recur is not the value's: a signal handler, such as Celery's soft time limit, may raise
    anywhere.
    """
    try:
        encode(value)
    except Exception:  # noqa: BLE001 - also what a property of the value raises
        return True
    return False


def are_plain(values: Iterable[object], depth: int = FAST_NESTING_MAX) -> bool:
    """Return whether msgspec gives them the canonical form. It sorts sets only if their members are comparable.

    Every payload comes through here: it is written for speed.
    """
    for value in values:
        kind = type(value)
        if kind in LEAVES:
            continue
        if kind is dict:
            parts: Any = value.values()  # type: ignore[attr-defined]
        elif kind is list or kind is tuple:
            parts = value
        else:
            return False
        if len(parts) > MANY and LEAVES.issuperset(map(type, parts)):
            continue
        if not depth or not are_plain(parts, depth - 1):
            return False
    return True


class Parts(NamedTuple):
    """A container in progress: its members to come, those that are written, and how they are combined."""

    to_come: Iterator[Any]
    written: list[bytes]
    put_together: Callable[[list[bytes]], bytes]


def _encode_by_steps(value: Any) -> bytes:
    """Return the canonical form, without recursion."""
    around: list[Parts] = []
    at = _opened(value)
    while True:
        if isinstance(at, Parts):
            if len(around) == NESTING_MAX:
                raise ValueError(f"it is nested more than NESTING_MAX={NESTING_MAX} levels deep, or holds itself")
            around.append(at)
        elif not around:
            return at
        else:
            around[-1].written.append(at)
        member = next(around[-1].to_come, around)
        if member is around:
            done = around.pop()
            at = done.put_together(done.written)
        else:
            at = _opened(member)


def _opened(value: Any) -> bytes | Parts:
    """Return a leaf as it is written, or a container to iterate over."""
    for _ in range(NESTING_MAX):
        kind = type(value)
        if kind in LEAVES:
            return _leaf(value)
        if kind is dict:
            return _mapping(value)
        if kind is list or kind is tuple:
            return Parts(iter(value), [], _array)
        if kind is frozenset:
            return Parts(iter(value), [], _sorted_array)
        value = _simplifier(kind)(value)  # type: ignore[arg-type]  # a type can be hashed
    raise ValueError("it contains itself")


def _leaf(value: Any) -> bytes:
    try:
        return encode_plain(value)
    except OverflowError:
        size = value.bit_length() // 8 + 1
        return encode_plain(Ext(WHOLE_NUMBER, value.to_bytes(size, signed=True)))
    except UnicodeEncodeError:
        return encode_plain(Ext(TEXT, value.encode("utf-8", "surrogatepass")))


def _array(written: list[bytes]) -> bytes:
    return b"".join((_header(len(written), 0x90, 0xDC), *written))


def _sorted_array(written: list[bytes]) -> bytes:
    return _array(sorted(written))


def _mapping(value: dict[Any, Any]) -> Parts:
    """Order strings first, by their bytes, as msgspec does; then other keys, by their form."""
    keys = [str.__str__(key) if isinstance(key, str) else key for key in value]

    def put_together(written: list[bytes]) -> bytes:
        size = len(keys)
        pairs = sorted(zip(map(_order, keys), written[:size], written[size:], strict=True))
        return b"".join((_header(size, 0x80, 0xDE), *(key + part for _, key, part in pairs)))

    return Parts(iter(keys + list(value.values())), [], put_together)


def _order(key: Any) -> bytes:
    return b"\0" + key.encode("utf-8", "surrogatepass") if isinstance(key, str) else b"\1"


def _header(members: int, small: int, large: int) -> bytes:
    """Return the MessagePack header of an array or a map with this many members."""
    if members < 16:
        return bytes((small | members,))
    return bytes((large,)) + members.to_bytes(2) if members < 2**16 else bytes((large + 1,)) + members.to_bytes(4)


@lru_cache(maxsize=1024)
def _simplifier(kind: type) -> Callable[[Any], Any]:
    """Return how a value of this type becomes a simpler one with the same content. Raises `TypeError` if unknown."""
    for finder in (_of_subclass, _of_secret, _of_model, _of_fields, _of_scalar, _of_container):
        found = finder(kind)
        if found is not None:
            return found
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a type with a canonical form")


Simplifier = Callable[[Any], Any] | None


def _of_subclass(kind: type) -> Simplifier:
    """Treat a subclass of a plain type as that type, whatever it displays."""
    if issubclass(kind, enum.Enum):
        return lambda value: value.value
    if issubclass(kind, str):
        return str.__str__
    if issubclass(kind, int):
        return int.__int__
    if issubclass(kind, float):
        return float.__float__
    if issubclass(kind, (bytes, bytearray, memoryview)):
        return lambda value: memoryview(value).tobytes()
    return None


def _of_secret(kind: type) -> Simplifier:
    """Simplify pydantic's secrets."""
    return (lambda value: value.get_secret_value()) if hasattr(kind, "get_secret_value") else None


def _of_model(kind: type) -> Simplifier:
    """Simplify pydantic's models: every field with its actual value, and extra values; nothing private or computed."""
    if not hasattr(kind, "model_dump") and not hasattr(kind, "__fields_set__"):
        return None
    if getattr(kind, "__pydantic_root_model__", False):
        return lambda value: value.root
    if not hasattr(kind, "model_dump"):
        # Version 1 keeps extra values among the fields.
        return lambda value: dict(vars(value))
    names = tuple(kind.model_fields)  # type: ignore[attr-defined]
    return lambda value: _given(value, names) | (getattr(value, "__pydantic_extra__", None) or {})


def _of_fields(kind: type) -> Simplifier:
    """Simplify classes that declare their fields."""
    if hasattr(kind, "__struct_fields__"):
        names, config = kind.__struct_fields__, kind.__struct_config__  # type: ignore[attr-defined]
        tag = {} if config.tag is None else {config.tag_field: config.tag}
        return lambda value: tag | _given(value, names)
    if hasattr(kind, "__attrs_attrs__"):
        names = tuple(field.name for field in kind.__attrs_attrs__)
        return lambda value: _given(value, names)
    if hasattr(kind, "__dataclass_fields__"):
        import dataclasses

        names = tuple(field.name for field in dataclasses.fields(kind))
        takes_more = (getattr(kind, "__pydantic_config__", None) or {}).get("extra") == "allow"
        return lambda value: _given(value, names) | (dict(vars(value)) if takes_more else {})
    return None


def _given(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that it has; a model that was created without validation may lack some."""
    found = ((name, getattr(value, name, msgspec.UNSET)) for name in names)
    return {name: part for name, part in found if part is not msgspec.UNSET}


def _of_scalar(kind: type) -> Simplifier:
    """Simplify values of the standard library, pydantic and numpy."""
    import datetime as dt
    import decimal
    import uuid

    if issubclass(kind, dt.datetime):
        return lambda value: value.isoformat() if value.utcoffset() is None else _in_utc(value)
    if issubclass(kind, (dt.date, dt.time)):
        return lambda value: value.isoformat()
    if issubclass(kind, dt.timedelta):
        return lambda value: [value.days, value.seconds, value.microseconds]
    if issubclass(kind, decimal.Decimal):
        return _decimal
    if issubclass(kind, uuid.UUID):
        return str
    if issubclass(kind, range):
        return lambda value: [len(value), *value[:2]]
    if issubclass(kind, complex):
        return lambda value: [value.real, value.imag]
    return _of_library(kind)


# Types whose whole content is their text, by library.
TEXTS: Final = frozenset(
    {"ipaddress", "pathlib", "zoneinfo", "pydantic", "pydantic_core", "pydantic_extra_types", "yarl"}
)


def _of_library(kind: type) -> Simplifier:
    libraries = [parent.__module__.partition(".")[0] for parent in kind.__mro__ if parent is not object]
    if "numpy" in libraries and hasattr(kind, "tolist"):
        return lambda value: value.tolist()
    if "re" in libraries:
        return lambda value: [value.pattern, value.flags]
    if "fractions" in libraries:
        return lambda value: [value.numerator, value.denominator]
    if "collections" in libraries and kind.__name__ == "UserString":
        return lambda value: value.data
    has_text = "__str__" in {name for parent in kind.__mro__[:-1] for name in vars(parent)}
    return str if has_text and not TEXTS.isdisjoint(libraries) else None


def _of_container(kind: type) -> Simplifier:
    if issubclass(kind, Mapping):
        return lambda value: dict(value.items())
    if issubclass(kind, AbstractSet):
        return frozenset
    return list if issubclass(kind, Sequence) else None


def _in_utc(value: Any) -> str:
    """Return one text for equal instants, including those in the first or last hours of the calendar."""
    import datetime as dt

    try:
        return str(value.astimezone(dt.UTC).isoformat())
    except OverflowError:
        first = dt.datetime.min.replace(tzinfo=dt.UTC)
        since = value - first
        return f"{since.days} d {since.seconds} s {since.microseconds} us after {first.isoformat()}"


def _decimal(value: Any) -> Any:
    """Return one form for equal amounts, however many trailing zeros they have."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return str(value)
    text = "".join(map(str, digits)).lstrip("0")
    number = text.rstrip("0")
    return f"{'-' if sign and number else ''}{number}e{exponent + len(text) - len(number) if number else 0}"
