"""What is particular to one broker: where a letter came from, what goes back with it, and ids that drop duplicates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import nats.js.api
import pika
import pytest
from confluent_kafka import Consumer, TopicPartition

from onefold import Guard
from onefold.queues._shared.bypasses import BYPASS_HEADER
from onefold.redrive.brokers import kafka as kafka_letters
from onefold.redrive.brokers import sqs as sqs_letters
from onefold.stores.base import Address
from tests.redrive.test_redrive import WHY, Effects
from tests.redrive.tools import REASON, Kafka, Nats, Place, Rabbit, Sqs, letter_facts
from tests.support import eventually


def consumed_by(place: Place, store: str) -> None:
    """Make this the store of the consumer: it has a record of the message."""
    with Guard(store) as guard:
        guard.run(place.operation, "one", lambda: None)


class TestRabbitMQ:
    def test_what_the_broker_has_rejected_goes_back_to_its_queue_without_the_brokers_account(
        self, rabbit: Rabbit, rabbitmq_name: str
    ) -> None:
        queue = f"{rabbitmq_name}.rejecting"
        arguments: Any = {
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": rabbit.dead,
            "x-expires": 600_000,
        }
        with rabbit.queues.channel() as channel:
            channel.queue_declare(queue, durable=True, arguments=arguments)
            properties = pika.BasicProperties(
                headers={"idempotency-key": "one"}, message_id="m-1", content_type="text/x"
            )
            channel.basic_publish("", queue, b"one", properties, mandatory=True)
            method, _, _ = channel.basic_get(queue)
            channel.basic_reject(method.delivery_tag, requeue=False)
        assert eventually(lambda: rabbit.listed() == 1)

        (listed,) = rabbit.json()["messages"]
        assert (listed["to"], listed["reason"], listed["digest"]) == (queue, "the broker says: rejected", "")
        assert 0 <= listed["age"] < 600
        assert rabbit.redrive("--send").exit_code == 0

        with rabbit.queues.channel() as channel:
            _, found, body = channel.basic_get(queue, auto_ack=True)
        assert (body, found.headers, found.message_id) == (b"one", {"idempotency-key": "one"}, "m-1")
        assert found.content_type == "text/x"

    def test_a_letter_that_came_through_an_exchange_stays_until_its_queue_is_named(self, rabbit: Rabbit) -> None:
        headers = letter_facts("one", REASON, "charge") | {
            "x-onefold-exchange": "orders",
            "x-onefold-routing-key": "new",
        }
        with rabbit.queues.channel() as channel:
            channel.basic_publish("", rabbit.dead, b"one", pika.BasicProperties(headers=headers), mandatory=True)

        said = rabbit.redrive("--send")
        named = rabbit.redrive("--send", "--back-to", rabbit.origin)

        assert said.exit_code == 1
        assert "1 stays: it came through the exchange orders, which may lead to other queues as well" in said.stderr
        assert named.exit_code == 0
        assert (rabbit.queues.count(), rabbit.queues.count(rabbit.dead)) == (1, 0)

    def test_a_quorum_queue_that_counts_each_look_is_warned_of(self, rabbit: Rabbit, rabbitmq_name: str) -> None:
        rabbit.dead = f"{rabbitmq_name}.quorum"
        arguments: Any = {"x-queue-type": "quorum", "x-expires": 600_000}
        with rabbit.queues.channel() as channel:
            channel.queue_declare(rabbit.dead, durable=True, arguments=arguments)
        rabbit.bury("one", b"one")

        said = [rabbit.redrive() for _ in range(6) if eventually(lambda: rabbit.queues.count(rabbit.dead) == 1)]

        assert ["careful" in one.stderr for one in said] == [False] * 5 + [True]
        assert "the queue has delivered one of them 5 times" in said[-1].stderr
        with rabbit.queues.channel() as channel:
            channel.queue_delete(rabbit.dead)

    def test_a_message_goes_back_as_it_was_sent(self, rabbit: Rabbit, tmp_path: Path) -> None:
        headers = {"idempotency-key": "one", "tenant": "acme", "x-onefold-tenant": "theirs"}
        rabbit.queues.send(b"one", headers=headers, message_id="m-1", priority=3, correlation_id="c-1")
        effects = Effects()
        effects.broken = {b"one"}
        rabbit.deliver(f"sqlite:///{tmp_path}/records.db", effects, 1)

        assert rabbit.redrive("--send").exit_code == 0

        with rabbit.queues.channel() as channel:
            _, found, body = channel.basic_get(rabbit.origin, auto_ack=True)
        assert (body, found.headers) == (b"one", headers)
        assert (found.message_id, found.priority, found.correlation_id, found.delivery_mode) == ("m-1", 3, "c-1", 2)


class TestNats:
    def test_a_message_whose_id_may_be_its_key_stays_while_its_stream_would_drop_it(self, nats_place: Nats) -> None:
        # Sent by somebody whose key is the `Nats-Msg-Id`.
        run, streams = nats_place._run, nats_place.streams
        run(streams.js.publish(nats_place.origin, b"one", headers={"Nats-Msg-Id": "id-1"}))
        headers = letter_facts(None, REASON, "charge") | {
            "x-onefold-digest": Address("", "charge", "id-1").digest,
            "x-onefold-subject": nats_place.origin,
            "x-onefold-message-id": "id-1",
        }
        run(streams.js.publish(nats_place.dead, b"one", headers=headers))

        within = nats_place.redrive("--send")
        config = run(streams.js.stream_info(streams.stream)).config
        config.duplicate_window = 0.1
        run(streams.js.update_stream(config))
        assert eventually(lambda: nats_place.redrive("--send").exit_code == 0)

        assert within.exit_code == 1
        assert "stays: the stream has seen its Nats-Msg-Id within its duplicate window" in within.stderr
        assert nats_place.listed() == 0
        info = run(streams.js.stream_info(streams.stream))
        assert info.state.messages == 2
        back = run(streams.js.get_msg(streams.stream, info.state.last_seq))
        assert back.headers == {"Nats-Msg-Id": "id-1"}

    def test_a_bypass_is_sent_although_a_plain_redrive_of_it_has_just_been(
        self, nats_place: Nats, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A redrive dies before it removes the letter; within the window a person decides to bypass it."""
        nats_place.bury("one", b"one")
        consumed_by(nats_place, store)
        with monkeypatch.context() as patched:
            patched.setattr("onefold.redrive.brokers.nats.Letters.remove", lambda *_: None)
            assert nats_place.redrive("--send").exit_code == 0

        assert nats_place.redrive("--send", "--bypass", *WHY, "--store", store).exit_code == 0

        state = nats_place._run(nats_place.streams.js.stream_info(nats_place.streams.stream)).state
        assert state.messages == 2

    def test_a_stream_that_does_not_let_its_messages_be_removed_is_one_line(self, nats_place: Nats) -> None:
        run, js = nats_place._run, nats_place.streams.js
        run(js.delete_stream(f"{nats_place.streams.stream}-dead"))
        config = nats.js.api.StreamConfig(
            name=f"{nats_place.streams.stream}-dead", subjects=[nats_place.dead], deny_delete=True
        )
        run(js.add_stream(config))
        nats_place.bury("one", b"one")

        said = nats_place.redrive("--send")

        assert said.exit_code == 1
        assert "does not let its messages be removed" in said.stderr


