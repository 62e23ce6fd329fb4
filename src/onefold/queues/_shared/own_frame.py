"""Find where in the user's own code an error was raised. Pure: it reads a traceback, and shows no value of it."""

from __future__ import annotations

import os
import sysconfig
from pathlib import PurePath
from traceback import walk_tb
from types import CodeType
from typing import Final

import onefold

_ONEFOLD: Final = (os.path.dirname(onefold.__file__) + os.sep,)
_STANDARD_LIBRARY: Final = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})

# The folders of installed packages; Debian has its own name for them.
_INSTALLED: Final = ("site-packages", "dist-packages")


def location(error: BaseException) -> str:
    """Return `charge.py:9 in charge`: the last line of the user's own code; empty without a traceback.

    That is code outside Onefold, the standard library and installed packages. If the handler itself is installed, it is
    the last line in the handler's package.
    """
    lines = [(frame.f_code, number) for frame, number in walk_tb(error.__traceback__)]
    if not lines:
        return ""
    outside = [line for line in lines if not _is_beneath(line[0])]
    own = [line for line in outside if _package(line[0]) is None] or [
        line for line in outside if _package(line[0]) == _package(outside[0][0])
    ]
    code, number = (own or lines)[-1]
    return f"{PurePath(code.co_filename).name}:{number} in {code.co_name}"


def _is_beneath(code: CodeType) -> bool:
    """Return whether this is Onefold's, the standard library's or generated code."""
    name = code.co_filename
    # Installed packages are inside the folder of the standard library.
    is_standard = name.startswith(_STANDARD_LIBRARY) and _package(code) is None
    return is_standard or name.startswith((*_ONEFOLD, "<"))


def _package(code: CodeType) -> str | None:
    """Return the installed package of this code; None if it is not installed."""
    parts = PurePath(code.co_filename).parts
    at = next((at for at, part in enumerate(parts) if part in _INSTALLED), None)
    return None if at is None else parts[at + 1]
