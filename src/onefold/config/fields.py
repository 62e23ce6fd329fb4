"""Convert each field of a configuration from a plain value to a checked one, or raise `ValueError`. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from onefold import UsageError
from onefold._checks import did_you_mean
from onefold._model.policy import AFTER_CRASH, StoreDown
from onefold.config.shape import DOTTED_NAME, PYTHON_NAME, Mode
from onefold.config.wording import shown
from onefold.durations import UNITS, seconds
from onefold.keys import OPERATION_MAX, SCOPE_MAX, problem_of

Meaning = Callable[[Any], Any]

# Sources of a key that its sender creates and keeps across retries.
NAMED_SOURCES: Final = ("header", "field", "argument")
# The position of a message, which another delivery of the same intent does not share.
POSITIONS: Final = (
    *("offset", "partition_offset", "position", "delivery_tag", "receipt_handle", "sqs_message_id"),
    *("job_id", "task_id"),
)
# The content of a message, which two different intents may share.
CONTENTS: Final = ("content_hash", "body_hash", "payload_hash", "hash")

PLAIN_SOURCES: Final = ("message_id", *POSITIONS, *CONTENTS)


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected text, not {shown(value)}")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, not {shown(value)}")
    return value


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, not {shown(value)}")
    return value


def span(value: Any) -> float:
    """Return a duration in seconds."""
    if isinstance(value, (str, int, float)):
        with contextlib.suppress(UsageError):
            return seconds(value, "")
    raise ValueError(
        f"{shown(value)} is not a duration: write a number with a unit ({', '.join(UNITS)}), such as 7d, or forever"
    )


def spans(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected names with durations, such as {{dead_letter: 7d}}, not {shown(value)}")
    return {name: span(_with_unit(name, one)) for name, one in value.items()}


# The unit of a plain number, by the end of its name: as Kafka, RabbitMQ and others have named it.
UNIT_OF_NAME: Final = (
    (re.compile(r"(^|.*[._\s-])(ms|millis|milliseconds?)", re.IGNORECASE), "ms"),
    (re.compile(r".*([a-z\d]M(s|illis)|MILLIS)"), "ms"),
    (re.compile(r"(x-)?(message-ttl|consumer[-_]timeout|expires)", re.IGNORECASE), "ms"),
    (re.compile(r"(^|.*[._\s-])minutes?", re.IGNORECASE), "m"),
    (re.compile(r"(^|.*[._\s-])hours?", re.IGNORECASE), "h"),
    (re.compile(r"(^|.*[._\s-])days?", re.IGNORECASE), "d"),
)


def _with_unit(name: str, value: Any) -> Any:
    """Return a plain number with the unit that its name ends with: `retention_ms: 604800000` is no age of 19 years."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    unit = next((unit for pattern, unit in UNIT_OF_NAME if pattern.fullmatch(name)), None)
    return value if unit is None else f"{value}{unit}"


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, not {shown(value)}")
    return tuple(text(one) for one in value)


def paths(value: Any) -> tuple[str, ...]:
    """Return one or several paths of files."""
    return texts(value if isinstance(value, list) else [value])


def one_of(allowed: Sequence[str]) -> Meaning:
    def choice(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{shown(value)} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
        return str(value)

    return choice


def operation(value: Any) -> str:
    return _kept(text(value), OPERATION_MAX)


def scope(value: Any) -> str:
    return _kept(text(value), SCOPE_MAX)


def _kept(name: str, limit: int) -> str:
    """Refuse a name that not every store can keep: each delivery would fail on it."""
    if problem := problem_of(name, limit):
        raise ValueError(f"{shown(name)} {problem}")
    return name


def operations(value: Any) -> tuple[str, ...]:
    found = tuple(operation(one) for one in texts(value))
    if not found:
        raise ValueError("the list is empty: name an operation, or leave it out")
    return found


def key(value: Any) -> str:
    """Check `header:NAME`, `field:PATH`, `argument:NAME`, or a word without a colon."""
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
    if value in AFTER_CRASH or re.fullmatch(PYTHON_NAME, text(value)):
        return str(value)
    raise ValueError(
        f"{shown(value)} is not one of {', '.join(AFTER_CRASH)}, nor a probe "
        f"(module:function){did_you_mean(value, AFTER_CRASH)}"
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


def migrate_from(value: Any) -> Any:
    """Check the name of a store; a hand-made table has fields of its own."""
    return value if isinstance(value, Mapping) else text(value)


TABLE: Final[dict[str, Meaning]] = {
    "store": text,
    "table": text,
    "key": text,
    "operation": operation,
    "operation_column": text,
    "scope_column": text,
    "result_column": text,
    "at": text,
    "keep": span,
}

STORE: Final[dict[str, Meaning]] = {"url": text, "evicts": flag}

# The policy's fields, by the policy's own names; `Policy` itself checks ranges and combinations.
POLICY: Final[dict[str, Meaning]] = {
    "keep": span,
    "lease": span,
    "wait": span,
    "after_crash": after_crash,
    "rerun_within": span,
    "max_attempts": whole,
    "ambiguous_errors": dotted_names,
    "final_errors": errors,
    "store_down": one_of(get_args(StoreDown)),
    "max_result_bytes": whole,
    "keep_result": flag,
    "keep_error_text": flag,
    "cancel_when_lost": flag,
    "count_duplicates": flag,
    "mode": one_of(get_args(Mode)),
}

GUARD: Final[dict[str, Meaning]] = {
    "store": text,
    "migrate_from": migrate_from,
    "operation": operation,
    "operations": operations,
    "scope": scope,
    "money": flag,
    "key": key,
    **POLICY,
    "handler_time": span,
    "visibility_timeout": span,
    "provider_memory": span,
    "duplicates": spans,
    "replays": spans,
    "settings": paths,
    "queue": text,
    "broker": text,
}
