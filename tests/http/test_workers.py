"""Several workers, one of which is killed in the middle; and many duplicates of one slow request."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onefold.http.client import Retries, Transport
from tests.http_service import payments
from tests.http_service.process import Service, records_in
from tests.http_service.process import serving as serving_framework

PATIENCE = 120.0

# Patient enough for a lease, and for a worker that has to start again.
RETRIES = Retries(attempts=300, pause=0.1, pause_max=0.2, retry_after_max=0.1)


def until(holds: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.01)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with payments.serving(tmp_path_factory.mktemp("workers"), "create_stopping", "--workers", "2") as service:
        # The port is open before there is a worker, and a worker makes the tables.
        httpx.get(f"{service.url}/wallets/asha", timeout=PATIENCE).raise_for_status()
        yield service


def killed_in_the_middle(service: Service, path: str, stop: str, **request: Any) -> httpx.Response:
    """The answer to a request whose worker is killed while it runs. The client sees to it that there is one."""
    story = uuid.uuid4().hex
    stopped = service.folder / f"stopped-{story}"

    def kill() -> None:
        until(stopped.exists, "no worker has stopped")
        os.kill(int(stopped.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    headers = {"X-Api-Key": "shop", "X-Story": story, "X-Stop": stop}
    try:
        with httpx.Client(transport=Transport(retries=RETRIES), base_url=service.url, timeout=PATIENCE) as client:
            return client.post(path, headers=headers, **request)
    finally:
        killer.join(PATIENCE)


@pytest.mark.parametrize("stop", ["before the handler", "after the handler"])
def test_a_worker_is_killed_during_a_charge_and_the_wallet_is_charged_once(workers: Service, stop: str) -> None:
    count, balance = payments.payments(workers.folder)

    answer = killed_in_the_middle(workers, "/payments", stop, json={"account": "asha", "amount": 4200})

    # Committed before the crash, or not: one charge in any case, and the client has its receipt.
    assert answer.status_code == 201, workers.log()
    assert answer.json() == {"id": count + 1, "account": "asha", "amount": 4200, "balance": balance - 4200}
    assert any(attempt.error for attempt in answer.extensions["onefold"].attempts)
    assert payments.payments(workers.folder) == (count + 1, balance - 4200)


def test_in_claim_mode_a_crash_after_the_effect_runs_it_again_with_the_same_key_downstream(workers: Service) -> None:
    answer = killed_in_the_middle(workers, "/notify", "after the handler", content=b"{}")

    assert (answer.status_code, answer.content) == (200, b"told"), workers.log()
    keys = [key for path, key, _size in map(str.split, workers.lines()) if path == "/notify"]
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_under_hold_a_crash_after_the_effect_is_held_and_never_runs_again(workers: Service) -> None:
    answer = killed_in_the_middle(workers, "/notify-and-hold", "after the handler", content=b"{}")

    assert (answer.status_code, answer.json()["code"]) == (409, "held"), workers.log()
    assert [line.split(" ")[0] for line in workers.lines()].count("/notify-and-hold") == 1


# Many at once: more than a server has threads.

EVERY_DAY = 50
MANY = 200


@pytest.fixture(scope="module", params=["asgi", "wsgi"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp(request.param)
    with serving_framework(request.param, records_in(folder), folder) as service:
        yield service


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


many_at_once = pytest.mark.parametrize("duplicates", [EVERY_DAY, pytest.param(MANY, marks=pytest.mark.more)])


@many_at_once
def test_many_duplicates_of_one_slow_request_run_once_and_pin_nobody(
    service: Service, request: pytest.FixtureRequest, name: str, duplicates: int
) -> None:
    # A thread of WSGI that waits is a thread less for the others: there nobody waits, which is the default.
    path = "/waits-a-little/pay" if "asgi" in request.node.name else "/below/pay"
    gate = service.gate(name)
    before = sockets(service)

    async def story() -> tuple[httpx.Response, list[httpx.Response], httpx.Response]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(verify=False, limits=limits)
        async with httpx.AsyncClient(transport=transport, base_url=service.url, timeout=PATIENCE) as client:

            async def send(key: str = name, **wish: str) -> httpx.Response:
                headers = {"X-Api-Key": "asha", "Idempotency-Key": key}
                return await client.post(path, params={"name": key, **wish}, headers=headers, content=b"{}")

            first = asyncio.ensure_future(send(gate=str(gate)))
            while service.effects(name) == 0:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
            others = await asyncio.gather(*(send(gate=str(gate)) for _ in range(duplicates)))
            free = await send(key=f"{name}-free")
            # All have their answers, and the first one still runs: nobody else is kept by it.
            assert not first.done()
            while sockets(service) > before + 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            gate.touch()
            return await first, others, free

    first, others, free = asyncio.run(asyncio.wait_for(story(), PATIENCE * 2))

    assert (first.status_code, free.status_code) == (200, 200)
    assert {one.status_code for one in others} == {409}
    assert {one.json()["code"] for one in others} == {"in_progress"}
    assert service.effects(name) == 1


@many_at_once
def test_many_that_wait_all_get_the_same_bytes_or_a_409(service: Service, name: str, duplicates: int) -> None:
    gate = service.gate(name)

    async def story() -> list[httpx.Response]:
        transport = httpx.AsyncHTTPTransport(verify=False, limits=httpx.Limits(max_connections=None))
        async with httpx.AsyncClient(transport=transport, base_url=service.url, timeout=PATIENCE) as client:

            async def send() -> httpx.Response:
                query = {"name": name, "gate": str(gate)}
                headers = {"X-Api-Key": "asha", "Idempotency-Key": name}
                return await client.post("/waits/pay", params=query, headers=headers, content=b"{}")

            sent = [asyncio.ensure_future(send()) for _ in range(duplicates)]
            while service.effects(name) == 0:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
            gate.touch()
            return await asyncio.gather(*sent)

    answers = asyncio.run(asyncio.wait_for(story(), PATIENCE * 2))

    assert {one.status_code for one in answers} <= {200, 409}
    assert len({one.content for one in answers if one.status_code == 200}) == 1
    assert service.effects(name) == 1


def sockets(service: Service) -> int:
    """How many sockets the server's processes have open."""
    found = 0
    for process in processes_of(service.process.pid):
        for link in Path(f"/proc/{process}/fd").glob("*"):
            try:
                found += os.readlink(link).startswith("socket:")
            except OSError:
                continue
    return found


def processes_of(pid: int) -> list[int]:
    """This process and those that it started, on Linux."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        pytest.skip("open sockets are counted on Linux")
    return [pid, *(one for child in children.read_text().split() for one in processes_of(int(child)))]
