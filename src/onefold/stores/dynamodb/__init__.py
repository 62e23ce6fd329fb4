"""DynamoDB: one item for each record, conditional writes, consistent reads.

The clock is DynamoDB's own, from the `Date` of its replies; the machine's time of day is never used. An expired record
is free at once, and is removed by DynamoDB later (time to live). A failure is never hidden: errors of DynamoDB become
`StoreUnavailable`, and nothing runs unclaimed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from onefold._checks import finite, positive, yes_or_no
from onefold._concurrency.generators import run, run_async
from onefold._concurrency.interrupts import replied
from onefold._model import Address, Claim, Ending, Entry, Gone, Record, Released, State
from onefold.durations import Duration
from onefold.errors import OnefoldError, UsageError
from onefold.stores.base import Query, Sample, StoredRecord
from onefold.stores.dynamodb import clients, schema
from onefold.stores.dynamodb.clients import AsyncClients, Settings
from onefold.stores.dynamodb.clock import DateClock, GivenClock, Now
from onefold.stores.dynamodb.items import ITEM_MAX, Request
from onefold.stores.dynamodb.kind import KIND, TABLE
from onefold.stores.dynamodb.records import LEASE_MIN, Pause, Records, Steps
from onefold.stores.reserved import unsent
from onefold.stores.urls import options_of

T = TypeVar("T")

__all__ = [
    "ITEM_MAX",
    "KIND",
    "LEASE_MIN",
    "TABLE",
    "AsyncDynamoDBStore",
    "DynamoDBStore",
    "adopt",
    "apply_schema",
    "describe_schema",
    "open_async_store",
    "open_store",
]

# Valid names of a table.
TABLE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")

# A reply takes milliseconds. Three attempts of this length end before a lease of ten seconds does.
TIMEOUT: Final = 2.0


class _Table:
    """The records of both stores, in one table."""

    _records: Records

    @property
    def table(self) -> str:
        return self._records.table

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.table!r})"


class DynamoDBStore(_Table):
    """A `Store` and `Browsable` in one table; safe to share between threads, and across a fork.

    `client` is your own boto3 client, `Table` or session; without one the store creates a client on first use, and
    closes it in `close()`. Using the store after that creates a new one.
    """

    def __init__(
        self,
        table: str | None = None,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        profile: str | None = None,
        timeout: Duration = TIMEOUT,
        auto_schema: bool = True,
        client: Any = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        settings = _settings(region, endpoint_url, profile, timeout)
        self._clients, named = (clients.own(settings), None) if client is None else clients.brought(client, settings)
        self._records = _records(table or named, clock, auto_schema=auto_schema)

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self._take(self._records.claim(entry, replacing))

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self._take(self._records.extend(claim, notes))

    def finish(self, claim: Claim, ending: Ending) -> bool:
        return self._take(self._records.finish(claim, ending))

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self._take(self._records.release(claim, released))

    def read(self, address: Address) -> Record | None:
        return self._take(self._records.read(address))

    def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return self._take(self._records.annotate(record, notes))

    def purge(self, limit: int) -> int:
        return self._take(self._records.purge(limit))

    def knows(self, error: BaseException) -> bool:
        """Return whether an error is ours, as all of the client's are. Any other came from a signal handler."""
        return isinstance(error, OnefoldError)

    def browse(self, query: Query, limit: int) -> list[Record]:
        return self._take(self._records.browse(query, limit))

    def sample(self, query: Query, limit: int) -> Sample:
        """Return some records from all over the table; all of them, if there are few."""
        from onefold.stores.samples.dynamodb_items import sample

        return self._take(sample(self._records, query, limit))

    def stored(self, address: Address) -> StoredRecord | None:
        """Return the item of this address, in DynamoDB's own form."""
        return self._take(self._records.stored(address))

    def facts(self) -> dict[str, Any]:
        """Return the facts that DynamoDB reports about the table; the table is looked up, and never created."""
        from onefold.stores.dynamodb.facts import facts_of

        return self._take(facts_of(self._records))

    @property
    def auto_schema(self) -> bool:
        """Return whether a missing table is created on first use."""
        return self._records.auto_schema

    @auto_schema.setter
    def auto_schema(self, wanted: bool) -> None:
        self._records.create = schema.create if wanted else None

    def schema_exists(self) -> bool:
        """Return whether the table exists. Create nothing."""
        return self._take(self._records.exists())

    def now(self) -> Now:
        """Return DynamoDB's time, as far as it is known; ask if nothing is known yet."""
        return self._take(self._records.now())

    def close(self) -> None:
        """Close the client, if it is the store's own."""
        self._clients.close()

    def _take(self, steps: Steps[T]) -> T:
        """Perform the steps of an operation, one after the other."""
        try:
            client = self._clients.get()
        except Exception as error:  # noqa: BLE001 - errors that are not about DynamoDB are raised unchanged
            self._records.raise_as_text(error)
        return run(steps, Sender(self._records, client))


