"""FastStream: handlers that run once for each key, on RabbitMQ, NATS JetStream, Kafka and Redis streams.

    @broker.subscriber("charges")
    @guarded(guard, "charge", key=header())
    async def charge(order: Order) -> Receipt: ...

A duplicate gets the stored result, which is published and replied as the first time. A message that has to come later
waits in place, or is given back with a delay where the broker has one; what never can run goes to the dead letters;
errors of the handler are left to the subscriber's `AckPolicy`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, ParamSpec, TypeVar, Unpack, cast

from msgspec import UNSET, UnsetType

from onefold import AsyncGuard, Guard, Policy, PolicyFields, RecordColumn, UsageError
from onefold._model.policy import check_fields
from onefold.durations import Duration, seconds
from onefold.events import tell_sent
from onefold.queues._shared.consumer import MissingKeyRule
from onefold.queues._shared.jobs.handler import Ended, GuardedJob, JobCall
from onefold.queues._shared.verdict import HELD_DELAY, of_interrupt
from onefold.queues.keys import Key, KeyOf, PayloadOf, checked, checked_payload, with_key

try:
    from faststream import Context
    from faststream.exceptions import NackMessage

    from onefold.queues.faststream import messages as faststream_messages
    from onefold.queues.faststream.letters import check_publisher
    from onefold.queues.faststream.messages import CURRENT, FRAMEWORK, Delivery, Rules, handler_of, log
except ImportError as error:
    raise UsageError("FastStream is not installed: `pip install 'onefold[faststream]'`") from error

__all__ = ["guarded", "send"]

P = ParamSpec("P")
R = TypeVar("R")

# The argument by which FastStream shows a handler its message and its subscriber. A plain call does not have it.
SHOWN: Final = "onefold_shown"

_FIELD: Final[Any] = type(Context("message"))


class Shown(_FIELD):  # type: ignore[misc] # the class of `Context`, which has no public name
    """What FastStream's context knows of a message. Async: for others, FastStream starts a thread each time."""

    def set_param_name(self, name: str) -> Any:
        """Refuse a subscriber that acknowledges first: FastStream reads this as it starts one."""
        faststream_messages.check_starting(sys._getframe(1))
        return super().set_param_name(name)

    async def use(self, /, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a handler with the message and the subscriber."""
        context = kwargs["context__"]
        return {**kwargs, SHOWN: (context.get("message"), context.get("handler_"))}


def guarded(
    guard: Guard | AsyncGuard,
    operation: str,
    *,
    key: KeyOf,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    dead_letter: Any = None,
    unacked_max: Duration | None = None,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the handler of a subscriber, below `@broker.subscriber`, to run once for each key.

    A parameter `tx` makes it transactional. `dead_letter` is a publisher, `broker.publisher("charges.dead")`; without
    it the message is rejected. `docs/queues/faststream.md` explains each argument.
    """
    check_fields(fields, guarded)
    compare = checked_payload(payload)
    given = {
        "key": checked(key),
        "missing_key": missing_key,
        "scope": None,
        "fingerprint": None if compare is None else lambda *_, **__: compare(CURRENT.get().message),
        "record": record,
        "policy": policy,
        **fields,
    }
    if dead_letter is not None:
        check_publisher(dead_letter)
    limit = None if unacked_max is None else seconds(unacked_max, "unacked_max")

    def decorate(handler: Callable[P, R]) -> Callable[P, R]:
        _check_order(handler, operation)
        name = str(getattr(handler, "__qualname__", "") or operation)
        job = GuardedJob(FRAMEWORK, name, guard, operation, handler_of(handler), given)
        return cast("Callable[P, R]", _function(job, handler, Rules(job, dead_letter, limit)))

    return decorate


def _function(job: GuardedJob, handler: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """Return the function that FastStream calls. It is async, also for a `def` handler, which runs in a thread."""

    @functools.wraps(handler)
    async def function(*args: Any, **kwargs: Any) -> Any:
        shown = kwargs.pop(SHOWN, None)
        if shown is None:
            if _is_faststreams(sys._getframe(1)):
                await _not_shown(job.operation)
            found = handler(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found
        delivery = faststream_messages.delivery_of(*shown)
        CURRENT.set(delivery)
        return await _delivered(job, delivery, rules, args, kwargs)

    function.__signature__ = _shown(handler)  # type: ignore[attr-defined]
    function.__onefold_job__ = job  # type: ignore[attr-defined]
    return function


async def _delivered(
    job: GuardedJob, delivery: Delivery, rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of a message, or raise FastStream's own exception that settles it, after it has waited."""
    clock = asyncio.get_running_loop().time
    since, times = clock(), 0
    while True:
        call = delivery.call(args, kwargs, held=times)
        problem = rules.refused(delivery)
        if problem is not None:
            ended = problem
        elif job.is_async:
            ended = await _awaited(job, call)
        else:
            ended = await asyncio.to_thread(job.deliver, call)
        step = rules.after(delivery, call, ended, clock() - since)
        if step.action == "bury":
            step = await rules.buried(delivery, call, step.reason, clock() - since)
        if step.delay:
            await asyncio.sleep(step.delay)
        match step.action:
            case "return":
                return ended.value
            case "raise":
                assert step.error is not None
                raise step.error
            case _:
                times += step.is_limited


async def _awaited(job: GuardedJob, call: JobCall) -> Ended:
    """Await a handler once. One that raises a cancellation which nobody has asked for is tried again later.

    FastStream would settle nothing, and the subscription of NATS would end.
    """
    try:
        return await job.deliver_async(call)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return Ended(of_interrupt(error))


def _check_order(handler: object, operation: str) -> None:
    """Refuse what FastStream has decorated: it would call the function that it knows, unguarded."""
    if type(handler).__module__.startswith("faststream."):
        raise UsageError(f"{operation}: put @guarded(...) below @broker.subscriber(...) and @broker.publisher(...)")


def _is_faststreams(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("faststream.", "fast_depends."))


async def _not_shown(operation: str) -> NoReturn:
    """Give a message back that FastStream does not show its handler, whatever `ack_policy` says of errors."""
    mistake = UsageError(
        f"{operation}: FastStream has not passed the message, so nothing would be guarded, and nothing ran: the "
        "broker needs apply_types=True, the default"
    )
    log.error("%s. Given back in %g s", mistake, HELD_DELAY)
    await asyncio.sleep(HELD_DELAY)
    raise NackMessage from mistake


def _shown(handler: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that FastStream reads: without `tx`, which the guard passes, and with the message."""
    signature = inspect.signature(handler)
    shown = [one for one in signature.parameters.values() if one.name != "tx"]
    # Before a catch-all of keywords, which has to be the last one.
    at = len(shown) - (bool(shown) and shown[-1].kind is inspect.Parameter.VAR_KEYWORD)
    shown.insert(at, inspect.Parameter(SHOWN, inspect.Parameter.KEYWORD_ONLY, default=Shown(), annotation=Any))
    return signature.replace(parameters=shown)


async def send(
    publisher: Any,
    message: Any,
    *args: Any,
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """Publish a message under this key, or a new one. Return the key, to send it again.

    `publisher` is a broker or a publisher of FastStream's; the other arguments are those of its `publish`.
    """
    chosen, carried = with_key(headers, key)
    where = args[0] if args else next(iter(options.values()), "")
    tell_sent(where if isinstance(where, str) else str(getattr(where, "name", "")), chosen)
    await publisher.publish(message, *args, headers=carried, **options)
    return chosen
