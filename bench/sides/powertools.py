"""AWS Lambda Powertools: `idempotent_function`, on Redis and DynamoDB. It has no async API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.measure import Side
from bench.sides import decorated, library, redis_prefix
from bench.sides.by_hand import dynamo_table
from services.house import House


class LambdaContext:
    """What AWS passes to a Lambda: without it Powertools warns at each call, which costs it time."""

    def get_remaining_time_in_millis(self) -> int:
        return 30_000


def _side(layer: Any, prefix: str) -> Side:
    powertools = library("aws_lambda_powertools.utilities.idempotency")
    config = powertools.IdempotencyConfig()
    config.register_lambda_context(LambdaContext())
    decorate = powertools.idempotent_function(
        data_keyword_argument="payment_id",
        persistence_store=layer,
        config=config,
        key_prefix=prefix,
    )
    return decorated("Powertools", decorate, by_name=True)


@contextmanager
def redis(house: House) -> Iterator[Side]:
    import redis as client

    layers = library("aws_lambda_powertools.utilities.idempotency.persistence.redis")
    with redis_prefix(house) as (url, prefix), client.Redis.from_url(url) as raw:
        yield _side(layers.RedisCachePersistenceLayer(client=raw), prefix)


@contextmanager
def dynamo(house: House) -> Iterator[Side]:
    layers = library("aws_lambda_powertools.utilities.idempotency.persistence.dynamodb")
    with dynamo_table(house, key="id") as (client, table):
        yield _side(layers.DynamoDBPersistenceLayer(table_name=table, boto3_client=client), "bench")
