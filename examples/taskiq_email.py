"""A taskiq task that sends one e-mail, however often it is sent. Run it: python examples/taskiq_email.py

It needs a Redis: redis://localhost:6379/0, or the one that ONEFOLD_REDIS_URL names. The worker is a real one, which is
killed after a mail was sent and recorded, before its message is acknowledged: another one gets the message again, and
no second mail goes out. The shop sends one of its messages twice, as it does after a lost answer.

A mail server knows no keys. So one case is left: under `after_crash="rerun"`, the default, **a worker that is killed
after it has sent the mail, and before that is recorded, sends it twice**. If that must not happen, use
`after_crash="hold"`, as `held_email.py` does. It needs `pip install 'onefold[taskiq]' taskiq-redis`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from onefold import Event, Guard, current
from onefold.events import Kind
from onefold.queues.taskiq import guarded

# Far longer than a worker needs to start, in seconds; it bounds the wait for it.
PATIENCE: Final = 90.0

OUTBOX: Final = Path("outbox.log")
KILLED: Final = Path("killed")
URL: Final = os.environ.get("ONEFOLD_REDIS_URL", "redis://localhost:6379/0")

# A message whose worker was silent for half a second is given to another one.
broker = RedisStreamBroker(URL, queue_name="onefold-example-taskiq", idle_timeout=500, xread_block=100)
results: RedisAsyncResultBackend[Any] = RedisAsyncResultBackend(URL, result_ex_time=600)
broker.with_result_backend(results)


def kill_once(event: Event) -> None:
    """Kill the first worker that has recorded its work, before its message is acknowledged."""
    if event.kind is Kind.FINISHED and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)


guard = Guard("sqlite:///onefold.db", on_event=kill_once)


@guarded(guard, "send-welcome", broker=broker, task_name="send-welcome", key="user")
def send_welcome(user: str) -> str:
    message_id = current().key_for("mail")
    with OUTBOX.open("a", encoding="utf-8") as mails:
        mails.write(f"Dear {user}, welcome!\n")
    return message_id


@broker.task("look-around")
async def look_around() -> None:
    """Do nothing: taskiq-redis looks for abandoned messages after it has read a new one."""


async def main() -> None:
    await broker.startup()
    sent = [await send_welcome.kiq(user) for user in ("riya", "rahul", "riya")]
    print(f"sent {len(sent)} messages")

    while not all([await message.is_ready() for message in sent]):
        await look_around.kiq()
        await asyncio.sleep(0.2)
    answers = [(await message.get_result()).return_value for message in sent]
    await broker.shutdown()

    print(f"a worker was killed: {KILLED.exists()}; the messages for riya have one answer: {answers[0] == answers[2]}")
    mails = sorted(OUTBOX.read_text(encoding="utf-8").splitlines())
    print(f"mails that went out: {mails}")
    assert answers[0] == answers[2] != answers[1]
    assert mails == ["Dear rahul, welcome!", "Dear riya, welcome!"]


if __name__ == "__main__":
    folder = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        command = [sys.executable, "-m", "taskiq", "worker", "taskiq_email:broker", "--app-dir", folder, "-w", "1"]
        # One at a time, so that no other mail is on its way when the worker is killed.
        command += ["--max-async-tasks", "1"]
        with Path("worker.log").open("wb") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            asyncio.run(asyncio.wait_for(main(), PATIENCE))
        finally:
            # With its children: on Redis, a worker of taskiq 0.13 does not end when it is asked to.
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(PATIENCE)
        os.chdir("/")
