"""Reading a configuration: strict, with the place of every mistake, bounded, and without a secret in any message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onefold import UsageError
from onefold.config import Unusable, read
from onefold.config.configuration import FILE_MAX
from onefold.config.tree import VALUES_MAX, Mark
from onefold.config.yaml import plain

YAML = """\
stores:
  money: {url: "${DATABASE_URL}"}
guards:
  payouts:
    store: money
    money: true
    mode: transactional
    key: header:idempotency-key
    keep: forever
    lease: 30s
    handler_time: 5s
    visibility_timeout: 60s
    duplicates: {producer_retry: 2m, broker_failover: 30s, redelivery: 5m, downstream_retry: 1h}
    replays: {dead_letter: 7d}
"""

TOML = """\
[stores.money]
url = "${DATABASE_URL}"

[guards.payouts]
store = "money"
money = true
mode = "transactional"
key = "header:idempotency-key"
keep = "forever"
lease = "30s"
handler_time = "5s"
visibility_timeout = "60s"
duplicates = {producer_retry = "2m", broker_failover = "30s", redelivery = "5m", downstream_retry = "1h"}
replays.dead_letter = "7d"
"""

ENVIRONMENT = {"DATABASE_URL": "postgresql://app:hush@localhost/shop", "SECRET": "hush"}


def written(tmp_path: Path, text: str, name: str = "onefold.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(tmp_path: Path, text: str, name: str = "onefold.yaml") -> list[str]:
    """What is wrong with this file: each problem as its line, a bar, and its words."""
    with pytest.raises(Unusable) as caught:
        read(written(tmp_path, text, name), environment=ENVIRONMENT)
    assert "hush" not in str(caught.value)
    assert all("hush" not in one.says and "\n" not in str(one) for one in caught.value.problems)
    return [f"{one.mark.line if one.mark else '-'}| {one.says}" for one in caught.value.problems]


def guard(fields: str) -> str:
    return f"stores:\n  a: {{url: 'memory:'}}\nguards:\n  g:\n    store: a\n    {fields}\n"


def test_yaml_and_toml_declare_the_same(tmp_path: Path) -> None:
    from_yaml = read(written(tmp_path, YAML), environment=ENVIRONMENT)
    from_toml = read(written(tmp_path, TOML, "onefold.toml"), environment=ENVIRONMENT)

    payouts = from_yaml.guards["payouts"]
    assert from_yaml.guards == from_toml.guards
    assert from_yaml.stores == from_toml.stores
    assert payouts.store.url == ENVIRONMENT["DATABASE_URL"]
    assert (payouts.store.kind, payouts.mode, payouts.money) == ("postgresql", "transactional", True)
    assert sum(payouts.duplicates.values()) == 4050.0
    assert (payouts.handler_time, payouts.visibility_timeout, payouts.replays) == (5.0, 60.0, {"dead_letter": 604800.0})


def test_yaml_knows_line_and_column_and_toml_the_line(tmp_path: Path) -> None:
    from_yaml = read(written(tmp_path, YAML), environment=ENVIRONMENT)
    from_toml = read(written(tmp_path, TOML, "onefold.toml"), environment=ENVIRONMENT)

    for field in ("keep", "replays", "duplicates"):
        lines = [one.mark("guards", "payouts", field).line for one in (from_yaml, from_toml)]
        texts = [text.splitlines()[line - 1] for text, line in zip((YAML, TOML), lines, strict=True)]
        assert [text.strip().startswith(field) for text in texts] == [True, True]
    assert from_yaml.mark("guards", "payouts", "keep") == Mark(9, 5)
    assert from_toml.mark("guards", "payouts", "keep") == Mark(9)
    assert from_yaml.mark("guards", "payouts", "wait") == Mark(4, 3)


def test_toml_is_found_in_tables_of_every_form(tmp_path: Path) -> None:
    text = (
        'guards."the first".store = "a"  # a comment [not a table]\n'
        "[stores]\n"
        'a = { url = """\nmemory:""", evicts = false }\n'
        '[guards . "the second"]\n'
        "operations = [\n"
        '  "charge",\n'
        "  '[refund]',\n"
        "]\n"
        'store = "a"\n'
    )

    found = read(written(tmp_path, text, "onefold.toml"))

    assert found.mark("guards", "the first", "store").line == 1
    assert found.mark("stores", "a", "evicts").line == 3
    assert found.mark("guards", "the second").line == 5
    assert found.mark("guards", "the second", "operations").line == 6
    assert found.mark("guards", "the second", "store").line == 10
    assert found.guards["the second"].operations == ("charge", "[refund]")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("kep: 7d", "6| guards.g: 'kep' is not a field: did you mean 'keep'?"),
        ("keep: 7 days", "6| guards.g.keep: '7 days' is not a duration"),
        ("keep: [7d]", "6| guards.g.keep: a list is not a duration"),
        ("keep: true", "6| guards.g.keep: true is not a duration"),
        ("keep: -7d", "6| guards.g.keep: '-7d' is not a duration"),
        ("keep: 0s", "6| guards.g: keep=0.0 has to be more than zero"),
        ("keep:", "6| guards.g.keep: nothing is not a duration"),
        ("keep: ${SECRET}", "6| guards.g.keep: '${SECRET}' is not a duration"),
        ("lease: forever", "6| guards.g: lease="),
        ("money: yes", "6| guards.g.money: expected true or false, not 'yes'"),
        ("mode: transaktional", "did you mean 'transactional'?"),
        ("mode: ${SECRET}", "6| guards.g.mode: '${SECRET}' is not one of"),
        ("after_crash: hodl", "did you mean 'hold'?"),
        ("store_down: 7", "6| guards.g.store_down: 7 is not one of refuse, run"),
        ("max_attempts: 0", "6| guards.g: max_attempts=0"),
        ("max_attempts: '5'", "6| guards.g.max_attempts: expected a whole number, not '5'"),
        ("key: heder:x", "did you mean 'header'?"),
        ("key: 'header:'", "6| guards.g.key: 'header:' names nothing"),
        ("replays: 7d", "6| guards.g.replays: expected names with durations, such as {dead_letter: 7d}, not '7d'"),
        ("replays: {dead_letter: x}", "6| guards.g.replays: 'x' is not a duration"),
        ("operations: []", "6| guards.g.operations: the list is empty"),
        ("operations: charge", "6| guards.g.operations: expected a list, not 'charge'"),
        (f"operation: {'x' * 129}", "has 129 bytes of UTF-8, and the limit is 128"),
        (r'operation: "a\0b"', r"6| guards.g.operation: 'a\x00b' holds a NUL character"),
        (r'operations: ["a\0b"]', r"6| guards.g.operations: 'a\x00b' holds a NUL character"),
        (r'scope: "a\0b"', r"6| guards.g.scope: 'a\x00b' holds a NUL character"),
        (f"scope: {'x' * 256}", "has 256 bytes of UTF-8, and the limit is 255"),
        ("{operation: a, operations: [b]}", "broken YAML"),
        ("final_errors: [ValueError]", "6| guards.g.final_errors: 'ValueError' names nothing in Python"),
        ("scope: '${'", "6| guards.g.scope: '${' begins a variable"),
        ("scope: ${NOT_THERE}", "6| guards.g.scope: the environment variable NOT_THERE is not set"),
        ("store: b", "6| 'store' appears twice, first in line 5"),
    ],
)
def test_a_wrong_field_gets_one_line_with_its_place(tmp_path: Path, fields: str, says: str) -> None:
    (said,) = problems(tmp_path, guard(fields))

    assert says in said


def test_a_key_that_comes_twice_hides_no_other_problem(tmp_path: Path) -> None:
    text = """
