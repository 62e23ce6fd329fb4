"""RabbitMQ is killed in the middle of its messages: python -m bench.soak_rabbitmq (--short for CI)

5,000 messages, each of which moves money in PostgreSQL, 10 % of them sent twice, to four worker processes; the broker
is killed and started again while they are sent and handled. Every message must have had its effect exactly once, and
the wallet must be exact. 1 if it is not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.synchronize import Event
from typing import Any, Final, NamedTuple

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from bench.soak.effects import Ledger
from bench.soak.environments import ROOMS
from bench.soak.plan import ACCOUNTS, Message, account
from onefold import Guard
from onefold.queues.keys import header
from onefold.queues.pika import Delivery, guarded, send
from services.house import House
from services.processes import wait_until
from services.programs import Missing, in_ci
from services.rabbitmq import is_on_disk
from services.servers import Server

WORKERS: Final = 4
PREFETCH: Final = 20
QUEUE: Final = "credits"
DEAD: Final = "credits.dead"

# One in so many messages is sent twice: by a producer that did not hear the confirmation, say.
TWICE: Final = 10

RECONNECT_SECONDS: Final = 0.2
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak_rabbitmq", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--short", action="store_true", help="600 messages and one kill, as CI runs it")
    parser.add_argument("--without-guard", action="store_true", help="show what happens then: it must fail")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="repeat a run's messages")
    asked = parser.parse_args(arguments)
    size = SHORT if asked.short else FULL
    print(f"seed {asked.seed}, {WORKERS} processes, {size.messages:,} messages, {len(size.kills)} kills of RabbitMQ")
    with closing(House()) as house:
        try:
            with house.own("rabbitmq") as broker:
                room = ROOMS["postgres"](house["postgres"])
                assert room.ledger is not None
                room.ledger.create()
                wrong = soak(broker, Desk(broker.url, room.url, room.ledger, not asked.without_guard), size, asked.seed)
        except Missing as error:
            print(f"{'CI needs it' if in_ci() else 'skipped'}: {error}")
            return 1 if in_ci() else 0
    print("\n".join(wrong[:EVIDENCE_MAX]) or "the wallet is exact")
    return 1 if wrong else 0


def soak(broker: Server, desk: Desk, size: Size, seed: int) -> list[str]:
    """One run; what did not hold."""
    chance = random.Random(seed)
    messages = [
        Message(f"m-{number:05}", account(chance.randrange(ACCOUNTS)), chance.randint(1, 100))
        for number in range(size.messages)
    ]
    with connected(desk.broker) as channel:
        for queue in (QUEUE, DEAD):
            channel.queue_declare(queue, durable=True)
    began = time.monotonic()
    errors: list[str] = []
    sender = threading.Thread(target=caught, args=(errors, send_all, desk.broker, messages, chance))
    with workers(desk):
        sender.start()
        for share in size.kills:
            reach(desk, share * size.messages, errors, size)
            wait_until(lambda: is_on_disk(broker, DEAD), "RabbitMQ does not write its queues down")
            print(f"  RabbitMQ is killed after {len(effects(desk)):,} messages", flush=True)
            broker.kill()
            broker.restart()
        reach(desk, size.messages, errors, size)
        sender.join(SECONDS_MAX)
        settle(desk, errors)
    took = time.monotonic() - began
    wrong = errors + list(violations(desk, messages))
    total, speed = effects(desk).total(), size.messages / took
    print(f"{size.messages:,} messages, {total:,} effects, {took:.1f} s, {speed:,.0f} a second")
    return wrong


def send_all(url: str, messages: Sequence[Message], chance: random.Random) -> None:
    """Every message until it is confirmed, and some twice: at once, or at the end."""
    channel = Reconnecting(url)
    late = []
    for message in messages:
        body = json.dumps(message._asdict()).encode()
        send_surely(channel, body, message.id)
        if chance.randrange(TWICE) == 0:
            if chance.random() < 0.5:
                send_surely(channel, body, message.id)
            else:
                late.append((body, message.id))
    for body, key in late:
        send_surely(channel, body, key)
    channel().connection.close()


def send_surely(channel: Reconnecting, body: bytes, key: str) -> None:
    """A sender tries for half a minute; a broker on a slow machine may take longer to come back."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            send(channel, QUEUE, body, key=key)
        except AMQPError:
            if time.monotonic() > deadline:
                raise
        else:
            return


