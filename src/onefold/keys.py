"""Keys: created by senders, checked before a store is queried."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from onefold._fingerprint import canonical as _canonical
from onefold._model import KEY_MAX as KEY_MAX  # noqa: PLC0414 - public here
from onefold._model import OPERATION_MAX as OPERATION_MAX  # noqa: PLC0414 - public here
from onefold._model import SCOPE_MAX as SCOPE_MAX  # noqa: PLC0414 - public here
from onefold._model import Address
from onefold.errors import MissingKey, UsageError

Key = str | int | uuid.UUID

_KEY_TYPES: Final = "a key is a str, an int or a UUID, minted by the sender"


def mint() -> str:
    """Create a new key. Senders call this once per logical operation, and keep the key across every retry."""
    return str(uuid.uuid4())


def address(operation: str, key: object, scope: str | None = None) -> Address:
    """Return the checked address. Raises `MissingKey` for an unusable key, `UsageError` for anything else."""
    return Address(checked_scope(scope), checked_operation(operation), checked_key(key, operation))


def checked_key(key: object, operation: str = "") -> str:
    """Return the key as a string. An int and its decimal digits are one key, and so are a UUID and its usual form."""
    if type(key) is str:
        if key.isascii() and len(key) <= KEY_MAX and "\0" not in key and key and not key.isspace():
            # Almost every key; what follows would find the same.
            return key
        text = key
    elif isinstance(key, (str, int, uuid.UUID)) and not isinstance(key, bool):
        text = str.__str__(key) if isinstance(key, str) else str(key)
    else:
        shown = f"key={key!r}" if key is None or isinstance(key, (bool, float)) else "the key"
        raise _missing(operation, f"{shown} is of type {type(key).__name__}: {_KEY_TYPES}")
    if not text or text.isspace():
        raise _missing(operation, f"key={text!r} is empty: {_KEY_TYPES}")
    if problem := problem_of(text, KEY_MAX):
        raise _missing(operation, f"the key {problem}")
    return text


def checked_operation(operation: object) -> str:
    """Return the checked name of the operation."""
    if not isinstance(operation, str) or not operation or operation.isspace():
        raise UsageError(f"operation={operation!r:.60} has to be a name such as 'charge'")
    if problem := problem_of(operation, OPERATION_MAX):
        raise UsageError(f"operation={operation[:40]!r} {problem}")
    return operation if type(operation) is str else str.__str__(operation)


def checked_scope(scope: object) -> str:
    """Return the scope as a string; None is the empty scope. A blank one is refused: a tenant went missing."""
    if scope is None:
        return ""
    if not isinstance(scope, str) or not scope or scope.isspace():
        raise UsageError(f"scope={scope!r} has to be the name of a tenant or caller, or None where there is only one")
    if problem := problem_of(scope, SCOPE_MAX):
        raise UsageError(f"scope={scope[:40]!r} {problem}")
    # Of an enum, say: its members are formatted as other text than they hold.
    return scope if type(scope) is str else str.__str__(scope)


def joined(parts: Mapping[str, object]) -> str:
    """Build one key from several named parts, each prefixed with its length, so that no two lists collide."""
    texts = []
    for name, part in parts.items():
        try:
            texts.append(checked_key(part))
        except MissingKey as error:
            raise MissingKey(f"{name}: {error}") from None
    return "".join(f"{len(text)}:{text}" for text in texts)


def canonical(payload: object) -> bytes:
    """Return the canonical form of a payload, for its fingerprint. Raises `UsageError` if it has none."""
    try:
        return _canonical.encode(payload)
    except Exception as error:
        # This includes errors from a property of the payload: it is the payload that cannot be read.
        if not _canonical.has_no_form(payload):
            raise
        raise UsageError(f"the payload cannot be fingerprinted: {error}") from error


def undigestible(payload: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the name of the first argument that has no canonical form, and why; None if all have one."""
    for name, value in payload.items():
        try:
            canonical(value)
        except UsageError as error:
            return name, str(error.__cause__)
    return None


def problem_of(text: str, limit: int) -> str:
    """Return why not every store can keep this key or name, as the end of a sentence; empty if each of them can."""
    # Almost all strings are ASCII, and need not be encoded to be measured.
    if text.isascii() and len(text) <= limit and "\0" not in text:
        return ""
    if "\0" in text:
        return "holds a NUL character, which not every store can keep"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is not text"
    return f"has {size} bytes of UTF-8, and the limit is {limit}: use a digest of it instead" if size > limit else ""


def _missing(operation: str, why: str) -> MissingKey:
    error = MissingKey(f"{operation}: {why}" if operation else why)
    error.operation = operation
    return error


def json_field(body: bytes, path: Iterable[str]) -> Any:
    """Return a field of a JSON document, None where there is none. Raises `ValueError` if it is not JSON."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        import json

        # Half of a surrogate pair is legal there, and so is UTF-16: msgspec reads neither.
        found = json.loads(body)
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found
