"""Deliver whole batches: all messages under a guard at once, and a verdict for each.

`Batches` passes them to `run_batch`. For one transaction of the caller's, see `transactional_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from onefold import AsyncGuard, Fresh, Guard, MissingKey, Policy, UsageError
from onefold._concurrency.generators import Flow, run, run_async
from onefold.health.first_use import first_use_of
from onefold.queues._shared.consumer import NO_KEY, MissingKeyRule, finished, nothing
from onefold.queues._shared.verdict import ACK, SOON, Later, Never, Verdict, of_error
from onefold.queues.keys import KeyOf, Message, PayloadOf, can_be_compared, usable


class OnItsWay(Protocol):
    """A message for reading its key, and as the handler gets it."""

    @property
    def message(self) -> Message: ...
    @property
    def native(self) -> Any: ...


Numbers = list[int]


class Sorted:
    """The messages of one poll by index: those with a key, those that run without one, and the verdicts."""

    def __init__(
        self, deliveries: Sequence[OnItsWay], key: KeyOf, missing_key: MissingKeyRule, payload: PayloadOf | None
    ) -> None:
        self.keys: dict[int, str] = {}
        self._payloads: dict[int, object] = {}
        self.unguarded: Numbers = []
        # The keys whose handler was called, and those recorded by a caller's transaction.
        self.begun: set[str] = set()
        self.recorded: list[str] = []
        self.verdicts: list[Verdict] = [ACK] * len(deliveries)
        for number, delivery in enumerate(deliveries):
            try:
                found = usable(key(delivery.message))
                if payload is not None:
                    self._payloads[number] = payload(delivery.message)
            except Exception as error:  # noqa: BLE001 - whatever error a message causes is its verdict
                self.verdicts[number] = Never(str(error)) if isinstance(error, MissingKey) else verdict_of(error)
                continue
            if found is not None:
                self.keys[number] = found
            elif missing_key == "run":
                self.unguarded.append(number)
            else:
                self.verdicts[number] = NO_KEY

    @property
    def payload(self) -> Callable[[int], object] | None:
        return self._payloads.__getitem__ if self._payloads else None

    def take(self, results: Sequence[Any], operation: str, policy: Policy) -> None:
        """Apply the outcomes or errors of messages with a key, in order."""
        for (number, key), result in zip(self.keys.items(), results, strict=True):
            if isinstance(result, Exception):
                called = key in self.begun
                begun, facts = (
                    called or self._is_to_blame(number),
                    {"own": (operation, key), "final": policy.final_errors},
                )
                self.verdicts[number] = verdict_of(result, begun=begun, called=called, **facts)

    def take_fresh(self, fresh: Fresh[int]) -> Numbers:
        """Return the indexes of the messages to process."""
        for number, problem in zip(fresh.unsettled, fresh.problems, strict=True):
            self.verdicts[number] = verdict_of(problem, begun=self._is_to_blame(number))
        self.recorded = [self.keys[number] for number in fresh.new]
        return sorted([*fresh.new, *self.unguarded])

    def _is_to_blame(self, number: int) -> bool:
        """Return whether the message, rather than the worker, is at fault before its handler was called."""
        return not can_be_compared(self._payloads.get(number))

    @property
    def finished(self) -> Numbers:
        return [number for number, verdict in enumerate(self.verdicts) if verdict == ACK]


def verdict_of(error: Exception, **facts: Any) -> Verdict:
    """Return the verdict on an error. A lost claim is checked when the message comes again."""
    verdict = of_error(error, **facts)
    return Later(SOON, "another worker has taken it over") if verdict is None else verdict


class Batches:
    """A handler for one message, called for each new one of a poll."""

    def __init__(
        self,
        guard: Guard | AsyncGuard,
        operation: str,
        handler: Callable[..., Any],
        *,
        key: KeyOf,
        missing_key: MissingKeyRule,
        policy: Policy | None,
        payload: PayloadOf | None = None,
    ) -> None:
        self._guard: Any = guard
        self._first_use = first_use_of(guard)
        self._operation = operation
        self._handler = handler
        self._key = key
        self._missing_key = missing_key
        self._payload = payload
        # A poll does not wait for one of its messages: that one comes again.
        self._policy = (policy or guard.policy).replace(wait=0, keep_result=False)

    def deliver(self, deliveries: Sequence[OnItsWay]) -> list[Verdict]:
        return run(self._deliver(deliveries, nothing))

    async def deliver_async(self, deliveries: Sequence[OnItsWay]) -> list[Verdict]:
        return await run_async(self._deliver(deliveries, finished))

    def _deliver(self, deliveries: Sequence[OnItsWay], ended: Callable[[Any], Any]) -> Flow[list[Verdict]]:
        """Deliver a poll; `ended` checks what the handler has returned, or awaits it."""
        sort = Sorted(deliveries, self._key, self._missing_key, self._payload)

        def call(number: int) -> Any:
            return ended(self._handler(deliveries[number].native))

        def handle(number: int) -> Any:
            sort.begun.add(sort.keys[number])
            return call(number)

        for number in sort.unguarded:
            try:
                yield partial(call, number)
            except Exception as error:  # noqa: BLE001 - it fails alone
                sort.verdicts[number] = verdict_of(error)
        if not self._first_use.is_over and sort.keys:
            try:
                yield from self._first_use.check(self._guard, self._policy)
            except UsageError as error:
                sort.take([error] * len(sort.keys), self._operation, self._policy)
                return sort.verdicts
        results = yield partial(self._run, sort, handle)
        sort.take(results, self._operation, self._policy)
        return sort.verdicts

    def _run(self, sort: Sorted, handle: Callable[[int], Any]) -> Any:
        keys = sort.keys
        return self._guard.run_batch(
            self._operation,
            list(keys),
            key=keys.__getitem__,
            handler=handle,
            returns=type(None),
            payload=sort.payload,
            policy=self._policy,
        )
