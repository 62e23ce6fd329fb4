"""The client inside of a guarded handler: its keys are the delivery's, so that a rerun charges nobody twice."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from onefold import AsyncGuard, Guard, current
from onefold.http.client import Adapter, AsyncTransport, Retries, Transport, intent
from onefold.http.client._handler_keys import NAME_MAX, Request
from tests.http_service.scripted import CUT, Say, Scripted, scripted
from tests.processes import lapse

QUICK = Retries(attempts=2, pause=0.01, retry_after_max=0.01)
PATIENCE = 120.0


class Crash(BaseException):
    """The process dies here, as far as the guard can see."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


class Sync:
    """httpx, blocking. A handler is a list of requests; the last may be a crash."""

    def __init__(self) -> None:
        self.guard: Any = Guard("memory:")

    def post(self, url: str, body: bytes = b"{}", **options: Any) -> Any:
        with httpx.Client(transport=self.transport(), timeout=PATIENCE) as client:
            return client.post(url, content=body, **options)

    def transport(self) -> Transport:
        return Transport(httpx.HTTPTransport(verify=False), retries=QUICK)

    def deliver(self, *sends: Callable[[], Any], key: str = "order-1", **options: Any) -> None:
        def handle() -> None:
            for send in sends:
                send()

        self.guard.run("charge", key, handle, **options)


class Requests(Sync):
    """requests."""

    def post(self, url: str, body: bytes = b"{}", **options: Any) -> Any:
        with requests.Session() as session:
            session.mount("http://", Adapter(retries=QUICK))
            return session.post(url, data=body, timeout=PATIENCE, **options)


class Async(Sync):
    """httpx, async."""

    def __init__(self) -> None:
        self.guard = AsyncGuard("memory:")

    def post(self, url: str, body: bytes = b"{}", **options: Any) -> Any:
        async def send() -> Any:
            transport = AsyncTransport(httpx.AsyncHTTPTransport(verify=False), retries=QUICK)
            async with httpx.AsyncClient(transport=transport, timeout=PATIENCE) as client:
                return await client.post(url, content=body, **options)

        return send()

    def deliver(self, *sends: Callable[[], Any], key: str = "order-1", **options: Any) -> None:
        async def handle() -> None:
            for send in sends:
                await send()

        asyncio.run(self.guard.run("charge", key, handle, **options))


@pytest.fixture(params=[Sync, Async, Requests], ids=["httpx", "httpx-async", "requests"])
def handler(request: pytest.FixtureRequest) -> Any:
    return request.param()


def crash() -> Any:
    raise Crash


def charges(server: Scripted) -> int:
    """What a provider has done that deduplicates by key."""
    return len(set(server.keys))


def test_a_crash_after_the_charge_and_a_redelivery_are_one_charge(server: Scripted, handler: Any) -> None:
    def charge() -> Any:
        return handler.post(server.url)

    with pytest.raises(Crash):
        handler.deliver(charge, crash)
    handler.deliver(charge)

    assert len(server.got) == 2
    assert charges(server) == 1


WORKER = """
import os, sys, httpx
from onefold import Guard, Policy
from onefold.http.client import Transport

url, store, dies = sys.argv[1:]

def charge():
    with httpx.Client(transport=Transport(httpx.HTTPTransport(verify=False)), timeout=120.0) as client:
        client.post(url, json={"amount": 5})
    if dies == "dies":
        os._exit(9)

Guard(store).run("charge", "order-1", charge, policy=Policy(lease=3_600))
"""


def test_a_worker_that_is_killed_after_the_charge_charges_once(server: Scripted, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, server.url, f"sqlite:///{tmp_path}/onefold.db"]

    killed = subprocess.run([*command, "dies"], check=False, timeout=PATIENCE)
    lapse(tmp_path / "onefold.db")
    second = subprocess.run([*command, "lives"], check=False, timeout=PATIENCE)

    assert (killed.returncode, second.returncode) == (9, 0)
    assert len(server.got) == 2
    assert charges(server) == 1


