"""What ships in `ops/` works: alerts fire when they should, the dashboard can be imported, every metric exists."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from onefold.metrics.table import METRICS
from services.fixtures import missing_told
from services.programs import program
from tests.support import PROJECT

OPS = PROJECT / "ops"
ALERTS, TESTS, DASHBOARD = (
    OPS / "prometheus-alerts.yaml",
    OPS / "prometheus-alerts.test.yaml",
    OPS / "grafana-dashboard.json",
)

RUNBOOKS = PROJECT / "docs" / "operations.md"

# What a histogram is made of.
PARTS = ("_bucket", "_count", "_sum")

# What Grafana puts in the place of its variables.
VARIABLES = {"$__rate_interval": "5m", "$operation": ".*"}


@pytest.fixture(scope="session")
def promtool() -> str:
    with missing_told():
        return program("promtool")


def run(*command: object) -> str:
    """What it says, where it succeeds."""
    ended = subprocess.run([str(word) for word in command], check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Every question of the dashboard, with Grafana's variables filled in."""
    for panel in panels():
        for target in panel["targets"]:
            asked: str = target["expr"]
            for variable, value in VARIABLES.items():
                asked = asked.replace(variable, value)
            yield asked


def metrics_in(text: str) -> set[str]:
    """The metrics that a text names, whole histograms for their parts."""
    names = set(re.findall(r"\bonefold_\w+", text))
    return {name if name in known() else re.sub(f"({'|'.join(PARTS)})$", "", name) for name in names}


def known() -> set[str]:
    return {metric.name for metric in METRICS}


def test_the_alerts_are_valid(promtool: str) -> None:
    assert "SUCCESS" in run(promtool, "check", "rules", ALERTS)


def test_every_alert_fires_when_it_should_and_not_on_an_ordinary_day(promtool: str) -> None:
    assert "SUCCESS" in run(promtool, "test", "rules", TESTS)


def test_every_alert_is_tested_both_ways() -> None:
    tests = [
        case for one in yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"] for case in one["alert_rule_test"]
    ]
    names = {rule["alert"] for rule in rules()}

    assert {case["alertname"] for case in tests if case["exp_alerts"]} == names
    assert {case["alertname"] for case in tests if not case["exp_alerts"]} == names


def test_every_alert_says_what_is_wrong_how_bad_it_is_and_where_to_read_on() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "runbook_url"}
        assert re.fullmatch(r"docs/operations\.md#[a-z-]+", rule["annotations"]["runbook_url"])


def test_every_runbook_is_written() -> None:
    headings = re.findall(r"^#+ (.*)$", RUNBOOKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    wanted = {rule["annotations"]["runbook_url"].partition("#")[2] for rule in rules()}
    assert wanted - anchors == set()


def test_every_alert_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(Onefold[A-Z]\w+)`", RUNBOOKS.read_text(encoding="utf-8")))

    assert named
    assert named - {rule["alert"] for rule in rules()} == set()


def test_the_sizes_are_those_of_the_pages_of_the_stores() -> None:
    sizes = RUNBOOKS.read_text("utf-8").partition("### Ten million payments a day")[0]
    rows = re.findall(r"^\| \[[\w ,]+\]\((stores/\w+\.md)\).*?\| ([0-9]+)", sizes, flags=re.MULTILINE)

    assert len(rows) == 6
    for page, size in rows:
        assert re.search(rf"^\|.*\| {size} \|", (PROJECT / "docs" / page).read_text("utf-8"), flags=re.MULTILINE), page


def test_a_day_and_a_year_of_ten_million_payments_follow_from_the_bytes_of_a_record() -> None:
    text = RUNBOOKS.read_text("utf-8").partition("### Ten million payments a day")[2].partition("## ")[0]
    rows = re.findall(r"\| (\d+)(, and 100 [\w ]+)? \| ([\d.]+) GB[\w ]* \| ([\d.]+) TB", text)

    assert len(rows) == len(re.findall(r"^\| .* GB", text, flags=re.MULTILINE)) == 9
    for size, added, a_day, a_year in rows:
        day = 10_000_000 * (int(size) + (100 if added else 0))
        assert f"{day / 1e9:.1f}" == a_day
        assert float(a_year) == pytest.approx(365 * day / 1e12, rel=0.04)


@pytest.mark.parametrize("file", [ALERTS, TESTS, DASHBOARD], ids=lambda file: file.name)
def test_every_metric_that_is_named_exists(file: Path) -> None:
    named = metrics_in(file.read_text(encoding="utf-8"))

    assert named
    assert named - known() == set()


def test_every_metric_that_tells_of_something_wrong_has_an_alert() -> None:
    alerted = metrics_in(ALERTS.read_text(encoding="utf-8"))

    # What people ask for, and what happens every day.
    fine = {"bypasses", "omitted_results", "resolved", "waits"}
    assert known() - alerted == {f"onefold_{name}_total" for name in fine}


def test_the_page_counts_the_alerts() -> None:
    numbers = {20: "twenty", 21: "twenty-one", 22: "twenty-two", 23: "twenty-three"}

    assert f"{numbers[len(rules())]} alerts" in (PROJECT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_every_metric_is_shown() -> None:
    shown = metrics_in("\n".join(expressions()))

    assert known() - shown == {"onefold_starts_total"}


def test_a_metric_that_does_not_exist_is_found() -> None:
    assert metrics_in("rate(onefold_deliverys_total[5m]) / onefold_store_seconds_bucket") - known() == {
        "onefold_deliverys_total"
    }


def test_every_question_of_the_dashboard_can_be_asked(promtool: str, tmp_path: Path) -> None:
    records = [{"record": f"panel:{number}", "expr": asked} for number, asked in enumerate(expressions())]
    asked = tmp_path / "asked.yaml"
    asked.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))

    assert f"{len(records)} rules found" in run(promtool, "check", "rules", asked)


def test_the_dashboard_asks_the_data_source_that_is_chosen_on_import() -> None:
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}

    assert variables["datasource"]["type"] == "datasource"
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}
    assert dashboard()["schemaVersion"] >= 36


def test_the_panels_have_titles_explanations_and_places_of_their_own() -> None:
    everything = dashboard()["panels"]
    cells = [
        (x, y)
        for one in everything
        for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])
        for y in range(one["gridPos"]["y"], one["gridPos"]["y"] + one["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({one["id"] for one in everything}) == len(everything)
    assert all(panel["title"] and panel["description"] for panel in panels())