class TestSqs:
    def test_what_sqs_itself_has_moved_goes_back_to_its_queue(self, sqs_place: Sqs) -> None:
        client = sqs_place.client
        dead = sqs_place.urls[sqs_place.dead]
        arn = client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "1"})
        url = sqs_place.urls[sqs_place.origin]
        client.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy, "VisibilityTimeout": "0"})
        sqs_place.send("one", b"one")

        def is_moved() -> bool:
            client.receive_message(QueueUrl=url)
            return sqs_place.listed() == 1

        assert eventually(is_moved)
        (listed,) = sqs_place.json()["messages"]

        assert (listed["to"], listed["reason"]) == (sqs_place.origin, "SQS has moved it, after its last receive")
        assert sqs_place.redrive("--send").exit_code == 0
        assert sqs_place.listed() == 0

    def test_a_fifo_message_goes_back_to_its_group_and_under_its_id_once_its_window_is_over(
        self, sqs_place: Sqs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fifo = f"{sqs_place.origin}.fifo"
        attributes = {"FifoQueue": "true"}
        sqs_place.urls[fifo] = sqs_place.client.create_queue(QueueName=fifo, Attributes=attributes)["QueueUrl"]
        origin = {"x-onefold-queue": fifo, "x-onefold-group": "g", "x-onefold-deduplication-id": "d-1"}
        # The key of the first is its header, that of the second may be its deduplication id.
        sqs_place._send(sqs_place.dead, b"one", letter_facts("one", REASON, "charge") | origin)
        sqs_place._send(sqs_place.dead, b"two", letter_facts(None, REASON, "charge") | origin)

        early = sqs_place.redrive("--send")
        monkeypatch.setattr(sqs_letters, "WINDOW", 0.0)
        late = sqs_place.redrive("--send")

        assert (early.exit_code, late.exit_code) == (1, 0)
        assert "stays: its queue drops its deduplication id for five minutes" in early.stderr
        asked: dict[str, Any] = {"QueueUrl": sqs_place.urls[fifo], "MaxNumberOfMessages": 10}
        found = sqs_place.client.receive_message(**asked, AttributeNames=["All"])["Messages"]
        ids = {one["Body"]: one["Attributes"]["MessageDeduplicationId"] for one in found}
        assert ids["two"] == "d-1"
        assert ids["one"].startswith("redrive-")
        assert {one["Attributes"]["MessageGroupId"] for one in found} == {"g"}

    def test_attributes_that_had_no_place_in_the_letter_go_back_with_it(self, sqs_place: Sqs) -> None:
        packed = {"a": {"DataType": "String", "StringValue": "1"}, "b": {"DataType": "Binary", "BinaryValue": "AAE="}}
        more = {"x-onefold-queue": sqs_place.origin, "x-onefold-attributes": json.dumps(packed)}
        sqs_place._send(sqs_place.dead, b"one", letter_facts("one", REASON, "charge") | more)

        assert sqs_place.redrive("--send").exit_code == 0

        asked: dict[str, Any] = {"QueueUrl": sqs_place.urls[sqs_place.origin], "MessageAttributeNames": ["All"]}
        (found,) = sqs_place.client.receive_message(**asked)["Messages"]
        assert found["MessageAttributes"].keys() == {"a", "b", "idempotency-key"}
        assert found["MessageAttributes"]["b"]["BinaryValue"] == b"\x00\x01"

    def test_a_message_with_ten_attributes_has_no_place_for_a_bypass_and_stays(
        self, sqs_place: Sqs, store: str
    ) -> None:
        packed = {f"a{number}": {"DataType": "String", "StringValue": "1"} for number in range(9)}
        more = {"x-onefold-queue": sqs_place.origin, "x-onefold-attributes": json.dumps(packed)}
        sqs_place._send(sqs_place.dead, b"one", letter_facts("one", REASON, "charge") | more)
        consumed_by(sqs_place, store)

        said = sqs_place.redrive("--send", "--bypass", *WHY, "--store", store)

        assert said.exit_code == 1
        assert "stays: it has 10 attributes" in said.stderr
        assert sqs_place.listed() == 1


class TestKafka:
    def test_a_message_goes_back_to_its_partition_with_its_key_and_headers(self, kafka_place: Kafka) -> None:
        headers = [("idempotency-key", b"one"), ("trace", None), ("trace", b"2")]
        letter = [*headers, (BYPASS_HEADER, b"0" * 32), ("x-onefold-topic", kafka_place.origin.encode())]
        kafka_place.producer.produce(
            kafka_place.dead, b"one", key=b"k", headers=[*letter, ("x-onefold-partition", b"3")], partition=1
        )
        kafka_place.producer.flush(30)

        assert kafka_place.json("--send")["messages"][0]["position"] == "1/0"

        consumer = Consumer({"bootstrap.servers": kafka_place.url, "group.id": "look", "enable.auto.commit": False})
        consumer.assign([TopicPartition(kafka_place.origin, 3, 0)])
        found = consumer.poll(30)
        consumer.close()
        assert found is not None
        assert (found.key(), found.value(), found.headers()) == (b"k", b"one", headers)

    def test_letters_that_stay_between_those_that_were_sent_are_remembered(self) -> None:
        sent = kafka_letters.Sent(5)
        sent.add(7, 8, 10)
        again = kafka_letters.Sent(sent.below, sent.metadata)

        assert (sent.below, sent.metadata) == (5, "7-8,10")
        assert [offset in again for offset in range(4, 12)] == [True, False, False, True, True, False, True, False]
        again.add(5, 6)
        assert (again.below, again.metadata) == (9, "10")
        again.add(9)
        assert (again.below, again.metadata) == (11, "")

    @pytest.mark.parametrize("metadata", ["", "x", "5-", "-5", "9-7", "a-b,3", None])
    def test_metadata_of_somebody_else_is_no_letter(self, metadata: str | None) -> None:
        assert 100 not in kafka_letters.Sent(0, metadata)

    def test_what_the_broker_could_not_remember_is_not_sent(self) -> None:
        sent = kafka_letters.Sent(0)
        offsets = iter(range(2, 100_000, 2))
        while sent.has_room(offset := next(offsets)):
            sent.add(offset)

        assert kafka_letters.METADATA_MAX - 20 < len(sent.metadata) <= kafka_letters.METADATA_MAX
        assert sent.has_room(0)


def test_an_age_is_that_of_the_burial(rabbit: Rabbit) -> None:
    began = time.time()
    rabbit.bury("one", b"one")

    (listed,) = rabbit.json("--older-than", "50s", "--newer-than", "2h")["messages"]

    assert 59 <= listed["age"] <= 61 + time.time() - began
