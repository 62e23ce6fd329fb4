"""RabbitMQ, with pika: the dead letters of a queue.

They are taken one by one and not acknowledged: those that are not sent back return to their places in the queue when
the connection is closed, or lost. Meanwhile nobody else sees them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final

import pika
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    NackError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    ShortStringTooLong,
    UnroutableError,
)

from onefold.queues._rabbitmq.consumer import EXCHANGE_HEADER, NOT_COPIED, OURS, PERSISTENT, ROUTING_KEY_HEADER
from onefold.queues._shared.dead_letters import TIME_HEADER
from onefold.redrive.letters import BrokerLost, Letter, NotSent, kept, text

# The broker's own account of a dead letter. If it is sent back, the broker would take the message for one that circles.
DEATH: Final = "x-death"
DEATHS: Final = ("x-death", "x-first-death-", "x-last-death-", "x-opt-deaths")

TIMEOUT: Final = 30.0

# A queue may be routed to by an exchange: sent through that, the message would reach every other queue as well.
THROUGH_EXCHANGE: Final = (
    "it came through the exchange {}, which may lead to other queues as well: name its own queue with --back-to"
)

# The client ends its connection at a value that it cannot read, such as a time after the year 9999.
UNREAD: Final = (
    "{}, while it read letter {}. If it is the same one each time, the client cannot read it: --limit stops before it, "
    "and another client can remove it"
)

# A quorum queue counts each look at a message as a delivery, and drops what exceeds its limit.
LOOKS: Final = 5
LOOKED_AT: Final = (
    "the queue has delivered one of them {} times, and each look counts: make sure that it has no x-delivery-limit, "
    "which would remove them"
)


def open_letters(url: str, name: str) -> Letters:
    try:
        parameters = pika.URLParameters(url)
    except (ValueError, TypeError) as error:
        raise BrokerLost(f"the broker's URL cannot be used ({type(error).__name__})") from None
    parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = TIMEOUT
    with ExitStack() as opened, _told():
        connection = opened.enter_context(pika.BlockingConnection(parameters))
        found = Letters(connection, name)
        opened.pop_all()
    return found


class Letters:
    """The dead letters of one queue."""

    def __init__(self, connection: pika.BlockingConnection, queue: str) -> None:
        self._connection = connection
        self._queue = queue
        self._taking = connection.channel()
        self._sending = connection.channel()
        self._sending.confirm_delivery()
        self._count = self._taking.queue_declare(queue, passive=True).method.message_count

    def letters(self) -> Iterator[Letter]:
        for number in range(1, self._count + 1):
            try:
                with _told():
                    method, properties, body = self._taking.basic_get(self._queue)
            except BrokerLost as error:
                raise BrokerLost(UNREAD.format(error, number)) from None
            if method is None or properties is None or body is None:
                return
            yield _letter(f"{number}", method.delivery_tag or 0, properties, body)

    def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
        properties: pika.BasicProperties = letter.native[1]
        own = {name: one for name, one in kept(letter.headers, OURS).items() if not _is_brokers(name)}
        properties.headers = own | dict(headers)
        # A broker refuses a message whose user is not the one that sends it.
        properties.user_id = None
        properties.delivery_mode = properties.delivery_mode or PERSISTENT
        try:
            with _told():
                self._sending.basic_publish("", to, letter.body, properties, mandatory=True)
        except (UnroutableError, ShortStringTooLong):
            raise NotSent(f"there is no queue {to}") from None
        except NackError:
            raise NotSent(f"{to} does not take it: the broker refuses it, as a queue does that is full") from None

    def remove(self, letter: Letter) -> None:
        with _told():
            self._taking.basic_ack(letter.native[0])

    def close(self) -> None:
        # If it is lost now, what was not acknowledged is in the queue again all the same.
        with suppress(BrokerLost), _told():
            if self._connection.is_open:
                self._connection.close()


def _letter(position: str, tag: int, properties: pika.BasicProperties, body: bytes) -> Letter:
    headers: dict[str, Any] = dict(properties.headers or {})
    deaths = headers.get(DEATH)
    death = deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}
    exchange, problem = headers.get(EXCHANGE_HEADER), {}
    if exchange is None:
        # Rejected, expired or too many: the broker itself has buried it.
        origin = text(death.get("queue", ""))
    elif exchange == "":
        # Sent to the queue by its name.
        origin = text(headers.get(ROUTING_KEY_HEADER, ""))
    else:
        origin, problem = "", {"problem": THROUGH_EXCHANGE.format(text(exchange))}
    reason = f"the broker says: {text(death['reason'])}" if "reason" in death else ""
    age = _age(headers.get(TIME_HEADER, death.get("time")))
    looks = headers.get("x-delivery-count")
    warning = LOOKED_AT.format(looks) if isinstance(looks, int) and looks >= LOOKS else ""
    return Letter(position, body, headers, origin, age, reason, warning=warning, native=(tag, properties), **problem)


def _age(buried: object) -> float | None:
    if isinstance(buried, datetime):
        # In UTC, whether the client says so or not.
        buried = (buried if buried.tzinfo else buried.replace(tzinfo=UTC)).timestamp()
    return max(time.time() - buried, 0.0) if isinstance(buried, (int, float)) else None


def _is_brokers(name: str | bytes) -> bool:
    """Return whether a header is the broker's own. A name that is not text comes as bytes."""
    return text(name) in NOT_COPIED or text(name).startswith(DEATHS)


@contextmanager
def _told() -> Iterator[None]:
    """Turn an error of the client into one line, instead of those that it logs."""
    logger = logging.getLogger("pika")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except (UnroutableError, NackError, ShortStringTooLong):
        raise
    except ChannelClosedByBroker as error:
        raise BrokerLost(error.reply_text) from None
    except ProbableAuthenticationError:
        raise BrokerLost("RabbitMQ refuses the login") from None
    except ProbableAccessDeniedError:
        raise BrokerLost("RabbitMQ has no such virtual host, or refuses access to it") from None
    except (AMQPError, OSError) as error:
        raise BrokerLost(f"RabbitMQ cannot be reached, or was lost: {type(error).__name__}") from None
    finally:
        logger.setLevel(before)
