"""`onefold.load`: the guards of a file. What is linted is what runs."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold import TX, AsyncGuard, Event, Guard, NotDone, Policy, UsageError
from onefold.codecs import MsgspecCodec
from onefold.config import Unusable
from onefold.queues.keys import Message
from tests.support import PATIENCE

# Every field of a policy, with another value than the usual one.
ALL_FIELDS = {
    "keep": "7d",
    "lease": "45s",
    "wait": "2s",
    "after_crash": "rerun",
    "rerun_within": "20h",
    "max_attempts": 3,
    "ambiguous_errors": ["httpx.TransportError", "builtins.TimeoutError"],
    "final_errors": ["builtins:PermissionError"],
    "store_down": "run",
    "max_result_bytes": 1000,
    "keep_result": False,
    "keep_error_text": True,
    "cancel_when_lost": True,
    "count_duplicates": True,
    "mode": "claim",
}


def ask_the_gateway(running: Any) -> Any:
    """A probe, for the file to name."""
    return NotDone()


NO_FUNCTION = 7


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "onefold.yaml"
    path.write_text(
        f"""\
stores:
  wallet: {{url: "sqlite:///{tmp_path}/wallet.db"}}
  notes: {{url: "memory:"}}
guards:
  credit: {{store: wallet, mode: transactional, money: true, keep: forever, operation: credit}}
  charge: {{store: wallet, keep: 7d, after_crash: hold, operations: [charge, refund], key: header:idempotency-key}}
  views: {{store: notes, mode: seen, keep: 1h, key: field:event.id}}
  probed: {{store: notes, after_crash: "{__name__}:ask_the_gateway", key: "argument:payment_id"}}
  scoped: {{store: notes, scope: shop-1, key: offset}}
  nowhere: {{store: notes, after_crash: "{__name__}:ask_nobody"}}
  number: {{store: notes, final_errors: ["{__name__}:NO_FUNCTION"]}}
  function: {{store: notes, final_errors: ["{__name__}:ask_the_gateway"]}}
