"""Check what a guard was told (policy, scope, codec, listeners), and read calls by it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from onefold import keys
from onefold._delivery.work import Delivery
from onefold._fingerprint import of_whole, recipe_of_whole
from onefold._fingerprint.canonical import has_no_form
from onefold._handlers.arguments import (
    FingerprintOf,
    GuardedFunction,
    KeyArgument,
    ScopeOf,
    check_function,
    check_probe,
    check_scope_is_no_argument,
    full_name,
    name_of,
    named_scope,
    returns_of,
)
from onefold._model import TOKEN_BYTES, Address, DeliveryRequest, Outcome, Policy
from onefold.codecs import Codec, MsgspecCodec
from onefold.errors import ResultNotKept, UsageError
from onefold.events import Listener, Teller
from onefold.keys import Key

T = TypeVar("T")


_PAYLOAD: Final = recipe_of_whole("payload")

mint: Callable[[], bytes] = functools.partial(os.urandom, TOKEN_BYTES)


class Options:
    """The options of a guard, checked, and what follows from them for one call."""

    _awaited = False

    def __init__(
        self,
        policy: Policy | None,
        scope: str | Callable[[], str | None] | None,
        on_event: Listener | Iterable[Listener],
        codec: Codec | None,
    ) -> None:
        self.policy = Policy() if policy is None else self._checked(policy)
        self._scope = scope if callable(scope) or scope is None else keys.checked_scope(scope)
        self._codec: Codec = MsgspecCodec() if codec is None else codec
        self._tell = Teller(on_event)
        self._policies: dict[str, Policy] = {}
        # By operation, the first function that was decorated for it.
        self._functions: dict[str, str] = {}
        # The type that the codec has accepted last: mostly it is the next one too.
        self._storable: Any = object()

    def address(self, operation: str, key: Key, *, scope: str | None = None) -> Address:
        """Where the record of this key is. Its `digest` belongs into logs, where the key does not."""
        return keys.address(operation, key, self._scoped(scope))

    def _make_delivery(
        self,
        request: DeliveryRequest,
        call: Callable[[], Any],
        returns: Any,
        policy: Policy,
    ) -> Delivery:
        return Delivery(request, policy, call, returns, self._codec, self._tell, mint)

    def _chosen(self, policy: Policy | None) -> Policy:
        """The policy that is passed replaces the guard's."""
        return self.policy if policy is None else self._checked(policy)

    def _checked(self, policy: object) -> Policy:
        if not isinstance(policy, Policy):
            raise UsageError(f"policy={type(policy).__name__} has to be a Policy: write policy=Policy(keep='7d')")
        check_probe(policy.after_crash, is_async=self._awaited)
        return policy

    def _joined_policy(self, policy: Policy | None) -> Policy:
        """The policy inside a transaction of the caller's, whose rollback would take a remembered failure back."""
        found = self._chosen(policy)
        if found.remember:
            raise UsageError(
                "within() cannot remember a failure: the rollback takes it back. Use transactional(), or pass "
                "policy=guard.policy.but(remember=())"
            )
        return found

    def _request(
        self, operation: str, key: object, scope: str | None, payload: object = None, *, bypass: bool = False
    ) -> DeliveryRequest:
        address = keys.address(operation, key, self._scoped(scope))
        try:
            fingerprint = None if payload is None else of_whole(_PAYLOAD, address.parts, payload)
        except Exception as error:
            if not has_no_form(payload):
                raise
            raise UsageError(
                f"{operation}: fingerprint={type(payload).__name__}: the payload cannot be fingerprinted: {error}. "
                "Nothing ran"
            ) from error
        return DeliveryRequest(address, fingerprint, bypass)

    def _request_of_call(
        self, call: GuardedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool = False
    ) -> DeliveryRequest:
        scope, key, fingerprint = call.read(args, kwargs)
        return DeliveryRequest(Address(scope, call.operation, key), fingerprint, bypass)

    def _scoped(self, scope: str | None) -> str | None:
        if scope is not None or not callable(self._scope):
            return self._scope if scope is None else scope  # type: ignore[return-value]
        return named_scope(self._scope(), "the guard's scope=")

    def _by_hand(self, operation: str, key: object, scope: str | None, returns: Any = Any) -> Delivery:
        """What the record tools need: an address, and nothing to run."""
        policy = self._policies.get(operation, self.policy)
        return self._make_delivery(self._request(operation, key, scope), nothing, returns, policy)

    def _prepared(
        self,
        function: Callable[..., Any],
        operation: str,
        key: KeyArgument,
        scope: ScopeOf,
        fingerprint: FingerprintOf,
        policy: Policy | None,
        returns: Any,
        *,
        injects_tx: bool = False,
    ) -> tuple[GuardedFunction, Callable[[], Any]]:
        """What a decorator needs: how to read the arguments, and the type of the result, checked now if it can be."""
        check_function(function, is_async=self._awaited, guard=type(self).__name__)
        if policy is not None:
            # Whoever resolves a record by hand names its operation, and means that operation's own policy.
            self._policies[operation] = self._checked(policy)
        if isinstance(scope, str):
            check_scope_is_no_argument(function, scope)
        if scope is None:
            scope = self._scope if not callable(self._scope) else lambda *_args, **_kwargs: self._scoped(None)
        call = GuardedFunction(function, operation, key, scope, fingerprint, injects_tx=injects_tx)
        self._tell_if_shared(operation, full_name(function))

        @functools.cache
        def result_type() -> Any:
            return self._returns(function, returns, policy)

        try:
            result_type()
        except NameError:
            # The annotation names something that is defined further down; the first call looks again.
            return call, functools.partial(_named, function, result_type)
        return call, result_type

    def _tell_if_shared(self, operation: str, name: str) -> None:
        """Two functions under one operation share their records, which is hardly ever meant."""
        first = self._functions.setdefault(operation, name)
        if first != name:
            self._tell.warn(
                operation,
                f"{first}() and {name}() are both this operation, and so share its records: a key that one has "
                "finished is replayed by the other, and only arguments of the same name are compared. Give each "
                "an operation of its own, unless both do the same thing",
                about=name,
            )

    def _returns(self, function: Callable[..., Any], returns: Any, policy: Policy | None) -> Any:
        """The checked type of a function's result. Raises `NameError` for an annotation that cannot be read yet."""
        if returns is Any:
            returns = returns_of(function)
        if returns is not self._storable and self._chosen(policy).keep_result:
            self._check_returns(function, returns)
        return returns

    def _returns_now(self, function: Callable[..., Any], returns: Any, policy: Policy | None) -> Any:
        try:
            return self._returns(function, returns, policy)
        except NameError as error:
            raise _unreadable(function, error) from error

    def _check_returns(self, function: Callable[..., Any], returns: Any) -> None:
        try:
            self._codec.check(returns)
        except UsageError as error:
            raise UsageError(f"what {name_of(function)}() returns cannot be remembered: {error}") from error
        self._storable = returns


def unwrap(outcome: Outcome[T], request: DeliveryRequest, returns: Any) -> T:
    """The value, as a decorated function hands it out."""
    if outcome.replayed and outcome.omitted and returns is not type(None):
        raise ResultNotKept.about(request.address, remark=outcome.remark)
    return outcome.value


def nothing() -> None:
    """For work that runs no handler."""


def _named(function: Callable[..., Any], result_type: Callable[[], Any]) -> Any:
    try:
        return result_type()
    except NameError as error:
        raise _unreadable(function, error) from error


def _unreadable(function: Callable[..., Any], error: NameError) -> UsageError:
    return UsageError(
        f"the return annotation of {name_of(function)}() cannot be read: {error}. Nothing ran. "
        "Pass the type as returns="
    )


def moment() -> str:
    """Return the time in words for people: when somebody resolved a record. Nothing is decided by it."""
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
