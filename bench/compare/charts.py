"""The charts of a run, as SVG: one for each contest, readable on a light and on a dark page. From the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from bench.compare.contests import ENGINE, FLOOR, LIMIT, OTHER_WAY, OURS, PEER, SEEN_ONLY
from bench.compare.wording import duration, times

WIDTH: Final = 760
LABEL_WIDTH: Final = 176
GAP: Final = 20
ROW: Final = 26
BAR: Final = 16
TOP: Final = 64
FOOT: Final = 34
# Beside the longest bar there is room for its figure.
FIGURE_WIDTH: Final = 62

# A bar that is longer would make the others too short to compare: it is cut, and its figure says how long it is.
SCALE_MAX: Final = 8.0

COLOURS: Final = {
    OURS: ("#0969da", "#4493f8"),
    LIMIT: ("#8c959f", "#7d8590"),
    PEER: ("#bc4c00", "#db6d28"),
    SEEN_ONLY: ("#d4a72c", "#bb8009"),
    ENGINE: ("#8250df", "#a371f7"),
    OTHER_WAY: ("#54aeff", "#79c0ff"),
    FLOOR: ("#57606a", "#a8b3bd"),
}
LEGEND: Final = {
    OURS: "Onefold",
    LIMIT: "by hand: the limit",
    PEER: "other libraries",
    SEEN_ONLY: "seen only, no claim",
    ENGINE: "engines",
    OTHER_WAY: "Onefold, the other way",
    FLOOR: "our statements alone",
}
CALLS: Final = {"first": "first call", "duplicate": "duplicate"}


class Row(NamedTuple):
    """One bar: its length in multiples of the limit, and the time."""

    name: str
    role: str
    value: float
    time: str


def charts(results: dict[str, Any]) -> dict[str, str]:
    """Return every chart by the name of its file."""
    return {f"{one['name']}.svg": chart(one) for one in results["contests"] if has_chart(one)}


def has_chart(contest: dict[str, Any]) -> bool:
    """Say whether there is something to compare: a limit, and somebody beside it."""
    return len(contest["sides"]) > 1 and any(side["role"] == LIMIT for side in contest["sides"])


def rows(contest: dict[str, Any], call: str) -> list[Row]:
    """Return the bars of one call, the limit as 1, in the order of the contest."""
    limit = next(side for side in contest["sides"] if side["role"] == LIMIT)[call]["ratio"][1]
    return [
        Row(side["name"], side["role"], limit / side[call]["ratio"][1], duration(side[call]["p50_us"]))
        for side in contest["sides"]
    ]


def chart(contest: dict[str, Any]) -> str:
    """Draw both calls of a contest beside each other."""
    count = len(contest["sides"])
    height = TOP + count * ROW + FOOT
    width = (WIDTH - LABEL_WIDTH - GAP) / 2
    parts = [_head(height, contest["title"]), _text(0, 18, contest["title"], "title")]
    for index, (call, words) in enumerate(CALLS.items()):
        left = LABEL_WIDTH + index * (width + GAP)
        parts.append(_text(left, 44, f"{words}, in multiples of the limit", "axis"))
        parts += _panel(rows(contest, call), left, width)
    for index, side in enumerate(contest["sides"]):
        parts.append(_text(LABEL_WIDTH - 10, TOP + index * ROW + 13, side["name"], "name"))
    parts.append(_legend([side["role"] for side in contest["sides"]], height - 12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(bars: Sequence[Row], left: float, width: float) -> list[str]:
    longest = min(SCALE_MAX, max(bar.value for bar in bars))
    unit = (width - FIGURE_WIDTH) / longest
    drawn = []
    for index, bar in enumerate(bars):
        top, length = TOP + index * ROW, max(1.0, min(bar.value, longest) * unit)
        about = f"<title>{escape(bar.name)}: {bar.time}</title>"
        place = f'x="{left:.1f}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2"'
        drawn.append(f'<rect class="{_class(bar.role)}" {place}>{about}</rect>')
        if bar.value > longest:
            drawn.append(_cut(left + length - 14, top))
        # Beside a bar that ends before the line of the limit, the figure is beyond the line.
        drawn.append(_text(left + max(length, unit) + 6, top + 13, f"{times(bar.value)} ×", "figure"))
    one = left + unit
    drawn.append(f'<line class="one" x1="{one:.1f}" y1="{TOP - 5}" x2="{one:.1f}" y2="{TOP + len(bars) * ROW - 5}"/>')
    return drawn


def _cut(x: float, top: int) -> str:
    """Draw the slash of a bar that goes on beyond the chart."""
    return f'<path class="cut" d="M{x:.1f} {top + BAR + 2} l6 -{BAR + 4}"/>'


def _legend(roles: Sequence[str], y: int) -> str:
    x, parts = 0.0, []
    for role in dict.fromkeys(roles):
        parts.append(f'<rect class="{_class(role)}" x="{x:.0f}" y="{y - 10}" width="11" height="11" rx="2"/>')
        parts.append(_text(x + 16, y, LEGEND[role], "axis"))
        x += 34 + 6.4 * len(LEGEND[role])
    return "\n".join(parts)


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _class(role: str) -> str:
    return role.replace(" ", "-")


def _head(height: int, title: str) -> str:
    light = "".join(f".{_class(role)}{{fill:{colours[0]}}}" for role, colours in COLOURS.items())
    dark = "".join(f".{_class(role)}{{fill:{colours[1]}}}" for role, colours in COLOURS.items())
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>{escape(title)}</title>
<style>
text{{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}}
.title{{font-size:15px;font-weight:600}}
.axis{{font-size:11px;fill:#59636e}}
.name{{text-anchor:end}}
.one{{stroke:#59636e;stroke-width:1;stroke-dasharray:2 3}}
.cut{{stroke:#ffffff;stroke-width:3;fill:none}}
{light}
@media (prefers-color-scheme:dark){{
text{{fill:#e6edf3}}
.axis{{fill:#9198a1}}
.one{{stroke:#9198a1}}
.cut{{stroke:#0d1117}}
{dark}
}}
</style>"""
