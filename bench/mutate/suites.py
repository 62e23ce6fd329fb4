"""Which tests know a module: the ones that have to notice when it is broken.

The whole suite would notice more, and take hours; the tests of a part are what its promises rest on.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

CORE: Final = (
    "delivery/test_*.py",
    "edge_cases/test_*.py",
    "handlers/test_*.py",
    "heartbeat/test_*.py",
    "stores/test_memory.py",
    "stores/sqlite/test_joined*.py",
    "faults/test_interrupts_current.py",
    "testing/test_simulate.py",
)
# The first pattern that fits a module, below `src/onefold/`, names its tests. The first red one ends a run.
SUITES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("testing/*", ("testing/test_*.py",)),
    ("stores/memory.py", ("stores/test_memory.py", "testing/test_contract.py", "delivery/test_*.py")),
    ("stores/sqlite/*", ("stores/sqlite/test_*.py",)),
    ("stores/redis/*", ("stores/redis/test_*.py",)),
    ("stores/dynamodb/*", ("stores/dynamodb/test_*.py",)),
    ("stores/sqlalchemy/*", ("stores/sqlalchemy/test_*.py",)),
    ("stores/django/*", ("stores/django/test_*.py",)),
    ("stores/mysql/*", ("stores/mysql/test_*.py",)),
    (
        "stores/*",
        ("stores/test_urls.py", "stores/sql/test_*.py", "stores/postgres/test_*.py", "stores/sqlite/test_*.py"),
    ),
    ("transactions/*", ("stores/postgres/test_*.py", "stores/sqlite/test_joined*.py")),
    ("http/client/*", ("http/client/test_*.py",)),
    ("http/*", ("http/test_*.py",)),
    ("queues/*kafka*", ("queues/test_kafka*.py",)),
    ("queues/*celery*", ("queues/test_celery*.py",)),
    ("queues/*dramatiq*", ("queues/test_dramatiq*.py",)),
    ("queues/rq/*", ("queues/test_rq*.py",)),
    ("queues/*babelqueue*", ("queues/test_babelqueue*.py",)),
    ("queues/taskiq/*", ("queues/test_taskiq*.py",)),
    ("queues/faststream/*", ("queues/test_faststream*.py",)),
    ("queues/*nats*", ("queues/test_nats*.py",)),
    ("queues/*redis_streams*", ("queues/test_redis_streams*.py",)),
    ("queues/*sqs*", ("queues/test_sqs*.py", "queues/test_lambda.py")),
    ("queues/aws_lambda*", ("queues/test_lambda.py",)),
    ("queues/*pika*", ("queues/test_rabbitmq*.py",)),
    ("queues/*rabbitmq*", ("queues/test_rabbitmq*.py",)),
    ("queues/*", ("queues/test_*.py",)),
    ("config/*", ("config/test_*.py", "lint/test_*.py", "cli/test_lint.py")),
    ("lint/*", ("lint/test_*.py", "cli/test_lint.py")),
    ("_*/*", CORE),
    ("*/*", ()),
    ("*", CORE),
)


def suite(module: str, tests: Path) -> tuple[str, ...]:
    """Return the test files of a module, by its path below `src/onefold/`; none where no suite is kept for it."""
    patterns = next(patterns for fits, patterns in SUITES if fnmatchcase(module, fits))
    return tuple(_names(patterns, tests))


def _names(patterns: tuple[str, ...], tests: Path) -> Iterator[str]:
    for pattern in patterns:
        yield from sorted(str(path.relative_to(tests.parent)) for path in tests.glob(pattern))