"""
    )
    return path


def test_the_policy_of_the_guard_is_that_of_the_file(file: Path) -> None:
    with onefold.load(file) as guards:
        policies = {name: guards[name].policy for name in ("credit", "charge", "views", "probed")}

    assert policies == {
        "credit": Policy(keep="forever"),
        "charge": Policy(keep="7d", after_crash="hold"),
        "views": Policy(keep="1h", mode="seen"),
        "probed": Policy(after_crash=ask_the_gateway),
    }


def test_every_field_of_a_policy_may_be_declared(tmp_path: Path) -> None:
    assert set(ALL_FIELDS) == set(Policy.__slots__)
    path = tmp_path / "onefold.yaml"
    declared = {"stores": {"a": {"url": "memory:"}}, "guards": {"g": {"store": "a", **ALL_FIELDS}}}
    path.write_text(json.dumps(declared))

    policy = onefold.load(path)["g"].policy

    assert policy == Policy(**{**ALL_FIELDS, "final_errors": (PermissionError,)})  # type: ignore[arg-type]


def test_the_guards_are_known_by_name_and_made_once(file: Path) -> None:
    with onefold.load(str(file)) as guards:
        assert isinstance(guards["charge"], Guard)
        assert guards["charge"] is guards["charge"]
        assert list(guards)[:3] == ["credit", "charge", "views"]
        assert (len(guards), "charge" in guards, "chrage" in guards) == (8, True, False)
        assert "charge" in repr(guards["charge"])
        with pytest.raises(UsageError, match=r"onefold.yaml declares no guard 'chrage': did you mean 'charge'\?"):
            guards["chrage"]


def test_a_duplicate_is_replayed_and_guards_of_one_store_share_it(file: Path) -> None:
    with onefold.load(file) as guards:
        first = guards["charge"].run("charge", "pay_1", lambda: 4200)
        again = guards["charge"].run("charge", "pay_1", lambda: pytest.fail("it ran"))

        assert (first.value, again.value, again.replayed) == (4200, 4200, True)
        assert guards["charge"].store is guards["credit"].store
        assert guards["charge"].store is not guards["views"].store


def test_a_store_is_opened_on_first_use_only(file: Path, tmp_path: Path) -> None:
    with onefold.load(file) as guards:
        charge = guards["charge"]
        assert not (tmp_path / "wallet.db").exists()
        charge.run("charge", "pay_1", lambda: 1)
        assert (tmp_path / "wallet.db").exists()


def test_closing_closes_every_store_and_one_guard_alone_none(file: Path) -> None:
    guards = onefold.load(file)
    charge, credit = guards["charge"], guards["credit"]
    charge.run("charge", "pay_1", lambda: 1)

    charge.close()
    assert credit.read("credit", "pay_1") is None
    guards.close()
    guards.close()

    with pytest.raises(UsageError, match="closed"):
        credit.read("credit", "pay_1")
    with pytest.raises(UsageError, match=r"the guards of .*onefold.yaml are closed"):
        guards["views"]


def test_many_threads_get_one_guard_and_one_store(file: Path) -> None:
    ready = threading.Barrier(8)
    found: list[tuple[int, int]] = []
    with onefold.load(file) as guards:

        def ask() -> None:
            ready.wait(PATIENCE)
            guard = guards["charge"]
            found.append((id(guard), id(guard.store)))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

        assert len(found) == 8
        assert len(set(found)) == 1


def test_the_async_guards(file: Path) -> None:
    async def main() -> None:
        async with onefold.load_async(file) as guards:
            charge = guards["charge"]

            async def pay() -> int:
                return 4200

            outcomes = [await charge.run("charge", "pay_1", pay) for _ in range(2)]
            assert isinstance(charge, AsyncGuard)
            assert [(one.value, one.replayed) for one in outcomes] == [(4200, False), (4200, True)]
            assert charge.policy == Policy(keep="7d", after_crash="hold")
            with pytest.raises(UsageError, match="not for 'charg': did you mean 'charge'"):
                await charge.run("charg", "pay_1", pay)
            with pytest.raises(UsageError, match="mode: transactional"):
                await guards["credit"].run("credit", "pay_1", pay)
        with pytest.raises(UsageError, match="closed"):
            await charge.run("charge", "pay_2", pay)

    asyncio.run(main())


def test_where_the_file_says_transactional_nothing_is_run_with_a_crash_window(file: Path, tmp_path: Path) -> None:
    with onefold.load(file) as guards, closing(sqlite3.connect(tmp_path / "wallet.db")) as connection:
        credit = guards["credit"]

        @credit.transactional("credit", key="txn")
        def apply(txn: str, *, tx: sqlite3.Connection = TX) -> str:
            return str(tx.execute("SELECT 'applied'").fetchone()[0])

        assert apply("txn-1") == "applied"
        for way in (
            lambda: credit.run("credit", "txn-2", lambda: pytest.fail("it ran")),
            lambda: credit.idempotent("credit", key="id"),
            lambda: credit.run_batch("credit", ["txn-2"], key=str, handler=lambda _: pytest.fail("it ran")),
        ):
            with pytest.raises(UsageError, match=r"onefold.yaml:5:3: the guard 'credit' is declared as mode: trans"):
                way()
        with connection:
            connection.execute("BEGIN")
            assert credit.within(connection).run("credit", "txn-1", lambda: pytest.fail("it ran")).replayed
            assert credit.within(connection).fresh("credit", ["txn-3"], key=str).new == ["txn-3"]


def test_an_operation_that_the_file_does_not_name_is_refused(file: Path, tmp_path: Path) -> None:
    with onefold.load(file) as guards, closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        charge = guards["charge"]
        ways: list[Callable[[], object]] = [
            lambda: charge.run("charg", "pay_1", lambda: pytest.fail("it ran")),
            lambda: charge.idempotent("charg", key="id"),
            lambda: charge.transactional("charg", key="id"),
            lambda: charge.run_batch("charg", [], key=str, handler=str),
            lambda: charge.within(connection).run("charg", "pay_1", lambda: pytest.fail("it ran")),
            lambda: charge.within(connection).fresh("charg", [], key=str),
        ]
        for way in ways:
            with pytest.raises(UsageError, match=r"is for 'charge', 'refund', not for 'charg': did you mean"):
                way()
        with pytest.raises(UsageError, match="needs its arguments"):
            charge.idempotent(handle)  # type: ignore[arg-type, call-arg]
        assert charge.run("refund", "pay_1", lambda: 1).value == 1
        assert guards["views"].run("whatever it is called", "k", lambda: 1).value == 1


def test_a_scope_of_the_file_keeps_the_records_apart(file: Path) -> None:
    with onefold.load(file) as guards:
        guards["scoped"].run("view", "k", lambda: 1)

        assert guards["scoped"].read("view", "k", scope="shop-1") is not None
        assert guards["views"].read("view", "k") is None


def test_listeners_and_a_codec_are_those_of_every_guard(file: Path) -> None:
    told: list[Event] = []

    class Counting(MsgspecCodec):
        count = 0

        def encode(self, value: Any, returns: Any) -> bytes:
            Counting.count += 1
            return super().encode(value, returns)

    with onefold.load(file, on_event=told.append, codec=Counting()) as guards:
        guards["views"].run("view", "k", lambda: 1)
        guards["charge"].run("charge", "k", lambda: 1)

    assert {event.operation for event in told} == {"view", "charge"}
    assert Counting.count == 2


def test_the_declared_key_is_handed_out_for_an_adapter(file: Path) -> None:
    message = Message(b'{"event": {"id": "e-1"}}', {"idempotency-key": "pay_1"})
    with onefold.load(file) as guards:
        assert guards.key("charge")(message) == "pay_1"
        assert guards.key("views")(message) == "e-1"
        assert guards.key("probed") == "payment_id"
        with pytest.raises(
            UsageError, match=r"onefold.yaml:9:\d+: guards.scoped.key: the key is offset, which the lint"
        ):
            guards.key("scoped")
        with pytest.raises(UsageError, match=r"onefold.yaml:5:3: guards.credit.key: no key is declared"):
            guards.key("credit")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", r"onefold.yaml:10:\d+: guards.nowhere.after_crash: .* cannot be imported"),
        ("number", r"onefold.yaml:11:\d+: guards.number.final_errors: .*NO_FUNCTION' is not a function"),
        ("function", r"onefold.yaml:12:\d+: guards.function: final_errors= holds"),
    ],
)
def test_a_name_that_python_does_not_know_is_refused_when_the_guard_is_asked_for(
    file: Path, name: str, says: str
) -> None:
    with onefold.load(file) as guards, pytest.raises(Unusable, match=says):
        guards[name]


def test_loading_wants_every_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "onefold.toml"
    path.write_text('[stores.a]\nurl = "${ONEFOLD_TEST_URL}"\n[guards.g]\nstore = "a"\n')

    monkeypatch.delenv("ONEFOLD_TEST_URL", raising=False)
    with pytest.raises(UsageError, match=r"onefold.toml:2: stores.a.url: .* ONEFOLD_TEST_URL is not set"):
        onefold.load(path)
    monkeypatch.setenv("ONEFOLD_TEST_URL", "memory:")
    with onefold.load(path) as guards:
        assert guards["g"].run("a", "k", lambda: 1).value == 1


def test_importing_onefold_takes_neither_yaml_nor_the_configuration_along() -> None:
    code = "import sys, onefold; print([name for name in sys.modules if name == 'yaml' or 'retention' in name])"

    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    assert said.stdout == "[]\n"


# What would be refused for each message or request is refused once, when the adapter is made.


def handle(message: Any) -> None:
    """A handler without a transaction."""


@pytest.mark.parametrize(
    ("name", "operation", "says"),
    [("credit", "credit", "mode: transactional"), ("charge", "chrage", "did you mean 'charge'")],
)
def test_a_consumer_of_what_the_file_does_not_declare_is_refused_when_it_is_made(
    file: Path, name: str, operation: str, says: str
) -> None:
    from onefold.queues.keys import header
    from onefold.queues.pika import OWN_EXCHANGE, guarded

    with onefold.load(file) as guards, pytest.raises(UsageError, match=says):
        guarded(guards[name], operation, handle, key=header(), dead_letter=OWN_EXCHANGE)


@pytest.mark.parametrize("name", ["credit", "charge"])
def test_a_service_on_what_the_file_does_not_declare_is_refused_when_it_is_made(file: Path, name: str) -> None:
    from onefold.http.wsgi import IdempotencyMiddleware, single_tenant

    operation = "credit" if name == "credit" else "http"
    with onefold.load(file) as guards, pytest.raises(UsageError, match=r"onefold\.yaml"):
        IdempotencyMiddleware(handle, guard=guards[name], scope=single_tenant, operation=operation)  # type: ignore[arg-type]


MIGRATING = """\
stores:
  old: {{url: "sqlite:///{folder}/old.db"}}
  new: {{url: "sqlite:///{folder}/new.db"}}
