"""The extras: `all` is all of them, every one that is named exists, an install line brings what its page imports."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.project.test_docs import PAGES, blocks_of
from tests.support import PROJECT

EXTRAS: dict[str, list[str]] = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]

# What a URL in a sample needs, beside what the sample imports.
DRIVERS = {
    "redis": "redis",
    "postgresql": "psycopg",
    "postgresql+asyncpg": "asyncpg",
    "mysql": "pymysql",
    "dynamodb": "boto3",
    "django": "django",
}

# Whoever reads the page about HTTP has a web framework of their own.
BROUGHT = {"fastapi"}

NAMED = re.compile(r"onefold\[([a-z,]+)\]")


def extras_in(requirement: str) -> list[str]:
    return [extra for group in NAMED.findall(requirement) for extra in group.split(",")]


def resolved(extra: str) -> set[str]:
    """The extra, and all that it names in turn."""
    named = [other for requirement in EXTRAS[extra] for other in extras_in(requirement)]
    return {extra}.union(*(resolved(other) for other in named))


def packages(extra: str) -> set[str]:
    """The packages that an extra installs, as far as it names them itself."""
    wanted = [requirement for one in resolved(extra) for requirement in EXTRAS[one]]
    return {normalized(re.split(r"[\[><=!~; ]", one)[0]) for one in wanted if not one.startswith("onefold[")}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_all_is_all() -> None:
    assert resolved("all") == set(EXTRAS)


# Whoever uses these adapters has the framework, the HTTP library or the test runner that they are for.
THEIRS = {"fastapi", "flask", "flask_login", "httpx", "pytest", "requests", "starlette", "urllib3"}

# They come with the package that is named, which imports them itself.
BESIDE = {"aiormq": "aio-pika", "asgiref": "django", "botocore": "boto3", "kombu": "celery"}


def test_all_brings_every_package_that_the_source_imports() -> None:
    files = PROJECT.glob("src/**/*.py")
    imported = set().union(*(imported_by(path.read_text(encoding="utf-8")) for path in files)) - THEIRS - {"msgspec"}

    # Several packages may share the root of their modules, as those of OpenTelemetry do.
    brought_by = {
        name: {normalized(one) for one in [*distributions()[name], BESIDE.get(name, name)]} for name in imported
    }

    assert {name for name, brought in brought_by.items() if not brought & packages("all")} == set()


def test_the_list_of_all_is_in_order() -> None:
    (listed,) = EXTRAS["all"]

    assert extras_in(listed) == sorted(set(extras_in(listed)))


def sources(folder: Path) -> Iterator[Path]:
    """Return what was written by hand below a folder."""
    return (path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_every_extra_that_is_named_exists() -> None:
    files = [*PAGES, *PROJECT.glob("src/**/*.py"), *sources(PROJECT / "examples"), PROJECT / "pyproject.toml"]

    named = {extra for file in files if file.is_file() for extra in extras_in(file.read_text(encoding="utf-8"))}

    assert named - set(EXTRAS) == set()


def installed_by(page: Path) -> set[str]:
    """The packages of the page's install lines, those beside an extra among them."""
    lines = re.findall(r"pip install ([^`\n#]+)", page.read_text(encoding="utf-8"))
    beside = {word.partition("[")[0] for line in lines for word in re.findall(r"[\w\[\]-]+", NAMED.sub("", line))}
    return {normalized(name) for name in beside if name}.union(*(packages(one) for one in extras_in(" ".join(lines))))


# It reads the files of every package that is installed.
distributions = functools.cache(packages_distributions)


def needed_by(code: str) -> Iterator[str]:
    """The packages that a sample imports, and the drivers of the URLs in it."""
    yield from (normalized(distributions()[module][0]) for module in imported_by(code))
    for scheme in re.findall(r"[\"']([a-z+]+)://", code):
        if scheme in DRIVERS:
            yield DRIVERS[scheme]


def imported_by(code: str) -> set[str]:
    """The modules of others that the code imports, without what follows the first dot."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"onefold"}


INSTALLING = [page for page in PAGES if installed_by(page) and blocks_of(page)]


@pytest.mark.parametrize("page", INSTALLING, ids=lambda page: str(page.relative_to(PROJECT)))
def test_the_install_line_of_a_page_brings_what_its_first_sample_needs(page: Path) -> None:
    (_, sample), *_ = blocks_of(page)

    missing = set(needed_by(sample)) - installed_by(page) - BROUGHT

    assert missing == set()


def test_the_page_of_celery_installs_what_its_broker_needs() -> None:
    """Celery's own extra: beside the client it brings what its transport imports, in versions that fit together."""
    page = (PROJECT / "docs" / "queues" / "celery.md").read_text(encoding="utf-8")
    brokers = set(re.findall(r"broker=\"([a-z]+):", page))

    named = {extra for group in re.findall(r"pip install .*'celery\[([a-z,]+)\]'", page) for extra in group.split(",")}

    assert brokers
    assert brokers <= named


def test_an_install_line_that_lacks_something_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("$ pip install 'onefold[celery]'\n```python\nimport celery\ngo('redis://h')\n```\n")

    ((_, sample),) = blocks_of(page)

    assert set(needed_by(sample)) - installed_by(page) == {"redis"}
