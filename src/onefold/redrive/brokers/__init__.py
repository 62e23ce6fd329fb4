"""The dead letters of each broker, by the scheme of its URL. Clients are imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

from onefold import UsageError
from onefold._checks import did_you_mean
from onefold.redrive.letters import DeadLetters, Open


class Broker(NamedTuple):
    """The module of a broker, and the extra that installs its client."""

    module: str
    extra: str


BROKERS: Final = {
    "amqp": Broker("rabbitmq", "rabbitmq"),
    "amqps": Broker("rabbitmq", "rabbitmq"),
    "kafka": Broker("kafka", "kafka"),
    "nats": Broker("nats", "nats"),
    "tls": Broker("nats", "nats"),
    "redis": Broker("redis_streams", "redis"),
    "rediss": Broker("redis_streams", "redis"),
    "sqs": Broker("sqs", "sqs"),
}


def open_letters(url: str, name: str) -> DeadLetters:
    """Open the dead letters of this name at the broker with this URL.

    Raises `UsageError` for a URL that names no broker, and `BrokerLost` if the broker does not answer or has no such
    dead letters.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    broker = BROKERS.get(scheme)
    if broker is None:
        known = ", ".join(f"{one}:" for one in BROKERS)
        raise UsageError(f"the broker's URL has to begin with one of {known}{did_you_mean(scheme, list(BROKERS))}")
    try:
        found: Open = cast("Open", import_module(f"onefold.redrive.brokers.{broker.module}").open_letters)
    except ImportError as error:
        raise UsageError(
            f"the client of this broker is not installed ({error.name}): pip install 'onefold[{broker.extra}]'"
        ) from error
    return found(url, name)
