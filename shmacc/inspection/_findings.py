"""Records of what `check` and `leftovers` find, and their wording."""

import enum
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from shmacc._base.names import SegmentName

NOTHING = "nothing: "
"""Begins a remedy that asks for no action; the reason follows."""
START_AGAIN = "start its job again, which goes on with it"
SAME_CALL = "the same call goes on with the run"
RUN_GONE = "run_gone"
LOAD_AGAIN = "load the checkpoint again, into the same accumulators and parameters"


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


def command(*words: str) -> str:
    """Return a command, quoted for pasting into a shell."""
    return shlex.join(words)


def memory(count: int) -> str:
    """Return a number of bytes in a unit that needs few digits: "2.4 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.5 and len(units) > 1:  # noqa: PLR2004  the next unit from where it is rounded
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def pids(labels: Iterable[str]) -> str:
    """Return pids as the subject of a sentence: "pid 7", "pids 7, 9"."""
    found = list(labels)
    return f"{'pid' if len(found) == 1 else 'pids'} {', '.join(found)}"


def goes_on(labels: list[str], condition: str) -> tuple[str, str | None]:
    """Return the remedy for stopped or traced processes: in words, and as a command.

    A label with a star is of another pid namespace.
    """
    if condition == "traced":
        return "let the debugger go on", None
    if any(label.endswith("*") for label in labels):
        return "in its pid namespace: kill -CONT", None
    it = "it" if len(labels) == 1 else "them"
    return f"let {it} go on, or end {it}: an unfinished operation is undone", command(
        "kill", "-CONT", *labels
    )
