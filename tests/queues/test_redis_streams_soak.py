"""The soak of Redis Streams in its short form: the wallet is exact with a guard, and is not without one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from services.programs import in_ci
from tests.support import PROJECT

# Far more than it takes; it bounds how long a broken one hangs.
PATIENCE = 900.0

pytestmark = pytest.mark.more


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.soak_redis_streams", "--short", *options]
    ran = subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True, timeout=PATIENCE)
    if "skipped: " in ran.stdout and not in_ci():
        pytest.skip(ran.stdout.splitlines()[-1])
    return ran


def test_a_server_that_is_killed_in_the_middle_loses_nothing_and_doubles_nothing() -> None:
    ran = soak()

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Redis is killed after" in ran.stdout
    assert "600 messages, 600 effects" in ran.stdout


def test_without_a_guard_the_soak_fails_with_evidence() -> None:
    ran = soak("--without-guard")

    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"m-\d{5}: 2 effects, and there should be 1", ran.stdout)
