"""The payments service in Django: a wallet that is charged once. Run it: python examples/payments_django.py

The middleware remembers answers. Below it the wallet is charged by `transactional`, in a block of Django's `atomic()`:
charge and record commit together, or neither does. The key of the charge is derived from the client's, so that a retry
finds it. It needs `pip install 'onefold[django,http]'`.
"""

# pyright: basic
# Django has no types of its own.

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any, cast

import django
from django.conf import settings
from django.db import connection, connections
from django.http import HttpRequest, JsonResponse
from django.urls import path

from onefold import TX, Guard, current
from onefold.http.django import by_header, middleware

guard = Guard("django://default")
idempotency = middleware(guard=guard, scope=by_header("X-Api-Key"), required=["/payments"])


@guard.transactional("charge", key="charge_id")
def charge(charge_id: str, account: str, amount: int, *, tx: Any = TX) -> int:
    with tx.cursor() as cursor:
        cursor.execute("INSERT INTO payment VALUES (%s, %s, %s)", [charge_id, account, amount])
        cursor.execute("UPDATE wallet SET balance = balance - %s WHERE account = %s", [amount, account])
        cursor.execute("SELECT balance FROM wallet WHERE account = %s", [account])
        return int(cursor.fetchone()[0])


def pay(request: HttpRequest) -> JsonResponse:
    asked = json.loads(request.body)
    balance = charge(current().key_for("charge"), asked["account"], asked["amount"])
    return JsonResponse({"charged": asked["amount"], "balance": balance}, status=201)


urlpatterns = [path("payments", pay)]


def configure(folder: Path) -> None:
    settings.configure(
        SECRET_KEY="only for this example",
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF=__name__,
        # Above it belongs whatever authenticates, below it whatever must not happen twice.
        MIDDLEWARE=[f"{__name__}.idempotency"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "payments.db"}},
        LOGGING_CONFIG=None,
    )
    django.setup()
    # It warns of each 422, and this story has one.
    logging.getLogger("django.request").setLevel(logging.ERROR)


def main() -> None:
    from django.test import Client

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE payment (charge_id TEXT PRIMARY KEY, account TEXT, amount INTEGER NOT NULL)")
        cursor.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
        cursor.execute("INSERT INTO wallet VALUES ('asha', 10000)")

    client = cast("Any", Client())

    def send(key: str, amount: int) -> Any:
        headers = {"X-Api-Key": "shop", "Idempotency-Key": key}
        body = {"account": "asha", "amount": amount}
        answer = client.post("/payments", body, content_type="application/json", headers=headers)
        print(f"  {key} {amount:>6}   {answer.status_code} {'replayed' if 'Idempotent-Replayed' in answer else ''}")
        return answer

    print("order-1 is sent three times, and once with another amount")
    answers = [send("order-1", 4200) for _ in range(3)]
    assert {one.content for one in answers} == {b'{"charged": 4200, "balance": 5800}'}
    assert send("order-1", 9900).status_code == 422
    assert send("order-2", 800).json() == {"charged": 800, "balance": 5000}
    with connection.cursor() as cursor:
        cursor.execute("SELECT (SELECT count(*) FROM payment), balance FROM wallet")
        payments, balance = cursor.fetchone()
    print(f"{payments} payments, and asha has {balance} left")
    assert (payments, balance) == (2, 5000)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        configure(Path(temporary))
        main()
        guard.close()
        connections.close_all()
