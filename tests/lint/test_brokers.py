"""Queues of running brokers, judged as the lint judges files. All of them are asked, but Kafka, which is played."""

from __future__ import annotations

import json
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from onefold import Policy
from onefold.config.declared import DeclaredGuard, DeclaredStore
from onefold.health import Grade, Report
from onefold.lint.brokers import examine_queue, kafka
from onefold.lint.brokers.rabbitmq import EFFECTIVE
from services.dynamodb import CREDENTIALS, REGION
from services.fixtures import missing_told
from services.house import House, whole
from services.processes import HOST, free_port
from services.rabbitmq import start_rabbitmq
from services.redis import named_client
from services.servers import Server
from tests.queues.nats_tools import connected
from tests.support import PATIENCE, eventually, in_time

STORE = DeclaredStore(name="database", url="sqlite:///shop.db", kind="sqlite")


def examined(broker: str, queue: str | None, policy: Policy | None = None, **more: Any) -> Report:
    guard = DeclaredGuard(
        name="pay", store=STORE, operations=("pay",), policy=policy or Policy(), broker=broker, queue=queue, **more
    )
    return examine_queue(guard, PATIENCE)


def told(report: Report) -> list[tuple[str, str]]:
    return [(check.name, check.grade.value) for check in report.checks]


def reasons(report: Report, name: str) -> list[str]:
    return [check.reason for check in report.checks if check.name == name]


# RabbitMQ.


def declare(url: str, queue: str, **arguments: Any) -> None:
    import pika

    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().queue_declare(queue, durable=True, arguments=arguments)


def test_over_amqp_a_queue_is_found_and_its_settings_are_not_guessed(rabbitmq_url: str, rabbitmq_name: str) -> None:
    declare(rabbitmq_url, rabbitmq_name, **{"x-message-ttl": 1_000})

    report = examined(rabbitmq_url, rabbitmq_name)

    assert report.reached
    assert told(report) == [("queue", "green"), ("retention", "unknown")]
    assert reasons(report, "queue") == [f"{rabbitmq_name} has 0 messages and 0 consumers"]


def test_over_amqp_a_queue_that_is_not_there_is_not_created(rabbitmq_url: str, rabbitmq_name: str) -> None:
    for _ in range(2):
        report = examined(rabbitmq_url, rabbitmq_name)

        assert not report.reached
        assert "NOT_FOUND - no queue" in reasons(report, "reach")[0]


