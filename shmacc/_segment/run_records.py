"""Reads the records that runs (`shmacc.run`) keep in shared memory, and their namespaces.

A run's record consists of shared arrays, under a name that no shared_name has (`names.of_run`): a
text of facts that never change, and a row of numbers for each role. The process that called `run`
has the record attached until the run ends, so the kernel knows whether it lives.

A row may be read while it is written. It begins and ends with the same counter, which each write
increases. So if two reads are equal, and begin and end alike, they are the result of one write.
"""

import contextlib
import enum
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from shmacc import _core
from shmacc._base import layout, names
from shmacc._base.names import SegmentName
from shmacc._base.reports import Participant
from shmacc._segment import removal
from shmacc.errors import DataLossError, ShmaccError

ROW = struct.Struct("=9q")
_ROLE = re.compile(r"[a-z]+( [0-9]+)?")
LOOP_ENDS = 4  # this many ends of a role in a short time are a crash loop
_READS = 100  # tries until two reads of a row agree; a killed writer may leave half a row


class State(enum.IntEnum):
    """The state of a role's process.

    Attributes:
        DUE: No process runs; one is started, perhaps again, when it is due.
        RUNNING: A process runs.
        FINISHED: The role has returned, and is not started again.
        ENDED: The process has ended without a return, and is not started again.
    """

    DUE = 0
    RUNNING = 1
    FINISHED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts in a run's record that never change.

    Attributes:
        parent: The pid of the process that called `run`, in its own pid namespace.
        outer: The namespace in which `run` was called; None: outside of namespaces.
        named: Whether the run has a name, and so can be continued.
        restarts: How often each process may be started again within 60 seconds.
        started: When `run` was called, in seconds since the epoch.
        command: The command line that called `run`, quoted for a shell; empty: unknown.
        folder: The folder in which `run` was called; empty: it was removed.
        roles: The roles: "chief", "worker 0", ...
    """

    parent: int
    outer: str | None
    named: bool
    restarts: int
    started: float
    command: str
    folder: str
    roles: tuple[str, ...]

    def text(self) -> bytes:
        """Return the facts as a record stores them: strings separated by NULs."""
        numbers = (self.parent, self.outer or "", int(self.named), self.restarts, self.started)
        fields = (*map(str, numbers), self.command, self.folder, *self.roles)
        return "\0".join(fields).encode(errors="surrogateescape")

    @classmethod
    def of_text(cls, text: bytes) -> Self:
        """Return the facts that a record's text has; ValueError if they are malformed."""
        fields = text.decode(errors="surrogateescape").split("\0")
        parent, outer, named, restarts, started, command, folder, *roles = fields
        if (outer and not names.is_namespace(outer)) or not all(map(_ROLE.fullmatch, roles)):
            raise ValueError(f"no namespace and roles: {outer!r}, {roles}")
        return cls(
            *(int(parent), outer or None, named != "0", int(restarts), float(started)),
            *(command, folder, tuple(roles)),
        )


