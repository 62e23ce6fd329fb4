"""One job in progress, for frameworks that call a function: its key, the call under a guard, and how it ended.

No error of a job is raised here: an adapter gets it with its verdict. Only an interrupt that comes from outside the
function passes through.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple, cast

from onefold import AsyncGuard, ClaimLost, Guard, MissingKey, OutcomeUnknown, Policy, UsageError
from onefold._concurrency.generators import Flow, run, run_async
from onefold.health.first_use import first_use_of
from onefold.queues import keys
from onefold.queues._shared.consumer import throw_away_key
from onefold.queues._shared.jobs.arguments import ScopeUnusable, are_to_blame, body_of, scope_of
from onefold.queues._shared.jobs.options import FIELDS, check_ends, check_given, check_names, key_of, named
from onefold.queues._shared.jobs.waits import HELD, again, counted_in
from onefold.queues._shared.logs import address_of, buried, found_at, waits_of
from onefold.queues._shared.options import check, check_record, check_transactions, policy_of, takes_tx
from onefold.queues._shared.verdict import ACK, SOON, HandlerRaised, Later, Verdict, of_error, of_state
from onefold.queues._shared.verdict import named as named_error
from onefold.stores.base import Address

# A sender may write the name of the header as a keyword of Python's.
KEY_KEYWORD: Final = keys.KEY_HEADER.replace("-", "_")


class JobCall:
    """A message in a worker's hands. Its progress shows whose mistake an error is."""

    __slots__ = (
        "args",
        "begun",
        "headers",
        "interrupt",
        "job_id",
        "key",
        "kwargs",
        "message",
        "queue",
        "read",
        "scope",
    )

    def __init__(
        self,
        queue: str,
        job_id: str,
        headers: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        message: keys.Message | None = None,
    ) -> None:
        self.queue = queue
        self.job_id = job_id
        self.headers = headers_of(headers)
        self.args = args
        self.kwargs = kwargs
        # Where its key is read, for frameworks whose messages are not just arguments.
        self.message = message
        self.key: str | None = None
        self.scope: str | None = None
        # The message was read, and the guard was called; then the function was called.
        self.read = False
        self.begun = False
        # The reason why the task of an async function was cancelled, if that stands for an interrupt.
        self.interrupt: BaseException | None = None


class Ended(NamedTuple):
    """How a job ended: with a value, or with an error and what that means for its message."""

    verdict: Verdict
    value: Any = None
    # With `ACK`: it is done, and its result was not kept.
    error: Exception | None = None


class Asked(Exception):
    """The function has returned a request to its framework, such as a retry: the job is not done."""

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.value = value


class _Interrupted(OutcomeUnknown):
    """The framework has interrupted the function, at any line: nobody knows whether its effect happened."""


