"""SQS, with boto3: the dead letters of a queue, by its name or URL.

They are received one batch at a time, and hidden from others for a minute; those that are not sent back are shown
again at the end. `sqs:` takes the region and the login from the environment; `sqs://?region=…&endpoint_url=…` names
them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

from onefold import UsageError
from onefold.queues._sqs.dead_letters import (
    ATTRIBUTES_MAX,
    DEDUPLICATION_HEADER,
    GROUP_HEADER,
    QUEUE_HEADER,
    restored,
)
from onefold.queues.keys import KEY_HEADER
from onefold.redrive.letters import UNKNOWN_ORIGIN, BrokerLost, Letter, NotSent, kept, text
from onefold.stores.base import Address

OPTIONS: Final = {"region": "region_name", "endpoint_url": "endpoint_url"}

# Long enough for ten letters; and a redrive that was killed can be repeated soon.
VISIBILITY: Final = 60
BATCH: Final = 10
WAIT: Final = 1
# SQS has no order: how many batches in a row may have only letters that were seen, or that came meanwhile.
IN_VAIN_MAX: Final = 10
CLOCK_TICK: Final = 1.0
# From the beginning to the first message that is sent back.
PAUSE: Final = CLOCK_TICK
TIMEOUT: Final = 30.0

# How long a FIFO queue drops what has the deduplication id of another message, and says that it took it.
WINDOW: Final = 300.0
IN_WINDOW: Final = "its queue drops its deduplication id for five minutes: try again when they are over"
FIFO: Final = ".fifo"

GONE: Final = "ReceiptHandleIsInvalid"

# A queue has a name and a URL.
THEMSELVES: Final = "these are the dead letters themselves: it would only lose its reason"

TWO_ORIGINS: Final = "it says that it came from {}, and SQS has moved it from {}: name the place with --back-to"


def open_letters(url: str, name: str) -> Letters:
    asked = dict(parse_qsl(urlsplit(url).query))
    if unknown := sorted(asked.keys() - OPTIONS):
        raise UsageError(f"{unknown[0]!r} is not one of {', '.join(OPTIONS)}")
    patience = Config(connect_timeout=TIMEOUT, read_timeout=TIMEOUT, retries={"total_max_attempts": 3})
    with ExitStack() as opened, _told(name):
        client: Any = boto3.client("sqs", config=patience, **{OPTIONS[one]: asked[one] for one in asked})  # type: ignore[call-overload]
        opened.callback(client.close)
        found = Letters(client, name)
        opened.pop_all()
    return found


class Letters:
    """The dead letters of one queue."""

    def __init__(self, client: Any, queue: str) -> None:
        self._client = client
        self._name = queue
        self._urls: dict[str, str] = {}
        self._url = self._url_of(queue)
        asked = client.get_queue_attributes(QueueUrl=self._url, AttributeNames=["QueueArn"])
        # By the clock of SQS, which also says when a message was sent; but it answers only in whole seconds.
        answered = asked["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        self._began = (parsedate_to_datetime(answered).timestamp() if answered else time.time()) + CLOCK_TICK
        self._over = time.monotonic() + PAUSE
        self._hidden: dict[str, str] = {}

    def _url_of(self, queue: str) -> str:
        if "://" in queue:
            return queue
        if queue not in self._urls:
            self._urls[queue] = self._client.get_queue_url(QueueName=queue)["QueueUrl"]
        return self._urls[queue]

    def letters(self) -> Iterator[Letter]:
        seen: set[str] = set()
        in_vain = 0
        while in_vain < IN_VAIN_MAX and (received := self._receive()):
            self._hidden |= {one["MessageId"]: one["ReceiptHandle"] for one in received}
            new = [one for one in received if one["MessageId"] not in seen and _sent_at(one) <= self._began]
            in_vain = 0 if new else in_vain + 1
            for one in new:
                seen.add(one["MessageId"])
                yield _letter(one, self._began)

    def _receive(self) -> list[dict[str, Any]]:
        with _told(self._name):
            answer = self._client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=BATCH,
                VisibilityTimeout=VISIBILITY,
                WaitTimeSeconds=WAIT,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            )
        return answer.get("Messages", [])  # type: ignore[no-any-return]

    def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
        attributes = _own(letter.native.get("MessageAttributes", {}))
        attributes |= {name: {"DataType": "String", "StringValue": one} for name, one in headers.items()}
        if len(attributes) > ATTRIBUTES_MAX:
            raise NotSent(f"it has {ATTRIBUTES_MAX} attributes, and there is no place for that of the bypass")
        try:
            with _told(to):
                url = self._url_of(to)
        except BrokerLost:
            raise NotSent(f"there is no queue {to}") from None
        if url == self._url:
            raise NotSent(THEMSELVES)
        ids = _ids(letter, headers) if url.endswith(FIFO) else {}
        # What is sent in the second in which this began, and fails at once, would look like an older letter.
        time.sleep(max(0.0, self._over - time.monotonic()))
        try:
            self._client.send_message(
                QueueUrl=url, MessageBody=letter.native["Body"], MessageAttributes=attributes, **ids
            )
        except ClientError as error:
            raise NotSent(f"{to} does not take it: {_code(error)}") from None
        except BotoCoreError as error:
            raise BrokerLost(f"SQS was lost: {type(error).__name__}") from None

    def remove(self, letter: Letter) -> None:
        with _told(self._name):
            try:
                self._client.delete_message(QueueUrl=self._url, ReceiptHandle=letter.native["ReceiptHandle"])
            except ClientError as error:
                # It is gone: the client has asked again after a lost reply, or somebody else has removed it.
                if _code(error) != GONE:
                    raise
        self._hidden.pop(letter.position, None)

    def close(self) -> None:
        # Without this they are shown again in a minute. If SQS is lost, it would be waited for with each of them.
        with suppress(BotoCoreError):
            for handle in self._hidden.values():
                with suppress(ClientError):
                    self._client.change_message_visibility(
                        QueueUrl=self._url, ReceiptHandle=handle, VisibilityTimeout=0
                    )
        self._client.close()


def _letter(received: Mapping[str, Any], now: float) -> Letter:
    attributes = received.get("MessageAttributes", {})
    headers = {name: one.get("StringValue", one.get("BinaryValue")) for name, one in attributes.items()}
    # SQS itself says where it was before, if a redrive policy has moved it.
    source = received.get("Attributes", {}).get("DeadLetterQueueSourceArn", "").rpartition(":")[2]
    reason = "SQS has moved it, after its last receive" if source and not headers.get(QUEUE_HEADER) else ""
    told, problem = text(headers.get(QUEUE_HEADER) or ""), UNKNOWN_ORIGIN
    origin = told or source
    if told and source and told.rpartition("/")[2] != source:
        # A sender may have written it: SQS does not touch the attributes of what it moves.
        origin, problem = "", TWO_ORIGINS.format(told, source)
    age = max(now - _sent_at(received), 0.0)
    body = received["Body"].encode()
    return Letter(received["MessageId"], body, headers, origin, age, reason, problem, native=received)


def _sent_at(received: Mapping[str, Any]) -> float:
    return int(received.get("Attributes", {}).get("SentTimestamp", 0)) / 1000


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that the message had before it was a letter."""
    try:
        own = kept(restored(attributes))
    except UsageError as error:
        raise NotSent(str(error)) from None
    # As they are read, they have lists that SQS does not take.
    return {name: {part: one[part] for part in one if not part.endswith("ListValues")} for name, one in own.items()}


