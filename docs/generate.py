"""Write what the documentation shows of the source: diagrams, tables, statements, links to tests, a picture.

`make docs` runs it; a test fails while the pages are not what it would write.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onefold
from onefold import errors
from onefold._delivery.decide import AFTER, FOUND, transitions
from onefold.sizing import COSTS, Workload, size
from onefold.testing.simulate import STATEMENTS

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGE = ROOT / "src" / "onefold"


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
        [
            *("idempotent", "transactional", "scheduled", "run", "run_batch", "within"),
            *("read", "address", "resolve", "forget", "check", "close"),
        ],
    ),
    "guard.within(connection)": (type(onefold.Guard("memory:").within(None)), ["run", "fresh"]),
    "current()": (
        onefold.Current,
        ["operation", "key", "scope", "attempt", "token", "lost", "is_running", "step_name", "key_for", "step", "note"],
    ),
}

# For authors of adapters and stores, who find them on the page about extending; the mistake of awaiting a `Guard`.
NOT_FOR_USERS = {"aclose", "beat", "check_handler", "check_policy", "source", "store"}


def calls() -> str:
    """The front door, with its arguments and all that its docstrings say."""
    parts = []
    for of, (kind, members) in CALLS.items():
        forgotten = {name for name in dir(kind) if not name.startswith("_")} - {*members} - NOT_FOR_USERS
        assert not forgotten or of == "Guard", f"the reference leaves out {sorted(forgotten)} of {of}"
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
        if one.kind is one.VAR_KEYWORD:
            words.append(f"**{one.name}")
            continue
        words.append(one.name if one.default is one.empty else f"{one.name}={default}")
    return f"({', '.join(words)})"


Edge = tuple[str, str]

# A guard of its own kind: it needs the guards, and the room around it is what stores need.
APART = {"stores.dynamodb.transactions"}


@cache
def modules() -> dict[str, Path]:
    """Return every module below `onefold` by its dotted name; the package itself has none."""
    dotted = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in sorted(dotted.items())}


@cache
def imports() -> frozenset[Edge]:
    """Return which module imports which, inside of functions and for type checkers too."""
    found: set[Edge] = set()
    for name, path in modules().items():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "onefold":
                inside = (node.module or "").partition(".")[2]
                names = (f"{inside}.{alias.name}".strip(".") for alias in node.names)
                found.update((name, one if one in modules() else inside) for one in names)
            elif isinstance(node, ast.Import):
                found.update(
                    (name, one.name.removeprefix("onefold.")) for one in node.names if one.name.startswith("onefold.")
                )
    return frozenset(found)


def reached(start: str, edges: Iterable[Edge]) -> set[str]:
    """Return all that can be reached from here in one step or more."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        here = ahead.pop()
        new = {target for source, target in edges if source == here} - seen
        seen |= new
        ahead += new
    return seen


GUARDS = "guards"


@cache
def room_of(module: str) -> str | None:
    """Return the room that the picture shows for a module; None for the words that every room uses."""
    parts = module.split(".")
    if module in APART:
        return module
    if module and (len(parts) > 1 or modules()[module].name == "__init__.py"):
        is_room_of_stores = parts[0] == "stores" and ".".join(parts[:2]) in packages()
        return ".".join(parts[: 2 if is_room_of_stores else 1])
    others = reached(module, imports())
    if "_delivery" in {name.partition(".")[0] for name in others}:
        return GUARDS
    return module if any(name.startswith("stores.") for name in others) else None


@cache
def packages() -> frozenset[str]:
    return frozenset(name for name, path in modules().items() if name and path.name == "__init__.py")


def crossings() -> Counter[Edge]:
    """Return how many imports lead from one room into another."""
    pairs = ((room_of(source), room_of(target)) for source, target in imports())
    return Counter((source, target) for source, target in pairs if source and target and source != target)