@dataclass(frozen=True, slots=True)
class Role:
    """A role in a run. One process at a time has it; when it ends, another may be started.

    Attributes:
        role: "chief", "worker 0", ...
        state: The state of the role's process.
        pid: The process's pid, in the pid namespace of the run's parent; 0: no process runs.
        ends: How often the role's process ended in the 60 seconds up to its last end.
        at: When the next process is due, or when this state began; in seconds since the epoch.
        ended: When the last process ended; 0: none has ended.
        fourth_last_end: When the fourth-last end was; 0: there were fewer ends.
        restarts: How often the role was started again since the run began.
    """

    role: str
    state: State
    pid: int
    ends: int
    at: float
    ended: float
    fourth_last_end: float
    restarts: int


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a run's record.

    Attributes:
        name: The record's name. Its namespace is the namespace of the run's children.
        facts: The facts that never change.
        holders: The process that called `run`, living or dead; only it attaches the record.
        roles: The run's roles.
    """

    name: SegmentName
    facts: Facts
    holders: tuple[Participant, ...]
    roles: tuple[Role, ...]

    @property
    def alive(self) -> bool:
        """Whether the process that called `run` lives."""
        return any(holder["alive"] for holder in self.holders)


def read(name: SegmentName) -> Record:
    """Return a run's record.

    Raises:
        DataLossError: The record is damaged.
        All other errors are those of `removal.view`.
    """
    with contextlib.closing(removal.view(name)) as view:
        text, rows = view.table(0, 0), view.table(0, 1)
        try:
            facts = Facts.of_text(_bytes(text))
            return Record(
                name,
                facts,
                tuple(view.participants()),
                tuple(_role(rows, at, role) for at, role in enumerate(facts.roles)),
            )
        except (ValueError, IndexError, struct.error) as error:
            raise DataLossError(f"The segment is damaged: {error}").about(
                name.system_name
            ) from None


def _bytes(table: _core.SegmentView) -> bytes:
    (size,) = table.config()["declared"] or (0,)
    return table.read(layout.REGIONS["rows 0"], 0, size)


def _role(rows: _core.SegmentView, at: int, role: str) -> Role:
    row: tuple[int, ...] = ()
    for _ in range(_READS):
        before, row = row, ROW.unpack(rows.read(layout.REGIONS["rows 0"], at * ROW.size, ROW.size))
        if row == before and row[0] == row[-1]:
            break
    _, state, pid, ends, moment, ended, fourth, restarts, _ = row
    return Role(role, State(state), pid, ends, moment / 1e9, ended / 1e9, fourth / 1e9, restarts)


def records() -> list[SegmentName]:
    """Return the names of all runs' records, sorted."""
    found = map(names.parse_segment_file, sorted(os.listdir(names.SHM_DIRECTORY)))
    return [name for name in found if name is not None and name.is_of_run]


def started_in(is_meant: Callable[[str | None], bool]) -> list[SegmentName]:
    """Return the records of runs started in a namespace `is_meant` accepts, and of runs in those.

    If a record cannot be read, its name decides.
    """
    there = records()
    outer: dict[str | None, str | None] = {}
    for name in there:
        with contextlib.suppress(ShmaccError):
            outer[name.namespace] = read(name).facts.outer

    def is_inside(inner: str | None) -> bool:
        seen: set[str | None] = set()  # another user's forged record may lead in a circle
        while inner in outer and inner not in seen:
            seen.add(inner)
            inner = outer[inner]
            if is_meant(inner):
                return True
        parts = (inner or "").split(".") if not seen else []
        return any(is_meant(".".join(parts[:count])) for count in range(1, len(parts)))

    return [name for name in there if is_inside(name.namespace)]


def of_namespaces(namespace: str) -> Callable[[str | None], bool]:
    """Return a function that tells whether a namespace is this one, or inside it.

    A run started elsewhere may have a namespace that begins alike, but is not inside.
    """
    inside = {name.namespace for name in started_in(lambda other: other == namespace)}
    elsewhere = [
        name.namespace
        for name in records()
        if name.namespace not in {namespace, *inside} and names.is_in(namespace, name.namespace)
    ]

    def is_inside(other: str | None) -> bool:
        return names.is_in(namespace, other) and not any(
            names.is_in(each, other) for each in elsewhere if each
        )

    return is_inside


def remove_namespace(namespace: str) -> None:
    """Remove all names in a namespace and in namespaces inside it, even names in use.

    Remove the runs' records last: until then, they say which other names belong to the runs.
    """
    is_inside = of_namespaces(namespace)
    found = []
    for file_name in names.files_in(namespace):
        semaphore = names.parse_semaphore_file(file_name)
        name = semaphore[0] if semaphore else names.parse_segment_file(file_name)
        if name is not None and is_inside(name.namespace):
            found.append((name.is_of_run, not semaphore, file_name))
    for _, _, file_name in sorted(found):
        # Another user may have made a file or folder of such a name.
        with contextlib.suppress(OSError):
            os.unlink(f"{names.SHM_DIRECTORY}/{file_name}")
