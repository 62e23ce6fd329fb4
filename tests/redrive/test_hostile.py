"""Messages and reasons that are not what they seem, on every broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold import Guard
from onefold.queues._shared.bypasses import BYPASS_HEADER, OPERATION, permission
from onefold.redrive import permissions
from onefold.redrive.letters import Letter
from onefold.stores.base import Address, Query
from onefold.stores.memory import MemoryStore
from tests.redrive.test_redrive import WHY, Effects
from tests.redrive.tools import Kafka, Nats, Place, Rabbit, Sqs, Streams


def test_a_reason_that_looks_like_history_is_kept_whole() -> None:
    store = MemoryStore()
    letter = Letter("1", b"{}", {"x-onefold-digest": "0" * 12}, "charges", 0.0)

    ticket = permissions.Permissions(store, "maria", "x | before: y").allow(letter)[BYPASS_HEADER]

    found = store.read(permission("0" * 12, ticket))
    assert found is not None
    assert found.latest_remark.endswith("x / before: y")


def test_a_body_does_not_command_the_terminal(redis_place: Streams) -> None:
    redis_place.bury("one", b"two\nlines \x1b]0;owned\x07")
    (listed,) = redis_place.json()["messages"]

    said = redis_place.redrive("--show", listed["position"], "--body")

    assert "two\nlines \\x1b]0;owned\\x07" in said.stdout
    assert "\x1b" not in said.stdout


def sent_raw(place: Place, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a message to the queue itself, as somebody else's client would."""
    match place:
        case Rabbit():
            place.queues.send(body, headers=dict(headers))
        case Nats():
            place._run(place.streams.js.publish(place.origin, body, headers=dict(headers)))
        case Kafka():
            pairs: Any = [(name, one.encode()) for name, one in headers.items()]
            place.producer.produce(place.origin, body, headers=pairs, partition=0)
            place.producer.flush(30)
        case Streams():
            place.client.xadd(place.origin, {**headers, "body": body})
        case Sqs():
            place._send(place.origin, body, headers)


def test_a_digest_that_a_sender_has_invented_is_no_permission_for_the_record_of_another(
    place: Place, store: str
) -> None:
    effects = Effects()
    sent_raw(place, b"one", {"x-onefold-digest": Address("", place.operation, "the-victims").digest})
    place.deliver(store, effects, 1)

    said = place.redrive("--send", "--bypass", *WHY, "--store", store)

    assert said.exit_code == 1
    assert "stays: it has no digest of a key, so no bypass can be allowed for it" in said.stderr
    with Guard(store) as guard:
        found: Any = guard.store
        assert found.browse(Query(operation=OPERATION), 10) == []