stores:
  a: {url: "memory:", url: "redi://x"}
guards:
  one: &one {store: a, keep: 24h, keep: 7d}
  two: *one
  three: {<<: *one, store: mony}
  two: {store: a}
"""

    said = problems(tmp_path, text)

    assert said == [
        "3| 'url' appears twice, first in line 3",
        "5| 'keep' appears twice, first in line 5",
        "7| guards.three.store: there is no store 'mony'. Known: a",
        "8| 'two' appears twice, first in line 6",
    ]


def test_keys_that_come_twice_are_bounded_however_often_an_alias_repeats_them(tmp_path: Path) -> None:
    again = "a: 1, " * 1_000
    text = f"x: &x {{{again}}}\ny: [{'*x, ' * 1_000}]\n"

    (said,) = problems(tmp_path, text)

    assert "more than 50,000 values" in said


def test_what_does_not_go_together_is_said_at_the_guard(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, guard("after_crash: hold\n    rerun_within: 3h"))

    assert said.startswith("4| guards.g: rerun_within= limits")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "1| the file is empty"),
        ("# nothing\n", "1| the file is empty"),
        ("- a\n", "1| expected a table of fields (stores, guards…), not a list"),
        ("stores: {}\n", "1| 'guards' is missing"),
        ("stores: {}\nguard: {}\nguards: {}\n", "2| 'guard' is not a field: did you mean 'guards'?"),
        ("stores: 7\nguards: {}\n", "1| stores: expected a table of names, not 7"),
        ("stores:\n  a:\nguards: {}\n", "2| stores.a: expected a table of fields (url, evicts…), not nothing"),
        ("stores:\n  a: {evicts: true}\nguards: {}\n", "2| stores.a: 'url' is missing"),
        ("stores: {a: {url: 'memory:'}}\nguards: {g: {keep: 7d}}\n", "2| guards.g: 'store' is missing"),
        ("stores: {a: {url: 'memory:'}}\nguards: {g: {store: b}}\n", "2| guards.g.store: there is no store 'b'"),
        ("stores: {money: {url: 'memory:'}}\nguards: {g: {store: mony}}\n", "did you mean 'money'?"),
        ("stores: {a: {url: 'redi://x'}}\nguards: {}\n", "1| stores.a.url: no store is known for 'redi': did you mean"),
        ("stores: {a: {url: '${SECRET}://x'}}\nguards: {}\n", "no store is known for the variable's value"),
        ("stores: {a: {url: 'onefold.db'}}\nguards: {}\n", "1| stores.a.url: this is not a URL of a store"),
        ("stores: {a: {url: '${NOT_THERE}'}}\nguards: {}\n", "the environment variable NOT_THERE is not set"),
        ("stores: {}\nguards: {}\nstores: {}\n", "3| 'stores' appears twice, first in line 1"),
        ("stores: [\nguards: {}\n", "(begun in line 1)"),
        ("stores:\n\tguards: {}\n", "2| broken YAML"),
        ("a: *nothing\n", "1| broken YAML: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "2| broken YAML: expected a single document"),
        ("stores: !!python/object/apply:os.system [ls]\n", "1| the tag"),
        ("? [a]\n: b\n", "1| a key has to be a word"),
        ("a: \x00\n", "1| broken YAML: it must not contain the character U+0000"),
    ],
)
def test_a_wrong_file_gets_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (said,) = problems(tmp_path, text)

    assert says in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "1| the file is empty"),
        ("a = \n", "1| broken TOML: Invalid value"),
        ("[stores]\n[stores]\n", "2| broken TOML"),
        ("stores = 7\nguards = {}\n", "1| stores: expected a table of names, not 7"),
        ("stores = {}\nguards = {}\nguard = 1\n", "3| 'guard' is not a field: did you mean 'guards'?"),
        (f"a = '{'x' * 3000}'", "1| a line has at most 2,000 characters"),
        (f"a = {'[' * 900}\n{'[' * 900}\n", "1| nested more than 20 deep"),
        (f"a = 1 # [{{\nb = [{'{a = [' * 20}\n", "2| nested more than 20 deep"),
        ("[stores.a]\nurl = 1979-05-27\n[guards]\n", "2| stores.a.url: expected text, not datetime.date"),
    ],
)
def test_a_wrong_toml_gets_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (said,) = problems(tmp_path, text, "onefold.toml")

    assert says in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("onefold.toml", f"a = 1\nb = {'[' * 900}\n{'[' * 900}\n"),
        ("onefold.toml", f"a = 1\nb = {'[' * 25}{']' * 25}\n"),
        ("onefold.yaml", f"a: 1\nb: {'[' * 1_800}\n"),
        ("onefold.yaml", f"a: 1\nb: {'[' * 25}{']' * 25}\n"),
    ],
)
def test_the_depth_is_bounded_by_us_and_not_by_the_interpreter(tmp_path: Path, name: str, text: str) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # as some libraries do when they are imported
    try:
        (said,) = problems(tmp_path, text, name)
    finally:
        sys.setrecursionlimit(limit)

    assert said.startswith("2| nested more than 20 deep")


def test_brackets_in_the_strings_and_comments_of_a_toml_nest_nothing(tmp_path: Path) -> None:
    many = "[{" * 30
    strings = [f"'{many}'", f"'''\n{many}'\n'''", f'"\\"{many}"', f'"""\n{many}\\""""""']

    said = problems(tmp_path, f"a = [{', '.join(strings)}] # {many}\n", "onefold.toml")

    assert said == problems(tmp_path, "a = 1\n", "onefold.toml")


