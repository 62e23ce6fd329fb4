"""Convert each field of a configuration from a plain value to a checked one, or raise `ValueError`. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from onefold import OPERATION_MAX, UsageError
from onefold._checks import did_you_mean
from onefold.config.shape import DOTTED_NAME, PYTHON_NAME, Mode, StoreDown
from onefold.config.wording import shown
from onefold.durations import UNITS, seconds

Meaning = Callable[[Any], Any]

# Sources of a key that its sender creates and keeps across retries.
NAMED_SOURCES: Final = ("header", "field", "argument")
# The position of a message, which another delivery of the same intent does not share.
POSITIONS: Final = ("offset", "partition_offset", "position", "delivery_tag", "receipt_handle", "job_id", "task_id")
# The content of a message, which two different intents may share.
CONTENTS: Final = ("content_hash", "body_hash", "payload_hash", "hash")

PLAIN_SOURCES: Final = ("message_id", *POSITIONS, *CONTENTS)


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"text is wanted, not {shown(value)}")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"true or false is wanted, not {shown(value)}")
    return value


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"a whole number is wanted, not {shown(value)}")
    return value


def span(value: Any) -> float:
    """Return a duration in seconds."""
    if isinstance(value, (str, int, float)):
        with contextlib.suppress(UsageError):
            return seconds(value, "")
    raise ValueError(f"{shown(value)} is not a duration: a number with a unit ({', '.join(UNITS)}) is one, and forever")


def spans(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"names with durations are wanted, such as {{dead_letter: 7d}}, not {shown(value)}")
    return {name: span(one) for name, one in value.items()}


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"a list is wanted, not {shown(value)}")
    return tuple(text(one) for one in value)


def one_of(allowed: Sequence[str]) -> Meaning:
    def choice(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{shown(value)} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
        return str(value)

    return choice


def operation(value: Any) -> str:
    name = text(value)
    if len(name.encode()) > OPERATION_MAX:
        raise ValueError(f"an operation has at most {OPERATION_MAX} bytes, and this has {len(name.encode())}")
    return name


def operations(value: Any) -> tuple[str, ...]:
    found = tuple(operation(one) for one in texts(value))
    if not found:
        raise ValueError("the list is empty: name an operation, or leave it out")
    return found


def key(value: Any) -> str:
    """Check `header:NAME`, `field:PATH`, `argument:NAME`, or a word that stands for itself."""
    source, colon, name = text(value).partition(":")
    if (source in NAMED_SOURCES and name.strip()) or (not colon and source in PLAIN_SOURCES):
        return str(value)
    if source in NAMED_SOURCES:
        raise ValueError(f"{shown(value)} names nothing: write {source}:NAME")
    raise ValueError(
        f"{shown(value)} is not a source of a key: write header:NAME, field:PATH, argument:NAME or message_id"
        f"{did_you_mean(source, (*NAMED_SOURCES, 'message_id'))}"
    )


def python_name(value: Any) -> str:
    if not re.fullmatch(PYTHON_NAME, text(value)):
        raise ValueError(f"{shown(value)} names nothing in Python: write module:name")
    return str(value)


def after_crash(value: Any) -> str:
    choices = ("rerun", "hold", "skip")
    if value in choices or re.fullmatch(PYTHON_NAME, text(value)):
        return str(value)
    raise ValueError(
        f"{shown(value)} is not one of {', '.join(choices)}, and no probe (module:function)"
        f"{did_you_mean(value, choices)}"
    )


def dotted_names(value: Any) -> tuple[str, ...]:
    """Check classes by module and name. Any other spelling would silently match no error."""
    for one in texts(value):
        if not re.fullmatch(DOTTED_NAME, one):
            says = f"{shown(one)} names no exception by its module: write module.Class, such as builtins.TimeoutError"
            raise ValueError(says)
    return texts(value)


def errors(value: Any) -> tuple[str, ...]:
    return tuple(python_name(one) for one in texts(value))


STORE: Final[dict[str, Meaning]] = {"url": text, "evicts": flag}

# The policy's fields, by the policy's own names; `Policy` itself says what is too small or does not fit together.
POLICY: Final[dict[str, Meaning]] = {
    "keep": span,
    "lease": span,
    "wait": span,
    "after_crash": after_crash,
    "rerun_within": span,
    "attempts_max": whole,
    "unknown": dotted_names,
    "remember": errors,
    "store_down": one_of(get_args(StoreDown)),
    "result_bytes_max": whole,
    "keep_result": flag,
    "cancel_when_lost": flag,
    "mode": one_of(get_args(Mode)),
}

GUARD: Final[dict[str, Meaning]] = {
    "store": text,
    "migrate_from": text,
    "operation": operation,
    "operations": operations,
    "scope": text,
    "money": flag,
    "key": key,
    **POLICY,
    "handler_time": span,
    "visibility_timeout": span,
    "provider_memory": span,
    "duplicates": spans,
    "replays": spans,
}
