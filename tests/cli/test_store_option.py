"""How a store is named: by its URL or by a name, in an option, in the environment or by the file of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from onefold import Guard
from onefold.cli.app import app
from tests.cli.test_records import refused

TWO = """
stores:
  money: {url: "sqlite:///money.db"}
  mail: {url: "${MAIL_URL}"}
guards: {}
"""
ONE = """
[stores.mail]
url = "sqlite:///mail.db"
[guards]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two stores, each with one record, whose key says where it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("money", "mail"):
        with Guard(f"sqlite:///{name}.db") as guard:
            guard.run("charge", f"in {name}", lambda: None)
    return tmp_path


def onefold(*arguments: str, **environment: str) -> Result:
    env: dict[str, str | None] = {"ONEFOLD_STORE": None, "MAIL_URL": None}
    return CliRunner(env=env | environment).invoke(app, list(arguments), catch_exceptions=False)


def key_in(said: Result) -> str:
    assert said.exit_code == 0, said.output
    (record,) = json.loads(said.stdout)
    return str(record["key"])


def listed(*arguments: str, **environment: str) -> str:
    return key_in(onefold("ls", "--format", "json", *arguments, **environment))


@pytest.mark.parametrize("file", ["onefold.yaml", "onefold.yml"])
def test_a_store_is_named_by_its_url_or_by_its_name_in_the_file_of_this_folder(folder: Path, file: str) -> None:
    (folder / file).write_text(TWO)

    assert listed("--store", "sqlite:///mail.db") == "in mail"
    assert listed("--store", "money") == "in money"
    assert listed("--store", "mail", MAIL_URL="sqlite:///mail.db") == "in mail"


def test_the_option_goes_before_the_environment_and_that_before_the_file(folder: Path) -> None:
    (folder / "onefold.toml").write_text(ONE)

    assert listed() == "in mail"
    assert listed(ONEFOLD_STORE="sqlite:///money.db") == "in money"
    assert listed("--store", "mail", ONEFOLD_STORE="sqlite:///money.db") == "in mail"


def test_the_environment_takes_a_name_too(folder: Path) -> None:
    (folder / "onefold.yaml").write_text(TWO)

    assert listed(ONEFOLD_STORE="money") == "in money"


def test_a_url_with_a_space_in_the_environment_is_one_url(folder: Path) -> None:
    (folder / "money.db").rename(folder / "my money.db")

    said = onefold("stats", "--format", "json", ONEFOLD_STORE="sqlite:///my money.db")

    assert [one["records"] for one in json.loads(said.stdout)] == [1]


@pytest.mark.parametrize("command", ["ls", "held", "top --once", "schema", "erase --scope x --yes"])
def test_of_several_stores_in_the_file_one_has_to_be_named(folder: Path, command: str) -> None:
    (folder / "onefold.yaml").write_text(TWO)

    line = refused(onefold(*command.split()), 2)

    assert "onefold.yaml declares money, mail. Say which one, by its name" in line


@pytest.mark.parametrize("command", ["stats", "doctor", "purge"])
def test_what_takes_several_stores_does_so_only_if_they_are_named(folder: Path, command: str) -> None:
    (folder / "onefold.yaml").write_text(TWO)

    line = refused(onefold(command), 2)
    said = onefold(command, "--store", "onefold.yaml", "--format", "json", MAIL_URL="sqlite:///mail.db")
    both = onefold(command, "--store", "money", "--store", "sqlite:///mail.db", "--format", "json")

    assert "--store NAME, or --store onefold.yaml for all" in line
    found = [json.loads(one.stdout) for one in (said, both)]
    names, urls = ([(one["name"], one["store"]) for one in (x["stores"] if command == "purge" else x)] for x in found)
    assert names == [("money", "sqlite:///money.db"), ("mail", "sqlite:///mail.db")]
    assert urls == [("money", "sqlite:///money.db"), (None, "sqlite:///mail.db")]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("mony", "did you mean 'money'?"),
        ("", "which store? Pass --store URL"),
        ("mail", "the environment variable MAIL_URL is not set, so the store mail is unknown"),
        ("money.db", "is not a configuration (.yaml, .yml, .toml). If it is a store, write sqlite:///money.db"),
        ("other.yaml", "there is no such file"),
        ("sqlte:///x.db", "did you mean 'sqlite'?"),
    ],
)
@pytest.mark.parametrize("command", ["ls", "stats"])
def test_a_name_that_means_no_store_is_one_line(folder: Path, command: str, named: str, says: str) -> None:
    (folder / "onefold.yaml").write_text(TWO)

    line = refused(onefold(command, "--store", named), 2)

    assert says in line


def test_without_a_file_a_name_is_one_line() -> None:
    assert "and there is no onefold.yaml in this folder" in refused(onefold("ls", "--store", "money"), 2)
    assert "or set ONEFOLD_STORE" in refused(onefold("ls"), 2)


def test_two_files_in_a_folder_are_not_guessed_between(folder: Path) -> None:
    (folder / "onefold.yaml").write_text(TWO)
    (folder / "onefold.toml").write_text(ONE)

    assert "onefold.yaml and onefold.toml: say which one" in refused(onefold("ls"), 2)
    assert listed("--store", "onefold.toml") == "in mail"


def test_copy_goes_from_one_name_to_another(folder: Path) -> None:
    (folder / "onefold.yaml").write_text(TWO)

    said = onefold("copy", "--from", "money", "--to", "mail", MAIL_URL="sqlite:///new.db")

    assert said.stdout == "1 copied, 0 already there\n"
    assert listed("--store", "sqlite:///new.db") == "in money"


@pytest.mark.parametrize("ends", [("--from", "money"), ("--to", "money"), ()])
def test_both_ends_of_a_copy_are_named(folder: Path, ends: tuple[str, ...]) -> None:
    (folder / "onefold.yaml").write_text(TWO)

    assert "Pass --from OLD and --to NEW" in refused(onefold("copy", *ends, ONEFOLD_STORE="sqlite:///mail.db"), 2)


def test_import_takes_names_for_both_ends(folder: Path) -> None:
    (folder / "onefold.yaml").write_text(TWO)
    rows = ("--table", "onefold_records", "--key", "key", "--operation", "old")

    said = onefold("import", "--from", "money", "--to", "mail", *rows, MAIL_URL="sqlite:///mail.db")

    assert said.stdout == "1 imported, 0 already there\n", said.output


def test_an_option_before_its_command_is_told_where_it_goes() -> None:
    said = CliRunner().invoke(app, ["--store", "sqlite:///x.db", "held"])

    assert said.exit_code == 2
    assert "options follow their command, as in onefold held --store URL" in said.stderr
