"""RabbitMQ: exported definitions (`rabbitmqctl export_definitions`), and `rabbitmq.conf`.

A queue has its own arguments, and those of the one policy that applies to it. Its dead letters are in the queues that
are bound to its dead-letter exchange: without a TTL they wait there without a limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from onefold._checks import did_you_mean
from onefold.config.wording import shown
from onefold.lint.settings.found import Found, SettingsFile, Wrong, milliseconds, number
from onefold.lint.settings.json_text import Document, Path, parse
from onefold.lint.settings.patterns import Endless, matching

KNOWN: Final = ("x-message-ttl", "x-delivery-limit", "x-dead-letter-exchange", "x-consumer-timeout", "consumer_timeout")

SECTIONS: Final = ("queues", "policies", "bindings")
CONF: Final = re.compile(r"\s*([\w.-]+)\s*=\s*([^#]*?)\s*(#.*)?")


class Argument(NamedTuple):
    """A setting of a queue: from its own arguments, or from its policy."""

    name: str
    value: Any
    file: str
    line: int | None


class Queue(NamedTuple):
    """A queue with everything that applies to it, by the names of policies: `message-ttl`, not `x-message-ttl`."""

    name: str
    vhost: str
    settings: dict[str, Argument]
    file: str = ""
    line: int | None = None
    kind: str = "classic"

    def seconds(self, name: str) -> float | None:
        one = self.settings.get(name)
        return None if one is None else milliseconds(one.file, one.line, one.name, one.value)


def found(files: Sequence[SettingsFile], queue: str | None) -> list[Found]:
    timeouts: list[Argument] = []
    queues: list[Queue] = []
    bindings: list[Mapping[str, Any]] = []
    for given in files:
        if given.text.lstrip().startswith("{"):
            document = parse(given)
            queues += queues_of(document)
            bindings += [part for _, part in _section(document, "bindings")]
        else:
            timeouts += _of_conf(given)
    chosen = _chosen(queues, bindings, queue, files[0].file) if queues or queue else []
    return [one for part in chosen or [Queue("", "", {})] for one in judged(part, queues, bindings, timeouts)]


def judged(
    queue: Queue, queues: Sequence[Queue], bindings: Sequence[Mapping[str, Any]], timeouts: Sequence[Argument] = ()
) -> Iterator[Found]:
    """Yield the durations of one queue, its dead letters and its broker."""
    of_broker = {"consumer-timeout": timeouts[-1]} if timeouts else {}
    whole = queue._replace(settings=of_broker | queue.settings)
    timeout = whole.seconds("consumer-timeout")
    if timeout is not None:
        one = whole.settings["consumer-timeout"]
        yield Found(one.name, "visibility_timeout", timeout, one.file, one.line)
    if (limit := whole.settings.get("delivery-limit")) is not None and timeout is not None:
        count = max(number(limit.file, limit.line, limit.name, limit.value, "deliveries"), 1)
        yield Found(f"{limit.name} x consumer timeout", "duplicates", count * timeout, limit.file, limit.line)
    ttl = whole.seconds("message-ttl")
    if ttl is not None:
        one = whole.settings["message-ttl"]
        yield Found(f"{one.name} of {queue.name}", "replays", ttl, one.file, one.line)
    elif queue.name:
        yield Found(f"no message TTL of {queue.name}", "shown", math.inf, queue.file, queue.line)
    yield from _dead(queue, queues, bindings)


def _dead(queue: Queue, queues: Sequence[Queue], bindings: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    exchange = queue.settings.get("dead-letter-exchange")
    for letters in dead_letters(queue, queues, bindings):
        one, age = letters.settings.get("message-ttl"), letters.seconds("message-ttl")
        if one is not None and age is not None:
            yield Found(f"{one.name} of the dead letters {letters.name}", "replays", age, one.file, one.line)
        elif exchange is not None:
            name = f"dead letters {letters.name} without a message TTL"
            yield Found(name, "replays", math.inf, exchange.file, exchange.line)


def dead_letters(queue: Queue, queues: Sequence[Queue], bindings: Sequence[Mapping[str, Any]]) -> list[Queue]:
    """Return the queues that get what this one rejects or expires."""
    if "dead-letter-exchange" not in queue.settings:
        return []
    exchange = queue.settings["dead-letter-exchange"].value
    key = queue.settings["dead-letter-routing-key"].value if "dead-letter-routing-key" in queue.settings else queue.name
    names = (
        {key}
        if exchange == ""
        else {
            one.get("destination")
            for one in bindings
            if one.get("source") == exchange and one.get("vhost", queue.vhost) == queue.vhost
        }
    )
    return [one for one in queues if one.name in names and one.vhost == queue.vhost and one.name != queue.name]


def _chosen(queues: Sequence[Queue], bindings: Sequence[Mapping[str, Any]], name: str | None, file: str) -> list[Queue]:
    """Return the queues of this name; without one, the only queue that has no other queue's dead letters."""
    if name is not None:
        found = [one for one in queues if one.name == name]
        if not found:
            near = did_you_mean(name, [one.name for one in queues])
            raise Wrong(file, None, f"there is no queue {shown(name)} in it{near}")
        return found
    dead = {(one.vhost, one.name) for part in queues for one in dead_letters(part, queues, bindings)}
    working = [one for one in queues if (one.vhost, one.name) not in dead]
    if len(working) != 1:
        says = f"it has {len(working)} queues: name the one that this guard reads (queue: {_some(queues)})"
        raise Wrong(file, None, says)
    return working


