"""Where an error was raised: the last line of the user's own code, and never a value."""

from __future__ import annotations

import asyncio
import json
import logging
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from celery import Celery

from onefold import Guard
from onefold.queues import babelqueue
from onefold.queues._shared.own_frame import location
from onefold.queues._shared.verdict import named
from onefold.queues.celery import guarded, send
from onefold.stores.memory import MemoryStore


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def within(error: BaseException, folder: str) -> BaseException:
    """The error without the frames above this folder: a worker's command is none of the user's."""
    inner = error.__traceback__
    while inner is not None and folder not in inner.tb_frame.f_code.co_filename:
        inner = inner.tb_next
    return error.with_traceback(inner)


def module(folder: Path, path: str, code: str) -> types.ModuleType:
    """A module in a file of this path, as its code sees it."""
    file = folder / path
    made = types.ModuleType(file.stem)
    exec(compile(code, str(file), "exec"), vars(made))
    return made


HANDLER = """
def charge(call):
    return book(call)

def book(call):
    return call()
"""


def test_an_error_in_the_standard_library_is_shown_where_own_code_called_it(tmp_path: Path) -> None:
    own = module(tmp_path, "billing.py", HANDLER)

    error = raised(lambda: own.charge(partial(json.loads, "{")))

    assert location(error) == "billing.py:6 in book"
    assert named(error) == "JSONDecodeError at billing.py:6 in book"


def test_an_error_in_an_installed_package_is_shown_where_own_code_called_it(tmp_path: Path) -> None:
    own = module(tmp_path, "billing.py", HANDLER)
    client = module(tmp_path, "lib/python3.11/site-packages/bank/client.py", "def post():\n    raise OSError\n")

    assert location(raised(lambda: own.charge(client.post))) == "billing.py:6 in book"


def test_an_error_in_onefold_is_shown_where_own_code_called_it(tmp_path: Path) -> None:
    own = module(tmp_path, "billing.py", HANDLER)
    guard = Guard(MemoryStore())

    assert location(raised(lambda: own.charge(partial(guard.run, "", "", print)))) == "billing.py:6 in book"


def test_an_async_handler_is_found_too(tmp_path: Path) -> None:
    own = module(tmp_path, "billing.py", "import asyncio\nasync def charge():\n    await asyncio.wait_for(1, 2)\n")

    assert location(raised(lambda: asyncio.run(own.charge()))) == "billing.py:3 in charge"


def test_if_the_application_is_installed_itself_its_own_package_is_what_counts(tmp_path: Path) -> None:
    installed = "lib/python3.11/site-packages"
    handler = module(tmp_path, f"{installed}/shop/billing.py", HANDLER)
    client = module(tmp_path, f"{installed}/bank/client.py", "def post():\n    raise OSError\n")

    error = within(raised(lambda: handler.charge(client.post)), "site-packages")

    assert location(error) == "billing.py:6 in book"


def test_where_all_is_the_standard_library_its_last_line_is_shown() -> None:
    error = within(raised(lambda: json.loads("{")), "json")

    assert location(error).startswith("decoder.py:")


def test_an_error_that_was_never_raised_is_named_by_its_class_alone() -> None:
    assert named(ValueError("card 4111")) == "ValueError"


def test_babelqueue_says_where_a_message_failed_and_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    def charge(data: Any, _meta: Any) -> None:
        msgspec.convert(data, int)

    guard = Guard(MemoryStore())
    handle = babelqueue.wrap(guard, charge, operation="charge")
    for meta in ({"id": "pay-1"}, {}):
        with pytest.raises(msgspec.ValidationError):
            handle("card 4111", meta)

    known, unknown = caplog.messages
    line = charge.__code__.co_firstlineno + 1
    digest = guard.address("charge", "pay-1").digest
    assert known == f"charge [key {digest}]: it failed: ValidationError at test_own_frame.py:{line} in charge"
    assert unknown == f"charge: it failed: ValidationError at test_own_frame.py:{line} in charge"


def celery_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "onefold.queues.celery"]


@pytest.fixture
def eager() -> Celery:
    app = Celery("frames", broker="memory://")
    app.conf.update(task_always_eager=True)
    return app


def test_celery_says_where_each_attempt_failed(eager: Celery, caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(MemoryStore())

    @guarded(eager, guard, "charge", autoretry_for=(ValueError,), max_retries=1, default_retry_delay=0)
    def charge(card: str) -> None:
        raise ValueError(card)

    caplog.set_level(logging.INFO)
    send(charge, ["card 4111"], key="pay-1")

    digest = guard.address("charge", "pay-1").digest
    lines = celery_lines(caplog)
    assert [line.rpartition(":")[0] for line in lines] == [
        f"charge [key {digest}]: attempt {number} failed: ValueError at test_own_frame.py" for number in (1, 2)
    ]
    assert all(line.endswith(" in charge") for line in lines)


def test_a_celery_task_that_only_wants_to_be_retried_has_not_failed(
    eager: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard(MemoryStore())

    @guarded(eager, guard, "charge", bind=True, max_retries=1, default_retry_delay=0)
    def charge(self: Any) -> None:
        if not self.request.retries:
            raise self.retry()

    send(charge, key="pay-1")

    assert celery_lines(caplog) == []
