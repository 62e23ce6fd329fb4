"""Celery's messages: their keys, their links, and sending them again."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from celery.canvas import maybe_signature
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate
from celery.states import SUCCESS
from kombu import Producer

from onefold import UsageError
from onefold.queues import keys
from onefold.queues._rabbitmq.consumer import CONFIRM_SECONDS_MAX
from onefold.queues._shared.jobs.arguments import UNWRITABLE, ScopeUnusable, are_to_blame, bound
from onefold.queues._shared.jobs.waits import HELD, again, counted_in
from onefold.queues._shared.logs import address_of as _address_of
from onefold.queues._shared.logs import buried, waits_of
from onefold.queues._shared.logs import found_at as _found_at
from onefold.queues._shared.verdict import Later, Verdict, named, of_error, of_state
from onefold.queues.keys import KEY_HEADER
from onefold.stores.base import Address

# Set in a request that is in progress: a task that calls itself calls a plain function.
KEY: Final = "onefold_key"
# The scope of its record, if the task says whose message it is.
SCOPE: Final = "onefold_scope"
# Set once its function is called.
BEGUN: Final = "onefold_begun"

# A digest of the arguments that were sent: it tells whether a retry has changed them.
ARGUMENTS: Final = "x-onefold-arguments"

# RabbitMQ's headers of a message that came back from the dead letters: if resent, it would look like a loop.
DEATHS: Final = ("x-death", "x-first-death", "x-last-death")

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


def has_changed(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a retry, or a task that replaces itself, may have other arguments under the same key.

    What was sent is noted in a header at first, which the messages of its retries keep.
    """
    request = task.request
    try:
        sent = hashlib.sha256(msgspec.json.encode(bound(task.run, args, kwargs))).hexdigest()
    except UNWRITABLE:
        sent = ""
    if request.retries or request.replaced_task_nesting:
        return not sent or (request.headers or {}).get(ARGUMENTS) != sent
    request.update({"headers": {**(request.headers or {}), ARGUMENTS: sent}})
    return False


def is_to_blame(task: Any, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the message or its task is at fault, not the worker (a closed guard, a failing store)."""
    known = vars(task.request)
    if isinstance(error, ScopeUnusable):
        return False
    if not isinstance(error, UsageError) or KEY not in known or BEGUN in known:
        return True
    return are_to_blame(type(task).fingerprint, task.run, args, kwargs)


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
    delay, counted = again(later, headers)
    waits_of(task.guard).tell(log, found_at(task), later, delay=delay)
    try:
        sent = task.signature_from_request(request, countdown=delay, headers={**headers, **counted})
        _confirmed(task.app, sent)
    except Exception as error:  # noqa: BLE001 - the broker itself fails, and has to keep the message
        # A Celery time limit that ends the pause must not end the message.
        with suppress(Exception):
            time.sleep(min(delay, REFUSED_SECONDS_MAX))
        return Reject(error, requeue=True)
    return Ignore(later.reason)


def _confirmed(app: Any, sent: Any) -> None:
    """Send it, and wait until the broker has it: the message that it replaces is acknowledged next.

    Celery itself waits for no confirmation. On RabbitMQ a broker that is killed, or cut off, would lose the only copy.
    """
    with app.producer_or_acquire() as pooled:
        if not hasattr(pooled.channel, "basic_publish_confirm"):
            # Other transports, such as Redis, answer each message.
            sent.apply_async(add_to_parent=False, producer=pooled)
            return
        # A channel of its own: in confirm mode, it confirms everything else that is sent through it.
        channel = pooled.connection.channel()
        confirm = channel.basic_publish_confirm
        channel.basic_publish = lambda *sent, **how: confirm(*sent, **{**how, "timeout": CONFIRM_SECONDS_MAX})
        try:
            # Celery's own retry would take another channel, which confirms nothing.
            sent.apply_async(add_to_parent=False, producer=Producer(channel), retry=False)
        except BaseException:
            # Dropped, not closed: a silent broker does not answer that either.
            pooled.connection.collect(socket_timeout=CLOSE_SECONDS_MAX)
            raise
        channel.close()


def held_before(request: Any) -> int:
    return counted_in(request.headers, HELD)


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
