"""SQS: letters that come meanwhile, origins that are not to be believed, and a broker that is lost."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from onefold.redrive.brokers import open_letters
from onefold.redrive.brokers import sqs as sqs_letters
from tests.redrive.tools import Sqs
from tests.support import eventually


class TestSQS:
    def test_it_ends_beside_a_consumer_that_fails_all_the_time(
        self, sqs_place: Sqs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever comes meanwhile is younger, and there is always more of it."""
        sqs_place.bury("old", b"old")
        monkeypatch.setattr(sqs_letters, "PAUSE", sqs_letters.CLOCK_TICK)
        looks = itertools.count()
        receive = sqs_letters.Letters._receive

        def failing(self: Any) -> list[dict[str, Any]]:
            look = next(looks)
            assert look < 100, "it does not end"
            if look:
                sqs_place.bury("new", b"new")
            return receive(self)

        monkeypatch.setattr(sqs_letters.Letters, "_receive", failing)

        said = sqs_place.redrive("--send")

        assert (said.exit_code, said.stdout) == (0, "1 sent back\n"), said.exception

    def test_where_a_message_says_that_it_came_from_is_not_believed_if_sqs_has_moved_it(self, sqs_place: Sqs) -> None:
        client, url = sqs_place.client, sqs_place.urls[sqs_place.origin]
        found = client.get_queue_attributes(QueueUrl=sqs_place.urls[sqs_place.dead], AttributeNames=["QueueArn"])
        policy = json.dumps({"deadLetterTargetArn": found["Attributes"]["QueueArn"], "maxReceiveCount": 1})
        client.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy, "VisibilityTimeout": "0"})
        sqs_place._send(sqs_place.origin, b"one", {"idempotency-key": "one", "x-onefold-queue": "payouts"})

        def is_moved() -> bool:
            client.receive_message(QueueUrl=url)
            return sqs_place.listed() == 1

        assert eventually(is_moved)
        said = sqs_place.redrive("--send")

        assert said.exit_code == 1
        assert f"it says that it came from payouts, and SQS has moved it from {sqs_place.origin}" in said.stderr
        assert sqs_place.redrive("--send", "--back-to", sqs_place.origin).exit_code == 0

    def test_the_dead_letters_by_their_url_are_no_place_to_send_them_to(self, sqs_place: Sqs) -> None:
        sqs_place.bury("one", b"one")

        said = sqs_place.redrive("--send", "--back-to", sqs_place.urls[sqs_place.dead])

        assert said.exit_code == 1
        assert "these are the dead letters themselves" in said.stderr
        (listed,) = sqs_place.json()["messages"]
        assert listed["to"] == sqs_place.origin

    def test_a_letter_that_is_removed_again_after_a_lost_reply_is_removed(self, sqs_place: Sqs) -> None:
        sqs_place.bury("one", b"one")
        with closing(open_letters(sqs_place.broker, sqs_place.dead)) as dead:
            (letter,) = dead.letters()

            # As the client does by itself.
            dead.remove(letter)
            dead.remove(letter)

        assert sqs_place.listed() == 0

    def test_a_queue_that_is_named_in_bytes_is_one_too(self, sqs_place: Sqs) -> None:
        origin = {"DataType": "Binary", "BinaryValue": sqs_place.origin.encode()}
        url = sqs_place.urls[sqs_place.dead]
        sqs_place.client.send_message(QueueUrl=url, MessageBody="one", MessageAttributes={"x-onefold-queue": origin})

        assert sqs_place.json("--send")["sent"] == 1

    def test_a_broker_that_is_lost_is_not_waited_for_with_each_letter(
        self, sqs_place: Sqs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("one", "two", "three"):
            sqs_place.bury(key, key.encode())
        dead: Any = open_letters(sqs_place.broker, sqs_place.dead)
        assert len(list(dead.letters())) == 3
        asked: list[Any] = []

        def lost(**options: Any) -> None:
            asked.append(options)
            raise EndpointConnectionError(endpoint_url="http://gone")

        monkeypatch.setattr(dead._client, "change_message_visibility", lost)
        dead.close()

        assert len(asked) == 1
