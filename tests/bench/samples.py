"""The results of a run that never was: a few contests with round figures, somebody missing, somebody who failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.compare import bars


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("results.json").read_text(encoding="utf-8"))
    return {**found, "bars": bars.judge(found)}
