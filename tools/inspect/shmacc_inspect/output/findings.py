"""The answer of `check`."""

from __future__ import annotations

from dataclasses import dataclass

from shmacc_inspect.output import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` found.

    Attributes:
        subject: The file that it is about.
        severity: `wrong` (somebody has to act) or `note`.
        kind: One word, the same for the same cause.
        problem: What is wrong.
        remedy: What to do, in words.
        command: The whole command for this one thing, quoted for a shell; null where none helps.
    """

    subject: str
    severity: str
    kind: str
    problem: str
    remedy: str
    command: str | None


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer of `check`.

    Attributes:
        checked: Segments that were checked.
        not_read: Those beside them that this user may not read.
        not_compared: Those of them whose rows changed too fast to be compared with the index.
        wrong: Findings that are wrong.
        notes: Findings that are notes.
        findings: All of them.
    """

    checked: int
    not_read: int
    not_compared: int
    wrong: int
    notes: int
    findings: list[Finding]
    schema_version: int = SCHEMA_VERSION
