"""The functions of guarded tasks: as a guard sees them, and as taskiq calls them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from taskiq import Context, TaskiqDepends
from taskiq.exceptions import NoResultError

from onefold.queues._shared.jobs.handler import GuardedJob
from onefold.queues._shared.jobs.sending import Keys
from onefold.queues.taskiq.messages import CURRENT, OUT_OF_TIME, Received, received, settled
from onefold.queues.taskiq.middleware import OnefoldMiddleware

# The argument by which taskiq shows a task its message. A plain call does not have it.
CONTEXT: Final = "onefold_context"

# The values that mark an argument as one that taskiq resolves itself: its own, and FastAPI's, which it has imported
# where that is installed.
_FASTAPI: Final = getattr(sys.modules.get("fastapi.params"), "Depends", None)
_TASKIQ: Final[Any] = TaskiqDepends()
_MARKS: Final[tuple[type, ...]] = (type(_TASKIQ), *([] if _FASTAPI is None else [_FASTAPI]))


def handler_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a guard sees it: with the arguments of a message, without those that taskiq resolves."""
    if not inspect.isroutine(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        # What it is instead is refused elsewhere.
        return function
    signature = _signature_of(function)
    sent = [one for one in signature.parameters.values() if not _is_resolved(one)]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def handler(*args: Any, **kwargs: Any) -> Any:
            message = CURRENT.get()
            try:
                return await function(*args, **message.resolved, **kwargs)
            except NoResultError as error:
                return message.without_result(error)
    else:

        @functools.wraps(function)
        def handler(*args: Any, **kwargs: Any) -> Any:
            message = CURRENT.get()
            message.begins()
            try:
                return function(*args, **message.resolved, **kwargs)
            except NoResultError as error:
                return message.without_result(error)

    handler.__signature__ = signature.replace(parameters=sent)  # type: ignore[attr-defined]
    return handler


def task_of(job: GuardedJob, function: Callable[..., Any], keys: Keys) -> Callable[..., Any]:
    """Return the function that taskiq calls: guarded in a worker, plain anywhere else."""
    resolved = {one.name for one in _signature_of(function).parameters.values() if _is_resolved(one)}
    made = _async_task(job, function, resolved) if job.is_async else _task(job, function, resolved)
    made.__signature__ = _shown(function)  # type: ignore[attr-defined]
    made.__annotations__ = {**_annotations_of(function), CONTEXT: Context}
    made.__onefold_job__ = job  # type: ignore[attr-defined]
    made.__onefold_keys__ = keys  # type: ignore[attr-defined]
    return made


def _task(job: GuardedJob, function: Callable[..., Any], resolved: Iterable[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def task(*args: Any, **kwargs: Any) -> Any:
        context = kwargs.pop(CONTEXT, None)
        if context is None:
            return function(*args, **kwargs)
        message = _taken(context, kwargs, resolved)
        call = message.call(args, kwargs)
        # A time limit does not reach this thread: taskiq goes on without it.
        message.comes_later(job, call, OUT_OF_TIME)
        ended = job.deliver(call)
        message.begins()
        return settled(job, message, call, ended)

    return task


def _async_task(job: GuardedJob, function: Callable[..., Any], resolved: Iterable[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def task(*args: Any, **kwargs: Any) -> Any:
        context = kwargs.pop(CONTEXT, None)
        if context is None:
            return await function(*args, **kwargs)
        message = _taken(context, kwargs, resolved)
        call = message.call(args, kwargs)
        try:
            ended = await job.deliver_async(call)
        except asyncio.CancelledError:
            if not call.begun:
                message.comes_later(job, call, OUT_OF_TIME)
            raise
        return settled(job, message, call, ended)

    return task


def _taken(context: Context, kwargs: dict[str, Any], resolved: Iterable[str]) -> Received:
    """Return the message for which a worker calls a task, and take what taskiq has resolved out of its arguments."""
    # A shared task may run under any broker.
    OnefoldMiddleware.added_to(context.broker)
    message = received(context)
    message.resolved = {name: kwargs.pop(name) for name in resolved if name in kwargs and name not in message.kwargs}
    CURRENT.set(message)
    return message


def _shown(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that taskiq reads: without `tx`, which the guard passes, and with its own context."""
    signature = _signature_of(function)
    shown = [one for one in signature.parameters.values() if one.name != "tx"]
    # Before a catch-all of keywords, which has to be the last one.
    at = len(shown) - (bool(shown) and shown[-1].kind is inspect.Parameter.VAR_KEYWORD)
    context: Any = TaskiqDepends()
    shown.insert(at, inspect.Parameter(CONTEXT, inspect.Parameter.KEYWORD_ONLY, default=context, annotation=Context))
    return signature.replace(parameters=shown)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature with its annotations as objects, if their names can be found."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)


def _annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(getattr(inspect.unwrap(function), "__annotations__", {}))


def _is_resolved(parameter: inspect.Parameter) -> bool:
    """Return whether taskiq resolves this argument, and a sender does not pass it."""
    marks = (parameter.default, *getattr(parameter.annotation, "__metadata__", ()))
    return any(isinstance(one, _MARKS) for one in marks)
