"""Several workers, one of which is killed in the middle; and two hundred duplicates of one slow request."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from http_service import payments
from http_service.process import Service, records_in
from http_service.process import serving as serving_framework
from onefold.http.client import Retries, Transport

PATIENCE = 120.0
TWO_WORKERS = ("--workers", "2")

# Patient enough for a lease, and for a worker that has to start again.
RETRIES = Retries(attempts=300, pause=0.1, pause_max=0.2, retry_after_max=0.1)


def until(holds: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.01)


def killed_in_the_middle(service: Service, path: str, **request: Any) -> httpx.Response:
    """The answer to a request whose worker is killed while it runs. The client sees to it that there is one."""

    def kill() -> None:
        until((service.folder / "stopped").exists, "no worker has stopped")
        os.kill(int((service.folder / "stopped").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with httpx.Client(transport=Transport(retries=RETRIES), base_url=service.url, timeout=PATIENCE) as client:
            return client.post(path, headers={"X-Api-Key": "shop"}, **request)
    finally:
        killer.join(PATIENCE)


@pytest.mark.parametrize("stop", ["before the handler", "after the handler"])
def test_a_worker_is_killed_during_a_charge_and_the_wallet_is_charged_once(tmp_path: Path, stop: str) -> None:
    with payments.serving(tmp_path, "create_wallet", *TWO_WORKERS, stop=stop) as service:
        answer = killed_in_the_middle(service, "/payments", json={"account": "asha", "amount": 4200})

        # Committed before the crash, or not: one charge in any case, and the client has its receipt.
        assert answer.status_code == 201, service.log()
        assert answer.json() == {"id": 1, "account": "asha", "amount": 4200, "balance": 5800}
        assert any(attempt.error for attempt in answer.extensions["onefold"].attempts)
        assert payments.payments(tmp_path) == (1, 5800)


def test_in_claim_mode_a_crash_after_the_effect_runs_it_again_with_the_same_key_downstream(tmp_path: Path) -> None:
    with payments.serving(tmp_path, "create_notifier", *TWO_WORKERS, stop="after the handler") as service:
        answer = killed_in_the_middle(service, "/notify", content=b"{}")

        assert (answer.status_code, answer.content) == (200, b"told"), service.log()
        keys = [line.split(" ")[1] for line in service.lines()]
        assert len(keys) == 2
        assert len(set(keys)) == 1


def test_under_hold_a_crash_after_the_effect_is_held_and_never_runs_again(tmp_path: Path) -> None:
    with payments.serving(
        tmp_path, "create_notifier", *TWO_WORKERS, stop="after the handler", policy="hold"
    ) as service:
        answer = killed_in_the_middle(service, "/notify", content=b"{}")

        assert (answer.status_code, answer.json()["code"]) == (409, "on_hold"), service.log()
        assert len(service.lines()) == 1


# Two hundred at once.

DUPLICATES = 200


@pytest.fixture(params=["asgi", "wsgi"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    with serving_framework(request.param, records_in(tmp_path), tmp_path) as service:
        yield service


def test_two_hundred_duplicates_of_one_slow_request_run_once_and_pin_nobody(
    service: Service, request: pytest.FixtureRequest
) -> None:
    # A thread of WSGI that waits is a thread less for the others: there nobody waits, which is the default.
    path = "/waits-a-little/pay" if "asgi" in request.node.name else "/below/pay"
    gate = service.gate("slow")
    before = sockets(service)

    async def story() -> tuple[httpx.Response, list[httpx.Response], httpx.Response]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(verify=False, limits=limits)
        async with httpx.AsyncClient(transport=transport, base_url=service.url, timeout=PATIENCE) as client:

            async def send(key: str = "slow", name: str = "slow", **wish: str) -> httpx.Response:
                headers = {"X-Api-Key": "asha", "Idempotency-Key": key}
                return await client.post(path, params={"name": name, **wish}, headers=headers, content=b"{}")

            first = asyncio.ensure_future(send(gate=str(gate)))
            while service.effects("slow") == 0:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
            duplicates = await asyncio.gather(*(send(gate=str(gate)) for _ in range(DUPLICATES)))
            other = await send(key="other", name="other")
            # All have their answers, and the first one still runs: nobody else is kept by it.
            assert not first.done()
            while sockets(service) > before + 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            gate.touch()
            return await first, duplicates, other

    first, duplicates, other = asyncio.run(asyncio.wait_for(story(), PATIENCE * 2))

    assert (first.status_code, other.status_code) == (200, 200)
    assert {one.status_code for one in duplicates} == {409}
    assert {one.json()["code"] for one in duplicates} == {"in_progress"}
    assert service.effects("slow") == 1


def test_two_hundred_that_wait_all_get_the_same_bytes_or_a_409(service: Service) -> None:
    gate = service.gate("slow")

    async def story() -> list[httpx.Response]:
        transport = httpx.AsyncHTTPTransport(verify=False, limits=httpx.Limits(max_connections=None))
        async with httpx.AsyncClient(transport=transport, base_url=service.url, timeout=PATIENCE) as client:

            async def send() -> httpx.Response:
                query = {"name": "slow", "gate": str(gate)}
                headers = {"X-Api-Key": "asha", "Idempotency-Key": "slow"}
                return await client.post("/waits/pay", params=query, headers=headers, content=b"{}")

            sent = [asyncio.ensure_future(send()) for _ in range(DUPLICATES)]
            while service.effects("slow") == 0:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
            gate.touch()
            return await asyncio.gather(*sent)

    answers = asyncio.run(asyncio.wait_for(story(), PATIENCE * 2))

    assert {one.status_code for one in answers} <= {200, 409}
    assert len({one.content for one in answers if one.status_code == 200}) == 1
    assert service.effects("slow") == 1


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
