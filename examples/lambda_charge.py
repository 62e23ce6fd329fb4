"""A Lambda function that SQS calls with messages, some of them twice. Run it: python examples/lambda_charge.py

It plays Lambda's part, and needs nothing else: on AWS, `handler` is the function, and the store is a server. One
message fails, and only that one comes again; a handler that takes too long is held before Lambda would kill it.
It needs `pip install onefold`, and no extra.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any, Final

from onefold import Guard, current
from onefold.queues.aws_lambda import Delivery, guarded_messages
from onefold.queues.keys import header

# What the function may take, and how long before its end a handler is interrupted.
SECONDS: Final = 2.0
MARGIN: Final = 1.0

guard = Guard("memory:")
charges: list[str] = []
broken: set[int] = {2}


def charge(delivery: Delivery) -> None:
    order = delivery.body.decode()
    if int(order[-1]) in broken:
        raise ValueError("the gateway refused it")
    if order == "order 3":
        threading.Event().wait(60)
    charges.append(f"{order} under {current().key_for('gateway')}")


handler = guarded_messages(guard, "charge", charge, key=header(), after_crash="hold", lease=SECONDS, margin=MARGIN)


class Context:
    """What Lambda tells a function about its time."""

    def __init__(self) -> None:
        self._ends = time.monotonic() + SECONDS

    def get_remaining_time_in_millis(self) -> int:
        return round((self._ends - time.monotonic()) * 1000)


def message(number: int, order: int) -> dict[str, Any]:
    return {
        "messageId": f"message {number}",
        "body": f"order {order}",
        "attributes": {"ApproximateReceiveCount": "1"},
        "messageAttributes": {"idempotency-key": {"stringValue": f"key-{order}", "dataType": "String"}},
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:eu-central-1:123456789012:charges",
    }


def invoke(*messages: dict[str, Any]) -> list[str]:
    answer = handler({"Records": list(messages)}, Context())
    return [one["itemIdentifier"] for one in answer["batchItemFailures"]]


def main() -> None:
    undone = invoke(message(1, 1), message(2, 2), message(3, 1))
    print(f"first batch: {charges}, not done: {undone}")
    assert (len(charges), undone) == (1, ["message 2"])

    broken.clear()
    undone = invoke(message(2, 2), message(4, 1))
    print(f"second batch: {len(charges)} charges, not done: {undone}")
    assert (len(charges), undone) == (2, [])

    undone = invoke(message(5, 3))
    record = guard.read("charge", "key-3")
    print(f"third batch: {len(charges)} charges, not done: {undone}, its record is {record.state if record else None}")
    assert (undone, record is not None and record.state) == (["message 5"], "held")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="logged: %(message)s")
    main()
    guard.close()
