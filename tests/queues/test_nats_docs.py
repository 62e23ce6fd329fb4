"""The page about NATS says what the code does. That its blocks run is tested with all other pages."""

from __future__ import annotations

import inspect

import pytest

from onefold.queues import nats as onefold_nats
from onefold.queues._nats import consumer as nats_consumer
from onefold.queues._nats import messages as nats_messages
from onefold.queues._nats.consumer import Delivery
from onefold.queues._shared.dead_letters import DROPPED_HEADER
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.options import WAIT
from onefold.queues._shared.verdict import HELD_MAX
from onefold.queues.keys import KEY_HEADER
from onefold.stores.base import Address
from tests.support import PROJECT

TEXT = (PROJECT / "docs" / "queues" / "nats.md").read_text(encoding="utf-8")

DEFAULTS = {
    "payload": "`None`",
    "missing_key": '`"never"`',
    "record": "`None`",
    "wait": f"{WAIT:g} s",
    "attempts": str(ATTEMPTS),
    "unacked_max": f"{nats_consumer.UNACKED_MAX / 60:g} min",
    "concurrency": "1",
}


def test_the_page_names_every_argument_and_its_default() -> None:
    names = {*inspect.signature(onefold_nats.guarded).parameters} - {
        *("guard", "operation", "handler", "policy", "fields"),
    }

    rows = {name: f"| `{name}` | {default} |" for name, default in DEFAULTS.items()}
    rows |= {"key": "| `key` | |", "dead_letter": "| `dead_letter` | |"}
    assert names | {"wait"} == {*rows}
    assert "| `policy`, `keep`, `after_crash`, … | the guard's |" in TEXT
    assert [row for row in rows.values() if row not in TEXT] == []


@pytest.mark.parametrize("name", [name for name in Delivery._fields if name != "position"])
def test_the_page_names_what_a_handler_gets(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_page_names_the_headers() -> None:
    message = Delivery(b"", {}, "id", "charges", "CHARGES", 1, 1, "CHARGES.c.1.1", None)
    dead = nats_consumer.Rules("charge", "dead").dead(message, "because", 1000, Address("", "charge", "pay-1"))

    assert [name for name in dead.headers if f"`{name}`" not in TEXT] == []
    assert f"`{KEY_HEADER}`" in TEXT
    assert f"`{DROPPED_HEADER}`" in TEXT
    assert nats_consumer.sent_headers("charges.new", "pay_7f3a", {})["Nats-Msg-Id"] in TEXT


def test_the_page_says_how_often_and_how_long() -> None:
    assert nats_consumer.BEATS == 3
    assert "three times per `ack_wait`" in TEXT
    assert f"{nats_consumer.ACK_WAIT:g} s and no limit are assumed" in TEXT
    assert f"after {HELD_MAX:,} deliveries" in TEXT
    assert f"at least {onefold_nats.BATCH_MIN}." in TEXT
    assert nats_messages.SEND_TRIES * nats_messages.CONFIRM_SECONDS_MAX < 60
