"""The SQL statements that other languages send: they share claims with Python, by token and revision."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from onefold import ClaimLost, Guard, InProgress
from onefold.stores.base import Address
from tests.record_format.stores import FOLDER, plain_connection, url_of

STATEMENTS = json.loads((FOLDER / "statements.json").read_text(encoding="utf-8"))
AT = Address("", "charge", "pay_7f3a")
FIRST, SECOND = b"1" * 16, b"2" * 16

# What the statement of a claim takes besides the address and the token.
NEW: dict[str, Any] = {
    "state": "running",
    "attempt": 1,
    "revision": 1,
    "lease": 60.0,
    "ttl": 3600.0,
    "age": 0.0,
    "bypasses": 0,
    "remark": "",
    "fingerprint": None,
    "notes": None,
    "omitted": 0,
    "result": None,
}


class Program:
    """A program in another language: it knows the statements, and no code of ours."""

    def __init__(self, store: str, url: str) -> None:
        self.store = store
        self.url = url

    def do(self, name: str, token: bytes = FIRST, **values: Any) -> int:
        """Send one statement; how many rows it has written, or has found."""
        address = dict(zip(("scope", "operation", "key"), AT.parts, strict=True))
        asked = {**address, "token": token, "now": time.time(), "notes_length": None, **NEW, **values}
        statement = text(STATEMENTS[self.store][name])
        used = {one: asked[one] for one in statement.compile().params}
        with plain_connection(self.url) as connection:
            done = connection.execute(statement, used)
            return len(done.all()) if done.returns_rows else int(done.rowcount)


@pytest.fixture(params=sorted(STATEMENTS))
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    return Program(request.param, url_of(request.param, request, tmp_path))


@pytest.fixture
def guard(program: Program) -> Any:
    with Guard(program.url) as guard:
        guard.read("charge", "another")
        yield guard


def test_what_another_program_claims_and_finishes_is_a_duplicate_in_python(program: Program, guard: Guard) -> None:
    assert program.do("read") == 0
    program.do("claim")
    assert program.do("read") == 1

    with pytest.raises(InProgress):
        guard.run("charge", "pay_7f3a", lambda: pytest.fail("it ran"))
    assert program.do("extend", lease=90.0) == 1
    found = guard.read("charge", "pay_7f3a")
    assert found is not None
    assert (found.token, found.revision, found.lease_left > 60) == (FIRST, 2, True)
    assert program.do("finish", state="done", result=b"\x00\x11") == 1

    assert guard.run("charge", "pay_7f3a", lambda: 0).value == 17


def test_only_the_token_and_the_revision_that_were_seen_are_replaced(program: Program, guard: Guard) -> None:
    program.do("claim", lease=0.001)
    seen = {"seen_token": FIRST, "seen_revision": 1, "attempt": 2}

    assert program.do("take_over", SECOND, **{**seen, "seen_revision": 2}) == 0
    assert program.do("take_over", SECOND, **seen) == 1
    assert program.do("take_over", SECOND, **seen) == 0
    for name in ("extend", "finish", "leave_open", "forget"):
        assert program.do(name, FIRST) == 0, name
    assert program.do("leave_open", SECOND, attempt=2, remark="released: Error") == 1

    assert guard.run("charge", "pay_7f3a", lambda: "python").attempt == 3


def test_a_lease_of_python_that_is_over_is_taken_over_and_its_owner_is_refused(program: Program, guard: Guard) -> None:
    def stalled() -> None:
        found = guard.read("charge", "pay_7f3a")
        assert found is not None
        assert program.do("take_over", seen_token=found.token, seen_revision=found.revision, attempt=2) == 1

    with pytest.raises(ClaimLost):
        guard.run("charge", "pay_7f3a", stalled)

    assert program.do("forget") == 1
    assert guard.read("charge", "pay_7f3a") is None


def test_a_record_that_has_expired_is_free(program: Program, guard: Guard) -> None:
    program.do("claim", ttl=-1.0)
    assert program.do("read") == 0

    program.do("claim_expired" if "claim_expired" in STATEMENTS[program.store] else "claim", SECOND)

    found = guard.read("charge", "pay_7f3a")
    assert found is not None
    assert found.token == SECOND
