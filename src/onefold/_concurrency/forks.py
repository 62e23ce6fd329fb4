"""Count the forks of this process, and give each child new locks: nobody there could release the parent's."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

# How many forks lie between the first process and this one. Reading it is free; asking for a pid is a system call.
generation = 0

# By owner: the attributes that hold its locks, and how each is created.
_owners: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def set_lock(owner: Any, attribute: str, make: Callable[[], Any] = threading.Lock) -> None:
    """Give the owner a lock, and in each forked child a new one."""
    setattr(owner, attribute, make())
    _owners.setdefault(owner, {})[attribute] = make


def _begin_anew() -> None:
    global generation  # noqa: PLW0603 - a process has one
    generation += 1
    for owner, locks in list(_owners.items()):
        for attribute, make in locks.items():
            setattr(owner, attribute, make())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
