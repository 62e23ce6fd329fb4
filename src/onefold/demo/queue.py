"""A small durable at-least-once queue: a broker process over a log in SQLite, and its client.

It keeps its one promise. A message is in the log, committed, before its producer is notified; it leaves the queue when
its consumer acknowledges it, and is redelivered if that consumer's connection ends before. It never looks for
duplicates: that is not a queue's job.

A network cannot be made to fail on demand, so the broker can be told to lose one answer, once (`Fault`). Everything
else that goes wrong in the demo is a process that is really killed.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from onefold.demo.wallet import Message

HOST: Final = "127.0.0.1"

# How long the broker holds an answer back if nobody asks again; far longer than a producer waits.
HOLD_MAX: Final = 30.0

Tell = Callable[[str, str], None]


class Fault(StrEnum):
    """The fate of the answer to the first stored message."""

    NONE = "none"
    # It arrives only after the message was sent again: too late for a caller who has given up.
    LATE = "late"
    # The connection ends instead.
    CUT = "cut"


class Log:
    """The messages in the order of their arrival, and which of them are acknowledged, in one file."""

    def __init__(self, path: str) -> None:
        # The broker uses it from the thread of each connection, one at a time.
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("CREATE TABLE IF NOT EXISTS log (position INTEGER PRIMARY KEY, message TEXT NOT NULL)")
        self._connection.execute("CREATE TABLE IF NOT EXISTS acknowledged (position INTEGER PRIMARY KEY)")

    def append(self, message: Message) -> None:
        self._connection.execute("INSERT INTO log (message) VALUES (?)", (json.dumps(message),))

    def acknowledge(self, position: int) -> None:
        self._connection.execute("INSERT OR IGNORE INTO acknowledged VALUES (?)", (position,))

    def waiting(self) -> list[tuple[int, Message]]:
        rows = self._connection.execute(
            "SELECT position, message FROM log WHERE position NOT IN (SELECT position FROM acknowledged) ORDER BY 1"
        )
        return [(position, Message(*json.loads(message))) for position, message in rows]


class Broker:
    """Serves one log. A leader also writes every message into the replica's file, before it answers.

    Acknowledgements are not replicated: a promoted replica replays those messages. Brokers that do replicate
    acknowledgements, a little later, lose the last ones in the same way.
    """

    def __init__(self, path: str, tell: Tell, *, replica: str | None = None, fault: Fault = Fault.NONE) -> None:
        self._log = Log(path)
        self._copies = [self._log] if replica is None else [self._log, Log(replica)]
        self._tell = tell
        self._fault = fault
        self._turn = threading.Lock()
        self._asked_again = threading.Event()
        self._in_hand: dict[int, Message] = {}

    def serve(self) -> None:
        """Serve forever: the parent process ends it."""
        with socket.create_server((HOST, 0)) as server:
            self._tell("ready", str(server.getsockname()[1]))
            while True:
                connection, _ = server.accept()
                threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        taken: dict[int, Message] = {}
        try:
            with connection, connection.makefile("rwb") as stream:
                for line in stream:
                    answer = self._answer(json.loads(line), taken)
                    if answer is None:
                        return
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()
        except OSError:
            # The other side is gone, and only the messages that it held matter.
            pass
        finally:
            self._take_back(taken)

    def _answer(self, asked: dict[str, Any], taken: dict[int, Message]) -> dict[str, Any] | None:
        """Return the answer to send; None ends the connection."""
        match asked:
            case {"publish": message}:
                return self._publish(Message(*message))
            case {"acknowledge": position}:
                with self._turn:
                    self._log.acknowledge(position)
                    self._in_hand.pop(position, None)
                    taken.pop(position, None)
                return {}
            case _:
                return self._next(taken)

    def _publish(self, message: Message) -> dict[str, Any] | None:
        with self._turn:
            for log in self._copies:
                log.append(message)
            fault, self._fault = self._fault, Fault.NONE
        self._tell("stored", f"stores {message.key}")
        if fault is Fault.CUT:
            self._tell("cut", "loses the connection before its ack is sent")
            return None
        if fault is Fault.LATE:
            self._tell("late", "is slow to answer")
            self._asked_again.wait(HOLD_MAX)
        else:
            self._asked_again.set()
        return {}

    def _next(self, taken: dict[int, Message]) -> dict[str, Any]:
        with self._turn:
            free = [(position, message) for position, message in self._log.waiting() if position not in self._in_hand]
            if not free:
                return {"position": None}
            position, message = free[0]
            self._in_hand[position] = taken[position] = message
        self._tell("delivered", f"delivers {message.key}")
        return {"position": position, "message": message}

    def _take_back(self, taken: dict[int, Message]) -> None:
        with self._turn:
            for position in taken:
                self._in_hand.pop(position, None)
        for message in taken.values():
            self._tell("returned", f"has lost its consumer without an ack: {message.key} will be delivered again")


class Delivery(NamedTuple):
    position: int
    message: Message


class Client:
    """A connection to the broker. It raises `TimeoutError` and `ConnectionError` as usual."""

    def __init__(self, port: int, timeout: float) -> None:
        self._socket = socket.create_connection((HOST, port), timeout)
        self._stream = self._socket.makefile("rwb")

    def publish(self, message: Message) -> None:
        """Return once the broker has stored it. After an error it is unknown whether it has."""
        self._ask({"publish": message})

    def next(self) -> Delivery | None:
        """Return the next message that nobody holds; None if there is none."""
        answer = self._ask({"next": 1})
        return None if answer["position"] is None else Delivery(answer["position"], Message(*answer["message"]))

    def acknowledge(self, delivery: Delivery) -> None:
        self._ask({"acknowledge": delivery.position})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._stream.write(json.dumps(question).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise ConnectionResetError("the broker ended the connection without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stream.close()
        self._socket.close()
