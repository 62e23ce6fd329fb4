"""What a person is told of an intent that has not ended: by the refusal of another request, and by the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import requests
from typer.testing import CliRunner

from onefold import Guard, KeyReused, OutcomeUnknown
from onefold.cli.app import app
from onefold.http._shared.intents import OPERATION
from onefold.http.client import Adapter, AsyncTransport, Retries, Transport, intent
from onefold.stores.memory import MemoryStore
from onefold.testing import Clock
from tests.cli.test_records import closed_port
from tests.http_service.scripted import Say, scripted

__all__ = ["closed_port"]

ONCE = Retries(attempts=1)
PATIENCE = 120.0
NAME = "pay-order-42"

# A store's URL, the server's, and the amount.
Send = Callable[[str, str, int], int]


def by_httpx(store: str, url: str, amount: int) -> int:
    with httpx.Client(transport=Transport(retries=ONCE), timeout=PATIENCE) as client, intent(NAME, store=store):
        return client.post(url, json={"amount": amount}).status_code


def by_httpx_async(store: str, url: str, amount: int) -> int:
    async def send() -> int:
        async with (
            httpx.AsyncClient(transport=AsyncTransport(retries=ONCE), timeout=PATIENCE) as client,
            intent(NAME, store=store),
        ):
            return (await client.post(url, json={"amount": amount})).status_code

    return asyncio.run(send())


def by_requests(store: str, url: str, amount: int) -> int:
    with requests.Session() as session, intent(NAME, store=store):
        session.mount("http://", Adapter(retries=ONCE))
        return session.post(url, json={"amount": amount}, timeout=PATIENCE).status_code


CLIENTS = pytest.mark.parametrize("send", [by_httpx, by_httpx_async, by_requests])


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/intents.db"


def onefold(store: str, *arguments: str) -> str:
    said = CliRunner(env={"ONEFOLD_STORE": store}).invoke(app, list(arguments), catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return said.stdout


@CLIENTS
def test_another_request_under_an_intent_is_told_which_intent_and_what_to_do(store: str, send: Send) -> None:
    with scripted() as server:
        server.script = [Say(500), Say(200)]
        send(store, server.url, 5)

        with pytest.raises(KeyReused) as refused:
            send(store, server.url, 6)

        assert len(server.got) == 1
        said = str(refused.value)
        assert "intent('pay-order-42') was begun with another method, URL or body" in said
        assert "Nothing was sent" in said
        named = "intent('pay-order-42', store=…)"
        assert f"end it: {f'await {named}.aend()' if send is by_httpx_async else f'{named}.end()'}" in said
        assert "Mint" not in said, "the user of an intent has no key to mint"
        assert (refused.value.operation, refused.value.key, refused.value.scope) == (OPERATION, NAME, "")

        intent(NAME, store=store).end()
        assert send(store, server.url, 6) == 200


@CLIENTS
def test_where_no_connection_was_made_the_error_tells_that_nothing_was_sent(
    store: str, send: Send, closed_port: int
) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    with pytest.raises((httpx.ConnectError, requests.ConnectionError)) as lost:
        send(store, url, 5)

    assert not any(attempt.sent for attempt in lost.value.onefold.attempts)  # type: ignore[attr-defined]
    with pytest.raises(KeyReused):
        send(store, url, 6)


def test_an_intent_that_is_too_old_is_told_how_to_end_it() -> None:
    clock = Clock()
    with Guard(MemoryStore(clock=clock)) as guard, scripted() as server:
        server.script = [Say(500)]

        def send() -> None:
            with httpx.Client(transport=Transport(retries=ONCE)) as client, intent(NAME, store=guard):
                client.post(server.url, json={"amount": 5})

        send()
        clock.advance("25h")
        with pytest.raises(OutcomeUnknown, match=r"end the intent: intent\('pay-order-42', store=…\)\.end\(\)"):
            send()


def test_the_command_line_shows_an_intent_as_one_that_has_not_ended(store: str) -> None:
    with scripted() as server:
        server.script = [Say(500)]
        by_httpx(store, server.url, 5)
        [key] = server.keys

    heading, line = (one.split("\t") for one in onefold(store, "ls", "--operation", OPERATION).splitlines())
    listed = dict(zip(heading, line, strict=True))
    shown = dict(one.split("\t") for one in onefold(store, "show", NAME).splitlines())
    [told] = json.loads(onefold(store, "ls", "--format", "json"))

    assert (listed["key"], listed["remark"]) == (NAME, "an intent that has not ended")
    assert told["remark"] == "an intent that has not ended"
    assert shown["state"] == "done: its key is kept; the intent has not ended, and sends this key again"
    assert json.loads(shown["result"]) == key


def test_what_is_no_intent_has_no_such_remark(store: str) -> None:
    with Guard(store) as guard:
        guard.run("charge", NAME, lambda: None)

    shown = dict(one.split("\t") for one in onefold(store, "show", NAME).splitlines())

    assert (shown["state"], shown["remark"]) == ("done: every duplicate gets the result", "none")
