"""Ask a running broker for the settings of a guard's queue, and judge them by the rules of the lint.

Nothing is changed: no message is read, and no queue is created. Each broker is a module; clients are imported on use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from onefold.config.declared import DeclaredGuard
from onefold.config.wording import said, spelled
from onefold.health.examine import unreachable
from onefold.health.report import Check, Report, green, red, yellow
from onefold.lint import rules
from onefold.lint.brokers import kafka, nats, rabbitmq, redis, sqs
from onefold.lint.brokers.answers import Answer, Ask, Silent
from onefold.lint.settings import joined
from onefold.lint.settings.found import Role

__all__ = ["examine_queue"]

BROKERS: Final[Mapping[str, Ask]] = {
    "amqp": rabbitmq.over_amqp,
    "amqps": rabbitmq.over_amqp,
    "http": rabbitmq.over_management,
    "https": rabbitmq.over_management,
    "kafka": kafka.ask,
    "nats": nats.ask,
    "redis": redis.ask,
    "rediss": redis.ask,
    "sqs": sqs.ask,
    "valkey": redis.ask,
    "valkeys": redis.ask,
}

# How a check is called, by what its setting says.
CHECKS: Final[Mapping[Role, str]] = {
    "visibility_timeout": "visibility",
    "replays": "retention",
    "duplicates": "redelivery",
    "shown": "setting",
}


def examine_queue(guard: DeclaredGuard, timeout: float) -> Report:
    """Return what is wrong with the queue of this guard. A broker that does not answer becomes a check."""
    try:
        ask = BROKERS.get(urlsplit(guard.broker or "").scheme)
    except ValueError:
        ask = None
    if ask is None:
        return unreachable(f"the broker's URL has to begin with one of {', '.join(f'{one}:' for one in BROKERS)}")
    if guard.queue is None:
        return unreachable(f"which queue? Name it beside the broker, in guards.{guard.name}: queue: orders")
    try:
        answer = ask(guard.broker or "", guard.queue, timeout)
    except Silent as error:
        return unreachable(str(error))
    except ImportError as error:
        return unreachable(f"the client of this broker is not installed: {error}")
    return Report((*answer.checks, *_judged(guard, answer)))


def _judged(guard: DeclaredGuard, answer: Answer) -> Iterator[Check]:
    for one in answer.found:
        yield green(CHECKS[one.role], f"{one.name} is {spelled(one.seconds)}")
    if not answer.found:
        return
    whole = joined(guard, answer.found)
    for rule, name in ((rules.keep_below_floor, "keep"), (rules.delivered_again_too_soon, "handler time")):
        yield from (red(name, one.says, one.fix) for one in rule(whole))
    if whole.policy.keep >= rules.floor(whole):
        yield green("keep", f"keep is {said(whole.policy.keep)}, and the floor {spelled(rules.floor(whole))}")
    yield from (yellow("drift", one.says, one.fix) for one in rules.number_that_drifted(whole))
    yield from _lease(whole)


def _lease(guard: DeclaredGuard) -> Iterator[Check]:
    visibility, lease = guard.visibility_timeout, guard.policy.lease
    if visibility is None or not guard.visibility_from:
        return
    if visibility < lease:
        yield yellow(
            "lease",
            f"lease is {said(lease)}, but the queue redelivers after {said(visibility)}: after a crash, deliveries are "
            "refused until the lease ends, and each of them counts as one of the attempts that the queue allows",
            f"Set lease: {said(visibility)} or less, or a visibility timeout above {said(lease)}",
        )
    else:
        yield green("lease", f"lease is {said(lease)}, and the queue redelivers after {said(visibility)}")
