"""Describe the header in an OpenAPI schema: the parameter, and our responses. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from onefold.http._answers.rules import REUSED, Rules
from onefold.http._requests.keys import HEADER
from onefold.http._shared.options import nearest
from onefold.keys import KEY_MAX

LOG = logging.getLogger("onefold.http")

# The two forms of a key that a client should send: quoted, and bare. Escapes inside quotes are accepted, too.
PATTERN: Final = rf'^("[ !#-\[\]-~]{{1,{KEY_MAX}}}"|[!#-+\--~]{{1,{KEY_MAX}}})$'

PARAMETER: Final[dict[str, Any]] = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "Identifies this operation: the same key for every retry of it, a new key for a new operation.",
    "schema": {"type": "string", "pattern": PATTERN},
    "example": '"8e03978e-40d5-43dd-bc93-6894a57f9324"',
}

_PROBLEM: Final[dict[str, Any]] = {
    "application/problem+json": {
        "schema": {
            "type": "object",
            "required": ["type", "title", "status", "detail", "code"],
            "properties": {
                "type": {"type": "string", "format": "uri-reference"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
                "code": {"type": "string"},
            },
        }
    }
}

Responses = dict[int | str, dict[str, Any]]

_CONFLICT: Final = "A request with this Idempotency-Key is in progress, or its outcome is unknown"

# By the status of a key that was used with another request.
_DESCRIPTIONS: Final[Mapping[int, Mapping[int, str]]] = {
    400: {
        400: "The Idempotency-Key is missing, malformed or used with another request, or the request is invalid",
        409: _CONFLICT,
    },
    422: {
        400: "The Idempotency-Key is missing or malformed",
        409: _CONFLICT,
        422: "The Idempotency-Key was used with another request, or the request is invalid",
    },
}


def responses(rules: Rules) -> Responses:
    """Return our responses to a guarded operation, by status."""
    found = _DESCRIPTIONS[REUSED.get(rules, 422)]
    return {status: {"description": text, "content": _PROBLEM} for status, text in found.items()}


def described(
    schema: dict[str, Any], paths: Iterable[str] | None, methods: Iterable[str], *, required: bool, rules: Rules
) -> dict[str, Any]:
    """Add the header and its responses to every guarded operation of the schema.

    Log a warning for a path that the schema does not have: nobody would see the header there.
    """
    chosen = None if paths is None else set(paths)
    for path in sorted((chosen or set()) - set(schema.get("paths", {}))):
        LOG.warning("describe: the schema has no path %r%s", path, nearest(path, schema.get("paths", {})))
    verbs = {method.lower() for method in methods}
    for path, operations in schema.get("paths", {}).items():
        if chosen is not None and path not in chosen:
            continue
        for verb in verbs & set(operations):
            operation = operations[verb]
            operation.setdefault("parameters", []).append({**PARAMETER, "required": required})
            for status, response in responses(rules).items():
                known = operation.setdefault("responses", {}).setdefault(
                    str(status), {"description": response["description"]}
                )
                known.setdefault("content", {}).update(response["content"])
    return schema
