"""Make at-least-once delivery safe: effects happen once."""

from onefold._load import load, load_async
from onefold._model import (
    Done,
    Failed,
    Fresh,
    NotDone,
    Outcome,
    Record,
    Rerun,
    State,
    Unknown,
)
from onefold._model.policy import Policy, PolicyFields
from onefold.codecs import Codec
from onefold.current import Current, current
from onefold.durations import FOREVER
from onefold.errors import (
    ClaimLost,
    Held,
    InProgress,
    InsideItself,
    KeyReused,
    MissingKey,
    NotInTransaction,
    OnefoldError,
    OutcomeUnknown,
    ProbeFailed,
    RememberedFailure,
    ResultNotKept,
    ResultUnreadable,
    StoreUnavailable,
    UsageError,
)
from onefold.events import Event, Kind, subscribe
from onefold.guard import Guard
from onefold.guard_async import AsyncGuard
from onefold.stores.base import AsyncStore, Store
from onefold.stores.hand_made import HandMadeTable
from onefold.transactions import TX, RecordColumn

__version__ = "0.2.0"

__all__ = [
    "AsyncGuard",
    "AsyncStore",
    "ClaimLost",
    "Codec",
    "Current",
    "Done",
    "Event",
    "FOREVER",
    "Failed",
    "Fresh",
    "Guard",
    "HandMadeTable",
    "Held",
    "InProgress",
    "InsideItself",
    "KeyReused",
    "Kind",
    "MissingKey",
    "NotDone",
    "NotInTransaction",
    "OnefoldError",
    "Outcome",
    "OutcomeUnknown",
    "Policy",
    "PolicyFields",
    "ProbeFailed",
    "Record",
    "RecordColumn",
    "RememberedFailure",
    "Rerun",
    "ResultNotKept",
    "ResultUnreadable",
    "State",
    "Store",
    "StoreUnavailable",
    "TX",
    "Unknown",
    "UsageError",
    "current",
    "load",
    "load_async",
    "subscribe",
]
