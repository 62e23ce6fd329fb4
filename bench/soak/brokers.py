"""What the soaks of brokers share: messages that move money, four workers, a server that is killed, and what must hold.

A soak of a broker brings its own sender and its own worker, and says what is left in its queues.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple

from bench.soak.effects import Ledger
from bench.soak.environments import ROOMS
from bench.soak.plan import ACCOUNTS, Message, account
from services.house import House
from services.programs import Missing, in_ci
from services.servers import Server

WORKERS: Final = 4

# One in so many messages is sent twice: by a producer that did not hear the confirmation, say.
TWICE: Final = 10

SECONDS_MAX: Final = 600.0
EVIDENCE_MAX: Final = 20

# Fresh processes: nothing of the parent's connections or threads comes with them.
CONTEXT: Final = multiprocessing.get_context("spawn")


class Size(NamedTuple):
    messages: int
    # At these shares of the messages' effects the broker is killed.
    kills: tuple[float, ...]


FULL: Final = Size(5_000, (0.25, 0.6))
SHORT: Final = Size(600, (0.4,))


class Desk(NamedTuple):
    """What a worker works with."""

    broker: str
    store: str
    ledger: Ledger
    is_guarded: bool


class Soak(NamedTuple):
    """What is a broker's own."""

    # As it is written, and as the services call it.
    title: str
    server: str
    prepare: Callable[[Desk], None]
    # Sends every message until it is confirmed.
    send_all: Callable[[str, Iterator[Message]], None]
    # One worker process, until it is told to stop.
    work: Callable[[Desk, Any], None]
    # How many messages are left, by queue.
    left: Callable[[Desk], Mapping[str, int]]
    before_kill: Callable[[Server], None] = lambda _: None


def main(soak: Soak, program: str, text: str | None, arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=(text or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="600 messages and one kill, as CI runs it")
    parser.add_argument("--without-guard", action="store_true", help="show what happens then: it must fail")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="repeat a run's messages")
    asked = parser.parse_args(arguments)
    size = SHORT if asked.short else FULL
    kills = f"{len(size.kills)} kills of {soak.title}"
    print(f"seed {asked.seed}, {WORKERS} processes, {size.messages:,} messages, {kills}")
    with closing(House()) as house:
        try:
            with house.own(soak.server) as broker:
                room = ROOMS["postgres"](house["postgres"])
                assert room.ledger is not None
                room.ledger.create()
                desk = Desk(broker.url, room.url, room.ledger, not asked.without_guard)
                wrong = run(soak, broker, desk, size, asked.seed)
        except Missing as error:
            print(f"{'CI needs it' if in_ci() else 'skipped'}: {error}")
            return 1 if in_ci() else 0
    print("\n".join(wrong[:EVIDENCE_MAX]) or "the wallet is exact")
    return 1 if wrong else 0


def run(soak: Soak, broker: Server, desk: Desk, size: Size, seed: int) -> list[str]:
    """One run; what did not hold."""
    chance = random.Random(seed)
    messages = [
        Message(f"m-{number:05}", account(chance.randrange(ACCOUNTS)), chance.randint(1, 100))
        for number in range(size.messages)
    ]
    soak.prepare(desk)
    began = time.monotonic()
    errors: list[str] = []
    sender = threading.Thread(target=_caught, args=(errors, soak.send_all, desk.broker, sends(messages, chance)))
    with _workers(soak.work, desk):
        sender.start()
        for share in size.kills:
            _reach(desk, share * size.messages, errors, size)
            soak.before_kill(broker)
            print(f"  {soak.title} is killed after {len(effects(desk)):,} messages", flush=True)
            broker.kill()
            broker.restart()
        _reach(desk, size.messages, errors, size)
        sender.join(SECONDS_MAX)
        _settle(soak, desk, errors)
    took = time.monotonic() - began
    wrong = errors + list(violations(desk, messages, soak.left(desk)))
    total, speed = effects(desk).total(), size.messages / took
    print(f"{size.messages:,} messages, {total:,} effects, {took:.1f} s, {speed:,.0f} a second")
    return wrong


def sends(messages: Sequence[Message], chance: random.Random) -> Iterator[Message]:
    """Every message, and some twice: at once, or at the end."""
    late = []
    for message in messages:
        yield message
        if chance.randrange(TWICE) == 0:
            if chance.random() < 0.5:
                yield message
            else:
                late.append(message)
    yield from late


@contextmanager
def _workers(work: Callable[[Desk, Any], None], desk: Desk) -> Iterator[None]:
    """The worker processes; they settle what they have begun before they go."""
    stop = CONTEXT.Event()
    processes = [CONTEXT.Process(target=work, args=(desk, stop), daemon=True) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    try:
        yield
        stop.set()
        for process in processes:
            process.join(SECONDS_MAX)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _reach(desk: Desk, wanted: float, errors: Sequence[str], size: Size) -> None:
    """Until so many messages have had their effect, reporting each tenth."""
    deadline, told = time.monotonic() + SECONDS_MAX, 0
    while (reached := len(effects(desk))) < wanted and not errors:
        if reached * 10 // size.messages > told:
            told = reached * 10 // size.messages
            print(f"  {reached:,} of {size.messages:,}", flush=True)
        if time.monotonic() > deadline:
            raise SystemExit(f"only {reached:,} effects after {SECONDS_MAX:g} s")
        time.sleep(0.1)


def _settle(soak: Soak, desk: Desk, errors: Sequence[str]) -> None:
    """Until nothing waits in the queue: the duplicates that came last are to be seen too."""
    deadline = time.monotonic() + SECONDS_MAX
    while any(soak.left(desk).values()) and not errors and time.monotonic() < deadline:
        time.sleep(0.2)


def violations(desk: Desk, messages: Sequence[Message], left: Mapping[str, int]) -> Iterator[str]:
    """Looked at without a line of the library."""
    happened, balances = effects(desk), desk.ledger.seen().balances
    for message in messages:
        if happened[message.id] != 1:
            yield f"{message.id}: {happened[message.id]} effects, and there should be 1"
    owed: Counter[str] = Counter()
    for message in messages:
        owed[message.account] += message.amount
    for name, balance in sorted(balances.items()):
        if balance != owed[name]:
            yield f"{name} has {balance:,}, and should have {owed[name]:,}"
    for queue, number in left.items():
        if number:
            yield f"{number} messages are left in {queue}"


def effects(desk: Desk) -> Counter[str]:
    return Counter(message for message, _ in desk.ledger.seen().calls)


def _caught(errors: list[str], call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - a thread's errors are the run's
        errors.append(f"the sender ended with {type(error).__name__}: {error}")
