"""Dramatiq: actors that run once for each key, on every broker.

    @guarded(guard, "send-welcome", max_retries=3)
    def send_welcome(user_id): ...

The sender puts the key into the options of the message. A duplicate gets the stored result, and passes it on to its
pipeline. A message that has to come later is enqueued again with its retries uncounted; what never can run goes to the
dead-letter queue; errors of the actor are left to Dramatiq's Retries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
    import dramatiq
    from dramatiq.asyncio import async_to_sync

    from onefold.queues.dramatiq import messages as dramatiq_messages
    from onefold.queues.dramatiq.messages import FRAMEWORK, Rejected
    from onefold.queues.dramatiq.middleware import OnefoldMiddleware
except ImportError as error:
    raise UsageError("Dramatiq is not installed: `pip install 'onefold[dramatiq]'`") from error

__all__ = ["OnefoldActor", "OnefoldMiddleware", "Rejected", "guarded", "send"]

# The options of `dramatiq.actor` that are not a middleware's.
OF_AN_ACTOR = ("actor_name", "queue_name", "priority")


class OnefoldActor(dramatiq.Actor[Any, Any]):
    """An actor that runs once for each key. Created by `guarded`."""

    def __init__(self, fn: Callable[..., Any], *, job: GuardedJob, require_key: bool, **given: Any) -> None:
        self.job = job
        self._keys = Keys(job, required=require_key)
        self._deliver: Any = async_to_sync(job.deliver_async) if job.is_async else job.deliver
        super().__init__(fn, **given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Deliver in a worker; anywhere else call the function, unguarded."""
        received = dramatiq_messages.received(self)
        if received is None:
            return super().__call__(*args, **kwargs)
        call = received.call(self.queue_name, args, kwargs)
        try:
            ended = self._deliver(call)
        except FRAMEWORK.interrupts as error:
            # An async actor was cancelled in its own loop.
            ended = self.job.interrupted(call, error)
        except RuntimeError as error:
            # The same, but its store did not answer, and Dramatiq waits a second for the end of the coroutine.
            if call.begun or not isinstance(error.__cause__, FRAMEWORK.interrupts):
                raise
            ended = self.job.interrupted(call, error.__cause__)
        return dramatiq_messages.settled(self, received, call, ended)

    def message_with_options(self, *, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Build a message as Dramatiq does. Raise `MissingKey` if it has no key, unless the id is accepted as one."""
        is_missing = self._keys.are_missing(args, kwargs, options)
        message = super().message_with_options(args=args, kwargs=kwargs, **options)
        if is_missing:
            message.options[KEY_HEADER] = message.message_id
        return message


def guarded(
    guard: Guard | AsyncGuard,
    operation: str,
    *,
    broker: dramatiq.Broker | None = None,
    key: KeyOf | str = DEFAULT_KEY,
    missing_key: MissingKeyRule = "never",
    require_key: bool = True,
    scope: Any = None,
    fingerprint: Any = "*",
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], OnefoldActor]:
    """Decorate a function as `dramatiq.actor` does, to run once for each key. A parameter `tx` makes it transactional.

    `key` is the name of an argument, or one of `onefold.queues.keys`; by default the message's option
    `idempotency_key`. `scope` names the argument that is the tenant, or several, or is a function of the arguments.
    `fingerprint` names the arguments that must be the same under one key. `record` is a row of your own that is the
    record, for an actor with `tx`. `docs/queues/dramatiq.md` explains each; all others are Dramatiq's, or fields of a
    policy.
    """
    chosen = dramatiq.get_broker() if broker is None else broker
    fields = {name: options.pop(name) for name in FIELDS if name in options}
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

    def decorate(handler: Callable[..., Any]) -> OnefoldActor:
        name = str(options.get("actor_name") or getattr(handler, "__name__", "") or operation)
        with named(FRAMEWORK.word, name):
            check_given(given)
            _check_options(options, chosen, (*given, *FIELDS))
        job = GuardedJob(FRAMEWORK, name, guard, operation, handler, given)
        OnefoldMiddleware.added_to(chosen)
        theirs = {**options, "throws": dramatiq_messages.throws_of(job, options.get("throws"))}
        make: Any = functools.partial(OnefoldActor, job=job, require_key=require_key)
        decorator: Any = dramatiq.actor(actor_class=make, broker=chosen, **theirs)
        return decorator(handler)  # type: ignore[no-any-return]

    return decorate


def send(
    actor: dramatiq.Actor[Any, Any], args: Any = (), kwargs: Any = None, *, key: Key | UnsetType = UNSET, **options: Any
) -> str:
    """Send a message to an actor under this key, or a new one. Return the key, to send it again.

    `options` are those of `send_with_options`, such as `delay`.
    """
    if KEY_KEYWORD in options:
        options[KEY_HEADER] = options.pop(KEY_KEYWORD)
    chosen, options = with_key(options, key)
    tell_sent(actor.actor_name, chosen)
    actor.send_with_options(args=tuple(args), kwargs=kwargs, **options)
    return chosen


def _check_options(options: dict[str, Any], broker: dramatiq.Broker, ours: tuple[str, ...]) -> None:
    for option in options:
        if option not in broker.actor_options and option not in OF_AN_ACTOR:
            meant = did_you_mean(option, (*ours, *OF_AN_ACTOR, *broker.actor_options), ALIKE)
            raise UsageError(f"unknown option {option!r}{meant or '. Is its middleware added to the broker?'}")
    if "throws" not in broker.actor_options:
        raise UsageError(
            "its broker has no Retries middleware, and would acknowledge a message whose actor has failed: add "
            "dramatiq.middleware.Retries, with max_retries=0 if nothing is to be retried"
        )
