"""SQS: what `aws sqs get-queue-attributes --attribute-names All` prints, a file for each queue. Pure.

A message can come again until its retention ends. The queue of the dead letters is known by its ARN, and only its
retention counts: a redrive sends back what is that old.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from onefold.config.wording import shown
from onefold.lint.settings.found import Found, SettingsFile, Wrong, number
from onefold.lint.settings.json_text import Document, parse

KNOWN: Final = ("VisibilityTimeout", "MessageRetentionPeriod", "RedrivePolicy")

# SQS keeps no message longer, whatever the queue.
RETENTION_MAX: Final = 14 * 86_400


class Queue(NamedTuple):
    """The attributes of one queue, and where they stand."""

    file: str
    attributes: dict[str, Any]
    document: Document | None = None

    @property
    def arn(self) -> str:
        return str(self.attributes.get("QueueArn", ""))

    def line(self, name: str) -> int | None:
        return None if self.document is None else self.document.line("Attributes", name)

    def seconds(self, name: str) -> int | None:
        if name not in self.attributes:
            return None
        return number(self.file, self.line(name), name, self.attributes[name], "seconds")


def found(files: Sequence[SettingsFile], queue: str | None) -> list[Found]:
    """Return what the files of one queue and its dead letters say; `queue` chooses among several queues."""
    queues = [_read(parse(given)) for given in files]
    return list(judged(queues, queue))


def _read(document: Document) -> Queue:
    attributes = document.value.get("Attributes")
    if not isinstance(attributes, dict):
        raise Wrong(document.file, document.line("Attributes"), f"'Attributes' is {shown(attributes)}, not an object")
    return Queue(document.file, attributes, document)


def judged(queues: Sequence[Queue], chosen: str | None) -> Iterator[Found]:
    targets = {arn for one in queues if (arn := _redrive(one)[0])}
    for one in queues:
        if one.arn and one.arn in targets:
            yield from _retention(one, f"MessageRetentionPeriod of the dead letters {_name(one.arn)}")
        elif chosen is None or not one.arn or _name(one.arn) == _name(chosen):
            yield from _of_queue(one, {other.arn for other in queues})


def _of_queue(one: Queue, known: set[str]) -> Iterator[Found]:
    visibility, (target, limit) = one.seconds("VisibilityTimeout"), _redrive(one)
    if visibility is not None:
        line = one.line("VisibilityTimeout")
        yield Found("VisibilityTimeout", "visibility_timeout", visibility, one.file, line)
        if limit:
            name = f"VisibilityTimeout x maxReceiveCount {limit}"
            yield Found(name, "duplicates", visibility * limit, one.file, line)
    yield from _retention(one, "MessageRetentionPeriod")
    if target and target not in known:
        name = f"dead letters {_name(target)}, whose attributes are not among the settings, so at most 14d"
        yield Found(name, "replays", RETENTION_MAX, one.file, one.line("RedrivePolicy"))


def _retention(one: Queue, name: str) -> Iterator[Found]:
    seconds = one.seconds("MessageRetentionPeriod")
    if seconds is not None:
        yield Found(name, "replays", seconds, one.file, one.line("MessageRetentionPeriod"))


def _redrive(one: Queue) -> tuple[str, int]:
    """Return the ARN of the dead letters' queue, and after how many receives a message goes there."""
    policy: Any = one.attributes.get("RedrivePolicy") or {}
    line = one.line("RedrivePolicy")
    try:
        policy = json.loads(policy) if isinstance(policy, str) else policy
    except (ValueError, RecursionError):
        raise Wrong(one.file, line, "RedrivePolicy is not JSON") from None
    if not isinstance(policy, dict):
        raise Wrong(one.file, line, f"RedrivePolicy is {shown(policy)}, not an object")
    limit = number(one.file, line, "maxReceiveCount", policy.get("maxReceiveCount", 0), "receives")
    return str(policy.get("deadLetterTargetArn", "")), max(limit, 0)


def _name(arn: str) -> str:
    """Return the name of a queue, from its ARN, its URL or itself."""
    return arn.rpartition(":")[2].rpartition("/")[2]
