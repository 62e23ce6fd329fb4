"""Wherever an interrupt strikes whoever watches a claim, the next claim is renewed: no heartbeat stays locked."""

from __future__ import annotations

import linecache
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

from onefold._heartbeat import beats as _heartbeat_beats
from onefold._heartbeat import sync_guards as _heartbeat_sync_guards
from onefold._heartbeat import thread as _heartbeat_thread
from onefold._heartbeat.sync_guards import Heartbeat
from onefold._model import Claim
from onefold.events import Teller
from onefold.keys import address
from tests.support import PATIENCE, Elsewhere, eventually

# What `threading` and `weakref` have written in Python is interrupted, too.
OURS = {module.__file__ for module in (_heartbeat_beats, _heartbeat_thread, _heartbeat_sync_guards, threading, weakref)}

# More than there are lines to go through: a bound for the loops over them.
LINES_MAX = 500


class Strike:
    """A KeyboardInterrupt at the n-th line, in this thread."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where = ""

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._look if frame.f_code.co_filename in OURS else None

    def _look(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event in ("line", "return") and not _is_with(frame):
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.where = f"{event} of {frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._look


def _is_with(frame: FrameType) -> bool:
    """Return whether this is a `with` line: a tracer can strike between a block and its end, which no signal can."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


class Renewing:
    """A store that says which claims were renewed."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        for claim in claims:
            self.tokens.append(claim.token)
        return [True for _ in claims]

    claim_all = close_all = extend_all

    def has(self, token: bytes) -> bool:
        return eventually(lambda: token in self.tokens)


def claim(token: bytes) -> Claim:
    return Claim(address("charge", "pay_1"), token, 30.0, 90.0)


def watch_due(heartbeat: Heartbeat, token: bytes) -> None:
    """Watch a claim whose renewal is due at once."""
    heartbeat.watch([claim(token)], time.monotonic() - 15.0)


def struck(call: Callable[[], None], at: int) -> str:
    """Interrupt a call at its n-th line; return where, or nothing if it has fewer.

    In a thread of its own: where a tracer strikes inside an `except`, Python goes on handling that exception for ever.
    """
    strike = Strike(at)

    def interrupted() -> None:
        try:
            with strike.armed():
                call()
        # `threading` itself makes a RuntimeError of one that strikes as a Condition is left.
        except (KeyboardInterrupt, RuntimeError):
            assert strike.where

    Elsewhere(interrupted).result()
    return strike.where


def test_wherever_an_interrupt_strikes_the_start_of_a_heartbeat_the_next_claim_is_renewed() -> None:
    for at in count(1):
        assert at < LINES_MAX
        store = Renewing()
        beating = Heartbeat(lambda store=store: store, Teller())  # type: ignore[misc]
        where = struck(partial(watch_due, beating, b"interrupted"), at)

        # In another thread, so that a heartbeat which stays locked fails, and does not hang.
        Elsewhere(partial(watch_due, beating, b"next")).result()
        assert store.has(b"next"), where
        beating.close()
        if not where:
            break
    assert at > 20


def test_wherever_an_interrupt_strikes_while_a_heartbeat_waits_the_next_claim_is_renewed() -> None:
    store = Renewing()
    beating = Heartbeat(lambda: store, Teller())
    for at in count(1):
        assert at < LINES_MAX
        # It waits for a later moment, so that each of these has to wake it.
        where = struck(partial(watch_due, beating, b"interrupted"), at)
        token = b"next %d" % at
        watch_due(beating, token)

        assert store.has(token), where
        beating.unwatch([claim(token), claim(b"interrupted")])
        if not where:
            break
    beating.close()
    assert at > 5


def test_a_heartbeat_whose_close_was_interrupted_is_closed_by_the_next() -> None:
    for at in count(1):
        assert at < LINES_MAX
        store = Renewing()
        beating = Heartbeat(lambda store=store: store, Teller())  # type: ignore[misc]
        watch_due(beating, b"before")
        thread = beating._thread
        assert thread is not None
        where = struck(beating.close, at)
        beating.close()

        thread.join(PATIENCE)
        assert not thread.is_alive(), where
        if not where:
            break
    assert at > 5
