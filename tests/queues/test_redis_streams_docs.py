"""The page about Redis Streams says what the code does. That its blocks run is tested with all other pages."""

from __future__ import annotations

import inspect

import pytest

from onefold import PolicyFields
from onefold.queues import redis_streams
from onefold.queues._redis_streams import consumer as stream_rules
from onefold.queues._redis_streams import jobs, loop, sending
from onefold.queues._redis_streams.consumer import Delivery
from onefold.queues._shared.dead_letters import DROPPED_HEADER
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.options import WAIT
from onefold.queues._shared.sends import pauses
from onefold.queues._shared.verdict import HELD_MAX
from onefold.queues.keys import KEY_HEADER
from onefold.stores.base import Address
from tests.support import PROJECT

TEXT = (PROJECT / "docs" / "queues" / "redis-streams.md").read_text(encoding="utf-8")

DEFAULTS = {
    "payload": "`None`",
    "missing_key": '`"never"`',
    "record": "`None`",
    "wait": f"{WAIT:g} s",
    "attempts": str(ATTEMPTS),
    "min_idle": f"{stream_rules.MIN_IDLE:g} s",
    "start": f'`"{stream_rules.BEGINNING}"`',
    "body_field": f'`"{stream_rules.BODY_FIELD}"`',
    "concurrency": "1",
}


def test_the_page_names_every_argument_and_its_default() -> None:
    names = {*inspect.signature(redis_streams.guarded).parameters} - {
        *("guard", "operation", "handler", "policy", "fields"),
    }

    rows = {name: f"| `{name}` | {default} |" for name, default in DEFAULTS.items()}
    rows |= {name: f"| `{name}` | |" for name in ("key", "stream", "group", "dead_letter")}
    assert names | {"wait"} == {*rows}
    assert "| `policy`, `keep`, `after_crash`, … | the guard's |" in TEXT
    assert [row for row in rows.values() if row not in TEXT] == []


def test_the_options_with_defaults_are_those_that_type_checkers_know() -> None:
    parameters = inspect.signature(redis_streams.guarded).parameters.values()
    own = redis_streams.Options.__annotations__.keys() - PolicyFields.__annotations__.keys()

    assert own == {one.name for one in parameters if one.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("name", Delivery._fields)
def test_the_page_names_what_a_handler_gets(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_page_names_the_fields() -> None:
    rules = stream_rules.Rules("charge", "charges", "charge", "charges.dead")
    dead = rules.dead(rules.delivery(b"1-0", {}), "because", Address("", "charge", "pay-1"))

    assert [name for name in dead[::2] if f"`{name.decode()}`" not in TEXT] == []  # type: ignore[union-attr]
    assert f"`{KEY_HEADER}`" in TEXT
    assert f"`{DROPPED_HEADER}`" in TEXT


def test_the_page_says_how_often_and_how_long() -> None:
    assert loop.BEATS == 3
    assert "Three times per `min_idle`" in TEXT
    assert f"`XACK`, up to {loop.ACKS_MAX} at a time, a second later at most" in TEXT
    assert loop.ACK_SECONDS_MAX == loop.FETCH_SECONDS == 1
    assert f"that holds {jobs.WAITING_MAX:,} waiting entries" in TEXT
    assert f"after {HELD_MAX:,} times" in TEXT
    assert f"at least {redis_streams.BATCH_MIN}." in TEXT
    assert f"more than {stream_rules.FIELDS_MAX:,} fields" in TEXT
    assert 20 < sum(pauses(sending.SEND_TRIES)) < 40
