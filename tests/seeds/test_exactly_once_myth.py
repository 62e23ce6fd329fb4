"""The lesson "Idempotency and the Exactly-Once Myth": its table of operations, and its middleware of Express and Redis.

The middleware, in our words: a key is claimed for 30 seconds with SET NX, a success is kept for 24 hours, a failure
gives the key back at once, a request without a key passes, and a retry of a running request gets 409 with the body
`{"error": "request already in progress"}`. Here all of this is options on a real Redis.

Where it contradicts itself: a claim that ends after 30 seconds, whether its request still runs or not, lets a retry of
a slow charge run beside it, and after a crash the charge runs again; the text says "charged exactly once". Our claim is
renewed as long as its request runs, and `after_crash` says what a crash means. Its table calls DELETE harmless, which
is so for the order and not for the response: the second one is a 404, unless it is guarded.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final

import httpx
import pytest
import redis
from fastapi import FastAPI, Response

from onefold import AsyncGuard, Guard
from onefold.http import Refusal
from onefold.http.asgi import IdempotencyMiddleware, single_tenant
from tests.support import PATIENCE, Elsewhere, eventually, in_time

IN_PROGRESS: Final = {"error": "request already in progress"}


def in_their_words(refusal: Refusal) -> dict[str, str] | None:
    return IN_PROGRESS if refusal.code == "in_progress" else None


class Shop:
    """`POST /charge` behind the middleware, and what it has charged."""

    def __init__(self, redis_url: str) -> None:
        self.charged: list[int] = []
        self.status = 200
        self.running, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.guard = AsyncGuard(redis_url)
        self.app = FastAPI()
        self.app.add_middleware(
            IdempotencyMiddleware,
            guard=self.guard,
            scope=single_tenant,
            rules="success_only",
            keep="24h",
            lease="30s",
            refusal=in_their_words,
        )
        self.app.post("/charge")(self.charge)

    async def charge(self, response: Response) -> dict[str, int]:
        self.running.set()
        await asyncio.wait_for(self.gate.wait(), PATIENCE)
        response.status_code = self.status
        if self.status == 200:
            self.charged.append(50)
        return {"charge": len(self.charged)}


def play(redis_url: str, story: Callable[[Shop, Callable[..., Awaitable[httpx.Response]]], Awaitable[None]]) -> None:
    async def whole() -> None:
        shop = Shop(redis_url)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(shop.app), base_url="http://shop") as client:

            async def post(key: str | None = "k-1") -> httpx.Response:
                return await client.post("/charge", headers={} if key is None else {"Idempotency-Key": key})

            await story(shop, post)
        await shop.guard.aclose()

    in_time(whole())


def test_never_seen_is_processed_and_completed_is_replayed_without_running(redis_url: str) -> None:
    async def story(shop: Shop, post: Any) -> None:
        first, again = await post(), await post()

        assert (first.status_code, first.json()) == (again.status_code, again.json()) == (200, {"charge": 1})
        assert shop.charged == [50]

    play(redis_url, story)


def test_in_progress_is_409_in_the_words_of_the_lesson(redis_url: str) -> None:
    async def story(shop: Shop, post: Any) -> None:
        shop.gate.clear()
        first = asyncio.ensure_future(post())
        await asyncio.wait_for(shop.running.wait(), PATIENCE)
        retry = await post()
        shop.gate.set()

        assert (retry.status_code, retry.json(), retry.headers["Retry-After"]) == (409, IN_PROGRESS, "1")
        assert (await first).json() == (await post()).json() == {"charge": 1}
        assert shop.charged == [50]

    play(redis_url, story)


def test_of_two_retries_at_once_one_has_the_key(redis_url: str) -> None:
    async def story(shop: Shop, post: Any) -> None:
        answers = await asyncio.gather(*(post() for _ in range(8)))

        assert {one.status_code for one in answers} <= {200, 409}
        assert shop.charged == [50]

    play(redis_url, story)


def test_a_failure_gives_the_key_back_at_once(redis_url: str) -> None:
    async def story(shop: Shop, post: Any) -> None:
        shop.status = 402
        refused = await post()
        shop.status = 200
        paid = await post()

        assert (refused.status_code, paid.status_code, shop.charged) == (402, 200, [50])

    play(redis_url, story)


def test_a_request_without_a_key_passes_unguarded(redis_url: str) -> None:
    async def story(shop: Shop, post: Any) -> None:
        for _ in range(2):
            await post(None)

        assert shop.charged == [50, 50]

    play(redis_url, story)


def test_a_success_expires_by_itself_after_a_day_and_a_claim_after_its_lease(redis_url: str) -> None:
    """A key with a time to live is the window: nobody has to sweep."""

    async def story(shop: Shop, post: Any) -> None:
        client = redis.Redis.from_url(redis_url)
        shop.gate.clear()
        try:
            first = asyncio.create_task(post())
            await asyncio.wait_for(shop.running.wait(), PATIENCE)
            claim = await shop.guard.read("http", "k-1")
            shop.gate.set()
            await first
            (name,) = client.keys()
            assert 24 * 3600 - 60 < client.ttl(name) <= 24 * 3600
        finally:
            client.close()
        success = await shop.guard.read("http", "k-1")
        assert claim is not None
        assert success is not None
        assert (claim.state, success.state) == ("running", "done")
        assert 0 < claim.lease_left <= 30

    play(redis_url, story)


def test_a_request_that_runs_longer_than_its_lease_keeps_its_key(redis_url: str, long_lease: float) -> None:
    """Where the lesson's own middleware would let the retry in: its claim ends after 30 s, whatever happens."""
    gate, running = threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        gate.wait(PATIENCE)

    with Guard(redis_url, lease=long_lease) as guard:
        first = Elsewhere(lambda: guard.run("charge", "k-1", slow))
        assert running.wait(PATIENCE)
        before = guard.read("charge", "k-1")
        assert before is not None

        def is_renewed() -> bool:
            now = guard.read("charge", "k-1")
            return now is not None and now.is_live and now.revision > before.revision + 3

        # Usually they are a third of the lease apart: after four of them, the first lease would be over.
        assert eventually(is_renewed)
        gate.set()
        first.result()


