"""Read the settings of queues from the files that have them, instead of numbers that were typed again by hand.

A guard names the files (`settings:`), relative to its own: each source is a module that turns text into durations,
and what is found joins the guard's own `duplicates`, `replays` and `visibility_timeout`. Nothing in a file is run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from onefold.config.declared import Configuration, DeclaredGuard, Drifted
from onefold.config.tree import Mark, Problem, Unusable
from onefold.config.wording import shown
from onefold.lint.settings import celery, kafka, rabbitmq, sqs
from onefold.lint.settings.found import Found, SettingsFile, Wrong
from onefold.lint.settings.json_text import parse

__all__ = ["Found", "Settings", "joined", "read_settings"]

# The definitions of some ten thousand queues.
FILE_MAX: Final = 4 << 20


class Source(NamedTuple):
    """A kind of settings file."""

    title: str
    found: Callable[[Sequence[SettingsFile], str | None], list[Found]]
    # What it looks for, to tell somebody whose file has none of it.
    known: Sequence[str]


KAFKA: Final = Source("Kafka", kafka.found, kafka.KNOWN)
CELERY: Final = Source("Celery", celery.found, celery.KNOWN)
RABBITMQ: Final = Source("RabbitMQ", rabbitmq.found, rabbitmq.KNOWN)
SQS: Final = Source("SQS", sqs.found, sqs.KNOWN)

BY_SUFFIX: Final = {".properties": KAFKA, ".py": CELERY, ".conf": RABBITMQ}
OF_RABBITMQ: Final = ("rabbit_version", "rabbitmq_version", *rabbitmq.SECTIONS)


class Settings(NamedTuple):
    """Configurations with what their settings files say, what that was by guard, and the files that cannot be used."""

    configuration: Configuration
    found: dict[str, list[Found]]
    problems: list[Problem]


def read_settings(configuration: Configuration) -> Settings:
    """Return the declarations with the settings of their queues. Problems are collected, and reading continues."""
    found: dict[str, list[Found]] = {}
    problems: list[Problem] = []
    for guard in configuration.guards.values():
        try:
            found[guard.name] = _found(configuration, guard)
        except Unusable as error:
            problems += error.problems
    guards = {name: joined(guard, found.get(name, [])) for name, guard in configuration.guards.items()}
    return Settings(msgspec.structs.replace(configuration, guards=guards), found, problems)


def joined(guard: DeclaredGuard, found: Sequence[Found]) -> DeclaredGuard:
    """Return the guard with the durations that were found. A number of its own with the same name has drifted."""
    timeouts = sorted((one for one in found if one.role == "visibility_timeout"), key=lambda one: one.seconds)
    timeout = timeouts[0] if timeouts else None
    replays = [one for one in found if one.role == "replays" and not (math.isinf(one.seconds) and guard.replays)]
    late = [one for one in found if one.role == "duplicates"]
    return msgspec.structs.replace(
        guard,
        settings=(),
        duplicates=_merged(guard.duplicates, late),
        # Of several time-outs the shortest is judged against the handler; the others say how late a duplicate is.
        replays=_merged(guard.replays, [*replays, *timeouts[1:]]),
        visibility_timeout=guard.visibility_timeout if timeout is None else timeout.seconds,
        visibility_from="" if timeout is None else str(timeout),
        drifted=tuple(_drifted(guard, [*late, *replays], timeout)),
    )


def _merged(own: Mapping[str, float], found: Sequence[Found]) -> dict[str, float]:
    names = {one.name for one in found}
    return {name: value for name, value in own.items() if name not in names} | {str(one): one.seconds for one in found}


def _drifted(guard: DeclaredGuard, found: Sequence[Found], timeout: Found | None) -> Iterator[Drifted]:
    for one in found:
        for field, own in (("duplicates", guard.duplicates), ("replays", guard.replays)):
            if one.name in own and not math.isclose(own[one.name], one.seconds):
                yield Drifted(field=field, name=one.name, said=own[one.name], found=one.seconds, where=str(one))
    said = guard.visibility_timeout
    if timeout is not None and said is not None and not math.isclose(said, timeout.seconds):
        field = "visibility_timeout"
        yield Drifted(field=field, name=field, said=said, found=timeout.seconds, where=str(timeout))


def _found(configuration: Configuration, guard: DeclaredGuard) -> list[Found]:
    by_source: dict[Source, list[SettingsFile]] = {}
    for path in guard.settings:
        given = _read(configuration, guard, path)
        try:
            by_source.setdefault(_source_of(given), []).append(given)
        except Wrong as error:
            raise _unusable(guard, error) from None
    found: list[Found] = []
    for source, files in by_source.items():
        try:
            here = source.found(files, guard.queue)
        except Wrong as error:
            raise _unusable(guard, error) from None
        except RecursionError:
            raise _unusable(guard, Wrong(files[0].file, None, "nested too deeply")) from None
        if not here:
            known = ", ".join(source.known)
            says = f"it has no setting of {source.title} that tells how late a duplicate can be ({known})"
            raise _unusable(guard, Wrong(files[0].file, None, says))
        found += here
    return found


def _unusable(guard: DeclaredGuard, error: Wrong) -> Unusable:
    mark = None if error.line is None else Mark(error.line)
    return Unusable([Problem(error.file, mark, f"guards.{guard.name}: {error}")])


def _read(configuration: Configuration, guard: DeclaredGuard, path: str) -> SettingsFile:
    """Return a file that is named relative to the configuration. A wrong name is a problem of the configuration."""
    file = os.path.join(os.path.dirname(configuration.file), path)
    try:
        with open(file, "rb") as opened:
            content = opened.read(FILE_MAX + 1)
        says = f"{file} has more than {FILE_MAX >> 20} MiB" if len(content) > FILE_MAX else ""
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        says = f"there is no file {shown(file)}"
    except UnicodeDecodeError:
        says = f"{file} is not text in UTF-8"
    except (OSError, ValueError) as error:
        says = f"{shown(file)} cannot be read: {getattr(error, 'strerror', None) or error}"
    if says:
        mark = configuration.mark("guards", guard.name, "settings")
        raise Unusable([Problem(configuration.file, mark, f"guards.{guard.name}.settings: {says}")])
    return SettingsFile(file, text)


def _source_of(given: SettingsFile) -> Source:
    suffix = os.path.splitext(given.file)[1].lower()
    if suffix in BY_SUFFIX:
        return BY_SUFFIX[suffix]
    if suffix != ".json":
        says = (
            "settings are a .properties (Kafka), a .py (Celery), a rabbitmq.conf, or a .json: RabbitMQ's definitions, "
            "Kafka's settings, or what `aws sqs get-queue-attributes` prints"
        )
        raise Wrong(given.file, None, says)
    document = parse(given)
    if "Attributes" in document.value:
        return SQS
    return RABBITMQ if any(name in document.value for name in OF_RABBITMQ) else KAFKA
