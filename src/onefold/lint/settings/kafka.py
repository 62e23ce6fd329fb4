"""Kafka's settings: a `.properties` file of a client or a topic, or the same names in JSON. Pure.

The producer resends for `delivery.timeout.ms`; a consumer's partitions are given to another after
`max.poll.interval.ms`; and whoever resets offsets reads a topic again as far back as its retention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from onefold.lint.settings.found import Found, Role, SettingsFile, milliseconds, number
from onefold.lint.settings.json_text import Path, parse

# Names of clients, Java's and librdkafka's. Frameworks write more in front: `spring.kafka.producer.properties.…`.
RESENDING: Final = ("delivery.timeout.ms", "message.timeout.ms")
CLIENT: Final = (*RESENDING, "max.poll.interval.ms")
RETRIES: Final = ("retries", "message.send.max.retries")

# Of these the first that is set counts, as in a broker; the others are defaults for it.
RETENTION: Final = {
    "retention.ms": 1,
    "log.retention.ms": 1,
    "log.retention.minutes": 60_000,
    "log.retention.hours": 3_600_000,
}
POLICY: Final = ("cleanup.policy", "log.cleanup.policy")
KNOWN: Final = (*CLIENT, *RETRIES, *RETENTION, *POLICY)

# `kafka-configs --describe` writes more after a value.
DESCRIBED: Final = re.compile(r"\s+sensitive=.*")
SEPARATED: Final = re.compile(r"((?:[^\\=:\s]|\\.)+)[ \t\f]*[=: \t\f]?[ \t\f]*(.*)")


class Line(NamedTuple):
    """A setting as it is written."""

    file: str
    line: int | None
    name: str
    value: Any


def found(files: Sequence[SettingsFile], _queue: str | None) -> list[Found]:
    """Return what these files say. A topic is not looked up by its name: a file has one."""
    return judged([one for given in files for one in _settings(given)])


def judged(settings: Sequence[Line]) -> list[Found]:
    """Return the durations among these settings."""
    resends = all(
        number(one.file, one.line, one.name, one.value, "retries") != 0 for one in settings if _is(one, RETRIES)
    )
    return [*(_of_client(one, resends=resends) for one in settings if _is(one, CLIENT)), *_retention(settings)]


def _of_client(one: Line, *, resends: bool) -> Found:
    # A producer that does not retry makes no duplicates, however long it waits.
    role: Role = "duplicates" if resends or not _is(one, RESENDING) else "shown"
    return Found(one.name, role, milliseconds(one.file, one.line, one.name, one.value), one.file, one.line)


def _retention(settings: Sequence[Line]) -> Iterator[Found]:
    by_name = {one.name: one for one in settings}
    for one in (by_name[name] for name in POLICY if name in by_name):
        if str(one.value).replace(" ", "") == "compact":
            yield Found(f"{one.name}=compact", "replays", math.inf, one.file, one.line)
            return
    for one, scale in ((by_name[name], scale) for name, scale in RETENTION.items() if name in by_name):
        seconds = milliseconds(one.file, one.line, one.name, one.value) * scale
        yield Found(one.name, "replays", seconds, one.file, one.line)
        return


def _is(one: Line, names: Sequence[str]) -> bool:
    return any(one.name == name or one.name.endswith(f".{name}") for name in names)


def _settings(given: SettingsFile) -> Iterator[Line]:
    if given.text.lstrip().startswith("{"):
        document = parse(given)
        yield from (
            Line(given.file, document.line(*path), ".".join(map(str, path)), value)
            for path, value in _leaves(document.value, ())
        )
        return
    for line, text in _logical_lines(given.text):
        if (match := SEPARATED.fullmatch(text)) is not None:
            name = re.sub(r"\\(.)", r"\1", match[1])
            yield Line(given.file, line, name, DESCRIBED.sub("", match[2]).strip())


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines without comments; one that ends with a backslash goes on with the next."""
    begun, collected = 0, ""
    for line, written in enumerate(text.splitlines(), 1):
        part = written.strip()
        if not collected:
            begun = line
            if not part or part[0] in "#!":
                continue
        continues = len(part) - len(part.rstrip("\\"))
        collected += part[:-1] if continues % 2 else part
        if not continues % 2:
            yield begun, collected
            collected = ""
    if collected:
        yield begun, collected


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, (*path, name))
    elif not isinstance(value, list):
        yield path, value
