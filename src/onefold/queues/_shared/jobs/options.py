"""Check the options of a guarded job before a message comes. Pure.

Job frameworks have a word of their own for a job (a task, an actor): errors use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from onefold import Policy, PolicyFields, UsageError
from onefold._checks import did_you_mean
from onefold.queues import keys
from onefold.queues._shared.options import check_options
from onefold.queues.keys import KeyOf

# The fields of a policy, as options of `guarded`.
FIELDS: Final = tuple(PolicyFields.__optional_keys__)

# A job has few arguments: one that is only slightly similar is another one.
ALIKE: Final = 0.8


@contextmanager
def named(word: str, name: str) -> Iterator[None]:
    """Add the job's name to errors: a framework may create it far from the wrong line."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"the {word} {name}: {error}") from error


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse values that no job can have."""
    check_options(given["missing_key"], given["policy"])
    if not isinstance(given.get("require_key", True), bool):
        raise UsageError(f"require_key={given['require_key']!r:.60} has to be True or False")
    for name in given.keys() & FIELDS:
        Policy().replace(**{name: given[name]})
    if not isinstance(given["key"], str):
        keys.checked(given["key"])
    for option, several in (("fingerprint", ("amount", "currency")), ("scope", ("tenant", "region"))):
        chosen = given[option]
        has_names = isinstance(chosen, (list, tuple, str)) and all(isinstance(one, str) for one in chosen)
        if chosen is not None and not has_names and not callable(chosen):
            raise UsageError(
                f"{option}={chosen!r:.60} has to name arguments ({several[0]!r}, or {several!r}), to be a function of "
                "them, or None"
            )


def check_ends(policy: Policy, asks: tuple[type[BaseException], ...], whose: str) -> None:
    """Refuse a policy that treats a framework's own exceptions as an outcome: who asks for a retry is not done."""
    kinds = (*policy.final_errors, *(() if policy.after_crash == "rerun" else policy.ambiguous_errors))
    for kind in kinds:
        if isinstance(kind, type) and any(issubclass(word, kind) for word in asks):
            raise UsageError(
                f"the policy treats every {kind.__name__} as final, and with it {whose}: "
                "name the exceptions that are meant in final_errors= and ambiguous_errors="
            )


def check_names(word: str, option: str, given: Any, run: Callable[..., Any]) -> None:
    """Refuse the name of an argument that the function does not have."""
    names = (given,) if isinstance(given, str) else given
    parameters = inspect.signature(run).parameters
    for name in names if isinstance(names, (list, tuple)) else ():
        if name not in parameters and name != "*":
            raise UsageError(
                f"{option}={name!r}: the {word} has no argument {name!r}{did_you_mean(name, parameters, ALIKE)}"
            )


def key_of(word: str, key: object, run: Callable[..., Any]) -> KeyOf:
    """Return how to find the key of a message: by the name of an argument, or as `onefold.queues.keys` does."""
    if not isinstance(key, str):
        return keys.checked(key)
    name, parameters = key.partition(".")[0], inspect.signature(run).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if name and name not in parameters and not takes_any:
        raise UsageError(f"key={key!r}: the {word} has no argument {name!r}{did_you_mean(name, parameters, ALIKE)}")
    return keys.field(key)
