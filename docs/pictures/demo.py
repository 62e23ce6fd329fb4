"""Draw `demo.svg`: what `onefold demo` prints on a terminal, without what differs from run to run.

`make docs` runs it. The demo is real, and so are its processes: the picture shows what they did, without times, by
numbers of their own instead of those of this machine, and without the steps whose order is a matter of luck.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

PICTURE: Final = Path(__file__).with_suffix(".svg")

# As wide as the widest table of the demo; a narrower terminal would fold it.
COLUMNS: Final = 118

MOMENT: Final = re.compile(r"^ *\d+\.\d{3} s +(?P<who>\w+)(?: (?P<pid>\d+))? +(?P<what>.*?) *$")
# What a broker and a producer say to each other meanwhile may come in this order or in that.
TOLD: Final = re.compile(r"^(?:consumer|demo)|^broker +has lost")


def draw() -> str:
    """Return the picture of a demo that is played now."""
    return rendered(shown(printed()))


def printed() -> str:
    """Play the demo on a terminal, and return what it prints there, colours included."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    with open(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-m", "onefold.demo"]
        demo = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, env=environment
        )
        os.close(theirs)
        output = _read(terminal)
        _, said = demo.communicate()
    if demo.returncode != 0:
        raise SystemExit(f"onefold demo exits with {demo.returncode}: {said.decode(errors='replace')}")
    return output.decode().replace("\r\n", "\n")


def _read(terminal: io.RawIOBase) -> bytes:
    """Read to the end, which Linux reports as an error."""
    parts: list[bytes] = []
    try:
        while part := terminal.read(4096):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


def shown(output: str) -> list[Text]:
    """Return the lines of the picture."""
    numbers: dict[str, str] = {}
    lines: list[Text] = []
    for line in map(Text.from_ansi, output.rstrip("\n").split("\n")):
        moment = MOMENT.match(line.plain)
        if moment is None:
            numbers.clear()  # another story, with other processes
            lines.append(_without_seconds(line))
        elif TOLD.match(f"{moment['who']} {moment['what']}"):
            lines.append(_numbered(line, moment, numbers))
    return lines


def _without_seconds(line: Text) -> Text:
    # A title is as wide as its table, which is as wide as the numbers of the processes in it.
    line.rstrip()
    found = re.search(r", [0-9.]+ s(?=\)$)", line.plain)
    return line if found is None else line[: found.start()] + line[found.end() :]


def _numbered(line: Text, moment: re.Match[str], numbers: dict[str, str]) -> Text:
    """Return the moment without its time. Consumers are numbered as they come; there is one broker."""
    for pid in re.findall(r"consumer (\d+)", moment[0]):
        numbers.setdefault(pid, str(len(numbers) + 1))
    who = f"{moment['who']} {numbers.get(moment['pid'] or '', '')}"
    what = re.sub(r"consumer (\d+)", lambda found: f"consumer {numbers[found[1]]}", moment["what"])
    return Text(f"  {who:<12} {what}", line.get_style_at_offset(Console(), moment.start("what")))


def rendered(lines: list[Text]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.export_svg(title="onefold demo")


def texts(picture: str) -> list[str]:
    """Return the words of a picture, piece by piece: what two drawings of the same output have in common."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
