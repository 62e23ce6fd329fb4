"""Kafka: the retention of a topic, as `kafka-configs --describe` shows it, through confluent-kafka.

More in the URL are settings of the client: `kafka://broker:9093?security.protocol=SSL`.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from onefold.lint.brokers.answers import BROKER, Answer, Silent
from onefold.lint.settings import kafka
from onefold.lint.settings.found import Wrong

# What a topic has; the settings of producers and consumers are in none of its answers.
OF_A_TOPIC: Final = ("retention.ms", "cleanup.policy")


def ask(url: str, queue: str, timeout: float) -> Answer:
    from confluent_kafka import KafkaException

    parts = urlsplit(url)
    # Its log would go to standard error.
    options = dict(parse_qsl(parts.query)) | {"bootstrap.servers": parts.netloc, "log_level": "0"}
    try:
        told = described(options, queue, timeout)
    except KafkaException as error:
        # Without its text, which has the addresses of the brokers.
        raise Silent(f"it does not tell the configuration of the topic: {error.args[0].name()}") from None
    except (OSError, ValueError, TypeError) as error:
        raise Silent(f"it does not tell the configuration of the topic: {type(error).__name__}") from None
    lines = [kafka.Line(BROKER, None, name, told[name]) for name in OF_A_TOPIC if name in told]
    try:
        return Answer(kafka.judged(lines))
    except Wrong as error:
        raise Silent(str(error)) from None


def described(options: dict[str, Any], topic: str, timeout: float) -> dict[str, Any]:
    """Return the settings of a topic, the defaults of its broker among them."""
    from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient(options)
    (answer,) = admin.describe_configs([resource], request_timeout=timeout).values()
    return {name: entry.value for name, entry in answer.result(timeout=timeout).items()}
