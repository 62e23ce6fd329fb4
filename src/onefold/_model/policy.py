"""Define the policy of a delivery, and check it when it is created."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypedDict, Unpack, get_args

from onefold._checks import (
    at_least,
    did_you_mean,
    error_classes,
    error_kinds,
    finite,
    one_of,
    positive,
    probe,
    true_or_false,
)
from onefold._model import ProbeAnswer
from onefold.durations import Duration, seconds
from onefold.errors import OutcomeUnknown, UsageError

# The values of each field are listed only here: onefold.yaml and the simulator derive theirs.
AfterCrashWord = Literal["rerun", "hold", "skip"]
StoreDown = Literal["refuse", "run"]
Mode = Literal["claim", "seen"]

# A probe is called with what `current()` returns in the handler.
Probe = Callable[[Any], ProbeAnswer | Awaitable[ProbeAnswer]]
AfterCrash = AfterCrashWord | Probe
AFTER_CRASH: Final[tuple[AfterCrashWord, ...]] = get_args(AfterCrashWord)

# A class, or the dotted name of one, so that a client library need not be imported to be named.
ErrorKinds = tuple[type[BaseException] | str, ...]

# After these errors nobody knows whether the other side did it. The names are those of the most common clients.
TIMEOUTS_AND_CONNECTION_ERRORS: Final[ErrorKinds] = (
    TimeoutError,
    ConnectionError,
    OutcomeUnknown,
    "httpx.TransportError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "urllib3.exceptions.HTTPError",
    "aiohttp.client_exceptions.ClientConnectionError",
    "botocore.exceptions.HTTPClientError",
)


class PolicyFields(TypedDict, total=False):
    """The fields of a policy, which are keywords of every call, decorator and adapter, too."""

    keep: Duration
    lease: Duration
    wait: Duration
    after_crash: AfterCrash
    rerun_within: Duration | None
    max_attempts: int
    ambiguous_errors: Sequence[type[BaseException] | str]
    final_errors: Sequence[type[Exception]]
    store_down: StoreDown
    max_result_bytes: int
    keep_result: bool
    keep_error_text: bool
    cancel_when_lost: bool
    count_duplicates: bool
    mode: Mode


USUAL: Final[PolicyFields] = {
    "keep": "24h",
    "lease": "30s",
    "wait": 0.0,
    "after_crash": "rerun",
    "rerun_within": None,
    "max_attempts": 5,
    "ambiguous_errors": TIMEOUTS_AND_CONNECTION_ERRORS,
    "final_errors": (),
    "store_down": "refuse",
    "max_result_bytes": 1_048_576,
    "keep_result": True,
    "keep_error_text": False,
    "cancel_when_lost": False,
    "count_duplicates": False,
    "mode": "claim",
}

# Two arguments that are easily confused: a caller of `run` has the payload in hand, a decorator finds it by name.
_INSTEAD: Final = {
    "fingerprint": ("payload", "Pass the payload itself as payload="),
    "payload": ("fingerprint", "Name the arguments that are the payload with fingerprint="),
}


def check_fields(fields: Mapping[str, object], of: Callable[..., Any] | None = None) -> None:
    """Refuse a keyword that is not a field of a policy. `of` is the function that takes them, besides its own."""
    wrong = next((name for name in fields if name not in USUAL), None)
    if wrong is None:
        return
    if of is None:
        raise UsageError(f"{wrong}= is not a field of a policy{did_you_mean(wrong, USUAL)}")
    of = getattr(of, "__wrapped__", of)
    own = of.__code__.co_varnames[: of.__code__.co_argcount + of.__code__.co_kwonlyargcount]
    instead, advice = _INSTEAD.get(wrong, ("", ""))
    near = f". {advice}" if instead in own else did_you_mean(wrong, (*own, *USUAL))
    called = of.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    raise UsageError(f"{wrong}= is neither an argument of {called}() nor a field of a policy{near}")


class Policy:
    """How deliveries are treated: frozen data, checked when it is created. `docs/concepts.md` explains each field."""

    # Written by hand rather than as a dataclass: it takes durations as strings, holds them as seconds, and importing
    # dataclasses alone would cost a third of the import of onefold.
    __slots__ = (
        "after_crash",
        "ambiguous_errors",
        "cancel_when_lost",
        "count_duplicates",
        "final_errors",
        "keep",
        "keep_error_text",
        "keep_result",
        "lease",
        "max_attempts",
        "max_result_bytes",
        "mode",
        "rerun_within",
        "store_down",
        "wait",
    )

    keep: float
    lease: float
    wait: float
    after_crash: AfterCrash
    rerun_within: float
    max_attempts: int
    ambiguous_errors: ErrorKinds
    final_errors: tuple[type[Exception], ...]
    store_down: StoreDown
    max_result_bytes: int
    keep_result: bool
    keep_error_text: bool
    cancel_when_lost: bool
    count_duplicates: bool
    mode: Mode

    def __init__(self, **fields: Unpack[PolicyFields]) -> None:
        check_fields(fields)
        self._put({**USUAL, **fields})

    def _put(self, fields: Mapping[str, Any]) -> None:
        put = partial(object.__setattr__, self)
        put("keep", positive(fields["keep"], "keep"))
        put("lease", finite(positive(fields["lease"], "lease"), "lease"))
        put("wait", finite(seconds(fields["wait"], "wait"), "wait"))
        after_crash, within, mode = fields["after_crash"], fields["rerun_within"], fields["mode"]
        check = probe if callable(after_crash) else partial(one_of, allowed=AFTER_CRASH)
        put("after_crash", check(after_crash, name="after_crash"))
        put("rerun_within", math.inf if within is None else positive(within, "rerun_within"))
        put("max_attempts", at_least(1, fields["max_attempts"], "max_attempts"))
        put("ambiguous_errors", error_kinds(fields["ambiguous_errors"], "ambiguous_errors"))
        put("final_errors", error_classes(fields["final_errors"], "final_errors"))
        put("store_down", one_of(fields["store_down"], get_args(StoreDown), "store_down"))
        put("max_result_bytes", at_least(0, fields["max_result_bytes"], "max_result_bytes"))
        for name in ("keep_result", "keep_error_text", "cancel_when_lost", "count_duplicates"):
            put(name, true_or_false(fields[name], name))
        put("mode", one_of(mode, get_args(Mode), "mode"))
        if within is not None and after_crash != "rerun":
            raise UsageError('rerun_within= limits after_crash="rerun"; with another after_crash it has no meaning')
        if mode == "seen" and after_crash != "rerun":
            raise UsageError('mode="seen" has no claim that a crash could leave behind: leave after_crash= out')

    def replace(self, **changes: Unpack[PolicyFields]) -> Policy:
        """Return the policy with some fields changed: `guard.policy.replace(keep="7d")`."""
        check_fields(changes)
        return _policy_of({**self._fields(), **changes})

    def _fields(self) -> dict[str, Any]:
        """Return the arguments that create this policy."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"rerun_within": None} if self.rerun_within == math.inf else fields

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Policy is frozen: write policy.replace({name}={value!r})")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(tuple(self._fields().values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _policy_of, (self._fields(),)

    def __repr__(self) -> str:
        usual = Policy()
        changed = (name for name in self.__slots__ if getattr(self, name) != getattr(usual, name))
        return f"Policy({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


def _policy_of(fields: Mapping[str, Any]) -> Policy:
    found = Policy.__new__(Policy)
    found._put(fields)
    return found
