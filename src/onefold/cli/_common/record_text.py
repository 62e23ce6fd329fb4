"""Format a record as text for people, and as JSON for programs. Pure: no store, no printing.

Keys are shown in full, next to the digest that stands for them in logs: the user has the store's credentials anyway.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from onefold import FOREVER, Record, State
from onefold._delivery.earlier_ending import finished
from onefold.cli._common.output import about, visible
from onefold.codecs import PLAIN, TYPED
from onefold.http._shared.intents import OPERATION as INTENT

COLUMNS: Final = ("scope", "operation", "key", "digest", "state", "attempt", "age", "left", "remark")

STYLES: Final[dict[str, str]] = {
    State.RUNNING: "cyan",
    State.OPEN: "",
    State.DONE: "green",
    State.FAILED: "red",
    State.HELD: "yellow",
}

MEANINGS: Final = {
    State.RUNNING: "a worker is running it, or died while running it",
    State.OPEN: "released: the next delivery runs it",
    State.DONE: "every duplicate gets the result",
    State.FAILED: "every duplicate gets the error",
    State.HELD: "nobody knows whether it happened; it waits for a person",
}

# A client's intent is a record whose result is the key that it sends. It is removed when the intent ends.
PENDING: Final = "an intent that has not ended"
PENDING_MEANING: Final = "its key is kept; the intent has not ended, and sends this key again"

# Python's own limit on nesting is near 1,000, and JSON for people ends long before this.
DEPTH_MAX: Final = 100


def row(record: Record) -> tuple[str, ...]:
    """Return one line of a table, in the order of `COLUMNS`."""
    address = record.address
    who = (address.scope, address.operation, address.key, address.digest)
    return (*who, record.state.value, str(record.attempt), about(record.age), _left(record), remark(record))


def remark(record: Record) -> str:
    """Return the latest remark, without earlier ones."""
    if record.latest_remark:
        return record.latest_remark
    return PENDING if _is_pending(record) else ""


def _is_pending(record: Record) -> bool:
    """Return whether it keeps the key of an HTTP client's intent, which has not ended while its record exists."""
    return record.address.operation == INTENT and record.state is State.DONE


def _left(record: Record) -> str:
    """Return how long it lasts: the lease while it runs, the TTL otherwise."""
    if record.state is State.RUNNING:
        return f"lease {about(record.lease_left)}" if record.is_live else "lease over"
    return about(record.ttl_left)


def behind_dead_bypass(record: Record) -> Record | None:
    """Return the outcome that duplicates still get although a bypass of it has died; None if there is none."""
    return finished(record) if record.is_abandoned else None


def name(record: Record) -> str:
    """Return the record's name for use in a sentence."""
    address = record.address
    whose = f" of {visible(address.scope)}" if address.scope else ""
    return f"{visible(address.operation)} {visible(address.key)}{whose} [key {address.digest}]"


def summary(record: Record) -> dict[str, object]:
    """Return the JSON document of `ls` and `held`. Durations are seconds, and null is forever."""
    address = record.address
    return {
        "scope": address.scope,
        "operation": address.operation,
        "key": address.key,
        "digest": address.digest,
        "state": record.state.value,
        "attempt": record.attempt,
        "age": _seconds(record.age),
        "lease_left": _seconds(record.lease_left) if record.state is State.RUNNING else 0.0,
        "ttl_left": _seconds(record.ttl_left),
        "remark": remark(record),
    }


def facts(record: Record, key_for: Sequence[str] = ()) -> dict[str, object]:
    """Return everything as JSON; bytes are base64. Downstream keys only if requested by name."""
    form, value = result_of(record)
    downstream = {"key_for": {name: record.key_for(name) for name in key_for}} if key_for else {}
    return (
        summary(record)
        | downstream
        | {
            "bypasses": record.bypasses,
            "revision": record.revision,
            "token": _base64(record.token),
            "fingerprint": None if record.fingerprint is None else _base64(record.fingerprint),
            "history": list(record.history),
            "duplicates": record.duplicates,
            "noted": record.noted,
            "steps": steps(record),
            "notes": None if record.notes is None else _base64(record.notes),
            "result_form": form,
            "result": value,
            "result_bytes": 0 if record.result is None else len(record.result),
        }
    )


