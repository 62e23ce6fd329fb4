"""Encode values to bytes and back, so that a replay is equal and of the same type, or does not happen.

A value is encoded as MessagePack by `msgspec`, and decoded according to the function's return annotation or `returns=`.
Without a type only plain values (None, bool, int, float, str, bytes, list, dict) can be stored. A value that would not
read back the same is not stored. No pickle: bytes from a store never run code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from onefold.errors import UsageError

# The first byte of a stored value: whether it reads back without a type.
PLAIN: Final = b"\x00"
TYPED: Final = b"\x01"

PLAIN_TYPES: Final = frozenset({type(None), bool, int, float, str, bytes, list, dict})


class Unstorable(TypeError):
    """The value would not read back unchanged."""


class Unreadable(ValueError):
    """The stored bytes do not fit the type."""


class Codec(Protocol):
    """Replaces the default codec, to encrypt for instance; `returns` is the type, or `Any` if none is known."""

    def check(self, returns: Any) -> None:
        """Raise `UsageError` for a type whose values cannot be stored. Called when decorating."""

    def encode(self, value: Any, returns: Any) -> bytes:
        """Raise `Unstorable` for a value that would not read back the same."""

    def decode(self, stored: bytes, returns: Any) -> Any:
        """Raise `Unreadable` for bytes that do not fit the type."""


class MsgspecCodec:
    """The default. To encrypt, inherit from it and wrap `encode` and `decode`."""

    def check(self, returns: Any) -> None:
        if not _is_any(returns):
            _reader(returns)

    def encode(self, value: Any, returns: Any) -> bytes:
        try:
            stored = _encoder.encode(value)
        except Exception as error:
            raise Unstorable(f"{type(value).__name__} cannot be stored: {error}") from error
        plain = _is_plain(value)
        if _is_any(returns) and not plain:
            raise Unstorable(
                f"{type(value).__name__} reads back unchanged only with a type: annotate the function's return type, "
                "or pass returns="
            )
        if not _is_any(returns):
            _check_back(stored, value, returns)
        return (PLAIN if plain else TYPED) + stored

    def decode(self, stored: bytes, returns: Any) -> Any:
        form, body = stored[:1], stored[1:]
        try:
            if not _is_any(returns):
                return _decode_typed(body, _reader(returns))
            if form == PLAIN:
                return msgspec.msgpack.decode(body)
        except Unreadable:
            raise
        except Exception as error:
            raise Unreadable(str(error)) from error
        raise Unreadable("it was stored with a type, and reads back only with one: pass returns=")


def _decode_typed(body: bytes, reader: _Reader) -> Any:
    value = reader.decoder.decode(body)
    again = _encoder.encode(value)
    lost = again != body and _lost_field(msgspec.msgpack.decode(body), msgspec.msgpack.decode(again), "$")
    if lost:
        raise Unreadable(f"it has no field for the stored `{lost}`")
    return value


class _Reader(NamedTuple):
    decoder: msgspec.msgpack.Decoder[Any]
    # No part of the type is Any: equal values then have equal types all the way down.
    closed: bool


def type_name(returns: Any) -> str:
    return getattr(returns, "__qualname__", None) or str(returns)


def encode_by_hook(value: Any) -> Any:
    """Encode types that msgspec does not know: pydantic models, in the JSON form that they validate themselves."""
    if hasattr(type(value), "model_dump"):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    raise NotImplementedError(
        f"{type(value).__module__}.{type(value).__qualname__} is not a type that msgspec can encode"
    )


def _decode_by_hook(wanted: type, value: Any) -> Any:
    return wanted.model_validate_json(msgspec.json.encode(value))  # type: ignore[attr-defined]


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=encode_by_hook)


def _is_any(returns: Any) -> bool:
    return returns is Any or returns is object


def _reader(returns: Any) -> _Reader:
    try:
        return _cached_reader(returns)
    except UsageError:
        raise
    except TypeError as error:
        raise UsageError(
            f"{type_name(returns)} cannot be stored: {error}. Return something that msgspec can encode "
            "(a dataclass, attrs or msgspec class, pydantic model, TypedDict), or use Policy(keep_result=False)"
        ) from error


@lru_cache(maxsize=1024)
def _cached_reader(returns: Any) -> _Reader:
    info = msgspec.inspect.type_info(returns)
    parts = list(_parts(info, set()))
    for part in parts:
        if isinstance(part, msgspec.inspect.CustomType) and not hasattr(part.cls, "model_validate_json"):
            raise TypeError(f"msgspec cannot encode {part.cls.__module__}.{part.cls.__qualname__}")
    closed = not any(isinstance(part, (msgspec.inspect.AnyType, msgspec.inspect.CustomType)) for part in parts)
    return _Reader(msgspec.msgpack.Decoder(returns, dec_hook=_decode_by_hook), closed)


def _parts(info: Any, seen: set[int]) -> Iterator[Any]:
    """Yield every type inside a type; recursive types are visited once."""
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, (tuple, list)):
        for part in info:
            yield from _parts(part, seen)
    elif isinstance(info, (msgspec.inspect.Type, msgspec.inspect.Field)):
        yield info
        for name in type(info).__struct_fields__:
            yield from _parts(getattr(info, name), seen)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) in PLAIN_TYPES and _is_plain(key) and _is_plain(part) for key, part in value.items())
    if kind is list:
        return all(_is_plain(part) for part in value)
    return kind in PLAIN_TYPES


def _check_back(stored: bytes, value: Any, returns: Any) -> None:
    """Raise `Unstorable` for a value that would not read back the same."""
    reader, problem = _reader(returns), None
    try:
        same = _reads_back(stored, value, reader)
    except Exception as error:  # noqa: BLE001 - whatever a hook raises, the value does not read back
        same, problem = False, error
    if not same:
        raise Unstorable(f"{type(value).__name__} would not read back the same as {type_name(returns)}") from problem


def _reads_back(stored: bytes, value: Any, reader: _Reader) -> bool:
    back = reader.decoder.decode(stored)
    if type(back) is not type(value):
        # The annotation says float, and an int is one to every type checker.
        return type(back) is float and type(value) is int and back == value
    return (reader.closed and bool(back == value)) or _same(back, value)


def _same(one: Any, other: Any) -> bool:
    """Compare values and their types all the way down; NaN equals NaN; classes without `__eq__` by their fields."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return bool(one == other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    names = _field_names(kind)
    if names:
        return all(_same(getattr(one, name, None), getattr(other, name, None)) for name in names)
    return bool(one == other)


def _field_names(kind: type) -> tuple[str, ...]:
    if hasattr(kind, "__struct_fields__"):
        return tuple(kind.__struct_fields__)
    if hasattr(kind, "__attrs_attrs__"):
        return tuple(field.name for field in kind.__attrs_attrs__)
    return tuple(getattr(kind, "__dataclass_fields__", ()))


def _lost_field(stored: Any, again: Any, path: str) -> str:
    """Return the path of a stored field that the type dropped, or "". New fields with defaults are fine."""
    if isinstance(stored, dict) and isinstance(again, dict):
        for name, part in stored.items():
            if name not in again:
                return f"{path}.{name}"
            lost = _lost_field(part, again[name], f"{path}.{name}")
            if lost:
                return lost
    elif isinstance(stored, list) and isinstance(again, list):
        if len(again) < len(stored):
            return f"{path}[{len(again)}]"
        for index, (part, part_again) in enumerate(zip(stored, again, strict=False)):
            lost = _lost_field(part, part_again, f"{path}[{index}]")
            if lost:
                return lost
    return ""
