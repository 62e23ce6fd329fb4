"""Where it was measured, in general terms: no names of hosts or users."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from services.house import House

SERVERS = ("postgres", "redis", "mariadb", "dynamodb")


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": _system(),
        "python": platform.python_version(),
    }


def load() -> float:
    """Return how many processes wanted to run in the last minute: more than a few spoil a measurement."""
    return round(os.getloadavg()[0], 2)


def server_versions(house: House) -> dict[str, str]:
    """Return the versions of the servers that can be had."""
    found = {}
    for name in SERVERS:
        try:
            found[name] = house[name].version
        except Exception:  # noqa: BLE001 - its contests say why
            continue
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _system() -> str:
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, kernel {platform.release().partition('-')[0]}"
    except OSError:
        return f"{platform.system()} {platform.release()}"