def headers_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the headers of a message, with a key that was sent as the keyword `idempotency_key`."""
    if KEY_KEYWORD not in given:
        return given
    if keys.KEY_HEADER not in given:
        return {**given, keys.KEY_HEADER: given[KEY_KEYWORD]}
    # Beside any other spelling: if two of them have different values, neither is the key.
    spellings = (keys.KEY_HEADER[:at].upper() + keys.KEY_HEADER[at:] for at in range(len(keys.KEY_HEADER)))
    return {**given, next(one for one in spellings if one not in given): given[KEY_KEYWORD]}


WHO_GIVES_A_KEY: Final = (
    ". Its sender gives it one with send(..., key=...), or the decorator takes it from an argument (key='order_id')"
)

# The message whose function is called by a guard, which asks for its key.
_current: ContextVar[Any] = ContextVar("onefold_job", default=None)


def is_in_progress(job_id: str) -> bool:
    """Return whether the function of this job runs now: if it calls itself, that is a plain call."""
    call = _current.get()
    return call is not None and call.begun and call.job_id == job_id


class Framework(NamedTuple):
    """What one framework has of its own."""

    # Its word for a job.
    word: str
    # Raised into a function from outside, at any line.
    interrupts: tuple[type[BaseException], ...]
    # Raised by a function that is not done.
    asks: tuple[type[Exception], ...]
    # The same, for messages.
    asks_named: str
    # Returned by a function that is not done.
    returned: tuple[type, ...] = ()


class GuardedJob:
    """A function of a job framework under a guard, with its options."""

    def __init__(
        self,
        framework: Framework,
        name: str,
        guard: Guard | AsyncGuard,
        operation: str,
        handler: Callable[..., Any],
        given: Mapping[str, Any],
    ) -> None:
        self._framework = framework
        self.is_async = inspect.iscoroutinefunction(handler)
        self.guard: Any = guard
        self.operation = operation
        self.handler = handler
        self._key, self._scope, self._fingerprint = given["key"], given["scope"], given["fingerprint"]
        self.record = given["record"]
        # Whether the key may be among the arguments.
        self.reads_arguments = self._key is not DEFAULT_KEY
        self._runs_without_key = given["missing_key"] == "run"
        self.is_transactional = takes_tx(handler)
        with named(framework.word, name):
            self.policy = self._checked(given)
            self._guarded = self._under_guard()
        self._first_use = first_use_of(guard)

    def _checked(self, given: Mapping[str, Any]) -> Policy:
        word, guard, handler = self._framework.word, self.guard, self.handler
        kind = AsyncGuard if self.is_async else Guard
        if isinstance(guard, (Guard, AsyncGuard)) and not isinstance(guard, kind):
            how = "async def" if self.is_async else "def"
            raise UsageError(f"it is `{how}`, and takes {kind.__name__}, but this is {type(guard).__name__}")
        check_given(given)
        fields = {option: given[option] for option in given if option in FIELDS}
        policy = policy_of(guard, kind, given["policy"], fields, GuardedJob)
        missing_key = given["missing_key"]
        check(guard, kind, self.operation, handler, missing_key=missing_key, policy=policy, is_async=self.is_async)
        check_transactions(guard, handler)
        asks = (*self._framework.asks, *([Asked] if self._framework.returned else []))
        check_ends(policy, asks, self._framework.asks_named)
        check_names(word, "fingerprint", self._fingerprint, handler)
        check_names(word, "scope", self._scope, handler)
        check_record(self.record, handler, missing_key)
        self.key_of = key_of(word, self._key, handler)
        return policy

    @property
    def where_key_is(self) -> str:
        return f" in its argument {self._key!r}" if isinstance(self._key, str) else ""

    def _under_guard(self) -> Callable[..., Any]:
        """Return the function under the guard, which asks the message in progress for its key and scope."""
        way: Any = self.guard.idempotent
        if self.is_transactional:
            way = partial(self.guard.transactional, record=self.record)
        decorate = way(
            self.operation,
            key=lambda *_, **__: _current.get().key,
            scope=None if self._scope is None else lambda *_, **__: _current.get().scope,
            fingerprint=self._fingerprint,
            policy=self.policy,
        )
        return cast("Callable[..., Any]", decorate(self._called_async() if self.is_async else self._called()))

    def _called(self) -> Callable[..., Any]:
        interrupts, returned = self._framework.interrupts, self._framework.returned

        @functools.wraps(self.handler)
        def call(*args: Any, **kwargs: Any) -> Any:
            _current.get().begun = True
            try:
                value = self.handler(*args, **kwargs)
            except interrupts as error:
                raise self._interrupted(error) from error
            return self._done(value) if returned else value

        return call

    def _called_async(self) -> Callable[..., Any]:
        @functools.wraps(self.handler)
        async def call(*args: Any, **kwargs: Any) -> Any:
            _current.get().begun = True
            try:
                return self._done(await self.handler(*args, **kwargs))
            except asyncio.CancelledError:
                struck, task = _current.get().interrupt, asyncio.current_task()
                if struck is None or task is None:
                    raise
                task.uncancel()
                raise self._interrupted(struck) from struck
            except self._framework.interrupts as error:
                raise self._interrupted(error) from error

        return call

    def _interrupted(self, error: BaseException) -> BaseException:
        """Return what an interrupt means for the guard: nobody knows the outcome, unless the policy calls it final."""
        if isinstance(error, self.policy.final_errors):
            return error
        return _Interrupted(f"it was interrupted by {type(error).__name__}")

    def _done(self, value: Any) -> Any:
        if isinstance(value, self._framework.returned):
            raise Asked(value)
        return value

    def deliver(self, call: JobCall) -> Ended:
        """Call the function once for this message's key; return how that ended."""
        token = _current.set(call)
        try:
            try:
                value = self._guarded(*call.args, **call.kwargs) if self._is_ready(call) else run(self._ask(call))
            except Exception as error:  # noqa: BLE001 - every error of a job has a verdict
                return run(self._failed(error, call))
            return Ended(ACK, value)
        except self._framework.interrupts as error:
            # Not an `Exception`, and from outside the function.
            return self.interrupted(call, error)
        finally:
            _current.reset(token)

    async def deliver_async(self, call: JobCall) -> Ended:
        """Await the function once for this message's key; return how that ended."""
        # A framework runs it in a task, which has a context of its own.
        _current.set(call)
        try:
            ready = self._is_ready(call)
            value = await (self._guarded(*call.args, **call.kwargs) if ready else run_async(self._ask(call)))
        except Exception as error:  # noqa: BLE001 - every error of a job has a verdict
            return await run_async(self._failed(error, call))
        return Ended(ACK, value)

    def interrupted(self, call: JobCall, error: BaseException) -> Ended:
        """Return that a message comes later whose wait for another worker was interrupted. Raise if it has begun."""
        if call.begun:
            raise error
        reason = f"{type(error).__name__} before it was called"
        return Ended(Later(SOON, reason), error=_Interrupted(reason))

    def _is_ready(self, call: JobCall) -> bool:
        """Read the key; return whether the guarded function can be called at once."""
        call.key = keys.usable(self.key_of(call.message or self._message_of(call)))
        if call.key is None:
            if not self._runs_without_key:
                advice = "" if self.reads_arguments else WHO_GIVES_A_KEY
                raise MissingKey(
                    f"{self.operation}: the message has no key{self.where_key_is}, and nothing ran{advice}"
                )
            if not self.is_transactional:
                return False
        if self._scope is not None:
            call.scope = scope_of(self._scope, self.operation, self.handler, call.args, call.kwargs)
        if call.key is None:
            # It needs a transaction all the same; this key is never used again.
            call.key = throw_away_key()
        call.read = True
        # A row of the caller's is in no table of ours.
        return self.record is not None or self._first_use.is_over

    def _ask(self, call: JobCall) -> Flow[Any]:
        """Check the stores before the first use of the guard; without a key, call the function without a guard."""
        if not call.read:
            call.begun = True
            return (yield partial(self.handler, *call.args, **call.kwargs))
        yield from self._first_use.check(self.guard, self.policy)
        return (yield partial(self._guarded, *call.args, **call.kwargs))

    def _failed(self, error: Exception, call: JobCall) -> Flow[Ended]:
        verdict = self._verdict_on(error, call)
        if verdict is None:
            verdict = yield from self._looked(call)
        if verdict == ACK and isinstance(error, ClaimLost):
            return (yield from self._replayed(call))
        if isinstance(error, _Interrupted) and isinstance(verdict, HandlerRaised):
            # An interrupt of the framework's may be no `Exception`; whoever gets this one raises it.
            error = cast("Exception", error.__cause__)
        return Ended(verdict, error=error)

    def _message_of(self, call: JobCall) -> keys.Message:
        body = body_of(self.handler, call.args, call.kwargs) if self.reads_arguments else b""
        return keys.Message(body, call.headers, position=call.job_id)

    def _replayed(self, call: JobCall) -> Flow[Ended]:
        """Return the result of the worker that has taken the claim over, and finished."""
        call.begun = False
        try:
            return Ended(ACK, (yield partial(self._guarded, *call.args, **call.kwargs)))
        except Exception as error:  # noqa: BLE001 - as above
            return Ended(self._verdict_on(error, call) or of_state(None), error=error)

    def _verdict_on(self, error: Exception, call: JobCall) -> Verdict | None:
        if isinstance(error, Asked):
            return HandlerRaised(error)
        if isinstance(error, self._framework.interrupts) and not call.begun:
            # A time limit has ended the wait for another worker: nothing of this message has run.
            return Later(SOON, f"{type(error).__name__} before it was called", error=error)
        return of_error(
            error,
            own=(self.operation, call.key),
            final=self.policy.final_errors,
            held_before=counted_in(call.headers, HELD),
            begun=self._is_to_blame(error, call),
            called=call.begun,
        )

    def _is_to_blame(self, error: Exception, call: JobCall) -> bool:
        """Return whether the message or its function is at fault, not the worker (a closed guard, a failing store)."""
        if isinstance(error, ScopeUnusable):
            return False
        if not isinstance(error, UsageError) or not call.read or call.begun:
            return True
        return are_to_blame(self._fingerprint, self.handler, call.args, call.kwargs)

    def _looked(self, call: JobCall) -> Flow[Verdict]:
        """Return the verdict after a lost claim: the worker that has taken it over may have finished it."""
        try:
            record = yield partial(self.guard.read, self.operation, call.key, scope=call.scope)
        except Exception as error:  # noqa: BLE001 - a store that is down is a verdict too
            return of_error(error, begun=False) or of_state(None)
        return of_state(None if record is None else record.state.value)

    def address_of(self, call: JobCall) -> Address:
        """Return the address of a job's record; with an empty key if its message has no usable one."""
        return address_of(self.guard, self.operation, call.key, call.scope)

    def found_at(self, call: JobCall) -> str:
        """Return how a job is identified in the log. Its own id is not shown: it may be the key."""
        return found_at(call.queue, self.address_of(call))

    def tell_failed(self, log: logging.Logger, call: JobCall, error: BaseException, attempt: int | None = None) -> None:
        """Log that the function itself raised, by its type and location. The framework logs the rest."""
        if not isinstance(error, (*self._framework.asks, Asked)):
            which = "" if attempt is None else f"attempt {attempt} "
            log.warning("%s: %sfailed: %s", self.found_at(call), which, named_error(error))

    def tell_rejected(self, log: logging.Logger, call: JobCall, reason: str) -> None:
        """Report that a job never runs again."""
        log.error("%s: rejected, never again: %s", self.found_at(call), reason)
        buried(self.address_of(call), reason)

    def tell_later(
        self, log: logging.Logger, call: JobCall, later: Later, longest: float = math.inf
    ) -> tuple[float, dict[str, int]]:
        """Report that a job waits; return how long, and the counts that its headers get."""
        delay, counted = again(later, call.headers)
        delay = min(delay, longest)
        waits_of(self.guard).tell(log, self.found_at(call), later, delay=delay)
        return delay, counted


DEFAULT_KEY: Final = keys.header()
