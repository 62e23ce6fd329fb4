"""A payments service that charges once, however often it is asked. Run it: python examples/payments_api.py

The middleware remembers answers, so that a client that retries gets the same one. Below it the wallet is charged by
`transactional`, under a key derived from the client's: charge and record commit together. So not even a crash
between the commit and the answer charges twice. Serve it: uvicorn --app-dir examples --factory payments_api:create_app
It needs `pip install 'onefold[http]' fastapi httpx uvicorn`.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from onefold import TX, AsyncGuard, Policy, current
from onefold.http.fastapi import IdempotencyMiddleware, by_header, describe

POLICY_URL = "https://payments.example/idempotency"


class Payment(BaseModel):
    account: str = Field(min_length=1, max_length=100, pattern="^[a-z]+$", examples=["asha"])
    amount: int = Field(gt=0, le=1_000_000, examples=[4200])


class Receipt(BaseModel):
    id: int
    account: str
    amount: int
    balance: int


class Wallet(BaseModel):
    account: str
    balance: int


# A week, so that a client may retry over a weekend. This is what the published policy promises.
POLICY = Policy(keep="7d")


def create_app(database: str | None = None, policy: Policy = POLICY) -> FastAPI:
    path = database or os.environ.get("PAYMENTS_DB", "payments.db")
    guard = AsyncGuard(f"sqlite:///{path}", policy=policy)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        create_tables(path)
        async with guard:
            yield

    app = FastAPI(title="Payments", lifespan=lifespan)
    app.add_middleware(
        IdempotencyMiddleware,
        guard=guard,
        scope=by_header("X-Api-Key"),
        required=["/payments"],
        policy_url=POLICY_URL,
    )

    @guard.transactional("charge", key="charge_id", returns=Receipt)
    async def charge(charge_id: str, payment: Payment, *, tx: sqlite3.Connection = TX) -> Receipt:
        found = tx.execute("SELECT balance FROM wallet WHERE account = ?", (payment.account,)).fetchone()
        if found is None:
            raise HTTPException(404, "There is no such account.")
        if found[0] < payment.amount:
            raise HTTPException(402, "The balance is too low.")
        values = (payment.amount, payment.account)
        tx.execute("UPDATE wallet SET balance = balance - ? WHERE account = ?", values)
        made = tx.execute("INSERT INTO payment (charge_id, amount, account) VALUES (?, ?, ?)", (charge_id, *values))
        return Receipt(id=made.lastrowid or 0, **payment.model_dump(), balance=found[0] - payment.amount)

    @app.post("/payments", status_code=201, responses={402: {}, 404: {}})
    async def pay(payment: Payment) -> Receipt:
        return await charge(current().key_for("charge"), payment)

    @app.get("/wallets/{account}", responses={404: {}})
    async def wallet(account: str) -> Wallet:
        with closing(sqlite3.connect(path)) as connection:
            found = connection.execute("SELECT balance FROM wallet WHERE account = ?", (account,)).fetchone()
        if found is None:
            raise HTTPException(404, "There is no such account.")
        return Wallet(account=account, balance=found[0])

    describe(app, paths=["/payments"], required=True)
    return app


def create_tables(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript("""
            CREATE TABLE IF NOT EXISTS wallet (account TEXT PRIMARY KEY, balance INTEGER NOT NULL CHECK (balance >= 0));
            CREATE TABLE IF NOT EXISTS payment (
                id INTEGER PRIMARY KEY, charge_id TEXT NOT NULL UNIQUE, account TEXT NOT NULL, amount INTEGER NOT NULL
            );
            INSERT OR IGNORE INTO wallet VALUES ('asha', 10000), ('riya', 500);
        """)


async def main(folder: Path) -> None:
    app = create_app(str(folder / "payments.db"))
    # Without a server: requests go to the application as they are. `payments_client.py` has a real one.
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):

        async def pay(key: str | None, amount: int, *, account: str = "asha", caller: str = "shop") -> httpx.Response:
            headers = {"X-Api-Key": caller, **({} if key is None else {"Idempotency-Key": key})}
            answer = await client.post("/payments", json={"account": account, "amount": amount}, headers=headers)
            replayed = "replayed" if "idempotent-replayed" in answer.headers else ""
            print(f"  {caller:6} {key or '(no key)':8} {amount:>6}   {answer.status_code} {replayed}")
            return answer

        print("the shop pays 4200 for asha, and never hears of it; it retries, twice")
        first, *retries = [await pay("order-1", 4200) for _ in range(3)]
        assert {one.content for one in retries} == {first.content}

        print("what is not the same request is refused, and so is one without a key")
        assert (await pay("order-1", 9900)).status_code == 422
        assert (await pay(None, 4200)).status_code == 400

        print("another order, another caller with the same key, and a balance that is too low")
        assert (await pay("order-2", 800)).status_code == 201
        assert (await pay("order-1", 1000, caller="bakery")).status_code == 201
        assert [(await pay("order-3", 9999, account="riya")).status_code for _ in range(2)] == [402, 402]

        balance = (await client.get("/wallets/asha")).json()["balance"]
    with closing(sqlite3.connect(folder / "payments.db")) as connection:
        (payments,) = connection.execute("SELECT COUNT(*) FROM payment").fetchone()
    print(f"{payments} payments, and asha has {balance} left")
    assert (payments, balance) == (3, 4000)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
