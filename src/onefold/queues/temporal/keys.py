"""The keys of activities: what is the same for all attempts of one of them, and for no other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from temporalio import activity

from onefold import MissingKey
from onefold.keys import KEY_MAX
from onefold.queues.keys import Message

# Begins a key whose parts are too long to be one: Temporal's own limit for an id is 1,000 bytes.
DIGESTED: Final = "sha256:"


class ActivityKey:
    """A key that names the activity which runs here. It reads no argument."""

    def __init__(self, *, of_run: bool) -> None:
        self._of_run = of_run

    def __call__(self, message: Message) -> str:  # noqa: ARG002 - as every key
        info = activity.info()
        workflow = info.workflow_id or ""
        if self._of_run:
            # An activity that a client has started has no workflow, and a run of its own.
            run = info.workflow_run_id or info.activity_run_id or ""
            return _joined((info.namespace, workflow, run, info.activity_id))
        if info.activity_id.isdecimal():
            raise MissingKey(
                f"the activity id is {info.activity_id}, a number that Temporal has given it, and that starts again in "
                "each run of the workflow: per_workflow() needs one of yours, execute_activity(..., "
                "activity_id='charge')"
            )
        return _joined((info.namespace, workflow, info.activity_id))


def per_run() -> ActivityKey:
    """Name the activity by its namespace, workflow id, run id and activity id. This is the default.

    All attempts of an activity have one key. Continue-As-New, a retry of the whole workflow, a reset, and another
    workflow with the same id are other runs: their activities run, too.
    """
    return ActivityKey(of_run=True)


def per_workflow() -> ActivityKey:
    """Name the activity by its namespace, workflow id and activity id, in whichever run of the workflow.

    After a reset, a retry of the workflow, Continue-As-New or a second start under the same id, an activity with the
    same id gets the stored result, as long as it is kept. The workflow has to choose the `activity_id`: one that
    Temporal has numbered is refused, because another run numbers its activities anew.
    """
    return ActivityKey(of_run=False)


def _joined(parts: Iterable[str]) -> str:
    """Build one key, each part prefixed with its length, so that no two lists collide."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return text if len(text) <= KEY_MAX else DIGESTED + hashlib.sha256(text.encode()).hexdigest()
