"""Reads the records that runs (`shmacc.run`) keep in shared memory, and their namespaces.

A run's record is shared arrays under a name that no shared_name has (`names.of_run`): what never
changes as text (JSON), and a row of numbers for each of its processes, by role. The process that
called `run` has it attached for as long as the run lasts, so the kernel proves whether it lives.

A row is written in one go while others read it. It begins and ends with a number that each write
counts up: two equal reads of a row that begins and ends alike are one write's.
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
LOOP_ENDS = 4  # so many ends of one role in a short time are a crash loop
_READS = 100  # of a row, until two are equal; a writer that was killed may leave unequal ends


class State(enum.IntEnum):
    """What a role's process does.

    Attributes:
        DUE: No process runs; one is started, perhaps again, when it is due.
        RUNNING: A process runs.
        FINISHED: The role has returned, and is not started again.
        ENDED: The role has ended otherwise, and is not started again.
    """

    DUE = 0
    RUNNING = 1
    FINISHED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run's record says from the beginning.

    Attributes:
        parent: The pid of the process that called `run`, as that knows it.
        outer: The namespace in which it was called; None: none.
        named: Whether the run has a name, and so may be gone on with.
        restarts: How often each process may be started again within 60 seconds.
        started: When `run` was called, in seconds since the epoch.
        command: The command line that called it, as a shell takes it; empty: it is not known.
        folder: The folder of the process that called it, then; empty: it was removed.
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
        """Return the facts that a record stores; ValueError if the text has none."""
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
    """One of a run's processes, and those that take its place one after the other.

    Attributes:
        role: "chief", "worker 0", ...
        state: What it does.
        pid: The pid, as the run's process knows it; 0: none runs.
        ends: How often it had ended within 60 seconds, at its last end.
        at: When the next one is started, in seconds since the epoch; else, since when it does this.
        ended: When one last ended; 0: none has.
        fourth_last_end: When the last end but three was; 0: there were fewer.
        restarts: How often it was started again since the run began.
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
    """A run's record, as it was read.

    Attributes:
        name: The record's name; its namespace is that of the run's children.
        facts: The facts that never change.
        holders: The process that called `run`, living or dead: nobody else has it attached.
        roles: The run's processes.
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
        Everything else as for `removal.view`.
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
    """Return the records of the runs that were started in such namespaces, or in these runs.

    A record that cannot be read is judged by its name.
    """
    there = records()
    outer: dict[str | None, str | None] = {}
    for name in there:
        with contextlib.suppress(ShmaccError):
            outer[name.namespace] = read(name).facts.outer

    def is_inside(inner: str | None) -> bool:
        seen: set[str | None] = set()  # a record that another user has forged may lead in a circle
        while inner in outer and inner not in seen:
            seen.add(inner)
            inner = outer[inner]
            if is_meant(inner):
                return True
        parts = (inner or "").split(".") if not seen else []
        return any(is_meant(".".join(parts[:count])) for count in range(1, len(parts)))

    return [name for name in there if is_inside(name.namespace)]


def of_namespaces(namespace: str) -> Callable[[str | None], bool]:
    """Return whether a namespace is this one, or inside it.

    A run that was started elsewhere may have a namespace that begins alike. It is not inside.
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
    """Remove all names in a namespace and in those inside it, in use or not; then the records.

    As long as a run's record is there, it can be told what the other names are.
    """
    is_inside = of_namespaces(namespace)
    found = []
    for file_name in names.files_in(namespace):
        semaphore = names.parse_semaphore_file(file_name)
        name = semaphore[0] if semaphore else names.parse_segment_file(file_name)
        if name is not None and is_inside(name.namespace):
            found.append((name.is_of_run, not semaphore, file_name))
    for _, _, file_name in sorted(found):
        # Another user may have made a file of such a name.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(f"{names.SHM_DIRECTORY}/{file_name}")
