"""Write what the documentation shows of the source: the diagram, the tables, the statements.

`make docs` runs it; a test fails while the pages are not what it would write.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onefold
from onefold import errors
from onefold._delivery.decide import AFTER, FOUND, transitions
from onefold.testing.simulate import STATEMENTS

HERE = Path(__file__).parent


def diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {state} --> {becomes}: {why}" for state, becomes, why in transitions()]
    lines += ["    held --> done: resolved, or its owner finished late", "    held --> failed: resolved"]
    lines += ["    held --> open: resolved as rerun", "```"]
    return "\n".join(lines)


def found() -> str:
    rows = [f"| {row.state} | {row.when} | {row.then.value} |" for row in FOUND]
    first = [
        "| none, or expired | | run |",
        "| any | a different fingerprint | refuse: KeyReused |",
    ]
    return "\n".join(["| record found | when | then |", "| --- | --- | --- |", *first, *rows])


def after() -> str:
    rows = [f"| {row.ended} | {row.under} | {row.then.value} |" for row in AFTER]
    return "\n".join(["| the handler | under | then |", "| --- | --- | --- |", *rows])


def statements() -> str:
    return "\n".join(f"{number}. {words}" for number, words in STATEMENTS.items())


def meanings() -> str:
    rows = [
        f"| `{kind.__name__}` | {means.http}{' + Retry-After' if means.retry_after else ''} | {means.queue} |"
        for kind, means in errors.MEANINGS.items()
    ]
    return "\n".join(["| error | HTTP | queue |", "| --- | --- | --- |", *rows])


CONSTANTS = {
    "FOREVER": "An infinite duration.",
    "KEY_MAX": f"{onefold.KEY_MAX}: the maximum length of a key, in bytes of UTF-8.",
    "OPERATION_MAX": f"{onefold.OPERATION_MAX}: the same for an operation.",
    "SCOPE_MAX": f"{onefold.SCOPE_MAX}: the same for a scope.",
    "TX": "The default of a handler's argument `tx`, for type checkers: the guard passes the transaction.",
}


def names() -> str:
    """Every public name, with the first sentence of its docstring."""
    rows = []
    for name in onefold.__all__:
        value = getattr(onefold, name)
        about = CONSTANTS.get(name) or (inspect.getdoc(value) or "").split("\n")[0]
        rows.append(f"| `{name}` | {about} |")
    return "\n".join(["| name | what it is |", "| --- | --- |", *rows])


CALLS = {
    "Guard": (onefold.Guard, ["Guard"]),
    "guard": (
        onefold.Guard,
        ["idempotent", "transactional", "run", "run_batch", "within", "read", "address", "resolve", "forget", "close"],
    ),
    "guard.within(connection)": (type(onefold.Guard("memory:").within(None)), ["run", "fresh"]),
    "current()": (
        onefold.Current,
        ["operation", "key", "scope", "attempt", "token", "lost", "is_running", "step_name", "key_for", "step"],
    ),
}


def calls() -> str:
    """The front door, with its arguments and all that its docstrings say."""
    parts = []
    for of, (kind, members) in CALLS.items():
        for name in members:
            value = kind if name == of else inspect.getattr_static(kind, name)
            shown = name if name == of else f"{of}.{name}"
            about = (inspect.getdoc(value) or f"The {name} of this delivery.").replace("\n\n", "\n").replace("\n", " ")
            parts.append(f"**`{shown}{'' if isinstance(value, property) else _arguments(value)}`**\n\n{about}")
    return "\n\n".join(parts)


def _arguments(value: Callable[..., Any]) -> str:
    """Names and defaults; the types are in the source, for editors."""
    words, named = [], False
    for one in inspect.signature(value).parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not named:
            words.append("*")
            named = True
        default = "Any" if one.default is Any else repr(one.default)
        words.append(one.name if one.default is one.empty else f"{one.name}={default}")
    return f"({', '.join(words)})"


PARTS = {
    "concepts.md": {"diagram": diagram, "found": found, "after": after},
    "reference.md": {"names": names, "calls": calls},
    "guarantees.md": {"statements": statements, "meanings": meanings},
}


def generated(page: str) -> str:
    """The page with its generated parts made anew."""
    text = (HERE / page).read_text(encoding="utf-8")
    for name, make in PARTS[page].items():
        block = f"<!-- {name} -->\n\n{make()}\n\n<!-- /{name} -->"
        text, count = re.subn(f"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)  # noqa: B023
        assert count == 1, f"{page} has no place for {name}"
    return text


if __name__ == "__main__":
    for page in PARTS:
        (HERE / page).write_text(generated(page), encoding="utf-8")
        sys.stdout.write(f"wrote docs/{page}\n")