def drawn(counted: Counter[Edge]) -> tuple[list[Edge], list[Edge]]:
    """Return the arrows of the picture, and those against the stream: of two rooms, the fewer imports of the two ways.

    What can be reached over other arrows is not drawn. The arrow of the fewest imports is left out first.
    """
    against = [edge for edge in counted if counted[edge] < counted[edge[::-1]]]
    kept = counted.keys() - against
    for edge in sorted(kept, key=lambda edge: (counted[edge], edge)):
        if edge[1] in reached(edge[0], kept - {edge}):
            kept -= {edge}
    return sorted(kept), sorted(against)


def rooms() -> str:
    """Draw the rooms and who imports whom."""
    arrows, against = drawn(crossings())
    names = sorted({room for edge in [*arrows, *against] for room in edge})
    stores = [room for room in names if room.partition(".")[0] == "stores"]
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {_node(room)}" for room in names if room not in stores]
    lines += ['    subgraph all_stores["stores/"]', *(f"        {_node(room)}" for room in stores), "    end"]
    lines += [f"    {_id(source)} --> {_id(target)}" for source, target in arrows]
    lines += [f"    {_id(source)} -.-> {_id(target)}" for source, target in against]
    return "\n".join([*lines, "```"])


def _node(room: str) -> str:
    return f'{_id(room)}["{_label(room)}"]'


def _id(room: str) -> str:
    return f"room_{room.strip('_').replace('.', '_')}"


def _label(room: str) -> str:
    if room == GUARDS:
        return ", ".join(
            name for name in modules() if name[:1] not in ("", "_") and room_of(name) == GUARDS and "." not in name
        )
    if room == "stores":
        return "base, opening, …"
    path = room.removeprefix("stores.").replace(".", "/")
    return f"{path}/" if room in packages() else f"{path}.py"


def purposes() -> str:
    """List the packages of the picture with the first line of what each says about itself."""
    shown = sorted(name for name in packages() if room_of(name) == name)
    rows = [f"| `{name.replace('.', '/')}/` | {_first_line(modules()[name])} |" for name in shown]
    return "\n".join(["| package | what it is for |", "| --- | --- |", *rows])


def _first_line(path: Path) -> str:
    return (ast.get_docstring(_tree(path)) or "").partition("\n")[0]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# Where tests are: ours, and those that every store has to pass.
TESTS = (ROOT / "tests", PACKAGE / "testing" / "promises")


@cache
def tests() -> dict[str, list[Path]]:
    """Return the files of each test by its name: one promise may be kept on several databases."""
    found: dict[str, list[Path]] = {}
    for path in sorted(path for folder in TESTS for path in folder.rglob("*.py")):
        for name in sorted(set(_tests_in(_tree(path)))):
            found.setdefault(name, []).append(path)
    return found


