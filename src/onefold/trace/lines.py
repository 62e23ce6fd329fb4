"""Read logs of any size, line by line: bounded memory, and every line is accounted for. Judge nothing."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Final, cast

import msgspec

# Read and decoded at a time.
CHUNK: Final = 1 << 20

# A longer line is not a hop's: it is counted as broken, and never held in memory.
LINE_MAX: Final = 1 << 20

# A later time is milliseconds, mistaken for seconds.
TS_MAX: Final = 1e11

# Greater numbers are not ids: no database stores them as numbers.
ID_MAX: Final = 2**63 - 1

# A hop is a part of your system. Thousands of them are ids of something, in the wrong field.
HOPS_MAX: Final = 1_000

HOUR: Final = 3_600

STANDARD_INPUT: Final = "-"


# Nested deeper than Python's stack: no hop writes such a line.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Name = Annotated[str, msgspec.Meta(min_length=1)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12,64}\Z")]
Number = Annotated[int, msgspec.Meta(ge=-ID_MAX, le=ID_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=TS_MAX)]


class Line(msgspec.Struct, frozen=True, gc=False):
    """One hop that one message passed. Other fields are ignored."""

    hop: Name
    key: Digest
    ts: Seconds
    scope: str | None = None
    delivery: str | Number | None = None
    request: str | Number | None = None
    producer: str | Number | None = None


class Dated(Line, frozen=True, gc=False):
    """A line as a log may have it: a time as text, a digest in upper case, or no digest at all."""

    key: Name
    ts: Seconds | datetime  # type: ignore[assignment]


_DIGEST: Final = re.compile("[0-9a-f]{12,64}", re.ASCII)


class NotDigest(msgspec.ValidationError):
    """A hop has written something else in place of the digest: the key itself, perhaps. No message shows it."""

    def __init__(self, hop: str) -> None:
        super().__init__(f"the key at {hop} is not a digest (12 to 64 hexadecimal digits)")
        self.hop = hop


def _line(dated: Dated) -> Line:
    """Convert the time to seconds. A time without a zone is UTC, as it should be in logs.

    Raise `ValidationError` for an impossible one: seconds are checked as they are decoded, and text is not.
    """
    key = dated.key.lower()
    if not _DIGEST.fullmatch(key):
        raise NotDigest(dated.hop)
    when = dated.ts
    if isinstance(when, datetime):
        when = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        if not 0 <= when < TS_MAX:
            raise msgspec.ValidationError(f"Expected a time since 1970, got `{dated.ts}` - at `$.ts`")
    return Line(dated.hop, key, when, dated.scope, dated.delivery, dated.request, dated.producer)


class Broken(msgspec.Struct, frozen=True):
    """The first line that could not be read."""

    file: str
    number: int
    why: str


class Tally(msgspec.Struct):
    """The count of lines, by what they are."""

    # Lines of hops.
    lines: int = 0
    # JSON lines about something else, in a log that others write to as well.
    others: int = 0
    blank: int = 0
    broken: int = 0
    first: Broken | None = None
    # The broken ones whose key is not a digest, by hop.
    not_digests: dict[str, int] = {}


Progress = Callable[[int], None]

_lines: Final = msgspec.json.Decoder(Line)
_dated: Final = msgspec.json.Decoder(Dated)
_anything: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read(files: Sequence[str], tally: Tally, progress: Progress = lambda _bytes: None) -> Iterator[list[Line]]:
    """Yield the lines of all files, in chunks; count the rest in the tally. Raise `OSError`.

    `progress` is called with the number of bytes, as on disk, read so far.
    """
    before = 0
    for name in files:
        number = position = 0
        for chunk, position in _chunks(name):
            progress(before + position)
            found = _decoded(chunk, name, number, tally)
            number += _lines_in(chunk)
            tally.lines += len(found)
            yield found
        before += position


def _lines_in(chunk: bytes) -> int:
    return chunk.count(b"\n") + (not chunk.endswith(b"\n"))


def _decoded(chunk: bytes, name: str, number: int, tally: Tally) -> list[Line]:
    """Decode all lines of a chunk at once; if one cannot be read, each separately."""
    try:
        found = _all_at_once(chunk)
    except UNREADABLE:
        return _one_by_one(chunk, name, number, tally)
    tally.blank += max(_lines_in(chunk) - len(found), 0)
    return found


def _all_at_once(chunk: bytes) -> list[Line]:
    try:
        # No Python code runs for a single line here: that makes a large log bearable.
        return _lines.decode_lines(chunk)
    except msgspec.ValidationError:
        return [_line(dated) for dated in _dated.decode_lines(chunk)]


def _one_by_one(chunk: bytes, name: str, number: int, tally: Tally) -> list[Line]:
    found = []
    for offset, text in enumerate(chunk.removesuffix(b"\n").split(b"\n"), start=1):
        # Any prefix that a logger's format writes before the line is ignored.
        line = text[max(text.find(b"{"), 0) :].strip()
        if not line:
            tally.blank += 1
            continue
        try:
            found.append(_line(_dated.decode(line)))
        except UNREADABLE as error:
            if _is_of_another(line):
                tally.others += 1
                continue
            tally.broken += 1
            tally.first = tally.first or Broken(name, number + offset, _why(error, text))
            if isinstance(error, NotDigest):
                hop = error.hop if len(tally.not_digests) < HOPS_MAX or error.hop in tally.not_digests else "others"
                tally.not_digests[hop] = tally.not_digests.get(hop, 0) + 1
    return found


def _why(error: Exception, text: bytes) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, msgspec.ValidationError) or text.lstrip().find(b"{") <= 0:
        return str(error)
    return f"what follows its first {{ is not JSON: {error}. A logger's format must not write a {{ before the line"


def _is_of_another(line: bytes) -> bool:
    try:
        return "hop" not in _anything.decode(line)
    except UNREADABLE:
        return False


def _chunks(name: str) -> Iterator[tuple[bytes, int]]:
    """Yield the file in chunks that end with a line, each with the position reached.

    A line that is too long is shortened, and so is broken too.
    """
    with _opened(name) as (file, position):
        begun = b""
        while data := file.read(CHUNK):
            begin, newline, rest = data.rpartition(b"\n")
            if newline:
                yield _bounded(begun, begin) + newline, position()
                begun = rest
            elif len(begun) <= LINE_MAX:
                begun += data
        if begun:
            yield _bounded(begun, b""), position()


def _bounded(begun: bytes, lines: bytes) -> bytes:
    """Return the beginning of a line, with the lines that end it."""
    if len(begun) <= LINE_MAX:
        return begun + lines
    _, newline, others = lines.partition(b"\n")
    return b"a line of more than a megabyte" + newline + others


@contextmanager
def _opened(name: str) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file, with a function that returns how many bytes of it, as on disk, were read."""
    if name == STANDARD_INPUT:
        # A pipe does not know its position.
        yield sys.stdin.buffer, lambda: 0
        return
    with open(name, "rb") as raw:
        if Path(name).suffix != ".gz":
            yield raw, raw.tell
            return
        with gzip.open(raw) as unpacked:
            yield cast("IO[bytes]", unpacked), raw.tell
