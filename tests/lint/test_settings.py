"""Settings of queues, read from files as people have them: what each says about duplicates, and where it stands."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest

from onefold import UsageError
from onefold.config import read
from onefold.lint import findings, floor
from onefold.lint.settings import Settings, patterns, read_settings

DAY = 86_400.0


def settled(folder: Path, files: dict[str, str], fields: str = "keep: forever") -> Settings:
    """Return a guard whose settings are these files, read."""
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    path = folder / "onefold.yaml"
    path.write_text(
        "stores: {database: {url: 'sqlite:///shop.db'}}\n"
        f"guards:\n  first:\n    {{store: database, settings: [{', '.join(files)}], {fields}}}\n"
    )
    return read_settings(read(path))


def facts(found: Settings) -> list[tuple[str, str, float, int | None]]:
    assert found.problems == []
    return [(one.name, one.role, one.seconds, one.line) for one in found.found["first"]]


def problem(folder: Path, files: dict[str, str], fields: str = "keep: forever") -> str:
    (found,) = settled(folder, files, fields).problems
    assert "\n" not in str(found)
    return str(found).replace(f"{folder}/", "")


# Kafka.

PROPERTIES = """\
    # The producer of the orders
    bootstrap.servers = kafka-1:9092,\\
        kafka-2:9092
    ! two minutes, as Kafka's default
    delivery.timeout.ms=120000
    max.poll.interval.ms : 300000
    retries 2147483647
    delete.retention.ms=1
    retention.ms = "604800000"
