"""Celery's messages: their keys, their links, and sending them again."""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from celery.canvas import maybe_signature
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate
from celery.states import SUCCESS
from kombu import Producer

from onefold import UsageError
from onefold._checks import with_article
from onefold.keys import joined
from onefold.queues import keys
from onefold.queues._rabbitmq.consumer import CONFIRM_SECONDS_MAX
from onefold.queues._shared.logs import address_of as _address_of
from onefold.queues._shared.logs import buried, waits_of
from onefold.queues._shared.logs import found_at as _found_at
from onefold.queues._shared.verdict import HELD_DELAY, Later, Verdict, named, of_error, of_state
from onefold.queues.keys import KEY_HEADER
from onefold.stores.base import Address

# Set in a request that is in progress: a task that calls itself calls a plain function.
KEY: Final = "onefold_key"
# The scope of its record, if the task says whose message it is.
SCOPE: Final = "onefold_scope"
# Set once its function is called.
BEGUN: Final = "onefold_begun"

# How often a message has come again, and how often of these because it was held.
TIMES: Final = "x-onefold-times"
HELD: Final = "x-onefold-held"

# A digest of the arguments that were sent: it tells whether a retry has changed them.
ARGUMENTS: Final = "x-onefold-arguments"

# RabbitMQ's headers of a message that came back from the dead letters: if resent, it would look like a loop.
DEATHS: Final = ("x-death", "x-first-death", "x-last-death")

# Each wait is twice as long, from a second up to a minute: a task of an hour does not keep a worker busy with
# duplicates.
DOUBLINGS_MAX: Final = 10

# How long closing an abandoned connection may take.
CLOSE_SECONDS_MAX: Final = 1.0

# A full queue refuses a resent message, and gets the original back at once: wait this long before.
REFUSED_SECONDS_MAX: Final = 1.0

log = logging.getLogger("onefold.queues.celery")


# What a sender without a key is told: refused, or with `require_key=False` once.
NO_KEY: Final = (
    "{operation}: this message has no key{where}, and nothing was sent. A task id is not one: a sender that sends "
    "again gets another. Send it with send(task, args, key=...) or headers={{'idempotency-key': ...}}, take the key "
    "from an argument (key='order_id'), or accept the id with require_key=False"
)
ID_IS_NO_KEY: Final = (
    "{operation}: sent without a key, under its task id. A redelivery and Celery's own retry() keep that id, but a "
    "sender that retries, or a task that is enqueued again, gets another and runs again. Said once for each task"
)


def keyed(headers: Mapping[str, Any] | None, task_id: str) -> dict[str, Any]:
    """Return the headers with a key. A task's id is fixed when its chain is sent, and so is the key of each step."""
    given = dict(headers or {})
    return given if any(keys.is_header(name, KEY_HEADER) for name in given) else {KEY_HEADER: task_id, **given}


def has_key(
    run: Callable[..., Any] | None, key_of: keys.KeyOf, args: Any, kwargs: Any, headers: Mapping[str, Any] | None
) -> bool:
    """Return whether a worker will find a key in this message; `run` is None if it does not look at the arguments."""
    try:
        body = b"" if run is None else body_of(run, tuple(args or ()), dict(kwargs or {}))
    except TypeError:
        # Celery refuses a wrong call in its own words; where a task turns that off, the worker does.
        return True
    # Only `position()` reads the id, and who asks for that has been warned.
    return key_of(keys.Message(body, headers or {}, position="the id of the task")) is not None


def links_of(app: Any, task_id: str, links: Any) -> list[Any] | None:
    """Return the callbacks of a task, with ids derived from its own: a replay sends the same ones again."""
    if not links:
        return None
    several = links if isinstance(links, (list, tuple)) else [links]
    return [_with_id(maybe_signature(link, app), f"{task_id} link {at}") for at, link in enumerate(several)]


def _with_id(link: Any, name: str) -> Any:
    # A canvas inside a link gets the ids of its tasks when it is sent.
    if link.subtask_type or "task_id" in link.options:
        return link
    return link.clone().set(task_id=str(uuid.uuid5(uuid.NAMESPACE_OID, name)))


