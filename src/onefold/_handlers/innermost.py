"""Find the function inside partials, methods, decorators and callable objects.

Only attributes that really exist are followed: an object that answers to every name, such as a `Mock` or a proxy of a
remote service, has no end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from types import FunctionType, MethodType, WrapperDescriptorType
from typing import Any, Final

# More layers than any function has around it; one that wraps itself has no end.
DEPTH_MAX: Final = 100


def innermost(call: Any) -> Any:
    """Return the function whose code runs; a class, or anything not written in Python, unchanged."""
    return _followed(call, lambda one: _inside(one) or _method_of(one))


def annotated(call: Any) -> Any:
    """Return the function that has the annotations, or an object that has some itself."""
    found = _followed(call, _inside)
    return found if _has(found, "__annotations__") else getattr(type(found), "__call__", found)  # noqa: B004 - its method


def _followed(call: Any, inside: Callable[[Any], Any]) -> Any:
    for _ in range(DEPTH_MAX):
        inner = inside(call)
        if inner is None:
            break
        call = inner
    return call


def _inside(call: Any) -> Any:
    """Return the function inside a partial, a method or a decorator; None if it is none of them."""
    # Not `isinstance`, which the object itself can answer, as a `Mock` with a spec does.
    kind = type(call)
    if issubclass(kind, (partial, partialmethod)):
        return call.func
    if issubclass(kind, MethodType):
        return call.__func__
    return getattr(call, "__wrapped__", None) if _has(call, "__wrapped__") else None


def _method_of(call: Any) -> Any:
    """Return the method that runs when an object is called; None if it is a function or a class."""
    if issubclass(type(call), (FunctionType, type)):
        return None
    method = getattr(type(call), "__call__", None)  # noqa: B004 - its method
    return None if isinstance(method, WrapperDescriptorType) else method


def _has(call: Any, name: str) -> bool:
    """Return whether it has this attribute, without computing it."""
    try:
        own = object.__getattribute__(call, "__dict__")
    except AttributeError:
        own = {}
    return name in own or any(name in vars(parent) for parent in type(call).__mro__)