def test_a_worker_is_deduplicated_on_the_business_key_of_its_job(redis_url: str) -> None:
    """The lesson's last hint: `payment:<id>`, before the side effect, whatever the id of the job is."""
    charged: list[str] = []
    with Guard(redis_url) as guard:
        for _job in ("job-1", "job-2"):
            guard.run("charge", "payment:42", lambda: charged.append("42"))

    assert charged == ["42"]


@pytest.mark.parametrize(
    ("name", "is_idempotent"),
    [("GET", True), ("PUT", True), ("DELETE", True), ("balance += 100", False), ("POST /charge $50", False)],
)
def test_the_five_operations_of_the_table(name: str, is_idempotent: bool) -> None:
    state: dict[str, Any] = {"status": "new", "exists": True, "balance": 0, "charges": []}
    operations: dict[str, Callable[[], object]] = {
        "GET": lambda: state["status"],
        "PUT": lambda: state.update(status="shipped"),
        "DELETE": lambda: state.update(exists=False),
        "balance += 100": lambda: state.update(balance=state["balance"] + 100),
        "POST /charge $50": lambda: state["charges"].append(50),
    }

    def after(times: int, do: Callable[[], object]) -> str:
        state.update(status="new", exists=True, balance=0, charges=[])
        for _ in range(times):
            do()
        return json.dumps(state)

    do = operations[name]
    assert (after(1, do) == after(2, do)) is is_idempotent
    with Guard("memory:") as guard:
        once = after(1, do)
        assert after(2, lambda: guard.run("any", "k-1", lambda: do() and None)) == once
