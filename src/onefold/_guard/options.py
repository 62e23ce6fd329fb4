"""Check a guard's options (policy, scope, codec, listeners), and apply them to calls."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from onefold import keys
from onefold._checks import with_article
from onefold._delivery.work import Delivery
from onefold._fingerprint import of_whole, recipe_of_whole
from onefold._fingerprint.canonical import has_no_form
from onefold._handlers.arguments import (
    FingerprintOf,
    GuardedFunction,
    GuardScope,
    KeyArgument,
    ScopeOf,
    check_function,
    check_probe,
    full_name,
    name_of,
    named_scope,
    place_of,
    returns_of,
)
from onefold._model import TOKEN_BYTES, Address, DeliveryRequest
from onefold._model.policy import Policy, check_fields
from onefold._model.remarks import NAME_MAX
from onefold.codecs import Codec, MsgspecCodec
from onefold.errors import UsageError
from onefold.events import Listener, Teller
from onefold.keys import Key

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


_PAYLOAD: Final = recipe_of_whole("payload")

# How many variants of a guard's policy are kept: a probe that is made anew for each call makes one for each.
VARIANTS_MAX: Final = 256

# How many checked names of operations are remembered: a program has a few, unless it makes them up.
OPERATIONS_MAX: Final = 1024


class Mint(functools.partial[bytes]):
    """Draws tokens: one at each call, or those of a batch at once. None is kept for later: a fork would copy it."""

    def many(self, count: int) -> list[bytes]:
        drawn = os.urandom(TOKEN_BYTES * count)
        return [drawn[start : start + TOKEN_BYTES] for start in range(0, len(drawn), TOKEN_BYTES)]


mint: Final = Mint(os.urandom, TOKEN_BYTES)


def with_parentheses(method: F) -> F:
    """Let a method that makes a decorator refuse a function in place of its operation: `@guard.idempotent`, bare."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if args and callable(args[0]):
            raise UsageError(
                f"@guard.{method.__name__} needs its arguments, the operation's name and its key. Write for example "
                f"@guard.{method.__name__}({name_of(args[0]).rpartition('.')[2]!r}, key=...), with the argument that "
                "has the key"
            )
        return method(self, *args, **options)

    return cast("F", checked)


