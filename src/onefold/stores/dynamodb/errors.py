"""Translate the errors of a DynamoDB client into one line that says what happened and what to do.

Errors are known by their code or class, never by their text, and their text is not shown: it may contain a key, or an
access key. The original stays behind the error, as its cause.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from onefold.errors import OnefoldError, StoreUnavailable, UsageError

REFUSED: Final = "ConditionalCheckFailedException"
DENIED: Final = "AccessDeniedException"
NO_TABLE: Final = "ResourceNotFoundException"
TABLE_IN_USE: Final = "ResourceInUseException"
INVALID: Final = "ValidationException"
TOO_MANY_CHANGES: Final = "LimitExceededException"

# Another transaction, or another region, holds the item at the moment.
CONFLICTS: Final = frozenset({"TransactionConflictException", "ReplicatedWriteConflictException"})

_CREDENTIALS: Final = (
    "refuses the credentials. Check the access key, its secret, its session token and the machine's clock, which signs "
    "requests"
)
_THROTTLED: Final = "throttles requests. Raise the capacity or the limits of the table, or deliver more slowly"
_BROKEN: Final = "had an internal error. Deliver it again"

# Messages for people, by DynamoDB's error code.
PROBLEMS: Final = {
    DENIED: "denies {action}. Give the role this permission: dynamodb:{action}",
    "UnrecognizedClientException": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "InvalidSignatureException": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "IncompleteSignature": _CREDENTIALS,
    "IncompleteSignatureException": _CREDENTIALS,
    "MissingAuthenticationToken": _CREDENTIALS,
    "MissingAuthenticationTokenException": _CREDENTIALS,
    "ExpiredToken": "refuses credentials that have expired. Renew them",
    "ExpiredTokenException": "refuses credentials that have expired. Renew them",
    "RequestExpired": _CREDENTIALS,
    "ThrottlingException": _THROTTLED,
    "Throttling": _THROTTLED,
    "ProvisionedThroughputExceededException": _THROTTLED,
    "RequestLimitExceeded": _THROTTLED,
    "InternalServerError": _BROKEN,
    "InternalFailure": _BROKEN,
    "ServiceUnavailable": _BROKEN,
    "TransactionConflictException": "kept finding another transaction on the record. Deliver it again",
    "ReplicatedWriteConflictException": "found the record being written in another region. Deliver it again",
    NO_TABLE: "there is no such table any more. Create it with the command `onefold schema --store URL --apply`",
    TOO_MANY_CHANGES: "refuses {action}: too many tables are being created or changed at once. Try again in a minute",
}

# For these, nothing was sent.
UNREACHED: Final = frozenset({"EndpointConnectionError", "ProxyConnectionError", "ConnectTimeoutError"})

# Messages for errors without an answer, by the name of the class.
UNANSWERED: Final = {
    "NoCredentialsError": "no credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile "
    "with profile=, or give the machine a role",
    "PartialCredentialsError": "the credentials are incomplete: a key without its secret. Set both",
    "CredentialRetrievalError": "the credentials could not be fetched. Check the profile, the role or the process "
    "that provides them",
    "TokenRetrievalError": "the sign-on has ended. Run `aws sso login`",
    "SSOTokenLoadError": "the sign-on has ended. Run `aws sso login`",
    "UnauthorizedSSOTokenError": "the sign-on has ended. Run `aws sso login`",
    "EndpointConnectionError": "the endpoint cannot be reached. Check region=, endpoint_url= and the network",
    "ProxyConnectionError": "the proxy cannot be reached. Check HTTPS_PROXY and the network",
    "SSLError": "the endpoint has no certificate that this machine trusts. Check endpoint_url= and AWS_CA_BUNDLE",
    "ConnectTimeoutError": "the endpoint did not answer in time. Check the network, or raise timeout=",
    "ReadTimeoutError": "the endpoint did not answer in time. Check the network, or raise timeout=",
    "ConnectionClosedError": "the connection was lost before the answer came. Deliver it again",
}

# Messages for mistakes made before anything was sent.
MISCONFIGURED: Final = {
    "NoRegionError": "no region is known. Name it with region=, or set AWS_DEFAULT_REGION",
    "InvalidRegionError": "region= is not the name of a region, such as eu-central-1",
    "UnknownEndpointError": "no endpoint is known for this region. Check region=, or name endpoint_url=",
    "InvalidEndpointDiscoveryConfigurationError": "the endpoint discovery in the AWS configuration is not valid",
    "ProfileNotFound": "there is no such profile in the AWS configuration. Check profile= and AWS_PROFILE",
    "ConfigNotFound": "the AWS configuration file was not found. Check AWS_CONFIG_FILE",
    "ConfigParseError": "the AWS configuration file cannot be read. Check AWS_CONFIG_FILE",
}


class Problem(NamedTuple):
    """An unsuccessful answer: its code, the existing item if it was returned, and the error itself."""

    code: str
    item: dict[str, Any] | None
    error: Exception


def problem_of(error: Exception) -> Problem | None:
    """Return the answer in an error of a client; None if there was no answer."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    # Some services put a namespace before the code.
    code = str(response.get("Error", {}).get("Code", "")).rpartition("#")[2]
    return Problem(code, response.get("Item") or None, error)


def date_of(reply: Any) -> str | None:
    """Return the `Date` of a reply, or of the answer in an error."""
    response = getattr(reply, "response", reply)
    if not isinstance(response, dict):
        return None
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    date = headers.get("date") or headers.get("Date")
    return str(date) if date else None


def refused(problem: Problem, action: str, table: str) -> StoreUnavailable:
    """Return the error for an unexpected answer."""
    message = PROBLEMS.get(problem.code, "refuses {action} with {code}. The cause is shown below this error")
    return StoreUnavailable(f"{label(table)}: {message.format(action=_as_permission(action), code=problem.code)}")


def unanswered(error: Exception, table: str) -> OnefoldError | None:
    """Return the error for a missing answer; None if the error does not come from a client."""
    for kind in type(error).__mro__:
        name = kind.__name__
        if name in MISCONFIGURED:
            return UsageError(f"{label(table)}: {MISCONFIGURED[name]}")
        if name in UNANSWERED:
            problem = StoreUnavailable(f"{label(table)}: {UNANSWERED[name]}")
            problem.reached = name not in UNREACHED
            return problem
        if name == "BotoCoreError" or kind in (OSError, TimeoutError):
            return StoreUnavailable(f"{label(table)}: the client failed with {type(error).__name__}")
    return None


def of_something_else(table: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{label(table)}: this table belongs to something else: its key is not the string `address` alone. Name "
        "another table"
    )


def label(table: str) -> str:
    return f"DynamoDB table {table}"


def _as_permission(action: str) -> str:
    """Write `put_item` as the console and the policies do: `PutItem`."""
    return "".join(part.capitalize() for part in action.split("_"))
