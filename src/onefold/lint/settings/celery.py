"""Celery's settings, from the text of a Python file: its literals are read, and nothing in it is run. Pure.

Assignments (`broker_transport_options = {...}`, also with Django's prefix), `app.conf.name = ...`,
`app.conf.update(...)`, and the options of tasks that tell how often and how late they retry.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from onefold.config.wording import shown
from onefold.lint.settings.found import NUMBER_MAX, Found, Role, SettingsFile, Wrong
from onefold.lint.settings.python_literals import NotLiteral, literal

# Older names of the same settings.
OLD: Final = {"acks_late": "task_acks_late", "task_result_expires": "result_expires", "annotations": "task_annotations"}
VISIBILITY: Final = "broker_transport_options.visibility_timeout"
SETTINGS: Final = ("broker_transport_options", "task_acks_late", "result_expires", "task_annotations")
OF_A_TASK: Final = (*("max_retries", "default_retry_delay", "retry_backoff", "retry_backoff_max", "retry_kwargs"),)
KNOWN: Final = ("broker_transport_options", "result_expires", "max_retries", "default_retry_delay")

# Celery's own defaults, in seconds, where a task sets only the other half.
MAX_RETRIES: Final = 3
RETRY_DELAY: Final = 180
BACKOFF_MAX: Final = 600


class Setting(NamedTuple):
    value: Any
    line: int


def found(files: Sequence[SettingsFile], _queue: str | None) -> list[Found]:
    """Return what these files say; of several tasks the one that retries the longest."""
    return [one for given in files for one in _of_file(given)]


def _of_file(given: SettingsFile) -> Iterator[Found]:
    reader = _Reader(given)
    reader.read(_tree(given).body)
    options = reader.settings.get("broker_transport_options")
    if options is not None and isinstance(options.value, Mapping) and "visibility_timeout" in options.value:
        yield _visibility(given.file, options.value["visibility_timeout"], reader.settings.get("task_acks_late"))
    if (expires := reader.settings.get("result_expires")) is not None and expires.value is not None:
        seconds = _seconds(given.file, "result_expires", expires)
        yield Found("result_expires", "shown", seconds, given.file, expires.line)
    retries = [one for task in reader.tasks if (one := _retries(given.file, task)) is not None]
    if retries:
        yield max(retries, key=lambda one: one.seconds)


def _visibility(file: str, written: Setting, acks_late: Setting | None) -> Found:
    # Acknowledged before it runs, a task is not given to a second worker while it does; one that waits for its eta is.
    early = acks_late is not None and acks_late.value is False
    role: Role = "duplicates" if early else "visibility_timeout"
    return Found(VISIBILITY, role, _seconds(file, VISIBILITY, written), file, written.line)


def _retries(file: str, task: Mapping[str, Setting]) -> Found | None:
    """Return how long a task retries: so late can its last message be."""
    more = task["retry_kwargs"].value if "retry_kwargs" in task else {}
    more = more if isinstance(more, Mapping) else {}
    limit = task.get("max_retries") or more.get("max_retries")
    delay = more.get("countdown") or task.get("default_retry_delay")
    if "retry_backoff" in task and task["retry_backoff"].value:
        delay = task.get("retry_backoff_max") or Setting(BACKOFF_MAX, task["retry_backoff"].line)
    first = limit or delay
    if first is None:
        return None
    each = RETRY_DELAY if delay is None else _seconds(file, "the delay of a retry", delay)
    count = MAX_RETRIES if limit is None else _count(file, limit)
    # Without an end, however short each delay is.
    seconds = math.inf if math.isinf(count) else each * count
    return Found("max_retries x the delay of a retry", "duplicates", seconds, file, first.line)


def _count(file: str, limit: Setting) -> float:
    count = limit.value
    if count is None:
        # It retries without an end.
        return math.inf
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= NUMBER_MAX:
        raise Wrong(file, limit.line, f"max_retries is {shown(count)}, which is not a whole number")
    return count


def _seconds(file: str, name: str, setting: Setting) -> float:
    value = setting.value
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= NUMBER_MAX:
        raise Wrong(file, setting.line, f"{name} is {shown(value)}, which is not a number of seconds")
    return float(value)


def _tree(given: SettingsFile) -> ast.Module:
    try:
        return ast.parse(given.text)
    except SyntaxError as error:
        raise Wrong(given.file, error.lineno, f"broken Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise Wrong(given.file, None, "broken Python: it cannot be parsed") from None


class _Reader:
    """Collects the settings of a file, and the options of its tasks."""

    def __init__(self, given: SettingsFile) -> None:
        self._file = given.file
        self._names: dict[str, Any] = {}
        self.settings: dict[str, Setting] = {}
        self.tasks: list[dict[str, Setting]] = []

    def read(self, body: Sequence[ast.stmt], task: dict[str, Setting] | None = None) -> None:
        """Read statements in their order; `task` collects the options in the body of a task's class."""
        for node in body:
            match node:
                case (
                    ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    self._assigned(_name_of(target), value, task)
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="update", value=whole)) as call) if _is_conf(
                    whole
                ):
                    for name, value in _given(call):
                        self._assigned(name, value, task)
                case ast.ClassDef():
                    self.tasks.append({})
                    self.read(node.body, self.tasks[-1] if any(map(_is_task, node.bases)) else None)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    calls = (one for one in node.decorator_list if isinstance(one, ast.Call))
                    self.tasks += [self._options(one) for one in calls if _is_task(one.func)]
                case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                    self._check_conditional(node)

    def _assigned(self, written: str, value: ast.expr, task: dict[str, Setting] | None) -> None:
        name = _current(written)
        if name == VISIBILITY:
            one = self._setting("visibility_timeout", value)
            self.settings["broker_transport_options"] = Setting({"visibility_timeout": one}, value.lineno)
        elif task is not None and name in OF_A_TASK:
            task[name] = self._setting(name, value)
        elif name in SETTINGS:
            self.settings[name] = self._setting(name, value)
            if name == "task_annotations":
                self.tasks += [dict(one.value) for one in self.settings[name].value.values() if _is_mapping(one.value)]
        else:
            try:
                self._names[written] = literal(value, self._names)
            except NotLiteral:
                self._names.pop(written, None)

    def _check_conditional(self, node: ast.stmt) -> None:
        """Refuse a setting under a condition: only running the file would tell which one counts."""
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and len(part.targets) == 1:
                written = _name_of(part.targets[0])
                if _current(written) in (*SETTINGS, VISIBILITY):
                    says = (
                        f"{written} is set under a condition, and nothing in this file is run: name a file without one"
                    )
                    raise Wrong(self._file, part.lineno, says)
                # It may have another value after this.
                self._names.pop(written, None)

    def _options(self, call: ast.Call) -> dict[str, Setting]:
        return {name: self._setting(name, value) for name, value in _given(call) if name in OF_A_TASK}

    def _setting(self, name: str, node: ast.expr) -> Setting:
        """Return the value with its line; of a dictionary, only the parts that have to be known."""
        pairs = list(_pairs(node))
        if pairs or name in ("broker_transport_options", "task_annotations", "retry_kwargs"):
            needed = ("visibility_timeout", "max_retries", "countdown", *OF_A_TASK)
            return Setting(
                {key: self._setting(key, part) for key, part in pairs if key in needed or _is_table(part)}, node.lineno
            )
        try:
            return Setting(literal(node, self._names), node.lineno)
        except NotLiteral:
            says = f"{name} is not a literal, and nothing in this file is run: write its number there"
            raise Wrong(self._file, node.lineno, says) from None


