"""A request and a response, as the rules see them, for every framework. Pure."""

from __future__ import annotations

import hashlib
import io
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any, Final

import msgspec

from onefold import UsageError

# A body up to this size is kept in memory while it is hashed; a larger one goes to a temporary file.
SPOOL_MAX: Final = 1 << 20

CHUNK: Final = 1 << 16

# The header that names the code of a refusal which is not a problem document.
REFUSED: Final = "Idempotent-Refused"

LOG = logging.getLogger("onefold.http")


class Request:
    """A request as the rules see it. Header names are case-insensitive."""

    __slots__ = (
        "_by_name",
        "_headers",
        "_host",
        "compared_path",
        "key_of",
        "method",
        "native",
        "path",
        "path_below_mounts",
        "query",
    )

    def __init__(
        self,
        method: str,
        path: str,
        query: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        native: Any = None,
        *,
        host: Callable[[], str] | None = None,
        compared_path: str | list[str] | None = None,
        path_below_mounts: str | None = None,
    ) -> None:
        # Methods are case-sensitive, but many frameworks run `patch` as PATCH: it must not pass unguarded.
        self.method = method.upper()
        self.path = path
        # The part that a retry has to repeat, if that is more.
        self.compared_path = path if compared_path is None else compared_path
        # The rest of the path below a mount that has stripped its prefix silently.
        self.path_below_mounts = path_below_mounts
        self.query = query
        # The framework's own request: a scope, an environ, a request object.
        self.native = native
        self._headers = headers
        # The key, and who has found it without the body.
        self.key_of: tuple[object, str | None] | None = None
        # The values of each header, by its name in lower case; made when it is first needed.
        self._by_name: dict[bytes, list[bytes]] | None = None
        self._host = host

    @property
    def host(self) -> str:
        """Return the host that this was sent to, as the framework sees it: with its port, if it was given."""
        return self.header("Host") or "" if self._host is None else self._host()

    def headers(self, name: str) -> list[bytes]:
        """Return every value of this header, as it was sent."""
        if self._by_name is None:
            self._by_name = {}
            for key, value in self._headers:
                self._by_name.setdefault(key.lower(), []).append(value)
        return list(self._by_name.get(_wanted(name), ()))

    def header(self, name: str) -> str | None:
        """Return the first value of this header."""
        found = self.headers(name)
        return found[0].decode("latin-1").strip() if found else None


@lru_cache(maxsize=64)
def _wanted(name: str) -> bytes:
    """Return the name of a header as it is looked up. A program asks for a few."""
    return name.lower().encode("latin-1")


class Answer(msgspec.Struct, frozen=True):
    """The response that is sent, and remembered."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    # The body was larger than the limit, and is not here.
    cut: bool = False


def plain_answer(value: Any) -> Answer:
    """Wrap a plain value as a response: for a request settled by somebody who knew its result, but not its HTTP."""
    return Answer(200, [(b"content-type", b"application/json")], msgspec.json.encode(value))


class Refused(Exception):
    """The request is refused. `code` is stable and for machines, the message is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


# Visible ASCII and blanks: a header with anything else cannot be sent, or is two headers.
CHALLENGE: Final = re.compile(r"[!-~][ -~]*")


class Unauthorized(Refused):
    """Raised by a `scope=` function for a caller whom it does not know: the request gets 401, and nothing runs.

    `detail` is sent to the client. `challenge` is the value of the header `WWW-Authenticate`.
    """

    def __init__(self, detail: str = "This request needs valid credentials.", *, challenge: str = "Bearer") -> None:
        given: object = challenge
        if not isinstance(given, str) or not CHALLENGE.fullmatch(given):
            raise UsageError(
                f"Unauthorized(challenge={given!r:.60}) cannot be sent as WWW-Authenticate: write challenge='Bearer', "
                "in visible ASCII"
            )
        # Half a surrogate, from a name that a client sent, cannot be sent back.
        super().__init__("unauthorized", detail.encode("utf-8", "replace").decode())
        self.challenge = challenge


class Body:
    """A request's body: hashed as it comes, in memory or, when it is large, in a temporary file."""

    def __init__(self, whole: bytes = b"") -> None:
        """Create an empty body, or one that is in memory already, and stays there."""
        self.size = len(whole)
        self._digest = hashlib.sha256(whole)
        self._file: IO[bytes] = io.BytesIO(whole)

    def add(self, chunk: bytes) -> None:
        """Take the next part. Raises `Refused` if there is no room for it: nothing has run yet."""
        try:
            if self.size <= SPOOL_MAX < self.size + len(chunk):
                small, self._file = self.read(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
                self._file.write(small)
            self._file.write(chunk)
            # A full disk is reported now, not when the body is read again.
            self._file.flush()
        except OSError as error:
            LOG.warning("no room for the body of a request in %s: %s", _temporary_folder(), error)
            raise Refused(
                "no_room", "There is no room for this request. Nothing was processed: send it later."
            ) from error
        self.size += len(chunk)
        self._digest.update(chunk)

    @property
    def digest(self) -> bytes:
        return self._digest.digest()

    def read(self) -> bytes:
        """Return the whole body, however often it is asked for."""
        self._file.seek(0)
        return self._file.read()

    def chunks(self) -> Iterator[bytes]:
        """Yield the body again, from its beginning; at least one chunk. Concurrent readers do not disturb it."""
        yield self._read_at(0)
        offset = CHUNK
        while chunk := self._read_at(offset):
            yield chunk
            offset += CHUNK

    def _read_at(self, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(CHUNK)

    @property
    def file(self) -> IO[bytes]:
        """Return the body as a file, at its beginning."""
        self.rewind()
        return self._file

    def rewind(self) -> None:
        self._file.seek(0)

    def close(self) -> None:
        # A full disk is reported once more here: data that could not be written is no longer needed.
        with suppress(OSError):
            self._file.close()


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "any temporary folder"
