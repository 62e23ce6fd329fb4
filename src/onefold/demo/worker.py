"""The nursery, which forks the processes of the demo, and their roles: broker, producer or consumer.

The nursery has imported everything and has no threads; it forks a process for each order, so that one starts in
milliseconds. A process reports its actions, one line of JSON each on standard output. It ends when its standard input
does, so that it cannot outlive the demo, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, Final, NoReturn

# The imports of a guarded consumer happen here, once.
from onefold.demo.consumers import Desk, Handler
from onefold.demo.queue import Broker, Client, Fault
from onefold.demo.wallet import Message, ReplyLost, Wallet

# Unless an answer is held back, none takes this long.
PATIENCE: Final = 30.0

# How long the application of place 1 waits at first; each retry waits twice as long, as a polite client does.
IMPATIENCE: Final = 0.25

# One duplicate is wanted; a machine under load may make another one.
SENDS_MAX: Final = 8
TRIES_MAX: Final = 3

# Standard input, output and error.
STREAMS: Final = 3
ORDER_MAX: Final = 65_536


def nursery() -> None:
    """Fork a process for each order, until the demo is gone. The order is one line, its streams come with it."""
    # Ctrl-C reaches every process of a terminal: only the demo decides what happens to the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as orders:
        while True:
            order, streams, _, _ = socket.recv_fds(orders, ORDER_MAX, STREAMS)
            if not order:
                break
            while not order.endswith(b"\n"):
                order += orders.recv(ORDER_MAX)
            pid = os.fork()
            if pid == 0:
                orders.close()
                role, plan = json.loads(order)
                _live(role, plan, streams)
            for stream in streams:
                os.close(stream)
            orders.sendall(f"{pid}\n".encode())
    # Not before: the pid of a dead process stays reserved until now, so that a kill cannot hit another one.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _live(role: str, plan: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run from start to end; whatever happens, this process does not become a second nursery."""
    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        threading.Thread(target=_end_with_the_demo, daemon=True).start()
        ROLES[role](plan)
        tell("end", "ends")
        status = 0
    except BaseException:  # noqa: BLE001 - told to the demo, which shows the last line
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def tell(kind: str, text: str) -> None:
    """Write one line, in one write: threads of one process report too."""
    line = json.dumps({"kind": kind, "words": text, "at": time.time()})
    os.write(1, line.encode() + b"\n")


def _end_with_the_demo() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(1)


def broker(plan: dict[str, Any]) -> None:
    Broker(plan["log"], tell, replica=plan.get("replica"), fault=Fault(plan.get("fault", Fault.NONE))).serve()


def producer(plan: dict[str, Any]) -> None:
    """Send one message until the broker has acknowledged it, always with the same key."""
    message, patience = Message(*plan["message"]), IMPATIENCE if plan.get("impatient") else PATIENCE
    for _ in range(SENDS_MAX):
        tell("sends", f"sends {message}")
        try:
            with Client(plan["port"], patience) as queue:
                queue.publish(message)
            tell("acknowledged", "has the ack")
            return
        except TimeoutError:
            tell("again", f"has no answer after {patience:g} s, and retries")
            patience *= 2
        except ConnectionError:
            tell("again", "gets a broken connection instead of an ack, and resends")
    sys.exit(f"no ack for {message.key} after {SENDS_MAX} sends")


def consumer(plan: dict[str, Any]) -> None:
    """Handle and acknowledge whatever is on the queue, and end when nothing is left."""
    wallet = Wallet(plan["wallet"], Mishap(plan.get("fault", "none")).after_commit)
    handle: Handler = pkgutil.resolve_name(plan["handler"])(wallet, Desk(plan["store"], plan["scope"]))
    with Client(plan["port"], PATIENCE) as queue:
        while (delivery := queue.next()) is not None:
            tell("got", f"gets {delivery.message.key}")
            _handled(wallet, handle, delivery.message)
            queue.acknowledge(delivery)
            tell("acked", f"acks {delivery.message.key}")


def _handled(wallet: Wallet, handle: Handler, message: Message) -> None:
    for _ in range(TRIES_MAX):
        wallet.note_delivery(message.key)
        try:
            text = handle(message)
        except ReplyLost as lost:
            tell("again", f"{lost}: tries again")
            continue
        if text:
            tell("absorbed", text)
        return
    sys.exit(f"{message.key}: gave up after {TRIES_MAX} tries")


class Mishap:
    """A fault right after the first effect is committed: none, a death, or a reply that gets lost.

    `die` waits to be killed by the demo, with SIGKILL: it neither acknowledges nor reports anything to a guard any
    more. `lose-reply` is place 5. SQLite lives inside this process and its replies cannot get lost on a wire; so the
    COMMIT is real, and its result is replaced by the error that the client of a database server would get.
    """

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def after_commit(self, effect: str) -> None:
        tell("effect", effect)
        fault, self._fault = self._fault, "none"
        if fault == "die":
            tell("doomed", "is about to ack")
            while True:
                signal.pause()
        if fault == "lose-reply":
            raise ReplyLost("the reply to COMMIT is lost")


ROLES: Final = {"broker": broker, "producer": producer, "consumer": consumer}

if __name__ == "__main__":
    nursery()
