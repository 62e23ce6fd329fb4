"""What the built wheel says of itself: what package indexes, installers and licence scanners read."""

from __future__ import annotations

import email.message
import email.parser
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import onefold
from tests.support import PROJECT

# The hook by which pip and build ask for the metadata alone; nothing is fetched for it.
PREPARE: Final = "import sys; from hatchling.build import prepare_metadata_for_build_wheel as make; make(sys.argv[1])"

HOME: Final = "https://github.com/onefold/onefold"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    folder = tmp_path_factory.mktemp("metadata")
    subprocess.run([sys.executable, "-c", PREPARE, str(folder)], cwd=PROJECT, check=True)
    (found,) = folder.glob("onefold-*.dist-info/METADATA")
    return email.parser.Parser().parsestr(found.read_text(encoding="utf-8"))


def test_the_wheel_names_its_authors_and_where_to_find_them(built: email.message.Message) -> None:
    urls = dict(str(line).split(", ") for line in built.get_all("Project-URL", []))

    assert built["Author"] == "The Onefold developers"
    assert set(urls) == {"Documentation", "Repository", "Issues", "Changelog"}
    assert {url for url in urls.values() if not url.startswith(HOME)} == set()


def test_its_urls_lead_to_files_of_this_project(built: email.message.Message) -> None:
    urls = [str(line).split(", ")[1] for line in built.get_all("Project-URL", [])]
    paths = [url.partition("/main/")[2] for url in urls if "/main/" in url]

    assert len(paths) == 2
    assert [path for path in paths if not (PROJECT / path).exists()] == []


def test_the_page_of_an_index_leads_to_the_repository(built: email.message.Message) -> None:
    shown = str(built.get_payload())
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    targets, ours = (re.findall(r"\]\(([^)]+)\)", text) for text in (shown, readme))

    assert built["Description-Content-Type"] == "text/markdown"
    assert f"]({HOME}/raw/main/docs/pictures/demo.svg)" in shown
    assert [target for target in targets if not target.startswith("https://")] == []
    assert [target.removeprefix(f"{HOME}/blob/main/").removeprefix(f"{HOME}/raw/main/") for target in targets] == ours


def test_the_wheel_has_the_version_of_the_package_and_the_newest_of_the_changelog(built: email.message.Message) -> None:
    text = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", text, flags=re.MULTILINE)

    assert built["Version"] == onefold.__version__ == released[0][0]


def test_the_changelog_keeps_its_format() -> None:
    text = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    sections = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)

    assert versions[0] == "[Unreleased]"
    assert [line for line in versions[1:] if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", line)] == []
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    # Each has a link to its changes.
    linked = re.findall(rf"^(\[.+\]): {HOME}/", text, flags=re.MULTILINE)
    assert [line.partition(" ")[0] for line in versions] == linked


def test_the_source_distribution_has_what_its_tests_read() -> None:
    pyproject = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"\[tool\.hatch\.build\.targets\.sdist\]\ninclude = \[(.*)\]", pyproject)
    included = re.findall(r'"([^"]+)"', listed)
    tracked = {Path(name).parts[0] for name in tracked_files()}

    assert [name for name in included if not (PROJECT / name).exists()] == []
    # Only what our own server of changes runs stays behind; hatchling adds pyproject.toml and .gitignore by itself.
    assert tracked - set(included) == {".ci", ".gitignore", "pyproject.toml"}


def tracked_files() -> list[str]:
    if not (PROJECT / ".git").exists():
        pytest.skip("not a clone: nobody knows which files belong to it")
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()
