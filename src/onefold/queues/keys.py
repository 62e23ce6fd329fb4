"""Find the key of a message: created by its sender, in a header or a field of its body, never by the receiver.

Anything that changes when a producer retries (an offset, a delivery tag, a job id) works only on explicit request, and
warns. A hash of the content is the last resort, and has to be requested explicitly, too.
"""

from __future__ import annotations

import hashlib
import inspect
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from msgspec import UnsetType

from onefold import MissingKey, UsageError
from onefold.keys import KEY_MAX, canonical, checked_key, json_field

# The header in which a sender puts its key, for every broker.
KEY_HEADER: Final = "idempotency-key"

Key = str | int | uuid.UUID

# A body is searched for its key only up to this size.
BODY_MAX: Final = 16 << 20

# What a client writes in place of bytes that are not UTF-8, such as nats-py in a header from a sender with Latin-1.
UNREADABLE: Final = "\N{REPLACEMENT CHARACTER}"

# Python refuses to write a number that is too long.
LARGE: Final = 10**KEY_MAX


class Message(NamedTuple):
    """A message of any broker, for reading its key."""

    body: bytes
    headers: Mapping[str, Any]
    # The broker's own id, if there is one; and its position: an offset, a tag, a job id.
    message_id: str | None = None
    position: str | None = None


class KeyOf(Protocol):
    """Returns the key of a message, or None if it has none. Raises `MissingKey` for an unusable one."""

    def __call__(self, message: Message, /) -> object: ...


PayloadOf = Callable[[Message], object]


def body() -> PayloadOf:
    """Compare bodies, for `payload=`: a message with a used key and another body is refused, not a duplicate."""
    return lambda message: message.body


def header(name: str = KEY_HEADER) -> KeyOf:
    """Read the key from a header that the sender set. Its name is case-insensitive, as in HTTP."""
    _check_name(name)
    wanted = name.lower()

    def of(message: Message) -> object:
        found: object = None
        headers: Mapping[Any, Any] = message.headers
        # For every message: spelled out, because each call of a function would cost as much as the rest.
        for written, value in headers.items():
            if value is None or not isinstance(written, str) or written.lower() != wanted:
                continue
            known = _decoded_header(value, name) if isinstance(value, (bytes, bytearray)) else value
            if found is not None and str(found) != str(known):
                raise MissingKey(f"the header {name} comes in several spellings with different values: none is the key")
            found = known if found is None else found
        return found

    return of


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"header({name!r}) has to name a header: header(), header('x-event-id')")


def is_header(written: object, name: str) -> bool:
    """Return whether this is the header of that name: `Idempotency-Key` is `idempotency-key`."""
    return isinstance(written, str) and written.lower() == name.lower()


def _decoded_header(value: bytes | bytearray, name: str) -> str:
    return _text(bytes(value), f"the header {name}")


def message_id() -> KeyOf:
    """Use the message id: stable only if the sender sets it, and keeps it when it sends again."""
    return lambda message: message.message_id


def field(path: str) -> KeyOf:
    """Read the key from a field of a JSON body: `field("id")`, `field("event.id")`."""
    names = path.split(".")
    if not all(names):
        raise UsageError(f"field({path!r}) has to name a field: field('id'), field('event.id')")

    def of(message: Message) -> object:
        if len(message.body) > BODY_MAX:
            raise MissingKey(f"a body of more than {BODY_MAX} bytes is not searched for its key")
        try:
            return json_field(message.body, names)
        except (ValueError, RecursionError) as error:
            raise MissingKey(f"the body is not JSON, and the key is its field {path}") from error

    return of


def first_of(*sources: KeyOf) -> KeyOf:
    """Use the first of these that has a key: `first_of(header(), message_id())`."""

    def of(message: Message) -> object:
        return next((found for found in (source(message) for source in sources) if found is not None), None)

    return of


def position(*, changes_when_a_producer_retries: bool = False) -> KeyOf:
    """Use the offset, delivery tag or job id. It finds only redeliveries of one message by its broker."""
    if not changes_when_a_producer_retries:
        raise UsageError(
            "position() is not the sender's key: a producer that retries makes a new one, and both run. Use header() "
            "or write position(changes_when_a_producer_retries=True)"
        )
    warnings.warn("a position as the key does not detect duplicates made by the producer", UserWarning, stacklevel=2)
    return lambda message: message.position


