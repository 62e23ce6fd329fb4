"""Queues and HTTP take the guard of the right kind, with their options and the fields of a policy as keywords."""

from collections.abc import Callable
from typing import Any, assert_type

from confluent_kafka import Consumer
from fastapi import FastAPI
from fastapi.routing import APIRoute
from flask import Flask

from onefold import AsyncGuard, Guard
from onefold.http import asgi, fastapi, flask, wsgi
from onefold.http.scopes import by_header
from onefold.queues import aio_pika, aws_lambda, confluent_kafka, nats, pika, redis_streams, sqs
from onefold.queues.keys import body, field, header, message_id

guard = Guard("memory:")
async_guard = AsyncGuard("memory:")
key = header("id")


def handle(message: Any) -> None:
    return None


async def handle_async(message: Any) -> None:
    return None


def pay() -> str:
    return "paid"


def right(consumer: Consumer, app: FastAPI, site: Flask) -> None:
    one = pika.guarded(guard, "c", handle, key=key, dead_letter="dead", keep="7d", payload=body())
    assert_type(one, pika.GuardedCallback)
    two = aio_pika.guarded(async_guard, "c", handle_async, key=message_id(), dead_letter="dead", after_crash="skip")
    assert_type(two, aio_pika.GuardedCallback)
    four = nats.guarded(async_guard, "c", handle_async, key=message_id(), dead_letter="dead", concurrency=4, keep="7d")
    assert_type(four, nats.GuardedCallback)
    five = redis_streams.guarded(guard, "c", handle, key=key, stream="s", group="g", dead_letter="dead", keep="7d")
    assert_type(five, redis_streams.GuardedConsumer)
    six = redis_streams.guarded(
        async_guard, "c", handle_async, key=key, stream="s", group="g", dead_letter="dead", min_idle="1m", attempts=3
    )
    assert_type(six, redis_streams.AsyncGuardedConsumer)
    seven = sqs.guarded(guard, "c", handle, client=app, queue="u", key=key, dead_letter=sqs.OWN_REDRIVE, keep="7d")
    assert_type(seven, sqs.Worker)
    eight = sqs.guarded_async(async_guard, "c", handle_async, client=app, queue="u", key=key, dead_letter="d", batch=5)
    assert_type(eight, sqs.AsyncWorker)
    nine = aws_lambda.guarded_messages(guard, "c", handle, key=key, report="raise", keep="7d")
    assert_type(nine, aws_lambda.GuardedMessages)
    three = confluent_kafka.guarded(
        guard, "c", handle, consumer=consumer, key=field("id"), dead_letter="stop", attempts=3, keep="7d"
    )
    assert_type(three, confluent_kafka.Guarded)

    scope = by_header("X-Api-Key")
    assert_type(asgi.IdempotencyMiddleware(app, guard=async_guard, scope=scope), asgi.IdempotencyMiddleware)
    assert_type(asgi.IdempotencyMiddleware(app, guard="memory:", scope=scope), asgi.IdempotencyMiddleware)
    assert_type(wsgi.IdempotencyMiddleware(site.wsgi_app, guard=guard, scope=scope), wsgi.IdempotencyMiddleware)
    assert_type(fastapi.idempotent_route(guard=async_guard, scope=scope, required=True), type[APIRoute])
    assert_type(flask.idempotent(guard=guard, scope=scope)(pay), Callable[[], str])


def wrong(consumer: Consumer, app: FastAPI, site: Flask) -> None:
    pika.guarded(guard, "c", handle, key=key, dead_letter="dead", kep="7d")  # type: ignore[call-arg]
    pika.guarded(guard, "c", handle, key=key, dead_letter="dead", payload=3)  # type: ignore[arg-type]
    pika.guarded(guard, "c", handle, key=key)  # type: ignore[call-arg]
    pika.guarded(guard, "c", 3, key=key, dead_letter="dead")  # type: ignore[arg-type]
    pika.guarded(async_guard, "c", handle, key=key, dead_letter="dead")  # type: ignore[arg-type]
    aio_pika.guarded(guard, "c", handle_async, key=key, dead_letter="dead")  # type: ignore[arg-type]
    aio_pika.guarded(async_guard, "c", handle_async, key="id", dead_letter="dead")  # type: ignore[arg-type]
    nats.guarded(guard, "c", handle_async, key=key, dead_letter="dead")  # type: ignore[arg-type]
    nats.guarded(async_guard, "c", handle_async, key=key, dead_letter="dead", kep="7d")  # type: ignore[call-arg]
    sqs.guarded(async_guard, "c", handle, client=app, queue="u", key=key, dead_letter="d")  # type: ignore[arg-type]
    sqs.guarded(guard, "c", handle, client=app, queue="u", key=key, dead_letter="d", kep="7d")  # type: ignore[call-arg]
    aws_lambda.guarded_messages(guard, "c", handle, key=key, report="all")  # type: ignore[arg-type]
    consumer_of: dict[str, Any] = {}
    confluent_kafka.guarded(guard, "c", handle, consumer=consumer_of, key=key, dead_letter="stop")  # type: ignore[arg-type]
    confluent_kafka.guarded(guard, "c", handle, consumer=consumer, key=key, dead_letter="drop")  # type: ignore[arg-type]
    confluent_kafka.guarded(guard, "c", handle, consumer=consumer, key=key, dead_letter="stop", keep=[])  # type: ignore[arg-type]

    scope = by_header("X-Api-Key")
    asgi.IdempotencyMiddleware(app, guard=guard, scope=scope)  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=3, scope=scope)  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, guard=async_guard)  # type: ignore[call-arg]
    wsgi.IdempotencyMiddleware(site.wsgi_app, guard=async_guard, scope=scope)  # type: ignore[arg-type]
    wsgi.IdempotencyMiddleware(site.wsgi_app, guard=guard, scope="shop")  # type: ignore[arg-type]
    fastapi.idempotent_route(guard=guard, scope=scope)  # type: ignore[arg-type]
    flask.idempotent(guard=async_guard, scope=scope)  # type: ignore[arg-type]
    flask.idempotent(guard=guard, scope=scope, requierd=True)  # type: ignore[call-arg]