guards:
  charge: {{store: new, migrate_from: {migrate_from}}}
"""


def test_a_guard_whose_records_move_reads_the_store_of_before(tmp_path: Path) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(MIGRATING.format(folder=tmp_path, migrate_from="old"))
    with Guard(f"sqlite:///{tmp_path}/old.db") as before:
        before.run("charge", "pay_1", lambda: "receipt 17")

    with onefold.load(path) as guards:
        outcome = guards["charge"].run("charge", "pay_1", lambda: "charged twice")

    assert (outcome.value, outcome.replayed) == ("receipt 17", True)


def test_an_async_guard_whose_records_move_reads_the_store_of_before(tmp_path: Path) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(MIGRATING.format(folder=tmp_path, migrate_from="old"))
    with Guard(f"sqlite:///{tmp_path}/old.db") as before:
        before.run("charge", "pay_1", lambda: "receipt 17")

    async def charge() -> str:
        return "charged twice"

    async def deliver() -> Any:
        async with onefold.load_async(path) as guards:
            return await guards["charge"].run("charge", "pay_1", charge)

    outcome = asyncio.run(deliver())
    assert (outcome.value, outcome.replayed) == ("receipt 17", True)


HAND_MADE = """\
stores:
  shop: {{url: "sqlite:///{folder}/shop.db"}}
  new: {{url: "sqlite:///{folder}/new.db"}}
