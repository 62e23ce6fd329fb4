"""The soak in its short form: it holds with a guard, and shows that it can fail without one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parent.parent / "bench" / "soak.py"

# Far more than it takes; it bounds how long a broken one hangs.
PATIENCE = 120.0


def soak(*options: str, place: Path) -> subprocess.CompletedProcess[str]:
    # A kill takes nothing back from the operating system: only a power cut could tell the two kinds of sync apart.
    command = [sys.executable, str(SOAK), "--short", "--sync", "normal", "--directory", str(place), *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)


def row(name: str, ran: subprocess.CompletedProcess[str]) -> list[str]:
    found = re.search(rf"^{name} +(.+)$", ran.stdout, re.MULTILINE)
    assert found is not None, ran.stdout + ran.stderr
    return found[1].split()


def test_under_random_kills_the_effects_are_what_the_guarantees_say(tmp_path: Path) -> None:
    ran = soak("--seed", "7", place=tmp_path)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("seed 7,")
    assert row("kills", ran) == ["8", "8", "8"]
    assert row("stops past the lease", ran) == ["0", "2", "2"]
    assert row("effects", ran)[0] == "1,400"
    assert row("effects downstream, by key", ran)[1] == "1,400"
    assert not list(tmp_path.iterdir()), "what holds leaves no files"


def test_without_a_guard_the_soak_fails_with_evidence(tmp_path: Path) -> None:
    ran = soak("--without-guard", place=tmp_path)

    assert ran.returncode == 1, ran.stdout + ran.stderr
    kept = [found[1] for found in re.finditer(r"^(\w+): \d+ violations; the files are in ", ran.stdout, re.MULTILINE)]
    assert kept == ["transactional", "rerun", "hold"]
    assert len(list(tmp_path.iterdir())) == len(kept), "the evidence is kept"
    assert re.search(r"m-\d{5}: its effect did not happen exactly once \(effects 2, ", ran.stdout)
    assert re.search(r"m-\d{5}: a start that nothing explains \(effects 2, ", ran.stdout)
    assert re.search(r"m-\d{5}: it ran twice under hold \(effects 2, ", ran.stdout)