def lines(record: Record, key_for: Sequence[str] = (), *, indent: int | None = None) -> list[tuple[str, str]]:
    """Return every field with its text."""
    address, lease = record.address, "not running"
    if record.state is State.RUNNING:
        lease = f"{about(record.lease_left)} left" if record.is_live else "over: its worker died, or is stuck"
    ttl = "until it is resolved" if record.state is State.HELD else "forever"
    named = steps(record)
    return [
        ("operation", visible(address.operation)),
        ("key", visible(address.key)),
        ("digest", f"{address.digest} (stands for the key in logs)"),
        ("scope", visible(address.scope) or "none"),
        *(("key for", f"{visible(name)}: {record.key_for(name)}") for name in key_for),
        ("state", f"{record.state.value}: {_meaning(record)}"),
        ("remark", visible(remark(record)) or "none"),
        *(("history", visible(_with_time_first(one))) for one in _resolutions(record)),
        ("attempt", _attempts(record)),
        ("age", f"{about(record.age)} since {_began(record)}"),
        ("lease", lease),
        ("kept", ttl if record.ttl_left == FOREVER else f"for {about(record.ttl_left)} more"),
        ("result", _result_as_text(record, indent)),
        *((("duplicates", f"{record.duplicates} answered from it"),) if record.duplicates else ()),
        ("noted", visible(json.dumps(record.noted, ensure_ascii=False)) if record.noted else "none"),
        ("steps", "none" if named is None else visible(", ".join(named)) or f"{len(record.notes or b'')} bytes"),
        ("bypasses", f"{record.bypasses}"),
        ("fingerprint", "none" if record.fingerprint is None else record.fingerprint.hex()),
        ("token", f"{record.token.hex()}, revision {record.revision}"),
    ]


# As `guard.resolve` writes it: who, when and why.
_SIGNED: Final = re.compile(r"(resolved as \w+ by .*?) at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)(: .*)", re.DOTALL)


def _resolutions(record: Record) -> tuple[str, ...]:
    """Return the history of a record that was resolved by hand, also before its latest run."""
    return record.history if record.was_resolved or record.latest_remark != record.remark else ()


def _with_time_first(one: str) -> str:
    """Return a line of the history that begins with its time, if it has one."""
    return _SIGNED.sub(r"\2 \1\3", one)


def _meaning(record: Record) -> str:
    if _is_pending(record):
        return PENDING_MEANING
    earlier = behind_dead_bypass(record)
    if earlier is None:
        return MEANINGS[record.state]
    return f"a bypass died; duplicates still get the earlier ending, which is {earlier.state.value}"


def _attempts(record: Record) -> str:
    if record.attempt:
        return f"{record.attempt}"
    return "0 since it was resolved as a rerun" if record.was_rerun else "0: no handler was started yet"


def _began(record: Record) -> str:
    if record.bypasses and record.was_rerun:
        # Its record does not show which of them was later.
        return "it was bypassed, or resolved as a rerun, whichever was later"
    if record.was_rerun:
        return "it was resolved as a rerun"
    return "it was bypassed" if record.bypasses else "its first claim"


def steps(record: Record) -> list[str] | None:
    """Return the names of finished steps; an empty list if the notes cannot be read."""
    if not record.notes:
        return None
    return list(record.steps) or (None if record.noted or record.duplicates else [])


def result_of(record: Record) -> tuple[str, object]:
    """Return the form of the stored result (none, omitted, plain, typed, unreadable), and its value for JSON."""
    stored = record.result
    if stored is None:
        return ("omitted" if record.omitted else "none"), None
    form = {PLAIN: "plain", TYPED: "typed"}.get(stored[:1])
    if form is None:
        return "unreadable", None
    try:
        return form, _as_json(msgspec.msgpack.decode(stored[1:]), DEPTH_MAX)
    except Exception:  # noqa: BLE001 - a codec of the user's own wrote it, to encrypt it for instance
        return "unreadable", None


def _result_as_text(record: Record, indent: int | None) -> str:
    form, value = result_of(record)
    match form:
        case "none":
            return "none"
        case "omitted":
            return "done, but its result was not kept"
        case "unreadable":
            return f"{len(record.result or b'')} bytes, which only the codec that wrote them can read"
        case _:
            return json.dumps(value, indent=indent)


def _as_json(value: Any, depth: int) -> Any:
    """Convert MessagePack values to JSON; mark those that JSON lacks."""
    if depth == 0:
        raise ValueError("nested too deeply")
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case bytes():
            return {"base64": _base64(value)}
        case dict():
            return {_as_name(key): _as_json(part, depth - 1) for key, part in value.items()}
        case list() | tuple():
            return [_as_json(part, depth - 1) for part in value]
        case msgspec.msgpack.Ext():
            return {"extension": value.code, "base64": _base64(bytes(value.data))}
        case _:
            # A timestamp, the one type that MessagePack itself adds.
            return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _as_name(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(_as_json(key, DEPTH_MAX))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _seconds(duration: float) -> float | None:
    return None if duration == FOREVER else round(max(duration, 0.0), 3)
