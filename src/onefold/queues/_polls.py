"""Whole polls: all messages under a guard at once, and a verdict for each. For clients that hand out many at a time.

`Polls` gives them to `run_batch`. `JoinedPolls` gives them to `fresh`, in one transaction of the caller's; where that
transaction fails, each message gets one of its own, so that one poison message fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from typing import Any, Protocol

from onefold import AsyncGuard, Fresh, Guard, MissingKey, OnefoldError, Policy, UsageError
from onefold.queues._checked import takes_tx
from onefold.queues._consuming import NO_KEY, MissingKeyRule, finished, nothing
from onefold.queues._verdict import ACK, SOON, Failed, Later, Never, Verdict, of_error
from onefold.queues.keys import KeyOf, Message, PayloadOf, usable


class OnItsWay(Protocol):
    """A message as the keys see it, and as the handler gets it."""

    @property
    def message(self) -> Message: ...
    @property
    def native(self) -> Any: ...


Numbers = list[int]
# What a poll of these messages has finished, for an offset that is kept with the work.
Finished = Callable[[Any, Numbers], Any]


class Sorted:
    """The messages of one poll by their numbers: those with a key, those that run without, and the verdicts."""

    def __init__(
        self, deliveries: Sequence[OnItsWay], key: KeyOf, missing_key: MissingKeyRule, fingerprint: PayloadOf | None
    ) -> None:
        self.keys: dict[int, str] = {}
        self._payloads: dict[int, object] = {}
        self.unguarded: Numbers = []
        self.verdicts: list[Verdict] = [ACK] * len(deliveries)
        for number, delivery in enumerate(deliveries):
            try:
                found = usable(key(delivery.message))
                if fingerprint is not None:
                    self._payloads[number] = fingerprint(delivery.message)
            except Exception as error:  # noqa: BLE001 - whatever a message causes is its verdict
                self.verdicts[number] = Never(str(error)) if isinstance(error, MissingKey) else verdict_of(error)
                continue
            if found is not None:
                self.keys[number] = found
            elif missing_key == "run":
                self.unguarded.append(number)
            else:
                self.verdicts[number] = NO_KEY

    @property
    def fingerprint(self) -> Callable[[int], object] | None:
        return self._payloads.__getitem__ if self._payloads else None

    def take(self, results: Sequence[Any], operation: str, policy: Policy) -> None:
        """The outcomes or errors of those with a key, in order."""
        for (number, key), result in zip(self.keys.items(), results, strict=True):
            if isinstance(result, Exception):
                self.verdicts[number] = verdict_of(result, own=(operation, key), final=policy.remember)

    def take_fresh(self, fresh: Fresh[int]) -> Numbers:
        """The numbers of those that are to be worked on."""
        for number, problem in zip(fresh.unsettled, fresh.problems, strict=True):
            self.verdicts[number] = verdict_of(problem)
        return sorted([*fresh.new, *self.unguarded])

    @property
    def finished(self) -> Numbers:
        return [number for number, verdict in enumerate(self.verdicts) if verdict == ACK]


def verdict_of(error: Exception, **facts: Any) -> Verdict:
    """A claim that was lost is looked at when the message comes again."""
    verdict = of_error(error, **facts)
    return Later(SOON, "another worker has taken it over") if verdict is None else verdict


class Polls:
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
        fingerprint: PayloadOf | None = None,
    ) -> None:
        self._guard: Any = guard
        self._operation = operation
        self._handler = handler
        self._key = key
        self._missing_key = missing_key
        self._fingerprint = fingerprint
        # A poll does not wait for one of its messages: that one comes again.
        self._policy = (policy or guard.policy).but(wait=0, keep_result=False)

    def deliver(self, deliveries: Sequence[OnItsWay]) -> list[Verdict]:
        sort = Sorted(deliveries, self._key, self._missing_key, self._fingerprint)
        for number in sort.unguarded:
            try:
                nothing(self._handler(deliveries[number].native))
            except Exception as error:  # noqa: BLE001 - it fails alone
                sort.verdicts[number] = verdict_of(error)
        results = self._run(sort, lambda number: nothing(self._handler(deliveries[number].native)))
        sort.take(results, self._operation, self._policy)
        return sort.verdicts

    async def deliver_async(self, deliveries: Sequence[OnItsWay]) -> list[Verdict]:
        sort = Sorted(deliveries, self._key, self._missing_key, self._fingerprint)
        for number in sort.unguarded:
            try:
                await finished(self._handler(deliveries[number].native))
            except Exception as error:  # noqa: BLE001 - it fails alone
                sort.verdicts[number] = verdict_of(error)

        async def handle(number: int) -> None:
            await finished(self._handler(deliveries[number].native))

        sort.take(await self._run(sort, handle), self._operation, self._policy)
        return sort.verdicts

    def _run(self, sort: Sorted, handle: Callable[[int], Any]) -> Any:
        keys = sort.keys
        return self._guard.run_batch(
            self._operation,
            list(keys),
            key=keys.__getitem__,
            handler=handle,
            returns=Any,
            fingerprint=sort.fingerprint,
            policy=self._policy,
        )


class JoinedPolls:
    """A handler for the new messages of a poll, which works in the transaction in which they are recorded."""

    def __init__(
        self,
        guard: Guard | AsyncGuard,
        operation: str,
        handler: Callable[..., Any],
        transaction: Callable[[], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]],
        *,
        key: KeyOf,
        missing_key: MissingKeyRule,
        policy: Policy | None,
        fingerprint: PayloadOf | None = None,
    ) -> None:
        if not callable(transaction):
            raise UsageError("transaction= is a function that opens one: engine.begin, pool.connection, ...")
        if not takes_tx(handler):
            raise UsageError("guarded_batches() works in a transaction: the handler has to take tx")
        self._guard: Any = guard
        self._operation = operation
        self._handler = handler
        self._transaction: Any = transaction
        self._key = key
        self._missing_key = missing_key
        self._fingerprint = fingerprint
        self._policy = policy

    def deliver(self, deliveries: Sequence[OnItsWay], then: Finished | None = None) -> list[Verdict]:
        try:
            return self._together(deliveries, then)
        except Unopened as error:
            return [Later(SOON, str(error))] * len(deliveries)
        except WrongTransaction:
            raise
        except Exception as error:  # noqa: BLE001 - the handler's, or the database's
            if len(deliveries) == 1:
                return [_failed(error)]
        verdicts: list[Verdict] = []
        for number, delivery in enumerate(deliveries):
            verdicts += self.deliver([delivery], _after(then, number, verdicts))
        return verdicts

    def _together(self, deliveries: Sequence[OnItsWay], then: Finished | None = None) -> list[Verdict]:
        sort = Sorted(deliveries, self._key, self._missing_key, self._fingerprint)
        with ExitStack() as stack:
            with _opening():
                tx = stack.enter_context(_coloured(self._transaction(), "__enter__"))
            new = sort.take_fresh(self._fresh(tx, sort))
            if new:
                nothing(self._handler([deliveries[number].native for number in new], tx=tx))
            if then is not None:
                then(tx, sort.finished)
        return sort.verdicts

    async def deliver_async(self, deliveries: Sequence[OnItsWay], then: Finished | None = None) -> list[Verdict]:
        try:
            return await self._together_async(deliveries, then)
        except Unopened as error:
            return [Later(SOON, str(error))] * len(deliveries)
        except WrongTransaction:
            raise
        except Exception as error:  # noqa: BLE001 - the handler's, or the database's
            if len(deliveries) == 1:
                return [_failed(error)]
        verdicts: list[Verdict] = []
        for number, delivery in enumerate(deliveries):
            verdicts += await self.deliver_async([delivery], _after(then, number, verdicts))
        return verdicts

    async def _together_async(self, deliveries: Sequence[OnItsWay], then: Finished | None = None) -> list[Verdict]:
        sort = Sorted(deliveries, self._key, self._missing_key, self._fingerprint)
        async with AsyncExitStack() as stack:
            with _opening():
                tx = await stack.enter_async_context(_coloured(self._transaction(), "__aenter__"))
            new = sort.take_fresh(await self._fresh(tx, sort))
            if new:
                await finished(self._handler([deliveries[number].native for number in new], tx=tx))
            if then is not None:
                await then(tx, sort.finished)
        return sort.verdicts

    def _fresh(self, tx: Any, sort: Sorted) -> Any:
        keys = sort.keys
        joined = self._guard.within(tx)
        return joined.fresh(
            self._operation,
            list(keys),
            key=keys.__getitem__,
            fingerprint=sort.fingerprint,
            policy=self._policy,
        )


class Unopened(Exception):
    """No transaction could be opened: the database is away, and no message has failed."""


class WrongTransaction(UsageError):
    """What `transaction=` gives can never be opened here. The messages are not to blame: the caller is told."""


def _coloured(transaction: Any, way_in: str) -> Any:
    if not hasattr(transaction, way_in):
        kind, words = type(transaction).__name__, "async with" if way_in == "__aenter__" else "with"
        raise WrongTransaction(f"transaction= gives {kind}, and this client opens it by `{words}`")
    return transaction


@contextmanager
def _opening() -> Iterator[None]:
    try:
        yield
    except WrongTransaction:
        raise
    except Exception as error:
        raise Unopened(f"no transaction: {type(error).__name__}") from error


def _failed(error: Exception) -> Verdict:
    return verdict_of(error) if isinstance(error, OnefoldError) else Failed(error)


def _after(then: Finished | None, number: int, before: list[Verdict]) -> Finished | None:
    """For one message alone: finished is also what was finished before it."""
    if then is None:
        return None
    done = [at for at, verdict in enumerate(before) if verdict == ACK]
    return lambda tx, numbers: then(tx, [*done, *([number] if numbers else [])])
