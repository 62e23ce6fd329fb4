"""Find the deliberate second run that a message asks for: one that `onefold redrive --bypass` has sent back.

The header of the message only points to a permission. The permission is a record in the guard's own store, at an
address made of the digest of the message's record and the header: a sender who invents the header, or copies it to
another message, is not obeyed. The permission has a name, under which one message runs to its end once, however often
it is delivered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from onefold import MissingKey
from onefold._concurrency.generators import Flow, run, run_async
from onefold.queues._shared.verdict import Verdict
from onefold.queues.keys import Message
from onefold.stores.base import Address

log = logging.getLogger("onefold.queues.redrive")

BYPASS_HEADER: Final = "x-onefold-bypass"

# Reserved: no handler may have this name. With a scope of its own, because the scopes of guards are not known to
# whoever writes a permission.
OPERATION: Final = "onefold-bypass"

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


def bypass_of(guard: Any, message: Message, address: Address) -> Flow[bool | str]:
    """Return the name of the bypass that a message asks for, and may have; False if it may not."""
    ticket = message.headers[BYPASS_HEADER]
    ticket = ticket.decode(errors="replace") if isinstance(ticket, bytes) else str(ticket)
    found = None
    if _TICKET.fullmatch(ticket):
        where = permission(address.digest, ticket)
        found = yield partial(guard.read, where.operation, where.key, scope=where.scope)
    if found is None or found.is_expired:
        log.warning(
            "%s [key %s]: it asks for a bypass that nobody has allowed in this store; it is delivered without one",
            address.operation,
            address.digest,
        )
        return False
    return str(found.latest_remark)


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