def content_hash(*, fields: Sequence[str] = (), identical_payloads_are_duplicates: bool = False) -> KeyOf:
    """Use a hash, as the last resort: two messages with the same content (of these fields) are the same message."""
    if not identical_payloads_are_duplicates:
        raise UsageError(
            "content_hash() turns two equal orders into one. Use a key of the sender's, or write "
            "content_hash(identical_payloads_are_duplicates=True)"
        )
    if isinstance(fields, str):
        raise UsageError(f"content_hash(fields={fields!r}) has to be a list of names: fields=[{fields!r}]")
    chosen = [field(name) for name in fields]

    def of(message: Message) -> object:
        found = [one(message) for one in chosen]
        if chosen and all(one is None for one in found):
            # Otherwise all messages without these fields would be one message.
            raise MissingKey(f"the body has none of the fields of the key: {', '.join(fields)}")
        return hashlib.sha256(canonical(found) if chosen else message.body).hexdigest()

    return of


def checked(key: object) -> KeyOf:
    """Refuse, before the first message, a key function that would send all of them to the dead letters."""
    if isinstance(key, str):
        raise UsageError(f"key={key!r} is only a name: write header({key!r}), or field({key!r}) of a JSON body")
    _check_called("key", key)
    if not callable(key) or inspect.iscoroutinefunction(key):
        raise UsageError("key= is header(), field('id'), ... of onefold.queues.keys, or a plain function of a message")
    _check_takes_message("key", key)
    return key


def checked_payload(payload: object) -> PayloadOf | None:
    """Refuse, before the first message, an unusable `payload=`."""
    _check_called("payload", payload)
    if payload is not None and (not callable(payload) or inspect.iscoroutinefunction(payload)):
        raise UsageError("payload= is body() of onefold.queues.keys, or a plain function of a message")
    if payload is not None:
        _check_takes_message("payload", payload)
    return payload


def _check_takes_message(option: str, function: Callable[..., Any]) -> None:
    """Refuse a function of something else, such as the arguments of a task."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise UsageError(
            f"{option}= is called with one argument, the message (its body and headers): {error}"
        ) from error
    except ValueError:
        # It is written in C, and has no signature.
        return


def can_be_compared(payload: object) -> bool:
    """Return whether a payload can be fingerprinted: if not, its message is at fault, not a worker."""
    try:
        canonical(payload)
    except UsageError:
        return False
    return True


def _check_called(name: str, given: object) -> None:
    for maker in (body, header, message_id, field, first_of, position, content_hash):
        if given is maker:
            raise UsageError(f"{name}={maker.__name__} is not called: write {name}={maker.__name__}(...)")


def minted(key: Key | None) -> str:
    """Return the key of a message to send: the sender's, or a new one."""
    found = usable(key)
    return str(uuid.uuid4()) if found is None else found


def with_key(
    headers: Mapping[str, Any] | None, key: Key | UnsetType, name: str = KEY_HEADER
) -> tuple[str, dict[str, Any]]:
    """Return the key of a message to send, and its headers with only that key.

    It is the sender's, from `key` or else from a header that the sender has set itself, or a new one. Raises
    `MissingKey` for None: whoever passes a key wants that one, and a new one would never find the duplicate.
    """
    given = headers or {}
    if key is None:
        raise MissingKey("key=None: nothing was sent. Pass the key of the message, or leave key= out for a new one")
    chosen = minted(usable(header(name)(Message(b"", given))) if isinstance(key, UnsetType) else key)
    return chosen, {**{one: value for one, value in given.items() if not is_header(one, name)}, name: chosen}


def usable(found: object) -> str | None:
    """Return the key as text, or None if there is none. Raise `MissingKey` for an unusable key."""
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (str, int, uuid.UUID)):
        raise MissingKey(f"a key is text, a whole number or a UUID, not {type(found).__name__}")
    if isinstance(found, int) and abs(found) >= LARGE:
        raise MissingKey(f"the key is a number of more than {KEY_MAX} digits, and the limit is {KEY_MAX}")
    text = str(found)
    if not text.strip():
        raise MissingKey("the key is empty")
    if len(text) > KEY_MAX:
        raise MissingKey(f"the key has {len(text)} characters, and the limit is {KEY_MAX}")
    if UNREADABLE in text:
        raise MissingKey("the key is not text: what was not UTF-8 in it is replaced, so that two keys could be one")
    # Its bytes are checked, too: otherwise a sender would only find it among the dead letters.
    return checked_key(text)


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MissingKey(f"{name} is not text") from error
