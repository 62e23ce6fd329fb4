"""The JSON Schema for editors, and the commit hook: what they say is what the reader and the package say."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator

from onefold import Policy
from onefold.config import Unusable, read, schema
from onefold.config import fields as _fields
from onefold.config import shape as _shape
from tests.support import PROJECT, values_of

SHIPPED = PROJECT / "src" / "onefold" / "config" / "schema.json"

VALID: dict[str, Any] = {
    "store": "a",
    "money": True,
    "mode": "transactional",
    "key": "header:idempotency-key",
    "keep": "forever",
    "lease": 30,
    "after_crash": "shop.payments:ask",
    "rerun_within": "${WITHIN}",
    "duplicates": {"retry": "2m"},
    "replays": {"dead_letter": "1.5d"},
    "operations": ["charge"],
}


def document(**fields: Any) -> dict[str, Any]:
    return {"stores": {"a": {"url": "memory:"}}, "guards": {"g": {"store": "a", **fields}}}


def refused_by_the_reader(tmp_path: Path, found: dict[str, Any]) -> bool:
    path = tmp_path / "onefold.yaml"
    path.write_text(json.dumps(found))
    try:
        read(path, environment={"WITHIN": "3h"})
    except Unusable:
        return True
    return False


def test_the_shipped_schema_is_that_of_the_source() -> None:
    shipped = SHIPPED.read_text(encoding="utf-8")

    assert shipped == json.dumps(schema(), indent=2) + "\n", "run: onefold lint --schema > schema.json"
    Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("name", ["seeds", "corrected"])
def test_the_examples_are_valid(name: str) -> None:
    example = yaml.safe_load((PROJECT / "examples" / "retention" / f"{name}.yaml").read_text(encoding="utf-8"))

    Draft202012Validator(schema()).validate(example)


def test_what_is_valid_is_read(tmp_path: Path) -> None:
    valid = document(**{name: value for name, value in VALID.items() if name != "after_crash"})

    Draft202012Validator(schema()).validate(valid)
    Draft202012Validator(schema()).validate(document(**VALID))
    assert not refused_by_the_reader(tmp_path, valid)


@pytest.mark.parametrize(
    "fields",
    [
        {"kep": "7d"},
        {"keep": "7 days"},
        {"keep": -1},
        {"keep": None},
        {"keep": ["7d"]},
        {"money": "yes"},
        {"mode": "transaktional"},
        {"after_crash": "hodl"},
        {"max_attempts": 0},
        {"max_attempts": "5"},
        {"replays": "7d"},
        {"replays": {"dead_letter": True}},
        {"operations": "charge"},
        {"store": 7},
    ],
    ids=str,
)
def test_what_the_reader_refuses_the_schema_refuses_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert not Draft202012Validator(schema()).is_valid(document(**fields))
    assert refused_by_the_reader(tmp_path, document(**fields))


def test_the_schema_has_the_fields_of_the_reader_and_of_the_policy_with_its_defaults() -> None:
    shapes: dict[type[msgspec.Struct], Any] = {_shape.StoreEntry: _fields.STORE, _shape.GuardEntry: _fields.GUARD}
    for shape, meanings in shapes.items():
        assert {field.name for field in msgspec.structs.fields(shape)} == set(meanings)
    assert set(_fields.POLICY) == set(Policy.__slots__)

    stated = {
        field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(_shape.GuardEntry)
        if field.name in _fields.POLICY and field.default is not msgspec.UNSET
    }
    assert Policy(**stated) == Policy()


@pytest.mark.parametrize("field", ["after_crash", "mode", "store_down"])
def test_every_word_that_a_policy_takes_can_be_written_in_a_configuration(tmp_path: Path, field: str) -> None:
    for word in values_of(field):
        asked: dict[str, Any] = {field: word}
        assert getattr(Policy(**asked), field) == word
        Draft202012Validator(schema()).validate(document(**{field: word}))
        assert not refused_by_the_reader(tmp_path, document(**{field: word}))


def test_the_commit_hook_runs_the_lint_on_configurations_with_the_packages_that_it_needs() -> None:
    (hook,) = yaml.safe_load((PROJECT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    assert (hook["entry"], hook["language"]) == ("onefold lint", "python")
    assert set(hook["additional_dependencies"]) == {*extras["cli"], *extras["config"]}
    for name in ("onefold.yaml", "services/payouts/onefold.yml", "onefold.toml"):
        assert re.search(hook["files"], name)
    for name in ("onefold.yaml.j2", "myonefold.yaml", "pyproject.toml"):
        assert not re.search(hook["files"], name)
