"""What Celery's messages are made of: their keys, their links, and the message that comes again. No verdicts."""

from __future__ import annotations

import difflib
import inspect
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from celery.canvas import maybe_signature
from celery.exceptions import Ignore, Reject, Retry
from celery.states import SUCCESS

from onefold import Guard, Policy, UsageError
from onefold.queues import keys
from onefold.queues._checked import check
from onefold.queues._verdict import HELD_DELAY, Later
from onefold.queues.keys import KEY_HEADER, KeyOf

# What `guarded` takes besides Celery's own.
OPTIONS: Final = ("key", "missing_key", "wait", "policy", "fingerprint")

# Set in a request that is under way: a task that calls itself calls a function.
KEY: Final = "onefold_key"

# How often a message has come again, and how often of these because it was on hold.
TIMES: Final = "x-onefold-times"
HELD: Final = "x-onefold-held"

# RabbitMQ's notes of a message that came back from the dead letters: sent again, it would take it for a loop.
DEATHS: Final = ("x-death", "x-first-death", "x-last-death")

# Each time it waits twice as long, from a second up to a minute: a task of an hour keeps no worker busy with its twin.
DOUBLINGS_MAX: Final = 10

log = logging.getLogger("onefold.queues.celery")


def checked(policy: Policy) -> Policy:
    """Refuse a policy that takes Celery's own words for an end: a task that asks for a retry is not done."""
    kinds = (*policy.remember, *(() if policy.after_crash == "rerun" else policy.unknown))
    for kind in kinds:
        if isinstance(kind, type) and any(issubclass(word, kind) for word in (Retry, Ignore, Reject)):
            raise UsageError(
                f"the policy takes every {kind.__name__} for an end, and with it Celery's Retry, Ignore and Reject: "
                "name the exceptions that are meant in remember= and unknown="
            )
    return policy


def prepared(guard: object, operation: object, run: Callable[..., Any], base: Any, options: Mapping[str, Any]) -> KeyOf:
    """How a message of this task is asked for its key; what would fail for every message is refused."""
    given = {name: getattr(base, name) for name in OPTIONS} | dict(options)
    check(guard, Guard, operation, run, missing_key=given["missing_key"], policy=given["policy"])
    for name in given:
        # Celery takes any word.
        if not hasattr(base, name) and (meant := _meant(name, OPTIONS)):
            raise UsageError(f"unknown option {name!r}{meant}")
    return _key_of(given["key"], run)


def _key_of(key: object, run: Callable[..., Any]) -> KeyOf:
    if not isinstance(key, str):
        return keys.checked(key)
    name, parameters = key.partition(".")[0], inspect.signature(run).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if name and name not in parameters and not takes_any:
        raise UsageError(f"key={key!r}: the task has no argument {name!r}{_meant(name, parameters)}")
    return keys.field(key)


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return f": did you mean {near[0]}?" if near else ""


def keyed(headers: Mapping[str, Any] | None, task_id: str) -> dict[str, Any]:
    """The headers with a key. The id of a task is fixed when its chain is sent: so is the key of each of its steps."""
    return {KEY_HEADER: task_id, **(headers or {})}


def links_of(app: Any, task_id: str, links: Any) -> list[Any] | None:
    """The callbacks of a task, with ids that follow from its own: a replay sends the same ones again, not others."""
    if not links:
        return None
    several = links if isinstance(links, (list, tuple)) else [links]
    return [_with_id(maybe_signature(link, app), f"{task_id} link {at}") for at, link in enumerate(several)]


def _with_id(link: Any, name: str) -> Any:
    # A canvas inside a link gets the ids of its tasks when it is sent.
    if link.subtask_type or "task_id" in link.options:
        return link
    return link.clone().set(task_id=str(uuid.uuid5(uuid.NAMESPACE_OID, name)))


def body_of(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The arguments by name, as JSON, for keys that are read from them. A wrong call raises what it always would."""
    whole = inspect.signature(run)
    whole = whole.replace(parameters=[one for name, one in whole.parameters.items() if name != "tx"])
    bound = whole.bind(*args, **kwargs)
    bound.apply_defaults()
    try:
        return msgspec.json.encode(bound.arguments)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return b""


def sent_again(task: Any, later: Later) -> Exception:
    """Send the running task again, with the same id, key, chain, group and retries; what ends this message."""
    request = task.request
    headers = {name: found for name, found in (request.headers or {}).items() if not name.startswith(DEATHS)}
    times = _number_in(headers, TIMES)
    delay = min(later.delay * 2 ** min(times, DOUBLINGS_MAX), max(HELD_DELAY, later.delay))
    counted = {TIMES: times + 1, HELD: _number_in(headers, HELD) + later.limited}
    try:
        again = task.signature_from_request(request, countdown=delay, headers={**headers, **counted})
        again.apply_async(add_to_parent=False)
    except Exception as error:  # noqa: BLE001 - the broker itself is in the way, and has to keep the message
        return Reject(error, requeue=True)
    log.warning("%s[%s] comes again in %.3g s: %s", task.name, request.id, delay, later.reason)
    return Ignore(later.reason)


def held_before(request: Any) -> int:
    return _number_in(request.headers, HELD)


def _number_in(headers: Mapping[str, Any] | None, name: str) -> int:
    """A count in a header of ours; what is none, or another's, is 0."""
    found = (headers or {}).get(name, 0)
    return found if isinstance(found, int) and found > 0 else 0


def somebody_waits(task: Any) -> bool:
    """Whether a result that was not kept is still to be handed on: to a caller, or to the next step."""
    request = task.request
    wanted = request.chain or request.chord or request.callbacks or not request.ignore_result
    try:
        return bool(wanted) and task.AsyncResult(request.id).state != SUCCESS
    except NotImplementedError:
        # There is no result backend, so no caller waits.
        return bool(request.chain or request.callbacks)