def test_every_mistake_is_said_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    said = problems(tmp_path, guard("kep: 7d\n    lease: x\n    mony: true"))

    assert [one.partition("|")[0] for one in said] == ["6", "7", "8"]
    with pytest.raises(UsageError, match=r"onefold.yaml:6:5: .*and 2 more: see `onefold lint`"):
        read(tmp_path / "onefold.yaml")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="nested"),
        pytest.param("a: &a {b: *a}\n", id="an alias of itself"),
        pytest.param("a: &a {<<: *a}\n", id="merged with itself"),
        pytest.param(
            "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 12)), id="bomb"
        ),
        pytest.param(
            "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1},' * 9}]}}\n" for n in range(1, 12)),
            id="merging bomb",
        ),
    ],
)
def test_a_file_made_to_exhaust_the_reader_is_refused(tmp_path: Path, text: str) -> None:
    (said,) = problems(tmp_path, text)

    assert "nested more than 20 deep" in said or f"more than {VALUES_MAX:,} values" in said


def test_dotted_keys_of_any_depth_are_refused(tmp_path: Path) -> None:
    assert "'a' is not a field" in problems(tmp_path, f"{'a.' * 900}b = 1\n", "onefold.toml")[0]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"stores:\n  \xff\xfe\x00")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (FILE_MAX + 1))
    said = {
        "missing.yaml": "missing.yaml: there is no such file",
        "folder.yaml": "folder.yaml: this is a folder",
        "binary.yaml": "binary.yaml:2: this is not text in UTF-8 (byte 0xff)",
        "huge.yaml": "huge.yaml: a configuration has at most 256 KiB",
        "onefold.json": "onefold.json: a configuration is a file with .yaml, .yml, .toml",
        "no\0name.yaml": "it cannot be read: embedded null byte",
    }

    for name, says in said.items():
        with pytest.raises(Unusable) as caught:
            read(f"{tmp_path}/{name}")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_without_its_variables_a_url_can_still_be_linted(tmp_path: Path) -> None:
    text = "stores:\n  a: {url: '${NOT_THERE}'}\n  b: {url: 'redis://:${PASSWORD}@h/0'}\nguards: {}\n"

    found = read(written(tmp_path, text), environment={}, to_run=False)

    assert found.unset == ("NOT_THERE", "PASSWORD")
    assert [(store.url, store.kind) for store in found.stores.values()] == [(None, ""), (None, "redis")]


