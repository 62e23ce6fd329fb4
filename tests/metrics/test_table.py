"""The table of metrics: every delivery of a story counts once, labels are bounded, the page shows the table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from onefold import Event
from onefold.events import Kind
from onefold.keys import address
from onefold.metrics.table import (
    COUNTED,
    METRICS,
    OPERATIONS_MAX,
    OTHER,
    OUTCOMES,
    REFUSALS,
    Metric,
    Operations,
    counted,
    outcome,
)
from onefold.stores.base import Address
from tests.delivery.test_events import SECRET, STORIES, Stage
from tests.support import PROJECT

PAGE = PROJECT / "docs" / "metrics.md"

# What becomes of the deliveries of each story.
ENDINGS: dict[str, list[str]] = {
    "it runs": ["done"],
    "it is replayed": ["done", "replayed"],
    "it fails": ["released"],
    "it fails for good": ["failed", "replayed"],
    "it is running": ["in_progress"],
    "it was running, and a duplicate waits": ["replayed"],
    "it was abandoned": ["done"],
    "it was abandoned, hold": ["held", "still_held"],
    "it was abandoned, skip": ["skipped"],
    "it was abandoned, a probe": ["done"],
    "it was abandoned, a doubt": ["held"],
    "nobody knows": ["held"],
    "it was interrupted": ["released"],
    "it was interrupted, hold": ["left"],
    "it was lost": ["lost"],
    "its result is left out": ["done"],
    "it is bypassed": ["done", "done"],
    "the key is reused": ["done", "key_reused"],
    "the store is down": ["store_unavailable"],
    "the store is down, run": ["unprotected"],
    "the store fails at the end": ["not_recorded"],
    "it fails for good, and the store at the end": ["not_recorded"],
    "it is resolved": ["held"],
    "it is forgotten": ["done"],
}


def moved(stage: Stage) -> Counter[tuple[str, ...]]:
    return Counter((metric.name, *labels) for event in stage.heard.events for metric, labels in counted(event, "pay"))


@pytest.mark.parametrize("story", ENDINGS)
def test_every_delivery_is_counted_once_by_its_outcome(story: str, stall: Callable[[float], None]) -> None:
    stage = Stage(stall)

    STORIES[story][0](stage)

    outcomes = {labels[-1]: count for labels, count in moved(stage).items() if labels[0] == "onefold_deliveries_total"}
    assert outcomes == dict(Counter(ENDINGS[story]))


def test_every_story_is_counted() -> None:
    assert set(ENDINGS) == set(STORIES)


def test_a_key_that_is_used_again_is_a_conflict(stall: Callable[[float], None]) -> None:
    stage = Stage(stall)

    STORIES["the key is reused"][0](stage)

    assert moved(stage)["onefold_conflicts_total", "pay"] == 1


@pytest.mark.parametrize(
    ("story", "metric"),
    [
        ("it is replayed", "onefold_duplicates_total"),
        ("it was running, and a duplicate waits", "onefold_waits_total"),
        ("it was abandoned", "onefold_takeovers_total"),
        ("it was lost", "onefold_lost_claims_total"),
        ("nobody knows", "onefold_held_total"),
        ("it is resolved", "onefold_resolved_total"),
        ("the store fails at the end", "onefold_not_recorded_total"),
        ("the store is down, run", "onefold_unprotected_total"),
        ("its result is left out", "onefold_omitted_results_total"),
        ("it is bypassed", "onefold_bypasses_total"),
    ],
)
def test_what_an_operator_asks_for_has_a_counter(story: str, metric: str, stall: Callable[[float], None]) -> None:
    stage = Stage(stall)

    STORIES[story][0](stage)

    assert moved(stage)[metric, "pay"] == 1


def test_a_handler_that_runs_without_a_claim_is_started_too(stall: Callable[[float], None]) -> None:
    stage = Stage(stall)

    STORIES["the store is down, run"][0](stage)

    assert moved(stage)["onefold_starts_total", "pay"] == 1


def test_an_ordinary_failure_is_no_take_over(stall: Callable[[float], None]) -> None:
    stage = Stage(stall)

    STORIES["it fails"][0](stage)
    stage.run()

    found = moved(stage)
    assert found["onefold_takeovers_total", "pay"] == 0
    assert found["onefold_deliveries_total", "pay", "released"] == 1
    assert found["onefold_starts_total", "pay"] == 2


def test_a_message_that_is_buried_is_counted_and_is_no_outcome_of_a_delivery() -> None:
    event = Event(kind=Kind.BURIED, address=Address("", "charge", ""), detail="there is no key")

    assert outcome(event) is None
    assert [(metric.name, labels) for metric, labels in counted(event, "charge")] == [
        ("onefold_buried_total", ("charge",))
    ]


def test_a_step_that_is_not_remembered_ends_no_delivery() -> None:
    event = Event(kind=Kind.NOT_RECORDED, address=address("pay", "k"), detail="step reserve")

    assert [metric.name for metric, _ in counted(event, "pay")] == ["onefold_not_recorded_total"]


def test_no_label_is_ever_a_key_a_scope_or_a_digest(stall: Callable[[float], None]) -> None:
    assert {label for metric in METRICS for label in metric.labels} == {
        "operation",
        "outcome",
        "hop",
        "store",
        "call",
        "result",
    }
    for play, _ in STORIES.values():
        stage = Stage(stall)
        play(stage)
        labels = {label for event in stage.heard.events for _, found in counted(event, "pay") for label in found}
        assert labels <= {"pay", "refused", *OUTCOMES.values(), *REFUSALS.values()}
        assert SECRET not in labels


def test_operations_beyond_the_limit_are_one_series() -> None:
    operations = Operations()

    labels = {operations.label(f"operation-{number}") for number in range(OPERATIONS_MAX + 50)}

    assert len(labels) == OPERATIONS_MAX + 1
    assert OTHER in labels
    assert operations.label("operation-0") == "operation-0"


def exported(metric: Metric) -> str:
    """The name that the exporters of OpenTelemetry give it in Prometheus, by the rules of its specification."""
    unit = {"s": "_seconds", "1": "_ratio" if metric.kind == "gauge" else "", "": ""}[metric.unit]
    return f"{metric.dotted.replace('.', '_')}{unit}{'_total' if metric.kind == 'counter' else ''}"


def test_names_follow_the_conventions_of_prometheus_and_of_opentelemetry() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"onefold_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert re.fullmatch(r"onefold\.[a-z_]+", metric.dotted)
        assert metric.unit == ("s" if metric.name.endswith("_seconds") else "")
        assert exported(metric) == metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS) == len({metric.dotted for metric in METRICS})
    assert len(COUNTED) == len({metric.name for metric in COUNTED.values()})


def test_the_page_shows_the_table() -> None:
    rows = re.findall(
        r"^\| `(onefold_\w+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )

    assert rows == [(one.name, ", ".join(f"`{label}`" for label in one.labels), one.help) for one in METRICS]


def test_the_page_names_every_outcome() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [word for word in (*OUTCOMES.values(), *REFUSALS.values()) if f"| `{word}` |" not in page] == []
