"""Draw the report: a row of bars for each hop, an hour (or more) for each bar, a mark where something leaked.

Written by hand as SVG: readable without colour (leaks are hatched, and have a mark and a number), with a title and a
description for people who cannot see it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final, NamedTuple

from onefold.health.report import counted
from onefold.trace.leaks import LeakKind
from onefold.trace.lines import HOUR
from onefold.trace.report import Cell, Report

# More bars cannot be told apart: then one stands for several hours.
BARS_MAX: Final = 96

# More rows are not readable; the table has them all.
ROWS_MAX: Final = 40

WIDTH: Final = 960
LEFT: Final = 150
RIGHT: Final = 210
TOP: Final = 64
ROW: Final = 84
BAR: Final = 52
# A leak is visible, however few there are.
LEAK_MIN: Final = 4.0

TITLE: Final = "Key leaks by hop and hour"

SVG: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
    'aria-labelledby="title description">'
)

HATCH: Final = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="#ffffff"/><rect width="2.5" height="5" fill="#8a1c00"/></pattern></defs>'
)

STYLE: Final = """
text { font: 12px sans-serif; fill: #1a1a1a } .head { font-size: 16px; font-weight: bold } .small { font-size: 10px }
.lines { fill: #c9d6e8; stroke: #5a6b80; stroke-width: 0.5 } .leak { fill: url(#hatch); stroke: #8a1c00 }
.mark { fill: #8a1c00 } .axis { stroke: #1a1a1a }
"""

# After the number.
NOUNS: Final = {
    LeakKind.REPLACED: ("key replaced", "keys replaced"),
    LeakKind.REQUESTS: ("key with several requests", "keys with several requests"),
    LeakKind.RESENT: ("sent again", "sent again"),
    LeakKind.REMINTED: ("key minted anew", "keys minted anew"),
}


class Bar(NamedTuple):
    """One hop over one bar's time."""

    lines: int
    leaks: int
    cells: Sequence[Cell]


def picture(report: Report) -> str:
    """Return the whole SVG document."""
    hops = report.hops[:ROWS_MAX]
    first = min(cell.hour for cell in report.cells)
    hours = (max(cell.hour for cell in report.cells) - first) // HOUR + 1
    span = -(-hours // BARS_MAX) * HOUR
    count = -(-hours * HOUR // span)
    height = TOP + ROW * len(hops) + 40
    about = described(report)
    parts = [
        SVG.format(width=WIDTH, height=height),
        f'<title id="title">{TITLE}</title>',
        f'<desc id="description">{_text(about)}</desc>',
        f"<style>{STYLE}</style>",
        HATCH,
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text class="head" x="16" y="28">{TITLE}</text>',
        f'<text x="16" y="48">{_text(_bars(span))}</text>',
    ]
    for row, hop in enumerate(hops):
        cells = [cell for cell in report.cells if cell.hop == hop]
        parts += _row(hop, _gathered(cells, first, span, count), TOP + row * ROW, (first, span))
    parts += _times(first, span, count, TOP + len(hops) * ROW)
    return "\n".join([*parts, "</svg>\n"])


def described(report: Report) -> str:
    """Return the picture in words."""
    said = [f"{counted(report.tally.lines, 'line')} from the hops {', '.join(report.hops)}."]
    for hop in report.hops:
        found = _told({kind: report.count(kind, hop) for kind in LeakKind})
        if found:
            said.append(f"{hop}: {', '.join(found)}.")
    return " ".join(said if len(said) > 1 else [*said, "No leaks."])


def _told(counts: Mapping[LeakKind, int]) -> list[str]:
    return [f"{count:,} {NOUNS[kind][count != 1]}" for kind, count in counts.items() if count]


def _gathered(cells: Sequence[Cell], first: int, span: int, count: int) -> list[Bar]:
    gathered: list[list[Cell]] = [[] for _ in range(count)]
    for cell in cells:
        gathered[(cell.hour - first) // span].append(cell)
    return [
        Bar(sum(cell.lines for cell in found), sum(cell.leaks(kind) for cell in found for kind in LeakKind), found)
        for found in gathered
    ]


def _row(hop: str, bars: Sequence[Bar], top: int, time: tuple[int, int]) -> list[str]:
    """Draw one hop: its name, its bars, and the total of its leaks."""
    most = max(max((bar.lines for bar in bars), default=0), 1)
    step = (WIDTH - LEFT - RIGHT) / len(bars)
    base, busiest = top + 12 + BAR, counted(most, "line")
    parts = [
        f'<text x="16" y="{base - 20}">{_text(_short(hop))}</text>',
        f'<text class="small" x="16" y="{base - 4}">up to {busiest}</text>',
        f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>',
    ]
    for number, bar in enumerate(bars):
        if bar.lines:
            parts += _bar(bar, (LEFT + number * step, base, max(step - 1, 1)), most, time[0] + number * time[1])
    total = {kind: sum(cell.leaks(kind) for bar in bars for cell in bar.cells) for kind in LeakKind}
    told = _told(total) or ["no leaks"]
    start = base - 12 * (len(told) - 1) - 8
    parts += [
        f'<text x="{WIDTH - RIGHT + 12}" y="{start + 14 * line}">{_text(message)}</text>'
        for line, message in enumerate(told)
    ]
    return parts


def _bar(bar: Bar, position: tuple[float, int, float], most: int, begins: int) -> list[str]:
    x, base, width = position
    high = max(bar.lines / most * BAR, 1)
    message = f"{_clock(begins)}: {counted(bar.lines, 'line')}, {counted(bar.leaks, 'leak')}"
    parts = [f"<g><title>{message}</title>", _rect("lines", x, base - high, width, high)]
    if bar.leaks:
        leaks = min(max(bar.leaks / most * BAR, LEAK_MIN), BAR)
        middle = x + width / 2
        parts += [
            _rect("leak", x, base - leaks, width, leaks),
            f'<path class="mark" d="M {middle - 4:.1f} {base + 9} h 8 l -4 -6 z"/>',
        ]
    return [*parts, "</g>"]


def _rect(name: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _times(first: int, span: int, count: int, y: int) -> list[str]:
    last = first + (count - 1) * span
    ends = [f'<text x="{LEFT}" y="{y + 20}">{_clock(first)}</text>']
    if count > 1:
        ends.append(f'<text x="{WIDTH - RIGHT}" y="{y + 20}" text-anchor="end">{_clock(last)}</text>')
    return ends


def _bars(span: int) -> str:
    each = "an hour" if span == HOUR else f"{span // HOUR} hours"
    return f"Each bar is {each} (UTC). Plain: lines. Hatched, with a mark below: leaks."


def _clock(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M")


def _text(message: str) -> str:
    """Escape markup in names, which come from logs, and replace characters that XML forbids."""
    return escape("".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in message))


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
