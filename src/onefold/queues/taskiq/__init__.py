"""taskiq: tasks that run once for each key, on every broker.

    @guarded(guard, "send-welcome", broker=broker, retry_on_error=True)
    async def send_welcome(user): ...

    await send(send_welcome, ("rahul",), key="signup-17")

The sender puts the key into the labels of the message. A duplicate gets the stored result. A message that has to come
later is sent again with its retries uncounted; what never can run fails at once, without a retry; errors of the task
are left to taskiq's retry middlewares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from msgspec import UNSET, UnsetType

from onefold import AsyncGuard, Guard, Policy, RecordColumn, UsageError
from onefold._checks import did_you_mean
from onefold.events import tell_sent
from onefold.queues._shared.consumer import MissingKeyRule
from onefold.queues._shared.jobs.handler import DEFAULT_KEY, KEY_KEYWORD, GuardedJob
from onefold.queues._shared.jobs.options import ALIKE, FIELDS, check_given, named
from onefold.queues._shared.jobs.sending import Keys
from onefold.queues.keys import KEY_HEADER, Key, KeyOf, with_key

try:
    from taskiq import AsyncBroker, AsyncTaskiqDecoratedTask

    from onefold.queues.taskiq.functions import handler_of, task_of
    from onefold.queues.taskiq.messages import FRAMEWORK, Rejected, check_ack_type
    from onefold.queues.taskiq.middleware import OnefoldMiddleware
except ImportError as error:
    raise UsageError("taskiq is not installed: `pip install 'onefold[taskiq]'`") from error

__all__ = ["OnefoldMiddleware", "Rejected", "guarded", "send"]

P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    guard: Guard | AsyncGuard,
    operation: str,
    *,
    broker: AsyncBroker,
    task_name: str | None = None,
    key: KeyOf | str = DEFAULT_KEY,
    missing_key: MissingKeyRule = "never",
    require_key: bool = True,
    scope: Any = None,
    fingerprint: Any = "*",
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **labels: Any,
) -> Callable[[Callable[P, R]], AsyncTaskiqDecoratedTask[P, R]]:
    """Decorate a function as `broker.task` does, to run once for each key. A parameter `tx` makes it transactional.

    `key` is the name of an argument, or one of `onefold.queues.keys`; by default the message's label `idempotency_key`.
    `scope` names the argument that is the tenant, or several, or is a function of the arguments. `fingerprint` names
    the arguments that must be the same under one key. `record` is a row of your own that is the record, for a task with
    `tx`. `docs/queues/taskiq.md` explains each; all others are fields of a policy, or taskiq's labels.
    """
    fields = {name: labels.pop(name) for name in FIELDS if name in labels}
    given = {
        "key": key,
        "missing_key": missing_key,
        "require_key": require_key,
        "scope": scope,
        "fingerprint": fingerprint,
        "record": record,
        "policy": policy,
        **fields,
    }

    def decorate(function: Callable[P, R]) -> AsyncTaskiqDecoratedTask[P, R]:
        name = str(task_name or getattr(function, "__name__", "") or operation)
        with named(FRAMEWORK.word, name):
            if isinstance(function, AsyncTaskiqDecoratedTask):
                raise UsageError("it is a task of taskiq's already, which would run unguarded: leave @broker.task out")
            check_given(given)
            _check_labels(labels, broker, (*given, *FIELDS))
        job = GuardedJob(FRAMEWORK, name, guard, operation, handler_of(function), given)
        OnefoldMiddleware.added_to(broker)
        made = task_of(job, function, Keys(job, required=require_key))
        return cast("AsyncTaskiqDecoratedTask[P, R]", broker.task(task_name, **labels)(made))

    return decorate


async def send(
    task: AsyncTaskiqDecoratedTask[Any, Any],
    args: Any = (),
    kwargs: Any = None,
    *,
    key: Key | UnsetType = UNSET,
    **labels: Any,
) -> str:
    """Send a message to a task under this key, or a new one. Return the key, to send it again.

    For a result, name the task too: `task.kicker().with_task_id(…).with_labels(idempotency_key=key).kiq(…)`.
    """
    if KEY_KEYWORD in labels:
        labels[KEY_HEADER] = labels.pop(KEY_KEYWORD)
    chosen, labels = with_key(labels, key)
    tell_sent(task.task_name, chosen)
    await task.kicker().with_labels(**labels).kiq(*args, **dict(kwargs or {}))
    return chosen


def _check_labels(labels: dict[str, Any], broker: object, ours: tuple[str, ...]) -> None:
    if not isinstance(broker, AsyncBroker):
        raise UsageError(f"broker= is {type(broker).__name__}, but has to be a broker of taskiq's")
    for label in labels:
        # taskiq accepts any label.
        if meant := did_you_mean(label, ours, ALIKE):
            raise UsageError(f"unknown option {label!r}{meant}")
    check_ack_type(labels.get("ack_type"), "it has the label ack_type")
