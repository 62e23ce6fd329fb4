"""The payments service in Flask: a wallet that is charged once. Run it: python examples/payments_flask.py

The middleware remembers answers. Below it the view owns its transaction, and `within` writes the record of the charge
into it: both commit, or neither. The key of the charge is derived from the client's, so that a retry finds it.
It needs `pip install 'onefold[http]' flask`.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import flask

from onefold import Guard, current
from onefold.http.flask import IdempotencyMiddleware, by_header


def create_app(path: Path) -> flask.Flask:
    guard = Guard(f"sqlite:///{path}")
    app = flask.Flask("payments")

    @app.post("/payments")
    def pay() -> Any:
        account, amount = flask.request.json["account"], flask.request.json["amount"]
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")

            def charge() -> int:
                connection.execute("UPDATE wallet SET balance = balance - ? WHERE account = ?", (amount, account))
                (left,) = connection.execute("SELECT balance FROM wallet WHERE account = ?", (account,)).fetchone()
                return int(left)

            charged = guard.within(connection).run("charge", current().key_for("charge"), charge, returns=int)
        return {"charged": amount, "balance": charged.value}, 201

    app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, guard=guard, scope=by_header("X-Api-Key"), required=["/payments"]
    )
    return app


def main(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
        connection.execute("INSERT INTO wallet VALUES ('asha', 10000)")
    client = create_app(path).test_client()

    def pay(key: str, amount: int) -> Any:
        headers = {"X-Api-Key": "shop", "Idempotency-Key": key}
        answer = client.post("/payments", json={"account": "asha", "amount": amount}, headers=headers)
        replayed = "replayed" if "Idempotent-Replayed" in answer.headers else ""
        print(f"  {key} {amount:>6}   {answer.status_code} {replayed}")
        return answer

    print("order-1 is sent three times, and once with another amount")
    answers = [pay("order-1", 4200) for _ in range(3)]
    assert {one.data for one in answers} == {b'{"balance":5800,"charged":4200}\n'}
    assert pay("order-1", 9900).status_code == 422
    assert pay("order-2", 800).json == {"charged": 800, "balance": 5000}
    with closing(sqlite3.connect(path)) as connection:
        (balance,) = connection.execute("SELECT balance FROM wallet").fetchone()
    print(f"two orders, and asha has {balance} left")
    assert balance == 5000


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "payments.db")
