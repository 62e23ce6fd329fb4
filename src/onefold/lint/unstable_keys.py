"""Detect keys that change with each delivery, by the words of their names. Pure.

A name with an unknown word counts as a business term: `delivery_attempt` is a count, but `delivery_number` and
`retry_policy_id` identify something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# Words that tell how something is counted, or whose it is, but not what it is.
COUNTS: Final = frozenset({"count", "counter", "counts", "times"})
NUMBERS: Final = COUNTS | {"idx", "index", "no", "nr", "num", "number"}
PLAIN: Final = NUMBERS | frozenset(
    {
        *("amqp", "amz", "approximate", "aws", "azure", "broker", "celery", "client", "cloud", "consumer", "cur"),
        *(
            "current",
            "dramatiq",
            "far",
            "faststream",
            "first",
            "goog",
            "google",
            "header",
            "headers",
            "info",
            "is",
            "job",
            "kafka",
            "last",
        ),
        *("left", "made", "message", "meta", "metadata", "msg", "my", "n", "nth", "opt", "prev", "previous", "queue"),
        *(
            "rabbitmq",
            "remaining",
            "rq",
            "run",
            "so",
            "sqs",
            "task",
            "taskiq",
            "tasks",
            "the",
            "total",
            "was",
            "worker",
            "x",
        ),
    }
)

# Words for how often it was tried. "try" alone may be a currency.
TRIES: Final = frozenset(
    {
        "attempt",
        "attempts",
        "redeliveries",
        "redelivered",
        "redelivery",
        "requeue",
        "requeues",
        "retried",
        "retries",
        "retry",
        "retrying",
        "tries",
    }
)
# Words for handling a message: they count only with a word for counting, as a delivery may also be one of goods.
HANDLING: Final = frozenset(
    {
        *("acquired", "death", "deaths", "deliver", "delivered", "deliveries", "delivery", "dequeue", "dequeued"),
        *("execution", "executions", "failed", "failure", "failures", "receive", "received", "receives", "try"),
    }
)

# Words for the position of this copy, or for whose turn it is.
HANDLES: Final = (
    *({"delivery", "tag"}, {"consumer", "tag"}, {"receipt", "handle"}, {"ack", "id"}, {"lock", "token"}),
    *({"partition", "offset"}, {"kafka", "offset"}, {"message", "offset"}, {"stream", "offset"}, {"queue", "offset"}),
    *({"stream", "sequence"}, {"consumer", "sequence"}, {"nats", "sequence"}, {"num", "delivered"}),
    # An entry of a Redis stream; in a ledger, an entry has an id that stays.
    *({"stream", "entry", "id"}, {"redis", "entry", "id"}, {"times", "delivered"}),
    # Dramatiq writes the second one anew for each copy of a message.
    *({"message", "age"}, {"redis", "message", "id"}),
    # Temporal's, of one attempt.
    {"task", "token"},
)

# Words for the time of processing. The time of an event (`created_at`, `event.time`) does not change.
CLOCKS: Final = frozenset({"now", "timestamp", "ts"})
MOMENTS: Final = CLOCKS | {"date", "datetime", "time"}
ON_THE_WAY: Final = frozenset(
    {
        *("attempted", "consumed", "delivered", "dequeued", "enqueued", "processed", "processing", "published"),
        *("publish", "queued", "receive", "received", "redelivered", "requeue", "requeued", "retried", "send", "sent"),
    }
)
# Units and parts of a clock.
OF_A_CLOCK: Final = frozenset({"at", "epoch", "iso", "ms", "ns", "unix", "utc"})

# A header of a request, or of its delivery. A field of the same name may be a number of the business: a `request_id`
# in a body is often the sender's own key.
OF_A_REQUEST: Final = (
    *({"request", "id"}, {"b3"}, {"b3", "trace", "id"}, {"date"}, {"death"}, {"ray"}),
    *({"trace", "context"}, {"uber", "trace", "id"}, {"datadog", "trace", "id"}, {"sentry", "trace"}),
)

# Ids that a tracer, a gateway or a model makes anew for each try, or gives to several operations, wherever they stand.
OF_A_TRY: Final = (
    *({"traceparent"}, {"tracestate"}, {"trace", "id"}, {"span", "id"}),
    *({"parent", "span", "id"}, {"root", "trace", "id"}, {"correlation"}, {"correlation", "id"}),
    *({"tool", "call"}, {"tool", "call", "id"}, {"tool", "use"}, {"tool", "use", "id"}, {"function", "call", "id"}),
)

KNOWN: Final = (
    PLAIN | TRIES | HANDLING | MOMENTS | ON_THE_WAY | OF_A_CLOCK | frozenset().union(*HANDLES, *OF_A_REQUEST, *OF_A_TRY)
)

# Who adds such a header, before its name.
OF_A_SENDER: Final = frozenset({"x", "amzn", "amz", "aws", "ms", "cf", "cloud", "goog", "google", "otel", "w3c", "llm"})
OF_A_TRACE: Final = frozenset({"request", "requestid", "trace", "b3", "ray"})

# A shorter prefix would match inside other words.
SYLLABLE_MIN: Final = 3


def changes(key: str) -> bool:
    """Return whether another delivery of the same message has another key."""
    source, _, path = key.partition(":")
    parts = _parts_of(path)
    named = parts - PLAIN
    if source == "header" and parts - OF_A_SENDER in OF_A_REQUEST:
        return True
    # A time inside a part may be that of the event.
    if path.lower() == "time" or parts == {"current", "time"}:
        return True
    return _counts_tries(parts, named) or parts - {"x", "amqp", "sqs", "rabbitmq"} in HANDLES or _is_a_moment(named)


def is_of_a_try(key: str) -> bool:
    """Return whether the key is the id of a trace, a correlation or a tool call: of a try, not of the operation."""
    source, _, path = key.partition(":")
    parts = _parts_of(path) - OF_A_SENDER
    return parts in OF_A_TRY or (source == "header" and parts in OF_A_REQUEST and bool(parts & OF_A_TRACE))


def _counts_tries(parts: frozenset[str], named: frozenset[str]) -> bool:
    if not named or not named <= TRIES | HANDLING:
        return False
    return bool(named & TRIES) or bool(parts & (NUMBERS if named == {"try"} else COUNTS))


def _is_a_moment(named: frozenset[str]) -> bool:
    if not named <= MOMENTS | ON_THE_WAY | OF_A_CLOCK:
        return False
    return bool(named & CLOCKS) or bool(named & ON_THE_WAY and named & (MOMENTS | {"at"}))


def _parts_of(path: str) -> frozenset[str]:
    """Return the words of the last meaningful part of a path: for `x-death.0.count`, of all parts."""
    parts: set[str] = set()
    for part in reversed(re.split(r"[.:/]", path)):
        parts |= set(_split(part))
        if parts - PLAIN:
            break
    return frozenset(parts)


def _split(name: str) -> Iterator[str]:
    found = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|[^\W\d_]+", name)]
    for number, word in enumerate(found, 1):
        # The number of attempts is a count; the retry of something names that.
        if word != "of" or number == len(found):
            yield from _syllables(word)


def _syllables(word: str) -> tuple[str, ...]:
    """Return the two known words that are written as one, as in `retrycount`."""
    if word not in KNOWN:
        for end in range(SYLLABLE_MIN, len(word) - 1):
            if word[:end] in KNOWN and word[end:] in KNOWN:
                return word[:end], word[end:]
    return (word,)
