"""The pages about SQS and Lambda say what the code does. That their blocks run is tested with all other pages."""

from __future__ import annotations

import inspect

import pytest

from onefold.queues import aws_lambda
from onefold.queues import sqs as onefold_sqs
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.options import WAIT
from onefold.queues._shared.verdict import HELD_MAX
from onefold.queues._sqs import consumer as sqs_consumer
from onefold.queues._sqs import jobs as sqs_jobs
from onefold.queues._sqs import requests as sqs_requests
from onefold.queues._sqs import time_limits
from onefold.queues._sqs.consumer import Delivery
from onefold.queues._sqs.dead_letters import OURS
from onefold.queues._sqs.worker import batch_of
from onefold.queues.keys import KEY_HEADER
from tests.support import PROJECT

TEXT = (PROJECT / "docs" / "queues" / "sqs.md").read_text(encoding="utf-8")
LAMBDA = (PROJECT / "docs" / "queues" / "lambda.md").read_text(encoding="utf-8")

# Not among the arguments of the tables.
FIRST = {"guard", "operation", "handler", "policy", "fields"}

DEFAULTS = {
    "payload": "`None`",
    "missing_key": '`"never"`',
    "record": "`None`",
    "wait": f"{WAIT:g} s",
    "attempts": str(ATTEMPTS),
    "unacked_max": f"{sqs_consumer.UNACKED_MAX / 60:g} min",
    "batch": "`None`",
    "visibility": "`None`",
}
OF_LAMBDA = {
    "dead_letter": "`OWN_REDRIVE`",
    "client": "`None`",
    "report": '`"partial"`',
    "payload": "`None`",
    "missing_key": '`"never"`',
    "margin": f"{time_limits.MARGIN:g} s",
    "wait": f"{aws_lambda.WAIT:g} s",
    "record": "`None`",
}


def test_the_page_names_every_argument_and_its_default() -> None:
    names = {
        name
        for function in (onefold_sqs.guarded, onefold_sqs.guarded_async)
        for name in inspect.signature(function).parameters
    }

    rows = {name: f"| `{name}` | {default} |" for name, default in DEFAULTS.items()}
    rows |= {name: f"| `{name}` | |" for name in ("client", "queue", "key", "dead_letter")}
    rows |= dict.fromkeys(("threads", "concurrency"), "| `threads`, `concurrency` | 1 |")
    assert (names - FIRST) | {"wait"} == {*rows}
    assert [row for row in rows.values() if row not in TEXT] == []


def test_the_page_about_lambda_names_every_argument_and_its_default() -> None:
    names = {
        name
        for function in (aws_lambda.guarded_messages, aws_lambda.guarded_invocation)
        for name in inspect.signature(function).parameters
    }

    rows = {name: f"| `{name}` | {default} |" for name, default in OF_LAMBDA.items()} | {"key": "| `key` | |"}
    assert (names - FIRST) | {"wait"} == {*rows}
    assert [row for row in rows.values() if row not in LAMBDA] == []


@pytest.mark.parametrize("name", [name for name in Delivery._fields if name != "position"])
def test_the_page_names_what_a_handler_gets(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_page_names_the_attributes() -> None:
    assert [name for name in (KEY_HEADER, *OURS) if f"`{name}`" not in TEXT] == []


def test_the_pages_say_how_often_and_how_long() -> None:
    assert sqs_consumer.BEATS == 3
    assert "three times per visibility timeout" in TEXT
    assert 12 * 3600 - 5 < sqs_consumer.VISIBILITY_MAX < 12 * 3600
    assert "for **12 hours**" in TEXT
    assert f"{sqs_consumer.VISIBILITY:g} s and no limit are assumed" in TEXT
    assert f"tried {sqs_jobs.DELETE_TRIES} times" in TEXT
    assert f"after {HELD_MAX:,} receives" in TEXT
    assert f"up to {sqs_requests.RECEIVE_SECONDS} s if it is just waiting" in TEXT
    assert f"at least {batch_of(1)}." in TEXT
    assert aws_lambda.LEASE_SHARE == 5
    assert "at most five times the time of the function" in LAMBDA
    assert aws_lambda.RETRY_SECONDS == 60
