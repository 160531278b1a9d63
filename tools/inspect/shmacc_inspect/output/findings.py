"""The answer of `check`."""

from __future__ import annotations

from dataclasses import dataclass

from shmacc_inspect.output import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` found."""

    subject: str
    severity: str
    kind: str
    problem: str
    remedy: str
    command: str | None


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer of `check`."""

    checked: int
    not_compared: int
    wrong: int
    notes: int
    findings: list[Finding]
    schema_version: int = SCHEMA_VERSION