class Options:
    """The checked options of a guard, and their consequences for one call."""

    _is_async = False

    def __init__(
        self,
        policy: Policy | None,
        fields: Mapping[str, Any],
        scope: GuardScope,
        on_event: Listener | Iterable[Listener],
        codec: Codec | None,
    ) -> None:
        check_fields(fields, type(self).__init__)
        policy = Policy() if policy is None else self._checked(policy)
        self.policy = self._checked(policy.replace(**fields)) if fields else policy
        self._scope = scope if callable(scope) or scope is None else keys.checked_scope(scope)
        # None if it is found for each call.
        self._one_scope = None if callable(scope) else keys.checked_scope(scope)
        self._operations: set[str] = set()
        self._codec: Codec = MsgspecCodec() if codec is None else codec
        self._tell = Teller(on_event)
        self._policies: dict[str, Policy] = {}
        # The guard's policy with some fields changed, by these fields: calls repeat them.
        self._variants: dict[tuple[Any, ...], tuple[Policy, Policy]] = {}
        # The first function that was decorated for each operation, and where it is written.
        self._functions: dict[str, tuple[str, str]] = {}
        # The type that the codec accepted last: usually the next one is the same.
        self._storable: Any = object()

    def address(self, operation: str, key: Key, *, scope: str | None = None) -> Address:
        """Return the address of this key's record. Use its `digest` in logs, where the key does not belong."""
        return keys.address(operation, key, self._scoped(scope))

    def _make_delivery(
        self,
        request: DeliveryRequest,
        call: Callable[[], Any],
        returns: Any,
        policy: Policy,
    ) -> Delivery:
        return Delivery(request, policy, call, returns, self._codec, self._tell, mint)

    def _asked(self, policy: Policy | None, fields: Mapping[str, Any], of: Callable[..., Any]) -> Policy | None:
        """Return the policy that a call of `of` passes, whole or by some fields; None if it passes none."""
        if not fields:
            return policy
        check_fields(fields, of)
        if policy is not None:
            return self._checked(policy).replace(**fields)
        # With the types: 1 is equal to True, and only one of them is a number of attempts.
        key = (*fields.items(), *map(type, fields.values()))
        try:
            found = self._variants.get(key)
        except TypeError:
            # A list of errors, say.
            return self.policy.replace(**fields)
        if found is None or found[0] is not self.policy:
            if len(self._variants) >= VARIANTS_MAX:
                self._variants.clear()
            found = self._variants[key] = self.policy, self.policy.replace(**fields)
        return found[1]

    def _chosen(self, policy: Policy | None) -> Policy:
        """Return the policy that is passed, or else the guard's."""
        return self.policy if policy is None else self._checked(policy)

    def _checked(self, policy: object) -> Policy:
        if not isinstance(policy, Policy):
            raise UsageError(f"policy={type(policy).__name__} has to be a Policy: write policy=Policy(keep='7d')")
        check_probe(policy.after_crash, is_async=self._is_async)
        return policy

    def _joined_policy(self, policy: Policy | None) -> Policy:
        """Return the policy for a caller's transaction, whose rollback would take a remembered failure back."""
        found = self._chosen(policy)
        if found.final_errors:
            raise UsageError(
                "within() cannot remember a failure: the rollback removes it. Use transactional(), or pass "
                "final_errors=()"
            )
        check_uncounted(found, "within()")
        return found

    def _request(
        self, operation: str, key: object, scope: str | None, payload: object = None, *, bypass: bool | str = False
    ) -> DeliveryRequest:
        # One scope for all is checked when the guard is made, and an operation when it is first seen.
        if scope is None and self._one_scope is not None and type(operation) is str and operation in self._operations:
            address = Address(self._one_scope, operation, keys.checked_key(key, operation))
        else:
            address = keys.address(operation, key, self._scoped(scope))
            self._remember(operation)
        if isinstance(bypass, str):
            named_bypass(bypass)
        if payload is None:
            return DeliveryRequest(address, None, bypass)
        try:
            fingerprint = of_whole(_PAYLOAD, address.parts, payload)
        except Exception as error:
            if not has_no_form(payload):
                raise
            raise UsageError(
                f"{operation}: payload={type(payload).__name__}: the payload cannot be fingerprinted: {error}. "
                "Nothing ran"
            ) from error
        return DeliveryRequest(address, fingerprint, bypass)

    def _remember(self, operation: str) -> None:
        """Remember a name that was checked. A subclass of `str` is checked each time: it may be equal to anything."""
        if type(operation) is str and len(self._operations) < OPERATIONS_MAX:
            self._operations.add(operation)

    def _scoped(self, scope: str | None) -> str | None:
        if scope is not None or not callable(self._scope):
            return self._scope if scope is None else scope  # type: ignore[return-value]
        return named_scope(self._scope(), "the guard's scope= returned")

    def _by_hand(self, operation: str, key: object, scope: str | None, returns: Any = Any) -> Delivery:
        """Make a delivery for the record tools, which need an address and run nothing."""
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
        """Return how to read a function's arguments, and its result type, checked now if possible."""
        check_function(function, is_async=self._is_async, guard=type(self).__name__)
        if injects_tx:
            self._check_injects_tx(function)
            check_uncounted(self._chosen(policy), "transactional()")
        if policy is not None:
            # A record is resolved by hand under the name of its operation, with that operation's own policy.
            self._policies[operation] = self._checked(policy)
        call = GuardedFunction(
            function, operation, key, scope, fingerprint, guards_scope=self._scope, injects_tx=injects_tx
        )
        self._tell_if_shared(operation, function)

        @functools.cache
        def result_type() -> Any:
            return self._returns(function, returns, policy)

        try:
            result_type()
        except NameError:
            # The annotation names something that is defined further down; the first call looks again.
            return call, functools.partial(_named, function, result_type)
        return call, result_type

    def _check_injects_tx(self, function: Callable[..., Any]) -> None:
        """Raise `UsageError` if the store is known to have no transactions for this function."""
        raise NotImplementedError

    def _tell_if_shared(self, operation: str, function: Callable[..., Any]) -> None:
        """Warn about two functions under one operation: they share their records, which is hardly ever intended."""
        name, place = full_name(function), place_of(function)
        first, where = self._functions.setdefault(operation, (name, place))
        if first != name:
            self._tell.warn(
                operation,
                f"{first}(){where} and {name}(){place} are both this operation, and so share its records: a key "
                "that one has finished is replayed by the other, and only arguments of the same name are compared. "
                "Give each an operation of its own, unless both do the same thing",
                about=name,
            )

    def _returns(self, function: Callable[..., Any], returns: Any, policy: Policy | None) -> Any:
        """Return the checked type of a function's result. Raise `NameError` if its annotation cannot be read yet."""
        if returns is Any:
            returns = returns_of(function)
        if returns is not self._storable and self._chosen(policy).keep_result:
            self._check_returns(function, returns)
        return returns

    def _returns_now(self, function: Callable[..., Any], returns: Any, policy: Policy | None) -> Any:
        if not callable(function):
            raise _not_a_function(function)
        try:
            if returns is Any:
                returns = returns_of(function)
                if returns is self._storable:
                    return returns
            return self._returns(function, returns, policy)
        except NameError as error:
            raise _unreadable(function, error) from error

    def _check_returns(self, function: Callable[..., Any], returns: Any) -> None:
        try:
            self._codec.check(returns)
        except UsageError as error:
            raise UsageError(f"the result of {name_of(function)}() cannot be remembered: {error}") from error
        self._storable = returns


def check_of_message(function: object, name: str) -> None:
    """Raise `UsageError` for what is no function of a message: it would fail for each of them, one by one."""
    if not callable(function):
        raise UsageError(f"{name}={function!r}: a batch needs a function of the message, such as {name}=lambda m: m.id")


def check_uncounted(policy: Policy, where: str) -> None:
    """Refuse to count duplicates in a transaction: a count is a write, and would lock the record until the commit."""
    if policy.count_duplicates:
        raise UsageError(
            f"{where} cannot count duplicates in a record: the count would lock it until the transaction ends, and a "
            "rollback would take it back. Pass count_duplicates=False, and count them with onefold.report.Absorbed"
        )


def nothing() -> None:
    """Do nothing: the handler of a delivery that runs none."""


def _not_a_function(given: object) -> UsageError:
    """Return the error of a call that was made too early: `run("charge", key, charge(4200))`."""
    close = getattr(given, "close", None)
    if isinstance(given, Coroutine) and close is not None:
        # It never runs, and our error says so: Python need not warn, too.
        close()
    return UsageError(
        f"the call is {with_article(type(given).__name__)}, which cannot be called. Pass the function, not its result: "
        "lambda: charge(4200), or functools.partial(charge, 4200). Nothing is recorded"
    )


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


def named_bypass(name: str) -> str:
    """Return the name. Refuse one that a person could not read in the record's history, or that would fill it."""
    if not name.strip() or not name.isprintable() or len(name) > NAME_MAX:
        raise UsageError(
            f"bypass= takes True, or a name of 1 to {NAME_MAX} printable characters, such as a ticket's number. "
            "Nothing ran"
        )
    return name


def moment() -> str:
    """Return the current time as text, for the remark of a resolved record. No decision depends on it."""
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
