"""Events: one frozen class, and a callable for each listener.

`Guard(on_event=fn)` listens to one guard, `onefold.subscribe(fn)` to all guards of the process. A listener is called in
the thread or task of the delivery, so it should be quick; an exception in it is logged, never raised.

What a producer sends is no delivery yet, and has listeners of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from onefold._model import Address


class Kind(enum.StrEnum):
    """The kinds of events."""

    STARTED = "started"
    FINISHED = "finished"
    REPLAYED = "replayed"
    REFUSED = "refused"
    WAITED = "waited"
    TAKEN_OVER = "taken_over"
    BYPASSED = "bypassed"
    FAILED = "failed"
    RELEASED = "released"
    LEFT = "left"
    HELD = "held"
    SKIPPED = "skipped"
    PROBED = "probed"
    LOST = "lost"
    OMITTED = "omitted"
    NOT_RECORDED = "not_recorded"
    UNPROTECTED = "unprotected"
    STORE_FAILED = "store_failed"
    # The heartbeat could not renew a claim, or does not know yet whether it was renewed. The lease is not over yet.
    NOT_RENEWED = "not_renewed"
    RESOLVED = "resolved"
    FORGOTTEN = "forgotten"
    # Emitted by queue adapters: the message went to the dead letters, or was dropped in its broker's way.
    BURIED = "buried"
    # Emitted by Kafka adapters: a partition assigned to us has messages, and is not read. It has no key.
    UNREAD = "unread"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to one address. It never holds a body; use `digest` in logs."""

    kind: Kind
    address: Address
    attempt: int = 0
    # An error's name, a reason, who resolved it: short, for people.
    detail: str = ""

    def __repr__(self) -> str:
        # For logs: the key itself is not in it.
        return f"<{self.kind} {self.operation} [key {self.digest}] attempt {self.attempt} {self.detail}>"

    @property
    def operation(self) -> str:
        return self.address.operation

    @property
    def digest(self) -> str:
        return self.address.digest


Listener = Callable[[Event], object]

_process: list[Listener] = []

# The same list, for whoever has no time to tell nobody: `if tell.own or LISTENERS: tell(...)`.
LISTENERS: Final = _process


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every event of every guard in this process; call the returned function to stop."""
    _process.append(listener)

    def unsubscribe() -> None:
        if listener in _process:
            _process.remove(listener)

    return unsubscribe


# Operations are few; a name that is built anew for each delivery must fill neither the memory nor the log.
WARNED_MAX: Final = 1_000
_warned: set[tuple[str, str]] = set()


class Teller:
    """Notifies the listeners of one guard and of the process. Costs next to nothing without listeners."""

    __slots__ = ("own",)

    def __init__(self, on_event: Listener | Iterable[Listener] = ()) -> None:
        self.own: tuple[Listener, ...] = (on_event,) if callable(on_event) else tuple(on_event)

    def __call__(self, kind: Kind, address: Address, attempt: int = 0, detail: str = "") -> None:
        if not self.own and not _process:
            return
        event = Event(kind=kind, address=address, attempt=attempt, detail=detail)
        for listener in (*self.own, *_process):
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 - a listener must not turn an effect that happened into a failure
                _log_failure(event, error)

    def warn(self, where: Address | str, text: str, *, about: str = "") -> None:
        """Warn the author of the handler, once per operation and subject, of what will surprise a duplicate."""
        operation = where if isinstance(where, str) else where.operation
        if (operation, about) in _warned or len(_warned) == WARNED_MAX:
            return
        _warned.add((operation, about))
        _log_warning(operation, where, text)

    def warn_each(self, address: Address, text: str) -> None:
        """Log a warning about one delivery, each time: somebody has to look at every one of them."""
        _log_warning(address.operation, address, text)


_to_all: Final = Teller()


def tell(kind: Kind, address: Address, *, detail: str = "") -> None:
    """Emit an event to the listeners of the process; for adapters, about a message outside its guard."""
    _to_all(kind, address, detail=detail)


class Sent(NamedTuple):
    """A message that a sender of `onefold.queues` hands to its broker, or hands to it again."""

    # A queue, an exchange, a topic, or the name of a task.
    hop: str
    key: str


SentListener = Callable[[Sent], object]

_of_sends: list[SentListener] = []


def subscribe_to_sends(listener: SentListener) -> Callable[[], None]:
    """Call `listener` with every message that `send` sends in this process; call the returned function to stop."""
    _of_sends.append(listener)

    def unsubscribe() -> None:
        if listener in _of_sends:
            _of_sends.remove(listener)

    return unsubscribe


def tell_sent(hop: str, key: str) -> None:
    """Notify the listeners of a message that is sent; for senders. No error of theirs keeps it from being sent."""
    for listener in tuple(_of_sends):
        try:
            listener(Sent(hop, key))
        except Exception as error:
            import logging

            logging.getLogger("onefold").error("a listener failed on a message to %s", hop, exc_info=error)


def _log_warning(operation: str, where: Address | str, text: str) -> None:
    import logging

    found_at = "" if isinstance(where, str) else f" [key {where.digest}]"
    logging.getLogger("onefold").warning("%s%s: %s", operation, found_at, text)


def _log_failure(event: Event, error: Exception) -> None:
    import logging

    text = "a listener failed on %s of %s [key %s]"
    logging.getLogger("onefold").error(text, event.kind, event.operation, event.digest, exc_info=error)
