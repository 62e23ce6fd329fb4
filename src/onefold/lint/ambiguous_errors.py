"""Detect exceptions after which nobody knows whether the effect happened. None of your code is imported.

A built-in Python exception is judged by its class. Any other is judged by its name, so that the lint gives the same
result wherever it runs: a commit hook has none of the libraries that the handlers use.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from concurrent import futures
from typing import Final

# Modules of handlers' errors. Others are not imported: some have side effects on import.
PYTHON: Final = frozenset(
    {
        *("asyncio", "asyncio.exceptions", "builtins", "concurrent.futures", "ftplib", "http.client", "imaplib"),
        *("json", "json.decoder", "multiprocessing", "poplib", "queue", "select", "smtplib", "socket", "ssl"),
        *("subprocess", "urllib.error", "xmlrpc.client"),
    }
)
# A lost connection, an end in the middle of a response, a worker that was stopped.
LOST: Final = (OSError, EOFError, MemoryError, RecursionError, asyncio.CancelledError, futures.CancelledError)
# Raised for anything that has no class of its own.
ANYTHING: Final = (RuntimeError, SystemError)

# The meaning of a class name, in any library.
NAMES: Final = (
    # It took too long, or was ended.
    r".*(Time[Oo]ut|TimedOut|DeadlineExceeded|TimeLimitExceeded).*",
    r"((Task|Request|Operation|Context|Call|Query)?Cancell?ed|Aborted|Unknown)(Error|Exception)?",
    r"(WorkerLost|BrokenExecutor|BrokenProcessPool|BrokenThreadPool|AdminShutdown|CrashShutdown)(Error)?",
    # The connection was lost, or never existed.
    r".*(Connection|Connector|Disconnect).*|.*Connect(Error|Exception)?|CannotConnectNow(Error)?",
    r".*(Network|Transport|Socket|Protocol|Proxy|Stream|StreamLost|NameResolution)(Error|Exception|Failure)",
    r".*(?<![A-Z])(SSL|Ssl|TLS|Tls|OS|IO|Io|EOF|Eof)(Error|Exception)|(Read|Write|Close|ClientPayload|.*Pool)Error",
    r"(AMQP|Amqp)?Channel(Closed\w*|(Error|Exception|WrongStateError|InvalidStateError))|timeout|error|gaierror|herror",
    r"(Broken|Closed)Resource(Error)?|EndOf(Stream|Channel)",
    # A response arrived, but could not be read.
    r".*Incomplete(Read|Body|Response)(Error)?|.*(Decode|Decoding|ChunkedEncoding|ResponseStreaming)Error|BadStatusLine",
    r"LineTooLong|InvalidChunkLength|ContentTypeError|TooManyRedirects|WSServerHandshakeError",
    r"(Client|Invalid)?ResponseError|InvalidResponse",
    # The response says that the other side does not know; or the class covers such responses, too.
    r".*(Outcome|Result|Status|State|Completion|Resolution)Unknown(Error)?|.*Unknown(Outcome|Result|Status|State)(Error)?",
    r"(.*(Store|Service|Server|A[Pp][Ii]|Backend|Upstream|Gateway|Provider|Host|Endpoint|Kafka))?Unavailable.*",
    r"(Broker|Leader|Replica|Coordinator|GroupCoordinator)NotAvailable(Error)?",
    r".*(BadGateway|InternalServer|InternalService|Server|Internal|Upstream|Unexpected)(Error|Exception)_?|BadGateway",
    r"(Requests?|.*A(PI|pi)(Call)?|.*(H(TTP|ttp)|Rpc|RPC)(Client|Status|Response)?|Subprocess)(Error|Exception)",
    r"MaxRetryError|RetryError|TryAgain(Error)?|WaiterError",
    # A database or broker that failed during the operation, or did not perform it.
    r"(Operational|Interface|Database|DBAPI|SQLAlchemy|Postgres|FatalPostgres|MySQL|BusyLoading|ReadOnly)Error",
    r"(Cluster|ClusterDown|MasterDown)Error|(Deadlock(Detected)?|Serialization|SerializationFailure)(Error)?",
    # The root class of a library.
    r"(Base|Onefold|Amqp|AMQP|Redis|Kafka|Boto|BotoCore)?(Error|Exception)",
    r"(Adyen|Braintree|Mollie|PayPal|Square|Stripe|Twilio)(Error|Exception)",
)
NAMED: Final = re.compile("|".join(NAMES))

# In other libraries a client's mistake, which is final; in these the class of every error response.
CLIENT_ERRORS: Final = frozenset({"aiobotocore", "aiohttp", "boto3", "botocore"})


def is_doubt(name: str) -> bool:
    """Return whether the exception `module:Class` says nothing about the effect, by its breadth or its kind."""
    module, _, inside = name.partition(":")
    kind = _of_python(module, inside)
    if kind is not None and _is_doubt(kind):
        return True
    if module == "builtins":
        return False
    last = inside.rpartition(".")[2]
    if last == "ClientError":
        return module.partition(".")[0] in CLIENT_ERRORS
    return NAMED.fullmatch(last) is not None


def _is_doubt(kind: type[BaseException]) -> bool:
    return issubclass(Exception, kind) or issubclass(kind, LOST) or not issubclass(kind, Exception) or kind in ANYTHING


def _of_python(module: str, inside: str) -> type[BaseException] | None:
    """Return the exception of this name, if Python itself has it."""
    if module not in PYTHON:
        return None
    try:
        found = getattr(importlib.import_module(module), inside, None)
    except ImportError:
        # A Python that was built without it.
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
