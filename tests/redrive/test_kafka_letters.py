"""Kafka: what is remembered of letters that are gone, and a broker that is lost."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from confluent_kafka import KafkaError

from onefold.redrive.brokers import kafka as kafka_letters
from onefold.redrive.brokers import open_letters
from onefold.redrive.letters import BrokerLost
from tests.queues.test_kafka_letters import send_unreadable
from tests.redrive.tools import Kafka


class TestKafka:
    def test_what_retention_has_removed_is_not_remembered(self) -> None:
        sent = kafka_letters.Sent(100, "12-15,98-101,120")

        assert sent.metadata in ("100-101,120", "120")
        assert [offset in sent for offset in (14, 100, 101, 102, 120)] == [True, True, True, False, True]

    def test_a_message_whose_headers_cannot_be_read_does_not_go_back_without_them(
        self, kafka_place: Kafka, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            send_unreadable(kafka_place.url, kafka_place.dead, patched)

        said = kafka_place.redrive("--send", "--back-to", kafka_place.origin)

        assert (said.exit_code, said.stdout) == (1, "0 sent back, 1 left among the dead letters\n"), said.output
        assert "0/0 stays: the name of one of its headers is not UTF-8" in said.stderr
        assert kafka_place.listed() == 1

    def test_a_broker_that_is_lost_ends_it_instead_of_each_letter(
        self, kafka_place: Kafka, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("one", "two"):
            kafka_place.bury(key, key.encode())
        dead: Any = open_letters(kafka_place.broker, kafka_place.dead)
        first = next(dead.letters())

        class Silent:
            def produce(self, *_: Any, on_delivery: Any, **__: Any) -> None:
                on_delivery(KafkaError(KafkaError._MSG_TIMED_OUT), None)

        monkeypatch.setattr(dead, "_producer", Silent())
        with pytest.raises(BrokerLost, match="Kafka was lost: _MSG_TIMED_OUT"):
            dead.send(first, kafka_place.origin, {})
        dead.close()

    def test_an_interrupt_while_the_client_waits_is_an_interrupt(self, kafka_place: Kafka) -> None:
        """Python hears of it in the client's callback, and the client loses what that raises."""
        kafka_place.bury("one", b"one")
        dead: Any = open_letters(kafka_place.broker, kafka_place.dead)
        first, inner = next(dead.letters()), dead._producer

        class Interrupted:
            poll = inner.poll

            def produce(self, *values: Any, on_delivery: Any, **options: Any) -> None:
                def report(*reported: Any) -> None:
                    signal.raise_signal(signal.SIGINT)
                    on_delivery(*reported)

                inner.produce(*values, on_delivery=report, **options)

        dead._producer = Interrupted()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                dead.send(first, kafka_place.origin, {})
        finally:
            signal.signal(signal.SIGINT, before)
            dead.close()
