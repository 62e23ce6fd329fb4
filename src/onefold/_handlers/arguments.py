"""Turn the arguments of a decorated function into a key, a scope and a fingerprint. No store, no flow."""

from __future__ import annotations

import functools
import operator
import typing
import uuid
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from onefold import keys
from onefold._checks import STANDS_FOR, did_you_mean
from onefold._fingerprint import of_parts, of_whole, recipe_of_parts, recipe_of_whole
from onefold._fingerprint.canonical import has_no_form
from onefold._handlers.innermost import annotated
from onefold._model import Address, DeliveryRequest
from onefold._model.policy import Policy
from onefold.errors import MissingKey, UsageError

if TYPE_CHECKING:
    import inspect

# The additional ways to call a decorated function.
OTHER_WAYS: Final = ("outcome", "bypass")

ALL: Final = "*"

KeyArgument = str | Sequence[str] | Callable[..., Any]
ScopeOf = str | Sequence[str] | Callable[..., Any] | None
# A guard's own: one for all calls, or a function of nothing.
GuardScope = str | Callable[[], str | None] | None
FingerprintOf = str | Sequence[str] | Callable[..., Any] | None

# The parameter that receives the transaction, by its name.
TX_NAME: Final = "tx"

# Never part of a payload: the object that a method belongs to, and an injected transaction.
NOT_PAYLOAD: Final = frozenset({"self", "cls", "tx"})