class AsyncDynamoDBStore(_Table):
    """The async DynamoDB store, on aiobotocore. It has a client for each event loop, and closes it with the loop."""

    def __init__(
        self,
        table: str | None = None,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        profile: str | None = None,
        timeout: Duration = TIMEOUT,
        auto_schema: bool = True,
        client: Any = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        settings = _settings(region, endpoint_url, profile, timeout)
        self._clients, named = (
            (clients.own_async(settings), None) if client is None else clients.brought_async(client, settings)
        )
        self._renewing = clients.for_renewals(client, settings)
        self._records = _records(table or named, clock, auto_schema=auto_schema)

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        if entry.state is State.RUNNING:
            await self._reserve()
        return await self._take(self._records.claim(entry, replacing))

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        # Not on the shared client, as all that renews or ends a claim: handlers may use every connection of that.
        return await self._take(self._records.extend(claim, notes), self._renewing)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return await self._take(self._records.finish(claim, ending), self._renewing)

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return await self._take(self._records.release(claim, released), self._renewing)

    async def read(self, address: Address) -> Record | None:
        return await self._take(self._records.read(address))

    async def annotate(self, record: Record, notes: bytes) -> Record | Gone | None:
        return await self._take(self._records.annotate(record, notes))

    async def purge(self, limit: int) -> int:
        return await self._take(self._records.purge(limit))

    async def browse(self, query: Query, limit: int) -> list[Record]:
        return await self._take(self._records.browse(query, limit))

    async def facts(self) -> dict[str, Any]:
        """Return the facts that DynamoDB reports about the table; the table is looked up, and never created."""
        from onefold.stores.dynamodb.facts import facts_of

        return await self._take(facts_of(self._records))

    async def now(self) -> Now:
        """Return DynamoDB's time, as far as it is known; ask if nothing is known yet."""
        return await self._take(self._records.now())

    async def aclose(self) -> None:
        """Close this event loop's clients, but not your own."""
        await self._renewing.aclose()
        await self._clients.aclose()

    async def _reserve(self) -> None:
        """Create the client for renewals. Without it no claim is made: nothing could keep it alive."""
        try:
            await self._renewing.get()
        except Exception as error:  # noqa: BLE001 - errors that are not about DynamoDB are raised unchanged
            with unsent():
                self._records.raise_as_text(error)

    async def _take(self, steps: Steps[T], clients: AsyncClients | None = None) -> T:
        """Perform the steps of an operation, one after the other."""
        try:
            client = await (clients or self._clients).get()
        except Exception as error:  # noqa: BLE001 - errors that are not about DynamoDB are raised unchanged
            self._records.raise_as_text(error)
        return await run_async(steps, AsyncSender(self._records, client))


class Sender(NamedTuple):
    """Performs the steps of an operation on one client."""

    records: Records
    client: Any

    def send(self, step: Request | Pause) -> Any:
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        sent = self.records.clock.ticks()
        try:
            reply = getattr(self.client, step.action)(**step.parameters)
        except Exception as error:  # noqa: BLE001 - errors that are not about DynamoDB are raised unchanged
            return self.records.failed(error, sent)
        return self.records.heard(reply, sent)


class AsyncSender(Sender):
    """The async counterpart."""

    async def send(self, step: Request | Pause) -> Any:
        if isinstance(step, Pause):
            from asyncio import sleep

            return await sleep(step.seconds)
        sent = self.records.clock.ticks()
        try:
            # Closing its connection would not keep DynamoDB from executing a request.
            reply = await replied(getattr(self.client, step.action)(**step.parameters))
        except Exception as error:  # noqa: BLE001 - errors that are not about DynamoDB are raised unchanged
            return self.records.failed(error, sent)
        return self.records.heard(reply, sent)


def open_store(url: str) -> DynamoDBStore:
    """Open `dynamodb://TABLE?region=eu-central-1`, with the options of `DynamoDBStore`."""
    table, options = _parsed(url)
    return DynamoDBStore(table, **options)


def open_async_store(url: str) -> AsyncDynamoDBStore:
    """Open a store for an `AsyncGuard`."""
    table, options = _parsed(url)
    return AsyncDynamoDBStore(table, **options)


def check_url(url: str, *, is_async: bool) -> None:  # noqa: ARG001 - the same for both
    """Raise `UsageError` for a URL or an option that is wrong. No client library is imported."""
    table, options = _parsed(url)
    region, endpoint_url, profile = (options.get(name) for name in ("region", "endpoint_url", "profile"))
    _settings(region, endpoint_url, profile, options.get("timeout", TIMEOUT))
    _records(table, None, auto_schema=False)


def adopt(client: Any, *, is_async: bool) -> DynamoDBStore | AsyncDynamoDBStore:
    """Create the store on the caller's own client, `Table` or session, which is not closed."""
    return AsyncDynamoDBStore(client=client) if is_async else DynamoDBStore(client=client)


def check_client(client: Any, *, is_async: bool) -> None:
    """Raise `UsageError` for a client that a guard of this kind (sync or async) does not take."""
    clients.check_sync_or_async(client, is_async=is_async)


def describe_schema(url: str) -> str:
    """Return the table as a CloudFormation template."""
    return schema.template(_parsed(url)[0] or TABLE)


def apply_schema(url: str) -> list[str]:
    """Create the table if it does not exist; return what was done, line by line."""
    store = open_store(url)
    try:
        done = store._take(schema.apply(store._records))
        # Check that the table is usable.
        store.now()
    finally:
        store.close()
    return done


OPTIONS: Final = ("region", "endpoint_url", "profile", "timeout", "auto_schema")


def _parsed(url: str) -> tuple[str | None, dict[str, Any]]:
    # The URL itself is never shown: it may contain a secret.
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UsageError(
            "dynamodb://: credentials do not belong in the URL. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "name a profile with ?profile="
        )
    if parts.path not in ("", "/") or parts.fragment:
        raise UsageError("write dynamodb://TABLE?region=eu-central-1, with nothing between the table and its options")
    options: dict[str, Any] = {**options_of(parts.query, OPTIONS, f"dynamodb://{parts.netloc}")}
    if "auto_schema" in options:
        options["auto_schema"] = yes_or_no(options["auto_schema"], "auto_schema")
    return parts.netloc or None, options


def _settings(region: str | None, endpoint_url: str | None, profile: str | None, timeout: Duration) -> Settings:
    if endpoint_url is not None and not _is_endpoint(endpoint_url):
        # It is not shown: it may contain a secret.
        raise UsageError("endpoint_url= has to be a URL such as http://127.0.0.1:8000, without credentials")
    return Settings(region, endpoint_url, profile, finite(positive(timeout, "timeout"), "timeout"))


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # The host or the port is malformed.
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


def _records(table: str | None, clock: Callable[[], float] | None, *, auto_schema: bool) -> Records:
    name = TABLE if table is None else table
    if not TABLE_NAME.fullmatch(name):
        # After a colon it may be a secret whose @ is missing.
        shown = f"{name.partition(':')[0]}:***" if ":" in name else name
        raise UsageError(f"table={shown!r} has to have 3 to 255 letters, digits, or any of _ . -")
    return Records(
        name,
        DateClock() if clock is None else GivenClock(clock),
        schema.create if auto_schema else None,
    )