class Managed:
    """A RabbitMQ with its management API."""

    def __init__(self, server: Server, port: int) -> None:
        self.amqp = server.url
        self._login = urlsplit(server.url).netloc.rpartition("@")[0]
        self.url = f"http://{self._login}@{HOST}:{port}/%2F"
        self._port = port

    def put(self, path: str, body: dict[str, Any]) -> None:
        self._send(path, "PUT", json.dumps(body).encode())

    def get(self, path: str) -> Any:
        return json.loads(self._send(path, "GET", None))

    def _send(self, path: str, method: str, body: bytes | None) -> bytes:
        headers = {"Authorization": f"Basic {b64encode(self._login.encode()).decode()}"}
        url = f"http://{HOST}:{self._port}/api/{path}"
        request = urllib.request.Request(url, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return bytes(reply.read())


@pytest.fixture(scope="module")
def managed(house: House) -> Iterator[Managed]:
    port = free_port()
    with missing_told():
        server = whole(house.home, lambda home: start_rabbitmq(home, management=port))
    yield Managed(server, port)
    server.end()


def test_the_management_api_tells_arguments_policy_and_dead_letters(managed: Managed) -> None:
    import pika

    # Before its queues: one that exists learns of a policy a moment later.
    managed.put("policies/%2F/letters", {"pattern": "^orders", "definition": {"message-ttl": 604_800_000}})
    with pika.BlockingConnection(pika.URLParameters(managed.amqp)) as connection:
        channel = connection.channel()
        channel.exchange_declare("dead", "fanout")
        channel.queue_declare("orders.dead", durable=True)
        channel.queue_bind("orders.dead", "dead")
        channel.queue_declare(
            "orders", durable=True, arguments={"x-message-ttl": 86_400_000, "x-dead-letter-exchange": "dead"}
        )

    report = examined(managed.url, "orders", Policy(keep="24h"))

    assert reasons(report, "retention") == [
        "x-message-ttl of orders is 24h",
        "message-ttl of the policy letters of the dead letters orders.dead is 7d",
    ]
    (late,) = [check for check in report.checks if check.name == "keep"]
    assert (late.grade, late.fix) == (Grade.RED, "Set keep: 14d")
    assert "letters of the dead letters orders.dead (the broker) replays what is up to 7d old" in late.reason
    assert examined(managed.url, "orders", Policy(keep="14d")).count(Grade.RED) == 0


def test_a_policy_is_known_at_once_and_when_the_api_has_its_statistics(managed: Managed) -> None:
    managed.put("policies/%2F/mine", {"pattern": "^mine$", "definition": {"message-ttl": 3_600_000}})
    declare(managed.amqp, "mine", **{"x-message-ttl": 7_200_000})

    at_once = examined(managed.url, "mine")

    assert eventually(lambda: EFFECTIVE in managed.get("queues/%2F/mine"))
    assert at_once.checks[1:] == examined(managed.url, "mine").checks[1:]
    assert reasons(at_once, "retention") == ["message-ttl of the policy mine of mine is 1h"]


def test_dead_letters_without_a_limit_are_red_over_the_management_api(managed: Managed) -> None:
    declare(managed.amqp, "mails.dead")
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "mails.dead"}
    declare(managed.amqp, "mails", **dead)

    report = examined(managed.url, "mails")

    (late,) = [check for check in report.checks if check.name == "keep"]
    assert (late.grade, late.fix) == (Grade.RED, "Set keep: forever")
    assert examined(managed.url, "mails", Policy(keep="14d"), replays={"by_hand": 604_800}).count(Grade.RED) == 0


def test_the_management_api_says_no_in_one_line_and_no_password_is_shown(managed: Managed) -> None:
    wrong = managed.url.replace("onefold:", "onefold:geheim")

    for url, queue, says in (
        (managed.url, "nosuch", "there is no queue 'nosuch' in '/'"),
        (wrong, "orders", "the management API answers 401"),
        (f"http://{HOST}:{free_port()}/", "orders", "cannot be reached: ConnectionRefusedError"),
    ):
        report = examined(url, queue)

        assert not report.reached
        assert says in reasons(report, "reach")[0]
        assert "geheim" not in str(report)


# SQS.


# NATS.


def create_stream(url: str, name: str, consumer: dict[str, Any], **config: Any) -> None:
    async def story() -> None:
        client = await connected(url)
        js = client.jetstream()
        await js.add_stream(name=name, subjects=[name], **config)
        await js.publish(name, b"{}")
        await js.add_consumer(name, ConsumerConfig(durable_name="pay", **consumer))
        await client.close()

    in_time(story())


def test_nats_tells_the_age_the_window_and_what_its_consumer_does(nats_url: str, nats_name: str) -> None:
    create_stream(nats_url, nats_name, {"max_deliver": 5}, max_age=7 * 86_400)

    report = examined(nats_url, f"{nats_name}/pay", Policy(keep="1d"))

    assert told(report) == [
        *(("queue", "green"), ("window", "green"), ("max_deliver", "yellow"), ("retention", "green")),
        *(("setting", "green"), ("keep", "red")),
    ]
    assert reasons(report, "queue") == [f"{nats_name}/pay has 1 message, 1 of them for this consumer"]
    assert "published twice within 2m;" in reasons(report, "window")[0]
    assert "used up its 5 deliveries stays in the stream" in reasons(report, "max_deliver")[0]


def test_a_stream_of_nats_that_fits_is_green(nats_url: str, nats_name: str) -> None:
    create_stream(nats_url, nats_name, {}, max_age=86_400)

    report = examined(nats_url, nats_name, Policy(keep="8d"))

    assert {grade for _, grade in told(report)} == {"green"}


def test_a_consumer_of_nats_that_acknowledges_by_itself_is_red(nats_url: str, nats_name: str) -> None:
    create_stream(nats_url, nats_name, {"ack_policy": AckPolicy.NONE})

    report = examined(nats_url, f"{nats_name}/pay")

    assert ("acknowledgements", "red") in told(report)


