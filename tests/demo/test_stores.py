"""The demo runs on every store: only the URL changes. SQLite is its default; the servers are for `make test-all`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Far more than it takes; it bounds how long a broken one hangs.
PATIENCE = 300.0


@pytest.mark.more
@pytest.mark.parametrize("store", ["postgres_url", "redis_url", "mysql_url", "valkey_cluster_url"])
def test_with_the_guard_every_effect_happens_once(store: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(store)

    played = subprocess.run(
        [sys.executable, "-m", "onefold.demo", "--store", url, "--format", "json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert played.returncode == 0, played.stderr
    assert "onefold:" not in played.stderr
    assert json.loads(played.stdout)
