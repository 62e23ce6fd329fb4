"""A Celery task that sends one e-mail, however often it is sent. Run it: python examples/celery_email.py

The two workers are real ones. The messages are files in a folder, so that no server is needed: with
Redis or RabbitMQ only the two URLs change. The shop sends its task twice, as it does after a lost answer, and each
message is delivered twice, as a broker does after a lost acknowledgement.

A mail server knows no keys. So one case is left: under `after_crash="rerun"`, the default, **a worker that is killed
after it has sent the mail, and before that is recorded, sends it twice**. If that must not happen, use
`after_crash="hold"`, as `held_email.py` does. It needs `pip install 'onefold[celery]'`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from celery import Celery
from celery.signals import before_task_publish

from onefold import Guard, current
from onefold.queues.celery import guarded

# Far longer than a worker needs to start; it bounds the wait for it.
PATIENCE: Final = 90.0

OUTBOX: Final = Path("outbox.log")

app = Celery("shop", broker="filesystem://", backend="file://results")
app.conf.broker_transport_options = {
    "data_folder_in": "queue",
    "data_folder_out": "queue",
    "control_folder": "control",
    # Where a message goes once it was read; else it is the folder for temporary files of this machine.
    "store_processed": True,
    "processed_folder": "processed",
    "polling_interval": 0.05,
}
guard = Guard("sqlite:///onefold.db")


@guarded(app, guard, "send-welcome", name="send_welcome", key="user", acks_late=True)
def send_welcome(user: str) -> str:
    message_id = current().key_for("mail")
    with OUTBOX.open("a", encoding="utf-8") as mails:
        mails.write(f"Dear {user}, welcome!\n")
    return message_id


def deliver_twice(body: Any, exchange: str, routing_key: str, headers: Any, properties: Any, **_: Any) -> None:
    """Every message goes out a second time, exactly as it is."""
    with app.producer_or_acquire() as producer:
        producer.publish(body, exchange=exchange, routing_key=routing_key, headers=headers, **properties)


def main() -> None:
    before_task_publish.connect(deliver_twice)
    sent: list[Any] = [send_welcome.delay(user) for user in ("riya", "rahul", "riya")]
    print(f"sent {len(sent)} tasks, and each of them twice")

    with Path("worker.log").open("wb") as log:
        command = [sys.executable, __file__, "worker"]
        workers = [subprocess.Popen(command, stdout=log, stderr=log) for _ in range(2)]
    try:
        answers = [result.get(timeout=PATIENCE) for result in sent]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(PATIENCE)

    print(f"the tasks for riya have one answer: {answers[0] == answers[2]}")
    mails = sorted(OUTBOX.read_text(encoding="utf-8").splitlines())
    print(f"mails that went out: {mails}")
    assert answers[0] == answers[2] != answers[1]
    assert mails == ["Dear rahul, welcome!", "Dear riya, welcome!"]


if __name__ == "__main__" and "worker" in sys.argv:
    app.worker_main(["worker", "--pool", "solo", "--loglevel", "INFO", "--without-gossip", "--without-mingle"])
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        for folder in ("queue", "control", "processed", "results"):
            Path(folder).mkdir()
        main()
        guard.close()
        os.chdir("/")
