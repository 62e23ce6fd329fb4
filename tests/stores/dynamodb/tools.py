"""For the tests of the DynamoDB store: words, requests that are counted, and replies that are lost or made up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate, parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

from onefold._model import Address, Claim, Ending, Entry, State
from onefold.stores.dynamodb import DynamoDBStore
from onefold.stores.dynamodb.clock import DateClock

DONE = Ending(state=State.DONE, ttl=60.0, result=b"result")


def entry(key: str = "key", **fields: Any) -> Entry:
    usual: dict[str, Any] = {
        "address": Address("", "charge", key),
        "token": os.urandom(16),
        "lease": 30.0,
        "ttl": 90.0,
    }
    return Entry(**(usual | fields))


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, entry.lease, entry.ttl)


def table_of(url: str) -> str:
    return urlsplit(url).netloc


def client_options(url: str) -> dict[str, str]:
    """Where the server is, as options of a client."""
    options = parse_qs(urlsplit(url).query)
    return {"endpoint_url": options["endpoint_url"][0], "region_name": options["region"][0]}


def store_of(url: str, **options: Any) -> DynamoDBStore:
    """The store of a URL, with what a URL cannot say."""
    known = client_options(url)
    return DynamoDBStore(table_of(url), endpoint_url=known["endpoint_url"], region=known["region_name"], **options)


def size_of(item: dict[str, Any]) -> int:
    """The bytes of an item, as DynamoDB counts them: names and values; a number takes half a byte for each digit."""
    return sum(len(name) + _size(kind, value) for name, told in item.items() for kind, value in told.items())


def _size(kind: str, value: Any) -> int:
    match kind:
        case "N":
            return (len(value.replace(".", "").strip("0")) + 1) // 2 + 1
        case "S":
            return len(value.encode())
        case _:
            return 1 if kind == "BOOL" else len(value)


@contextmanager
def plain_client(url: str, *, attempts: int = 3) -> Iterator[Any]:
    """A client that is not the store's."""
    from botocore.config import Config
    from botocore.session import Session

    # Patient: what is sent again because a busy machine takes its time would be counted.
    config = Config(retries={"mode": "standard", "total_max_attempts": attempts}, read_timeout=60, connect_timeout=60)
    options: Any = client_options(url)
    client = Session().create_client("dynamodb", config=config, **options)
    yield client
    client.close()


def counted(client: Any) -> list[str]:
    """What this client sends from now on, by name."""
    sent: list[str] = []
    client.meta.events.register("before-send.dynamodb", lambda event_name, **_: sent.append(event_name.split(".")[-1]))
    return sent


def answered(client: Any, action: str, codes: list[str], **headers: str) -> None:
    """The next requests of this kind get these errors for an answer, one each; what comes after reaches the server."""
    from aiobotocore.awsrequest import AioAWSResponse
    from botocore.awsrequest import AWSResponse

    response: Any = AioAWSResponse if "aiobotocore" in type(client).__module__ else AWSResponse

    def answer(request: Any, **_: Any) -> Any:
        if not codes:
            return None
        body = json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{codes.pop(0)}", "message": "as told"}).encode()
        return response(request.url, 400, {"date": formatdate(usegmt=True)} | headers, Body(body))

    client.meta.events.register(f"before-send.dynamodb.{action}", answer)


class Body:
    """What a response is read from."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterator[bytes]:
        yield self._body

    async def read(self) -> bytes:
        return self._body


class Line:
    """The line of a client, on which the `Date` of replies can be changed, or (None) taken away.

    With `stopped`, every reply is of that moment.
    """

    def __init__(self, client: Any) -> None:
        session = client._endpoint.http_session
        self._send = session.send
        self.skew: float | None = 0.0
        self.stopped: float | None = None
        session.send = self.send

    def send(self, request: Any) -> Any:
        response = self._send(request)
        moment = self.stopped or parsedate_to_datetime(response.headers["date"]).timestamp()
        del response.headers["date"]
        if self.skew is not None:
            response.headers["date"] = formatdate(moment + self.skew, usegmt=True)
        return response


class Time:
    """A server's time that a test can move: by the `Date` of its replies, and by the counter of those who hear them.

    By itself it stands still, so that it does not matter how long the test takes.
    """

    def __init__(self, client: Any) -> None:
        self._line = Line(client)
        self._line.stopped = self._began = time.time()
        self._passed = 0.0
        self._frozen: dict[int, float] = {}

    def of(self, store: DynamoDBStore) -> DynamoDBStore:
        """The store of a machine that this time passes on."""
        store._records.clock = DateClock(lambda: self._ticks(store))
        return store

    def freeze(self, store: DynamoDBStore) -> None:
        """The store's machine sleeps from now on, and its counter with it."""
        self._frozen[id(store)] = self._ticks(store)

    def _ticks(self, store: DynamoDBStore) -> float:
        return self._frozen.get(id(store), self._passed)

    def passes(self, seconds: float) -> None:
        self._passed += seconds
        self._line.stopped = self._began + self._passed