guards:
  charge: {{store: new, {guard}, migrate_from: {{{table}}}}}
"""


def with_a_table(folder: Path, table: str, guard: str = "operation: charge") -> Path:
    path = folder / "onefold.yaml"
    path.write_text(HAND_MADE.format(folder=folder, guard=guard, table=table))
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.execute("CREATE TABLE processed (id TEXT PRIMARY KEY, op TEXT, tenant TEXT, answer TEXT, at TEXT)")
        connection.execute(
            "INSERT INTO processed VALUES ('pay_1', 'charge', 't1', 'receipt 17', '2026-01-01 12:00:00')"
        )
        connection.commit()
    return path


@pytest.mark.parametrize(
    ("table", "guard", "is_known"),
    [
        ("store: shop, table: processed, key: id, result_column: answer", "operation: charge", True),
        ("store: shop, table: processed, key: id, operation: refund", "operations: [charge, refund]", False),
        ("store: shop, table: processed, key: id, operation_column: op", "operations: [charge, refund]", True),
        ("store: shop, table: processed, key: id, at: at, keep: 1h", "operation: charge", False),
        ("store: shop, table: processed, key: id, at: at, scope_column: tenant", "operation: charge", False),
        ("store: shop, table: processed, key: id, scope_column: tenant", "operation: charge, scope: t1", True),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_guard_takes_a_hand_made_table_over(
    tmp_path: Path, table: str, guard: str, is_known: bool, is_async: bool
) -> None:
    path = with_a_table(tmp_path, table, guard)

    async def charge() -> Any:
        return "charged"

    async def deliver() -> Any:
        async with onefold.load_async(path) as guards:
            return await guards["charge"].run("charge", "pay_1", charge)

    if is_async:
        outcome = asyncio.run(deliver())
    else:
        with onefold.load(path) as guards:
            outcome = guards["charge"].run("charge", "pay_1", lambda: "charged")

    assert outcome.replayed == is_known
    assert ("result_column" in table) == (outcome.value_or(None) == "receipt 17")


def test_a_hand_made_table_is_in_the_guards_own_database_unless_it_says_otherwise(tmp_path: Path) -> None:
    path = with_a_table(tmp_path, "table: processed, key: id")
    path.write_text(path.read_text().replace("store: new", "store: shop"))

    with onefold.load(path) as guards:
        assert guards["charge"].run("charge", "pay_1", lambda: None).replayed


@pytest.mark.parametrize(
    ("table", "guard", "says"),
    [
        ("store: shop, table: processed", "operation: charge", "guards.charge.migrate_from: 'key' is missing"),
        ("store: shop, key: id", "operation: charge", "guards.charge.migrate_from: 'table' is missing"),
        ("store: shp, table: t, key: id", "operation: charge", "there is no store 'shp': did you mean 'shop'?"),
        ("table: t, key: id, result: x", "operation: charge", "'result' is not a field: did you mean 'result_column'?"),
        ("table: t, key: 7", "operation: charge", "guards.charge.migrate_from.key: expected text, not 7"),
        ("table: t, key: id, keep: soon", "operation: charge", "'soon' is not a duration"),
        ("table: t, key: id", "operations: [a, b]", "name the operation of its rows, or operation_column"),
        ("table: t, key: id", "money: false", "name the operation of its rows, or operation_column"),
        (
            "table: t, key: id, operation: chrage",
            "operation: charge",
            "guards.charge.migrate_from.operation: the guard is not for the operation 'chrage': did you mean 'charge'?",
        ),
        ("table: t, key: id, operation: charge, operation_column: x", "operation: charge", "not both"),
    ],
)
def test_a_hand_made_table_that_makes_no_sense_is_refused(tmp_path: Path, table: str, guard: str, says: str) -> None:
    path = with_a_table(tmp_path, table, guard)

    with pytest.raises(Unusable) as refused:
        onefold.load(path)

    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("new", "guards.charge.migrate_from: this is the store itself"),
        ("odl", "guards.charge.migrate_from: there is no store 'odl': did you mean 'old'?"),
        ("7", "guards.charge.migrate_from: expected text, not 7"),
    ],
)
def test_a_store_of_before_that_is_none_is_refused(tmp_path: Path, named: str, says: str) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(MIGRATING.format(folder=tmp_path, migrate_from=named))

    with pytest.raises(Unusable) as refused:
        onefold.load(path)

    assert f"onefold.yaml:5:24: {says}" in str(refused.value)
