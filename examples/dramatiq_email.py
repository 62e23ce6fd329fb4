"""A Dramatiq actor that sends one e-mail, however often it is sent. Run it: python examples/dramatiq_email.py

It needs a Redis: redis://localhost:6379/0, or the one that ONEFOLD_REDIS_URL names. The worker is a real one, with four
threads. The shop sends its message twice, as it does after a lost answer, and each message is delivered twice, as a
broker does after a lost acknowledgement.

A mail server knows no keys. So one case is left: under `after_crash="rerun"`, the default, **a worker that is killed
after it has sent the mail, and before that is recorded, sends it twice**. If that must not happen, use
`after_crash="hold"`, as `held_email.py` does. It needs `pip install 'onefold[dramatiq]' 'dramatiq[redis]'`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from onefold import Guard, current
from onefold.queues.dramatiq import guarded

# Far longer than a worker needs to start, in milliseconds; it bounds the wait for it.
PATIENCE: Final = 90_000

OUTBOX: Final = Path("outbox.log")
URL: Final = os.environ.get("ONEFOLD_REDIS_URL", "redis://localhost:6379/0")

broker: Any = RedisBroker(url=URL, namespace="onefold-example")
results: Any = RedisBackend(url=URL, namespace="onefold-example-results")
broker.add_middleware(Results(backend=results))
dramatiq.set_broker(broker)
guard = Guard("sqlite:///onefold.db")


@guarded(guard, "send-welcome", key="user", store_results=True)
def send_welcome(user: str) -> str:
    message_id = current().key_for("mail")
    with OUTBOX.open("a", encoding="utf-8") as mails:
        mails.write(f"Dear {user}, welcome!\n")
    return message_id


def main() -> None:
    sent = [send_welcome.send(user) for user in ("riya", "rahul", "riya")]
    for message in sent:
        broker.enqueue(message)
    print(f"sent {len(sent)} messages, and each of them twice")

    folder = str(Path(__file__).parent)
    command = [sys.executable, "-m", "dramatiq", "--path", folder, "--processes", "1", "--threads", "4"]
    with Path("worker.log").open("wb") as log:
        worker = subprocess.Popen([*command, "dramatiq_email"], stdout=log, stderr=log)
    try:
        answers = [message.get_result(backend=results, block=True, timeout=PATIENCE) for message in sent]
        broker.join("default", timeout=PATIENCE)
    finally:
        worker.terminate()
        worker.wait(PATIENCE / 1000)

    print(f"the messages for riya have one answer: {answers[0] == answers[2]}")
    mails = sorted(OUTBOX.read_text(encoding="utf-8").splitlines())
    print(f"mails that went out: {mails}")
    assert answers[0] == answers[2] != answers[1]
    assert mails == ["Dear rahul, welcome!", "Dear riya, welcome!"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        main()
        guard.close()
        results.client.close()
        broker.client.close()
        os.chdir("/")
