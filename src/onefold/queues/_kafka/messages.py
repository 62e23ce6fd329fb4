"""Kafka's messages, for both clients: as keys see them, as dead letters, and as they are sent. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from onefold import MissingKey, UsageError
from onefold._concurrency.generators import Work
from onefold.durations import Duration, seconds
from onefold.queues._kafka.notices import log
from onefold.queues._kafka.offsets import Spot
from onefold.queues.keys import Key, Message, with_key

# How long a delivery report may take.
WITHIN: Final = 30.0

# Says what of a message its dead letter could not keep.
CHANGED_HEADER: Final = "x-onefold-changed"
# What a dead letter says of itself. A sender's header whose name only begins like that is the sender's.
OURS: Final = frozenset(
    {CHANGED_HEADER, *map("x-onefold-{}".format, ("topic", "partition", "offset", "operation", "reason"))}
)

UNREADABLE: Final = "the name of one of its headers is not UTF-8, and they cannot be read"


class NotConfirmed(RuntimeError):
    """The broker did not confirm the message. Send it again with `key=error.key`: consumers then run it once."""

    def __init__(self, topic: str, key: str, why: object) -> None:
        super().__init__(f"not confirmed by {topic}: {why}. Send it again with key=error.key")
        self.key = key


def check_undecoded(consumer: object) -> None:
    """Refuse a consumer with a deserializer: it would raise in the poll, where nobody can bury the message."""
    names = ("_value_deserializer", "_key_deserializer")
    if any(getattr(consumer, name, None) is not None for name in names):
        raise UsageError(
            "the consumer decodes messages by itself. Decode them in the handler: what it raises is buried"
        )


def check_wait(wait: Duration, interval_ms: object) -> None:
    """Refuse a wait longer than the poll interval: while a duplicate waits in place nothing is polled."""
    if isinstance(interval_ms, int) and seconds(wait, "wait") * 1000 >= interval_ms:
        raise UsageError(
            f"wait={wait!r} is not below the consumer's max_poll_interval_ms={interval_ms}: a duplicate that waits so "
            "long loses its partitions. Wait less: it comes again by itself"
        )


def check_letters(producer: object, method: str, topic: object) -> None:
    """Check that a dead letter's producer exists, and leaves the message unchanged."""
    if not hasattr(producer, method) or not isinstance(topic, str) or not topic:
        raise UsageError(f"DeadLetters(producer, topic) takes a producer with {method}(), and the name of a topic")
    if any(getattr(producer, name, None) is not None for name in ("_value_serializer", "_key_serializer")):
        raise UsageError(
            "the producer encodes messages by itself, and a dead letter is sent as it was: take another one"
        )


def check_consumer(consumer: object, kind: type) -> None:
    if not isinstance(consumer, kind):
        raise UsageError(f"consumer= is {type(consumer).__name__}, and this client takes {kind.__name__}")


def dead_letter_stops(dead_letter: object, kind: type) -> bool:
    """Return whether the consumer stops at a message that can never be handled. Nothing is dropped by default."""
    if isinstance(dead_letter, kind):
        return False
    if dead_letter == "stop":
        return True
    raise UsageError(f"dead_letter={dead_letter!r}: name DeadLetters(producer, topic), or say 'stop' to raise instead")


def message_of(body: bytes | None, headers: Iterable[tuple[str, Any]] | Unreadable | None, spot: Spot) -> Message:
    """Return a message as the keys see it. Of headers with one name the last counts, as everywhere in Kafka."""
    known = headers if isinstance(headers, Unreadable) else dict(headers or ())
    return Message(body or b"", known, position=f"{'/'.join(map(str, spot.partition))}/{spot.offset}")


def letter_headers(
    headers: Iterable[tuple[str, Any]] | None, spot: Spot, operation: str, reason: str
) -> list[tuple[str, Any]]:
    """Return the headers that a dead letter has in addition to its message's."""
    origin = {"topic": spot.partition.topic, "partition": spot.partition.number, "offset": spot.offset}
    facts = {**origin, "operation": operation, "reason": reason}
    ours = [(f"x-onefold-{name}", str(value).encode(errors="replace")) for name, value in facts.items()]
    return [*(pair for pair in headers or () if pair[0] not in OURS), *ours]


class Letter(NamedTuple):
    """The content with which a dead letter is produced."""

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
    """A producer, and the topic for what can never be handled."""

    # The method by which its producer sends.
    sends_by: ClassVar[str]

    def __init__(self, producer: Any, topic: str, *, within: Duration = WITHIN) -> None:
        check_letters(producer, self.sends_by, topic)
        self._producer = producer
        self._topic = topic
        self._within = seconds(within, "within")

    def _bury(self, letters: Iterable[Letter], produce: Callable[[Letter], Any]) -> Work[bool]:
        """Produce the first form of a letter that the producer writes. True: the broker has confirmed it.

        `produce` gives None once it is confirmed; else why it is not.
        """
        why: object = None
        for letter in letters:
            try:
                why = yield partial(produce, letter)
                break
            except Exception as error:  # noqa: BLE001 - whatever a client raises for this message, its consumer lives on
                why = f"the producer refuses to write it ({type(error).__name__})"
        if why is not None:
            log.error("no dead letter in %s, and so it comes again: %s", self._topic, why)
        return why is None


class Unreadable(Mapping[str, Any]):
    """The headers of a message whose names are not text: asking for its key there gives a reason for a dead letter."""

    def __getitem__(self, name: str) -> Any:
        raise MissingKey(UNREADABLE)

    def __iter__(self) -> Iterator[str]:
        raise MissingKey(UNREADABLE)

    def __len__(self) -> int:
        raise MissingKey(UNREADABLE)


def sent_headers(
    headers: Mapping[str, str | bytes] | None, key: Key | None, name: str
) -> tuple[str, list[tuple[str, bytes]]]:
    """Return the idempotency key, new if none is given here or among the headers, and the headers that carry it."""
    chosen, carried = with_key(headers, key, name)
    return chosen, [(one, value.encode() if isinstance(value, str) else value) for one, value in carried.items()]
