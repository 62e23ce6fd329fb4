"""An RQ job that sends one e-mail, however often it is sent. Run it: python examples/rq_email.py

It needs a Redis: redis://localhost:6379/0, or the one that ONEFOLD_REDIS_URL names. The worker is a real one, which
forks a work horse for each job. The shop sends its job twice, as it does after a lost answer; and the work horse of
one job is killed after the mail was sent and recorded, before RQ knows: RQ retries it, and no second mail goes out.

A mail server knows no keys. So one case is left: under `after_crash="rerun"`, the default, **a work horse that is
killed after it has sent the mail, and before that is recorded, sends it twice** when the job is retried. If that must
not happen, use `after_crash="hold"`, as `held_email.py` does. It needs `pip install 'onefold[rq]'`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from redis import Redis
from rq import Queue, Retry

from onefold import Event, Guard, current
from onefold.events import Kind
from onefold.queues.rq import guarded, send

# Far longer than a worker needs, in seconds; it bounds the wait for it.
PATIENCE: Final = 90.0

OUTBOX: Final = Path("outbox.log")
KILLED: Final = Path("killed")
URL: Final = os.environ.get("ONEFOLD_REDIS_URL", "redis://localhost:6379/0")


def kill_once(event: Event) -> None:
    """Kill the first work horse that has recorded its work, before RQ is told."""
    if event.kind is Kind.FINISHED and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)


guard = Guard("sqlite:///onefold.db", on_event=kill_once)


@guarded(guard, "send-welcome", key="user")
def send_welcome(user: str) -> str:
    message_id = current().key_for("mail")
    with OUTBOX.open("a", encoding="utf-8") as mails:
        mails.write(f"Dear {user}, welcome!\n")
    return message_id


def main(queue: Queue) -> None:
    for user in ("riya", "rahul", "riya"):
        # By its name: RQ refuses functions of the program that was started.
        send(queue, "rq_email.send_welcome", (user,), key=user, retry=Retry(max=3))
    print(f"sent {len(queue)} jobs")

    folder = str(Path(__file__).parent)
    command = [sys.executable, "-m", "rq.cli", "worker", "--burst", "--url", URL, "--path", folder, queue.name]
    with Path("worker.log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=log, timeout=PATIENCE, check=True)

    print(f"a work horse was killed: {KILLED.exists()}")
    mails = sorted(OUTBOX.read_text(encoding="utf-8").splitlines())
    print(f"mails that went out: {mails}")
    assert mails == ["Dear rahul, welcome!", "Dear riya, welcome!"]
    assert len(queue.finished_job_registry) == 3


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        connection: Any = Redis.from_url(URL)  # pyright: ignore[reportUnknownMemberType]
        mails = Queue(f"onefold-example-{os.getpid()}", connection=connection)
        main(mails)
        mails.delete(delete_jobs=True)
        connection.close()
        guard.close()
        os.chdir("/")
