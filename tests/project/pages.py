"""Pages that are followed in a shell: their files are written, their commands run, and what they print is compared.

In such a page a block of `sh` is typed into one bash, a block of `python title="app.py"` is saved as that file, and a
block of `text` is what the commands before it print; an ellipsis in it stands for any text to the end of the line.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

# Far more than a page takes; it bounds how long a broken one hangs.
PATIENCE: Final = 300.0

BLOCK: Final = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    language: str
    file: str
    text: str
    line: int


def shell_blocks(page: str) -> list[Block]:
    """Return what a reader types, saves and sees, in the order of the page."""
    found = [
        Block(match[1], match[2] or "", match[3], page[: match.start()].count("\n") + 2)
        for match in BLOCK.finditer(page)
    ]
    return [block for block in found if block.language in ("sh", "text") or block.file]


class Printed(NamedTuple):
    """What the page says that a block prints, and what it has printed."""

    line: int
    expected: str
    actual: str


def follow(page: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Printed]:
    """Run the page in this folder, and yield what its commands print beside what it says."""
    blocks = shell_blocks(page)
    mark = f"--- {secrets.token_hex(8)}"
    script = "\n".join(_typed(block, mark) for block in blocks if block.language != "text")
    output = _bash(script, folder, environment)
    printed = iter(output.split(f"{mark}\n")[1:])
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "sh":
            says = after.text if after is not None and after.language == "text" else ""
            yield Printed(block.line, says, next(printed, "nothing: the commands before it have ended the shell"))


def _typed(block: Block, mark: str) -> str:
    if block.file:
        return f"cat > '{block.file}' <<'{mark}'\n{block.text}{mark}"
    return f"echo '{mark}'\n{block.text}"


def _bash(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run the script in a group of its own: whatever it leaves behind ends with it."""
    # What programs say on stderr is not compared: bash's own words about a killed job have numbers in them.
    with (folder / "stderr").open("wb") as stderr:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            text=True,
        )
        with shell:
            try:
                return shell.communicate(timeout=PATIENCE)[0]
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)


def fits(printed: Printed) -> bool:
    """Say whether a block prints what its page says, spaces at the ends of lines aside."""
    pattern = "\n".join(_line(line) for line in printed.expected.splitlines())
    actual = "\n".join(line.rstrip() for line in printed.actual.splitlines())
    return re.fullmatch(pattern, actual) is not None


def _line(line: str) -> str:
    # In a pipe our tables are separated by tabs, which a reader sees as spaces.
    words = re.split(r" {2,}", line.rstrip())
    return r"(?: {2,}|\t)".join(re.escape(word).replace("…", ".*") for word in words)
