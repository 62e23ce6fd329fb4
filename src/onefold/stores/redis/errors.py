"""Translate errors of Redis, Valkey and their client libraries. No message contains a password."""

from __future__ import annotations

from typing import Final

from onefold.errors import OnefoldError, StoreUnavailable, UsageError

# The permissions that the store's user needs, and those that it needs in addition in a cluster.
PERMISSIONS: Final = "+evalsha +eval +get +set +del +pttl +time +scan +wait"
# For those who wait, and for what wakes them, with &PREFIX* for the channels. Without them waiters poll.
WAKEUP_PERMISSIONS: Final = "+subscribe +unsubscribe +publish +pubsub|numsub"
CLUSTER_PERMISSIONS: Final = "+cluster|slots +command +asking"

_LOGIN: Final = (
    "it refuses the login, or requires one. Check the user and the password: redis://user:password@host:port"
)

# By the code with which the server's reply begins.
PROBLEMS: Final = {
    "NOAUTH": _LOGIN,
    "WRONGPASS": _LOGIN,
    "NOPERM": f"this user lacks a permission. Give it ~PREFIX* {PERMISSIONS}; in a cluster {CLUSTER_PERMISSIONS} too",
    "READONLY": "it is a read-only replica. Name the primary, or let Sentinel name it: redis+sentinel://",
    "OOM": "it is full: it has reached maxmemory. Give it more, or keep records for a shorter time",
    "LOADING": "it has started, and is still loading its data. It will answer soon",
    "BUSY": "another client's script takes too long there. Look at SLOWLOG, end it with SCRIPT KILL",
    "MISCONF": "it cannot write to its disk, and accepts no writes. Look at its log",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write, and accepts no writes. Look at the replicas",
    "CLUSTERDOWN": "the cluster is down, or has no primary for this slot. Look at CLUSTER INFO",
    "MASTERDOWN": "it is a replica that has lost its primary. Name the primary",
    "TRYAGAIN": "the cluster is moving this slot. Try again",
    "WRONGTYPE": "another program has stored its own data under one of Onefold's keys. Choose another prefix",
}

# Error classes of the library whose messages have lost the code, or never had one.
CODES: Final = {
    "AuthenticationError": "WRONGPASS",
    "AuthorizationError": "NOPERM",
    "NoPermissionError": "NOPERM",
    "ReadOnlyError": "READONLY",
    "OutOfMemoryError": "OOM",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "SlotNotCoveredError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "MovedError": "MOVED",
}

# The messages of a cluster client about a server outside a cluster: there is no code for it.
NO_CLUSTER: Final = ("cluster support disabled", "Cluster mode is not enabled")

# The message of a pool whose connections were all in use for as long as it waits: its class is that of a lost one.
NONE_FREE: Final = "No connection available."


def is_failure(error: Exception) -> bool:
    """Return whether an error comes from a client library or its sockets; any other is a programming error."""
    roots = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(roots & {"redis", "valkey"})


def translated(error: Exception, where: str) -> OnefoldError:
    """Translate an error of a client library for people. `where` names the servers, without a password."""
    code = _code(error)
    if code == "MOVED":
        return UsageError(f"{where}: the server belongs to a cluster. Write redis+cluster://, or pass a RedisCluster")
    if code not in PROBLEMS and any(command in str(error) for command in NO_CLUSTER):
        return UsageError(f"{where}: the server is in no cluster. Write redis:// for one server")
    return StoreUnavailable(f"{where}: {PROBLEMS.get(code) or _problem(error)}")


def _problem(error: Exception) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    if "MaxConnectionsError" in names or str(error) == NONE_FREE:
        return "all connections of the client are in use. Raise its max_connections"
    if "TimeoutError" in names:
        return f"it did not answer in time ({error}). Is it overloaded? Then raise socket_timeout"
    if "MasterNotFoundError" in names:
        return f"no Sentinel knows a primary ({error}). Check the service's name, or wait for the failover"
    if "ConnectionError" in names or "OSError" in names or "RedisClusterException" in names:
        return f"it cannot be reached ({error}). Is it running, and is this its address?"
    return f"the server says: {error}"


def _code(error: Exception) -> str:
    """Return the server's code. A cluster client wraps its servers' errors in its own."""
    inner: BaseException | None = error
    while inner is not None:
        for kind in type(inner).__mro__:
            if kind.__name__ in CODES:
                return CODES[kind.__name__]
        inner = inner.__cause__ or inner.__context__
    return str(error).partition(" ")[0]
