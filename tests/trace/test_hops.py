"""What hops write: the same digits for the same key everywhere, the ids of the message, never the key."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onefold import Guard, MissingKey, UsageError, subscribe
from onefold.trace import Hop, digest
from onefold.trace.leaks import LeakKind
from onefold.trace.report import examine

KEY = "sk_live_4242"


class Log(list[dict[str, Any]]):
    """Lines, as they are written."""

    def write(self, line: str) -> None:
        assert "\n" not in line
        self.append(json.loads(line))


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_hop_writes_the_digest_of_the_key_and_the_ids_of_the_message(log: Log) -> None:
    hop = Hop("gateway", write=log.write)

    hop(KEY, delivery="msg-1", request="req-7", scope="tenant")

    (line,) = log
    assert line.pop("ts") > 1_700_000_000
    assert line == {
        "hop": "gateway",
        "key": digest(KEY),
        "scope": "tenant",
        "delivery": "msg-1",
        "request": "req-7",
    }


def test_a_hop_in_another_language_can_make_the_same_digest() -> None:
    assert digest("pay_7f3a") == hashlib.sha256(b"pay_7f3a").hexdigest()[:16]
    assert digest(17) == digest("17")


def test_lines_go_to_a_logger_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="onefold.hops"):
        Hop("gateway")(KEY)

    (record,) = caplog.records
    assert record.name == "onefold.hops"
    assert json.loads(record.getMessage())["hop"] == "gateway"


def test_a_producer_names_its_instance_and_another_start_has_another_name(log: Log) -> None:
    for _ in range(2):
        started = Hop("outbox", sends=True, write=log.write)
        started("a")
        started("b")

    first, same, second, _ = (line["producer"] for line in log)
    assert first == same
    assert first != second


def test_a_hop_hears_what_becomes_of_deliveries(log: Log) -> None:
    hop = Hop("worker", write=log.write, about=lambda: {"delivery": "msg-1", "request": None})
    guard = Guard("memory:", scope="tenant", on_event=hop.hear)

    guard.run("charge", KEY, lambda: 1)
    guard.run("charge", KEY, lambda: 1)

    record = guard.read("charge", KEY)
    assert record is not None
    assert [line["outcome"] for line in log] == ["done", "replayed"]
    for line in log:
        assert (line["hop"], line["key"], line["delivery"]) == ("worker", digest(KEY), "msg-1")
        assert (line["scope"], line["operation"], line["record"]) == ("tenant", "charge", record.address.digest)
        assert "request" not in line


def test_the_key_itself_is_never_written(log: Log) -> None:
    hop = Hop("worker", write=log.write)
    end = subscribe(hop.hear)
    Guard("memory:").run("charge", KEY, lambda: 1)
    end()
    hop(KEY)

    assert len(log) == 2
    assert KEY not in json.dumps(log)


def test_what_is_no_key_is_refused(log: Log) -> None:
    with pytest.raises(MissingKey):
        Hop("gateway", write=log.write)("")
    with pytest.raises(UsageError, match="has to name a place"):
        Hop("")
    assert log == []


def test_what_hops_write_can_be_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hops.jsonl"
    # The order of hops is that of their times: no two of these are equal, and none goes back.
    ticks = itertools.count(time.time(), 0.001)
    monkeypatch.setattr("onefold.trace.hops.time", SimpleNamespace(time=lambda: next(ticks)))
    with path.open("w") as file:
        app, gateway, worker = (
            Hop(name, write=lambda line: file.write(f"{line}\n")) for name in ("app", "gate", "work")
        )
        guard = Guard("memory:", on_event=Hop("store", write=lambda line: file.write(f"{line}\n")).hear)
        for request in ("req-1", "req-2"):
            app(KEY, delivery="msg-1")
            gateway(KEY, delivery="msg-1", request=request)
            worker(request, delivery="msg-1", request=request)
            guard.run("charge", request, lambda: 1)

    report = examine([str(path)])

    assert {kind: report.count(kind) for kind in LeakKind} == {
        LeakKind.REPLACED: 2,
        LeakKind.REQUESTS: 1,
        LeakKind.RESENT: 0,
        LeakKind.REMINTED: 0,
    }
    assert report.examples["replaced"][0]["hop"] == "work"
