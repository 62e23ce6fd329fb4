"""The page about RabbitMQ says what the code does. That its blocks run is tested with all other pages."""

from __future__ import annotations

import inspect

import pytest

from onefold.queues import aio_pika, pika
from onefold.queues._rabbitmq import consumer as rabbitmq_consumer
from onefold.queues._rabbitmq.consumer import Delivery
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.options import WAIT
from onefold.queues.keys import KEY_HEADER
from tests.support import PROJECT

TEXT = (PROJECT / "docs" / "queues" / "rabbitmq.md").read_text(encoding="utf-8")

DEFAULTS = {
    "payload": "`None`",
    "missing_key": '`"never"`',
    "record": "`None`",
    "wait": f"{WAIT:g} s",
    "attempts": str(ATTEMPTS),
    "unacked_max": f"{rabbitmq_consumer.UNACKED_MAX / 60:g} min",
    "threads": "1",
}


def test_the_page_names_every_argument_and_its_default() -> None:
    names = {*inspect.signature(pika.guarded).parameters} - {"guard", "operation", "handler", "policy", "fields"}

    rows = {name: f"| `{name}` | {default} |" for name, default in DEFAULTS.items()}
    rows |= {"key": "| `key` | |", "dead_letter": "| `dead_letter` | |"}
    # The fields of a policy have a page of their own, but for the one with another default.
    assert names | {"wait"} == {*rows}
    assert "| `policy`, `keep`, `after_crash`, … | the guard's |" in TEXT
    assert [row for row in rows.values() if row not in TEXT] == []


def test_both_clients_take_the_same_arguments() -> None:
    blocking = dict(inspect.signature(pika.guarded).parameters)
    async_parameters = dict(inspect.signature(aio_pika.guarded).parameters)
    for one in (blocking, async_parameters):
        one.pop("guard")
    blocking.pop("threads")

    assert blocking == async_parameters
    assert [*inspect.signature(pika.send).parameters] == [*inspect.signature(aio_pika.send).parameters]


@pytest.mark.parametrize("name", [name for name in Delivery._fields if name != "position"])
def test_the_page_names_what_a_handler_gets(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_page_names_the_headers() -> None:
    message = Delivery(b"", {}, None, None, "", "", False, "1", None)
    dead = rabbitmq_consumer.Rules("charge", "dead").dead(message, "because")

    assert [name for name in dead.properties["headers"] if f"`{name}`" not in TEXT] == []
    assert f"`{KEY_HEADER}`" in TEXT
