"""Celery: tasks that run once for each key, on every broker and in every pool.

    @guarded(app, guard, "send-welcome", acks_late=True)
    def send_welcome(user_id): ...

The sender puts the key into a header. A duplicate gets the stored result, and passes it on to its chain or chord. A
task that has to come later is sent again with its retries uncounted; Celery's own Retry, Ignore and Reject stay
Celery's.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from onefold import ClaimLost, Guard, MissingKey, Policy, RecordColumn, UsageError
from onefold.events import tell_sent
from onefold.queues._shared.consumer import MissingKeyRule
from onefold.queues._shared.jobs.arguments import body_of, has_key, scope_of
from onefold.queues._shared.jobs.handler import WHO_GIVES_A_KEY
from onefold.queues._shared.options import takes_tx
from onefold.queues._shared.verdict import SOON, HandlerRaised, Later, Never, of_error
from onefold.queues.keys import Key, KeyOf, Message, header, usable, with_key

try:
    from celery import Celery, Task
    from celery.exceptions import Ignore, SoftTimeLimitExceeded
    from celery.utils import uuid

    from onefold.queues.celery import options as celery_options
    from onefold.queues.celery import task as celery_task
    from onefold.queues.celery import worker as celery_worker
    from onefold.queues.celery.task import BEGUN, KEY, SCOPE
except ImportError as error:
    raise UsageError("Celery is not installed: `pip install 'onefold[celery]'`") from error

__all__ = ["OnefoldTask", "guarded", "send"]


class OnefoldTask(Task):  # type: ignore[type-arg]  # of any arguments
    """The base class of guarded tasks. `guard` and `operation` are required; the rest has the meaning of `guarded`."""

    abstract = True
    guard: Guard
    operation: str = ""
    key: KeyOf | str = header()
    missing_key: MissingKeyRule = "never"
    # Whether `delay()` and `apply_async()` refuse to send a message without a key.
    require_key: bool = True
    policy: Policy | None = None
    fingerprint: Any = "*"
    scope: Any = None
    record: RecordColumn | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        celery_options.check_class(cls)

    def __init__(self) -> None:
        kind = type(self)
        self._key_of = celery_options.prepared(getattr(kind, "guard", None), kind.operation, self.run, kind, {})
        policy = celery_options.policy_for(kind.guard, kind.policy, kind)
        self._transactional = takes_tx(self.run)
        self._policy = policy
        self._has_warned = False
        celery_worker.checks(kind.guard, kind.record)

        @functools.wraps(self.run)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.request.update({BEGUN: True})
            # Wrapped by `autoretry_for` by now: its Retry has to release the claim.
            return self.run(*args, **kwargs)

        way: Any = kind.guard.idempotent
        if self._transactional:
            way = functools.partial(kind.guard.transactional, record=kind.record)
        known = functools.partial(
            way,
            kind.operation,
            key=lambda *_, **__: vars(self.request)[KEY],
            scope=None if kind.scope is None else lambda *_, **__: vars(self.request)[SCOPE],
            policy=policy,
        )
        self._first, self._again = known(fingerprint=kind.fingerprint)(run), known(fingerprint=None)(run)
        if self._transactional:
            # Celery checks the arguments of a sender, which has no transaction.
            self.__header__ = inspect.signature(self._first).bind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Deliver in a worker; anywhere else call the function, unguarded."""
        request = self.request
        if request.called_directly or KEY in vars(request):
            return super().__call__(*args, **kwargs)
        try:
            return self._deliver(args, kwargs)
        except Exception as error:
            own, begun = (self.operation, vars(request).get(KEY)), celery_task.is_to_blame(self, error, args, kwargs)
            called = BEGUN in vars(request)
            verdict = of_error(error, own=own, held_before=celery_task.held_before(request), begun=begun, called=called)
            if isinstance(error, SoftTimeLimitExceeded) and KEY in vars(request) and not called:
                # It has ended the wait for another worker: nothing of this message has run.
                verdict = Later(SOON, f"{type(error).__name__} before it was called", error=error)
            if verdict is None:
                verdict = celery_task.looked(self)
            if isinstance(verdict, HandlerRaised):
                celery_task.tell_failed(self, error)
            if request.is_eager or isinstance(verdict, HandlerRaised):
                raise
            if isinstance(verdict, Never):
                raise celery_task.rejected(self, verdict.reason) from error
            if isinstance(verdict, Later):
                raise celery_task.sent_again(self, verdict) from error
            if isinstance(error, ClaimLost):
                return self._again(*args, **kwargs)
            if celery_task.somebody_waits(self):
                raise
            raise Ignore(str(error)) from error

    def _deliver(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = self.request
        body = b"" if type(self).key is OnefoldTask.key else body_of(self.run, args, kwargs)
        key = usable(self._key_of(Message(body, request.headers or {}, position=request.id)))
        if key is None and self.missing_key == "never":
            advice = "" if body else WHO_GIVES_A_KEY
            raise MissingKey(f"{self.operation}: the message has no key{self._where_key_is}, and nothing ran{advice}")
        if key is None and not self._transactional:
            return self.run(*args, **kwargs)
        scope = scope_of(type(self).scope, self.operation, self.run, args, kwargs)
        request.update({KEY: uuid() if key is None else key, SCOPE: scope})
        if self.record is None:
            celery_worker.check_first(self.guard, self._policy)
        changed = celery_task.has_changed(self, args, kwargs)
        return (self._again if changed else self._first)(*args, **kwargs)

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: str | None = None, producer: Any = None,
                    link: Any = None, link_error: Any = None, *more: Any, **options: Any) -> Any:  # fmt: skip
        """Send the task as Celery does, with the key in a header: the one that you pass, or else the task's id.

        An id that Celery has just made is no key: it is refused, or with `require_key=False` warned of once.
        """
        if not task_id:
            self._check_sent(args, kwargs, options.get("headers"))
        task_id = task_id or uuid()
        options["headers"] = celery_task.keyed(options.get("headers"), task_id)
        link, link_error = (celery_task.links_of(self.app, task_id, links) for links in (link, link_error))
        return super().apply_async(args, kwargs, task_id, producer, link, link_error, *more, **options)

    @property
    def _where_key_is(self) -> str:
        return f" in its argument {self.key!r}" if isinstance(self.key, str) else ""

    def _check_sent(self, args: Any, kwargs: Any, headers: Any) -> None:
        reads_arguments = type(self).key is not OnefoldTask.key
        if has_key(self.run if reads_arguments else None, self._key_of, args, kwargs, headers):
            return
        if self.require_key:
            raise MissingKey(celery_task.NO_KEY.format(operation=self.operation, where=self._where_key_is))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(celery_task.ID_IS_NO_KEY.format(operation=self.operation), UserWarning, stacklevel=3)

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Apply the task as Celery does, with a key too."""
        options["task_id"] = options.get("task_id") or uuid()
        options["headers"] = celery_task.keyed(options.get("headers"), options["task_id"])
        return super().apply(args, kwargs, *more, **options)


def guarded(
    app: Celery, guard: Guard, operation: str, *, base: type[OnefoldTask] = OnefoldTask, **options: Any
) -> Callable[[Callable[..., Any]], OnefoldTask]:
    """Decorate a function as `app.task` does, to run once for each key. A parameter `tx` makes it transactional.

    `key` is the name of an argument, or one of `onefold.queues.keys`; by default the header. `scope` names the
    argument that is the tenant, or several, or is a function of the arguments. `fingerprint` names the arguments that
    must be the same under one key. `record` is a row of your own that is the record, for a task with `tx`.
    `docs/queues/celery.md` explains each; all others are Celery's.
    """

    def decorate(handler: Callable[..., Any]) -> OnefoldTask:
        # Celery creates the task later, when the app is used; errors are raised now.
        celery_options.prepared(guard, operation, handler, base, options)
        celery_worker.checks(guard, options.get("record", base.record))
        made: Callable[..., OnefoldTask] = app.task(base=base, guard=guard, operation=operation, **options)
        return made(handler)

    return decorate


def send(task: Any, args: Any = (), kwargs: Any = None, *, key: Key | UnsetType = UNSET, **options: Any) -> str:
    """Send a task or a signature under this key, or a new one. Return the key, to send it again.

    For an `AsyncResult`, name the task too: `send(…, key=key, task_id=key)`, then `task.AsyncResult(key)`.
    """
    chosen, options["headers"] = with_key(options.get("headers"), key)
    tell_sent(task.name, chosen)
    task.apply_async(args, kwargs, **options)
    return chosen
