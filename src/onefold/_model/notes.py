"""Read and compose the notes of a record: the log of its finished steps by name and, under names that no step can have,
the outcome that a running bypass has found, what the handler has noted (`current().note`), and how many duplicates were
answered from it (`count_duplicates=True`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

EARLIER: Final = ""
NOTED: Final = "\0noted"
DUPLICATES: Final = "\0duplicates"
RESERVED: Final = frozenset({EARLIER, NOTED, DUPLICATES})

# For people, and kept as long as the record: an audit field or two, not a document.
NOTED_BYTES_MAX: Final = 4_096


def log_of(notes: bytes | None) -> dict[str, Any]:
    """Return everything in the notes by name; nothing if they are not ours."""
    try:
        log = msgspec.msgpack.decode(notes) if notes else None
    except msgspec.DecodeError:
        return {}
    return log if isinstance(log, dict) else {}


def packed(log: dict[str, Any]) -> bytes | None:
    return packed_log(log) if log else None


def packed_log(log: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(log)


def without(notes: bytes | None, *names: str) -> bytes | None:
    """Return the notes without these names; unchanged if they have none of them."""
    log = log_of(notes)
    left = {name: part for name, part in log.items() if name not in names}
    return notes if len(left) == len(log) else packed(left)


def with_noted(notes: bytes | None, noted: bytes | None) -> bytes | None:
    """Return the notes with what the handler of this run has noted."""
    return notes if noted is None else packed(log_of(notes) | {NOTED: noted})


def only_noted(notes: bytes | None) -> bytes | None:
    """Return of the notes only what the handler has noted."""
    return with_noted(None, log_of(notes).get(NOTED))


def add_fields(noted: bytes | None, fields: Mapping[str, object]) -> tuple[bytes | None, list[tuple[str, str]]]:
    """Add fields to what is noted, as JSON; return it, and each field that has to be left out with the reason."""
    kept: dict[str, object] = {} if noted is None else msgspec.json.decode(noted)
    left_out = []
    for name, value in fields.items():
        try:
            encoded = msgspec.json.encode(kept | {name: msgspec.json.decode(msgspec.json.encode(value))})
        except Exception as error:  # noqa: BLE001 - a value of the user's own class may raise anything
            left_out.append((name, f"{type(value).__name__} has no form in JSON ({type(error).__name__})"))
            continue
        if len(encoded) > NOTED_BYTES_MAX:
            left_out.append((name, f"more than NOTED_BYTES_MAX={NOTED_BYTES_MAX} bytes would be noted"))
            continue
        noted, kept = encoded, msgspec.json.decode(encoded)
    return noted, left_out


def duplicates_in(notes: bytes | None) -> int:
    """Return how many duplicates were counted."""
    match log_of(notes).get(DUPLICATES):
        case [int(count), bytes()]:
            return count
        case _:
            return 0


def with_one_more(notes: bytes | None, mark: bytes) -> bytes | None:
    """Return the notes with one more duplicate; None if they are not ours to change.

    The mark tells this duplicate from others: a write whose answer got lost can be recognised, and is not repeated.
    """
    log = log_of(notes)
    if notes and not log and notes != packed_log({}):
        return None
    return packed_log(log | {DUPLICATES: [duplicates_in(notes) + 1, mark]})


def noted_in(notes: bytes | None) -> dict[str, Any]:
    """Return what a handler has noted, by name."""
    try:
        noted = msgspec.json.decode(log_of(notes).get(NOTED, b"{}"))
    except (msgspec.DecodeError, TypeError):
        return {}
    return noted if isinstance(noted, dict) else {}
