"""A client that is killed before it sees its answer, and pays once. Run it: python examples/payments_client.py

The server is `payments_api.py` in a process of its own. The sender is another one: it pays inside an `intent`, whose
key and digest are on disk before anything is sent. It is killed with SIGKILL when the server has charged and the answer
is on its way. Whoever starts it again sends the same key, and gets the answer of the first payment.
It needs `pip install 'onefold[client,http]' fastapi httpx uvicorn`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

import httpx

from onefold.http.client import Retries, Sent, Transport, intent

# Far more than a process needs to start; it bounds the wait for one that does not.
PATIENCE: Final = 60.0


class Doomed(httpx.HTTPTransport):
    """The answer has come, and the process dies before anybody has seen it."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        print(f"the server says {answer.status_code}", flush=True)
        signal.pause()
        return answer


def pay(url: str, order: str, folder: Path, *, doomed: bool = False) -> None:
    """What a sender does with an order: one intent, which ends when the answer is on paper."""
    transport = Transport(Doomed() if doomed else None, retries=Retries(attempts=5, pause=0.05))
    with httpx.Client(transport=transport, base_url=url, headers={"X-Api-Key": "shop"}, timeout=PATIENCE) as client:
        # The server keeps keys for a week: that is its published policy.
        with intent(order, store=f"sqlite:///{folder}/intents.db", server_keeps="7d"):
            answer = client.post("/payments", json={"account": "asha", "amount": 4200})
            # What has to survive belongs inside of the block: after it the intent is over.
            (folder / f"{order}.receipt").write_bytes(answer.content)
        sent: Sent = answer.extensions["onefold"]
        print(f"{order}: {answer.status_code}, attempts {len(sent.attempts)}, replayed {sent.replayed}")


def main(folder: Path) -> None:
    with serving(folder) as url:
        sender = process(url, "order-1", folder, "--doomed")
        assert sender.stdout is not None
        print(f"the first sender pays order-1: {sender.stdout.readline().strip()}; it is killed before it sees that")
        sender.kill()
        sender.communicate()
        assert not (folder / "order-1.receipt").exists()
        assert balance(url) == 5800

        for order in ("order-1", "order-2"):
            told, _ = process(url, order, folder).communicate(timeout=PATIENCE)
            print(f"a new sender pays {told.strip()}")
            assert f"replayed {order == 'order-1'}" in told
        print(f"two orders of 4200, and asha has {balance(url)} of 10000 left")
        assert balance(url) == 1600
        assert (folder / "order-1.receipt").read_bytes().startswith(b'{"id":1,')


def balance(url: str) -> int:
    return int(httpx.get(f"{url}/wallets/asha", timeout=PATIENCE).json()["balance"])


def process(url: str, order: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, url, order, str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def serving(folder: Path) -> Generator[str]:
    """The service on a free port of this machine. Requests wait in the listening socket until it has started."""
    command = ["-m", "uvicorn", "--factory", "payments_api:create_app", "--app-dir", str(Path(__file__).parent)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = subprocess.Popen(
            [sys.executable, *command, "--fd", str(listener.fileno()), "--log-level", "error"],
            env={**os.environ, "PAYMENTS_DB": str(folder / "payments.db")},
            pass_fds=[listener.fileno()],
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.terminate()
            server.wait(PATIENCE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        url, order, folder = sys.argv[1:4]
        pay(url, order, Path(folder), doomed="--doomed" in sys.argv)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
