"""`docs/benchmarks/index.md`, and the sentence of the README: from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.compare.bars import MET, MISSED, against
from bench.compare.charts import has_chart
from bench.compare.contests import CONTESTS, ENGINE, OURS
from bench.compare.tables import speed_and_ratio
from bench.compare.throughput import callers_of
from bench.compare.wording import duration, figure, ratio, times

# How the figures come about, in Markdown.
METHOD: Final = Path(__file__).with_name("method.md")
WHY: Final = Path(__file__).with_name("why.md")

INTRODUCTION: Final = """\
# Benchmarks

Onefold, the raw driver and the other libraries of the field, on the same server, in one run. `make bench` repeats it on
your machine; `make bench ARGS=--save` writes this page from its results ([results.json](results.json))."""

NOT_YET: Final = """\
# Benchmarks

`make bench` measures Onefold, the raw driver and the other libraries of the field on the same server in one run, and
prints each bar with its verdict; `make bench ARGS=--save` writes its results here. This version has no committed
results yet."""


def page(results: dict[str, Any] | None) -> str:
    """Write the page; without results it says what would be compared."""
    if results is None:
        return _joined([NOT_YET, _method(), "## What is compared", _entrants()])
    parts = [INTRODUCTION, _where(results), _verdicts(results), WHY.read_text("utf-8").strip(), _method()]
    for contest in results["contests"]:
        parts += _contest(contest)
    parts += [_sizes(results), _missing(results)]
    return _joined(part for part in parts if part)


def _method() -> str:
    return METHOD.read_text(encoding="utf-8").strip()


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in row)} |" for row in lines)


def _plain(cell: str) -> str:
    """Keep a cell from ending early, and an error's words from being taken for a tag."""
    return cell.replace("|", "/").replace("<", "&lt;")


def _entrants() -> str:
    rows = []
    for contest in CONTESTS:
        sides = ", ".join(one.name + (" (engine)" if one.role == ENGINE else "") for one in contest.entrants)
        rows.append((contest.title, f"`{contest.name}`", sides))
    return table(("contest", "`--only`", "sides"), rows)


def _where(results: dict[str, Any]) -> str:
    machine = results["machine"]
    parts = [
        f"Measured on {results['date']} with Onefold {results['onefold']}: {machine['cores']} cores ({machine['cpu']})",
        f"{machine['memory_gib']:g} GiB of memory",
        machine["os"],
        f"Python {machine['python']}",
        *(f"{name} {version}" for name, version in results["servers"].items()),
    ]
    load = f"The machine's load was {results['load_before']:g} before the run and {results['load_after']:g} after it."
    return f"{', '.join(parts)}. {load}"


def _verdicts(results: dict[str, Any]) -> str:
    count = {verdict: sum(bar["verdict"] == verdict for bar in results["bars"]) for verdict in (MET, MISSED)}
    rest = len(results["bars"]) - sum(count.values())
    rows = [
        (bar["work"], bar["must"], figure(bar), _marked(bar["verdict"]), bar.get("by", "")) for bar in results["bars"]
    ]
    summary = f"{count[MET]} met, {count[MISSED]} missed, {rest} not measured in this run."
    return f"## The bars\n\n{summary}\n\n" + table(("work", "must be", "found", "verdict", "by"), rows)


def _marked(verdict: str) -> str:
    return f"**{verdict}**" if verdict == MISSED else verdict


def _contest(contest: dict[str, Any]) -> list[str]:
    parts = [f"## {contest['title']}"]
    if has_chart(contest):
        parts.append(f"![{contest['title']}: the time of one call in multiples of the limit]({contest['name']}.svg)")
    if contest["sides"]:
        parts.append(_latency(contest))
    if contest["throughput"]:
        parts.append(_throughput(contest))
    if contest["missing"]:
        parts.append("\n".join(f"- {one['name']} is missing: {one['why']}" for one in contest["missing"]))
    if contest["note"]:
        parts.append(contest["note"])
    return parts


def _latency(contest: dict[str, Any]) -> str:
    head = ["side", "version"]
    for call in ("first", "duplicate"):
        head += [f"{call}, p50", "p99", "Onefold ÷ it"]
    rows = []
    for side in contest["sides"]:
        row = [f"{side['name']}: {side['what']}" if side["what"] != side["name"] else side["name"], side["version"]]
        for call in ("first", "duplicate"):
            found = side[call]
            row += [duration(found["p50_us"]), duration(found["p99_us"])]
            row.append("" if side["role"] == OURS else ratio(found["ratio"]))
        rows.append(row)
    return table(head, rows)


def _throughput(contest: dict[str, Any]) -> str:
    head = ["first calls a second"]
    for course in contest["throughput"]:
        head += [callers_of(contest["kind"], course["callers"]), "Onefold ÷ it"]
    rows = [
        [side["name"], *(cell for course in contest["throughput"] for cell in speed_and_ratio(course["sides"][index]))]
        for index, side in enumerate(contest["sides"])
    ]
    return table(head, rows)


def _sizes(results: dict[str, Any]) -> str:
    if not results["sizes"]:
        return ""
    rows = [
        (
            f"{one['store']}, {one['keys']}",
            f"{one['bytes']:g}" if "bytes" in one else f"missing: {one['missing']}",
            f"{one['records']:,}",
        )
        for one in results["sizes"]
    ]
    about = "A finished record of `run` without a result, with random keys of 36 characters:"
    return f"## Bytes\n\n{about}\n\n" + table(("store", "bytes", "measured over records"), rows)


def _missing(results: dict[str, Any]) -> str:
    rows = [(one["title"], gone["name"], gone["why"]) for one in results["contests"] for gone in one["missing"]]
    if not rows:
        return "## Missing\n\nNobody: every side of every contest was measured."
    return "## Missing\n\n" + table(("contest", "side", "why"), rows)


# What the README quotes: the contest, the call, the side, and the words for it.
QUOTED: Final = (
    ("redis", "first", "limit", "a first call on Redis takes {} × two raw commands"),
    (
        "postgres-joined",
        "first",
        "limit",
        "a record in your PostgreSQL transaction {} × a hand-written dedup INSERT",
    ),
    ("postgres", "first", "idemkit", "a claim on PostgreSQL {} × the time of idemkit, the closest library"),
)
LINK: Final = "docs/benchmarks/index.md"


def quoted(results: dict[str, Any] | None) -> str:
    """Write the README's sentence: three ratios, and where they come from."""
    found = []
    for contest, call, side, words in QUOTED:
        reading = against(contest, call, side)(results) if results else None
        if reading is not None:
            found.append(words.format(times(reading.value)))
    if len(found) < len(QUOTED) or results is None:
        return f"`make bench` measures it beside the raw drivers and other libraries, in one run: [benchmarks]({LINK})."
    first, *middle, last = found
    listed = f"{', '.join([first, *middle])}, and {last}"
    return (
        f"Measured in one run beside the raw drivers and the other libraries ({results['date']}): {listed}. "
        f"[Benchmarks]({LINK}) has every store, every peer and what was missed; `make bench` repeats it."
    )
