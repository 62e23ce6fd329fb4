"""The requests to SQS, once for boto3 and aiobotocore: generators that yield calls, which a driver makes or awaits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError

from onefold import UsageError
from onefold._concurrency.generators import Flow
from onefold.queues._sqs.consumer import (
    FIFO_SUFFIX,
    MESSAGE_BYTES_MAX,
    NO_LIMIT,
    OWN_REDRIVE,
    VISIBILITY,
    VISIBILITY_MAX,
    Delivery,
    Settings,
    log,
    name_of,
)
from onefold.queues._sqs.dead_letters import headers_of
from onefold.queues._sqs.jobs import ENTRIES_MAX, Change, Job

# Whatever a client raises; a closed connection of aiohttp is an OSError.
ERRORS: Final = (BotoCoreError, ClientError, OSError)

# How long a receive waits for a message: that is also how long `drain` may have to wait for it.
RECEIVE_SECONDS: Final = 5

# How long an answer may have been on its way, while the visibility of its messages counts already.
ANSWER_SECONDS: Final = 0.1

ATTRIBUTES: Final = ("VisibilityTimeout", "RedrivePolicy", "MaximumMessageSize", "ContentBasedDeduplication")
SYSTEM_ATTRIBUTES: Final = ("ApproximateReceiveCount", "MessageGroupId", "MessageDeduplicationId")

# What may be over in a moment, by parts of the codes of SQS.
PASSING: Final = ("Throttl", "OverLimit", "ExpiredToken", "RequestExpired", "Unavailable", "InternalError", "Timeout")


class Refused(NamedTuple):
    """An entry of a batch that SQS did not accept, and whether another try may help."""

    number: int
    code: str
    is_passing: bool


def is_passing(error: BaseException) -> bool:
    """Return whether a request may succeed if it is made again."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or any(part in code_of(error) for part in PASSING)
    return isinstance(error, (HTTPClientError, BotoConnectionError, CredentialRetrievalError, OSError))


def code_of(error: BaseException) -> str:
    """Return how an error is called in the log."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code") or "ClientError")
    return type(error).__name__


def check_client(client: Any, *, is_async: bool) -> None:
    """Refuse what is no client of SQS, or one of the other kind."""
    service = getattr(getattr(getattr(client, "meta", None), "service_model", None), "service_name", None)
    if service != "sqs":
        raise UsageError(
            f"client= is a client made with client('sqs'), not {type(client).__module__}.{type(client).__name__}"
        )
    roots = {kind.__module__.partition(".")[0] for kind in type(client).__mro__}
    if ("aiobotocore" in roots) != is_async:
        have, want = ("sync", "aiobotocore") if is_async else ("async", "boto3")
        raise UsageError(f"client= is {have}, but this needs one of {want}")


def read_settings(client: Any, queue: str, visibility: float | None, dead_letter: object) -> Flow[Settings]:
    """Ask SQS how a queue delivers. Raises `UsageError` if it cannot be guarded like that."""
    try:
        reply = yield partial(client.get_queue_attributes, QueueUrl=queue, AttributeNames=[*ATTRIBUTES])
    except ClientError as error:
        if "AccessDenied" not in code_of(error):
            raise
        found: Mapping[str, str] = {}
        log.warning(
            "the attributes of %s cannot be read (%s): no redrive policy is assumed, and each receive asks for a "
            "visibility of %.3g s",
            *(name_of(queue), code_of(error), visibility or VISIBILITY),
        )
    else:
        found = reply.get("Attributes", {})
        if dead_letter is OWN_REDRIVE and not found.get("RedrivePolicy"):
            raise UsageError(
                f"dead_letter=OWN_REDRIVE, but {name_of(queue)} has no redrive policy: what can never run would come "
                "again until the queue forgets it. Set one, or name a queue with dead_letter="
            )
    return checked(found, queue, visibility)


def checked(found: Mapping[str, str], queue: str, visibility: float | None) -> Settings:
    """Return the settings of a queue from its attributes."""
    seconds = float(found.get("VisibilityTimeout", VISIBILITY)) if visibility is None else visibility
    if not 1 <= seconds <= VISIBILITY_MAX + 2:
        raise UsageError(
            f"the visibility timeout of {name_of(queue)} is {seconds:g} s: every worker would get a message at once. "
            "Set at least a second, and at most 12 hours, on the queue or with visibility="
        )
    redrive = json.loads(found.get("RedrivePolicy") or "{}")
    is_fifo = queue.endswith(FIFO_SUFFIX)
    limit = int(redrive.get("maxReceiveCount", NO_LIMIT))
    return Settings(seconds, limit, is_fifo, int(found.get("MaximumMessageSize", MESSAGE_BYTES_MAX)))


def receive(client: Any, queue: str, count: int, settings: Settings) -> Flow[list[tuple[Delivery, str]]]:
    """Wait for messages; return them with their receipts."""
    reply = yield partial(
        client.receive_message,
        QueueUrl=queue,
        MaxNumberOfMessages=min(count, ENTRIES_MAX),
        WaitTimeSeconds=RECEIVE_SECONDS,
        VisibilityTimeout=math.ceil(settings.visibility),
        AttributeNames=[*SYSTEM_ATTRIBUTES],
        MessageAttributeNames=["All"],
    )
    name = name_of(queue)
    return [(delivery_of(one, name), one["ReceiptHandle"]) for one in reply.get("Messages", ())]


def delivery_of(message: Mapping[str, Any], queue: str) -> Delivery:
    """Return a message as handlers see it."""
    system, attributes = message.get("Attributes", {}), message.get("MessageAttributes", {})
    return Delivery(
        message["Body"].encode("utf-8", "surrogatepass"),
        headers_of(attributes),
        system.get("MessageDeduplicationId"),
        system.get("MessageGroupId"),
        queue,
        int(system.get("ApproximateReceiveCount", 1)),
        message["MessageId"],
        attributes,
        message,
    )


def delete(client: Any, queue: str, jobs: Sequence[Job]) -> Flow[list[Refused]]:
    """Delete messages, at most `ENTRIES_MAX`; return those that are still there."""
    entries = [{"Id": str(index), "ReceiptHandle": job.receipt} for index, job in enumerate(jobs)]
    return refused((yield partial(client.delete_message_batch, QueueUrl=queue, Entries=entries)))


def change(client: Any, queue: str, changes: Sequence[Change]) -> Flow[list[Refused]]:
    """Change when messages are delivered again, at most `ENTRIES_MAX`; return those of which it was not accepted."""
    entries = [
        {"Id": str(index), "ReceiptHandle": job.receipt, "VisibilityTimeout": math.ceil(seconds)}
        for index, (job, seconds) in enumerate(changes)
    ]
    return refused((yield partial(client.change_message_visibility_batch, QueueUrl=queue, Entries=entries)))


def refused(reply: Mapping[str, Any]) -> list[Refused]:
    failed: Iterable[Mapping[str, Any]] = reply.get("Failed") or ()
    return [
        Refused(
            int(one["Id"]),
            str(one.get("Code", "")),
            not one.get("SenderFault") or any(part in str(one.get("Code", "")) for part in PASSING),
        )
        for one in failed
    ]


def bury(client: Any, dead: Mapping[str, Any]) -> Flow[None]:
    """Send a dead letter, and wait until SQS has it."""
    yield partial(client.send_message, **dead)


def batches(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (items[start : start + ENTRIES_MAX] for start in range(0, len(items), ENTRIES_MAX))
