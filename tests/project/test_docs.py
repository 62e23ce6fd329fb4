"""The documentation is true: every code block runs, and what shows the source is made from it."""

from __future__ import annotations

import functools
import html
import itertools
import re
import runpy
import signal
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import celery._state
import dramatiq
import pika
import psycopg
import pytest
import redis
from botocore.client import BaseClient
from dramatiq.brokers.redis import RedisBroker
from sqlalchemy import Engine

from onefold import Guard
from onefold.queues._sqs import requests as sqs_requests
from services.kafka import bootstrap
from services.temporal import address_of
from tests.stores.django.project import put_back
from tests.stores.dynamodb.tools import client_options
from tests.support import PROJECT

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
GENERATED: dict[str, Any] = runpy.run_path(str(PROJECT / "docs" / "generate.py"))


# What a page writes for a server, and the fixture that stands in for it; a driver after a plus and options stay.
STAND_INS = {
    r"postgresql(?=(?:\+\w+)?://localhost)": "postgres_url",
    r"(?:mysql|mariadb)(?=(?:\+\w+)?://localhost)": "mysql_url",
    r"(?:redis|valkey)(?=://localhost)": "redis_url",
    r"dynamodb(?=://)": "dynamodb_url",
    r"amqp(?=://localhost)": "rabbitmq_url",
}


def on_our_servers(block: str, request: pytest.FixtureRequest) -> str:
    """The block with the servers of the tests in the place of those that it names."""
    if "localhost:9092" in block:
        # Clients of Kafka take a list of servers, and no URL. One of its own: whoever else runs the page in another
        # process, another test of it say, has the same topics and the same group.
        block = block.replace("localhost:9092", bootstrap(request.getfixturevalue("own_kafka").url))
    if "nats://localhost:4222" in block:
        # For the same reason; it starts in no time.
        block = block.replace("nats://localhost:4222", request.getfixturevalue("own_nats").url)
    if "localhost:7233" in block:
        # Its workflows have ids of their own, but its task queue is everybody's.
        block = block.replace("localhost:7233", address_of(request.getfixturevalue("own_temporal").url))
    if 'boto3.client("sqs"' in block:
        # The emulator of DynamoDB has SQS, too; a client finds it by the variable.
        endpoint = client_options(request.getfixturevalue("dynamodb_url"))["endpoint_url"]
        monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", endpoint)
        # A worker that stops waits for its last receive.
        monkeypatch.setattr(sqs_requests, "RECEIVE_SECONDS", 1)
    for scheme, fixture in STAND_INS.items():
        if not re.search(scheme, block):
            continue
        server = str(request.getfixturevalue(fixture)).partition("://")[2]
        if fixture == "dynamodb_url":
            block = re.sub(rf"({scheme})://[^\"'\s]*", rf"\1://{server}", block)
        else:
            block = re.sub(rf"({scheme})((?:\+\w+)?)://localhost[^\"'\s?]*", rf"\1\2://{server}", block)
    return block


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line on which it begins."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [(text[: match.start()].count("\n") + 2, match.group(1)) for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_code_block_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)

    run(page, [(line, on_our_servers(block, request)) for line, block in blocks_of(page)], monkeypatch)


# What a reader pastes into a file and runs, and runs again: the whole README, and the first sample of every page.
SAMPLES = {page: blocks_of(page)[: None if page.name == "README.md" else 1] for page in PAGES if blocks_of(page)}


