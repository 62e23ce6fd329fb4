"""AWS Lambda: a handler for the messages of an SQS event source mapping, and one for direct invocations.

    handler = guarded_messages(guard, "charge", charge, key=header())           # called with a batch of messages
    handler = guarded_invocation(guard, "charge", charge, key="payment_id")     # called with an event, returns a result

A handler that is about to exceed the time of its function is interrupted, and its outcome is unknown: that is noted
before Lambda kills the function. No claim outlives an invocation, so that a frozen function holds none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Unpack

from onefold import Guard, MissingKey, Policy, PolicyFields, RecordColumn, UsageError
from onefold._checks import one_of
from onefold._concurrency.generators import run
from onefold.durations import Duration, seconds
from onefold.health.first_use import first_use_of
from onefold.queues._shared.consumer import Consuming, MissingKeyRule, throw_away_key
from onefold.queues._shared.logs import waits_of
from onefold.queues._shared.options import check, check_arguments, check_transactions, named_like, policy_of, takes_tx
from onefold.queues._shared.verdict import ACK, HandlerRaised, Later, Never, Verdict, named, of_interrupt
from onefold.queues._sqs import time_limits
from onefold.queues._sqs.consumer import FIFO_SUFFIX, OWN_REDRIVE, DeadLetter, Delivery, Rules, Settings, check_url
from onefold.queues._sqs.events import EventKey, client_context, delivery_of, event_field, failures, records_of
from onefold.queues._sqs.time_limits import NotStarted, TimeLimit, can_interrupt
from onefold.queues.keys import KeyOf, PayloadOf, usable

__all__ = ["OWN_REDRIVE", "BatchFailed", "Delivery", "client_context", "guarded_invocation", "guarded_messages"]

log = logging.getLogger("onefold.queues.lambda")

# AWS recommends a visibility timeout of six times the time of the function. A run that is killed at the end of that
# time leaves its claim behind, and so much is left for its lease before the message comes again.
LEASE_SHARE: Final = 5.0
# Lambda tries an asynchronous invocation again after a minute.
RETRY_SECONDS: Final = 60.0

# A duplicate does not wait for the running one: each second of a function is paid for.
WAIT: Final = 0.0

NOT_STARTED: Final = "%s: not started: the time of the function is nearly up"

Report = Literal["partial", "raise"]


class BatchFailed(Exception):
    """Some messages of a batch are not done, and the whole batch comes again; those that are done are found done."""


def guarded_messages(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf,
    dead_letter: str | DeadLetter = OWN_REDRIVE,
    client: Any = None,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    report: Report = "partial",
    margin: Duration = time_limits.MARGIN,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> GuardedMessages:
    """Return a Lambda handler for batches: it calls `handler(delivery)`, or `handler(delivery, tx=…)`, once a key.

    Its answer names the messages that are not done, for a mapping with `ReportBatchItemFailures`; without that setting,
    use `report="raise"`. `docs/queues/lambda.md` explains each argument.
    """
    limit = TimeLimit(seconds(margin, "margin"))
    with_defaults: Any = {"wait": WAIT, **fields}
    chosen = policy_of(guard, Guard, policy, with_defaults, guarded_messages)
    check(guard, Guard, operation, handler, missing_key=missing_key, policy=chosen)
    check_arguments(handler)
    consuming = Consuming(
        guard,
        operation,
        named_like(handler, _limited(handler, limit)),
        key=key,
        missing_key=missing_key,
        policy=chosen,
        payload=payload,
        record=record,
    )
    check_transactions(guard, handler)
    one_of(report, ("partial", "raise"), "report")
    if not isinstance(dead_letter, DeadLetter):
        check_url(dead_letter, "dead_letter", ", or OWN_REDRIVE for the queue that the redrive policy names")
        _check_client(client)
    rules = Rules(operation, dead_letter, waits=waits_of(guard))
    return GuardedMessages(consuming, rules, client, chosen, limit, raises=report == "raise")


class GuardedMessages:
    """The function that Lambda calls with a batch of messages. Created by `guarded_messages`."""

    def __init__(
        self, consuming: Consuming, rules: Rules, client: Any, policy: Policy, limit: TimeLimit, *, raises: bool
    ) -> None:
        self._consuming = consuming
        self._rules = rules
        self._client = client
        self._policy = policy
        self._limit = limit
        self._raises = raises
        self._is_checked = False

    def __call__(self, event: Any, context: Any = None) -> dict[str, Any]:
        """Handle the messages one by one; return those that are not done."""
        records = records_of(event)
        left = self._limit.begin(context)
        if not self._is_checked:
            _check_time(self._policy, left, LEASE_SHARE * left, f"five times the {left:.3g} s of this function")
            self._is_checked = True
        undone: list[Mapping[str, Any]] = []
        # Of a FIFO queue, what is behind a message that is not done has to wait for it.
        stopped: set[str | None] = set()
        for one in records:
            delivery = delivery_of(one)
            group = delivery.group if delivery.queue.endswith(FIFO_SUFFIX) else None
            if (group is not None and group in stopped) or not self._is_done(delivery):
                undone.append(one)
                stopped.add(group)
        if undone and self._raises:
            raise BatchFailed(f"{len(undone)} of {len(records)} messages are not done")
        return failures(undone)

    def _is_done(self, delivery: Delivery) -> bool:
        if self._limit.left <= self._policy.wait:
            log.info(NOT_STARTED, self._rules.found_at(delivery, None))
            return False
        try:
            verdict = self._consuming.deliver(delivery.message, delivery, held_before=delivery.receive_count - 1)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the others of the batch have nothing to do with it
            verdict = of_interrupt(error)
        return verdict == ACK or self._is_settled(verdict, delivery)

    def _is_settled(self, verdict: Verdict, delivery: Delivery) -> bool:
        """Report why a message is not done; return whether it is a dead letter now, so that Lambda may delete it."""
        address = self._consuming.address_of(delivery.message)
        where = self._rules.found_at(delivery, address)
        match verdict:
            case Later():
                self._rules.waits.tell(log, where, verdict, delay=0.0)
            case HandlerRaised(NotStarted()):
                # The store has taken all of the time that was left.
                log.info(NOT_STARTED, where)
            case HandlerRaised(error):
                log.debug("%s: the handler raised", where, exc_info=error)
                log.warning("%s: receive %d failed: %s", where, delivery.receive_count, named(error))
            case Never(reason) if isinstance(self._rules.dead_letter, DeadLetter):
                log.error("%s: left to the redrive policy of the queue: %s", where, reason)
            case Never(reason):
                log.error("%s: to the dead letters: %s", where, reason)
                return self._is_buried(delivery, reason)
        return False

    def _is_buried(self, delivery: Delivery, reason: str) -> bool:
        from onefold.queues._sqs.requests import bury, code_of
        from onefold.queues._sqs.sending import dead

        address = self._consuming.address_of(delivery.message)
        try:
            run(bury(self._client, dead(self._rules, delivery, reason, Settings(), address)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the message is kept
            self._rules.refused(code_of(error), reason, delivery, Settings(), math.inf)
            return False
        self._rules.buried(reason, address)
        return True


def guarded_invocation(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: str | EventKey,
    missing_key: MissingKeyRule = "never",
    payload: Callable[[Any], object] | None = None,
    margin: Duration = time_limits.MARGIN,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> Callable[[Any, Any], Any]:
    """Return a Lambda handler for direct invocations: it calls `handler(event, context)`, or with `tx=…`, once a key.

    A duplicate gets the stored result. `key` is a field of the event, `client_context()`, or a function of the event
    and the context. `docs/queues/lambda.md` explains each argument.
    """
    limit = TimeLimit(seconds(margin, "margin"))
    with_defaults: Any = {"wait": WAIT, **fields}
    chosen = policy_of(guard, Guard, policy, with_defaults, guarded_invocation)
    check(guard, Guard, operation, handler, missing_key=missing_key, policy=chosen)
    check_transactions(guard, handler)
    key_of = event_field(key) if isinstance(key, str) else key
    if not callable(key_of):
        raise UsageError("key= is a field of the event, client_context(), or a function of the event and the context")
    guarded = _under_guard(guard, operation, handler, limit, chosen, record, compares=payload is not None)
    first_use, is_checked = first_use_of(guard), False

    def invoked(event: Any, context: Any = None) -> Any:
        nonlocal is_checked
        left = limit.begin(context)
        if not is_checked:
            _check_time(chosen, left, RETRY_SECONDS, "the minute after which Lambda tries an invocation again")
            is_checked = True
        found = usable(key_of(event, context))
        if found is None and missing_key == "never":
            raise MissingKey(f"{operation}: the event has no key{_where(key)}, and nothing ran")
        if found is None and not takes_tx(handler):
            return limit.limited(handler)(event, context)
        if not first_use.is_over and record is None:
            run(first_use.check(guard, chosen))
        compared = None if payload is None else payload(event)
        return guarded(throw_away_key() if found is None else found, compared, event, context)

    return invoked


def _under_guard(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    limit: TimeLimit,
    policy: Policy,
    record: RecordColumn | None,
    *,
    compares: bool,
) -> Callable[..., Any]:
    """Return the handler as a function of its key and payload, which the guard reads, and of its arguments."""
    limited = limit.limited(handler)
    asked: dict[str, Any] = {"key": "key", "fingerprint": "payload" if compares else None, "policy": policy}

    def call(key: Any, payload: Any, event: Any, context: Any) -> Any:  # noqa: ARG001 - for the guard
        return limited(event, context)

    def call_with(key: Any, payload: Any, event: Any, context: Any, *, tx: Any) -> Any:  # noqa: ARG001 - for the guard
        return limited(event, context, tx=tx)

    if takes_tx(handler):
        decorate: Any = guard.transactional(operation, record=record, **asked)
        joined: Callable[..., Any] = decorate(named_like(handler, call_with))
        return joined
    if record is not None:
        raise UsageError(f"record={record!r} is a row in the transaction of the work: the handler has to take tx")
    claimed: Callable[..., Any] = guard.idempotent(operation, **asked)(named_like(handler, call))
    return claimed


def _limited(handler: Callable[..., Any], limit: TimeLimit) -> Callable[..., Any]:
    """Return the handler of a message, limited in time: with `tx` if it takes that."""
    limited = limit.limited(handler)

    def call(delivery: Delivery) -> Any:
        return limited(delivery)

    def call_with(delivery: Delivery, *, tx: Any) -> Any:
        return limited(delivery, tx=tx)

    return call_with if takes_tx(handler) else call


def _check_time(policy: Policy, left: float, longest: float, says: str) -> None:
    """Log, once, what cannot work well in the time that this function has."""
    if math.isinf(left):
        return
    if policy.mode == "claim" and policy.lease > longest:
        log.warning(
            "the lease of %.3g s is longer than %s: after a run that was killed at its time limit, its message comes "
            "again too early, finds it running, and uses up a receive or a retry. Set lease=%.3g, or less",
            *(policy.lease, says, max(1.0, min(left, longest))),
        )
    if policy.wait >= left:
        log.error("wait=%.3g is longer than the %.3g s of this function: nothing is started", policy.wait, left)
    if not can_interrupt():
        log.warning("a handler outside the main thread cannot be interrupted before the time of the function is up")


def _check_client(client: Any) -> None:
    from onefold.queues._sqs.requests import check_client

    check_client(client, is_async=False)


def _where(key: str | EventKey) -> str:
    return f" in its field {key!r}" if isinstance(key, str) else ""
