"""NATS JetStream, with nats-py: the dead letters on a subject, which are read by their sequence and stay meanwhile.

A stream drops a message whose `Nats-Msg-Id` it has seen within its window. So a letter gets its own id back only if
that may be its key; otherwise one made of its place, under which a redrive that is repeated sends it once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.errors import BadHeaderError, BadSubjectError, MaxPayloadError
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from onefold.queues._nats.consumer import (
    BLOCK_BYTES,
    LINE_BYTES,
    MESSAGE_ID_HEADER,
    MSG_ID,
    SEQUENCE_HEADER,
    SERVERS,
    STREAM_HEADER,
)
from onefold.queues._nats.consumer import SUBJECT_HEADER as SUBJECT
from onefold.queues.keys import KEY_HEADER
from onefold.redrive.letters import BrokerLost, Letter, NotSent, kept
from onefold.stores.base import Address

T = TypeVar("T")

OURS: Final = frozenset({SUBJECT, STREAM_HEADER, SEQUENCE_HEADER, MESSAGE_ID_HEADER})

TIMEOUT: Final = 10.0

IN_WINDOW: Final = (
    "the stream has seen its Nats-Msg-Id within its duplicate window, and drops it: try again when that is over"
)

TOO_LARGE: Final = "with the headers that it goes back with, it is larger than a message may be on this server"


def open_letters(url: str, name: str) -> Letters:
    runner = asyncio.Runner()
    try:
        return runner.run(_opened(runner, url, name))
    except BaseException as error:
        runner.close()
        if isinstance(error, NotFoundError):
            raise BrokerLost(f"no stream takes the subject {name}") from None
        if isinstance(error, (nats.errors.Error, OSError, TimeoutError, ValueError)):
            raise BrokerLost(f"NATS cannot be reached: {type(error).__name__}") from None
        raise


async def _opened(runner: asyncio.Runner, url: str, subject: str) -> Letters:
    async def quiet(_error: Exception) -> None:
        """Errors are reported in one line."""

    async with asyncio.timeout(TIMEOUT):
        client = await nats.connect(url, max_reconnect_attempts=1, allow_reconnect=False, error_cb=quiet)
    try:
        js = client.jetstream(timeout=TIMEOUT)
        stream = await js.find_stream_name_by_subject(subject)
        return Letters(runner, client, stream, subject, (await js.stream_info(stream)).state.last_seq)
    except BaseException:
        await client.close()
        raise


class Letters:
    """The dead letters on one subject."""

    def __init__(self, runner: asyncio.Runner, client: Client, stream: str, subject: str, last: int) -> None:
        self._runner = runner
        self._client = client
        self._js = client.jetstream(timeout=TIMEOUT)
        self._stream = stream
        self._subject = subject
        self._last = last

    def letters(self) -> Iterator[Letter]:
        sequence = 0
        while sequence < self._last:
            try:
                raw = self._run(self._js.get_msg(self._stream, sequence + 1, subject=self._subject, next=True))
            except NotFoundError:
                return
            sequence = raw.seq or 0
            if not sequence or sequence > self._last:
                return
            yield _letter(raw)

    def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
        own = {name: one for name, one in kept(letter.headers, OURS).items() if not name.lower().startswith(SERVERS)}
        own |= {**headers, MSG_ID: self._id_of(letter, to, headers)}
        lines = sum(len(name) + len(one.encode()) + LINE_BYTES for name, one in own.items())
        if BLOCK_BYTES + lines + len(letter.body) > self._client.max_payload:
            # The server would end the connection.
            raise NotSent(TOO_LARGE)
        try:
            answer = self._run(self._js.publish(to, letter.body, headers=own))
        except NoStreamResponseError:
            raise NotSent(f"no stream takes the subject {to}") from None
        except BadSubjectError:
            raise NotSent(f"{to} is not a subject") from None
        except (BadHeaderError, MaxPayloadError) as error:
            raise NotSent(f"the client does not send it ({type(error).__name__})") from None
        except APIError as error:
            raise NotSent(f"the stream of {to} does not take it: {error.description}") from None
        if answer.duplicate and own[MSG_ID] == letter.headers.get(MESSAGE_ID_HEADER):
            raise NotSent(IN_WINDOW)

    def remove(self, letter: Letter) -> None:
        try:
            self._run(self._js.delete_msg(self._stream, letter.native.seq))
        except APIError as error:
            if self._is_gone(letter):
                # Somebody else has removed it.
                return
            raise BrokerLost(f"{self._stream} does not let its messages be removed: {error.description}") from None

    def _is_gone(self, letter: Letter) -> bool:
        """Return whether a letter is gone: the server says so only in words, and as an error of its own."""
        try:
            self._run(self._js.get_msg(self._stream, letter.native.seq))
        except APIError as error:
            return isinstance(error, NotFoundError)
        return False

    def close(self) -> None:
        try:
            # An interrupt may have left word that the loop has to stop: it stops here, once.
            with suppress(RuntimeError):
                self._runner.run(asyncio.sleep(0))
            self._runner.run(self._client.close())
        finally:
            self._runner.close()

    def _id_of(self, letter: Letter, to: str, headers: Mapping[str, str]) -> str:
        """Return the id that it is published with.

        To another place, or with another permission to bypass, it is another message.
        """
        theirs, key = letter.headers.get(MESSAGE_ID_HEADER), letter.headers.get(KEY_HEADER)
        key_is_header = key is not None and letter.digest == Address("", letter.operation, key).digest
        if theirs is not None and not key_is_header:
            return str(theirs)
        # With the time: a stream that is created anew counts from one again.
        place = (self._stream, letter.native.seq, letter.native.time, to, *headers.values())
        return "redrive." + hashlib.sha256(repr(place).encode()).hexdigest()[:32]

    def _run(self, asked: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(asked)
        except (APIError, NoStreamResponseError, BadSubjectError, BadHeaderError, MaxPayloadError):
            raise
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise BrokerLost(f"NATS was lost: {type(error).__name__}") from None


def _letter(raw: Any) -> Letter:
    headers = _headers(base64.b64decode(raw.hdrs or b""))
    age = None if raw.time is None else max((datetime.now(UTC) - raw.time).total_seconds(), 0.0)
    return Letter(f"{raw.seq}", raw.data or b"", headers, headers.get(SUBJECT, ""), age, native=raw)


def _headers(block: bytes) -> dict[str, str]:
    """Return the headers of a stored message, as a consumer gets them: the client reads these as those of an e-mail."""
    lines = (line.partition(b":") for line in block.split(b"\r\n")[1:])
    pairs = {name.strip().decode(errors="replace"): value.strip() for name, colon, value in lines if colon}
    return {name: value.decode(errors="replace") for name, value in pairs.items()}
