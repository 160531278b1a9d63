"""The answer of `check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shmacc_inspect.output import SCHEMA_VERSION

if TYPE_CHECKING:
    from shmacc import inspection


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` found."""

    subject: str
    severity: str
    kind: str
    problem: str
    remedy: str
    command: str | None

    @classmethod
    def of(cls, found: inspection.Finding) -> Self:
        """Convert the library's record."""
        return cls(
            subject=found.subject,
            severity=found.severity.value,
            kind=str(found.kind),
            problem=found.problem,
            remedy=found.remedy,
            command=found.command,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer of `check`."""

    checked: int
    not_compared: int
    wrong: int
    notes: int
    findings: list[Finding]
    schema_version: int = SCHEMA_VERSION
