"""Listen for the ends of records over psycopg: a sync store in a thread of its own, an async one in its event loop."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from onefold._concurrency.forks import set_lock
from onefold._concurrency.generators import run
from onefold._concurrency.waiters import acquired
from onefold._model import Address
from onefold.stores.postgres import wakeups
from onefold.stores.postgres.wakeups import Marks
from onefold.stores.postgres.wakeups.async_listener import Line


class Listener:
    """Opens a session when somebody waits, and closes it when nobody has waited for a while."""

    _opening: threading.Lock

    def __init__(self, open_connection: Callable[[], Any], name: str) -> None:
        self._open = open_connection
        self._name = name
        self._session: Session | None = None
        self._is_pooled = False
        self._pid = os.getpid()
        set_lock(self, "_opening")

    def listen(self, address: Address) -> bool:
        """Mark a record, so that its end is told. Return False if nobody will tell of it."""
        if self._pid != os.getpid():
            self._session, self._pid = None, os.getpid()
        if self._is_pooled:
            return False
        try:
            session = self._opened()
            return session is not None and session.mark(address)
        except Exception as error:  # noqa: BLE001 - whatever it is, looking by itself is the answer
            wakeups.tell_failed(self._name, error)
            return False

    def unlisten(self, address: Address) -> None:
        if self._session is not None:
            self._session.marks.forget(address)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._pid == os.getpid():
            session.close()

    def _opened(self) -> Session | None:
        with acquired(self._opening, wakeups.MARK_SECONDS):
            if self._session is None or self._session.is_over:
                connection = self._open().connection
                (server,) = connection.execute(wakeups.PROCESS).fetchone()
                if wakeups.is_pooled(connection.info.backend_pid, server):
                    self._is_pooled = True
                    connection.close()
                    wakeups.tell_pooled(self._name)
                    return None
                connection.execute(wakeups.LISTEN)
                self._session = Session(connection)
            return self._session


class Session:
    """The connection that listens. Only its thread uses it; whoever waits asks the thread."""

    def __init__(self, connection: Any) -> None:
        self.marks = Marks()
        self.is_over = False
        self._connection = connection
        connection.add_notify_handler(lambda message: self.marks.heard(message.payload))
        self._asked: deque[tuple[Address, threading.Event, list[bool]]] = deque()
        self._bell, self._ring = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="onefold-wakeups", daemon=True)
        self._thread.start()

    def mark(self, address: Address) -> bool:
        answered, answers = threading.Event(), list[bool]()
        self._asked.append((address, answered, answers))
        self._ring.send(b".")
        if self.is_over:
            return False
        if not answered.wait(wakeups.MARK_SECONDS):
            answers.append(False)
        return bool(answers) and answers[0]

    def close(self) -> None:
        self.is_over = True
        with suppress(OSError):
            self._ring.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join(wakeups.LOOK_SECONDS)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._bell, selectors.EVENT_READ)
                selector.register(self._connection.fileno(), selectors.EVENT_READ)
                self._listen(selector)
        except Exception as error:  # noqa: BLE001 - the session is lost: whoever waits may open another
            wakeups.tell_failed("the session for wake-ups", error)
        finally:
            self.is_over = True
            with suppress(Exception):
                self._connection.close()
            while self._asked:
                self._asked.popleft()[1].set()
            self._bell.close()
            self._ring.close()
            self.marks.lost()

    def _listen(self, selector: selectors.BaseSelector) -> None:
        idle = 0.0
        while not self.is_over and idle < wakeups.IDLE_SECONDS:
            ready = selector.select(wakeups.LOOK_SECONDS)
            if any(key.fileobj is self._bell for key, _ in ready):
                self._bell.recv(4096)
            while self._asked:
                self._answer(*self._asked.popleft())
            self._hear()
            idle = 0.0 if ready or self.marks.wanted else idle + wakeups.LOOK_SECONDS

    def _answer(self, address: Address, answered: threading.Event, answers: list[bool]) -> None:
        if answers:
            # Whoever has asked has given up.
            return
        try:
            answers.append(run(self.marks.set(address, self._ask)))
        finally:
            answered.set()

    def _ask(self, statement: str) -> Any:
        (found,) = self._connection.execute(statement).fetchone()
        return found

    def _hear(self) -> None:
        """Read what has come by itself."""
        self._connection.pgconn.consume_input()
        while (message := self._connection.pgconn.notifies()) is not None:
            self.marks.heard(message.extra.decode())


def opens(open_connection: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Line]]:
    async def opened() -> Line:
        return PsycopgLine((await open_connection()).connection)

    return opened


class PsycopgLine:
    """An async connection. Between two statements the loop watches its socket here: psycopg does so only within one."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._heard: Callable[[str], None] = _unheard
        self._lost: Callable[[], None] = _unknown
        # The connection does not tell any more once it is lost.
        self._watched = connection.fileno()

    async def listen(self, heard: Callable[[str], None], lost: Callable[[], None]) -> bool:
        if wakeups.is_pooled(self._connection.info.backend_pid, await self._asked(wakeups.PROCESS)):
            return False
        self._heard, self._lost = heard, lost
        self._connection.add_notify_handler(lambda message: heard(message.payload))
        await self._connection.execute(wakeups.LISTEN)
        self._watch()
        return True

    async def ask(self, statement: str) -> Any:
        self._loop.remove_reader(self._watched)
        try:
            return await self._asked(statement)
        finally:
            # Messages may come whether there was an answer or not, such as that the session is lost.
            if self._connection.closed:
                self._end()
            else:
                self._watch()

    async def close(self) -> None:
        if not self._connection.closed:
            self._loop.remove_reader(self._watched)
            await self._connection.close()

    async def _asked(self, statement: str) -> Any:
        cursor = await self._connection.execute(statement)
        (found,) = await cursor.fetchone()
        return found

    def _watch(self) -> None:
        self._loop.add_reader(self._watched, self._hear)

    def _hear(self) -> None:
        try:
            self._connection.pgconn.consume_input()
            while (message := self._connection.pgconn.notifies()) is not None:
                self._heard(message.extra.decode())
        except Exception as error:  # noqa: BLE001 - the session is lost: whoever waits may open another
            wakeups.tell_failed("the session for wake-ups", error)
            self._loop.remove_reader(self._watched)
            self._end()

    def _end(self) -> None:
        self._connection.pgconn.finish()
        self._lost()


def _unheard(_payload: str) -> None: ...


def _unknown() -> None: ...
