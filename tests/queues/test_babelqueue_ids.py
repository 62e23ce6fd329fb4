"""BabelQueue: an id that cannot be a key costs no message its run, whichever wrapper and store; the page says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from babelqueue import BabelQueue, idempotency
from babelqueue.codec import EnvelopeCodec

from onefold import Guard, MissingKey
from onefold.keys import KEY_MAX
from onefold.queues.babelqueue import IdempotencyStore, wrap
from onefold.queues.keys import minted
from tests.support import PROJECT

URN = "urn:babel:orders:created"
PAGE = (PROJECT / "docs" / "queues" / "babelqueue.md").read_text(encoding="utf-8")

MISSING = object()

# Unguarded: they run each time.
UNUSABLE = {
    "missing": MISSING,
    "null": None,
    "empty": "",
    "blank": " \t",
    "too long": "k" * (KEY_MAX + 1),
    "too long in bytes": "é" * KEY_MAX,
    "a NUL": "pay\x00ment",
    "a lone surrogate": "pay\ud800ment",
}

USABLE = {"a text": "pay-1", "as long as can be": "k" * KEY_MAX, "as long as can be in bytes": "é" * (KEY_MAX // 2)}

Wrapper = Callable[[Guard, Callable[..., Any]], Callable[..., Any]]
WRAPPERS: dict[str, Wrapper] = {
    "ours": wrap,
    "the SDK's": lambda guard, handler: idempotency.wrap(IdempotencyStore(guard), handler),
}


def body_with(found: object) -> bytes:
    envelope = EnvelopeCodec.make(URN, {"order": 1}, queue="orders")
    if found is MISSING:
        del envelope["meta"]["id"]
    else:
        envelope["meta"]["id"] = found
    return json.dumps(envelope).encode()


def consumed(wrapper: str, found: object, *, times: int = 2) -> tuple[int, int]:
    """How often the handler ran, and how many dead letters there are."""
    app = BabelQueue("memory://", queue="orders", max_attempts=1, dead_letter=True)
    runs: list[Any] = []

    def handler(data: Any, meta: Any) -> None:
        runs.append(meta)

    with Guard("memory:") as guard:
        app.register(URN, WRAPPERS[wrapper](guard, handler))
        for _ in range(times):
            app.transport.publish("orders", body_with(found).decode())
        app.consume(max_messages=times)
    transport: Any = app.transport
    return len(runs), transport.size("orders.dlq")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", UNUSABLE)
def test_an_id_that_cannot_be_a_key_runs_unguarded(wrapper: str, name: str) -> None:
    assert consumed(wrapper, UNUSABLE[name]) == (2, 0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", USABLE)
def test_every_other_id_runs_once(wrapper: str, name: str) -> None:
    assert consumed(wrapper, USABLE[name]) == (1, 0)


@pytest.mark.parametrize("found", [42, 4.2, True, ["a"], {"a": 1}], ids=repr)
def test_an_id_that_is_no_text_never_arrives(found: object) -> None:
    runs, buried = consumed("ours", found, times=1)

    assert runs == 0
    assert buried == 1


def test_called_by_hand_an_id_that_is_no_text_runs_unguarded() -> None:
    runs: list[int] = []
    with Guard("memory:") as guard:
        wrapped = wrap(guard, lambda data, meta: runs.append(1))
        for _ in range(2):
            wrapped({}, {"id": 42})

    assert runs == [1, 1]


def test_a_store_of_ours_has_not_seen_what_cannot_be_a_key() -> None:
    with Guard("memory:") as guard:
        ours = IdempotencyStore(guard)
        for found in UNUSABLE.values():
            ours.remember(found)  # type: ignore[arg-type]
            assert not ours.seen(found)  # type: ignore[arg-type]
            ours.forget(found)  # type: ignore[arg-type]


def test_the_page_says_what_becomes_of_each() -> None:
    assert "missing, empty or blank, of more than 255 bytes, with a NUL or a lone surrogate" in PAGE
    assert "runs unguarded, as the SDK's contract says" in PAGE
    assert "never reaches a handler" in PAGE


@pytest.mark.parametrize("name", ["too long in bytes", "a NUL", "a lone surrogate"])
def test_no_queue_sends_what_cannot_be_a_key(name: str) -> None:
    with pytest.raises(MissingKey, match="the key "):
        minted(UNUSABLE[name])  # type: ignore[arg-type]
