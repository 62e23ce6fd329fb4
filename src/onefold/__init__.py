"""Make at-least-once delivery safe: effects happen once."""

from onefold._load import load
from onefold._model import (
    KEY_MAX,
    OPERATION_MAX,
    SCOPE_MAX,
    Fresh,
    Outcome,
    Policy,
    Record,
    State,
    done,
    failed,
    not_done,
    rerun,
    unknown,
)
from onefold.current import Current, current
from onefold.durations import FOREVER
from onefold.errors import (
    ClaimLost,
    InProgress,
    InsideItself,
    KeyReused,
    MissingKey,
    NotInTransaction,
    OnefoldError,
    OnHold,
    OutcomeUnknown,
    ProbeFailed,
    RememberedFailure,
    ResultNotKept,
    ResultUnreadable,
    StoreUnavailable,
    UsageError,
)
from onefold.events import Event, subscribe
from onefold.guard import Guard
from onefold.guard_async import AsyncGuard
from onefold.transactions import TX, Column

__version__ = "0.1.0"

__all__ = [
    "AsyncGuard",
    "ClaimLost",
    "Column",
    "Current",
    "Event",
    "FOREVER",
    "Fresh",
    "Guard",
    "InProgress",
    "InsideItself",
    "KEY_MAX",
    "KeyReused",
    "MissingKey",
    "NotInTransaction",
    "OPERATION_MAX",
    "OnHold",
    "OnefoldError",
    "Outcome",
    "OutcomeUnknown",
    "Policy",
    "ProbeFailed",
    "Record",
    "RememberedFailure",
    "ResultNotKept",
    "ResultUnreadable",
    "SCOPE_MAX",
    "State",
    "StoreUnavailable",
    "TX",
    "UsageError",
    "current",
    "done",
    "failed",
    "load",
    "not_done",
    "rerun",
    "subscribe",
    "unknown",
]
