"""Who may import whom: the rooms of the architecture, walked import by import, by whole dotted paths."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold

ROOT = Path(onefold.__file__).parent

BOTTOM = {"errors", "durations", "_checks", "_entry_points", "_driver_connections", "_concurrency", "_model"}
RULES = BOTTOM | {"_fingerprint", "codecs", "events", "keys"}
CORE = RULES | {"_handlers", "_heartbeat", "_delivery", "current", "stores.base"}
# What everybody may use: what a user imports, too, and how a wrong argument is refused, in the same words everywhere.
PUBLIC = {"", "_checks", "codecs", "current", "durations", "errors", "events", "keys", "stores.base", "stores.sources"}
STORES = BOTTOM | {"stores"}
SQL = STORES | {"stores.sql", "transactions"}

# By room, which rooms it may import. The longest name that fits a module is its room; a name with "*" is the room of
# all that is below it. A package stands for its modules, those that have a rule of their own among them.
GUARD = CORE | {
    "_delivery.handler_steps",
    "_guard",
    "_schedule",
    "stores",
    "stores.hand_made",
    "stores.sources",
    "transactions",
}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "durations": {"errors"},
    "_checks": {"errors", "durations"},
    "_entry_points": set(),
    "_driver_connections": set(),
    "_concurrency": {"errors"},
    "_model": {"_checks", "durations", "errors"},
    "_fingerprint": set(),
    "codecs": {"errors"},
    "events": {"_model"},
    "keys": {"_fingerprint", "_model", "errors"},
    "_handlers": {"_checks", "_fingerprint", "_concurrency", "_model", "errors", "keys"},
    "_heartbeat": {"_model", "durations", "errors", "events", "stores.base"},
    "_delivery": RULES | {"_handlers", "_delivery.handler_steps", "_delivery.waiting"},
    "_delivery.waiting": RULES | {"_delivery"},
    "_delivery.handler_steps": RULES | {"_delivery"},
    "current": RULES | {"_delivery", "_delivery.handler_steps", "_handlers", "_heartbeat"},
    # `guard.check()` judges as the doctor does. Imported on use.
    "_guard": CORE | {"_delivery.handler_steps", "health", "stores", "stores.hand_made", "transactions"},
    # Decorates with the methods of a guard, which imports it on use.
    "_schedule": {"_handlers", "_model", "durations", "errors"},
    "guard": GUARD,
    "guard_async": GUARD,
    "_load": {"codecs", "config", "events"},
    "": {"_load", "_model", "codecs", "current", "durations", "errors", "events", "guard", "guard_async", "stores.base"}
    | {"stores.hand_made", "transactions"},
    # Stores know nothing of deliveries.
    "stores": BOTTOM,
    "stores.base": {"_concurrency", "_model", "errors"},
    # Types only, for whoever takes what a guard takes.
    "stores.sources": {"stores.base"},
    # How to read a bounded part of each store, imported by it on use.
    "stores.samples": SQL | {"stores.dynamodb", "stores.mysql", "stores.postgres", "stores.redis"},
    # A row of the caller's keeps a result as JSON, which a codec has to read.
    "stores.sql": SQL | {"codecs", "stores.samples"},
    "stores.postgres*": SQL | {"stores.samples"},
    "stores.mysql*": SQL | {"stores.samples"},
    "stores.sqlite": SQL | {"stores.samples"},
    "stores.redis": STORES | {"stores.samples"},
    "stores.dynamodb": STORES | {"stores.samples"},
    # A guard of its own kind: the record is one more item of a write that the caller sends.
    "stores.dynamodb.transactions": RULES | {"_delivery", "guard", "guard_async", "stores.dynamodb"},
    # Rows of a caller's own table as records, for guards and for imports.
    "stores.hand_made": RULES | STORES | {"stores.sql"},
    # One engine or alias may lead to any of the three: its dialect is chosen here, by its name there.
    "stores.sqlalchemy": SQL | {"stores.mysql", "stores.postgres", "stores.sqlite"},
    "stores.django": SQL | {"stores.mysql", "stores.postgres", "stores.sqlite"},
    "transactions": BOTTOM,
    "http": PUBLIC
    | {"http._answers", "http._asgi", "http._django", "http._exchange", "http._requests", "http._shared"}
    # What a guard is made of, for types.
    | {"stores.sources"},
    "http._shared": PUBLIC,
    "http._requests": PUBLIC | {"http._shared"},
    "http._answers": PUBLIC | {"_concurrency", "http._requests", "http._shared"},
    # Scopes, and the blocking call, are in modules that users import too.
    "http._exchange": PUBLIC | {"_concurrency", "health", "http", "http._answers", "http._requests", "http._shared"},
    "http._asgi": PUBLIC | {"_concurrency", "http._answers", "http._exchange", "http._requests", "http._shared"},
    "http._django": PUBLIC | {"http._asgi", "http._exchange"},
    "http.client": PUBLIC | {"_concurrency", "http._shared"},
    # Adapters check a store once, before their first message or request.
    "queues": PUBLIC
    | {"_concurrency", "health", "queues._kafka", "queues._nats", "queues._rabbitmq", "queues._redis_streams"}
    | {"queues._shared", "queues._sqs"},
    "queues.keys": PUBLIC,
    "queues.kafka_offsets": PUBLIC | {"_concurrency", "queues._kafka"},
    # A batch is committed with the offsets of its messages, in one transaction.
    "queues._shared": PUBLIC | {"_concurrency", "_model", "health", "queues.keys", "stores", "transactions"},
    "queues._kafka": PUBLIC | {"_concurrency", "queues._shared", "queues.keys", "queues.kafka_offsets"},
    "queues._nats": PUBLIC | {"_concurrency", "queues._shared", "queues.keys"},
    "queues._rabbitmq": PUBLIC | {"_concurrency", "queues._shared", "queues.keys"},
    "queues._redis_streams": PUBLIC | {"_concurrency", "queues._shared", "queues.keys"},
    "queues._sqs": PUBLIC | {"_concurrency", "queues._shared", "queues.keys"},
    "queues.celery": PUBLIC | {"_concurrency", "health", "queues._rabbitmq", "queues._shared", "queues.keys"},
    "queues.dramatiq": PUBLIC | {"_concurrency", "health", "queues._shared", "queues.keys"},
    "queues.faststream": PUBLIC | {"_model", "queues._nats", "queues._rabbitmq", "queues._shared", "queues.keys"},
    "queues.taskiq": PUBLIC | {"_concurrency", "health", "queues._shared", "queues.keys"},
    "queues.rq": PUBLIC | {"_model", "queues._shared", "queues.keys"},
    "queues.temporal": PUBLIC | {"_model", "queues._shared", "queues.keys"},
    "schedulers": PUBLIC | {"_schedule", "queues.keys"},
    # The words that a policy's fields take stand once, in `_model.policy`.
    "config": PUBLIC | {"_entry_points", "_model", "queues.keys"},
    # Brokers are examined in the words of the doctor.
    "lint": PUBLIC | {"config", "health", "stores"},
    # Which headers the dead letters of each broker have is known to their adapters.
    "redrive": PUBLIC | {"_model", "maintenance", "queues._shared", "queues.keys"},
    "redrive.brokers": PUBLIC
    | {"queues._kafka", "queues._nats", "queues._rabbitmq", "queues._redis_streams", "queues._shared", "queues._sqs"}
    | {"queues.keys", "redrive"},
    "maintenance": PUBLIC | {"stores", "stores.hand_made"},
    "health": PUBLIC | {"_concurrency", "stores"},
    # Which URLs need an event loop is known to the kinds of stores.
    "metrics": PUBLIC | {"stores"},
    "trace": PUBLIC | {"health", "metrics"},
    # Numbers and sums: it opens nothing.
    "sizing": set(),
    # Schemas of ours, written by the tools of others.
    "alembic": {"stores", "stores.sqlalchemy"},
    "django*": {"stores", "stores.django"},
    "demo": PUBLIC | {"cli._common", "stores", "stores.sqlite"},
    "report": PUBLIC | {"_concurrency", "cli._common", "cli._common.record_text", "maintenance", "metrics", "stores"},
    "cli": PUBLIC | {"cli._common", "cli.commands", "demo", "report", "stores"},
    "cli._common": PUBLIC | {"config", "maintenance", "stores"},
    # What a bypass that died has left, and which records keep intents, only those who write them know.
    "cli._common.record_text": PUBLIC | {"_delivery", "http._shared", "cli._common"},
    "cli.commands": PUBLIC
    | {"cli._common", "config", "health", "lint", "maintenance", "redrive", "redrive.brokers", "sizing", "stores"}
    | {"testing.simulate", "trace"},
    "testing": PUBLIC | {"stores", "testing.promises"},
    "testing.promises": PUBLIC | {"_model"},
    # It runs the production flows, and so it has to reach them.
    "testing.simulate": PUBLIC
    | CORE
    | {"_delivery.handler_steps", "_delivery.waiting", "_guard", "stores", "stores.sql"},
}

PURE = {
    "_delivery",
    "_delivery.handler_steps",
    "_delivery.waiting",
    "_fingerprint",
    "http._shared",
    "http._requests",
    "http._answers",
}
# The drivers perform what the flows only ask for.
PERFORMING = {"_delivery.drive", "_delivery.waiting", "_delivery.handler_steps.log_writes"}
# It has to know the types of moments, and asks for none.
KNOWS_MOMENTS = {"_fingerprint.canonical"}
IMPURE = {"time", "random", "asyncio", "threading", "socket", "os", "secrets", "datetime"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in ROOT.rglob("*.py")
}


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """Every import as (module, name), those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            yield from ((node.module or "", alias.name) for alias in node.names)


