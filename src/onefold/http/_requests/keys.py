"""Find the key of a request: in the Idempotency-Key header, another header, or a field of the body. Pure.

An invalid key is refused with a reason, and never guessed: a request with a key is guarded or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

from onefold import UsageError
from onefold.http._requests import forms as _forms
from onefold.http._shared.messages import Body, Refused, Request
from onefold.http._shared.options import check_yes_or_no, header_name
from onefold.keys import KEY_MAX, json_field

HEADER: Final = "Idempotency-Key"

# A key without quotes: visible ASCII, except quotes and commas.
BARE: Final = re.compile(rb"[!#-+\--~]+")

# Returns the key of a request, or None if it has none. With `needs_body = False` the body is not read for it.
RequestKey = Callable[[Request, Body], str | None]

# Media types that declare a body as JSON; so does any `+json`. A body without a media type may be JSON.
JSON: Final = ("application/json", "text/json")

# A body is searched for its key only up to this size: a webhook's event is far smaller.
KEY_BODY_MAX: Final = 1 << 20

# Bytes that may precede a JSON document: blanks, byte order marks, and zeros of UTF-16 and UTF-32.
BEFORE_JSON: Final = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"

# A numeric key has at most this many digits; Python itself refuses to write much longer ones.
NUMBER_BITS_MAX: Final = 4 * KEY_MAX


class HeaderKey:
    """The key in a header: a structured-field string, or (not with `strict`) bare."""

    needs_body: Final = False

    def __init__(self, name: str = HEADER, *, strict: bool = False) -> None:
        if find_spec("http_sf") is None:
            raise UsageError("reading a key from a header needs http-sf, which is missing. pip install 'onefold[http]'")
        self._name = name
        self._strict = strict
        # The message for a request without one.
        self.key_location = name
        self.missing = f"This request needs the header {name}."
        if name == HEADER:
            self.missing = f"This request needs an {HEADER}: a new one for each operation."

    def __call__(self, request: Request, _body: Body) -> str | None:
        values = request.headers(self._name)
        if not values:
            return None
        if len(values) > 1:
            raise Refused("key_malformed", f"{self._name} was sent {len(values)} times: send it once")
        return parsed(values[0], self._name, strict=self._strict)


class BodyField:
    """The key in a field of a JSON or form body."""

    needs_body: Final = True

    def __init__(self, path: str) -> None:
        given: object = path
        if not isinstance(given, str) or not all(path.split(".")):
            raise UsageError(f"body_field({path!r}) has to name a field: body_field('id'), body_field('event.id')")
        self._path = path
        self._names = path.split(".")
        # The message for a request without one.
        self.key_location = f"The field {path}"
        self.missing = f"This request needs the field {path} in its body, JSON or a form: a string or a whole number."

    def __call__(self, request: Request, body: Body) -> str | None:
        found = self._found(request, body)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (str, int)):
            raise Refused("key_malformed", f"the field {self._path} has to be a string or a whole number")
        if isinstance(found, int) and found.bit_length() > NUMBER_BITS_MAX:
            raise Refused("key_malformed", f"the field {self._path} is too large a number")
        return _checked(str(found), f"the field {self._path}")

    def _found(self, request: Request, body: Body) -> Any:
        """Return the field. Raises `Refused` for JSON, or a form, that cannot be read: it may contain a key."""
        kind = (request.header("Content-Type") or "").partition(";")[0].strip().lower()
        is_form = kind in (_forms.URLENCODED, _forms.MULTIPART)
        is_searched = is_form or kind in JSON or kind.endswith("+json")
        is_compressed = (request.header("Content-Encoding") or "identity").lower() != "identity"
        if is_compressed and (is_searched or (body.size and not kind)):
            raise Refused("key_malformed", f"a compressed body is not searched for its key, the field {self._path}")
        if body.size > KEY_BODY_MAX:
            if not is_searched and not _may_be_an_object(next(body.chunks())):
                return None
            raise Refused("key_malformed", f"a body of more than {KEY_BODY_MAX} bytes is not searched for its key")
        try:
            return self._of_form(request, kind, body) if is_form else json_field(body.read(), self._names)
        except RecursionError as error:
            raise Refused("key_malformed", "the body is nested too deeply to be searched for its key") from error
        except ValueError as error:
            if not is_searched or not body.read().strip():
                return None
            # Our own message; a decoder's may contain a part of the body.
            what = f"a form ({error})" if is_form and type(error) is ValueError else "a form" if is_form else "JSON"
            raise Refused("key_malformed", f"the body is not {what}, but the key is its field {self._path}") from error

    def _of_form(self, request: Request, kind: str, body: Body) -> str | None:
        """Return the field of a form, whose names are not paths: `event.id` is one name."""
        found = _forms.values_of(request, kind, body.read(), self._path)
        if len(found) > 1:
            # Some frameworks take the first, and others the last.
            raise Refused("key_malformed", f"the field {self._path} was sent {len(found)} times: send it once")
        return found[0] if found else None


def header_key(name: str, *, strict: bool = False) -> RequestKey:
    """Read the key from another header, such as a webhook's: `header_key("X-Event-Id")`."""
    check_yes_or_no("strict", strict)
    return HeaderKey(header_name("header_key", name), strict=strict)


def body_field(path: str) -> RequestKey:
    """Read the key from a field of the body: `body_field("id")`, `body_field("event.id")`."""
    return BodyField(path)


def parsed(value: bytes, name: str = HEADER, *, strict: bool = False) -> str:
    """Return the key in a header's value. Raises `Refused` if there is none."""
    text = value.strip(b" \t")
    if strict or text.startswith(b'"'):
        return _checked(_structured(text, name), name)
    # A key that is not quoted is used as it is. A comma or a blank would come from two headers that were joined.
    if not BARE.fullmatch(text):
        raise Refused("key_malformed", f'{name} has to be a string in quotes ("…"), or visible ASCII without blanks')
    return _checked(text.decode("ascii"), name)


def _structured(text: bytes, name: str) -> str:
    import http_sf

    try:
        found: Any = http_sf.parse(text, tltype="item")
    except (http_sf.StructuredFieldError, ValueError) as error:
        raise Refused("key_malformed", f"{name} is not a structured-field string: {error}") from error
    # A token is a kind of string for Python, but not for the draft.
    if type(found[0]) is not str:
        raise Refused("key_malformed", f'{name} has to be a string in quotes: {name}: "…"')
    return str(found[0])


def _checked(key: str, name: str) -> str:
    if not key.strip():
        raise Refused("key_malformed", f"{name} is empty")
    if len(key) > KEY_MAX:
        raise Refused("key_malformed", f"{name} has {len(key)} characters, and the limit is {KEY_MAX}")
    return key


def _may_be_an_object(head: bytes) -> bool:
    """Return whether a body with this beginning may be a JSON object, in any encoding: no other document has fields."""
    return head.lstrip(BEFORE_JSON)[:1] in (b"{", b"")
