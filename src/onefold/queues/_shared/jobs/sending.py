"""Refuse to send a job without a key, or warn once that its own id is none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

from onefold import MissingKey
from onefold.queues._shared.jobs.arguments import has_key
from onefold.queues._shared.jobs.handler import GuardedJob, headers_of

NO_KEY: Final = (
    "{operation}: this message has no key{where}, and nothing was sent. The id of a message is not one: a sender that "
    "sends again gets another. Send it with send(..., key=...), take the key from an argument (key='order_id'), or "
    "accept the id with require_key=False"
)
ID_IS_NO_KEY: Final = (
    "{operation}: sent without a key, under the id of its message. A redelivery and a retry keep that id, but a sender "
    "that sends again gets another, and it runs again. Said once for each operation"
)


class Keys:
    """Whether the messages of one job have keys."""

    def __init__(self, job: GuardedJob, *, required: bool) -> None:
        self._job = job
        self._required = required
        self._has_warned = False

    def are_missing(self, args: Any, kwargs: Any, headers: Mapping[str, Any]) -> bool:
        """Return whether a message has no key, and gets its own id as one. Raise `MissingKey` if a key is required."""
        job = self._job
        reads = job.handler if job.reads_arguments else None
        if has_key(reads, job.key_of, args, kwargs, headers_of(headers)):
            return False
        if self._required:
            raise MissingKey(NO_KEY.format(operation=job.operation, where=job.where_key_is))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(ID_IS_NO_KEY.format(operation=job.operation), UserWarning, stacklevel=4)
        return True