@pytest.mark.parametrize("page", SAMPLES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_what_a_reader_tries_first_works_the_second_time_too(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [(line, on_our_servers(block, request)) for line, block in SAMPLES[page]]

    for _ in range(2):
        run(page, blocks, monkeypatch)


def run(page: Path, blocks: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page in a module of their own: annotations and classes resolve as they do in a file."""
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    with put_back(), closed_guards(monkeypatch), tidied(module):
        for line, code in blocks:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), module.__dict__)


@contextmanager
def tidied(module: types.ModuleType) -> Iterator[None]:
    """Close what a page has opened: it is no program, and does not tidy up. Python 3.13 complains when it finds out.

    Celery gives a task of one application to all others of the process: those of a page end with it. So do the broker
    that is Dramatiq's for the whole process, and the signal handlers of RQ's workers.
    """
    shared = celery._state._on_app_finalizers  # type: ignore[attr-defined]
    before = set(shared)
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        shared.intersection_update(before)
        dramatiq.broker.global_broker = None
        for number, handler in signals.items():
            signal.signal(number, handler)
        for value in vars(module).values():
            opened = isinstance(value, pika.BlockingConnection) and value.is_open
            if opened or isinstance(value, (sqlite3.Connection, psycopg.Connection, redis.Redis, BaseClient)):
                value.close()
            elif isinstance(value, Engine):
                value.dispose()
            elif isinstance(value, RedisBroker):
                value.client.close()


@contextmanager
def closed_guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every guard that is made, those too that no name holds: a heartbeat would open `shop.db` in our folder."""
    made: list[Guard] = []
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "__init__", recorded(Guard.__init__, made))
        try:
            yield
        finally:
            for guard in made:
                guard.close()


def recorded(make: Callable[..., None], made: list[Guard]) -> Callable[..., None]:
    @functools.wraps(make)
    def record(guard: Guard, *args: Any, **options: Any) -> None:
        make(guard, *args, **options)
        made.append(guard)

    return record


@pytest.mark.parametrize("page", sorted(GENERATED["PARTS"]))
def test_what_shows_the_source_is_made_from_it(page: str) -> None:
    written = (PROJECT / "docs" / page).read_text(encoding="utf-8")

    assert written == GENERATED["generated"](page), "run `make docs`"


def test_the_page_of_the_benchmarks_is_made_from_their_results() -> None:
    made = GENERATED["benchmarks"]()

    assert [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text] == [], (
        "run `make docs`"
    )


def test_the_picture_shows_what_the_demo_prints() -> None:
    drawing = runpy.run_path(str(PROJECT / "docs" / "pictures" / "demo.py"))

    drawn = drawing["texts"](drawing["draw"]())

    assert drawing["texts"](drawing["PICTURE"].read_text(encoding="utf-8")) == drawn, "run `make docs`"
    words = html.unescape("".join(drawn)).replace("\xa0", " ")
    assert "kills (SIGKILL) consumer 1" in words
    assert "already done, no effect" in words
    assert re.findall(r"\d\.\d+ s\b|\b\d{3,}(?= +gets)", words) == [], "times and numbers of processes differ each time"


def test_only_files_that_change_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("as it is")
    write = GENERATED["write"]
    monkeypatch.setitem(write.__globals__, "ROOT", tmp_path)

    written = [write(page, text) for text in ("as it is", "as it is now", "as it is now")]

    assert written == [False, True, False]
    assert capsys.readouterr().out == "wrote page.md\n"
    assert page.read_text() == "as it is now"


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(PROJECT)}: {target}"
        for page in [*PAGES, PROJECT / "CONTRIBUTING.md"]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]

    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings; the number of a repeated one among them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = next(
            number for number in itertools.count() if (f"{anchor}-{number}" if number else anchor) not in found
        )
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def test_every_link_to_a_heading_finds_it() -> None:
    pages = [*PAGES, PROJECT / "CONTRIBUTING.md"]
    anchors = {page.resolve(): anchors_of(page) for page in pages}
    broken = [
        f"{page.relative_to(PROJECT)}: {target}#{anchor}"
        for page in pages
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]*)\)", page.read_text(encoding="utf-8"))
        for to in [(page.parent / target).resolve() if target else page.resolve()]
        if to in anchors and anchor not in anchors[to]
    ]

    assert broken == []


def test_every_public_name_is_documented() -> None:
    import onefold

    reference = PROJECT / "docs" / "reference.md"
    listed = reference.read_text(encoding="utf-8")
    told = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page != reference)

    assert [name for name in onefold.__all__ if f"| `{name}` |" not in listed] == []
    # The reference is generated: a name that no other page mentions is one that nobody finds, or that nobody needs.
    assert [name for name in onefold.__all__ if not re.search(rf"\b{name}\b", told)] == []


def test_the_policy_table_names_every_field_and_its_default() -> None:
    from onefold import Policy

    text = (PROJECT / "docs" / "concepts.md").read_text(encoding="utf-8")
    missing = [name for name in Policy.__slots__ if f"| `{name}` |" not in text]

    assert missing == []