def _some(queues: Sequence[Queue]) -> str:
    return queues[0].name if queues else "orders"


def queues_of(document: Document) -> Iterator[Queue]:
    """Yield the queues of definitions, each with its policy."""
    queues = [_without_policy(document, path, part) for path, part in _section(document, "queues")]
    policies = _policies(document, queues)
    for queue in queues:
        yield queue._replace(settings=_merged(queue.settings, _policy_of(document, queue, policies)))


def _without_policy(document: Document, path: Path, part: Mapping[str, Any]) -> Queue:
    arguments = part.get("arguments") or {}
    if not isinstance(part.get("name"), str) or not isinstance(arguments, Mapping):
        raise Wrong(document.file, document.line(*path), "a queue has a name, and its arguments are an object")
    own = {
        name.removeprefix("x-"): Argument(name, value, document.file, document.line(*path, "arguments", name))
        for name, value in arguments.items()
    }
    kind = own["queue-type"].value if "queue-type" in own else part.get("type", "classic")
    return Queue(part["name"], str(part.get("vhost", "/")), own, document.file, document.line(*path), str(kind))


def _merged(own: dict[str, Argument], policy: dict[str, Argument]) -> dict[str, Argument]:
    """Return both: of two TTLs or limits the broker takes the smaller one, and otherwise the queue's own."""
    smaller = {
        name: one
        for name in ("message-ttl", "delivery-limit", "consumer-timeout")
        for one in (own.get(name), policy.get(name))
        if one is not None and name in own and name in policy and _is_smallest(one, own[name], policy[name])
    }
    return policy | own | smaller


def _is_smallest(one: Argument, *both: Argument) -> bool:
    values = [part.value for part in both if isinstance(part.value, int)]
    return isinstance(one.value, int) and one.value == min(values, default=one.value)


class Policy(NamedTuple):
    """A policy, and the names that its pattern matches."""

    path: Path
    part: Mapping[str, Any]
    priority: int
    names: frozenset[str]

    def can_apply_to(self, queue: Queue) -> bool:
        """Whether a queue has the virtual host and the kind of this policy."""
        kinds = ("all", "queues", f"{queue.kind}_queues")
        return self.part.get("vhost", "/") == queue.vhost and self.part.get("apply-to", "all") in kinds


def _policies(document: Document, queues: Sequence[Queue]) -> list[Policy]:
    """Return the policies that could apply to a queue, each with the names that it matches."""
    policies = [_unmatched(document, path, part) for path, part in _section(document, "policies")]
    named = [(one, [queue.name for queue in queues if one.can_apply_to(queue)]) for one in policies]
    asked = [(policy, names) for policy, names in named if names]
    try:
        found = matching([(policy.part.get("pattern", ""), names) for policy, names in asked])
    except Endless as error:
        raise _wrong_pattern(document, asked[error.index][0], "takes too long for the names of the queues") from None
    return [_matched(document, policy, names) for (policy, _), names in zip(asked, found, strict=True)]


def _unmatched(document: Document, path: Path, part: Mapping[str, Any]) -> Policy:
    priority = part.get("priority") or 0
    if not isinstance(priority, int):
        line = document.line(*path, "priority")
        raise Wrong(document.file, line, f"the priority of a policy is {shown(priority)}, which is not a whole number")
    return Policy(path, part, priority, frozenset())


def _matched(document: Document, policy: Policy, names: Sequence[str] | None) -> Policy:
    if names is None:
        raise _wrong_pattern(document, policy, "is no regular expression")
    return policy._replace(names=frozenset(names))


def _wrong_pattern(document: Document, policy: Policy, why: str) -> Wrong:
    line = document.line(*policy.path, "pattern")
    return Wrong(document.file, line, f"the pattern {shown(policy.part.get('pattern', ''))} {why}")


def _policy_of(document: Document, queue: Queue, policies: Sequence[Policy]) -> dict[str, Argument]:
    """Return the definition of the policy that applies: of those that match the name, that of the highest priority."""
    fitting = [one for one in policies if queue.name in one.names and one.can_apply_to(queue)]
    if not fitting:
        return {}
    policy = max(fitting, key=lambda one: one.priority)
    definition = policy.part.get("definition") or {}
    if not isinstance(definition, Mapping):
        raise Wrong(document.file, document.line(*policy.path), "a policy's definition is an object")
    return {
        name: Argument(f"{name} of the policy {policy.part.get('name')}", value, document.file, line)
        for name, value in definition.items()
        for line in [document.line(*policy.path, "definition", name)]
    }


def _section(document: Document, name: str) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    parts = document.value.get(name, [])
    if not isinstance(parts, list):
        raise Wrong(document.file, document.line(name), f"{name!r} is {shown(parts)}, not a list")
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise Wrong(document.file, document.line(name, index), f"{name}: expected an object, not {shown(part)}")
        yield (name, index), part


def _of_conf(given: SettingsFile) -> Iterator[Argument]:
    for line, text in enumerate(given.text.splitlines(), 1):
        match = CONF.fullmatch(text)
        if match is not None and match[1] == "consumer_timeout":
            yield Argument(match[1], match[2], given.file, line)
