"""BabelQueue: a drop-in for its own `idempotency.wrap`, and a store object for users who keep theirs.

    app.register("urn:babel:orders:created", wrap(guard, on_order_created))

The key is `meta.id`. A message without a usable one runs unguarded, as the SDK's contract says. If a handler raises,
the runtime retries. A running duplicate waits within a bound instead of running a second time.

`wrap` takes a store of the SDK as well (`seen`, `remember`, `forget`): then only the import changes. Such a store knows
only what is finished, not what is running in another process; `_shared.seen_sets` has what can be added to it.
"""

from __future__ import annotations

import functools
import hashlib
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
from onefold.queues._shared.seen_sets import InFlight, SeenSet, is_seen_set, remember, wait_of
from onefold.queues._shared.verdict import Later, named, reason_of

log = logging.getLogger("onefold.queues.babelqueue")

# How long a duplicate waits in place for the running one. After that an error makes the runtime retry.
WAIT: Final = 30.0

OPERATION: Final = "babelqueue"

# The header that `babelqueue.redrive.redrive(bypass=True)` puts on what it moves back.
REDRIVEN: Final = "bq-replay-bypass"

# A longer value of it stands in the history as its digest: one line for people.
MARK_MAX: Final = 100

# Says of a message, by its `meta`, whether it is a deliberate second run, and under which name.
Bypass = Callable[[Mapping[str, Any]], bool | str]


class CannotWork(BaseException):
    """The guard itself refuses, as when it is closed: the runtime stops, and the message is not counted as failed.

    The runtime counts every `Exception` as a failed attempt: a queue of good messages would end in the dead letters.
    """


class IdempotencyStore:
    """`seen`, `remember` and `forget` on any Onefold store, for BabelQueue's own `idempotency.wrap`."""

    def __init__(self, guard: Guard, *, operation: str = OPERATION) -> None:
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


def wrap(
    store: Guard | SeenSet,
    handler: Callable[..., Any],
    *,
    guard: Guard | None = None,
    operation: str | None = None,
    bypass: Bypass | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> Callable[..., None]:
    """Wrap the handler to run once for each `meta.id`. It keeps the signature by which the runtime calls it.

    `store` is a guard, or a store of the SDK. What the latter can promise is that of a seen-set: what was remembered
    is skipped. Beyond that, a duplicate in the same process waits for the running one; in another process both run,
    and after a crash between the effect and `remember` it runs again. `guard=` puts claims in front of such a store,
    which is still read and written: then one of them runs, wherever they are.

    `bypass=redriven` lets a finished message run once more if a person has redriven it with `bypass=True`, and the
    record's history says so. Without it every redrive of a finished message is absorbed.
    """
    theirs: SeenSet | None = None
    if isinstance(store, IdempotencyStore):
        operation, store = operation or store._operation, store._guard
    elif is_seen_set(store):
        theirs = store
    if theirs is not None and guard is None:
        return _on_seen_set(theirs, handler, operation, bypass, policy, fields)
    if theirs is None and guard is not None:
        raise UsageError("guard= goes in front of a store of the SDK. The first argument is a guard of its own")
    found: Any = store if guard is None else guard
    return _on_guard(found, handler, theirs, operation or OPERATION, bypass, policy, fields)


def redriven(meta: Mapping[str, Any]) -> bool | str:  # noqa: ARG001 - the marker is in a header, beside the envelope
    """Name a message that was redriven with `bypass=True`: for `wrap(…, bypass=redriven)`.

    The name is the value of the header `bq-replay-bypass`, which the SDK sets to 1. One message runs once under one
    name, because the broker may redeliver what was redriven, too.
    """
    from babelqueue.headers import headers_from_context

    value = headers_from_context().get(REDRIVEN)
    if not value:
        return False
    # The header is from outside.
    usable = value.isprintable() and len(value) <= MARK_MAX
    return f"{REDRIVEN} {value if usable else hashlib.sha256(value.encode(errors='replace')).hexdigest()}"


def _on_guard(
    guard: Guard,
    handler: Callable[..., Any],
    theirs: SeenSet | None,
    operation: str,
    bypass: Bypass | None,
    policy: Policy | None,
    fields: Mapping[str, Any],
) -> Callable[..., None]:
    patient = policy_of(guard, Guard, policy, {"wait": WAIT, **fields}, wrap)
    check(guard, Guard, operation, handler, policy=patient)
    guard.check_handler(operation, handler)
    first_use = first_use_of(guard)

    @functools.wraps(handler)
    def wrapped(*args: Any) -> None:
        key, again, begun = _id_of(args), _bypass_of(bypass, args), False

        def handle() -> None:
            nonlocal begun
            if theirs is not None and key is not None and not again and theirs.seen(key):
                return
            begun = True
            try:
                nothing(handler(*args))
            except Exception as error:
                log.warning("%s: it failed: %s", found_at("", address_of(guard, operation, key)), named(error))
                raise
            if theirs is not None and key is not None:
                remember(theirs, key, log, operation)

        if key is None:
            return handle()
        try:
            if not first_use.is_over:
                run(first_use.check(guard, patient))
            guard.run(operation, key, handle, bypass=again, policy=patient)
        except UsageError as error:
            if begun:
                raise
            raise CannotWork(f"{operation}: {error}. No message is to blame: fix the worker") from error
        except StoreUnavailable as error:
            where = found_at("", address_of(guard, operation, key))
            waits_of(guard).tell(log, where, Later(0, reason_of(error), error=error))
            raise

    return wrapped


def _on_seen_set(
    theirs: SeenSet,
    handler: Callable[..., Any],
    operation: str | None,
    bypass: Bypass | None,
    policy: Policy | None,
    fields: Mapping[str, Any],
) -> Callable[..., None]:
    """Wrap a handler on a store of the SDK alone."""
    if bypass is not None:
        raise UsageError("bypass= needs a guard, whose records have a history: pass guard=, or a guard as the store")
    wait = wait_of(policy, fields, WAIT, wrap)
    named_as = operation or OPERATION
    with Guard("memory:") as unused:
        check(unused, Guard, named_as, handler)
    in_flight = InFlight()

    @functools.wraps(handler)
    def wrapped(*args: Any) -> None:
        key = _id_of(args)
        if key is None:
            return nothing(handler(*args))
        with in_flight.alone(named_as, key, wait):
            if not theirs.seen(key):
                nothing(handler(*args))
                remember(theirs, key, log, named_as)
        return None

    return wrapped


def _id_of(args: tuple[Any, ...]) -> str | None:
    return _usable(_meta_of(args).get("id"))


def _meta_of(args: tuple[Any, ...]) -> Mapping[str, Any]:
    return args[1] if len(args) > 1 and isinstance(args[1], Mapping) else {}


def _bypass_of(bypass: Bypass | None, args: tuple[Any, ...]) -> bool | str:
    return bypass is not None and bypass(_meta_of(args))


def _usable(found: object) -> str | None:
    """Return the id if it can be a key. Otherwise it cannot be guarded, and the contract says to run it anyway."""
    try:
        return checked_key(found) if isinstance(found, str) else None
    except MissingKey:
        return None


def _done() -> None:
    """Do nothing: the message was already processed."""
