"""Kafka's messages, for both clients: for reading keys, as dead letters, and for sending. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from msgspec import UnsetType

from onefold import MissingKey, UsageError
from onefold._concurrency.generators import Flow
from onefold.durations import Duration, as_text, seconds
from onefold.queues._kafka.notices import log
from onefold.queues._kafka.offsets import Spot
from onefold.queues.keys import Key, Message, with_key

# How long a delivery report may take.
WITHIN: Final = 30.0

# Names the parts of a message that its dead letter could not keep.
CHANGED_HEADER: Final = "x-onefold-changed"
# The headers of a dead letter. A sender's header that only shares the prefix is the sender's.
OURS: Final = frozenset(
    {CHANGED_HEADER, *map("x-onefold-{}".format, ("topic", "partition", "offset", "operation", "reason", "digest"))}
)

UNREADABLE: Final = "the name of one of its headers is not UTF-8, so they cannot be read"


class NotConfirmed(RuntimeError):
    """The broker did not confirm the message. Send it again with `key=error.key`: consumers then run it once."""

    def __init__(self, topic: str, key: str, why: object) -> None:
        super().__init__(f"not confirmed by {topic}: {why}. Send it again with key=error.key")
        self.key = key


def check_undecoded(consumer: object) -> None:
    """Refuse a consumer with a deserializer: it would raise in the poll, where the message cannot be buried."""
    names = ("_value_deserializer", "_key_deserializer")
    if any(getattr(consumer, name, None) is not None for name in names):
        raise UsageError(
            "the consumer has a deserializer. Decode messages in the handler: if that raises, the message is "
            "dead-lettered"
        )


def check_wait(wait: float, interval_ms: object) -> None:
    """Refuse a wait longer than the poll interval: while a duplicate waits in place, nothing is polled."""
    if isinstance(interval_ms, int) and wait * 1000 >= interval_ms:
        raise UsageError(
            f"wait={as_text(wait)} is not below the consumer's max_poll_interval_ms={interval_ms}: a duplicate that "
            "waits that long loses its partitions. Wait less: it is delivered again anyway"
        )


def check_letters(producer: object, method: str, topic: object) -> None:
    """Check that a dead letter's producer exists, and leaves the message unchanged."""
    if not hasattr(producer, method) or not isinstance(topic, str) or not topic:
        raise UsageError(f"DeadLetters(producer, topic) takes a producer with {method}(), and the name of a topic")
    if any(getattr(producer, name, None) is not None for name in ("_value_serializer", "_key_serializer")):
        raise UsageError(
            "the producer has a serializer, but a dead letter is sent unchanged: use a producer without one"
        )


def check_consumer(consumer: object, kind: type) -> None:
    if not isinstance(consumer, kind):
        raise UsageError(f"consumer= is {type(consumer).__name__}, but this client takes {kind.__name__}")


def dead_letter_stops(dead_letter: object, kind: type) -> bool:
    """Return whether the consumer stops at a message that can never be handled. Nothing is dropped by default."""
    if isinstance(dead_letter, kind):
        return False
    if dead_letter == "stop":
        return True
    raise UsageError(f"dead_letter={dead_letter!r}: pass DeadLetters(producer, topic), or 'stop' to raise instead")


def message_of(body: bytes | None, headers: Iterable[tuple[str, Any]] | Unreadable | None, spot: Spot) -> Message:
    """Return a message for reading its key. Of headers with one name the last counts, as everywhere in Kafka."""
    known = headers if isinstance(headers, Unreadable) else dict(headers or ())
    return Message(body or b"", known, position=f"{'/'.join(map(str, spot.partition))}/{spot.offset}")


def letter_headers(
    headers: Iterable[tuple[str, Any]] | None, spot: Spot, operation: str, reason: str, digest: str = ""
) -> list[tuple[str, Any]]:
    """Return the headers that a dead letter has in addition to its message's; a digest only if it has a key."""
    origin = {"topic": spot.partition.topic, "partition": spot.partition.number, "offset": spot.offset}
    facts = {**origin, "operation": operation, "reason": reason, **({"digest": digest} if digest else {})}
    ours = [(f"x-onefold-{name}", str(value).encode(errors="replace")) for name, value in facts.items()]
    return [*(pair for pair in headers or () if pair[0] not in OURS), *ours]


class Letter(NamedTuple):
    """The content of a dead letter."""

    value: bytes | None
    headers: list[tuple[str, Any]]


def letter_forms(value: bytes | None, headers: list[tuple[str, Any]], *, whole: bool = True) -> Iterator[Letter]:
    """Yield the dead letter unchanged, then the forms to try if the producer refuses to write it.

    A client can read what it cannot write: aiokafka refuses a message with neither a value nor a key. Only such a
    letter is changed, and says so in a header. It may lose its headers, never its value.
    """
    if whole:
        yield Letter(value, headers)
        filled = [(name, b"" if found is None else found) for name, found in headers]
        yield Letter(value or b"", [*filled, (CHANGED_HEADER, b"what was null is empty here")])
    ours = [pair for pair in headers if pair[0] in OURS]
    yield Letter(value or b"", [*ours, (CHANGED_HEADER, b"the headers of the message cannot be written here")])


class DeadLettersBase:
    """A producer, and the topic for messages that can never be handled."""

    # The method by which its producer sends.
    sends_by: ClassVar[str]

    def __init__(self, producer: Any, topic: str, *, within: Duration = WITHIN) -> None:
        check_letters(producer, self.sends_by, topic)
        self._producer = producer
        self._topic = topic
        self._within = seconds(within, "within")

    def _bury(self, letters: Iterable[Letter], produce: Callable[[Letter], Any]) -> Flow[bool]:
        """Produce the first form of a letter that the producer accepts. Return whether the broker has confirmed it.

        `produce` returns None once it is confirmed; else the reason why not.
        """
        why: object = None
        for letter in letters:
            try:
                why = yield partial(produce, letter)
                break
            except Exception as error:  # noqa: BLE001 - whatever a client raises here, its consumer survives
                why = f"the producer refuses to write it ({type(error).__name__})"
        if why is not None:
            log.error("no dead letter in %s, so it will be delivered again: %s", self._topic, why)
        return why is None


class Unreadable(Mapping[str, Any]):
    """The headers of a message whose names are not text: reading a key from them gives the reason for a dead letter."""

    def __getitem__(self, name: str) -> Any:
        raise MissingKey(UNREADABLE)

    def __iter__(self) -> Iterator[str]:
        raise MissingKey(UNREADABLE)

    def __len__(self) -> int:
        raise MissingKey(UNREADABLE)


def sent_headers(
    headers: Mapping[str, str | bytes] | None, key: Key | UnsetType, name: str
) -> tuple[str, list[tuple[str, bytes]]]:
    """Return the idempotency key, new if none is given here or among the headers, and the headers that carry it."""
    chosen, carried = with_key(headers, key, name)
    return chosen, [(one, value.encode() if isinstance(value, str) else value) for one, value in carried.items()]
