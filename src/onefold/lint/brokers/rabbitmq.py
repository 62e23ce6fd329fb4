"""RabbitMQ: whether a queue exists, over AMQP; and its arguments, policy and dead letters, from the management API."""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from onefold.health.report import Check, counted, green, unknown
from onefold.lint.brokers.answers import BROKER, Answer, Silent
from onefold.lint.settings.found import Wrong
from onefold.lint.settings.json_text import Document
from onefold.lint.settings.rabbitmq import Queue, judged, queues_of

# A queue with its statistics is some kilobytes; the bindings of an exchange may be many.
ANSWER_MAX: Final = 4 << 20

NOT_FOUND: Final = 404

EFFECTIVE: Final = "effective_policy_definition"

TOLD_BY_MANAGEMENT: Final = (
    "AMQP tells neither the TTL nor the dead letters nor the time-outs of a queue, its policy among them"
)


def over_amqp(url: str, queue: str, timeout: float) -> Answer:
    """Ask by a passive declaration, which creates nothing."""
    import pika
    from pika.exceptions import AMQPError, ChannelClosedByBroker

    try:
        parameters = pika.URLParameters(url)
    except (ValueError, TypeError) as error:
        raise Silent(f"the broker's URL cannot be used ({type(error).__name__})") from None
    parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = timeout
    try:
        with _quiet("pika"), pika.BlockingConnection(parameters) as connection:
            told = connection.channel().queue_declare(queue, passive=True).method
    except ChannelClosedByBroker as error:
        raise Silent(f"{error.reply_text}") from None
    except (AMQPError, OSError) as error:
        raise Silent(f"it cannot be reached: {type(error).__name__}") from None
    fix = "Name its management API as the broker, http://user:password@host:15672/vhost, or definitions as settings"
    return Answer(
        (), (_exists(queue, told.message_count, told.consumer_count), unknown("retention", TOLD_BY_MANAGEMENT, fix))
    )


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library from logging what the report says in one line."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def over_management(url: str, queue: str, timeout: float) -> Answer:
    """Ask the management API; the path of the URL is the virtual host, `%2F` if there is none.

    Its answers are judged as exported definitions are.
    """
    vhost = unquote(urlsplit(url).path.strip("/")) or "/"
    api = _Api(url, timeout)
    told = [api.get("queues", vhost, queue)]
    try:
        (own,) = _queues(api, vhost, told)
        bindings = _dead_letter_bindings(api, own)
        others = sorted({str(one.get("destination")) for one in bindings} - {queue})
        told += [api.get("queues", vhost, name) for name in others]
        own, *letters = _queues(api, vhost, told)
        found = list(judged(own, [own, *letters], bindings))
    except Wrong as error:
        raise Silent(str(error)) from None
    return Answer(found, (_exists(queue, told[0].get("messages"), told[0].get("consumers")),))


def _dead_letter_bindings(api: _Api, own: Queue) -> list[Mapping[str, Any]]:
    exchange, key = (own.settings.get(f"dead-letter-{name}") for name in ("exchange", "routing-key"))
    if exchange is None:
        return []
    if exchange.value == "":
        return [{"source": "", "destination": own.name if key is None else key.value}]
    found = api.get_list("exchanges", own.vhost, str(exchange.value), "bindings", "source")
    return [one for one in found if one.get("destination_type") == "queue"]


def _queues(api: _Api, vhost: str, told: Sequence[Mapping[str, Any]]) -> list[Queue]:
    """Return the queues with the policies that apply to them.

    The API knows what applies to a queue some seconds after the queue was declared; until then, its policies are asked.
    """
    policies = [_as_policy(one) for one in told if EFFECTIVE in one]
    if len(policies) < len(told):
        policies += api.get_list("policies", vhost)
    return list(queues_of(Document(BROKER, {"queues": [*told], "policies": policies}, {})))


def _as_policy(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what applies to a queue, a policy of operators among it, as a policy for this queue alone."""
    return {
        "name": told.get("policy") or told.get("operator_policy"),
        "vhost": told.get("vhost", "/"),
        "pattern": f"^{re.escape(str(told.get('name')))}$",
        "priority": sys.maxsize,
        # Without any, the API has an empty list in the place of an object.
        "definition": told[EFFECTIVE] or {},
    }


def _exists(queue: str, messages: object, consumers: object) -> Check:
    # Just after it was declared, the API has not counted yet.
    said = [
        counted(number, what)
        for number, what in ((messages, "message"), (consumers, "consumer"))
        if isinstance(number, int)
    ]
    return green("queue", f"{queue} has {' and '.join(said)}" if said else f"{queue} exists")


class _Api:
    """The management API of one broker."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        login = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._authorization = f"Basic {base64.b64encode(login.encode()).decode()}"
        self._base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/api"
        self._timeout = timeout

    def get(self, *path: str) -> Mapping[str, Any]:
        found = self._get(path)
        if not isinstance(found, Mapping):
            raise Silent("this is not RabbitMQ's management API")
        return found

    def get_list(self, *path: str) -> list[Mapping[str, Any]]:
        found = self._get(path)
        return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []

    def _get(self, path: tuple[str, ...]) -> Any:
        url = "/".join([self._base, *(quote(part, safe="") for part in path)])
        request = urllib.request.Request(url, headers={"Authorization": self._authorization})  # noqa: S310 - http(s)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:  # noqa: S310
                return json.loads(reply.read(ANSWER_MAX))
        except urllib.error.HTTPError as error:
            if error.code == NOT_FOUND:
                raise Silent(f"there is no {' '.join(path[:1]).removesuffix('s')} {path[2]!r} in {path[1]!r}") from None
            raise Silent(f"the management API answers {error.code} {error.reason}") from None
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "reason", error)
            raise Silent(f"the management API cannot be reached: {type(reason).__name__}") from None
