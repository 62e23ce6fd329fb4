"""Mistakes that the lint used to pass: each is found in all its spellings, and what only looks like one is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onefold import UsageError
from onefold.config import read
from onefold.config.tree import Unusable
from onefold.lint import RULES, findings
from onefold.lint.settings import read_settings
from onefold.lint.store_identity import identity_of, is_volatile
from tests.lint.test_lint import EXAMPLES, linted
from tests.support import PROJECT

MONEY = "money: true, key: field:id, keep: forever, after_crash: hold"


def codes(tmp_path: Path, *guards: str) -> list[str]:
    return [one.code for one in linted(tmp_path, *guards)]


def test_the_example_has_every_mistake_and_the_lint_finds_each_where_its_comment_says() -> None:
    text = (EXAMPLES / "mistakes.yaml").read_text(encoding="utf-8")
    announced = re.findall(r"^  (\w+): # (OF\d{3})", text, flags=re.MULTILINE)

    found = [(one.guard, one.code) for one in findings(read_settings(read(EXAMPLES / "mistakes.yaml")).configuration)]

    assert found == announced
    assert {code for _, code in announced} == {rule.code for rule in RULES if not rule.strict}


@pytest.mark.parametrize("path", sorted([*PROJECT.glob("examples/**/*.yaml"), *PROJECT.glob("examples/**/*.toml")]))
def test_no_new_rule_is_broken_by_the_other_examples(path: Path) -> None:
    if path.name == "mistakes.yaml":
        return
    settled = read_settings(read(path, environment={}, to_run=False))

    assert settled.problems == []
    assert {one.code for one in findings(settled.configuration)} <= {"OF001"}


@pytest.mark.parametrize(
    ("fields", "fixes"),
    [
        ("keep: 1h, visibility_timeout: 12h", ["Set keep: 24h"]),
        ("keep: 23h, visibility_timeout: 12h", ["Set keep: 24h"]),
        ("keep: 24h, visibility_timeout: 12h", []),
        ("keep: 1h, visibility_timeout: 30m", []),
        # The larger counts, and not the sum: the queue's own redelivery may be among the duplicates.
        ("keep: 1h, visibility_timeout: 30m, duplicates: {redelivery: 30m}", []),
        ("keep: 1h, visibility_timeout: 40m, duplicates: {redelivery: 30m}", ["Set keep: 80m"]),
        ("visibility_timeout: forever", ["Set keep: forever"]),
    ],
)
def test_a_record_outlives_the_redelivery_of_its_queue(tmp_path: Path, fields: str, fixes: list[str]) -> None:
    found = linted(tmp_path, f"store: database, {fields}")

    assert [one.fix for one in found] == fixes
    assert all((one.code, "visibility_timeout" in one.says) == ("OF001", True) for one in found)


@pytest.mark.parametrize(
    ("store", "expected"),
    [("cache", ["OF004"]), ("redis", ["OF004"]), ("memory", ["OF009"]), ("lasting", []), ("dynamodb", [])],
)
def test_the_store_of_before_is_judged_for_money(tmp_path: Path, store: str, expected: list[str]) -> None:
    found = linted(tmp_path, f"store: database, migrate_from: {store}, {MONEY}")

    assert [one.code for one in found] == expected
    assert codes(tmp_path, f"store: database, migrate_from: {store}") == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://h/0", "REDIS://h/0"),
        ("redis://h", "redis://H:6379/0"),
        ("redis://h/0", "rediss://user:secret@h:6379/"),
        ("redis://h/0", "valkey://h/0?socket_timeout=2"),
        ("redis://localhost/3", "redis://127.0.0.1/3"),
        ("postgres://h/shop", "postgresql+asyncpg://app:secret@h:5432/shop"),
        ("postgresql://h/shop", "postgresql://h/shop?pool_size=4&connect_timeout=3"),
        ("mysql://h/shop", "mariadb://H:3306/shop"),
        ("mysql+asyncmy://h/shop", "mysql+pymysql://h/shop"),
        ("sqlite:///shop.db", "SQLITE:///./shop.db?sync=normal"),
        ("sqlite:////var/shop.db", "sqlite:////var/x/../shop.db"),
        ("redis://[::1]/0", "redis://localhost/0"),
        ("dynamodb://records?region=eu-west-1", "DynamoDB://records?region=eu-west-1&timeout=2s"),
        # The number of a database, however it is written.
        ("redis://h/0", "redis://h?db=0"),
        ("redis://h/0", "redis://h/00"),
        ("redis://h/3", "redis://h/0?db=3"),
        ("redis://h", "redis://h?prefix=onefold%3A"),
        ("redis+unix:///run/redis.sock", "valkey+unix:///run/x/../redis.sock"),
        # Any of several servers leads there.
        ("redis+sentinel://a,b/main", "redis+sentinel://b:26379,a/main/0"),
        ("redis+sentinel://a,b/main", "redis+sentinel://b,c/main"),
        ("redis+cluster://a,b", "redis+cluster://b,a/0"),
        ("postgresql://a,b/shop", "postgresql://b,a/shop"),
        ("postgresql://a,b/shop", "postgresql://b/shop"),
        ("postgresql://a:5433,b/shop", "postgresql:///shop?host=b,a&port=5432,5433"),
        # libpq takes it from the query.
        ("postgresql://h/shop", "postgresql:///shop?host=h"),
        ("postgresql://h:5433/shop", "postgresql:///?host=h&port=5433&dbname=shop"),
        ("postgresql://h:5433/shop", "postgresql://:5433/shop?host=h"),
        ("postgresql://a:5433,b:5433/shop", "postgresql:///shop?host=a,b&port=5433"),
        ("postgresql://10.0.0.7/shop", "postgresql://primary/shop?hostaddr=10.0.0.7"),
        ("postgresql://app@h", "postgresql://app:secret@h/app"),
        ("postgresql://h/app", "postgresql://h?user=app"),
        ("postgresql://h/shop", "postgresql://h/shop?options=-cstatement_timeout%3D5s"),
        ("postgresql://h/shop", "postgresql://h/shop?options=-csearch_path%3Dpublic"),
        ("postgresql://h/shop", "postgresql://other-login:secret@h/shop?application_name=x"),
        # This machine, and how it is reached.
        ("postgresql://localhost/shop", "postgresql:///shop"),
        ("postgresql:///shop", "postgresql:///shop?host=/var/run/postgresql"),
        ("postgresql:///shop", "postgresql://%2Frun%2Fpostgresql/shop"),
        ("mysql://127.0.0.1/shop", "mysql://x/shop?unix_socket=/var/run/mysqld/mysqld.sock"),
        ("redis://127.0.0.1/0", "redis://[0:0:0:0:0:0:0:1]:06379/0"),
        ("postgresql://[2001:db8::1]/shop", "postgresql://[2001:DB8:0:0::1]:5432/shop"),
        ("redis://h./0", "redis://H/0"),
        ("mysql://h/shop", "MYSQL://h/shop/"),
        ("sqlite:///%61.db", "sqlite:///a.db"),
        ("sqlite:///x/../shop.db", "sqlite:////{here}/shop.db"),
        # The environment's region may be any.
        ("dynamodb://records", "dynamodb://records?region=eu-west-1"),
        ("dynamodb://", "dynamodb://onefold_records"),
        (
            "dynamodb://records?endpoint_url=http%3A%2F%2Fh:8000",
            "dynamodb://records?endpoint_url=HTTP%3A%2F%2FH:8000%2F",
        ),
        ("django://default", "DJANGO://default"),
    ],
)
def test_two_spellings_of_one_place_are_one_store(tmp_path: Path, one: str, other: str) -> None:
    path = tmp_path / "onefold.yaml"
    other = other.replace("{here}", str(Path.cwd()).lstrip("/"))
    path.write_text(
        f"stores: {{a: {{url: '{one}'}}, b: {{url: '{other}'}}}}\n"
        "guards: {one: {store: a, operation: charge}, two: {store: b, operation: charge}}\n"
    )

    assert [found.code for found in findings(read(path, environment={}, to_run=False))] == ["OF008"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://h/0", "redis://h/1"),
        ("redis://h/0", "redis://h:6380/0"),
        ("redis://h/0", "redis://other/0"),
        ("redis://h/0?prefix=a", "redis://h/0?prefix=b"),
        ("redis+sentinel://h/first", "redis+sentinel://h/second"),
        ("postgresql://h/shop", "postgresql://h/Shop"),
        ("postgresql://h/shop", "mysql://h/shop"),
        ("postgresql://h/shop", "postgresql://h/shop?options=-csearch_path%3Dother"),
        ("sqlite:///shop.db", "sqlite:////shop.db"),
        ("sqlite:///shop.db", "sqlite:///Shop.db"),
        ("dynamodb://records", "dynamodb://Records"),
        ("dynamodb://records?region=eu-west-1", "dynamodb://records?region=eu-west-2"),
        ("redis://h/1", "redis://h/10"),
        ("redis://h/0?db=1", "redis://h/0"),
        ("redis://h", "redis+cluster://h"),
        ("redis://h:26379/main", "redis+sentinel://h/main"),
        ("redis+sentinel://h/main", "redis+sentinel://h/main/1"),
        ("redis+sentinel://a,b/main", "redis+sentinel://c,d/main"),
        ("redis+sentinel://h:6379/main", "redis+sentinel://h/main"),
        ("redis+unix:///run/a.sock", "redis+unix:///run/b.sock"),
        ("postgresql://a,b/shop", "postgresql://c/shop"),
        ("postgresql://h/shop", "postgresql:///shop?host=other"),
        ("postgresql://h/shop", "postgresql:///shop?host=h&port=5433"),
        ("postgresql://a:5433,b:5434/shop", "postgresql:///shop?host=a,b&port=5434,5433"),
        ("postgresql://h/shop", "postgresql://h/shop?dbname=other"),
        ("postgresql://app@h", "postgresql://other@h"),
        ("postgresql:///shop?host=/srv/a", "postgresql:///shop?host=/srv/b"),
        ("postgresql:///shop", "postgresql:///shop?host=/srv/b"),
        ("mysql://h/shop?unix_socket=/srv/a.sock", "mysql://h/shop?unix_socket=/srv/b.sock"),
        ("mysql://h/shop", "mysql://h:3307/shop"),
        ("redis://[2001:db8::1]/0", "redis://[2001:db8::2]/0"),
        ("redis://10.0.0.1/0", "redis://127.0.0.1/0"),
        ("dynamodb://records?endpoint_url=http%3A%2F%2Fh:8000", "dynamodb://records"),
        ("django://default", "django://other"),
        ("toy://h/a", "toy://h/A"),
        ("http://[broken", "http://[broken/0"),
    ],
)
def test_two_places_are_two_stores(one: str, other: str) -> None:
    assert not identity_of(one).may_be(identity_of(other))
    assert not identity_of(other).may_be(identity_of(one))
    assert identity_of(one).may_be(identity_of(one))


@pytest.mark.parametrize(
    "name",
    [
        *("builtins:Exception", "builtins:BaseException", "builtins:OSError", "builtins:TimeoutError"),
        *("builtins:ConnectionResetError", "builtins:KeyboardInterrupt", "builtins:MemoryError"),
        *("asyncio:TimeoutError", "asyncio:CancelledError", "requests:Timeout", "httpx:ReadTimeout"),
        *("requests.exceptions:ConnectionError", "httpx:ConnectError", "stripe.error:APIConnectionError"),
        *("onefold:OutcomeUnknown", "onefold:StoreUnavailable", "urllib3.exceptions:TimeoutError"),
    ],
)
def test_money_does_not_remember_what_says_nothing_about_the_effect(tmp_path: Path, name: str) -> None:
    fields = f"store: database, {MONEY}, final_errors: ['{name}', 'shop:CardDeclined']"

    (found,) = linted(tmp_path, fields)

    assert found.code == "OF013"
    assert name in found.says
    assert codes(tmp_path, fields.replace("money: true, ", "")) == []


@pytest.mark.parametrize(
    "name", ["shop:CardDeclined", "builtins:ValueError", "builtins:KeyError", "stripe:CardError", "builtins:no_such"]
)
def test_money_may_remember_a_final_answer(tmp_path: Path, name: str) -> None:
    assert codes(tmp_path, f"store: database, {MONEY}, final_errors: ['{name}']") == []


@pytest.mark.parametrize("after_crash", ["hold", "'shop:ask'"])
@pytest.mark.parametrize(
    ("listed", "missing"),
    [
        ("", "TimeoutError and builtins.ConnectionError"),
        ("httpx.TransportError", "TimeoutError and builtins.ConnectionError"),
        ("asynchronous.TimeoutError, builtins.ConnectionError", "TimeoutError"),
        ("builtins.TimeoutError", "ConnectionError"),
        ("builtins.ConnectionResetError, builtins.TimeoutError", "ConnectionError"),
    ],
)
def test_money_does_not_take_a_timeout_for_a_no(tmp_path: Path, after_crash: str, listed: str, missing: str) -> None:
    money = "money: true, key: field:id, keep: forever"
    fields = f"store: database, {money}, after_crash: {after_crash}, ambiguous_errors: [{listed}]"

    (found,) = linted(tmp_path, fields)

    assert (found.code, found.fix) == ("OF017", f"Leave ambiguous_errors out, or add builtins.{missing}")
    assert codes(tmp_path, fields.replace("money: true, ", "")) == []


def test_an_error_is_named_by_the_module_that_defines_it(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"asyncio\.TimeoutError.* is defined as builtins.TimeoutError"):
        linted(
            tmp_path, f"store: database, {MONEY}, ambiguous_errors: [asyncio.TimeoutError, builtins.ConnectionError]"
        )


@pytest.mark.parametrize(
    "fields",
    [
        MONEY,
        f"{MONEY}, ambiguous_errors: [builtins.TimeoutError, builtins.ConnectionError, shop.Doubt]",
        f"{MONEY}, ambiguous_errors: [builtins.OSError]",
        f"{MONEY}, ambiguous_errors: [builtins.Exception]",
        # Nothing is unknown there, or nothing is asked.
        "money: true, key: field:id, keep: forever, mode: transactional, ambiguous_errors: []",
        "money: true, key: field:id, keep: forever, provider_memory: forever, ambiguous_errors: []",
    ],
)
def test_money_may_name_what_is_unknown(tmp_path: Path, fields: str) -> None:
    assert codes(tmp_path, f"store: database, {fields}") == []


@pytest.mark.parametrize("name", ["TimeoutError", "builtins:TimeoutError", "builtins.", ".TimeoutError", "a b.C"])
def test_a_name_that_no_error_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="names no exception by its module: write"):
        linted(tmp_path, f"store: database, after_crash: hold, ambiguous_errors: ['{name}']")


@pytest.mark.parametrize(
    "probe", ["json:loads", "builtins:print", "os.path:exists", "onefold:done", "onefold.keys:mint"]
)
def test_a_function_that_is_not_yours_is_no_probe(tmp_path: Path, probe: str) -> None:
    assert codes(tmp_path, f"store: database, after_crash: '{probe}'") == ["OF014"]


@pytest.mark.parametrize("probe", ["shop:ask", "jsonrpc_gateway:loads", "stripe_tools.probes:charge", "onefolded:ask"])
def test_a_function_of_yours_may_be_a_probe(tmp_path: Path, probe: str) -> None:
    assert codes(tmp_path, f"store: database, after_crash: '{probe}'") == []


@pytest.mark.parametrize(("attempts", "expected"), [(1_000_000, ["OF015"]), (101, ["OF015"]), (100, []), (1, [])])
def test_attempts_have_an_end(tmp_path: Path, attempts: int, expected: list[str]) -> None:
    assert codes(tmp_path, f"store: database, max_attempts: {attempts}") == expected


@pytest.mark.parametrize(
    "key",
    [
        *(
            "argument:attempt",
            "argument:retry_count",
            "field:meta.attempt",
            "header:x-delivery-count",
            "header:x-death",
        ),
        *("field:deliveryCount", "header:X-Retry-Count", "argument:timestamp", "field:ts", "argument:delivery_tag"),
        *("field:attributes.ApproximateReceiveCount", "header:traceparent", "sqs_message_id", "receipt_handle"),
    ],
)
def test_a_key_that_changes_with_each_delivery_is_found(tmp_path: Path, key: str) -> None:
    assert codes(tmp_path, f"store: database, key: '{key}'") == ["OF007"]


@pytest.mark.parametrize(
    "key",
    [
        *("argument:payment_id", "field:order.id", "header:idempotency-key", "message_id", "field:delivery"),
        *("argument:attempt_id", "field:time_entry_id", "header:x-request-key", "field:nonce", "header:offset"),
    ],
)
def test_a_key_that_its_sender_keeps_is_not(tmp_path: Path, key: str) -> None:
    assert codes(tmp_path, f"store: database, key: '{key}'") == []


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("sqlite:///:memory:", True),
        ("SQLite:///:memory:?sync=normal", True),
        ("sqlite:///%3Amemory%3A", True),
        ("sqlite:///file::memory:?cache=shared", True),
        ("sqlite:///shop?mode=memory", True),
        ("sqlite://", True),
        ("sqlite:///memory.db", False),
        ("sqlite:////var/lib/onefold.db", False),
        ("memory:", False),
        ("redis://h/0", False),
    ],
)
def test_sqlite_in_memory_is_found_however_it_is_written(url: str, found: bool) -> None:
    assert is_volatile(url) is found


def test_a_store_that_cannot_be_opened_is_found_for_every_guard(tmp_path: Path) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(
        "stores: {a: {url: 'sqlite:///:memory:'}, b: {url: 'sqlite:///b.db'}}\n"
        "guards: {one: {store: a}, two: {store: b, migrate_from: a}, three: {store: b}}\n"
    )

    assert [(one.guard, one.code) for one in findings(read(path))] == [("one", "OF016"), ("two", "OF016")]


@pytest.mark.parametrize(
    ("fields", "offered"),
    [("after_crash: rerun", True), ("after_crash: skip", False), ("mode: seen", False)],
)
def test_a_key_for_the_provider_is_offered_where_it_would_help(tmp_path: Path, fields: str, offered: bool) -> None:
    (found,) = linted(tmp_path, f"store: database, money: true, key: field:id, keep: forever, {fields}")

    assert found.code == "OF005"
    assert ("declare provider_memory" in found.fix) is offered


@pytest.mark.parametrize("named", ["operation: charge", "operations: [refund, charge]"])
def test_a_shared_operation_is_pointed_at_where_it_is_named(tmp_path: Path, named: str) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(
        "stores:\n  a: {url: 'sqlite:///a.db'}\nguards:\n  one:\n    store: a\n    operation: charge\n"
        f"  two:\n    store: a\n    keep: 2d\n    {named}\n"
    )

    (found,) = findings(read(path))

    assert (found.code, found.guard, found.mark.line) == ("OF008", "two", 10)