class GuardedFunction:
    """One decorated function, and how its arguments are read."""

    def __init__(
        self,
        function: Callable[..., Any],
        operation: str,
        key: KeyArgument,
        scope: ScopeOf,
        fingerprint: FingerprintOf,
        *,
        guards_scope: GuardScope = None,
        injects_tx: bool = False,
    ) -> None:
        # Imported here, where a function is decorated: it is the heaviest import of all.
        import inspect

        self.function = function
        self.name = name_of(function)
        self.operation = keys.checked_operation(operation)
        self.signature = inspect.signature(function)
        if injects_tx:
            self.signature = self._without_tx()
        parameters = self.signature.parameters.values()
        self._names = tuple(self.signature.parameters)
        self._defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        self._simple = all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
        self._tails = self._defaults_after() if self._simple else ()
        # How many arguments a call has that passes all of them by position; no call has -1.
        self._all_by_position = len(self._names) if self._simple else -1
        self._key_names = () if callable(key) else self._checked(key, "key")
        self._key = key if callable(key) else None
        self._scope = scope if callable(scope) else None
        self._scope_names = () if scope is None or callable(scope) else self._checked(scope, "scope", advice_on(scope))
        self._guards_scope = guards_scope if callable(guards_scope) else None
        # The scope of all calls; None if it is made for each.
        self._one_scope = None if scope is not None or callable(guards_scope) else keys.checked_scope(guards_scope)
        self._payload_names, self._payload = self._payload_of(fingerprint)
        # None if the key is made of several arguments, or by a function.
        self._key_at = self._names.index(self._key_names[0]) if len(self._key_names) == 1 else None
        self._payload_from = _picker([self._names.index(name) for name in self._payload_names])
        self._recipe = (
            recipe_of_parts(self._payload_names) if self._payload is None else recipe_of_whole(full_name(self._payload))
        )
        self._no_payload = fingerprint is None

    def _without_tx(self) -> inspect.Signature:
        """Return the signature as callers see it: the guard passes the transaction."""
        parameters = dict(self.signature.parameters)
        found = parameters.get(TX_NAME)
        # If it can be passed by position it must be: the caller's arguments may follow it.
        self._tx_at = None if found is None or found.kind is found.KEYWORD_ONLY else list(parameters).index(TX_NAME)
        if parameters.pop(TX_NAME, None) is None:
            raise UsageError(f"{self.name}{self.signature} gets its transaction as an argument: add `*, tx`")
        return self.signature.replace(parameters=list(parameters.values()))

    def with_tx(self, args: tuple[Any, ...], kwargs: dict[str, Any], transaction: Any) -> Callable[[], Any]:
        """Return the call with its transaction, wherever it is in the signature.

        `tx` is read when the call is made: a retried transaction may be on another connection.
        """
        function, at = self.function, self._tx_at
        if at is None or len(args) < at:
            return lambda: function(*args, **kwargs, tx=transaction.tx)
        return lambda: function(*args[:at], transaction.tx, *args[at:], **kwargs)

    def request(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool | str) -> DeliveryRequest:
        """Return the request of a call: its scope and key, checked, and the fingerprint of its payload."""
        bound = args if len(args) == self._all_by_position and not kwargs else self._bind(args, kwargs)
        scope = self._scope_of(bound, args, kwargs) if self._one_scope is None else self._one_scope
        if self._key is not None:
            key = keys.checked_key(self._key(*args, **kwargs), self.operation)
        else:
            try:
                key = keys.checked_key(self._joined_key(bound) if self._key_at is None else bound[self._key_at])
            except MissingKey as error:
                raise self._without_key(error) from None
        operation = self.operation
        address = Address(scope, operation, key)
        if self._no_payload:
            return DeliveryRequest(address, None, bypass)
        parts = (scope, operation, key)
        if self._payload is not None:
            return DeliveryRequest(address, self._computed(parts, self._payload(*args, **kwargs)), bypass)
        try:
            return DeliveryRequest(address, of_parts(self._recipe, parts, self._payload_from(bound)), bypass)
        except Exception as error:
            mistake = self._undigestible(bound)
            if mistake is None:
                raise
            raise mistake from error

    def _computed(self, address: tuple[str, str, str], payload: object) -> bytes:
        """Return the fingerprint of the payload that the user's own function computed."""
        try:
            return of_whole(self._recipe, address, payload)
        except Exception as error:
            if not has_no_form(payload):
                raise
            raise UsageError(
                f"{self.operation}: what fingerprint= returned for the arguments of {self.name}() cannot be "
                f"fingerprinted ({error}). Nothing ran"
            ) from error

    def _scope_of(self, bound: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the scope of one call, checked."""
        if self._scope is not None:
            return named_scope(self._scope(*args, **kwargs), f"{self.operation}: scope= returned")
        if not self._scope_names:
            return self._scope_of_guard()
        of = f"{self.operation}: {' and '.join(self._scope_names)} of {self.name}() is the scope, and is"
        found = [named_scope(bound[self._names.index(name)], of) for name in self._scope_names]
        if len(found) == 1:
            return found[0]
        return keys.checked_scope(keys.joined(dict(zip(self._scope_names, found, strict=True))))

    def _scope_of_guard(self) -> str:
        found = None if self._guards_scope is None else self._guards_scope()
        return named_scope(found, "the guard's scope= returned")

    def _joined_key(self, bound: Sequence[Any]) -> str:
        return keys.joined({name: bound[self._names.index(name)] for name in self._key_names})

    def _without_key(self, error: MissingKey) -> MissingKey:
        named = MissingKey(f"{self.operation}: {' and '.join(self._key_names)} of {self.name}(): {error}")
        named.operation = self.operation
        return named

    def _undigestible(self, bound: Sequence[Any]) -> UsageError | None:
        """Return the error about an argument that cannot be fingerprinted; None if all of them can."""
        found = keys.undigestible(dict(zip(self._payload_names, self._payload_from(bound), strict=True)))
        if found is None:
            return None
        name, why = found
        return UsageError(
            f"{self.operation}: the argument {name!r} of {self.name}() cannot be fingerprinted "
            f"({why}). Nothing ran. Name the arguments that are the payload with fingerprint=(...), "
            "or opt out with fingerprint=None"
        )

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the arguments in signature order, with defaults; a wrong call raises the usual TypeError."""
        if self._simple and len(args) <= len(self._names):
            tail = None if kwargs else self._tails[len(args)]
            if tail is not None:
                return args + tail
            rest = self._names[len(args) :]
            named = self._defaults | kwargs
            if kwargs.keys() <= set(rest) <= named.keys():
                return [*args, *(named[name] for name in rest)]
        try:
            whole = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None
        whole.apply_defaults()
        return [whole.arguments[name] for name in self._names]

    def _defaults_after(self) -> tuple[tuple[Any, ...] | None, ...]:
        """Return, for each number of arguments, the defaults of all that follow; None if one of those has none."""
        names, found = self._names, self._defaults
        return tuple(
            tuple(found[name] for name in names[count:]) if found.keys() >= set(names[count:]) else None
            for count in range(len(names) + 1)
        )

    def _payload_of(self, fingerprint: FingerprintOf) -> tuple[tuple[str, ...], Callable[..., Any] | None]:
        if callable(fingerprint):
            return (), fingerprint
        if fingerprint is None:
            return (), None
        if fingerprint == ALL:
            hidden = NOT_PAYLOAD.union(self._key_names)
            return tuple(name for name in self._names if name not in hidden), None
        return self._checked(fingerprint, "fingerprint"), None

    def _checked(self, names: str | Sequence[str], argument: str, advice: str = "") -> tuple[str, ...]:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if not wanted:
            raise UsageError(f"{argument}= names no argument of {self.name}()")
        for name in wanted:
            if name not in self._names:
                near = did_you_mean(name, self._names)
                more = f"{'' if near else '.'} {advice}" if advice else ""
                raise UsageError(f"{argument}={name!r} is not an argument of {self.name}{self.signature}{near}{more}")
        return wanted


def _picker(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks the arguments at these positions, however few they are."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def check_function(function: Callable[..., Any], *, is_async: bool, guard: str) -> None:
    """Refuse a function that cannot be guarded, when decorating."""
    import inspect

    name = name_of(function)
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise UsageError(f"put @{kind} above the guard's decorator, so that it is applied last: {name}")
    if not callable(function):
        raise UsageError(f"{function!r} is not a function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{name}() is a generator, and a stream has no result to remember: return a value instead")
    if inspect.iscoroutinefunction(function) and not is_async:
        raise UsageError(f"{name}() is async, and {guard} is not: use an AsyncGuard")
    if not inspect.iscoroutinefunction(function) and is_async:
        raise UsageError(f"{name}() is not async, and {guard} awaits its handlers: use a Guard, or write async def")


def check_probe(probe: object, *, is_async: bool) -> None:
    """Refuse an `after_crash` that a guard of this kind (sync or async) cannot call."""
    if not is_async and callable(probe) and _is_async(probe):
        raise UsageError(
            f"after_crash={name_of(probe)}: this probe is async, and a Guard is not: nobody would await its answer. "
            "Write it with def, or use an AsyncGuard"
        )


def _is_async(call: Callable[..., Any]) -> bool:
    """Return whether calling it gives a coroutine, as far as can be seen; also of a partial, method or object."""
    import inspect

    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def named_scope(found: object, of: str) -> str:
    """Return the scope that was found; refuse none, because two tenants must not share a record."""
    if isinstance(found, (int, uuid.UUID)) and not isinstance(found, bool):
        found = str(found)
    if not found:
        raise UsageError(f"{of} {found!r}: it has to name a tenant or caller")
    return keys.checked_scope(found)


def advice_on(scope: str | Sequence[str]) -> str:
    """Return the advice for a scope that names no argument: it may be meant as one for all calls."""
    return f"One scope for all calls belongs to the guard: Guard(..., scope={scope!r})" if scope else ""


class Method:
    """A decorated method: bound to its object together with its other ways to be called."""

    def __init__(self, guarded: Callable[..., Any]) -> None:
        functools.update_wrapper(self, guarded)
        self._guarded = guarded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # A partial, because introspection treats it as a function: its signature, and whether it has to be awaited.
        bound = functools.partial(self._guarded, instance)
        functools.update_wrapper(bound, self._guarded)
        # These describe the function that still has `self`.
        del bound.__dict__["__wrapped__"], bound.__dict__["__signature__"]
        for way in OTHER_WAYS:
            setattr(bound, way, functools.partial(getattr(self._guarded, way), instance))
        return bound


def as_written(
    guarded: Any, call: GuardedFunction, policy: Policy, **other_ways: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function as a function, for frameworks that inspect it, and a method as one that binds."""
    guarded.__signature__ = call.signature
    guarded.policy = policy
    for name, way in other_ways.items():
        setattr(guarded, name, way)
    first = next(iter(call.signature.parameters), "")
    written: Callable[..., Any] = Method(guarded) if first in ("self", "cls") else guarded
    return written


def returns_of(function: Callable[..., Any]) -> Any:
    """Return the annotated return type of a function; `Any` without an annotation. Nothing else has to be resolvable.

    Raises `NameError` for an annotation whose names do not exist (yet).
    """
    # A plain function, as it is passed to `run` with each delivery, is not searched for another one inside.
    if type(function) is not FunctionType or function.__dict__:
        # For a bound method, too: each object has its own, but their function is one.
        function = annotated(function)
    annotations = getattr(function, "__annotations__", None)
    # An object may have anything there: an AsyncMock has nothing.
    hint = annotations.get("return", Any) if isinstance(annotations, dict) else Any
    if hint is Any:
        return Any
    if isinstance(hint, str) and hint != "None":
        hint = _evaluated(function, hint)
    return type(None) if hint in (None, "None", typing.NoReturn, typing.Never) else hint


# Resolved string annotations: resolving one takes longer than a whole delivery.
_meanings: weakref.WeakKeyDictionary[Callable[..., Any], Any] = weakref.WeakKeyDictionary()


def _evaluated(function: Callable[..., Any], hint: str) -> Any:
    if function in _meanings:
        return _meanings[function]

    def annotated() -> None: ...

    annotated.__annotations__ = {"return": hint}
    names = getattr(function, "__globals__", {})
    meaning = typing.get_type_hints(annotated, names, include_extras=True)["return"]
    if isinstance(function, FunctionType):
        _meanings[function] = meaning
    return meaning


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages; partials and objects have none of their own."""
    function = annotated(function)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is written, for messages: `app.py:12`; empty if that is not known."""
    code = getattr(annotated(getattr(function, STANDS_FOR, function)), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def full_name(function: Callable[..., Any]) -> str:
    """Return a name that distinguishes two functions."""
    return f"{getattr(function, '__module__', '')}.{name_of(function)}"
