"""Which tests know a module: the ones that have to notice when it is broken.

The whole suite would notice more, and take hours; the tests of a part are what its promises rest on.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

CORE: Final = (
    "test_decide.py",
    "test_core_*.py",
    "test_edge_cases_*.py",
    "test_memory_store.py",
    "test_fingerprints.py",
    "test_bypass.py",
    "test_steps*.py",
    "test_signatures.py",
    "test_flow_by_hand.py",
    "test_heartbeat_times.py",
    "test_interrupts_current.py",
    "test_transactions_sqlite*.py",
    "test_simulate.py",
    "test_moving.py",
)
# The first pattern that fits a module, below `src/onefold/`, names its tests. The first red one ends a run.
SUITES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("testing/*", ("test_simulate.py", "test_testing_tools.py", "test_contract.py")),
    ("stores/memory.py", ("test_memory_store.py", "test_contract.py", "test_core_*.py")),
    ("stores/sqlite/*", ("test_sqlite_store.py", "test_transactions_sqlite*.py")),
    ("stores/redis/*", ("test_redis_*.py",)),
    ("stores/dynamodb/*", ("test_dynamodb_*.py",)),
    ("stores/sqlalchemy/*", ("test_sqlalchemy_*.py",)),
    ("stores/django/*", ("test_django_*.py",)),
    ("stores/mysql/*", ("test_mysql_*.py",)),
    ("stores/*", ("test_store_urls.py", "test_postgres_*.py", "test_sqlite_store.py")),
    ("transactions/*dynamodb*", ("test_dynamodb_transactions.py",)),
    ("transactions/*", ("test_postgres_*.py", "test_transactions_sqlite*.py")),
    ("http/client/*", ("test_http_client*.py",)),
    ("http/*", ("test_http_*.py",)),
    ("queues/*kafka*", ("test_queues_kafka*.py",)),
    ("queues/*celery*", ("test_queues_celery*.py",)),
    ("queues/*babelqueue*", ("test_queues_babelqueue*.py",)),
    ("queues/*pika*", ("test_queues_rabbitmq*.py",)),
    ("queues/*rabbitmq*", ("test_queues_rabbitmq*.py",)),
    ("queues/*", ("test_queues_*.py",)),
    ("config/*", ("test_retention_*.py", "test_cli_lint.py")),
    ("lint/*", ("test_retention_*.py", "test_cli_lint.py")),
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
