"""The attributes of a message, of one that is sent, and of a dead letter: SQS takes ten of them. Pure.

A dead letter has up to six of ours. Those of the message that do not fit beside them go together into one, and
`restored` gives all of them back: nothing is lost for a redrive.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from onefold import MissingKey, UsageError
from onefold.queues._shared.dead_letters import (
    DIGEST_HEADER,
    DROPPED_HEADER,
    OPERATION_HEADER,
    REASON_HEADER,
    REASON_MAX,
    fitting,
    plain,
)
from onefold.queues._sqs.consumer import Delivery
from onefold.queues.keys import KEY_HEADER
from onefold.stores.base import Address

# Where it came from. The ids are those of a FIFO queue: a dead letter has a deduplication id of its own.
QUEUE_HEADER: Final = "x-onefold-queue"
GROUP_HEADER: Final = "x-onefold-group"
DEDUPLICATION_HEADER: Final = "x-onefold-deduplication-id"
# The attributes for which there was no place, as JSON.
PACKED_HEADER: Final = "x-onefold-attributes"

OURS: Final = frozenset(
    {REASON_HEADER, OPERATION_HEADER, DIGEST_HEADER, QUEUE_HEADER, GROUP_HEADER, DEDUPLICATION_HEADER}
    | {PACKED_HEADER, DROPPED_HEADER}
)

ATTRIBUTES_MAX: Final = 10

# What JSON adds to an attribute, besides its escapes.
PACKING_BYTES: Final = 64

# What XML 1.0 allows, and so SQS.
_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

NAME: Final = re.compile(r"(?!\.)(?!.*\.\.)[A-Za-z0-9_.-]{1,256}(?<!\.)")
RESERVED: Final = ("aws.", "amazon.")

Attribute = Mapping[str, Any]


def readable(text: str) -> str:
    """Return the text with the characters replaced that SQS does not take."""
    return _FORBIDDEN.sub("\ufffd", plain(text))


def is_readable(text: str) -> bool:
    return not _FORBIDDEN.search(text)


def text(value: str) -> Attribute:
    return {"DataType": "String", "StringValue": value}


def headers_of(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    """Return the values of message attributes: text, numbers as text, or bytes."""
    return {name: one.get("StringValue", one.get("BinaryValue")) for name, one in attributes.items()}


def sent_attributes(headers: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the attributes of a message to send. Refuse those that SQS would refuse."""
    if len(headers) > ATTRIBUTES_MAX:
        raise UsageError(
            f"headers= has {len(headers)} entries with the key, and SQS takes {ATTRIBUTES_MAX}: nothing was sent"
        )
    return {_name(name): _sent(name, value) for name, value in headers.items()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.lower().startswith(RESERVED):
        raise UsageError(
            f"headers={{{name!r}: …}}: the name of an attribute of SQS has letters, digits, '_', '-' and '.', and does "
            "not begin with AWS. or Amazon.: nothing was sent"
        )
    return name


def _sent(name: str, value: object) -> Attribute:
    if isinstance(value, str) and value and is_readable(value):
        return text(value)
    if isinstance(value, (bytes, bytearray)) and value:
        return {"DataType": "Binary", "BinaryValue": bytes(value)}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"DataType": "Number", "StringValue": str(value)}
    says = "an attribute of SQS is text without control characters, a number or bytes, and not empty: nothing was sent"
    raise (
        MissingKey(f"the key is not, and {says}")
        if name == KEY_HEADER
        else UsageError(f"headers={{{name!r}: …}}: {says}")
    )


def reasons(delivery: Delivery, operation: str, reason: str, address: Address | None) -> dict[str, str]:
    """Return our own attributes of a dead letter."""
    ours = {
        REASON_HEADER: readable(reason)[:REASON_MAX],
        OPERATION_HEADER: readable(operation),
        QUEUE_HEADER: delivery.queue,
        GROUP_HEADER: delivery.group,
        DEDUPLICATION_HEADER: delivery.deduplication_id,
        DIGEST_HEADER: address.digest if address is not None and address.key else None,
    }
    return {name: value for name, value in ours.items() if value}


def dead_attributes(theirs: Mapping[str, Attribute], ours: Mapping[str, str], room: float) -> dict[str, Attribute]:
    """Return the attributes of a dead letter: ours, and those of the message as far as they fit.

    `room` is what the body leaves of the largest message. Without room for ours there are none.
    """
    own = {name: text(value) for name, value in ours.items()}
    room -= sum(_size(name, one) for name, one in own.items())
    if room < 0:
        return {}
    kept = _before(theirs)
    is_packed = len(kept) + len(own) > ATTRIBUTES_MAX

    def needed(name: str, one: Attribute) -> float:
        return 2 * _size(name, one) + PACKING_BYTES if is_packed else _size(name, one)

    if sum(needed(name, one) for name, one in kept.items()) > room:
        room -= REASON_MAX + len(DROPPED_HEADER)
        kept = fitting(kept, kept, needed, room)
        dropped = kept.pop(DROPPED_HEADER, None)
        if dropped is not None and room > 0:
            own[DROPPED_HEADER] = text(str(dropped))
    return _packed(kept, ATTRIBUTES_MAX - len(own)) | own


def _before(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Return the message's own attributes, also of one that came back from the dead letters as it was."""
    try:
        return restored(attributes)
    except UsageError:
        return {name: one for name, one in attributes.items() if name not in OURS}


def _packed(kept: dict[str, Attribute], places: int) -> dict[str, Attribute]:
    """Return as many attributes as there are places: all, or the key, the smallest, and one for the rest."""
    if len(kept) <= places:
        return kept
    order = sorted(kept, key=lambda name: (name.lower() != KEY_HEADER, _size(name, kept[name])))
    rest = {name: _as_json(kept[name]) for name in order[places - 1 :]}
    packed = text(json.dumps(rest, separators=(",", ":"), ensure_ascii=False))
    return {name: kept[name] for name in order[: places - 1]} | {PACKED_HEADER: packed}


def restored(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Return the attributes that a message had before it was a dead letter, for a redrive."""
    own = {name: one for name, one in attributes.items() if name not in OURS}
    packed = attributes.get(PACKED_HEADER)
    if packed is not None:
        try:
            own |= {name: _from_json(one) for name, one in json.loads(packed["StringValue"]).items()}
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise UsageError(f"{PACKED_HEADER} of this dead letter is not what Onefold has written") from error
    return own


def _as_json(one: Attribute) -> dict[str, str]:
    if "BinaryValue" in one:
        return {"DataType": one["DataType"], "BinaryValue": base64.b64encode(one["BinaryValue"]).decode()}
    return {"DataType": one["DataType"], "StringValue": one["StringValue"]}


def _from_json(one: Mapping[str, str]) -> Attribute:
    if "BinaryValue" in one:
        return {"DataType": one["DataType"], "BinaryValue": base64.b64decode(one["BinaryValue"])}
    return {"DataType": one["DataType"], "StringValue": one["StringValue"]}


def _size(name: str, one: Attribute) -> float:
    value = one.get("StringValue", one.get("BinaryValue"))
    if not isinstance(value, (str, bytes)):
        # The client can read it, but not write it.
        return math.inf
    length = len(value.encode(errors="replace")) if isinstance(value, str) else len(value)
    return len(name) + len(str(one.get("DataType", ""))) + length