class Reconnecting:
    """A channel that is open when one asks for it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel: BlockingChannel | None = None

    def __call__(self) -> BlockingChannel:
        if self._channel is None or not self._channel.is_open:
            self._channel = pika.BlockingConnection(pika.URLParameters(self._url)).channel()
        return self._channel


@contextmanager
def workers(desk: Desk) -> Iterator[None]:
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


def work(desk: Desk, stop: Event) -> None:
    """One worker: it consumes, and connects again whenever its broker is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def credit(delivery: Delivery, *, tx: Any) -> None:
        desk.ledger.credit(tx, Message(**json.loads(delivery.body)))

    with Guard(desk.store) as guard:
        callback = guarded(guard, "credit", credit, key=header(), dead_letter=DEAD)
        while not stop.is_set():
            with suppress(AMQPError), pika.BlockingConnection(pika.URLParameters(desk.broker)) as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=PREFETCH)
                in_hand = InHand(channel, callback if desk.is_guarded else unguarded(desk))
                channel.basic_consume(QUEUE, in_hand)
                # What it has not begun would go back to the queue, and nobody would be there to take it.
                while not stop.is_set() or in_hand.tags:
                    connection.process_data_events(0.1)
                channel.stop_consuming()
                callback.drain(connection)
                return
            time.sleep(RECONNECT_SECONDS)


class InHand:
    """The messages of a channel that this worker has not settled."""

    def __init__(self, channel: BlockingChannel, consume: Callable[..., None]) -> None:
        self.tags: set[int] = set()
        self._consume = consume
        for name in ("basic_ack", "basic_nack", "basic_reject"):
            setattr(channel, name, self._noted(getattr(channel, name)))

    def __call__(self, channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        self.tags.add(method.delivery_tag)
        self._consume(channel, method, properties, body)

    def _noted(self, settle: Callable[..., None]) -> Callable[..., None]:
        def noted(tag: int, **options: Any) -> None:
            settle(tag, **options)
            self.tags.discard(tag)

        return noted


def unguarded(desk: Desk) -> Callable[..., None]:
    """A consumer as one writes it without a guard: the effect, then the acknowledgement."""

    def consume(channel: BlockingChannel, method: Any, _properties: Any, body: bytes) -> None:
        with closing(desk.ledger.connect()) as connection:
            desk.ledger.credit(connection, Message(**json.loads(body)))
            connection.commit()
        channel.basic_ack(method.delivery_tag)

    return consume


def reach(desk: Desk, wanted: float, errors: Sequence[str], size: Size) -> None:
    """Until so many messages have had their effect, reporting each tenth."""
    deadline, told = time.monotonic() + SECONDS_MAX, 0
    while (reached := len(effects(desk))) < wanted and not errors:
        if reached * 10 // size.messages > told:
            told = reached * 10 // size.messages
            print(f"  {reached:,} of {size.messages:,}", flush=True)
        if time.monotonic() > deadline:
            raise SystemExit(f"only {reached:,} effects after {SECONDS_MAX:g} s")
        time.sleep(0.1)


def settle(desk: Desk, errors: Sequence[str]) -> None:
    """Until nothing waits in the queue: the duplicates that came last are to be seen too."""
    deadline = time.monotonic() + SECONDS_MAX
    while left(desk, QUEUE) and not errors and time.monotonic() < deadline:
        time.sleep(0.2)


def violations(desk: Desk, messages: Sequence[Message]) -> Iterator[str]:
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
    for queue in (QUEUE, DEAD):
        if number := left(desk, queue):
            yield f"{number} messages are left in {queue}"


def effects(desk: Desk) -> Counter[str]:
    return Counter(message for message, _ in desk.ledger.seen().calls)


def left(desk: Desk, queue: str) -> int:
    with connected(desk.broker) as channel:
        return int(channel.queue_declare(queue, passive=True).method.message_count)


@contextmanager
def connected(url: str) -> Iterator[BlockingChannel]:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        yield connection.channel()


def caught(errors: list[str], call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - a thread's errors are the run's
        errors.append(f"the sender ended with {type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
