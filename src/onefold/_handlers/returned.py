"""Tell a handler's result from an object whose code has not run yet.

A generator or coroutine object that a call returns says little by itself. If it is the handler's own, because the
handler is a generator function or an async one, nothing ran. If an ordinary function has returned it, that function has
run, and its effect with it.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import AsyncGeneratorType, CodeType, CoroutineType, GeneratorType
from typing import Any, Final

from onefold._handlers.innermost import innermost
from onefold.errors import OutcomeUnknown, UsageError

SUSPENDED: Final = (CoroutineType, GeneratorType, AsyncGeneratorType)


class NotAsync(UsageError, OutcomeUnknown):
    """A handler has run and returned a coroutine that nobody awaits: how much it has done is unknown."""


def mistake(call: Callable[..., Any], value: Any, *, is_async: bool) -> UsageError | None:
    """Return the error for a value of `SUSPENDED` that a call returned; None if it is a result like any other.

    `is_async`: it is the result of a coroutine, which has run.
    """
    own = not is_async and is_own(call, value)
    if isinstance(value, CoroutineType):
        name = value.__qualname__
        value.close()
        if own:
            return UsageError("the handler is async, and this guard is not: nothing ran. Use an AsyncGuard")
        return NotAsync(
            f"the handler ran, and returned the coroutine {name}(), which nobody awaits: the handler's own work is "
            "done, the coroutine's is not, so the outcome is unknown. Await it in the handler"
        )
    if not own:
        return None
    if isinstance(value, GeneratorType):
        value.close()
    return UsageError("the handler is a generator: nothing ran. Return a value instead of yielding")


def mistaken_probe(value: Any) -> UsageError:
    """Return the error for a probe that returned one of `SUSPENDED`: it has not answered."""
    name = value.__qualname__
    if isinstance(value, CoroutineType):
        value.close()
        return UsageError(
            f"the probe (after_crash=) has returned the coroutine {name}(), which nobody awaits, and no answer. Return "
            "its result, or use an AsyncGuard, whose probe may be async"
        )
    return UsageError(f"the probe (after_crash=) has returned the generator {name}(), and no answer")


def is_own(call: Callable[..., Any], value: Any) -> bool:
    """Return whether this object is the handler itself, not one line of which has run."""
    if _has_begun(value):
        return False
    function = innermost(call)
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and (_code_of(value) is code or _only_calls(function, value))


def _has_begun(value: Any) -> bool:
    if isinstance(value, GeneratorType):
        return inspect.getgeneratorstate(value) != inspect.GEN_CREATED
    return isinstance(value, CoroutineType) and inspect.getcoroutinestate(value) != inspect.CORO_CREATED


def _code_of(value: Any) -> CodeType:
    for name in ("gi_code", "cr_code", "ag_code"):
        if hasattr(value, name):
            return getattr(value, name)  # type: ignore[no-any-return]
    raise AssertionError(f"{type(value)} is not one of SUSPENDED")


def _only_calls(function: Any, value: Any) -> bool:
    """Return whether it is a lambda that only calls what has made the value: `lambda: stream(order)`."""
    code: CodeType = function.__code__
    made_by = _code_of(value).co_name
    if code.co_name != "<lambda>" or made_by not in (*code.co_names, *code.co_freevars):
        return False
    names = [one.opname for one in dis.get_instructions(code)]
    return sum(name.startswith("CALL") and not name.startswith("CALL_INTRINSIC") for name in names) == 1
