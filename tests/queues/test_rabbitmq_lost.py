"""RabbitMQ without a broker: what is said, and not raised, when a connection goes while a message is settled."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pika.exceptions import ConnectionWrongStateError

from onefold import AsyncGuard, Guard
from onefold.queues import aio_pika, pika
from onefold.queues._rabbitmq.consumer import GIVEN_BACK, Rules
from onefold.queues._rabbitmq.pika_messages import Job, delivery_of
from onefold.queues._shared.logs import Waits
from onefold.queues._shared.verdict import Later
from onefold.queues.keys import header
from onefold.stores.memory import AsyncMemoryStore, MemoryStore

PROPERTIES: dict[str, Any] = {"headers": {"idempotency-key": "pay-1"}, "message_id": None, "content_type": None}
METHOD: dict[str, Any] = {"exchange": "", "routing_key": "charges", "redelivered": False, "delivery_tag": 7}


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onefold.queues.rabbitmq")


def test_with_aio_pika_a_channel_that_is_closed_is_told_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[object] = []
    closed = SimpleNamespace(is_closed=True)
    message: Any = SimpleNamespace(body=b"", channel=closed, **PROPERTIES, **METHOD)

    async def handle(delivery: object) -> None:
        ran.append(delivery)

    async def story() -> None:
        guard = AsyncGuard(AsyncMemoryStore())
        await aio_pika.guarded(guard, "charge", handle, key=header(), dead_letter="dead")._consume(message)

    asyncio.run(story())

    assert ran == []
    (line,) = caplog.messages
    assert line.startswith("charges: charge [key ")
    assert "ConnectionError, the broker delivers it again" in line


def test_with_pika_a_connection_that_is_gone_is_told_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[object] = []

    def gone(callback: object) -> None:
        raise ConnectionWrongStateError("closed")

    connection = SimpleNamespace(add_callback_threadsafe=gone)
    channel: Any = Mock(is_open=True, connection=connection)
    native: Any = SimpleNamespace(**PROPERTIES)
    job = Job(channel, 7, delivery_of(SimpleNamespace(**METHOD), native, b""), time.monotonic())
    guard = Guard(MemoryStore())

    pika.guarded(guard, "charge", ran.append, key=header(), dead_letter="dead")._work(job)

    assert len(ran) == 1
    assert any("the connection is gone, the broker delivers it again" in line for line in caplog.messages)


def test_what_is_given_back_after_a_long_wait_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    rules = Rules("charge", "dead", unacked_max=60.0, waits=Waits())
    delivery = delivery_of(SimpleNamespace(**METHOD), SimpleNamespace(**PROPERTIES), b"")  # type: ignore[arg-type]

    step = rules.after(Later(5.0, "another worker is at it"), delivery, 58.0)

    assert step == GIVEN_BACK
    assert f"charges: charge: again in {GIVEN_BACK.delay:.3g} s: another worker is at it" in caplog.messages
    assert "charges: charge: given back after 58 s: another worker is at it" in caplog.messages
