"""The fields of a configuration and their types, and the JSON Schema that editors check against.

Nothing is read here: `configuration` reads, with messages for people.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from onefold._model.policy import AFTER_CRASH, StoreDown
from onefold._model.policy import Mode as PolicyMode

# An environment variable may stand for any text; only its reader knows its value.
VARIABLE: Final = r".*\$\{[A-Za-z_][A-Za-z0-9_]*\}.*"
DURATION: Final = rf"^(forever|[0-9]+(\.[0-9]*)?(ms|s|m|h|d|w)|{VARIABLE})$"
PYTHON_NAME: Final = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*"
DOTTED_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+"

Span = Annotated[str | float, Meta(extra_json_schema={"pattern": DURATION, "minimum": 0})]
Mode = Literal[PolicyMode, "transactional"]
AfterCrash = Annotated[str, Meta(pattern=rf"^({'|'.join(AFTER_CRASH)}|{PYTHON_NAME})$")]

Dotted = Annotated[str, Meta(pattern=rf"^{DOTTED_NAME}$")]


def about(text: str) -> Meta:
    return Meta(description=text)


class StoreEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A place for records."""

    url: Annotated[str, about("The store's URL; ${NAME} is an environment variable")]
    evicts: Annotated[bool | UnsetType, about("Whether it throws records away when it is full, as a cache does")] = (
        UNSET
    )


class TableEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A hand-made table whose rows count as done; its columns are named as in `onefold import`."""

    store: Annotated[str | UnsetType, about("Which of the stores is in its database, if not the guard's own")] = UNSET
    table: Annotated[str, about("The table, or a view")]
    key: Annotated[str, about("The column with the key")]
    operation: Annotated[str | UnsetType, about("The operation of all rows, if not the guard's one")] = UNSET
    operation_column: Annotated[str | UnsetType, about("The column with the operation, if rows differ")] = UNSET
    scope_column: Annotated[str | UnsetType, about("The column with the tenant or caller")] = UNSET
    result_column: Annotated[str | UnsetType, about("The column with the result that duplicates get")] = UNSET
    at: Annotated[str | UnsetType, about("The column that says when it was done")] = UNSET
    keep: Annotated[Span, about("How long a row counts, from that time on")] = "forever"


class GuardEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A guard: where its records are, its policy, and where its duplicates come from."""

    store: Annotated[str, about("Which of the stores keeps its records")]
    migrate_from: Annotated[
        str | TableEntry | UnsetType, about("Which of the stores the records are moving from, or a hand-made table")
    ] = UNSET
    operation: Annotated[str | UnsetType, about("The one operation that it is for")] = UNSET
    operations: Annotated[list[str] | UnsetType, about("The operations that it is for")] = UNSET
    scope: Annotated[str | UnsetType, about("Whose keys they are, if all belong to one tenant")] = UNSET
    money: Annotated[bool, about("A second run costs money: the lint is stricter")] = False
    mode: Annotated[Mode, about("claim: calls to others. transactional: your own rows. seen: harmless twice")] = "claim"
    key: Annotated[str | UnsetType, about("Its source: header:NAME, field:PATH, argument:NAME or message_id")] = UNSET

    keep: Annotated[Span, about("How long a finished record is remembered")] = "24h"
    lease: Annotated[Span, about("How long a claim lives without a heartbeat")] = "30s"
    wait: Annotated[Span, about("How long a duplicate waits for the running one")] = "0s"
    after_crash: Annotated[AfterCrash, about(f"{', '.join(AFTER_CRASH)}, or a probe: module:function")] = "rerun"
    rerun_within: Annotated[Span | UnsetType, about("Past this age a rerun is held instead")] = UNSET
    max_attempts: Annotated[int, Meta(ge=1, description="Handler starts; used up by crashes, it is held")] = 5
    ambiguous_errors: Annotated[
        list[Dotted] | UnsetType, about("Dotted names of exceptions after which the outcome is unknown")
    ] = UNSET
    final_errors: Annotated[list[str], about("Exceptions that are final answers: module:Class")] = []
    store_down: Annotated[StoreDown, about("refuse, or run unprotected")] = "refuse"
    max_result_bytes: Annotated[int, Meta(ge=0, description="A larger result is not stored")] = 1_048_576
    keep_result: Annotated[bool, about("Whether results are stored at all")] = True
    keep_error_text: Annotated[bool, about("Whether a held record also keeps the text of the handler's error")] = False
    cancel_when_lost: Annotated[bool, about("Whether an async handler is cancelled when its claim is lost")] = False
    count_duplicates: Annotated[bool, about("Whether a finished record counts the duplicates that it answers")] = False

    handler_time: Annotated[Span | UnsetType, about("How long the handler takes at most")] = UNSET
    visibility_timeout: Annotated[Span | UnsetType, about("When the queue redelivers what is not done")] = UNSET
    provider_memory: Annotated[Span | UnsetType, about("How long the other side remembers the key it is given")] = UNSET
    duplicates: Annotated[dict[str, Span], about("Where duplicates come from, and how late each can make one")] = {}
    replays: Annotated[dict[str, Span], about("What delivers old messages again, and how old they can be")] = {}
    settings: Annotated[
        str | list[str],
        about("Files with the settings of its queue, read by the lint: kafka.properties, celeryconfig.py"),
    ] = []
    queue: Annotated[str | UnsetType, about("The queue or topic that it reads")] = UNSET
    broker: Annotated[str | UnsetType, about("The URL of its broker, which the doctor asks; ${NAME} is a variable")] = (
        UNSET
    )


class OnefoldFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A configuration of Onefold: onefold.yaml or onefold.toml."""

    stores: Annotated[dict[str, StoreEntry], about("The stores, by name")]
    guards: Annotated[dict[str, GuardEntry], about("The guards, by name")]


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | msgspec.json.schema(OnefoldFile)
