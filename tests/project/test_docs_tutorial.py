"""The tutorial, followed line by line: a real server in a fresh folder, on a real database, really killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import psycopg

from services.processes import free_port
from tests.project.pages import fits, follow
from tests.support import PROJECT

TUTORIAL: Final = (PROJECT / "docs" / "tutorial.md").read_text(encoding="utf-8")

# Commands are found beside our Python. What a page installs has to be there: nothing is fetched.
ENVIRONMENT: Final = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PIP_NO_INDEX": "1",
    "PIP_QUIET": "1",
}


def test_the_tutorial_prints_what_it_says_and_charges_once(postgres_url: str, tmp_path: Path) -> None:
    page = TUTORIAL.replace("postgresql://localhost/shop", postgres_url).replace("8000", str(free_port()))

    wrong = [printed for printed in follow(page, tmp_path, ENVIRONMENT) if not fits(printed)]

    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    said = (tmp_path / "stderr").read_text(encoding="utf-8").splitlines()
    assert wrong == [], log
    # The shell tells of each server that was killed, and nobody says anything else.
    assert [line for line in said if " Killed " not in line] == []
    assert len(said) == 2
    assert log.count("stopped after the commit") == log.count("stopped before the commit") == 1
    with psycopg.connect(postgres_url) as connection:
        charges = connection.execute("SELECT tenant, amount FROM charge ORDER BY tenant, amount").fetchall()
    assert charges == [("acme", 50), ("acme", 900), ("acme", 4200), ("bakery", 700)]
