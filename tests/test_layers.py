"""Who may import whom: the rooms of the architecture, walked import by import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold

ROOT = Path(onefold.__file__).parent

BOTTOM = {"errors", "durations", "_checks", "_driver_connections", "_forks", "_innermost", "_interrupts", "_model"}
RULES = BOTTOM | {
    "_bypass",
    "_canonical",
    "_decide",
    "_fingerprint",
    "_log_writes",
    "_steps",
    "_steps_left",
    "_work",
    "codecs",
    "events",
}
FLOWS = {
    "_flow",
    "_flow_batch",
    "_flow_bypass",
    "_flow_fresh",
    "_flow_joined",
    "_flow_moving",
    "_flow_probe",
    "_flow_records",
    "_flow_seen",
    "_flow_steps",
}
FRONT = (
    RULES
    | FLOWS
    | {"keys", "stores", "heartbeat", "current", "_calls", "_nested", "_toolbox", "_front", "guard", "guard_async"}
)

# What a room may import of ours. A room that is not listed may import the public names only.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "durations": {"errors"},
    "_checks": {"errors", "durations"},
    "_driver_connections": set(),
    "_forks": set(),
    "_innermost": set(),
    "_interrupts": {"errors"},
    "_model": BOTTOM,
    "_bypass": {"_model"},
    "_canonical": set(),
    "_fingerprint": {"_canonical"},
    "_decide": {"_bypass", "_fingerprint", "_model", "_steps_left", "errors"},
    "codecs": {"errors"},
    "events": {"_model"},
    "keys": {"_canonical", "_model", "errors"},
    "_returned": {"_innermost", "errors"},
    "_steps": {"_interrupts", "_model", "_returned", "_steps_left"},
    "_steps_left": set(),
    "_log_writes": {"_interrupts", "_model", "_steps"},
    "_work": {"_decide", "_model", "_steps_left", "codecs", "errors", "events"},
    **dict.fromkeys(FLOWS, RULES | FLOWS),
    "stores": BOTTOM | {"stores"},
    "_renewal_groups": {"_model"},
    "_renewal_telling": {"_model", "durations", "errors", "events"},
    "_heartbeat_thread": set(),
    "heartbeat": {
        "_heartbeat_thread",
        "_model",
        "_renewal_groups",
        "_renewal_telling",
        "durations",
        "errors",
        "events",
        "stores",
    },
    "_nested": {"_interrupts", "_model", "errors"},
    "current": RULES | FLOWS | {"_nested", "keys", "heartbeat"},
    "_calls": {"keys", "_canonical", "_checks", "_fingerprint", "_innermost", "errors"},
    "_toolbox": {"_nested", "_steps", "codecs", "current", "events", "heartbeat"},
    "_front": FRONT - {"guard", "guard_async"},
    "transactions": FRONT | {"transactions"},
    "guard": FRONT | {"transactions"},
    "guard_async": FRONT | {"transactions"},
    "__init__": FRONT | {"transactions", "_load"},
}

# The simulator runs the production flows, and so it has to reach them. The words for a record are those of the rules:
# only they know what a bypass that died has left.
EXCEPTIONS = {"testing/simulate", "cli/_words.py"}

PURE = FLOWS | {"_bypass", "_decide", "_fingerprint", "_steps_left", "_work"}
IMPURE = {"time", "random", "asyncio", "threading", "socket", "os", "secrets", "datetime"}


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """Every import as (module, name), those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            yield from ((node.module or "", alias.name) for alias in node.names)


def breaches(path: str, source: str) -> list[str]:
    room = Path(path).parts[0].removesuffix(".py")
    excused = any(path.startswith(exception) for exception in EXCEPTIONS)
    found = []
    for module, name in imports_of(source):
        top, _, rest = module.partition(".")
        if room in PURE and top in IMPURE:
            found.append(f"{path} imports {module}, and has to stay pure")
        if top != "onefold" or excused:
            continue
        target = rest.split(".")[0] or (name if (ROOT / f"{name}.py").exists() else "__init__")
        allowed = MAY_IMPORT.get(room)
        private = target.startswith("_") and target != "__init__"
        if target == room or (allowed is None and not private) or (allowed is not None and target in allowed):
            continue
        found.append(f"{path} imports {target}")
    return found


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")))
def test_no_room_imports_what_it_must_not_know(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")

    assert breaches(path, source) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("stores/redis.py", "from onefold._decide import decide"),
        ("stores/redis.py", "import onefold.guard"),
        ("_flow.py", "import time"),
        ("_decide.py", "def f():\n    from random import random"),
        ("_model.py", "from onefold import _flow"),
        ("http/asgi.py", "from onefold._flow import deliver"),
        ("cli/main.py", "from onefold import _front"),
    ],
)
def test_a_breach_is_found(path: str, source: str) -> None:
    assert len(breaches(path, source)) == 1