# Values that JSON cannot express, or msgspec cannot write.
UNWRITABLE: Final = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


def body_of(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the arguments by name, as JSON, for keys that are read from them.

    A wrong call raises the usual TypeError.
    """
    arguments = _spread(run, _bound(run, args, kwargs))
    try:
        return msgspec.json.encode(arguments)
    except UNWRITABLE:
        # An amount of more than 64 bits is no reason to miss the key next to it.
        return msgspec.json.encode({name: found for name, found in arguments.items() if _can_be_written(found)})


def has_changed(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a retry, or a task that replaces itself, may have other arguments under the same key.

    What was sent is noted in a header at first, which the messages of its retries keep.
    """
    request = task.request
    try:
        sent = hashlib.sha256(msgspec.json.encode(_bound(task.run, args, kwargs))).hexdigest()
    except UNWRITABLE:
        sent = ""
    if request.retries or request.replaced_task_nesting:
        return not sent or (request.headers or {}).get(ARGUMENTS) != sent
    request.update({"headers": {**(request.headers or {}), ARGUMENTS: sent}})
    return False


def _spread(run: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as the sender named them: those caught by `**options` are next to the others."""
    kinds = inspect.signature(run).parameters.values()
    rest = next((one.name for one in kinds if one.kind is one.VAR_KEYWORD), None)
    return arguments if rest is None else {**arguments, **arguments.get(rest, {})}


def _can_be_written(found: object) -> bool:
    try:
        msgspec.json.encode(found)
    except UNWRITABLE:
        return False
    return True


def _bound(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    whole = inspect.signature(run)
    whole = whole.replace(parameters=[one for name, one in whole.parameters.items() if name != "tx"])
    bound = whole.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def scope_of(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return whose message this is; None if that is the guard's to say. Raise `UsageError` if it names nobody."""
    chosen = type(task).scope
    if chosen is None:
        return None
    if callable(chosen):
        found = [chosen(*args, **kwargs)]
    else:
        arguments = _spread(task.run, _bound(task.run, args, kwargs))
        found = [arguments.get(name) for name in ((chosen,) if isinstance(chosen, str) else chosen)]
    mistake = ScopeUnusable if callable(chosen) else UsageError
    tenants = [_tenant_of(one, task.operation, mistake) for one in found]
    return tenants[0] if len(tenants) == 1 else joined({str(at): one for at, one in enumerate(tenants)})


class ScopeUnusable(UsageError):
    """A function that finds the tenant has returned what names nobody: the worker's mistake, for every message."""


def _tenant_of(found: object, operation: str, mistake: type[UsageError]) -> str:
    """Return the name of a tenant, as a guard takes it. The text of another object may differ in each process."""
    if isinstance(found, (int, uuid.UUID)) and not isinstance(found, bool):
        return str(found)
    if isinstance(found, str) and found.strip():
        return found
    if inspect.iscoroutine(found):
        found.close()
    is_missing = found is None or isinstance(found, str)
    what = repr(found) if is_missing else with_article(type(found).__name__)
    kind = UsageError if is_missing else mistake
    raise kind(f"{operation}: its scope is {what}: scope= has to name a tenant or caller. Nothing ran")


def is_to_blame(task: Any, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the message or its task is at fault, not the worker (a closed guard, a failing store)."""
    known = vars(task.request)
    if isinstance(error, ScopeUnusable):
        return False
    if not isinstance(error, UsageError) or KEY not in known or BEGUN in known:
        return True
    chosen = type(task).fingerprint
    if chosen is None:
        return False
    if callable(chosen):
        return not keys.can_be_compared(chosen(*args, **kwargs))
    arguments = _bound(task.run, args, kwargs)
    names = arguments if chosen == "*" else (chosen,) if isinstance(chosen, str) else chosen
    return not keys.can_be_compared([arguments[name] for name in names])


def address_of(task: Any) -> Address:
    """Return the address of the running task's record; with an empty key if its message has no usable one."""
    known = vars(task.request)
    return _address_of(task.guard, task.operation, known.get(KEY), known.get(SCOPE))


def found_at(task: Any) -> str:
    """Return how the message is identified in the log. The id of the task is not shown: it may be the key."""
    return _found_at(str((task.request.delivery_info or {}).get("routing_key") or ""), address_of(task))


def tell_failed(task: Any, error: Exception) -> None:
    """Log that the task itself raised: once for each attempt, by its type and location. Celery logs the rest."""
    cause = error.exc if isinstance(error, Retry) else error
    # Without a cause, a Retry is the task's own wish; Ignore and Reject always are.
    if isinstance(cause, BaseException) and not isinstance(cause, TaskPredicate):
        log.warning("%s: attempt %d failed: %s", found_at(task), task.request.retries + 1, named(cause))


def rejected(task: Any, reason: str) -> Reject:
    """Return the exception that ends a message for good: to the queue's dead-letter exchange, or to nowhere."""
    log.error("%s: rejected, never again: %s", found_at(task), reason)
    buried(address_of(task), reason)
    return Reject(reason, requeue=False)


def sent_again(task: Any, later: Later) -> Exception:
    """Send the task again, with its id, key, chain, group and retries; return the exception that ends it here."""
    request = task.request
    headers = {name: found for name, found in (request.headers or {}).items() if not name.startswith(DEATHS)}
    times = _number_in(headers, TIMES)
    delay = min(later.delay * 2 ** min(times, DOUBLINGS_MAX), max(HELD_DELAY, later.delay))
    counted = {TIMES: times + 1, HELD: _number_in(headers, HELD) + later.limited}
    waits_of(task.guard).tell(log, found_at(task), later, delay=delay)
    try:
        again = task.signature_from_request(request, countdown=delay, headers={**headers, **counted})
        _confirmed(task.app, again)
    except Exception as error:  # noqa: BLE001 - the broker itself fails, and has to keep the message
        # A Celery time limit that ends the pause must not end the message.
        with suppress(Exception):
            time.sleep(min(delay, REFUSED_SECONDS_MAX))
        return Reject(error, requeue=True)
    return Ignore(later.reason)


def _confirmed(app: Any, again: Any) -> None:
    """Send it, and wait until the broker has it: the message that it replaces is acknowledged next.

    Celery itself waits for no confirmation. On RabbitMQ a broker that is killed, or cut off, would lose the only copy.
    """
    with app.producer_or_acquire() as pooled:
        if not hasattr(pooled.channel, "basic_publish_confirm"):
            # Other transports, such as Redis, answer each message.
            again.apply_async(add_to_parent=False, producer=pooled)
            return
        # A channel of its own: in confirm mode, it confirms everything else that is sent through it.
        channel = pooled.connection.channel()
        confirm = channel.basic_publish_confirm
        channel.basic_publish = lambda *sent, **how: confirm(*sent, **{**how, "timeout": CONFIRM_SECONDS_MAX})
        try:
            # Celery's own retry would take another channel, which confirms nothing.
            again.apply_async(add_to_parent=False, producer=Producer(channel), retry=False)
        except BaseException:
            # Dropped, not closed: a silent broker does not answer that either.
            pooled.connection.collect(socket_timeout=CLOSE_SECONDS_MAX)
            raise
        channel.close()


def held_before(request: Any) -> int:
    return _number_in(request.headers, HELD)


def _number_in(headers: Mapping[str, Any] | None, name: str) -> int:
    """Return a count from one of our headers; 0 if it is missing or invalid."""
    found = (headers or {}).get(name, 0)
    return found if isinstance(found, int) and found > 0 else 0


def looked(task: Any) -> Verdict:
    """Return the verdict after a lost claim: another worker's result counts for this message too, once it exists."""
    try:
        known = vars(task.request)
        record = task.guard.read(task.operation, known[KEY], scope=known.get(SCOPE))
    except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
        return of_error(error, begun=False) or of_state(None)
    return of_state(None if record is None else record.state.value)


def somebody_waits(task: Any) -> bool:
    """Return whether a result that was not kept is still needed: by a caller, or by the next step."""
    request = task.request
    wanted = request.chain or request.chord or request.callbacks or not request.ignore_result
    try:
        return bool(wanted) and task.AsyncResult(request.id).state != SUCCESS
    except NotImplementedError:
        # There is no result backend, so no caller waits.
        return bool(request.chain or request.callbacks)
