"""The events that Lambda calls a function with: messages of SQS, and the fields of a direct invocation. Pure."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from onefold import UsageError
from onefold.queues._sqs.consumer import Delivery, name_of
from onefold.queues._sqs.dead_letters import Attribute, headers_of
from onefold.queues.keys import KEY_HEADER

SOURCE: Final = "aws:sqs"

EventKey = Callable[[Any, Any], object]


def records_of(event: Any) -> list[Mapping[str, Any]]:
    """Return the messages of an event. Raises `UsageError` if it is something else."""
    records = event.get("Records") if isinstance(event, Mapping) else None
    if not isinstance(records, list) or any(one.get("eventSource") != SOURCE for one in records):
        raise UsageError(
            "this event is not one of SQS: guarded_messages() is for a function that an event source mapping calls "
            "with messages. For any other event there is guarded_invocation()"
        )
    return records


def delivery_of(record: Mapping[str, Any]) -> Delivery:
    """Return a message of an event as handlers see it."""
    system, attributes = record.get("attributes", {}), attributes_of(record.get("messageAttributes", {}))
    return Delivery(
        record["body"].encode("utf-8", "surrogatepass"),
        headers_of(attributes),
        system.get("MessageDeduplicationId"),
        system.get("MessageGroupId"),
        name_of(record.get("eventSourceARN", "")),
        int(system.get("ApproximateReceiveCount", 1)),
        record["messageId"],
        attributes,
        record,
    )


def attributes_of(attributes: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the attributes of a message as SQS itself writes them."""
    return {name: _attribute(one) for name, one in attributes.items()}


def _attribute(one: Mapping[str, Any]) -> Attribute:
    kind = one.get("dataType", "String")
    if one.get("binaryValue") is not None:
        return {"DataType": kind, "BinaryValue": base64.b64decode(one["binaryValue"])}
    return {"DataType": kind, "StringValue": one.get("stringValue")}


def failures(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answer to Lambda that these messages are not done."""
    return {"batchItemFailures": [{"itemIdentifier": one["messageId"]} for one in records]}


def event_field(path: str) -> EventKey:
    """Read the key from a field of the event: `"payment_id"`, `"detail.id"`."""
    names = path.split(".")
    if not all(names):
        raise UsageError(f"key={path!r} has to name a field of the event: 'payment_id', 'detail.id'")

    def of(event: Any, _context: Any) -> object:
        for name in names:
            if not isinstance(event, Mapping):
                return None
            event = event.get(name)
        return event

    return of


def client_context(name: str = KEY_HEADER) -> EventKey:
    """Read the key from the custom part of the client context, which a caller passes beside the event."""

    def of(_event: Any, context: Any) -> object:
        custom = getattr(getattr(context, "client_context", None), "custom", None)
        return custom.get(name) if isinstance(custom, Mapping) else None

    return of