def test_variables_are_filled_in_and_two_dollars_are_one(tmp_path: Path) -> None:
    text = guard("scope: 'a-${SECRET}-$${SECRET}-$5'\n    operations: ['${SECRET}', b]\n    replays: {x: '${DAYS}'}")

    found = read(written(tmp_path, text), environment={**ENVIRONMENT, "DAYS": "7d"}).guards["g"]

    assert (found.scope, found.operations) == ("a-hush-${SECRET}-$5", ("hush", "b"))
    assert found.replays == {"x": 604800.0}
    assert "hush" not in repr(found)


def test_anchors_and_merges_are_understood(tmp_path: Path) -> None:
    text = (
        "stores: {a: {url: 'memory:'}}\n"
        "guards:\n"
        "  one: &usual\n"
        "    store: a\n"
        "    keep: 7d\n"
        "    duplicates: &kafka {retry: 2m}\n"
        "  two: {keep: 3d, <<: *usual, duplicates: *kafka}\n"
    )

    found = read(written(tmp_path, text))

    one, two = found.guards.values()
    assert (two.store.name, two.policy.keep, two.duplicates) == ("a", 259200.0, one.duplicates)
    assert found.mark("guards", "two", "keep").line == 7


@pytest.mark.parametrize(
    ("word", "means"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("", None),
        ("17", 17),
        ("-3", -3),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("tRUE", "tRUE"),
        ("0x1f", "0x1f"),
        (".", "."),
    ],
)
def test_a_plain_word_means_what_it_says(word: str, means: object) -> None:
    found = plain(word)

    assert found == means
    assert type(found) is type(means)


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + guard("keep: 7d").replace("\n", "\r\n").encode())

    assert read(path).guards["g"].policy.keep == 604800.0


def test_without_pyyaml_the_extra_is_named_and_toml_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(UsageError, match=r"pip install 'onefold\[config\]'"):
        read(written(tmp_path, YAML), environment=ENVIRONMENT)
    assert read(written(tmp_path, TOML, "onefold.toml"), environment=ENVIRONMENT).guards
