"""Format findings for people, programs and CI. Pure: each function returns a text or a document."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from onefold import __version__
from onefold.config.tree import Mark, Problem
from onefold.lint import RULES, Finding
from onefold.lint.settings import Settings


def document(
    files: int, findings: Sequence[Finding], problems: Sequence[Problem], settings: Sequence[Settings] = ()
) -> dict[str, Any]:
    """Return the document for programs: findings, files that could not be used, and the settings that were read.

    A duration without a limit is null: JSON has no infinity.
    """
    return {
        "files": files,
        "settings": [
            {
                "guard": guard,
                "name": one.name,
                "role": one.role,
                "seconds": None if math.isinf(one.seconds) else one.seconds,
                "file": one.file,
                "line": one.line,
            }
            for part in settings
            for guard, found in part.found.items()
            for one in found
        ],
        "findings": [
            {
                "code": one.code,
                "file": one.file,
                **_where(one.mark),
                "guard": one.guard,
                "message": one.says,
                "fix": one.fix,
            }
            for one in findings
        ],
        "problems": [{"file": one.file, **_where(one.mark), "message": one.says} for one in problems],
    }


def _where(mark: Mark | None) -> dict[str, int | None]:
    return {"line": mark.line if mark else None, "column": mark.column if mark else None}


def github(findings: Sequence[Finding], problems: Sequence[Problem]) -> list[str]:
    """Return workflow commands: GitHub shows each at its line of the change."""
    return [
        *(_command(one.file, one.mark, one.code, one.message) for one in findings),
        *(_command(one.file, one.mark, "unusable", one.says) for one in problems),
    ]


def _command(file: str, mark: Mark | None, title: str, message: str) -> str:
    facts: dict[str, object] = {"file": file.replace(os.sep, "/")}
    if mark is not None:
        facts["line"] = mark.line
        if mark.column is not None:
            facts["col"] = mark.column
    facts["title"] = f"onefold lint: {title}"
    properties = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in facts.items())
    return f"::error {properties}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    """Escape characters that would end a command, or a property of one."""
    for one in f"%\r\n{more}":
        text = text.replace(one, f"%{ord(one):02X}")
    return text


def sarif(findings: Sequence[Finding], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return SARIF 2.1.0, for code scanning."""
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "onefold lint", "semanticVersion": __version__, "rules": _rules()}},
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": not problems,
                        "toolExecutionNotifications": [
                            {
                                "level": "error",
                                "message": {"text": one.says},
                                "locations": [_location(one.file, one.mark)],
                            }
                            for one in problems
                        ],
                    }
                ],
                "results": [_result(one) for one in findings],
            }
        ],
    }


def _rules() -> list[dict[str, Any]]:
    return [
        {
            "id": rule.code,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.why},
            "defaultConfiguration": {"level": "error"},
        }
        for rule in RULES
    ]


def _result(one: Finding) -> dict[str, Any]:
    return {
        "ruleId": one.code,
        "ruleIndex": [rule.code for rule in RULES].index(one.code),
        "level": "error",
        "message": {"text": one.message},
        "locations": [
            {**_location(one.file, one.mark), "logicalLocations": [{"fullyQualifiedName": f"guards.{one.guard}"}]}
        ],
    }


def _location(file: str, mark: Mark | None) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(file)}}
    if mark is not None:
        physical["region"] = {"startLine": mark.line} | ({"startColumn": mark.column} if mark.column else {})
    return {"physicalLocation": physical}


def _uri(file: str) -> str:
    return Path(file).as_uri() if os.path.isabs(file) else quote(file.replace(os.sep, "/"))
