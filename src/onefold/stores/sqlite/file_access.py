"""Find out why SQLite cannot open or write a file: it gives the same error for every cause. Changes nothing."""

from __future__ import annotations

import os
from typing import Final

OPENED: Final = "the file cannot be opened"
WRITTEN: Final = "the file cannot be written"


def why_not_opened(path: str) -> str:
    """Return what is wrong with the file's location, and what to do."""
    if os.path.isdir(path):
        return f"{OPENED}: it is a directory. Name a file in it: {os.path.join(path, 'onefold.db')}"
    for folder in _folders(path):
        if not os.path.lexists(folder):
            return f"{OPENED}: there is no directory {folder}. Create it, or correct the path"
        if not os.path.isdir(folder):
            return f"{OPENED}: {folder} is not a directory. Correct the path"
        if not may(folder, os.X_OK):
            return f"{OPENED}: this user may not enter {folder}. Let it, or run as another user"
    if os.path.exists(path):
        if not may(path, os.R_OK | os.W_OK):
            return f"{OPENED}: this user may not read and write it. Let it (chown, chmod), or run as another user"
    elif os.path.islink(path):
        return f"{OPENED}: it is a link to {os.path.realpath(path)}, which is not there. Correct the link"
    elif not may(os.path.dirname(path), os.W_OK):
        return (
            f"{OPENED}: it is not there, and this user may not write to {os.path.dirname(path)}. Let it (chown, chmod)"
        )
    return f"{OPENED}. Is its name too long, or has the process too many files open (ulimit -n)?"


def why_not_written(path: str) -> str:
    folder = os.path.dirname(path)
    if is_read_only(folder):
        return f"{WRITTEN}: {folder} is mounted read-only. Mount it for writing, or move the file"
    if not may(folder, os.W_OK) and may(path, os.W_OK):
        return f"{WRITTEN}: its log is kept next to it, and this user may not write to {folder}. Let it (chown, chmod)"
    return f"{WRITTEN}. Let this user write the file and its directory"


def may(path: str, how: int) -> bool:
    # As SQLite will be checked: with the effective user of this process.
    return os.access(path, how, effective_ids=os.access in os.supports_effective_ids)


def is_read_only(folder: str) -> bool:
    # A superuser may write everywhere, except on a read-only mount.
    return hasattr(os, "statvfs") and os.path.isdir(folder) and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _folders(path: str) -> list[str]:
    """Return the directories on the way to the file, from the root."""
    found: list[str] = []
    folder = os.path.dirname(path)
    while folder not in found:
        found.append(folder)
        folder = os.path.dirname(folder)
    return found[::-1]
