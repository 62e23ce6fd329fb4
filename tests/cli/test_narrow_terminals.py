"""On a terminal of any width, nothing is cut off, and what is meant to be copied is in one piece."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from onefold import State
from onefold._model import Address
from tests.cli.test_records import Shelf, on_a_terminal

LONG = "pay_" + "0123456789" * 6
REMARK = "attempt 1 ended in ConnectTimeout: the bank did not answer in time, and nobody knows what it has done"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shelf, list[Address]]]:
    shelf = Shelf(tmp_path_factory.mktemp("narrow") / "records.db")
    held = [shelf.hold(key, scope="a-tenant-with-a-name", remark=REMARK, age=300.0) for key in ("pay_7f3a", LONG)]
    shelf.put("pay_1", State.RUNNING, lease=900_000.0, operation="send-a-welcome-message")
    yield shelf, held
    shelf.guard.close()
    shelf.store.close()


def seen_at(shelf: Shelf, columns: int, *arguments: str, status: int = 0) -> list[str]:
    seen, ended = on_a_terminal(shelf, *arguments, COLUMNS=str(columns))
    assert ended == status, seen
    return COLOURS.sub("", seen).replace("\r", "").splitlines()


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize("command", ["ls", "held", "show pay_7f3a"])
def test_keys_and_digests_are_whole(filled: tuple[Shelf, list[Address]], command: str, columns: int) -> None:
    shelf, held = filled

    lines = seen_at(shelf, columns, *command.split())

    for address in held[:1] if command.startswith("show") else held:
        assert any(address.digest in line for line in lines)
        assert any(re.search(rf"\b{address.key}\b", line) for line in lines)
    said = "".join("".join(lines).split())
    assert REMARK.replace(" ", "") in said
    assert "…" not in said


def test_a_table_that_does_not_fit_is_a_block_for_each_row(filled: tuple[Shelf, list[Address]]) -> None:
    shelf, held = filled

    narrow, wide = seen_at(shelf, 60, "ls"), seen_at(shelf, 200, "ls")

    assert f"digest     {held[0].digest}" in narrow
    assert f"key        {LONG}" in narrow
    assert narrow.count("") == 2
    assert wide[0].split() == ["scope", "operation", "key", "digest", "state", "attempt", "age", "left", "remark"]


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("stats", ["send-a-welcome-message", "abandoned", "5m"]),
        ("top --once", ["send-a-welcome-message", "next lease ends in", "10d"]),
        ("doctor", ["claimed, refused to a second, finished, read and removed", "synchronous"]),
        ("purge", ["records.db", "removed", "seconds"]),
    ],
)
def test_what_other_commands_print_is_whole(
    filled: tuple[Shelf, list[Address]], command: str, says: list[str], columns: int
) -> None:
    lines = seen_at(filled[0], columns, *command.split())

    # A reason of the doctor is wrapped between its words, next to the name of its check.
    said = "".join("".join(lines).split())
    # The bar of a purge is shortened, and then removed.
    assert command == "purge" or "…" not in said
    for text in says:
        assert "".join(text.split()) in said
    if command != "doctor":
        assert all(any(text in line for line in lines) for text in says)