@pytest.mark.parametrize("queue", ["nothing-of-the-kind", "nothing-of-the-kind/pay"])
def test_a_stream_that_nats_does_not_know_is_one_line(nats_url: str, queue: str) -> None:
    report = examined(nats_url, queue)

    assert not report.reached
    assert f"NATS does not tell the settings of {queue}: NotFoundError" in reasons(report, "reach")[0]


# Redis Streams.


@pytest.mark.parametrize("name", ["valkey_url", "redis_url"])
def test_redis_tells_what_is_pending_and_what_was_trimmed(name: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(name)
    with named_client(url) as client:
        ids = [client.xadd("charges", {"body": "1"}) for _ in range(3)]
        client.xgroup_create("charges", "pay", "0")
        assert told(examined(url, "charges/pay")) == [("queue", "green"), ("retention", "unknown")]
        client.xreadgroup("pay", "dead", {"charges": ">"}, count=2)
        fresh = examined(url, "charges/pay")
        client.xclaim("charges", "pay", "dead", 0, ids[:1], idle=3_700_000, justid=True)
        client.xdel("charges", ids[0])
        stale = examined(url, "charges/pay")
        client.xtrim("charges", 0)
        empty = examined(url, "charges/pay")

    assert reasons(fresh, "queue") == ["charges/pay has 3 entries, and 2 are pending in this group"]
    assert told(fresh) == [("queue", "green"), ("retention", "unknown")]
    assert told(stale)[1:3] == [("trimmed", "red"), ("pending", "yellow")]
    assert told(empty)[1:3] == [("trimmed", "red"), ("pending", "yellow")]


def test_a_stream_of_redis_may_be_asked_without_its_group_and_have_a_slash(valkey_url: str) -> None:
    with named_client(valkey_url) as client:
        client.xadd("shop/charges", {"body": "1"})

        report = examined(valkey_url, "shop/charges")

    assert reasons(report, "queue") == ["shop/charges has 1 entry"]


@pytest.mark.parametrize(
    ("queue", "says"),
    [
        ("nothing", "there is no such key"),
        ("charges/nobody", "NOGROUP"),
        ("text", "it is no stream"),
    ],
)
def test_a_stream_or_a_group_that_redis_does_not_know_is_one_line(queue: str, says: str, valkey_url: str) -> None:
    with named_client(valkey_url) as client:
        client.xadd("charges", {"body": "1"})
        client.set("text", "no stream")

    report = examined(valkey_url, queue)

    assert not report.reached
    assert f"Redis does not tell the state of {queue}: {says}" in reasons(report, "reach")[0]


def test_a_redis_that_does_not_answer_is_one_line_without_its_password() -> None:
    report = examined(f"redis://me:secret@{HOST}:{free_port()}/0", "charges")

    assert reasons(report, "reach") == ["Redis does not tell the state of charges: ConnectionError"]


@pytest.fixture
def sqs(dynamodb: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client; the emulator of DynamoDB has SQS, too."""
    import boto3

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    client: Any = boto3.client("sqs", endpoint_url=dynamodb.url, region_name=REGION)
    yield client
    client.close()


def broker_of(dynamodb: Server) -> str:
    return f"sqs://?region={REGION}&endpoint_url={dynamodb.url}"


def create(client: Any, name: str, **attributes: str) -> str:
    url = client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    told = client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    return str(told["Attributes"]["QueueArn"])


def test_sqs_tells_visibility_retention_and_dead_letters(sqs: Any, dynamodb: Server, rabbitmq_name: str) -> None:
    name = rabbitmq_name
    dead = create(sqs, f"{name}-dead", MessageRetentionPeriod="1209600")
    redrive = json.dumps({"deadLetterTargetArn": dead, "maxReceiveCount": "5"})
    create(sqs, name, VisibilityTimeout="20", MessageRetentionPeriod="345600", RedrivePolicy=redrive)

    report = examined(broker_of(dynamodb), name, Policy(keep="8d"), handler_time=30.0, visibility_timeout=60.0)

    assert reasons(report, "visibility") == ["VisibilityTimeout is 20s"]
    assert reasons(report, "redelivery") == ["VisibilityTimeout x maxReceiveCount 5 is 1m 40s"]
    assert reasons(report, "retention") == [
        "MessageRetentionPeriod is 4d",
        f"MessageRetentionPeriod of the dead letters {name}-dead is 14d",
    ]
    graded = {check.name: (check.grade.value, check.fix) for check in report.checks}
    assert graded["keep"] == ("red", "Set keep: 28d")
    assert graded["handler time"] == ("red", "Set it to 1m there")
    assert graded["drift"] == ("yellow", "Leave visibility_timeout out: it is read from the settings")
    assert graded["lease"][0] == "yellow"


def test_a_queue_of_sqs_that_fits_is_green(sqs: Any, dynamodb: Server, rabbitmq_name: str) -> None:
    create(sqs, rabbitmq_name, VisibilityTimeout="60", MessageRetentionPeriod="86400")

    report = examined(broker_of(dynamodb), rabbitmq_name, Policy(keep="48h"))

    assert {grade for _, grade in told(report)} == {"green"}
    assert reasons(report, "keep") == ["keep is 48h, and the floor 48h"]
    assert reasons(report, "lease") == ["lease is 30s, and the queue redelivers after 1m"]


def test_a_queue_that_sqs_does_not_know_is_one_line(sqs: Any, dynamodb: Server) -> None:
    report = examined(broker_of(dynamodb), "nosuch")

    assert not report.reached
    assert "SQS does not tell the attributes of nosuch: " in reasons(report, "reach")[0]


# Kafka: librdkafka's mock cluster does not describe a topic, so what a real one answers is played here.


@pytest.mark.parametrize(
    ("answer", "graded"),
    [
        ({"retention.ms": "604800000", "cleanup.policy": "delete", "segment.bytes": "1"}, "red"),
        ({"retention.ms": "43200000", "cleanup.policy": "delete"}, "green"),
        ({"retention.ms": "43200000", "cleanup.policy": "compact"}, "red"),
        ({"retention.ms": "-1"}, "red"),
    ],
)
def test_the_retention_of_a_topic_is_judged(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], graded: str
) -> None:
    asked: list[Any] = []

    def described(options: dict[str, str], topic: str, timeout: float) -> dict[str, str]:
        asked.append((options, topic))
        return answer

    monkeypatch.setattr(kafka, "described", described)

    report = examined("kafka://one:9092,two:9092?security.protocol=SSL", "orders", Policy(keep="24h"))

    assert dict(told(report))["keep"] == graded
    expected = {"bootstrap.servers": "one:9092,two:9092", "security.protocol": "SSL", "log_level": "0"}
    assert asked == [(expected, "orders")]


def test_a_cluster_that_does_not_describe_a_topic_is_one_line(kafka_url: str, kafka_topic: str) -> None:
    guard = DeclaredGuard(
        name="pay", store=STORE, operations=("pay",), policy=Policy(), broker=f"kafka://{kafka_url}", queue=kafka_topic
    )

    report = examine_queue(guard, 1.0)

    assert not report.reached
    assert reasons(report, "reach")[0].startswith("it does not tell the configuration of the topic: ")


# Any.


@pytest.mark.parametrize(
    ("broker", "queue", "says"),
    [
        ("mongodb://h/0", "q", "the broker's URL has to begin with one of amqp:, amqps:, http:"),
        ("nonsense", "q", "the broker's URL has to begin with one of"),
        ("http://[", "q", "the broker's URL has to begin with one of"),
        ("amqp://h:no/", "q", "the broker's URL cannot be used"),
        ("amqp://localhost", None, "which queue? Name it beside the broker, in guards.pay: queue: orders"),
        ("sqs://?reigon=x", "q", "'reigon' is not one of region, endpoint_url"),
        ("kafka://h:1?no.such.setting=1", "q", "it does not tell the configuration of the topic: _INVALID_ARG"),
    ],
)
def test_a_broker_that_cannot_be_asked_is_one_line(broker: str, queue: str | None, says: str) -> None:
    report = examined(broker, queue)

    assert not report.reached
    assert says in reasons(report, "reach")[0]
    assert "\n" not in str(report.checks)