def test_every_request_of_a_handler_has_a_key_of_its_own_and_a_rerun_sends_the_same_ones(
    server: Scripted, handler: Any
) -> None:
    sends = [
        lambda: handler.post(f"{server.url}/charges", b"1"),
        lambda: handler.post(f"{server.url}/charges", b"2"),
        lambda: handler.post(f"{server.url}/charges", b"2"),
        lambda: handler.post(f"{server.url}/mails", b"2"),
        lambda: handler.post(f"{server.url}/mails?to=1", b"2"),
    ]

    with pytest.raises(Crash):
        handler.deliver(*sends, crash)
    handler.deliver(*sends)
    handler.deliver(*sends, key="order-2")

    first, second, other = server.keys[:5], server.keys[5:10], server.keys[10:]
    assert len(set(first)) == 5
    assert second == first
    assert not set(other) & set(first)


def test_a_rerun_that_leaves_one_out_or_changes_the_order_sends_no_request_under_the_key_of_another(
    server: Scripted, handler: Any
) -> None:
    def send(body: bytes) -> Callable[[], Any]:
        return lambda: handler.post(server.url, body)

    with pytest.raises(Crash):
        handler.deliver(send(b"first"), send(b"second"), crash)
    with pytest.raises(Crash):
        # The first one is paid, says the database.
        handler.deliver(send(b"second"), crash)
    handler.deliver(send(b"second"), send(b"first"), send(b"third"))

    by_body = {one.body: set[Any]() for one in server.got}
    for one in server.got:
        by_body[one.body].add(one.key)
    assert [len(keys) for keys in by_body.values()] == [1, 1, 1]
    assert charges(server) == 3


def test_an_upload_has_the_same_key_whatever_its_boundary(server: Scripted) -> None:
    ours = Sync()

    def upload() -> None:
        with httpx.Client(transport=ours.transport(), timeout=PATIENCE) as client:
            client.post(server.url, files={"receipt": ("a.txt", b"forty-two")})

    with pytest.raises(Crash):
        ours.deliver(upload, crash)
    ours.deliver(upload)

    assert server.got[0].body != server.got[1].body
    assert charges(server) == 1


def test_a_handler_that_retries_by_itself_sends_the_same_key_until_an_answer_is_final(
    server: Scripted, handler: Any
) -> None:
    server.script = [CUT, CUT, Say(500), Say(500), Say(503), Say(200)]

    def charge() -> Any:
        return handler.post(server.url, b"a charge")

    def lost() -> Any:
        with pytest.raises((httpx.TransportError, requests.RequestException)):
            return charge()

    async def lost_async() -> Any:
        with pytest.raises(httpx.TransportError):
            await charge()

    tries = [lost_async if isinstance(handler, Async) else lost, charge, charge]
    with pytest.raises(Crash):
        handler.deliver(*tries, charge, crash)
    # The provider has the answer now: the rerun needs one try, and the second charge still has the second key.
    handler.deliver(charge, charge)

    assert len(server.got) == 9
    assert len(set(server.keys[:6])) == 1
    assert server.keys[6] != server.keys[5]
    assert server.keys[7:] == [server.keys[5], server.keys[6]]


def test_another_request_is_no_retry_of_one_that_was_lost(server: Scripted, handler: Any) -> None:
    server.script = [Say(500)]

    handler.deliver(lambda: handler.post(server.url, b"one"), lambda: handler.post(server.url, b"another"))

    assert charges(server) == 2


def test_a_key_of_the_callers_own_and_one_of_an_intent_are_kept(server: Scripted) -> None:
    ours = Sync()
    kept = Guard("memory:")

    def in_intent() -> None:
        with intent("pay-order-42", store=kept):
            ours.post(server.url, b"2")

    server.script = [Say(200), Say(500)]
    with pytest.raises(Crash):
        ours.deliver(lambda: ours.post(server.url, headers={"Idempotency-Key": "mine"}), in_intent, crash)

    assert server.keys[0] == "mine"
    outside = Sync()
    with intent("pay-order-42", store=kept):
        outside.post(server.url, b"2")
    assert len(set(server.keys[1:])) == 1


def test_its_name_is_the_method_the_url_and_the_body_and_is_found_from_outside(server: Scripted, handler: Any) -> None:
    handler.deliver(lambda: handler.post(f"{server.url}/pay"), lambda: handler.post(f"{server.url}/pay"))

    record = handler.guard.read("charge", "order-1")
    record = asyncio.run(record) if asyncio.iscoroutine(record) else record
    digest = hashlib.sha256(b"{}").hexdigest()[:32]
    names = [f"POST {server.url}/pay {digest}", f"POST {server.url}/pay {digest} #2"]
    assert server.keys == [f'"{record.key_for(name)}"' for name in names]


