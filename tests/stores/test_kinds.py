"""What a store says of itself: nothing else names kinds of stores, and one of somebody else's is treated alike."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import onefold
from onefold import Guard, UsageError
from onefold._entry_points import installed
from onefold.health.examine import clock, judge_of
from onefold.lint.store_identity import identity_of
from onefold.queues._shared.options import check_transactions
from onefold.stores import kinds
from onefold.stores.identity import Identity
from onefold.stores.kinds import StoreKind, blocking, clients, has_async_driver, kind_in, kind_of, schemes
from onefold.stores.memory import MemoryStore
from onefold.stores.table_reader import reading

ROOT = Path(onefold.__file__).parent

# A judge is the one of a kind, wherever it is.
OF_A_STORE = ("stores", "health")


class Toys(types.ModuleType):
    """A module of somebody else's."""

    KIND = StoreKind(
        name="Toys",
        has_transactions=False,
        expires_by_itself=True,
        has_our_clock=True,
        async_drivers=("fast",),
        health="toys",
        identity=lambda _url, parts, _options: Identity("toys", name=parts.path),
    )

    @staticmethod
    def judge(_facts: object) -> list[object]:
        return []


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toys", Toys("toys"))
    monkeypatch.setattr(kinds, "installed", lambda group: {**installed(group), "toy": "toys"})


PACKAGES = sorted({module for module in schemes().values() if hasattr(import_module(module), "__path__")})


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_of_a_store_describes_it_in_the_same_module(package: str) -> None:
    assert import_module(f"{package}.kind").KIND is kind_in(package, "")


@pytest.mark.parametrize("scheme", sorted(schemes()))
def test_every_store_says_what_it_is(scheme: str) -> None:
    kind = kind_of(f"{scheme}://x")

    assert kind.name
    assert kind.has_transactions is not None


@pytest.mark.parametrize("package", sorted(clients()))
def test_every_client_belongs_to_a_store(package: str) -> None:
    assert kind_in(clients()[package], package).name


def test_a_store_of_somebody_else_is_known_by_what_it_says(toys: None) -> None:
    facts = {"kind": "toy"}

    assert kind_of("toy+fast://shelf").expires_by_itself
    assert blocking("toy+fast://shelf") == "toy://shelf"
    assert [has_async_driver(f"toy{driver}://shelf") for driver in ("", "+fast", "+FAST", "+slow")] == [
        False,
        True,
        True,
        False,
    ]
    assert identity_of("toy://one/shelf").may_be(identity_of("toy://two/shelf"))
    assert judge_of(facts) is sys.modules["toys"]
    assert clock(facts).reason == "this machine's own"
    with pytest.raises(UsageError, match="toy has no transactions of its own"):
        check_transactions(Guard("toy://shelf"), lambda message, tx: None)
    with pytest.raises(UsageError, match="toy: has no tables to read"), reading("toy://shelf"):
        pass


def test_a_store_that_says_nothing_is_not_judged() -> None:
    kind = kind_of("nobody://knows")

    assert (kind.name, kind.has_transactions, kind.health) == ("nobody", None, "")


def test_a_store_whose_module_is_missing_goes_by_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "installed", lambda _group: {"toy": "toys.that.are_not_there"})

    assert kind_of("toy+fast://shelf").name == "toy"


def test_the_source_of_a_guard_is_what_was_passed() -> None:
    store = MemoryStore()

    assert Guard(store).source is store
    assert Guard("memory:").source == "memory:"


KNOWN = frozenset(schemes())

# The store of a guard, where no other is named.
EXAMPLES = {"memory:"}

# What each of them costs was measured, one by one.
MEASURED = ("sizing/costs.py", "cli/commands/size.py")

# Words in the names of other people's fields, such as `redis_message_id`.
FIELDS = ("lint/unstable_keys.py",)

# Brokers that share the name, and the scheme, of a store.
BROKERS = (
    "lint/brokers/__init__.py",
    "lint/brokers/redis.py",
    "queues/faststream/letters.py",
    "queues/faststream/messages.py",
    "redrive/brokers/__init__.py",
)


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in OF_A_STORE and not str(path).endswith((*MEASURED, *FIELDS, *BROKERS))
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_nothing_else_names_kinds_of_stores(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    literals = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    assert {word for word in literals if word.removesuffix(":") in KNOWN} <= EXAMPLES


def test_entry_points_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes longer than many deliveries: every package of the environment is looked into."""
    installed.cache_clear()
    read: list[str] = []
    entry_points = importlib.metadata.entry_points

    def watched(group: str) -> importlib.metadata.EntryPoints:
        read.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", watched)

    for _ in range(3):
        with Guard("memory:") as guard:
            guard.run("charge", "pay_1", lambda: None)

    assert read == ["onefold.stores"]
