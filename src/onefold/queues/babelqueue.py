"""BabelQueue: a drop-in for its own `idempotency.wrap`, and a store object for users who keep theirs.

    app.register("urn:babel:orders:created", wrap(guard, on_order_created))

The key is `meta.id`. A message without a usable one runs unguarded, as the SDK's contract says. If a handler raises,
the runtime retries. A running duplicate waits within a bound instead of running a second time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack

from onefold import Guard, MissingKey, Policy, PolicyFields, StoreUnavailable, UsageError
from onefold._concurrency.generators import run
from onefold.health.first_use import first_use_of
from onefold.keys import checked_key
from onefold.queues._shared.consumer import nothing
from onefold.queues._shared.logs import address_of, found_at, waits_of
from onefold.queues._shared.options import check, policy_of
from onefold.queues._shared.verdict import Later, named, reason_of

log = logging.getLogger("onefold.queues.babelqueue")

# How long a duplicate waits in place for the running one. After that an error makes the runtime retry.
WAIT: Final = 30.0


class CannotWork(BaseException):
    """The guard itself refuses, as when it is closed: the runtime stops, and the message is not counted as failed.

    The runtime counts every `Exception` as a failed attempt: a queue of good messages would end in the dead letters.
    """


def wrap(
    guard: Guard,
    handler: Callable[..., Any],
    *,
    operation: str = "babelqueue",
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> Callable[..., None]:
    """Wrap the handler to run once for each `meta.id`. It keeps the signature by which the runtime calls it."""
    patient = policy_of(guard, Guard, policy, {"wait": WAIT, **fields}, wrap)
    check(guard, Guard, operation, handler, policy=patient)
    guard.check_handler(operation, handler)
    first_use = first_use_of(guard)

    @functools.wraps(handler)
    def wrapped(*args: Any) -> None:
        key, begun = _id_of(args), False

        def handle() -> None:
            nonlocal begun
            begun = True
            try:
                nothing(handler(*args))
            except Exception as error:
                log.warning("%s: it failed: %s", found_at("", address_of(guard, operation, key)), named(error))
                raise

        if key is None:
            return handle()
        try:
            if not first_use.is_over:
                run(first_use.check(guard, patient))
            guard.run(operation, key, handle, policy=patient)
        except UsageError as error:
            if begun:
                raise
            raise CannotWork(f"{operation}: {error}. No message is to blame: fix the worker") from error
        except StoreUnavailable as error:
            where = found_at("", address_of(guard, operation, key))
            waits_of(guard).tell(log, where, Later(0, reason_of(error), error=error))
            raise

    return wrapped


class IdempotencyStore:
    """`seen`, `remember` and `forget` on any Onefold store, for BabelQueue's own `idempotency.wrap`."""

    def __init__(self, guard: Guard, *, operation: str = "babelqueue") -> None:
        self._guard = guard
        self._operation = operation

    def seen(self, message_id: str) -> bool:
        """Return whether this id was remembered. An id that cannot be a key never is: its messages run unguarded."""
        key = _usable(message_id)
        record = None if key is None else self._guard.read(self._operation, key)
        return record is not None and record.state == "done"

    def remember(self, message_id: str) -> None:
        """Record this id as processed."""
        key = _usable(message_id)
        if key is not None:
            self._guard.run(self._operation, key, _done, policy=self._guard.policy.replace(mode="seen"))

    def forget(self, message_id: str) -> None:
        """Drop this id."""
        key = _usable(message_id)
        if key is not None:
            self._guard.forget(self._operation, key)


def _id_of(args: tuple[Any, ...]) -> str | None:
    meta = args[1] if len(args) > 1 and isinstance(args[1], Mapping) else {}
    return _usable(meta.get("id"))


def _usable(found: object) -> str | None:
    """Return the id if it can be a key. Otherwise it cannot be guarded, and the contract says to run it anyway."""
    try:
        return checked_key(found) if isinstance(found, str) else None
    except MissingKey:
        return None


def _done() -> None:
    """Do nothing: the message was already processed."""