def test_a_bypass_is_another_request(server: Scripted, handler: Any) -> None:
    handler.deliver(lambda: handler.post(server.url))
    handler.deliver(lambda: handler.post(server.url), bypass=True)

    assert charges(server) == 2


def test_a_finished_step_takes_its_number_along(server: Scripted) -> None:
    ours = Sync()

    def charge(name: str) -> None:
        current().step(name, lambda: ours.post(server.url).status_code)

    with pytest.raises(Crash):
        ours.deliver(lambda: charge("first"), lambda: charge("second"), lambda: ours.post(server.url), crash)
    # Both steps are in the log, and only the last request is sent again.
    ours.deliver(lambda: charge("first"), lambda: charge("second"), lambda: ours.post(server.url))

    assert len(server.got) == 4
    assert charges(server) == 3
    assert server.keys[3] == server.keys[2]


def test_an_async_step_has_its_name_while_it_is_async(server: Scripted) -> None:
    ours = Async()

    def charge(name: str) -> Any:
        async def send() -> int:
            await asyncio.sleep(0)
            assert current().step_name == name
            return int((await ours.post(server.url)).status_code)

        return current().step(name, send)

    with pytest.raises(Crash):
        ours.deliver(lambda: charge("first"), lambda: ours.post(server.url), crash)
    ours.deliver(lambda: charge("first"), lambda: ours.post(server.url))

    assert len(server.got) == 3
    assert server.keys[2] == server.keys[1] != server.keys[0]


def test_a_delivery_inside_of_a_step_has_keys_of_its_own(server: Scripted) -> None:
    ours, inner = Sync(), Sync()

    def nested() -> None:
        inner.deliver(lambda: ours.post(server.url), key="inner")

    ours.deliver(lambda: current().step("a step", nested))
    record = inner.guard.read("charge", "inner")

    name = f"POST {server.url}/ {hashlib.sha256(b'{}').hexdigest()[:32]}"
    assert server.keys == [f'"{record.key_for(name)}"']


def test_two_equal_requests_at_once_are_two(server: Scripted) -> None:
    ours = Async()

    async def both() -> None:
        await asyncio.gather(ours.post(server.url), ours.post(server.url))

    with pytest.raises(Crash):
        ours.deliver(both, crash)
    ours.deliver(both)

    assert charges(server) == 2


@pytest.mark.parametrize("inherits", [True, False])
def test_a_thread_has_keys_of_the_delivery_only_with_a_copy_of_its_context(server: Scripted, inherits: bool) -> None:
    handler = Sync()

    def charge() -> None:
        around = contextvars.copy_context().run if inherits else lambda send: send()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(around, lambda: handler.post(server.url)).result(PATIENCE)

    with pytest.raises(Crash):
        handler.deliver(charge, crash)
    handler.deliver(charge)

    assert charges(server) == (1 if inherits else 2)


def test_a_task_that_outlives_its_handler_is_no_part_of_the_delivery(server: Scripted) -> None:
    guard = AsyncGuard("memory:")

    async def story() -> None:
        ended = asyncio.Event()
        late: list[asyncio.Task[None]] = []

        async def background() -> None:
            await ended.wait()
            for _ in range(2):
                await Async().post(server.url)

        async def handle() -> None:
            late.append(asyncio.create_task(background()))

        await guard.run("charge", "order-1", handle)
        ended.set()
        await late[0]

    asyncio.run(story())

    assert charges(server) == 2
    versions = {str(key)[15] for key in server.keys}
    assert versions == {"4"}


def test_a_name_leaves_out_what_may_change_and_is_short() -> None:
    def name(url: str) -> str:
        return Request("POST", url, b"").name.rpartition(" ")[0]

    assert name("https://ada:secret@API.example.com#top") == "POST https://api.example.com/"
    assert name("https://api.example.com/pay?order=1") == "POST https://api.example.com/pay?order=1"


def test_a_url_without_an_end_has_a_key(server: Scripted, handler: Any) -> None:
    url = f"{server.url}/{'a' * NAME_MAX}"

    with pytest.raises(Crash):
        handler.deliver(lambda: handler.post(url), lambda: handler.post(url), crash)
    handler.deliver(lambda: handler.post(url), lambda: handler.post(url))

    assert charges(server) == 2