"""


def test_a_kafka_client_and_its_topic(tmp_path: Path) -> None:
    found = settled(tmp_path, {"kafka.properties": PROPERTIES})

    assert facts(found) == [
        ("delivery.timeout.ms", "duplicates", 120.0, 5),
        ("max.poll.interval.ms", "duplicates", 300.0, 6),
        ("retention.ms", "replays", 7 * DAY, 9),
    ]
    assert floor(found.configuration.guards["first"]) == 14 * DAY


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("retention.ms=-1", [("retention.ms", "replays", math.inf, 1)]),
        ("log.retention.hours=168", [("log.retention.hours", "replays", 7 * DAY, 1)]),
        ("log.retention.hours=168\nlog.retention.minutes=10", [("log.retention.minutes", "replays", 600.0, 2)]),
        ("log.retention.ms=1000\nretention.ms=2000", [("retention.ms", "replays", 2.0, 2)]),
        ("cleanup.policy=compact\nretention.ms=2000", [("cleanup.policy=compact", "replays", math.inf, 1)]),
        ("cleanup.policy=compact,delete\nretention.ms=2000", [("retention.ms", "replays", 2.0, 2)]),
        ("retries=0\ndelivery.timeout.ms=120000", [("delivery.timeout.ms", "shown", 120.0, 2)]),
        ("message.timeout.ms=30000", [("message.timeout.ms", "duplicates", 30.0, 1)]),
        (
            "Dynamic configs for topic a are:\n  retention.ms=86400000 sensitive=false synonyms={X:retention.ms=1}",
            [("retention.ms", "replays", DAY, 2)],
        ),
        (
            "spring.kafka.producer.properties.delivery.timeout.ms=90000",
            [("spring.kafka.producer.properties.delivery.timeout.ms", "duplicates", 90.0, 1)],
        ),
    ],
)
def test_kafka_in_other_words(tmp_path: Path, text: str, expected: list[Any]) -> None:
    assert facts(settled(tmp_path, {"topic.properties": text})) == expected


def test_kafka_settings_in_json(tmp_path: Path) -> None:
    text = '{\n  "producer": {\n    "delivery.timeout.ms": 120000\n  },\n  "retention.ms": "86400000"\n}'

    assert facts(settled(tmp_path, {"kafka.json": text})) == [
        ("producer.delivery.timeout.ms", "duplicates", 120.0, 3),
        ("retention.ms", "replays", DAY, 5),
    ]


@pytest.mark.parametrize("value", ["7d", "604800000 # a week", "${RETENTION}", "1.5", "", "-2", "9" * 30, "true"])
def test_a_number_that_is_none_is_named_with_its_line(tmp_path: Path, value: str) -> None:
    said = problem(tmp_path, {"kafka.properties": f"# topic\nretention.ms={value}\n"})

    assert said.startswith("kafka.properties:2: guards.first: retention.ms is '")
    assert said.endswith("which is not a whole number of milliseconds")


# SQS.

QUEUE = "arn:aws:sqs:eu-central-1:123456789012"


def attributes(name: str, **more: str) -> str:
    return json.dumps({"Attributes": {"QueueArn": f"{QUEUE}:{name}", **more}}, indent=4)


REDRIVE = json.dumps({"deadLetterTargetArn": f"{QUEUE}:payouts-dead", "maxReceiveCount": "5"})
PAYOUTS = attributes("payouts", VisibilityTimeout="30", MessageRetentionPeriod="345600", RedrivePolicy=REDRIVE)
DEAD = attributes("payouts-dead", VisibilityTimeout="1", MessageRetentionPeriod="1209600")


@pytest.mark.parametrize("order", [("payouts.json", "dead.json"), ("dead.json", "payouts.json")])
def test_a_queue_of_sqs_and_its_dead_letters(tmp_path: Path, order: tuple[str, str]) -> None:
    files = {"payouts.json": PAYOUTS, "dead.json": DEAD}

    found = settled(tmp_path, {name: files[name] for name in order})

    assert sorted(facts(found)) == [
        ("MessageRetentionPeriod", "replays", 4 * DAY, 5),
        ("MessageRetentionPeriod of the dead letters payouts-dead", "replays", 14 * DAY, 5),
        ("VisibilityTimeout", "visibility_timeout", 30.0, 4),
        ("VisibilityTimeout x maxReceiveCount 5", "duplicates", 150.0, 4),
    ]
    assert found.configuration.guards["first"].visibility_timeout == 30
    assert floor(found.configuration.guards["first"]) == 28 * DAY


def test_dead_letters_whose_queue_is_not_named_may_be_as_old_as_sqs_allows(tmp_path: Path) -> None:
    found = settled(tmp_path, {"payouts.json": PAYOUTS}, "keep: 8d")

    (late,) = findings(found.configuration)

    assert late.code == "OF001"
    assert "dead letters payouts-dead, whose attributes are not among the settings, so at most 14d" in late.says
    assert late.fix == "Set keep: 28d"


def test_a_visibility_timeout_that_is_too_short_is_told_with_its_file_and_line(tmp_path: Path) -> None:
    found = settled(tmp_path, {"q.json": attributes("q", VisibilityTimeout="30")}, "handler_time: 2m, keep: 24h")

    (late,) = findings(found.configuration)

    assert late.code == "OF003"
    assert f"VisibilityTimeout ({tmp_path}/q.json:4) is 30s, but the handler takes up to 2m" in late.says
    assert late.fix == "Set it to 4m there"
    assert late.mark == found.configuration.mark("guards", "first", "settings")


def test_a_number_that_was_typed_again_and_has_drifted_is_found(tmp_path: Path) -> None:
    files = {"q.json": attributes("q", VisibilityTimeout="30"), "k.properties": "retention.ms=86400000"}
    fields = "keep: forever, visibility_timeout: 60s, replays: {retention.ms: 12h}"

    found = findings(settled(tmp_path, files, fields).configuration)

    assert [one.code for one in found] == ["OF020", "OF020"]
    assert "visibility_timeout is 1m here, but 30s where it is set: VisibilityTimeout (" in found[0].says
    assert "retention.ms is 12h here, but 24h where it is set" in found[1].says
    assert found[1].says.endswith(f"({tmp_path}/k.properties:1)")
    same = fields.replace("60s", "30s").replace("12h", "24h")
    assert findings(settled(tmp_path, files, same).configuration) == []


# RabbitMQ.

DEFINITIONS = """\
    {
      "rabbit_version": "3.13.7",
      "users": [{"name": "guest", "password_hash": "secret"}],
      "queues": [
        {
          "name": "orders", "vhost": "/", "durable": true,
          "arguments": {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "dead",
            "x-delivery-limit": 4,
            "x-message-ttl": 172800000
          }
        },
        {"name": "orders.dead", "vhost": "/", "arguments": {}},
        {"name": "mails", "vhost": "/", "arguments": {}}
      ],
      "policies": [
        {"vhost": "/", "name": "all", "pattern": ".*", "apply-to": "all", "priority": 0,
         "definition": {"message-ttl": 1000}},
        {"vhost": "/", "name": "dead", "pattern": "\\\\.dead$", "apply-to": "queues", "priority": 5,
         "definition": {"message-ttl": 604800000}},
        {"vhost": "/", "name": "slow", "pattern": "^orders$", "apply-to": "quorum_queues", "priority": 7,
         "definition": {"consumer-timeout": 3600000, "message-ttl": 259200000, "dead-letter-exchange": "mine"}}
      ],
      "bindings": [
        {"source": "dead", "vhost": "/", "destination": "orders.dead", "destination_type": "queue", "routing_key": ""}
      ]
    }
