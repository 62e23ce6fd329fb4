"""Read, settle, send and bury messages with nats-py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import nats.errors
import nats.js.errors
from msgspec import UNSET, UnsetType
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig

from onefold import UsageError
from onefold._concurrency.generators import run_async
from onefold.events import tell_sent
from onefold.queues._nats.consumer import ACK_WAIT, MSG_ID, NO_LIMIT, Dead, Delivery, Settings, one_line, sent_headers
from onefold.queues._shared.sends import confirmed, pauses
from onefold.queues.keys import Key, Message, header, with_key

# How long the server has to answer: to a message, to an acknowledgement that asks for an answer, to a question.
CONFIRM_SECONDS_MAX: Final = 5.0

# A sender survives a restart of the server: most of a minute, while nobody answers.
SEND_TRIES: Final = 8
# While a cluster elects a leader, nobody answers for a stream; that is a matter of a second or two.
NOBODY_TRIES: Final = 5

# How long a server may take to answer that it has everything.
FLUSH_SECONDS_MAX: Final = 5

# The version of a server that takes a reason with `+TERM`.
REASONS_SINCE: Final = (2, 11)

ACKED: Final = "_ackd"

ID_OF_SENDER: Final = header(MSG_ID)


# Stream, consumer, deliveries, sequence, time.
Origin = tuple[str, str, str, str, str]


def delivery_of(message: Msg, origin: Origin) -> Delivery:
    """Return a message as handlers see it."""
    stream, consumer, delivered, sequence, stored = origin
    headers = message.headers or {}
    return Delivery(
        message.data,
        headers,
        headers.get(MSG_ID),
        message.subject,
        stream,
        int(sequence),
        int(delivered),
        f"{stream}.{consumer}.{sequence}.{stored}",
        message,
    )


def origin_of(reply: str) -> Origin:
    """Return the stream, the consumer, the deliveries, the sequence and the time of a message, from its reply subject.

    That is `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<…>.<time>.<pending>`, or the same with a domain and an
    account before the stream. `Msg.metadata` says the same, and takes as long as the rest of a delivery.
    """
    parts = reply.split(".")
    # With a domain there may be more at the end.
    first = 2 if len(parts) == 9 else 4
    if len(parts) < 9 or len(parts) == 10 or parts[:2] != ["$JS", "ACK"]:
        raise UsageError("this is no message of JetStream: nobody would deliver it again. Subscribe by js.subscribe()")
    stream, consumer, delivered, sequence, _, stored = parts[first : first + 6]
    return stream, consumer, delivered, sequence, stored


def client_of(message: Msg) -> Client:
    """Return the connection that a message came by. Private, for lack of a public name."""
    return message._client


def take(message: Msg) -> None:
    """Keep a subscription without `manual_ack=True` from acknowledging a message when the callback returns.

    It skips what is marked as acknowledged. Private, for lack of a public name.
    """
    setattr(message, ACKED, True)


async def end(subscription: JetStreamContext.PullSubscription) -> list[Msg]:
    """End a pull subscription; return the messages that have come since the last fetch.

    A request that reached the server late outlives its fetch there, and would get messages that nobody reads, first of
    all those that are given back: they would wait for the end of `ack_wait`. Without its inbox the server drops it.

    Private, for lack of a public name: `unsubscribe` alone would lose what is under way. What is pending may be only
    the server's word that a request has timed out, and each fetch that waits in vain leaves another one.
    """
    client, inbox = subscription._nc, subscription._sub
    with suppress(nats.errors.Error, OSError):
        if client.is_connected:
            await client._send_unsubscribe(inbox._id)
            # What the server has sent until then is here now.
            await client.flush(FLUSH_SECONDS_MAX)
        await subscription.unsubscribe()
    found: list[Msg] = []
    while not inbox._pending_queue.empty():
        message = inbox._pending_queue.get_nowait()
        inbox._pending_size -= len(message.data)
        if not JetStreamContext.is_status_msg(message):
            found.append(message)
    return found


async def ack(message: Msg) -> None:
    setattr(message, ACKED, False)
    await message.ack()


async def ack_surely(message: Msg) -> None:
    """Acknowledge, and wait until the server has noted it."""
    setattr(message, ACKED, False)
    await message.ack_sync(timeout=CONFIRM_SECONDS_MAX)


async def give_back(message: Msg, delay: float) -> None:
    setattr(message, ACKED, False)
    await message.nak(delay=delay)


async def terminate(message: Msg, reason: str) -> None:
    """Have it never delivered again, and wait until the server has noted it. Its advisory has the reason."""
    client = client_of(message)
    version = client.connected_server_version
    # An older server would not know what this is.
    takes_reasons = (version.major, version.minor) >= REASONS_SINCE
    word = f"+TERM {one_line(reason)}" if takes_reasons else "+TERM"
    await client.request(message.reply, word.encode(), timeout=CONFIRM_SECONDS_MAX)


async def bury(message: Msg, dead: Dead) -> None:
    """Send a dead letter, and wait until a stream has it."""
    context = client_of(message).jetstream()
    await context.publish(dead.subject, dead.body, timeout=CONFIRM_SECONDS_MAX, headers=dead.headers or None)


async def settings_of(message: Msg) -> Settings:
    """Ask the server how the consumer of this message delivers. Raises `UsageError` if it cannot be guarded."""
    stream, consumer, *_ = origin_of(message.reply)
    parts = message.reply.split(".")
    domain = parts[2] if len(parts) > 9 and parts[2] != "_" else None
    context = client_of(message).jetstream(timeout=CONFIRM_SECONDS_MAX, domain=domain)
    return checked((await context.consumer_info(stream, consumer)).config)


def checked(config: ConsumerConfig) -> Settings:
    """Return the settings of a consumer. Refuse one whose messages are not acknowledged one by one."""
    if config.ack_policy != AckPolicy.EXPLICIT:
        policy = getattr(config.ack_policy, "value", config.ack_policy)
        why = (
            "the server forgets a message before it is handled"
            if policy == AckPolicy.NONE.value
            else "an acknowledgement is also one for messages before it, which may not be handled yet"
        )
        raise UsageError(f"the consumer has ack_policy={policy!r}: {why}. Use AckPolicy.EXPLICIT, the default")
    # With a list of back-offs, each delivery has a time of its own.
    waits = [float(one) for one in (config.ack_wait, *(config.backoff or ())) if one]
    return Settings(min(waits, default=ACK_WAIT), config.max_deliver or NO_LIMIT)


async def send(
    js: JetStreamContext,
    subject: str,
    body: bytes,
    *,
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, str] | None = None,
    stream: str | None = None,
) -> str:
    """Send a message until a stream has it, and return its key: the one that you passed, or a new one.

    It is sent again after a lost connection or answer, always with the same key and `Nats-Msg-Id`. Raises nats-py's own
    error once its attempts are used up, and soon if no stream takes the message.
    """
    if isinstance(key, UnsetType) and not header()(Message(b"", headers or {})):
        found = ID_OF_SENDER(Message(b"", headers or {}))
        key = UNSET if found is None else str(found)
    chosen, carried = with_key(headers, key)
    written = sent_headers(subject, chosen, carried)
    tries = 0

    async def publish() -> None:
        nonlocal tries
        tries += 1
        # Each attempt: the stream may have the message of one that failed.
        tell_sent(subject, chosen)
        await js.publish(subject, body, timeout=CONFIRM_SECONDS_MAX, stream=stream, headers=dict(written))

    def is_worth_another_try(error: BaseException) -> bool:
        if isinstance(error, nats.js.errors.NoStreamResponseError):
            return tries < NOBODY_TRIES
        return isinstance(error, LOST)

    await run_async(confirmed(publish, asyncio.sleep, (nats.errors.Error,), is_worth_another_try, pauses(SEND_TRIES)))
    return chosen


# What may be over in a moment. A closed connection stays closed.
LOST: Final = (
    nats.errors.TimeoutError,
    nats.errors.StaleConnectionError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.NoServersError,
    nats.js.errors.ServiceUnavailableError,
)
