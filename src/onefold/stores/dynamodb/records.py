"""The operations of a store, for sync and async: generators that yield requests, and read the answers. No I/O.

A generator yields a `Request` and is sent the reply, or a `Problem`; or it yields a `Pause`, to be waited out. Every
write is conditional on what it found or owns; every read is consistent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from msgspec.structs import replace

from onefold._model import GONE, Address, Claim, Ending, Entry, Gone, Record, Released, State
from onefold.durations import as_text
from onefold.errors import OnefoldError, StoreUnavailable, UsageError
from onefold.stores.base import Query, StoredRecord
from onefold.stores.dynamodb.clock import Clock, Now
from onefold.stores.dynamodb.errors import (
    CONFLICTS,
    INVALID,
    NO_TABLE,
    REFUSED,
    Problem,
    date_of,
    label,
    of_something_else,
    problem_of,
    refused,
    unanswered,
)
from onefold.stores.dynamodb.items import (
    ITEM_MAX,
    VERSION,
    Item,
    Request,
    Requests,
    matches,
    record_of,
    too_large,
)

T = TypeVar("T")
W = TypeVar("W", Entry, Ending)

# The clock is known to a second or two, which would be most of a shorter lease.
LEASE_MIN: Final = 10.0

# A foreign transaction takes some ten milliseconds. In total less than a second: a handler may be waiting.
CONFLICT_PAUSES: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)

# A write by a clock that turns out to be behind is repeated, by the reply to the first.
ROUNDS_MAX: Final = 4


class Pause(NamedTuple):
    """Wait this long, then continue."""

    seconds: float


Reply = dict[str, Any]
Steps = Generator[Request | Pause, Any, T]


class Records:
    """The operations on one table, by one clock."""

    def __init__(self, table: str, clock: Clock, create: Callable[[Records], Steps[None]] | None) -> None:
        self.table = table
        self.clock = clock
        self.create = create
        self._requests = Requests(table)
        self._found = False

    @property
    def auto_schema(self) -> bool:
        """Return whether a missing table is created."""
        return self.create is not None

    def exists(self) -> Steps[bool]:
        """Return whether there is a table of this name, ours or not; reading it shows whose it is."""
        answer = yield from self.ask(self._requests.version(), NO_TABLE, INVALID)
        return not (isinstance(answer, Problem) and answer.code == NO_TABLE)

    def claim(self, entry: Entry, replacing: Record | None = None) -> Steps[Record | Gone | None]:
        # A lease of zero is already over: an abandoned run's record, copied from another store.
        if entry.state is State.RUNNING and entry.lease > 0:
            _check_lease(entry.lease, entry.address)
        entry = fitting(entry, entry.address)
        still = None if replacing is None else (replacing.token, replacing.revision)
        revision = entry.revision_after(replacing)
        for _ in range(ROUNDS_MAX):
            now = yield from self.now()
            answer = yield from self.ask(self._requests.claim(entry, revision, now, still=still), REFUSED)
            if isinstance(answer, Problem):
                if answer.item is None:
                    if replacing is not None:
                        return GONE
                    if still is None:
                        raise self._too_old() from answer.error
                    still, revision = None, 1
                    continue
                found = record_of(answer.item, self.clock.now())
                if not entry.is_own(found.token, replacing):
                    return found
            if not self.clock.was_behind(now):
                return None
            # To others its lease may look over. A new revision refuses a take-over that saw it so.
            still, revision = (entry.token, revision), revision + 1
        raise self._jumping()

    def extend(self, claim: Claim, notes: bytes | None = None) -> Steps[bool]:
        # A lease of zero ends the claim, for the next delivery.
        if claim.lease > 0:
            _check_lease(claim.lease, claim.address)
        _check_fit(claim.address, notes)
        problem = yield from self._write(lambda now: self._requests.extend(claim, notes, now))
        if problem is None:
            return True
        if notes is not None and self._has_longer(problem, claim, notes):
            return (yield from self.extend(claim))
        if not self._is_held_by(problem, claim):
            return False
        if notes is None:
            return True
        problem = yield from self._write(lambda now: self._requests.note(claim, notes, now))
        return problem is None or self._has_longer(problem, claim, notes)

    def finish(self, claim: Claim, ending: Ending) -> Steps[bool]:
        written = fitting(ending, claim.address)
        problem = yield from self._write(lambda now: self._requests.finish(claim, written, now))
        return problem is None

    def release(self, claim: Claim, released: Released | None = None) -> Steps[bool]:
        if released is None:
            yield from self.now()
            answer = yield from self.ask(self._requests.forget(claim), REFUSED)
            problem = answer if isinstance(answer, Problem) else None
        else:
            left = released
            _check_fit(claim.address, left.notes, left.remark)
            problem = yield from self._write(lambda now: self._requests.leave_open(claim, left, now))
        return problem is None or self._alive(problem.item) is None

    def read(self, address: Address) -> Steps[Record | None]:
        yield from self.now()
        answer = yield from self.ask(self._requests.read(address))
        return self._alive(answer.get("Item"))

    def annotate(self, seen: Record, notes: bytes) -> Steps[Record | Gone | None]:
        _check_fit(seen.address, seen.result, notes, seen.remark)
        now = yield from self.now()
        answer = yield from self.ask(self._requests.annotate(seen, notes, now), REFUSED)
        if not isinstance(answer, Problem):
            return None
        found = self._alive(answer.item)
        if found is None:
            return GONE
        return None if found.is_annotated(seen, notes) else found

    def stored(self, address: Address) -> Steps[StoredRecord | None]:
        answer = yield from self.ask(self._requests.read(address))
        item = answer.get("Item")
        return None if item is None else StoredRecord("dynamodb", dict(sorted(item.items())))

    def purge(self, limit: int) -> Steps[int]:
        """Scan the whole table, page by page, until enough is removed."""
        removed = 0
        after: Item | None = None
        while removed < limit:
            now = yield from self.now()
            page = yield from self.ask(self._requests.scan_expired(now, after))
            for key in page["Items"][: limit - removed]:
                answer = yield from self.ask(self._requests.remove_expired(key, now), REFUSED)
                removed += not isinstance(answer, Problem)
            after = page.get("LastEvaluatedKey")
            if not after:
                break
        return removed

    def browse(self, query: Query, limit: int) -> Steps[list[Record]]:
        """Scan the whole table, unless the query names one address, and keep at most `limit` of it."""
        if limit <= 0:
            return []
        if query.scope is not None and query.operation is not None and query.key is not None:
            return (yield from self._browse_one(query, Address(query.scope, query.operation, query.key)))
        chosen: list[Record] = []
        after: Item | None = None
        while True:
            now = yield from self.now()
            page = yield from self.ask(self._requests.scan(query, now, after))
            chosen = heapq.nsmallest(limit, (*chosen, *self._matching(page["Items"], query)), key=_parts)
            after = page.get("LastEvaluatedKey")
            if not after:
                return chosen

    def now(self) -> Steps[Now]:
        """Return the time. The first caller also finds the table, in the same round trip."""
        if not self._found or not self.clock.is_fresh:
            yield from self._open()
        return self.clock.now()

    def ask(self, request: Request, *expected: str) -> Steps[Any]:
        """Return the reply, or the `Problem` if its code is expected. Wait out conflicts with transactions."""
        for pause in (*CONFLICT_PAUSES, None):
            answer = yield request
            if not isinstance(answer, Problem) or answer.code in expected:
                return answer
            if answer.code == NO_TABLE:
                self._found = False
            if answer.code not in CONFLICTS or pause is None:
                raise refused(answer, request.action, self.table) from answer.error
            yield Pause(pause)
        raise AssertionError("the last round answers or raises")

    # Called by the senders: the two ways in which a request ends.

    def heard(self, reply: Reply, sent: float) -> Reply:
        self.clock.hear(date_of(reply), sent)
        return reply

    def failed(self, error: Exception, sent: float) -> Problem:
        """Return the answer in an error; translate and raise an error without one."""
        problem = problem_of(error)
        if problem is None:
            self.raise_as_text(error)
        self.clock.hear(date_of(error), sent)
        return problem

    def raise_as_text(self, error: Exception) -> NoReturn:
        """Raise the translated error; raise it unchanged if it is not about DynamoDB."""
        told = None if isinstance(error, OnefoldError) else unanswered(error, self.table)
        if told is None:
            raise error
        raise told from error

    def _open(self) -> Steps[None]:
        """Find the table, and learn the time."""
        answer = yield from self.ask(self._requests.version(), NO_TABLE, INVALID)
        if isinstance(answer, Problem) and answer.code == NO_TABLE:
            if self.create is None:
                raise StoreUnavailable(
                    f"{label(self.table)}: there is no such table, and auto_schema=False. "
                    "Create it with the command `onefold schema --store URL --apply`"
                ) from answer.error
            yield from self.create(self)
            answer = yield from self.ask(self._requests.version(), INVALID)
        if isinstance(answer, Problem):
            raise of_something_else(self.table) from answer.error
        self._check_version(answer.get("Item"))
        if not self.clock.is_fresh:
            raise StoreUnavailable(
                f"{label(self.table)}: the replies have no Date, without which there is no clock. "
                "Check what is between this machine and endpoint_url="
            )
        self._found = True

    def _check_version(self, item: Item | None) -> None:
        if item is not None and int(item["usable_from"]["N"]) > VERSION:
            raise StoreUnavailable(
                f"{label(self.table)}: its records are of version {item['version']['N']}, but this Onefold only "
                f"knows version {VERSION}. Upgrade Onefold"
            )

    def _write(self, request: Callable[[Now], Request]) -> Steps[Problem | None]:
        """Send a repeatable write, again if the clock was behind. Return why it was refused, or None."""
        for _ in range(ROUNDS_MAX):
            now = yield from self.now()
            answer = yield from self.ask(request(now), REFUSED)
            if isinstance(answer, Problem):
                return answer
            if not self.clock.was_behind(now):
                return None
        raise self._jumping()

    def _jumping(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{label(self.table)}: the Date of its replies jumps back and forth, so no lease can be counted. "
            "Check what is between this machine and the endpoint"
        )

    def _too_old(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{label(self.table)}: a refused write came back without the existing item. "
            "The endpoint is too old, or is not DynamoDB"
        )

    def _is_held_by(self, problem: Problem, claim: Claim) -> bool:
        if problem.item is None:
            return False
        record = record_of(problem.item, self.clock.now())
        return record.token == claim.token and record.state is State.HELD

    def _has_longer(self, problem: Problem, claim: Claim, notes: bytes) -> bool:
        """Return whether the record is ours and has longer notes than these, which are outdated."""
        if problem.item is None:
            return False
        record = record_of(problem.item, self.clock.now())
        return record.token == claim.token and record.is_renewable and len(record.notes or b"") > len(notes)

    def _alive(self, item: Item | None) -> Record | None:
        record = None if item is None else record_of(item, self.clock.now())
        return None if record is None or record.is_expired else record

    def _browse_one(self, query: Query, address: Address) -> Steps[list[Record]]:
        found = yield from self.read(address)
        if found is None or not matches(found, query) or query.state not in (None, found.state):
            return []
        return [found]

    def _matching(self, items: list[Item], query: Query) -> Iterator[Record]:
        now = self.clock.now()
        return (record for record in (record_of(item, now) for item in items) if matches(record, query))


def fitting(written: W, address: Address) -> W:
    """Return the entry or ending, without its result if the item would be too large: the effect has happened."""
    if written.result is None or not too_large(written.result, written.notes, written.remark):
        _check_fit(address, written.notes, written.remark)
        return written
    left_out = f"{len(written.result)} bytes, and an item of DynamoDB holds ITEM_MAX={ITEM_MAX}"
    _check_fit(address, written.notes, left_out)
    return replace(written, result=None, omitted=True, remark=left_out)


def _check_fit(address: Address, *parts: bytes | str | None) -> None:
    if too_large(*parts):
        raise UsageError(
            f"{address.operation} [key {address.digest}]: its notes are too large: an item of DynamoDB holds "
            f"ITEM_MAX={ITEM_MAX} bytes. Keep less in the steps of a handler"
        )


def _check_lease(lease: float, address: Address) -> None:
    if lease < LEASE_MIN:
        raise UsageError(
            f"{address.operation} [key {address.digest}]: a lease of {as_text(lease)} is too short for DynamoDB, "
            f"whose clock is known to within a second or two. Nothing ran. The minimum is lease={as_text(LEASE_MIN)!r}"
        )


def _parts(record: Record) -> tuple[str, str, str]:
    return record.address.parts