"""


def test_the_definitions_of_rabbitmq(tmp_path: Path) -> None:
    found = settled(tmp_path, {"definitions.json": DEFINITIONS}, "keep: forever, queue: orders")

    assert facts(found) == [
        ("consumer-timeout of the policy slow", "visibility_timeout", 3_600.0, 23),
        ("x-delivery-limit x consumer timeout", "duplicates", 14_400.0, 10),
        ("x-message-ttl of orders", "replays", 2 * DAY, 11),
        ("message-ttl of the policy dead of the dead letters orders.dead", "replays", 7 * DAY, 21),
    ]


def test_a_queue_has_to_be_named_where_there_are_several(tmp_path: Path) -> None:
    files = {"definitions.json": DEFINITIONS}

    assert problem(tmp_path, files) == (
        "definitions.json: guards.first: it has 2 queues: name the one that this guard reads (queue: orders)"
    )
    assert problem(tmp_path, files, "queue: ordres") == (
        "definitions.json: guards.first: there is no queue 'ordres' in it: did you mean 'orders'?"
    )


WITHOUT_LIMIT = """\
    {"queues": [
      {"name": "orders", "vhost": "/", "arguments": {
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dead"}},
      {"name": "orders.dead", "vhost": "/", "arguments": {}}
    ]}
"""


def test_dead_letters_without_a_ttl_have_no_age_unless_the_guard_says_one(tmp_path: Path) -> None:
    files = {"definitions.json": WITHOUT_LIMIT}

    (late,) = findings(settled(tmp_path, files, "keep: 24h").configuration)

    assert (late.code, late.fix) == ("OF001", "Set keep: forever")
    assert f"dead letters orders.dead without a message TTL ({tmp_path}/definitions.json:3)" in late.says
    assert findings(settled(tmp_path, files, "keep: 48h, replays: {by_hand: 24h}").configuration) == []


def test_rabbitmq_conf(tmp_path: Path) -> None:
    conf = (
        "## time-outs\n# consumer_timeout = 1\nlisteners.tcp.1 = 127.0.0.1:5672\nconsumer_timeout = 900000  # 15 min\n"
    )

    assert facts(settled(tmp_path, {"rabbitmq.conf": conf})) == [("consumer_timeout", "visibility_timeout", 900.0, 4)]
    together = settled(tmp_path, {"rabbitmq.conf": conf, "definitions.json": WITHOUT_LIMIT})
    assert ("consumer_timeout", "visibility_timeout", 900.0, 4) in facts(together)


def test_a_pattern_that_does_not_end_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PATIENCE", 2.0)
    policies = [{"pattern": one, "definition": {"message-ttl": 1}} for one in ("^a", "(a+)+$", "b")]
    definitions = json.dumps({"queues": [{"name": "a" * 34 + "!"}], "policies": policies}, indent=1)

    assert problem(tmp_path, {"a.json": definitions}) == (
        "a.json:15: guards.first: the pattern '(a+)+$' takes too long for the names of the queues"
    )


def test_a_pattern_is_matched_with_the_queues_that_its_policy_can_apply_to_only(tmp_path: Path) -> None:
    policies = [{"pattern": "(", "vhost": "other"}, {"pattern": "(", "apply-to": "exchanges"}]
    definitions = json.dumps({"queues": [{"name": "a"}], "policies": policies})

    assert [one[0] for one in facts(settled(tmp_path, {"a.json": definitions}))] == ["no message TTL of a"]


# Celery.

CELERYCONFIG = '''\
    """Settings of the shop's workers."""
    import os
    from datetime import timedelta

    HOUR = 60 * 60
    broker_url = os.environ["BROKER"]  # never run
    broker_transport_options = {
        "visibility_timeout": 12 * HOUR,  # twelve hours
        "queue_name_prefix": os.environ.get("PREFIX", ""),
    }
    task_acks_late = True
    result_expires = timedelta(days=1)
    task_annotations = {"tasks.pay": {"max_retries": 5, "default_retry_delay": 10 * 60, "rate_limit": "10/s"}}
'''


def test_celerys_settings_are_read_and_never_run(tmp_path: Path) -> None:
    assert facts(settled(tmp_path, {"celeryconfig.py": CELERYCONFIG})) == [
        ("broker_transport_options.visibility_timeout", "visibility_timeout", 43_200.0, 8),
        ("result_expires", "shown", DAY, 12),
        ("max_retries x the delay of a retry", "duplicates", 3_000.0, 13),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CELERY_BROKER_TRANSPORT_OPTIONS = {'visibility_timeout': 60}", ("visibility_timeout", 60.0, 1)),
        ("app.conf.broker_transport_options = {'visibility_timeout': 60}", ("visibility_timeout", 60.0, 1)),
        ("app.conf['broker_transport_options'] = dict(visibility_timeout=60)", ("visibility_timeout", 60.0, 1)),
        ("app.conf.update(\n  broker_transport_options={'visibility_timeout': 60})", ("visibility_timeout", 60.0, 2)),
        ("class Config:\n  broker_transport_options = {'visibility_timeout': 60}", ("visibility_timeout", 60.0, 2)),
        (
            "broker_transport_options = {}\nbroker_transport_options['visibility_timeout'] = 60",
            ("visibility_timeout", 60.0, 2),
        ),
        (
            "task_acks_late = False\nbroker_transport_options = {'visibility_timeout': 60}",
            ("duplicates", 60.0, 2),
        ),
        ("@app.task(max_retries=4, default_retry_delay=30)\ndef pay(): ...", ("duplicates", 120.0, 1)),
        ("@app.task(bind=True, max_retries=4)\ndef pay(self): ...", ("duplicates", 720.0, 1)),
        ("@guarded(app, guard, 'pay', max_retries=None)\ndef pay(): ...", ("duplicates", math.inf, 1)),
        ("@app.task(max_retries=None, default_retry_delay=0)\ndef pay(): ...", ("duplicates", math.inf, 1)),
        (
            "@app.task(retry_backoff=True, retry_backoff_max=60, max_retries=10)\ndef pay(): ...",
            ("duplicates", 600.0, 1),
        ),
        ("@app.task(retry_kwargs={'max_retries': 5, 'countdown': 2})\ndef pay(): ...", ("duplicates", 10.0, 1)),
        ("class Pay(Task):\n  max_retries = 2\n  default_retry_delay = 5", ("duplicates", 10.0, 2)),
        (
            (
                "max_retries = 9\n@retry(max_retries=8)\ndef a(): ...\nclass Client:\n  max_retries = 7\n"
                "headers.update(max_retries=6)\n@shared_task(max_retries=1)\ndef b(): ..."
            ),
            ("duplicates", 180.0, 7),
        ),
    ],
)
def test_celery_in_other_words(tmp_path: Path, text: str, expected: tuple[str, float, int]) -> None:
    ((_, *rest),) = facts(settled(tmp_path, {"tasks.py": text}))

    assert tuple(rest) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "import os\nbroker_transport_options = {'visibility_timeout': int(os.environ['V'])}",
            "conf.py:2: guards.first: visibility_timeout is not a literal, and nothing in this file is run",
        ),
        (
            f"@app.task(max_retries={'9' * 400})\ndef pay(): ...",
            "conf.py:1: guards.first: max_retries is 999",
        ),
        (
            "broker_transport_options = {'visibility_timeout': '1h'}",
            "conf.py:1: guards.first: broker_transport_options.",
        ),
        (
            "if DEBUG:\n  app.conf.result_expires = 1",
            "conf.py:2: guards.first: result_expires is set under a condition, and nothing in this file is run",
        ),
        (
            "HOUR = 3600\nif DEBUG:\n  HOUR = 1\nresult_expires = HOUR",
            "conf.py:4: guards.first: result_expires is not a literal",
        ),
        ("result_expires = 9 ** 9 ** 9", "conf.py:1: guards.first: result_expires is not a literal"),
        ("result_expires = 10000000000 * 10000000000", "conf.py:1: guards.first: result_expires is not a literal"),
        ("result_expires = 1 / 0", "conf.py:1: guards.first: result_expires is not a literal"),
        ("result_expires = timedelta(days='x')", "conf.py:1: guards.first: result_expires is not a literal"),
        ("result_expires = timedelta(days=10**9)", "conf.py:1: guards.first: result_expires is not a literal"),
        ("@app.task(max_retries='5')\ndef pay(): ...", "conf.py:1: guards.first: max_retries is '5', which is not"),
        ("x = (", "conf.py:1: guards.first: broken Python: '(' was never closed"),
        ("x = '\0'", "conf.py: guards.first: broken Python"),
        (f"result_expires = {'-' * 5_000}1", "conf.py"),
        (f"result_expires = {'1 + ' * 5_000}1", "conf.py"),
        (f"result_expires = {'1 + ' * 200}1", "conf.py:1: guards.first: result_expires is not a literal"),
        ("x = 1", "conf.py: guards.first: it has no setting of Celery that tells how late a duplicate can be"),
    ],
)
def test_python_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    assert problem(tmp_path, {"conf.py": text}).startswith(says)


# Any file.


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{\n  "Attributes": {\n', "a.json:3: guards.first: broken JSON"),
        ("a.json", "[]", "a.json:1: guards.first: expected a JSON object, {...}"),
        ("a.json", "[" * 100_000, "a.json: guards.first: broken JSON: nested too deeply"),
        ("a.json", f'{{"a": {"[" * 60}{"]" * 60}}}', "a.json:1: guards.first: nested more than 50 deep"),
        ("a.json", '{"Attributes": []}', "a.json:1: guards.first: 'Attributes' is a list, not an object"),
        (
            "a.json",
            '{"Attributes": {\n"VisibilityTimeout": {}}}',
            "a.json:2: guards.first: VisibilityTimeout is a table",
        ),
        ("a.json", '{"Attributes": {\n"RedrivePolicy": "{"}}', "a.json:2: guards.first: RedrivePolicy is not JSON"),
        ("a.json", '{"Attributes": {\n"RedrivePolicy": "[1]"}}', "a.json:2: guards.first: RedrivePolicy is a list"),
        ("a.json", '{"queues": {}}', "a.json:1: guards.first: 'queues' is a table, not a list"),
        ("a.json", '{"queues": [\n3]}', "a.json:2: guards.first: queues: expected an object, not 3"),
        ("a.json", '{"queues": [\n{"name": 3}]}', "a.json:2: guards.first: a queue has a name"),
        (
            "a.json",
            '{"queues": [{"name": "q", "arguments": {\n"x-message-ttl": "1h"}}]}',
            "a.json:2: guards.first: x-message-ttl is '1h', which is not a whole number of milliseconds",
        ),
        (
            "a.json",
            '{"queues": [{"name": "q"}], "policies": [{"pattern":\n"("}]}',
            "a.json:1: guards.first: the pattern '(' is no regular expression",
        ),
        (
            "a.json",
            '{"queues": [{"name": "q"}], "policies": [{"pattern": "a{99999999999999}"}]}',
            "a.json:1: guards.first: the pattern 'a{99999999999999}' is no regular expression",
        ),
        (
            "a.json",
            '{"queues": [{"name": "q"}], "policies": [{"pattern": "' + 3_000 * "(" + 3_000 * ")" + '"}]}',
            "a.json:1: guards.first: the pattern '((((",
        ),
        (
            "a.json",
            '{"queues": [{"name": "q"}], "policies": [{"pattern": "q",\n"priority": "high"}]}',
            "a.json:2: guards.first: the priority of a policy is 'high', which is not a whole number",
        ),
        ("a.json", "{}", "a.json: guards.first: it has no setting of Kafka"),
        ("a.properties", "# nothing\n", "a.properties: guards.first: it has no setting of Kafka that tells"),
        ("a.txt", "retention.ms=1", "a.txt: guards.first: settings are a .properties (Kafka), a .py (Celery)"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_with_its_place(tmp_path: Path, name: str, text: str, says: str) -> None:
    assert problem(tmp_path, {name: text}).startswith(says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no file"),
        (b"\xff\xfe", "a.properties is not text in UTF-8"),
        (b"#" * ((4 << 20) + 1), "a.properties has more than 4 MiB"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_where_it_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "a.properties").write_bytes(content)
    path = tmp_path / "onefold.yaml"
    path.write_text("stores: {d: {url: 'memory:'}}\nguards:\n  first:\n    store: d\n    settings: a.properties\n")

    (found,) = read_settings(read(path)).problems

    assert str(found).startswith(f"{path}:5:5: guards.first.settings: ")
    assert says in found.says


def test_settings_that_nobody_has_read_are_not_judged(tmp_path: Path) -> None:
    (tmp_path / "k.properties").write_text("retention.ms=604800000\n")
    path = tmp_path / "onefold.yaml"
    path.write_text("stores: {d: {url: 'memory:'}}\nguards: {first: {store: d, settings: k.properties}}\n")

    with pytest.raises(UsageError, match=r"guards\.first of .* has settings that were not read"):
        findings(read(path))

    assert [one.code for one in findings(read_settings(read(path)).configuration)] == ["OF001"]


def test_settings_document_a_floor(tmp_path: Path) -> None:
    found = settled(tmp_path, {"k.properties": "retention.ms=3600000"}, "keep: 24h")

    assert findings(found.configuration, strict=True) == []


def test_definitions_of_many_queues_are_read(tmp_path: Path) -> None:
    queues = [{"name": f"q{n}", "vhost": "/", "arguments": {"x-message-ttl": 1_000 * n}} for n in range(5_000)]

    found = settled(tmp_path, {"definitions.json": json.dumps({"queues": queues}, indent=1)}, "queue: q4321")

    assert facts(found) == [("x-message-ttl of q4321", "replays", 4_321.0, 4_321 * 7 + 7)]