def _tests_in(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _tests_in(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name


ROW = re.compile(r"^\| (?P<number>\d+[a-z]?) \|(?P<says>.*)\|(?P<tests>[^|]*)\|$", flags=re.MULTILINE)
# In a link its text is words, and its file ends in .py: neither is taken for the name of a test.
NAMED = re.compile(r"\btest_\w+\b(?!\.py)")


def linked_tests(text: str) -> str:
    """Link the tests that the last column names, wherever they are now. To cite another test, write its name there."""
    return ROW.sub(lambda row: f"| {row['number']} |{row['says']}| {_linked(row)} |", text)


def _linked(row: re.Match[str]) -> str:
    names = dict.fromkeys(NAMED.findall(row["tests"]))
    if not names:
        # It says why there is none.
        return row["tests"].strip()
    missing = [name for name in names if name not in tests()]
    assert not missing, f"row {row['number']} names tests that do not exist: {', '.join(missing)}"
    return "; ".join(_links(name, tests()[name]) for name in names)


def _links(name: str, files: list[Path]) -> str:
    """Return the promise as a link; where several files keep it, links to the others follow."""
    words = name.removeprefix("test_").replace("_", " ")
    first, *others = (f"../{path.relative_to(ROOT).as_posix()}" for path in files)
    more = [f"[{_place(path)}]({target})" for path, target in zip(files[1:], others, strict=True)]
    return f"[{words}]({first}#{name})" + (f" (also {', '.join(more)})" if more else "")


def _place(path: Path) -> str:
    inside = path.relative_to(ROOT / "tests") if path.is_relative_to(ROOT / "tests") else path.relative_to(PACKAGE)
    return inside.with_name(inside.stem.removeprefix("test_")).as_posix()


# Of the pages about each store; Valkey has none of its own.
PAGES_OF_STORES = {"valkey": "redis"}


def sizing() -> str:
    """The bytes of a record on each store, and a week of a million a day, by the capacity model."""
    week = Workload(rate=1e6 / 86_400, keep=7 * 86_400.0)
    rows = []
    for name, costs in COSTS.items():
        found = size(week, costs)
        assert found.bytes is not None
        each = found.record_bytes - costs.billed_bytes
        added = f", and {costs.billed_bytes:.0f} that AWS adds to each" if costs.billed_bytes else ""
        where = " of memory" if costs.in_memory else ""
        page = f"[{costs.name}](stores/{PAGES_OF_STORES.get(name, name)}.md)"
        rows.append(f"| {page} | {each:.0f}{added} | {found.bytes / 1e9:.1f} GB{where} |")
    return "\n".join(["| store | bytes per record | a million a day, kept 7 days |", "| --- | --- | --- |", *rows])


def results() -> dict[str, Any] | None:
    """Return what `make bench ARGS=--save` measured last, if its results are here."""
    path = HERE / "benchmarks" / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def ratios() -> str:
    """Quote three ratios of the benchmarks, so that the README cannot say anything else than they do."""
    return textwrap.fill(_bench("page").quoted(results()), 130, break_long_words=False, break_on_hyphens=False)


def benchmarks() -> dict[Path, str]:
    """Return the page and the charts of the benchmarks: they are made from the results alone."""
    found = results()
    made = {"index.md": _bench("page").page(found)} | (_bench("charts").charts(found) if found else {})
    return {HERE / "benchmarks" / name: text for name, text in made.items()}


def _bench(module: str) -> Any:
    """Import what is beside the package, not in it."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"bench.compare.{module}")


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "../README.md": {"ratios": ratios},
    "architecture.md": {"rooms": rooms, "purposes": purposes},
    "concepts.md": {"diagram": diagram, "found": found, "after": after},
    "reference.md": {"names": names, "calls": calls},
    "guarantees.md": {"statements": statements, "meanings": meanings},
    "operations.md": {"sizing": sizing},
    "edge-cases.md": {},
    "seeds.md": {},
}
# What is not between two marks: cells of a table that is written by hand.
REWRITTEN: dict[str, Callable[[str], str]] = {"edge-cases.md": linked_tests, "seeds.md": linked_tests}


def generated(page: str) -> str:
    """The page with its generated parts made anew."""
    text = (HERE / page).read_text(encoding="utf-8")
    for name, make in PARTS[page].items():
        block = f"<!-- {name} -->\n\n{make()}\n\n<!-- /{name} -->"
        text, count = re.subn(f"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)  # noqa: B023
        assert count == 1, f"{page} has no place for {name}"
    return REWRITTEN[page](text) if page in REWRITTEN else text


def picture() -> str:
    """Return the picture of the demo, played now; the one that is there, if it says the same."""
    drawing = runpy.run_path(str(HERE / "pictures" / "demo.py"))
    drawn, before = drawing["draw"](), drawing["PICTURE"].read_text(encoding="utf-8")
    return str(before if drawing["texts"](drawn) == drawing["texts"](before) else drawn)


def write(path: Path, text: str) -> bool:
    """Write the file, unless that is what it says already; return whether it was written."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return True


if __name__ == "__main__":
    changed = [write(Path(os.path.normpath(HERE / page)), generated(page)) for page in PARTS]
    changed.append(write(HERE / "pictures" / "demo.svg", picture()))
    format_files = runpy.run_path(str(HERE / "record-format" / "vectors.py"))["FILES"]
    changed += [write(path, make()) for path, make in format_files.items()]
    changed += [write(path, text) for path, text in benchmarks().items()]
    if not any(changed):
        sys.stdout.write("the documentation is up to date\n")
