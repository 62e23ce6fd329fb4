"""Draw what was measured as SVG: bars with their numbers, a line where a limit is. Pure: a document gives a picture.

Readable without colour (each bar has its number), with a title and a description for people who cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final, NamedTuple

WIDTH: Final = 860
LEFT: Final = 220
RIGHT: Final = 150
TOP: Final = 56
BAR: Final = 16
ROW: Final = 22
HEADING: Final = 26

SVG: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
    'aria-labelledby="title description">'
)

STYLE: Final = """
text { font: 12px sans-serif; fill: #1a1a1a } .head { font-size: 16px; font-weight: bold } .group { font-weight: bold }
.bar { fill: #c9d6e8; stroke: #5a6b80; stroke-width: 0.5 } .limit { stroke: #8a1c00; stroke-dasharray: 4 3 }
.paper { fill: #ffffff }
"""

NAMES: Final = {"postgres": "PostgreSQL", "redis": "Redis", "sqlite": "SQLite"}


class Bar(NamedTuple):
    label: str
    value: float
    text: str


class Group(NamedTuple):
    title: str
    bars: list[Bar]


def pictures(document: dict[str, Any]) -> dict[str, str]:
    """Return each picture by the name of its file."""
    found = {}
    if document["growth"]:
        found["scale-growth.svg"] = _growth(document["growth"])
        found["scale-bytes.svg"] = _bytes(document["growth"])
    if document["waiters"]:
        found["scale-waiters.svg"] = _waiters(document["waiters"])
    if document["purge"]:
        found["scale-purge.svg"] = _purge(document["purge"])
    return found


def _growth(rows: list[dict[str, Any]]) -> str:
    groups = [
        Group(
            NAMES[store],
            [
                bar
                for row in rows
                if row["store"] == store
                for bar in (
                    Bar(f"{row['records']:,} records, a claim", row["ratio"], _times(row["ratio"], row["claim_us"])),
                    Bar("a duplicate", row["duplicate_ratio"], _times(row["duplicate_ratio"], row["duplicate_us"])),
                )
            ],
        )
        for store in _stores(rows)
    ]
    about = "p50 of a claim and of a duplicate, divided by those of a store with 10,000 records, measured in turn."
    return draw("The cost of a delivery as a store grows", about, groups, rows[0]["at_most"])


def _times(ratio: float, microseconds: float) -> str:
    return f"{ratio:.2f} × ({microseconds:,.0f} µs)"


def _bytes(rows: list[dict[str, Any]]) -> str:
    groups = [
        Group(
            NAMES[store],
            [
                bar
                for row in rows
                if row["store"] == store
                for bar in (
                    Bar(f"{row['records']:,} records", row["bytes"], f"{row['bytes']:.0f} bytes"),
                    *(
                        [Bar("of it the index", row["index_bytes"], f"{row['index_bytes']:.0f}")]
                        * bool(row["index_bytes"])
                    ),
                )
            ],
        )
        for store in _stores(rows)
    ]
    about = "Bytes of a finished record without a result and a fingerprint; the key is a UUID."
    return draw("Bytes per record", about, groups)


def _waiters(rows: list[dict[str, Any]]) -> str:
    groups = [
        Group(
            f"{NAMES[store]}, duplicates in {where.replace('`', '')}",
            [
                Bar(
                    f"{row['waiters']} waiting", row["reads"], f"{row['reads']:,} reads, {row['last_answer_ms']:.0f} ms"
                )
                for row in rows
                if (row["store"], row["where"]) == (store, where)
            ],
        )
        for store in _stores(rows)
        for where in dict.fromkeys(row["where"] for row in rows if row["store"] == store)
    ]
    about = (
        f"Reads of the store while a handler takes {rows[0]['handler_seconds']:g} s, "
        "and from its end to the last duplicate's answer."
    )
    return draw("Duplicates that wait for one key", about, groups)


def _purge(found: dict[str, Any]) -> str:
    groups = [
        Group(
            phase["name"],
            [Bar(name, phase[f"{name}_ms"], f"{phase[f'{name}_ms']:.1f} ms") for name in ("p50", "p99")],
        )
        for phase in found["phases"]
    ]
    about = (
        f"One delivery on PostgreSQL, with {found['rows']:,} records, half of them expired: "
        f"p99 while purging is {found['ratio']:.2f} × that between the purges."
    )
    return draw("Deliveries beside a purge", about, groups)


def _stores(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["store"] for row in rows))


def draw(title: str, about: str, groups: Sequence[Group], limit: float | None = None) -> str:
    """Return the whole SVG document."""
    room = WIDTH - LEFT - RIGHT
    most = max([bar.value for group in groups for bar in group.bars] + [limit or 0.0]) or 1.0
    parts, y = [], float(TOP)
    for group in groups:
        parts.append(f'<text class="group" x="16" y="{y + 18:.0f}">{escape(group.title)}</text>')
        y += HEADING
        for bar in group.bars:
            parts += _bar(bar, y, room * bar.value / most)
            y += ROW
    height = y + 16
    if limit is not None:
        x = LEFT + room * limit / most
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y:.0f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 4:.0f}" text-anchor="middle">at most {limit:g}</text>')
    head = [
        SVG.format(width=WIDTH, height=f"{height:.0f}"),
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(about)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>',
        f'<text class="head" x="16" y="24">{escape(title)}</text>',
        f'<text x="16" y="44">{escape(about)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _bar(bar: Bar, y: float, length: float) -> list[str]:
    return [
        f'<text x="{LEFT - 8}" y="{y + 13:.0f}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect class="bar" x="{LEFT}" y="{y:.0f}" width="{max(length, 1.0):.1f}" height="{BAR}"/>',
        f'<text x="{LEFT + max(length, 1.0) + 6:.1f}" y="{y + 13:.0f}">{escape(bar.text)}</text>',
    ]
