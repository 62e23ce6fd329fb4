"""Importing `onefold` is cheap: no server client, no asyncio, nothing of an extra."""

from __future__ import annotations

import subprocess
import sys

LOADED = "import sys; before = set(sys.modules); {code}; print('\\n'.join(set(sys.modules) - before))"


def loaded_by(code: str) -> set[str]:
    command = [sys.executable, "-I", "-c", LOADED.format(code=code)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in found.stdout.split()}


def test_importing_onefold_loads_msgspec_and_the_standard_library_alone() -> None:
    loaded = loaded_by("import onefold")

    foreign = {name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")}
    # msgspec takes typing_extensions along where it is installed.
    assert foreign - {"typing_extensions"} == {"onefold", "msgspec"}


def test_importing_onefold_loads_neither_asyncio_nor_a_database() -> None:
    loaded = loaded_by("import onefold")

    assert not loaded & {"asyncio", "sqlite3", "ssl", "http", "email", "importlib.metadata", "multiprocessing"}


def test_a_blocking_delivery_needs_no_asyncio() -> None:
    loaded = loaded_by("import onefold; onefold.Guard('memory:').run('charge', 'a', lambda: 1)")

    assert "asyncio" not in loaded
