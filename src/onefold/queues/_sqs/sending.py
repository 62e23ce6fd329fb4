"""Send messages with the key of their sender, or a new one; and a dead letter as a message to send."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from msgspec import UnsetType

from onefold import UsageError
from onefold._concurrency.generators import Flow
from onefold.events import tell_sent
from onefold.queues._shared.sends import confirmed, pauses
from onefold.queues._sqs.consumer import FIFO_SUFFIX, Delivery, Rules, Settings, check_url, name_of
from onefold.queues._sqs.dead_letters import dead_attributes, is_readable, reasons, sent_attributes
from onefold.queues._sqs.requests import ERRORS, is_passing
from onefold.queues.keys import Key, Message, header, with_key
from onefold.stores.base import Address

# A sender survives an outage of most of a minute; each of these is tried several times by the client itself.
SEND_TRIES: Final = 8

# What a deduplication id and the name of a group may be.
ID: Final = re.compile(r"""[A-Za-z0-9!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}""")


class Sending(NamedTuple):
    """A message that is about to be sent, and its key."""

    key: str
    parameters: dict[str, Any]


def sending(
    queue: str,
    body: bytes | str,
    key: Key | UnsetType,
    headers: Mapping[str, Any] | None,
    group: str | None,
    deduplication_id: str | None,
    delay: int,
) -> Sending:
    """Check a message, and return it as SQS takes it."""
    if isinstance(key, UnsetType) and deduplication_id is not None and not header()(Message(b"", headers or {})):
        key = deduplication_id
    chosen, carried = with_key(headers, key)
    check_url(queue, "queue")
    parameters: dict[str, Any] = {
        "QueueUrl": queue,
        "MessageBody": _text(body),
        "MessageAttributes": sent_attributes(carried),
    }
    if delay:
        parameters["DelaySeconds"] = delay
    if group is not None:
        parameters["MessageGroupId"] = group
    if not queue.endswith(FIFO_SUFFIX):
        if deduplication_id is not None:
            raise UsageError("deduplication_id= is for a FIFO queue: nothing was sent")
        return Sending(chosen, parameters)
    if group is None:
        raise UsageError(f"{name_of(queue)} is a FIFO queue, and a message needs group=: nothing was sent")
    return Sending(chosen, parameters | {"MessageDeduplicationId": deduplication_id or id_of(chosen)})


def id_of(key: str) -> str:
    """Return the deduplication id for a key: the key itself, or its digest where SQS does not take it."""
    return key if ID.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()


def _text(body: bytes | str) -> str:
    try:
        found = body if isinstance(body, str) else bytes(body).decode()
    except UnicodeDecodeError:
        found = ""
    if not found or not is_readable(found):
        raise UsageError(
            "the body of a message of SQS is text, not empty, and without control characters: nothing was sent. Write "
            "bytes as base64"
        )
    return found


def sent(client: Any, message: Sending, sleep: Callable[[float], Any]) -> Flow[str]:
    """Send a message until SQS has confirmed it, always with the same key and deduplication id; return the key."""

    def publish() -> Any:
        # Each attempt: the queue may have the message of one that failed.
        tell_sent(name_of(message.parameters["QueueUrl"]), message.key)
        return client.send_message(**message.parameters)

    yield from confirmed(publish, sleep, ERRORS, is_passing, pauses(SEND_TRIES))
    return message.key


def dead(rules: Rules, delivery: Delivery, reason: str, settings: Settings, address: Address | None) -> dict[str, Any]:
    """Return a message as a dead letter: its body, its attributes as far as they fit, and why it is one."""
    queue = str(rules.dead_letter)
    room = settings.bytes_max - len(delivery.body)
    attributes = dead_attributes(delivery.attributes, reasons(delivery, rules.operation, reason, address), room)
    parameters: dict[str, Any] = {
        "QueueUrl": queue,
        "MessageBody": delivery.body.decode("utf-8", "surrogatepass"),
        "MessageAttributes": attributes,
    }
    if queue.endswith(FIFO_SUFFIX):
        parameters["MessageGroupId"] = delivery.group or id_of(rules.operation)
        # One message that is buried twice, because its deletion was lost, is one dead letter.
        parameters["MessageDeduplicationId"] = id_of(f"{rules.operation}.{delivery.position}")
    return parameters
