"""What the adapters for HTTP take: their options, a policy's fields among them, and functions of a request."""

from typing import Any, assert_type

from fastapi import FastAPI
from fastapi.routing import APIRoute

from onefold import AsyncGuard, Guard, Policy
from onefold.http import Answer, Body, Request, Unauthorized, asgi, fastapi, flask, wsgi

guard = Guard("memory:")
async_guard = AsyncGuard("memory:")


async def app(scope: Any, receive: Any, send: Any) -> None: ...


def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
    return []


def tenant(request: Request) -> str:
    assert_type(request.header("Authorization"), str | None)
    assert_type(request.headers("X-Tenant"), list[bytes])
    assert_type(request.method, str)
    assert_type(request.query, bytes)
    raise Unauthorized("This token has expired.", challenge='Bearer error="invalid_token"')


def amount(request: Request, body: Body) -> object:
    assert_type(body.read(), bytes)
    assert_type(body.size, int)
    return [request.query, body.digest]


around = asgi.IdempotencyMiddleware(app, guard=async_guard, scope=tenant, keep="7d", wait="5s")
assert_type(around.guard, AsyncGuard)
by_url = wsgi.IdempotencyMiddleware(wsgi_app, guard="sqlite:///onefold.db", scope=tenant, after_crash="hold", lease=60)
assert_type(by_url.guard, Guard)
assert_type(
    fastapi.idempotent_route(guard=async_guard, scope=tenant, fingerprint=amount, max_attempts=2), type[APIRoute]
)
fastapi.idempotent_route(guard=async_guard, scope=tenant, fingerprint=None, policy=Policy(keep="forever"), wait=1)
assert_type(Answer(201, []).body, bytes)

# By the way that frameworks take middleware and views.
FastAPI().add_middleware(asgi.IdempotencyMiddleware, guard=async_guard, scope=tenant, keep="7d", fingerprint=amount)


@flask.idempotent(guard=guard, scope=flask.by_header("X-Api-Key"), keep="7d", wait="5s")
def pay(number: int) -> str:
    return "paid"


assert_type(pay(1), str)


def mistakes() -> None:
    wsgi.IdempotencyMiddleware(wsgi_app, guard=guard)  # type: ignore[call-arg]
    wsgi.IdempotencyMiddleware(wsgi_app, guard=3, scope=tenant)  # type: ignore[arg-type]
    wsgi.IdempotencyMiddleware(wsgi_app, guard=async_guard, scope=tenant)  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=guard, scope=tenant)  # type: ignore[arg-type]
    fastapi.idempotent_route(guard=guard, scope=tenant)  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=async_guard, scope="X-Api-Key")  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=async_guard, scope=tenant, kep="7d")  # type: ignore[call-arg]
    asgi.IdempotencyMiddleware(app, guard=async_guard, scope=tenant, keep=["7d"])  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=async_guard, scope=tenant, after_crash="retry")  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=async_guard, scope=tenant, policy={"keep": 1})  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=async_guard, scope=tenant, fingerprint=tenant)  # type: ignore[arg-type]
