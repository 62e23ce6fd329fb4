"""The page and the charts are made from the results alone, and say what was missed and who was missing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from bench.compare import charts, page
from bench.compare.charts import SCALE_MAX, rows
from bench.compare.contests import CONTESTS
from bench.compare.wording import duration, figure, ratio, times
from tests.bench.samples import results

SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_has_each_figure_with_its_spread_and_each_verdict() -> None:
    text = page.page(results())

    assert "| redis-py: redis-py, 2 commands; 1 |  | 230 µs | 650 µs | 1.04 (1.01–1.08) | 100 µs |" in text
    assert "| Redis, duplicate | at most 1.2 × one raw command | 1.30 × (redis-py) | **missed** | 8 % over |" in text
    assert "| Onefold | 8,000/s |  |" in text
    assert "| idemkit | failed |  |" in text
    assert "Example CPU" in text


def test_the_page_names_who_was_missing_and_why() -> None:
    text = page.page(results())

    assert "| Redis, claim mode | Powertools | ImportError: no &lt;module> / here |" in text
    assert "- Onefold is missing: redis-server is not installed" in text
    assert "| postgres, text | missing: postgres is not installed | 20,000 |" in text


def test_the_page_shows_the_charts_that_there_are() -> None:
    shown = set(re.findall(r"\]\(([\w-]+\.svg)\)", page.page(results())))

    assert shown == set(charts.charts(results())) == {"redis.svg", "postgres.svg", "postgres-joined.svg"}


def test_without_results_the_page_says_so_and_whom_it_would_compare() -> None:
    text = page.page(None)

    assert "no committed results yet" in text.replace("\n", " ")
    assert [contest.title for contest in CONTESTS if contest.title not in text] == []


def test_the_readme_quotes_three_ratios_of_the_run() -> None:
    quoted = page.quoted(results())

    assert "a first call on Redis takes 1.04 × two raw commands" in quoted
    assert "1.20 × a hand-written dedup INSERT" in quoted
    assert "0.40 × the time of idemkit" in quoted
    assert "(2026-11-18)" in quoted
    assert "](docs/benchmarks/index.md)" in quoted


def test_the_readme_quotes_nothing_that_was_not_measured() -> None:
    partly = {**results(), "contests": []}

    for found in (page.quoted(None), page.quoted(partly)):
        assert "×" not in found
        assert "](docs/benchmarks/index.md)" in found


def test_a_chart_has_a_bar_for_each_side_and_call_in_multiples_of_the_limit() -> None:
    contest = results()["contests"][0]

    drawn = ET.fromstring(charts.chart(contest))

    bars = [rect for rect in drawn.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) == 2 * len(contest["sides"])
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert [f"{times(row.value)} ×" for row in rows(contest, "first")] == ["1.04 ×", "1.00 ×", "1.73 ×", "41.6 ×"]
    assert [word for word in ("1.04 ×", "1.00 ×", "1.73 ×", "41.6 ×", "Onefold", "idemkit") if word not in words] == []


def test_a_bar_beyond_the_scale_is_cut_and_stays_inside_the_chart() -> None:
    drawn = ET.fromstring(charts.chart(results()["contests"][0]))

    assert max(row.value for row in rows(results()["contests"][0], "first")) > SCALE_MAX
    assert len([path for path in drawn.iter(f"{SVG}path") if path.get("class") == "cut"]) == 1
    ends = [float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in drawn.iter(f"{SVG}rect")]
    assert max(ends) <= charts.WIDTH


def test_a_chart_has_colours_for_dark_pages() -> None:
    assert "prefers-color-scheme:dark" in charts.chart(results()["contests"][0])


@pytest.mark.parametrize(
    ("microseconds", "words"),
    [(0.512, "0.51 µs"), (8.14, "8.14 µs"), (42.26, "42.3 µs"), (240, "240 µs"), (1310, "1.31 ms")],
)
def test_a_time_has_three_digits(microseconds: float, words: str) -> None:
    assert duration(microseconds) == words


def test_a_small_ratio_keeps_its_digits() -> None:
    assert ratio([0.0123, 0.025, 0.5]) == "0.025 (0.012–0.50)"


def test_a_bar_without_a_figure_says_so() -> None:
    assert figure({"work": "growth", "must": "be flat"}) == "not measured in this run"
