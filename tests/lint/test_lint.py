"""The lint: each rule with its numbers and its fix, the examples taken literally, and the incident that it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onefold.config import read
from onefold.config.tree import Unusable
from onefold.config.wording import above, below, said, spelled
from onefold.lint import RULES, Finding, findings, floor
from tests.support import PROJECT

EXAMPLES = PROJECT / "examples" / "retention"

HEAD = """\
stores:
  database: {url: "postgresql://localhost/shop"}
  cache: {url: "redis://localhost:6379/0", evicts: true}
  redis: {url: "redis://localhost:6379/1"}
  lasting: {url: "redis://localhost:6379/2", evicts: false}
  memory: {url: "memory:"}
  dynamodb: {url: "dynamodb://eu-west-1/records"}
guards:
"""


def linted(tmp_path: Path, *guards: str) -> list[Finding]:
    """What the lint says to guards `first`, `second`, ..., each given as the fields of a YAML mapping."""
    names = ("first", "second", "third")
    path = tmp_path / "onefold.yaml"
    path.write_text(HEAD + "".join(f"  {name}: {{{fields}}}\n" for name, fields in zip(names, guards, strict=False)))
    return findings(read(path, environment={}, to_run=False))


def test_the_five_systems_taken_literally_break_the_rule_three_times() -> None:
    found = findings(read(EXAMPLES / "seeds.yaml"))

    assert [(one.code, one.guard, one.fix) for one in found] == [
        ("OF001", "orders", "Set keep: 48h"),
        ("OF001", "events", "Set keep: 14d"),
        ("OF001", "inventory", "Set keep: 12h"),
    ]
    assert [re.findall(r"keep is (\w+).* floor is (\w+)", one.says) for one in found] == [
        [("24h", "48h")],
        [("7d", "14d")],
        [("6h", "12h")],
    ]


def test_each_finding_points_at_the_line_that_has_to_change() -> None:
    lines = (EXAMPLES / "seeds.yaml").read_text(encoding="utf-8").splitlines()

    pointed = [lines[one.mark.line - 1].strip() for one in findings(read(EXAMPLES / "seeds.yaml"))]

    assert pointed == ["keep: 24h", "keep: 7d", "keep: 6h"]


def test_the_corrected_copy_passes_and_differs_in_the_three_floors_alone() -> None:
    before, after = (
        (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8").partition("stores:")[2].splitlines()
        for name in ("seeds", "corrected")
    )

    changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]

    assert findings(read(EXAMPLES / "corrected.yaml")) == []
    assert changed == [("keep: 24h", "keep: 48h"), ("keep: 7d", "keep: 14d"), ("keep: 6h", "keep: 12h")]


def test_the_dead_letter_incident_fails_the_lint(tmp_path: Path) -> None:
    (found,) = linted(tmp_path, "store: database, keep: 24h, replays: {dead_letter: 7d}")

    assert found.code == "OF001"
    assert "14d" in found.message
    assert "24h" in found.message
    assert "7d" in found.message
    assert "dead_letter" in found.message


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ("duplicates: {a: 2m, b: 30s}, replays: {c: 2m}", 300.0),
        ("duplicates: {a: 1m}, replays: {c: 2m, d: 1h}", 7200.0),
        ("replays: {c: forever}", float("inf")),
        ("duplicates: {}", 0.0),
    ],
)
def test_the_floor_is_twice_the_larger_of_the_sum_and_the_longest(tmp_path: Path, fields: str, least: float) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(f"{HEAD}  first: {{store: database, keep: forever, {fields}}}\n")

    assert floor(read(path).guards["first"]) == least


@pytest.mark.parametrize("keep", ["134m", "135m"])
def test_keep_at_the_floor_is_enough_and_a_minute_less_is_not(tmp_path: Path, keep: str) -> None:
    duplicates = "{producer_retry: 2m, broker_failover: 30s, redelivery: 5m, downstream_retry: 1h}"

    found = linted(tmp_path, f"store: database, keep: {keep}, duplicates: {duplicates}")

    assert [one.fix for one in found] == ([] if keep == "135m" else ["Set keep: 135m"])
    assert all("producer_retry + broker_failover + redelivery + downstream_retry" in one.says for one in found)


def test_the_fix_passes_where_the_sum_is_not_exact_in_binary(tmp_path: Path) -> None:
    assert linted(tmp_path, "store: database, keep: 600ms, lease: 500ms, duplicates: {a: 100ms, b: 200ms}") == []


def test_the_default_of_keep_is_judged_too(tmp_path: Path) -> None:
    (found,) = linted(tmp_path, "store: database, replays: {dead_letter: 7d}")

    assert found.fix == "Set keep: 14d"
    assert found.mark.line == HEAD.count("\n") + 1


@pytest.mark.parametrize(
    ("code", "wrong", "right", "says"),
    [
        ("OF001", "replays: {a: forever}", "keep: forever, replays: {a: forever}", "Set keep: forever"),
        ("OF002", "keep: 30s, lease: 30s", "keep: 31s, lease: 30s", "lease is 30s and keep is 30s"),
        ("OF002", "keep: 24h, lease: 90061s", "keep: 48h, lease: 90061s", "lease is 25h 1m 1s and keep is 24h"),
        ("OF003", "handler_time: 2m, visibility_timeout: 30s", "handler_time: 30s, visibility_timeout: 30s", "4m"),
        ("OF007", "key: offset", "key: header:offset", "offset"),
        ("OF007", "key: job_id", "key: message_id", "job_id"),
        ("OF007", "key: content_hash", "key: field:event.id", "content_hash"),
        ("OF007", "key: 'header:x-request-id'", "key: 'field:request_id'", "made for each try"),
        ("OF007", "key: 'argument:tool_call_id'", "key: 'argument:order_id'", "a retry has another and runs again"),
        ("OF006", "provider_memory: 24h", "provider_memory: 24h, rerun_within: 23h", "Set rerun_within: 23h"),
        ("OF006", "provider_memory: 24h, rerun_within: 24h", "provider_memory: 24h, after_crash: hold", "for 24h"),
        (
            "OF006",
            "provider_memory: 1h, rerun_within: 59m, handler_time: 2m",
            "provider_memory: 1h, rerun_within: 57m, handler_time: 2m",
            "plus 2m in the handler",
        ),
    ],
)
def test_a_guard_that_breaks_a_rule_is_found_and_the_fix_passes(
    tmp_path: Path, code: str, wrong: str, right: str, says: str
) -> None:
    (found,) = linted(tmp_path, f"store: database, {wrong}")

    assert found.code == code
    assert says in found.message
    assert linted(tmp_path, f"store: database, {right}") == []


@pytest.mark.parametrize(
    ("code", "wrong", "right"),
    [
        ("OF004", "store: cache, after_crash: hold", "store: lasting, after_crash: hold"),
        ("OF004", "store: redis, after_crash: hold", "store: database, after_crash: hold"),
        ("OF005", "store: database, mode: seen", "store: database, mode: transactional"),
        ("OF005", "store: database", "store: database, after_crash: hold"),
        ("OF005", "store: database, after_crash: skip", "store: database, after_crash: 'shop:ask_the_gateway'"),
        ("OF005", "store: database", "store: database, provider_memory: 24h, rerun_within: 20h"),
        ("OF009", "store: memory, after_crash: hold", "store: database, after_crash: hold"),
        ("OF011", "store: database, after_crash: hold, store_down: run", "store: database, after_crash: hold"),
    ],
)
def test_money_is_judged_more_strictly(tmp_path: Path, code: str, wrong: str, right: str) -> None:
    (found,) = linted(tmp_path, f"money: true, key: field:id, keep: forever, {wrong}")

    assert found.code == code
    assert linted(tmp_path, f"money: true, key: field:id, keep: forever, {right}") == []
    assert linted(tmp_path, f"money: false, {wrong}") == []


MONEY = "store: database, money: true, key: field:id, mode: transactional"


def test_money_that_nobody_has_thought_about_is_found(tmp_path: Path) -> None:
    (found,) = linted(tmp_path, MONEY)

    assert found.code == "OF012"
    assert "kept for 24h by default" in found.says
    assert found.fix == "Set keep: forever, or declare where duplicates come from"


@pytest.mark.parametrize(
    "thought",
    ["keep: forever", "keep: 24h", "duplicates: {redelivery: 5m}", "replays: {dead_letter: 12h}", "money: false"],
)
def test_money_that_somebody_has_thought_about_is_judged_by_its_numbers_alone(tmp_path: Path, thought: str) -> None:
    fields = MONEY.replace(", money: true", "") if thought.startswith("money") else MONEY

    assert linted(tmp_path, f"{fields}, {thought}") == []


def test_the_floor_is_told_of_money_too_and_only_the_floor(tmp_path: Path) -> None:
    assert [one.code for one in linted(tmp_path, f"{MONEY}, replays: {{dead_letter: 7d}}")] == ["OF001"]


@pytest.mark.parametrize("store", ["redis", "memory", "dynamodb"])
def test_transactional_needs_a_store_with_transactions(tmp_path: Path, store: str) -> None:
    (found,) = linted(tmp_path, f"store: {store}, mode: transactional")

    assert found.code == "OF010"
    assert linted(tmp_path, "store: database, mode: transactional") == []


def test_two_guards_that_share_an_operation_are_found(tmp_path: Path) -> None:
    (found,) = linted(tmp_path, "store: database, operation: charge", "store: database, operations: [refund, charge]")

    assert (found.code, found.guard) == ("OF008", "second")
    assert f"guards.first too (line {HEAD.count(chr(10)) + 1})" in found.says


@pytest.mark.parametrize(
    "other",
    [
        "store: redis, operation: charge",
        "store: database, operation: charge, scope: a-tenant",
        "store: database, operation: refund",
        "store: database",
    ],
)
def test_guards_with_records_apart_share_nothing(tmp_path: Path, other: str) -> None:
    assert linted(tmp_path, "store: database, operation: charge", other) == []


@pytest.mark.parametrize("url", ["sqlite:///x.db", "${DATABASE_URL}", "postgresql://app:${PASSWORD}@db/shop"])
def test_two_names_of_one_url_are_one_store(tmp_path: Path, url: str) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(
        f"stores: {{a: {{url: '{url}'}}, b: {{url: '{url}'}}}}\n"
        "guards: {one: {store: a, operation: charge}, two: {store: b, operation: charge}}\n"
    )

    assert [one.code for one in findings(read(path, environment={}, to_run=False))] == ["OF008"]


@pytest.mark.parametrize(
    ("url", "codes"), [("postgresql://db/shop", ["OF008"]), ("${DATABASE_URL}", []), ("memory:", [])]
)
def test_guards_of_two_files_share_an_operation_where_it_is_certainly_one_store(
    tmp_path: Path, url: str, codes: list[str]
) -> None:
    declared = []
    for name in ("orders", "payments"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"stores: {{a: {{url: '{url}'}}}}\nguards: {{{name}: {{store: a, operation: charge}}}}\n")
        declared.append(read(path, environment={}, to_run=False))

    found = findings(*declared)

    assert [(one.code, one.file) for one in found] == [(code, declared[1].file) for code in codes]
    assert all(f"guards.orders too ({declared[0].file}:2:10)" in one.says for one in found)


def test_a_guard_named_like_anothers_operation_shares_it(tmp_path: Path) -> None:
    (found,) = linted(tmp_path, "store: database", "store: database, operation: first")

    assert found.code == "OF008"


def test_codes_are_in_order_and_documented_with_their_titles() -> None:
    page = (PROJECT / "docs" / "retention.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| (OF\d{3}) \| ([^|]+) \|", page, flags=re.MULTILINE)

    assert [rule.code for rule in RULES] == sorted({rule.code for rule in RULES})
    assert documented == [(rule.code, rule.title) for rule in RULES]


@pytest.mark.parametrize(
    ("duration", "message"),
    [
        (172_800, "48h"),
        (1_209_600, "14d"),
        (86_400, "24h"),
        (43_200, "12h"),
        (259_200, "3d"),
        (5_400, "90m"),
        (61, "61s"),
        (0.25, "0.25s"),
        (2_592_000, "30d"),
        (12_345_678.9, "12345678.9s"),
        (float("inf"), "forever"),
    ],
)
def test_durations_are_said_as_people_write_them(duration: float, message: str) -> None:
    assert said(duration) == message


@pytest.mark.parametrize(
    ("duration", "message", "proposed"),
    [
        (173_700, "48h 15m", "49h"),
        (172_800, "48h", "48h"),
        (604_800, "7d", "7d"),
        (612_000, "7d 2h", "8d"),
        (8_100, "2h 15m", "135m"),
        (61, "61s", "61s"),
        (7_261, "2h 1m 1s", "122m"),
        (90_061.5, "25h 1m 1.5s", "26h"),
        (12_345_678.9, "142d 21h 21m 18.9s", "143d"),
        (0.6, "0.6s", "0.6s"),
        (2 * (0.1 + 0.2) * 1_000, "10m", "10m"),
        (float("inf"), "forever", "forever"),
    ],
)
def test_a_long_duration_is_spelled_and_a_round_one_that_covers_it_is_proposed(
    duration: float, message: str, proposed: str
) -> None:
    assert spelled(duration) == message
    assert said(above(duration)) == proposed


def test_a_proposed_keep_can_be_read_and_passes(tmp_path: Path) -> None:
    (found,) = linted(tmp_path, "store: database, duplicates: {a: 24h, b: 450s}")

    assert "the floor is 48h 15m: twice that" in found.says
    assert found.fix == "Set keep: 49h"
    assert linted(tmp_path, "store: database, keep: 49h, duplicates: {a: 24h, b: 450s}") == []


@pytest.mark.parametrize(
    ("name", "number", "least"),
    [
        ("delivery.timeout.ms", 120_000, 240.0),
        ("retention_ms", 604_800_000, 1_209_600.0),
        ("retentionMs", 604_800_000, 1_209_600.0),
        ("x-message-ttl", 60_000, 120.0),
        ("consumer_timeout", 1_800_000, 3_600.0),
        ("retention_minutes", 10, 1_200.0),
        ("log.retention.hours", 168, 1_209_600.0),
        ("dead_letter_days", 7, 1_209_600.0),
        ("timeout", 60, 120.0),
        ("terms", 60, 120.0),
        ("retry_min", 60, 120.0),
        ("holidays", 60, 120.0),
    ],
)
def test_a_plain_number_has_the_unit_that_its_name_ends_with(
    tmp_path: Path, name: str, number: int, least: float
) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(f"{HEAD}  first: {{store: database, keep: forever, replays: {{{name}: {number}}}}}\n")

    assert floor(read(path).guards["first"]) == least


def test_a_unit_that_is_written_counts_more_than_the_name(tmp_path: Path) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(f"{HEAD}  first: {{store: database, keep: forever, replays: {{retention_ms: 7d}}}}\n")

    assert floor(read(path).guards["first"]) == 1_209_600


def test_a_duration_in_milliseconds_is_no_field_of_a_guard(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"onefold\.yaml:9:\d+: guards.first: 'keep_ms' is not a field: did you mean"):
        linted(tmp_path, "store: database, keep_ms: 86400000")


def test_money_names_its_key(tmp_path: Path) -> None:
    keyless = MONEY.replace(", key: field:id", "")

    (found,) = linted(tmp_path, f"{keyless}, keep: forever")

    assert (found.code, found.guard) == ("OF018", "first")
    assert linted(tmp_path, f"{MONEY}, keep: forever") == []
    assert linted(tmp_path, "store: database") == []


@pytest.mark.parametrize(
    ("fields", "codes"),
    [
        ("keep: 24h", ["OF019"]),
        ("keep: 24h, visibility_timeout: 60s", ["OF019"]),
        ("keep: 24h, duplicates: {redelivery: 5m}", []),
        ("replays: {dead_letter: 12h}", []),
        ("keep: forever", []),
    ],
)
def test_every_guard_documents_its_floor_if_the_lint_is_strict(tmp_path: Path, fields: str, codes: list[str]) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(f"{HEAD}  first: {{store: database, {fields}}}\n")

    assert [one.code for one in findings(read(path), strict=True)] == codes
    assert findings(read(path)) == []


@pytest.mark.parametrize(
    ("duration", "shorter"),
    [(86_400, "23h"), (86_395, "23h"), (604_800, "6d"), (3_600, "59m"), (60, "59s"), (1, "0.5s")],
)
def test_a_shorter_duration_is_a_round_one(duration: float, shorter: str) -> None:
    assert said(below(duration)) == shorter