def target_of(module: str, name: str) -> str:
    """Return which module of ours is imported, below `onefold`."""
    module = module.partition(".")[2]
    inside = f"{module}.{name}".strip(".")
    return inside if inside in MODULES else module


def rooms(module: str) -> Iterator[str]:
    """Return the names of a module's rooms, the narrowest first."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


def room_of(module: str) -> str:
    for name in rooms(module):
        if name in MAY_IMPORT:
            return name
        if f"{name}*" in MAY_IMPORT:
            return f"{name}*"
    raise AssertionError(f"no room is named for {module}: name it in MAY_IMPORT")


def may(module: str, target: str) -> bool:
    """Return whether a module may import the other: its room names the other's, or the package directly around it."""
    room, other = room_of(module), room_of(target).removesuffix("*")
    allowed = MAY_IMPORT[room] | {room.removesuffix("*")}
    if other in allowed:
        return True
    is_package = MODULES[other].name == "__init__.py"
    parent = other.rpartition(".")[0]
    return not is_package and parent != "" and parent in allowed


def is_pure(module: str) -> bool:
    return module not in PERFORMING | KNOWS_MOMENTS and not PURE.isdisjoint((module, module.rpartition(".")[0]))


def breaches(module: str, source: str) -> list[str]:
    found = []
    for imported, name in imports_of(source):
        top = imported.partition(".")[0]
        if top in IMPURE and is_pure(module):
            found.append(f"{module} imports {imported}, and has to stay pure")
        if top == "onefold" and not may(module, target := target_of(imported, name)):
            found.append(f"{module} imports {target or 'onefold'}")
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_room_imports_what_it_must_not_know(module: str) -> None:
    source = MODULES[module].read_text(encoding="utf-8")

    assert breaches(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stores.redis.records", "from onefold._delivery.decide import decide"),
        ("stores.redis.records", "import onefold.guard"),
        ("stores.redis.records", "from onefold.stores.postgres import PostgresStore"),
        ("stores.sql.store", "from onefold.stores.postgres.psycopg import pool"),
        ("_delivery.claim", "import time"),
        ("_delivery.decide", "def f():\n    from random import random"),
        ("_model", "from onefold._delivery import claim"),
        ("http.asgi", "from onefold._delivery.claim import deliver"),
        ("cli.app", "from onefold._guard import base"),
        ("alembic", "from onefold._delivery import decide"),
        ("django.operations", "from onefold.guard import Guard"),
        ("testing.swap", "from onefold._delivery import drive"),
        ("queues._shared.options", "from onefold._guard.base import GuardBase"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert len(breaches(module, source)) == 1


GUARDS = {"guard", "guard_async"} | {module for module in MODULES if module.startswith("_guard.")}

# What is private in a guard, and who reaches for it all the same. No import shows it.
REACHES_INTO_GUARDS = {
    # It puts another store into a guard and takes it out again: nothing that a user should do at work.
    "testing.swap": {"_put", "_swap"},
    # A guard of its own kind, whose record is one more item of a write that the caller sends.
    "stores.dynamodb.transactions": {"_asked", "_chosen", "_make_delivery", "_request"},
    # Its guard is its own class.
    "config.as_declared": {"_check"},
}


def private_names_of_guards(source: str) -> set[str]:
    """Return the private names that are read from something called a guard, by `getattr` too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value, name):
                pass
            case ast.Call(ast.Name("getattr" | "setattr" | "hasattr"), [value, ast.Constant(str(name)), *_]):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__") and "guard" in ast.unparse(value).lower():
            found.add(name)
    return found


@pytest.mark.parametrize("module", sorted(MODULES.keys() - GUARDS))
def test_nobody_reaches_into_a_guard(module: str) -> None:
    found = private_names_of_guards(MODULES[module].read_text(encoding="utf-8"))

    assert found <= REACHES_INTO_GUARDS.get(module, set())


@pytest.mark.parametrize(
    "source", ["guard._source", "getattr(self.guard, '_source', None)", "cast(Any, guard)._chosen"]
)
def test_a_reach_into_a_guard_is_found(source: str) -> None:
    assert len(private_names_of_guards(source)) == 1


def test_every_rule_is_about_a_room_that_is_there() -> None:
    named = {name.removesuffix("*") for name in MAY_IMPORT} | {name for names in MAY_IMPORT.values() for name in names}

    assert named - MODULES.keys() == set()


# A folder is a room, and a room has about a dozen modules.
MODULES_MAX = 15

# One module for each command: the folder grows with them, and nobody reads it as a whole.
GROWING = {"cli/commands"}


def test_no_folder_is_crowded() -> None:
    crowded = {
        str(folder.relative_to(ROOT)): number
        for folder in [ROOT, *ROOT.rglob("*")]
        if folder.is_dir() and (number := len(list(folder.glob("*.py")))) > MODULES_MAX
    }

    assert crowded.keys() <= GROWING


def test_no_module_repeats_the_name_of_its_folder() -> None:
    folders = {module: module.split(".")[-2].strip("_") for module in MODULES if "." in module}

    repeated = [module for module, folder in folders.items() if folder in module.rpartition(".")[2].split("_")]

    assert repeated == []