def _ids(letter: Letter, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the ids for a FIFO queue. The deduplication id is its own again, if that may be its key."""
    told, system = letter.headers, letter.native.get("Attributes", {})
    group = told.get(GROUP_HEADER) or system.get("MessageGroupId")
    if not group:
        raise NotSent("its queue is a FIFO queue, and it has no message group")
    theirs = told.get(DEDUPLICATION_HEADER, "" if QUEUE_HEADER in told else system.get("MessageDeduplicationId", ""))
    key = told.get(KEY_HEADER)
    if theirs and not (key and letter.digest == Address("", letter.operation, str(key)).digest):
        if letter.age is not None and letter.age < WINDOW:
            raise NotSent(IN_WINDOW)
        return {"MessageGroupId": group, "MessageDeduplicationId": theirs}
    place = hashlib.sha256(repr((letter.position, *headers.values())).encode()).hexdigest()[:32]
    return {"MessageGroupId": group, "MessageDeduplicationId": f"redrive-{place}"}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", type(error).__name__))


@contextmanager
def _told(queue: str) -> Iterator[None]:
    """Turn an error of the client into one line."""
    try:
        yield
    except ClientError as error:
        raise BrokerLost(f"SQS does not give access to {queue}: {_code(error)}") from None
    except NoRegionError:
        raise BrokerLost("which region? Write it in the URL, such as sqs://?region=eu-central-1") from None
    except NoCredentialsError:
        raise BrokerLost("boto3 finds no credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret") from None
    except (BotoCoreError, ValueError) as error:
        raise BrokerLost(f"SQS cannot be reached: {type(error).__name__}") from None