def _current(written: str) -> str:
    """Return today's name of a setting: without Django's prefix, and not the one of older versions."""
    name = written.lower().removeprefix("celery_")
    return OLD.get(name, name)


def _is_conf(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "conf") or (
        isinstance(node, ast.Attribute) and node.attr == "conf"
    )


def _is_task(node: ast.expr) -> bool:
    """Return whether this is `app.task`, `shared_task`, `guarded`, or a class of tasks."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "guarded" or name.lower().endswith("task")


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _name_of(target: ast.expr) -> str:
    """Return `x` for `x`, `app.conf.x` and `app.conf["x"]`; otherwise nothing."""
    match target:
        case ast.Name(id=name) | ast.Attribute(value=ast.Attribute(attr="conf"), attr=name):
            return name
        case ast.Subscript(value=ast.Attribute(attr="conf"), slice=ast.Constant(value=str(name))):
            return name
        case ast.Subscript(value=ast.Name() | ast.Attribute() as whole, slice=ast.Constant(value=str(name))):
            # One part of a setting that is a dictionary.
            return f"{_name_of(whole)}.{name}"
    return ""


def _given(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    for one in call.args:
        yield from _pairs(one)
    yield from ((one.arg, one.value) for one in call.keywords if one.arg)


def _pairs(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parts of `{"x": 1}` and of `dict(x=1)`."""
    match node:
        case ast.Dict(keys=names, values=values):
            for name, value in zip(names, values, strict=True):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value, value
        case ast.Call(func=ast.Name(id="dict")):
            yield from _given(node)


def _is_table(node: ast.expr) -> bool:
    return isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and bool(list(_pairs(node))))
