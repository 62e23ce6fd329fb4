"""`onefold show --raw`: what is stored, byte by byte, on every store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from onefold import Guard, OutcomeUnknown, Policy
from onefold.cli._common.output import Format, Refusal
from onefold.cli.app import app
from onefold.cli.commands import records
from onefold.stores.memory import MemoryStore
from tests.record_format.stores import FOLDER, STORES, url_of

SCHEMA = json.loads((FOLDER / "raw.schema.json").read_text(encoding="utf-8"))


def fail() -> None:
    raise OutcomeUnknown("?")


@pytest.mark.parametrize("store", STORES)
def test_raw_shows_each_record_of_a_key_as_its_store_keeps_it(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = url_of(store, request, tmp_path)
    with Guard(url) as guard:
        guard.run("charge", "pay_7f3a", lambda: {"receipt": 17}, payload={"amount": 4200}, keep="forever")
        with pytest.raises(OutcomeUnknown):
            guard.run("mail", "pay_7f3a", fail, policy=Policy(after_crash="hold"))
        token = guard.read("charge", "pay_7f3a")
    assert token is not None

    said = CliRunner().invoke(app, ["show", "pay_7f3a", "--raw", "--format", "json", "--store", url])

    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(found)] == []
    assert [one["operation"] for one in found] == ["charge", "mail"]
    assert {one["store"] for one in found} == {store}
    assert [one["record"]["state"] for one in found] == ["done", "held"]
    assert found[0]["record"]["result"] == "0081a77265636569707411"
    assert found[0]["record"]["token"] == token.token.hex()


def test_raw_is_lines_for_people(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/records.db"
    with Guard(url) as guard:
        guard.run("charge", "küche", lambda: None)

    said = CliRunner().invoke(app, ["show", "küche", "--raw", "--store", url]).stdout

    assert 'stored.key\t"k\\u00fcche"\n' in said
    assert "address\t00000006636861726765" in said


def test_a_store_of_another_kind_says_that_it_cannot() -> None:
    with pytest.raises(Refusal, match="MemoryStore cannot show what it stores"):
        records._print_raw(MemoryStore(), iter([]), Format.JSON)
