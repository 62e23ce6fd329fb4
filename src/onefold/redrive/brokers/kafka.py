"""Kafka, with confluent-kafka: the dead letters of a topic.

A topic cannot give up single messages: which of them were sent back is kept with the committed offset of the consumer
group `onefold-redrive`. Below the offset all were; those above it are in the commit's metadata. Retention removes the
messages themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from onefold.queues._kafka.confluent_messages import headers_of
from onefold.queues._kafka.messages import OURS, UNREADABLE, Unreadable
from onefold.redrive.letters import ABOUT_LETTERS, BrokerLost, Letter, NotSent, text

GROUP: Final = "onefold-redrive"

TIMEOUT: Final = 30.0
POLL: Final = 0.1

# The broker's default for `offset.metadata.max.bytes`.
METADATA_MAX: Final = 4_096

# What a message ends with if the broker does not answer.
LOST: Final = frozenset({KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN})

TOO_SCATTERED: Final = "too many that stay lie between those that were sent back: send the older ones first"


def open_letters(url: str, name: str) -> Letters:
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query)) | {"bootstrap.servers": parts.netloc, "log_level": "0"}
    with _told():
        return Letters(options, name)


class Sent:
    """Which letters of a partition were sent back. Pure."""

    def __init__(self, below: int, metadata: str | None = None) -> None:
        self.below = below
        self._above: set[int] = set()
        for part in filter(None, (metadata or "").split(",")):
            first, _, last = part.partition("-")
            if first.isdecimal() and (last or first).isdecimal():
                # Retention may have removed some of them since.
                self._above.update(range(max(below, int(first)), int(last or first) + 1))

    def __contains__(self, offset: int) -> bool:
        return offset < self.below or offset in self._above

    def add(self, *offsets: int) -> None:
        """Add letters that were sent, and offsets at which there is none."""
        self._above.update(offsets)
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1

    def has_room(self, offset: int) -> bool:
        """Return whether the metadata can name one more letter."""
        room = METADATA_MAX - len(f",{offset}-{offset}")
        return offset == self.below or len(self.metadata) <= room

    @property
    def metadata(self) -> str:
        """Return the letters above `below`, as ranges: 12-15,20."""
        ranges: list[list[int]] = []
        for offset in sorted(self._above):
            if ranges and ranges[-1][1] == offset - 1:
                ranges[-1][1] = offset
            else:
                ranges.append([offset, offset])
        return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


class Letters:
    """The dead letters of one topic."""

    def __init__(self, options: dict[str, Any], topic: str) -> None:
        ours = {"group.id": GROUP, "enable.auto.commit": False, "enable.partition.eof": True}
        self._consumer = Consumer({"auto.offset.reset": "earliest", **options, **ours})
        self._producer = Producer({**options, "acks": "all", "message.timeout.ms": int(TIMEOUT * 1000)})
        self._topic = topic
        self._topics = {
            name: set(one.partitions)
            for name, one in self._consumer.list_topics(timeout=TIMEOUT).topics.items()
            if one.error is None
        }
        if topic not in self._topics:
            self._consumer.close()
            raise BrokerLost(f"there is no topic {topic}")
        asked = [TopicPartition(topic, number) for number in sorted(self._topics[topic])]
        self._sent: dict[int, Sent] = {}
        self._ends: dict[int, int] = {}
        for one in self._consumer.committed(asked, timeout=TIMEOUT):
            low, self._ends[one.partition] = self._consumer.get_watermark_offsets(one, timeout=TIMEOUT)
            committed = one.offset if one.offset > OFFSET_INVALID and one.offset >= 0 else 0
            self._sent[one.partition] = Sent(max(low, committed), one.metadata)

    def letters(self) -> Iterator[Letter]:
        for partition, sent in self._sent.items():
            begin = sent.below
            for message in self._read(partition, begin):
                # Below it, where nothing was read, there is nothing.
                sent.add(*range(begin, message.offset()))
                begin = message.offset() + 1
                if message.offset() not in sent:
                    yield _letter(message)

    def _read(self, partition: int, begin: int) -> Iterator[Any]:
        end = self._ends[partition]
        if begin >= end:
            return
        with _told():
            self._consumer.assign([TopicPartition(self._topic, partition, begin)])
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            with _told():
                message = self._consumer.poll(POLL)
            if message is None:
                continue
            error = message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                return
            if error is not None:
                raise BrokerLost(f"Kafka was lost: {error.name()}")
            offset = message.offset()
            if offset is None or offset >= end:
                return
            yield message
            if offset == end - 1:
                return
            deadline = time.monotonic() + TIMEOUT
        raise BrokerLost(f"Kafka has sent nothing of {self._topic}/{partition} for {TIMEOUT:.0f} s")

    def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
        message, reports = letter.native, []
        if to not in self._topics:
            raise NotSent(f"there is no topic {to}")
        if not self._sent[message.partition()].has_room(message.offset()):
            raise NotSent(TOO_SCATTERED)
        if letter.broker_reason == UNREADABLE:
            # Its key may be among them.
            raise NotSent(UNREADABLE)
        own = [pair for pair in headers_of(message) or () if pair[0] not in ABOUT_LETTERS | OURS]
        own += [(name, value.encode()) for name, value in headers.items()]
        try:
            self._producer.produce(
                to,
                value=message.value(),
                key=message.key(),
                headers=own,
                on_delivery=lambda error, _message: reports.append(error),
                **self._partition(letter, to),
            )
        except (KafkaException, BufferError) as error:
            raise NotSent(f"the client does not send it ({type(error).__name__})") from None
        deadline = time.monotonic() + TIMEOUT + 1
        while not reports and time.monotonic() < deadline:
            with _told():
                self._producer.poll(POLL)
        if not reports:
            raise BrokerLost("Kafka has not confirmed a message in time")
        if reports[0] is not None and reports[0].code() in LOST:
            # With each of the others it would be waited for as well.
            raise BrokerLost(f"Kafka was lost: {reports[0].name()}")
        if reports[0] is not None:
            raise NotSent(f"{to} does not take it: {reports[0].name()}")

    def _partition(self, letter: Letter, to: str) -> dict[str, Any]:
        """Return the partition that it came from, if it goes back to its own topic: others of its key are there."""
        number = text(letter.headers.get("x-onefold-partition", ""))
        known = to == letter.origin and number.isdecimal() and int(number) in self._topics[to]
        return {"partition": int(number)} if known else {}

    def remove(self, letter: Letter) -> None:
        partition = letter.native.partition()
        sent = self._sent[partition]
        sent.add(letter.native.offset())
        at = TopicPartition(self._topic, partition, sent.below, metadata=sent.metadata)
        with _told():
            self._consumer.commit(offsets=[at], asynchronous=False)

    def close(self) -> None:
        self._consumer.close()


def _letter(message: Any) -> Letter:
    found = headers_of(message)
    is_readable = not isinstance(found, Unreadable)
    headers = dict(found or ()) if is_readable else {}
    kind, buried = message.timestamp()
    age = max(time.time() - buried / 1000, 0.0) if kind else None
    origin = text(headers.get("x-onefold-topic", ""))
    position = f"{message.partition()}/{message.offset()}"
    reason = "" if is_readable else UNREADABLE
    return Letter(position, message.value() or b"", headers, origin, age, reason, native=message)


@contextmanager
def _told() -> Iterator[None]:
    """Turn an error of the client into one line, without the addresses of the brokers."""
    try:
        yield
    except KafkaException as error:
        raise BrokerLost(f"Kafka does not answer: {error.args[0].name()}") from None
    except SystemError:
        # An interrupt that came while the client waited: it fails, and has lost the exception.
        raise KeyboardInterrupt from None
