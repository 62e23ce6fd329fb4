"""The service as FastAPI routes, each guarded after its dependencies."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from onefold import AsyncGuard
from onefold.http.fastapi import idempotent_route
from tests.http_service.behaviour import CONFIG, METHODS, RULES, Boom, behave, options_of, raises_below

app = FastAPI()


async def endpoint(request: Request) -> Response:
    body = await request.body()
    answer = await run_in_threadpool(behave, request.url.path, request.url.query, body)
    if raises_below(request.url.query):
        raise Boom("below the claim")
    response: Response
    if answer.streamed:
        response = StreamingResponse(answer.parts, status_code=answer.status)
        response.raw_headers = []
    else:
        response = Response(answer.whole, status_code=answer.status)
        response.raw_headers = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
    response.raw_headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers]
    return response


for prefix, rule in RULES.items():
    guard = AsyncGuard(CONFIG["store"], policy=rule.policy)
    router = APIRouter(route_class=idempotent_route(guard=guard, **options_of(prefix)))
    router.add_api_route(f"/{prefix}/{{rest:path}}", endpoint, methods=METHODS, response_model=None)
    app.include_router(router)
