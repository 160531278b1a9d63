"""Records of what `check` and `leftovers` find."""

import enum
from dataclasses import dataclass

from shmacc._layout.names import SegmentName

NOTHING = "nothing: "
"""Begins a remedy that asks for no action; the reason follows."""


class Severity(enum.StrEnum):
    """How serious a finding is.

    Attributes:
        WRONG: Somebody has to do something.
        NOTE: Worth knowing; it needs no action, or was done on purpose.
    """

    WRONG = "wrong"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a check found.

    Attributes:
        subject: The file, or the part of a file, that the finding is about.
        severity: How serious it is.
        kind: The cause, in one word for programs.
        problem: What is wrong.
        remedy: What to do, in words.
        command: The whole shell command that does it, for this subject alone; None: there is none.
    """

    subject: str
    severity: Severity
    kind: str
    problem: str
    remedy: str
    command: str | None


def wrong(
    subject: str, kind: str, problem: str, remedy: str, remedy_command: str | None = None
) -> Finding:
    """Return a finding that needs somebody to act."""
    return Finding(subject, Severity.WRONG, kind, problem, remedy, remedy_command)


def note(
    subject: str, kind: str, problem: str, remedy: str, remedy_command: str | None = None
) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(subject, Severity.NOTE, kind, problem, remedy, remedy_command)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no living process uses, or that could not be judged.

    Attributes:
        name: The segment itself, or the segment that the semaphore belonged to.
        file_name: Its name in /dev/shm.
        removable: Whether it is proved unused, and this user may remove it. If not, `why` gives the
            obstacle.
        why: Why it is listed.
        age: Seconds since it was made.
        idle: Seconds since it was last used, as far as is known.
        private: Whether it is a private accumulator's, which no process will use again.
        bytes_reserved: Bytes of memory that it occupies.
    """

    name: SegmentName
    file_name: str
    removable: bool
    why: str
    age: float
    idle: float
    private: bool
    bytes_reserved: int
