"""The documentation is true: every code block runs, and what shows the source is made from it."""

from __future__ import annotations

import re
import runpy
import sqlite3
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import celery._state
import pika
import psycopg
import pytest
import redis
from botocore.client import BaseClient
from sqlalchemy import Engine

from onefold import Guard
from services.kafka import bootstrap
from tests.stores.django.project import put_back
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
    for scheme, fixture in STAND_INS.items():
        if not re.search(scheme, block):
            continue
        place = str(request.getfixturevalue(fixture)).partition("://")[2]
        if fixture == "dynamodb_url":
            block = re.sub(rf"({scheme})://[^\"'\s]*", rf"\1://{place}", block)
        else:
            block = re.sub(rf"({scheme})((?:\+\w+)?)://localhost[^\"'\s?]*", rf"\1\2://{place}", block)
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
    with put_back(), tidied(module):
        for line, code in blocks:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), module.__dict__)


@contextmanager
def tidied(module: types.ModuleType) -> Iterator[None]:
    """Close what a page has opened: it is no program, and does not tidy up. Python 3.13 complains when it finds out.

    Celery gives a task of one application to all others of the process: those of a page end with it.
    """
    shared = celery._state._on_app_finalizers  # type: ignore[attr-defined]
    before = set(shared)
    try:
        yield
    finally:
        shared.intersection_update(before)
        for value in vars(module).values():
            opened = isinstance(value, pika.BlockingConnection) and value.is_open
            if opened or isinstance(value, (sqlite3.Connection, psycopg.Connection, redis.Redis, BaseClient, Guard)):
                value.close()
            elif isinstance(value, Engine):
                value.dispose()


@pytest.mark.parametrize("page", sorted(GENERATED["PARTS"]))
def test_what_shows_the_source_is_made_from_it(page: str) -> None:
    written = (PROJECT / "docs" / page).read_text(encoding="utf-8")

    assert written == GENERATED["generated"](page), "run `make docs`"


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(PROJECT)}: {target}"
        for page in [*PAGES, PROJECT / "CONTRIBUTING.md"]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]

    assert broken == []


def test_every_public_name_is_documented() -> None:
    import onefold

    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in onefold.__all__ if not re.search(rf"\b{name}\b", text)]

    assert missing == []


def test_the_policy_table_names_every_field_and_its_default() -> None:
    from onefold import Policy

    text = (PROJECT / "docs" / "concepts.md").read_text(encoding="utf-8")
    missing = [name for name in Policy.__slots__ if f"| `{name}` |" not in text]

    assert missing == []
