"""A server of Django on ASGI that is told to end: views under a key have their grace, and then it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from asgiref.sync import async_to_sync

from onefold import Guard, Record, State
from onefold.http._asgi import background_requests
from onefold.http._django import asgi as _django_asgi
from onefold.http._django.asgi import to_its_end
from tests.http.test_shutdown import GRACEFUL, until
from tests.http_service.process import PATIENCE, Service, records_in, started
from tests.support import in_time

# Longer than the test.
ENDLESS = 10 * PATIENCE


class Story:
    """One request to a server that is told to end in the middle of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = records_in(folder)

    @contextlib.contextmanager
    def ending(self, view: str, *, grace: float, rules: str = "below_500", below: str = "") -> Iterator[Service]:
        environment = {
            "ENDING_FOLDER": str(self.folder),
            "ENDING_STORE": self.store,
            "ENDING_GRACE": str(grace),
            "ENDING_RULES": rules,
            "ENDING_BELOW": below,
        }

        def options(port: int) -> list[str]:
            return [*GRACEFUL["hypercorn"](port), "tests.http_service.ending_django:app"]

        with started([sys.executable, "-m"], options, self.folder, environment) as service:

            def pay() -> None:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.post(f"{service.url}/{view}", headers={"Idempotency-Key": "key"}, timeout=PATIENCE)

            client = threading.Thread(target=pay)
            client.start()
            until((self.folder / "started").exists)
            service.process.send_signal(signal.SIGTERM)
            yield service
            service.process.wait(PATIENCE)
            client.join(PATIENCE)

    def record(self) -> Record | None:
        with Guard(self.store) as guard:
            return guard.read("http", "key")


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


# Hypercorn cancels nobody there: it waits until the last connection is closed, with a key and without.
cancels = pytest.mark.skipif(sys.version_info >= (3, 12), reason="from Python 3.12 on Hypercorn cancels no request")


@cancels
@pytest.mark.parametrize(
    ("view", "below", "rules"),
    [
        ("async", "", "stripe"),
        pytest.param("careless", "", "below_500", marks=pytest.mark.more),
        pytest.param("async", "", "below_500", marks=pytest.mark.more),
        pytest.param("careless", "", "stripe", marks=pytest.mark.more),
        pytest.param("async", "something that blocks", "stripe", marks=pytest.mark.more),
        pytest.param("careless", "something that blocks", "below_500", marks=pytest.mark.more),
    ],
)
def test_a_view_that_has_had_its_grace_is_cancelled_and_nobody_knows_what_came_of_it(
    story: Story, view: str, below: str, rules: str
) -> None:
    with story.ending(view, grace=0, below=below, rules=rules) as service:
        service.process.wait(PATIENCE)

    record = story.record()
    assert (story.folder / "cancelled").exists(), service.log()
    assert record is not None, service.log()
    # As after a crash: it is held, or runs again, when its lease is over.
    assert record.state is State.RUNNING, service.log()


@cancels
@pytest.mark.more
@pytest.mark.parametrize("below", ["", "something that blocks"])
@pytest.mark.parametrize(("view", "grace"), [("async", ENDLESS), ("blocking", 0)])
def test_a_view_that_ends_within_the_grace_or_cannot_be_cancelled_is_remembered(
    story: Story, view: str, grace: float, below: str
) -> None:
    with story.ending(view, grace=grace, below=below) as service:
        # Hypercorn has given it up by then, and the looks of a grace that is over have been taken.
        with pytest.raises(subprocess.TimeoutExpired):
            service.process.wait(2.0)
        (story.folder / "gate").touch()
        service.process.wait(PATIENCE)

    record = story.record()
    assert record is not None, service.log()
    assert record.state is State.DONE, service.log()


class View:
    """An async view that waits, as a thread of a request calls it; and what it hears."""

    def __init__(self) -> None:
        self.started, self.goes_on = asyncio.Event(), asyncio.Event()
        self.heard: list[Any] = []
        self.request = SimpleNamespace(resolver_match=None, close=lambda: self.heard.append("closed"))

    def respond(self, is_called_off: Callable[[], bool]) -> Any:
        try:
            async_to_sync(self.run)()
        except BaseException as error:
            self.heard.append((type(error), is_called_off()))
            raise
        self.heard.append("ended")
        return SimpleNamespace(close=lambda: None)

    async def run(self) -> None:
        self.started.set()
        await self.goes_on.wait()


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_requests, "GRACE", 0)
    monkeypatch.setattr(_django_asgi, "LOOKS_SECONDS", 0)


@pytest.mark.usefixtures("no_grace")
def test_a_view_whose_client_has_gone_needs_no_grace() -> None:
    """Django cancels it once."""

    async def tell() -> None:
        view = View()
        django = asyncio.ensure_future(to_its_end(view.respond, view.request))
        await view.started.wait()
        django.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        view.goes_on.set()
        await asyncio.wait({django})

        assert (view.heard, django.cancelled()) == (["ended", "closed"], True)

    in_time(tell())


@pytest.mark.usefixtures("no_grace")
def test_a_server_that_ends_after_the_client_has_gone_gives_the_view_its_grace() -> None:
    """Its cancellation comes by way of Django, after Django's own."""

    async def tell() -> None:
        view = View()
        django = asyncio.ensure_future(to_its_end(view.respond, view.request))
        await view.started.wait()
        for _ in range(2):
            django.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({django})

        assert (view.heard, django.cancelled()) == ([(asyncio.CancelledError, True)], True)

    in_time(tell())
