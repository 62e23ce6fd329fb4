"""Install the environment of `make bench`: what requirements.txt pins, and the server of Restate, which is on npm.

What cannot be had is named and left out: its rows in the comparison say that it is missing. It runs in the environment
that it fills, with nothing but the standard library.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
REQUIREMENTS: Final = HERE / "requirements.txt"
RESTATE_VERSION: Final = "1.7.12"
NODE_FOLDER: Final = Path(sys.prefix, "node")


def main() -> int:
    # All are named there, what they depend on too.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    if subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=False).returncode:
        for pinned in pins(REQUIREMENTS.read_text(encoding="utf-8")):
            if subprocess.run([*pip, pinned], check=False).returncode:
                print(f"{pinned} cannot be installed: its rows will be missing")
    subprocess.run([*pip, "--editable", str(HERE.parent)], check=True)
    return restate_server()


def pins(requirements: str) -> list[str]:
    """Return the lines that name a distribution and its version."""
    lines = (line.partition("#")[0].strip() for line in requirements.splitlines())
    return [line for line in lines if line]


def restate_server() -> int:
    npm, wanted = shutil.which("npm"), f"{restate_package()}@{RESTATE_VERSION}"
    if npm is None:
        print("npm is not installed: the rows of Restate will be missing")
        return 0
    NODE_FOLDER.mkdir(exist_ok=True)
    command = [npm, "install", "--prefix", str(NODE_FOLDER), "--no-audit", "--no-fund", "--silent", wanted]
    if subprocess.run(command, check=False).returncode:
        print(f"{wanted} cannot be installed: the rows of Restate will be missing")
    return 0


def restate_package() -> str:
    """Return the npm package of this machine's server."""
    system = "darwin" if sys.platform == "darwin" else "linux"
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine().lower())
    return f"@restatedev/restate-server-{system}-{machine}"


if __name__ == "__main__":
    sys.exit(main())
