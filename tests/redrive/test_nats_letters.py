"""NATS: headers that are not ASCII, letters that cannot be sent, the wrong place, and two redrives at once."""

from __future__ import annotations

import asyncio
import base64
import gc
import signal
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

import onefold.cli.commands.redrive as command
from onefold.redrive.brokers import open_letters
from onefold.redrive.letters import Letter
from tests.processes import Stage
from tests.redrive.killed import Stopping
from tests.redrive.test_redrive import Effects
from tests.redrive.tools import REASON, Nats, letter_facts


class TestNATS:
    def bury(self, place: Nats, body: bytes, headers: Mapping[str, str]) -> None:
        place._run(place.streams.js.publish(place.dead, body, headers=dict(headers)))

    def test_headers_that_are_not_ascii_go_back_as_they_came(self, nats_place: Nats, store: str) -> None:
        effects = Effects()
        nats_place.bury("zahlung-\xfc", b"one", reason="it failed once, with Fehler at geb\xfchren.py:7")
        facts = letter_facts("two", REASON, "charge") | {"x-onefold-subject": nats_place.origin}
        self.bury(nats_place, b"two", facts | {"customer": "M\xfcller", "x-empty": ""})

        (first, _) = nats_place.json()["messages"]
        said = nats_place.redrive("--send")

        assert "geb\xfchren.py" in first["reason"]
        assert (said.exit_code, said.stdout) == (0, "2 sent back\n"), said.output
        raw = nats_place._run(nats_place.streams.js.get_msg(nats_place.streams.stream, 2))
        assert "M\xfcller".encode() in base64.b64decode(raw.hdrs)
        nats_place.deliver(store, effects, 2)
        assert sorted(effects.done) == [b"one", b"two"]

    def test_letters_that_cannot_be_sent_stop_no_other(self, nats_place: Nats) -> None:
        nats_place.bury("one", b"one", origin="no subject")
        largest = nats_place.streams.client.max_payload
        nats_place._run(nats_place.streams.js.publish(nats_place.dead, b"x" * largest))
        nats_place.bury("two", b"two")

        said = nats_place.redrive("--send")
        again = nats_place.redrive("--send", "--back-to", nats_place.origin)

        assert (said.exit_code, said.stdout) == (1, "1 sent back, 2 left among the dead letters\n"), said.output
        assert "1 stays: no subject is not a subject" in said.stderr
        assert (again.exit_code, again.stdout) == (1, "1 sent back, 1 left among the dead letters\n"), again.output
        assert "2 stays: with the headers that it goes back with, it is larger" in again.stderr

    def test_a_letter_that_was_sent_to_the_wrong_place_is_sent_to_the_right_one(
        self, nats_place: Nats, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both are subjects of one stream, which drops what it has seen."""

        class Interrupted(Stopping):
            def remove(self, letter: Letter) -> None:
                raise KeyboardInterrupt

        effects = Effects()
        nats_place.bury("one", b"one")
        with monkeypatch.context() as patched:
            patched.setattr(command, "open_letters", lambda *names: Interrupted(open_letters(*names), Stage(None)))  # type: ignore[arg-type]
            assert nats_place.redrive("--send", "--back-to", f"{nats_place.origin}.wrong").exit_code == 130

        assert nats_place.json("--send")["sent"] == 1
        assert nats_place.listed() == 0
        nats_place.deliver(store, effects, 1)

        assert effects.done == [b"one"]

    def test_two_redrives_at_once_do_not_stop_each_other(
        self, nats_place: Nats, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        effects = Effects()
        for key in ("one", "two", "three"):
            nats_place.bury(key, key.encode())

        class Overtaken(Stopping):
            def send(self, letter: Letter, to: str, headers: Mapping[str, str]) -> None:
                self._inner.send(letter, to, headers)
                if letter.position == "1":
                    others = open_letters(nats_place.broker, nats_place.dead)
                    for one in others.letters():
                        others.send(one, to, headers)
                        others.remove(one)
                    others.close()

        with monkeypatch.context() as patched:
            patched.setattr(command, "open_letters", lambda *names: Overtaken(open_letters(*names), Stage(None)))  # type: ignore[arg-type]
            said = nats_place.redrive("--send")

        assert (said.exit_code, said.stdout) == (0, "1 sent back\n"), said.output
        assert nats_place.listed() == 0
        nats_place.deliver(store, effects, 3)
        assert sorted(effects.done) == [b"one", b"three", b"two"]

    def test_a_loop_that_a_second_interrupt_has_stopped_is_no_traceback(self, nats_place: Nats) -> None:
        dead: Any = open_letters(nats_place.broker, nats_place.dead)
        loop = dead._runner.get_loop()
        loop.call_soon(loop.stop)

        dead.close()

        assert loop.is_closed()

    def test_an_interrupt_before_a_request_has_begun_is_an_interrupt_and_no_warning(self, nats_place: Nats) -> None:
        nats_place.bury("one", b"one")

        def interrupted(loop: asyncio.AbstractEventLoop, story: Any, **options: Any) -> asyncio.Task[Any]:
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            return asyncio.Task(story, loop=loop, **options)

        dead: Any = open_letters(nats_place.broker, nats_place.dead)
        loop = dead._runner.get_loop()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loop.set_task_factory(interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(dead.letters())
            loop.set_task_factory(None)
            gc.collect()
        dead.close()

        assert [str(one.message) for one in told] == []
