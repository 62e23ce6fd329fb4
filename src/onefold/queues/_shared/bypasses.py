"""Find the deliberate second run that a message asks for: one that `onefold redrive --bypass` has sent back.

The header of the message only points to a permission. The permission is a record in the guard's own store, at an
address made of the digest of the message's record and the header: a sender who invents the header, or copies it to
another message, is not obeyed. The permission has a name, under which one message runs to its end once, however often
it is delivered: the name is in the history of the message's record, and then the permission says that it is used up.
Whoever dies in between leaves the first of both.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from onefold import MissingKey, Record
from onefold._concurrency.generators import Flow, run, run_async
from onefold._model import TOKEN_BYTES
from onefold._model.remarks import BEFORE
from onefold.queues._shared.verdict import Never, Verdict
from onefold.queues.keys import Message
from onefold.stores.base import Address

log = logging.getLogger("onefold.queues.redrive")

BYPASS_HEADER: Final = "x-onefold-bypass"

# Reserved: no handler may have this name. With a scope of its own, because the scopes of guards are not known to
# whoever writes a permission.
OPERATION: Final = "onefold-bypass"

# Behind the name in the remark of a permission, so that workers of an earlier version still find the name.
USED_UP: Final = "used up"

GONE: Final = Never(
    "its bypass has run before, and its record is gone: send it back without --bypass if it has to run yet another time"
)

# Runs the handler for these deliveries; returns a verdict for each, or the awaitable of that.
Deliver = Callable[[Sequence[Any]], Any]

_TICKET: Final = re.compile(r"[0-9a-f]{32}")


def permission(digest: str, ticket: str) -> Address:
    """Return where the store keeps the permission to run the record with this digest once more."""
    return Address(OPERATION, OPERATION, f"{digest}.{ticket}")


def asks(message: Message) -> bool:
    """Return whether a message has the header. One whose headers cannot be read has not."""
    try:
        return BYPASS_HEADER in message.headers
    except MissingKey:
        return False


def permission_of(guard: Any, message: Message, address: Address) -> Flow[Record | None]:
    """Return the permission for the bypass that a message asks for; None if it may not have it."""
    ticket = message.headers[BYPASS_HEADER]
    ticket = ticket.decode(errors="replace") if isinstance(ticket, bytes) else str(ticket)
    found: Record | None = None
    if _TICKET.fullmatch(ticket):
        where = permission(address.digest, ticket)
        found = yield partial(guard.read, where.operation, where.key, scope=where.scope)
    if found is None or found.is_expired:
        log.warning(
            "%s [key %s]: it asks for a bypass that nobody has allowed in this store; it is delivered without one",
            address.operation,
            address.digest,
        )
        return None
    return found


def is_used_up(allowed: Record) -> bool:
    """Return whether a message has run to its end under this permission."""
    return USED_UP in allowed.history[1:]


def use_up(guard: Any, allowed: Record) -> Flow[None]:
    """Write that a message has run to its end under this permission. If that fails, its name is in the history."""
    entry = allowed.as_entry(secrets.token_bytes(TOKEN_BYTES))
    used = msgspec.structs.replace(entry, remark=f"{allowed.remark}{BEFORE}{USED_UP}")
    try:
        yield partial(guard.store.claim, used, replacing=allowed)
    except Exception as error:  # noqa: BLE001 - the message is done
        log.warning("a permission to bypass could not be marked as used up: %s", type(error).__name__)


def apart(one: Deliver, many: Deliver, deliveries: Sequence[Any]) -> list[Verdict]:
    """Deliver a batch, and one by one those of its messages that ask for a bypass: a batch has none."""
    return run(_apart(one, many, deliveries))


async def apart_async(one: Deliver, many: Deliver, deliveries: Sequence[Any]) -> list[Verdict]:
    """Deliver a batch with an async client; see `apart`."""
    return await run_async(_apart(one, many, deliveries))


def _apart(one: Deliver, many: Deliver, deliveries: Sequence[Any]) -> Flow[list[Verdict]]:
    asking = [number for number, delivery in enumerate(deliveries) if asks(delivery.message)]
    if not asking:
        return (yield partial(many, deliveries))  # type: ignore[no-any-return]
    rest = [number for number in range(len(deliveries)) if number not in asking]
    verdicts: dict[int, Verdict] = {}
    for numbers, deliver in ((rest, many), (asking, one)):
        found = (yield partial(deliver, [deliveries[number] for number in numbers])) if numbers else []
        verdicts.update(zip(numbers, found, strict=True))
    return [verdicts[number] for number in range(len(deliveries))]
