"""RabbitMQ: letters that cannot be sent stop no other, and a lost connection is no traceback."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pika
import pytest

import onefold.cli.commands.redrive as command
from onefold.redrive.brokers import open_letters
from services.proxy import Proxy
from tests.processes import Stage
from tests.queues.rabbitmq_tools import EXPIRES
from tests.redrive.killed import Stopping
from tests.redrive.test_redrive import Effects
from tests.redrive.tools import REASON, Rabbit, letter_facts
from tests.support import eventually


class TestRabbitMQ:
    def bury(self, rabbit: Rabbit, body: bytes, headers: Mapping[Any, Any]) -> None:
        with rabbit.queues.channel() as channel:
            properties = pika.BasicProperties(delivery_mode=2, headers=dict(headers))
            channel.basic_publish("", rabbit.dead, body, properties, mandatory=True)

    def test_a_queue_that_is_full_keeps_its_letters_and_no_others(self, rabbit: Rabbit, rabbitmq_name: str) -> None:
        full = f"{rabbitmq_name}.full"
        with rabbit.queues.channel() as channel:
            limits = {"x-max-length": 1, "x-overflow": "reject-publish"}
            channel.queue_declare(full, durable=True, arguments=EXPIRES | limits)
        for key in ("one", "two"):
            rabbit.bury(key, key.encode(), origin=full)
        rabbit.bury("three", b"three")

        said = rabbit.redrive("--send")

        assert (said.exit_code, said.stdout) == (1, "2 sent back, 1 left among the dead letters\n"), said.output
        assert f"2 stays: {full} does not take it" in said.stderr
        assert rabbit.listed() == 1

    def test_names_that_are_not_text_or_too_long_stop_no_other_letter(self, rabbit: Rabbit, store: str) -> None:
        effects = Effects()
        facts = letter_facts("one", REASON, "charge") | {"x-onefold-exchange": ""}
        self.bury(rabbit, b"one", {**facts, "x-onefold-routing-key": rabbit.origin, b"\xff\xfe": "caf\xe9"})
        self.bury(rabbit, b"far", {**facts, "x-onefold-routing-key": "q" * 300})
        rabbit.bury("two", b"two")

        said = rabbit.redrive("--send")

        assert (said.exit_code, said.stdout) == (1, "2 sent back, 1 left among the dead letters\n"), said.output
        with rabbit.queues.channel() as channel:
            method, properties, _ = channel.basic_get(rabbit.origin)
            channel.basic_nack(method.delivery_tag)
        assert properties.headers[b"\xff\xfe"] == "caf\xe9"
        rabbit.deliver(store, effects, 2)
        assert effects.done == [b"one", b"two"]

    def test_a_letter_that_the_client_cannot_read_is_named_and_those_before_it_can_be_sent(
        self, rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A queue may bury it by itself, with headers of somebody else's client."""
        rabbit.bury("one", b"one")
        with monkeypatch.context() as patched:
            # After the year 9999.
            patched.setattr("pika.data.calendar.timegm", lambda _: 2**62)
            self.bury(rabbit, b"two", {"x-expires": datetime.now(UTC)})

        said = rabbit.redrive("--send", "--matching", "no such reason")

        assert (said.exit_code, said.stdout) == (1, "")
        assert "while it read letter 2. If it is the same one each time, the client cannot read it" in said.stderr
        assert eventually(lambda: rabbit.queues.count(rabbit.dead) == 2)
        assert rabbit.redrive("--send", "--limit", "1").exit_code == 0
        assert rabbit.queues.count() == 1

    def test_a_connection_that_is_lost_at_the_end_is_no_traceback(
        self, rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rabbit.bury("one", b"one")
        with Proxy(rabbit.broker) as proxy:
            rabbit.broker = proxy.url()

            class Cut(Stopping):
                def close(self) -> None:
                    proxy.cut_all()
                    self._inner.close()

            monkeypatch.setattr(command, "open_letters", lambda *names: Cut(open_letters(*names), Stage(None)))  # type: ignore[arg-type]
            said = rabbit.redrive("--send")

        assert (said.exit_code, said.stdout, said.stderr) == (0, "1 sent back\n", "")
