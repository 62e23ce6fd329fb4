"""E-mails whose worker is killed are held, until a probe settles them. Run it: python examples/held_email.py

A mail server takes no idempotency key: sending again might be a second mail, not sending might be none. Under
`after_crash="hold"` nothing is guessed. The mail server's outbox log knows, and a job asks it for whatever is held.
The workers are real processes, and their death is a real SIGKILL: one dies after its mail went out, one before.
It needs `pip install onefold`, and no extra.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from onefold import Done, Guard, Held, InProgress, Policy, Rerun

# Long leases are for long handlers; a short one keeps this example short.
POLICY: Final = Policy(keep="forever", lease="2s", after_crash="hold")

# Far longer than a lease, or than a process needs to start; it bounds the wait for them.
PATIENCE: Final = 60.0


class MailServer:
    """Someone else's service. It has no idempotency keys, but a log of what went out."""

    def __init__(self, outbox: Path) -> None:
        self._outbox = outbox

    def send(self, address: str, message_id: str) -> None:
        with self._outbox.open("a", encoding="utf-8") as log:
            log.write(f"{message_id} to {address}\n")

    def sent(self) -> list[str]:
        return self._outbox.read_text(encoding="utf-8").splitlines() if self._outbox.exists() else []


def deliver(folder: Path, user: str, dies: str = "", doomed: Connection | None = None) -> str:
    """What a worker does with the message "welcome this user". One that is doomed dies before or after the mail."""
    server = MailServer(folder / "outbox.log")

    def stop(where: str) -> None:
        if doomed is not None and dies == where:
            doomed.send(where)
            doomed.recv()  # for ever: it is killed here

    with Guard(f"sqlite:///{folder / 'onefold.db'}", policy=POLICY) as guard:

        @guard.idempotent("welcome", key="user")
        def welcome(user: str) -> str:
            stop("before")
            server.send(f"{user}@example.org", message_id=f"welcome-{user}")
            stop("after")
            return f"welcomed {user}"

        return welcome(user)


def deliver_and_be_killed(folder: Path, user: str, dies: str) -> None:
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=deliver, args=(folder, user, dies, there), daemon=True)
    worker.start()
    there.close()
    assert here.poll(PATIENCE), "the worker did not get to its mail"
    worker.kill()
    worker.join()


def redeliver_until_held(folder: Path, user: str) -> Held:
    """A queue delivers again and again: in progress while the lease lives, and then held."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        try:
            deliver(folder, user)
        except InProgress as busy:
            time.sleep(min(busy.retry_after, PATIENCE))
        except Held as held:
            return held
        else:
            raise AssertionError("it ran again by itself")
    raise AssertionError("it was not held in time")


def settle(folder: Path, user: str) -> str:
    """The probe: the outbox log says what happened, and the record is resolved accordingly."""
    went_out = f"welcome-{user} to {user}@example.org" in MailServer(folder / "outbox.log").sent()
    with Guard(f"sqlite:///{folder / 'onefold.db'}", policy=POLICY) as guard:
        resolution = Done(f"welcomed {user}") if went_out else Rerun()
        guard.resolve("welcome", user, resolution, by="outbox probe", reason=f"in the outbox: {went_out}")
    return "is in the outbox, so it is done" if went_out else "is not in the outbox, so it may run again"


def main(folder: Path) -> None:
    server = MailServer(folder / "outbox.log")
    for user, dies in (("riya", "after"), ("rahul", "before")):
        deliver_and_be_killed(folder, user, dies)
        print(f"the worker for {user} was killed {dies} its mail went out")
        print(f"  delivered again: {redeliver_until_held(folder, user).remark}")
        print(f"  the probe: the mail {settle(folder, user)}")
        print(f"  delivered again: {deliver(folder, user)}")

    print(f"mails that went out: {', '.join(server.sent())}")
    assert server.sent() == ["welcome-riya to riya@example.org", "welcome-rahul to rahul@example.org"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
