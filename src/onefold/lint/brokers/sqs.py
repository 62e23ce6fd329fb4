"""SQS: the attributes of a queue and of its dead letters, through boto3.

`sqs:` takes the region and the login from the environment, as boto3 does; `sqs://?region=…&endpoint_url=…` names them.
"""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from onefold.health.report import Check, counted, green
from onefold.lint.brokers.answers import BROKER, Answer, Silent
from onefold.lint.settings.found import Wrong
from onefold.lint.settings.sqs import Queue, judged

OPTIONS: Final = {"region": "region_name", "endpoint_url": "endpoint_url"}


def ask(url: str, queue: str, timeout: float) -> Answer:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    asked = dict(parse_qsl(urlsplit(url).query))
    if unknown := sorted(asked.keys() - OPTIONS):
        raise Silent(f"{unknown[0]!r} is not one of {', '.join(OPTIONS)}")
    patience = Config(connect_timeout=timeout, read_timeout=timeout, retries={"total_max_attempts": 1})
    try:
        client: Any = boto3.client("sqs", config=patience, **{OPTIONS[name]: one for name, one in asked.items()})  # type: ignore[call-overload]
        try:
            own = _attributes(client, queue)
            queues = [own, *_dead_letters(client, own)]
        finally:
            client.close()
        return Answer(list(judged(queues, None)), (_exists(queue, own),))
    except (ClientError, BotoCoreError, ValueError) as error:
        if isinstance(error, Wrong):
            raise Silent(str(error)) from None
        code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else type(error).__name__
        raise Silent(f"SQS does not tell the attributes of {queue}: {code}") from None


def _attributes(client: Any, queue: str) -> Queue:
    url = queue if "://" in queue else client.get_queue_url(QueueName=queue)["QueueUrl"]
    told = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
    return Queue(BROKER, told.get("Attributes", {}))


def _dead_letters(client: Any, own: Queue) -> list[Queue]:
    """Return the queue of the dead letters. One that this login may not see is taken to keep them as long as it can."""
    from botocore.exceptions import ClientError

    try:
        policy = json.loads(own.attributes.get("RedrivePolicy") or "{}")
        name = str(policy.get("deadLetterTargetArn", "")).rpartition(":")[2]
        return [_attributes(client, name)] if name else []
    except ClientError:
        return []


def _exists(queue: str, own: Queue) -> Check:
    waiting = str(own.attributes.get("ApproximateNumberOfMessages", ""))
    said = f" has about {counted(int(waiting), 'message')}" if waiting.isdecimal() else " exists"
    return green("queue", f"{queue}{said}")
