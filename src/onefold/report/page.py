"""Draw a report as one HTML page that needs nothing else: no script, no style sheet, no font, no picture. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:3rem auto;padding:0 1rem;color:#1b1b1b;"
    "background:#fff}table{border-collapse:collapse;width:100%}th,td{padding:.4rem .6rem;text-align:right;"
    "border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}tfoot td{font-weight:600}"
    "p.big{font-size:1.4rem}@media (prefers-color-scheme:dark){body{color:#eee;background:#161616}"
    "th,td{border-color:#444}}"
)


def page(headline: str, period: str, columns: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str],
         notes: Sequence[str]) -> str:  # fmt: skip
    """Return the page: a sentence, a table with its total, and notes about what was counted."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    more = "".join(f"<li>{escape(one)}</li>" for one in notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Without Onefold</title><style>{STYLE}</style></head><body>"
        f'<h1>Without Onefold</h1><p class="big">{escape(headline)}</p><p>{escape(period)}</p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot><tr>{_cells(total)}</tr></tfoot></table>"
        f"<ul>{more}</ul></body></html>\n"
    )


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)
