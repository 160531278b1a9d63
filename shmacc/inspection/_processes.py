"""Reads in ``/proc`` about the processes that use segments.

The results are for messages and prove nothing: only the record lock that a process holds proves
that the process lives (presence.hpp).
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shmacc import _core
from shmacc.errors import FailedPreconditionError

HALTED = frozenset({"stopped", "traced"})
CONDITIONS = {
    "R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced",
    "Z": "dead", "X": "dead", "I": "idle",
}  # fmt: skip
_CONDITION_FIELD = 0  # counted after the command's name in parentheses
_START_FIELD = 19
_TICK = 1.0  # seconds; times since boot are less exact than the clock
_MOMENT = 0.05  # seconds; an inspector has a file open for less


@dataclass(frozen=True, slots=True)
class _Process:
    condition: str  # empty if it is not visible
    start_ticks: int


_HIDDEN = _Process("", 0)


class Look:
    """One look at many segments; it reads each process's files in /proc only once.

    Use it for a moment only: processes change. Pids are those of this pid namespace.

    Attributes:
        own_namespace: The number (inode) of this process's pid namespace.
        elsewhere: What `_elsewhere` has read during this look.
        runs: What `_runs` has read.
    """

    def __init__(self) -> None:
        """Begin a look; /proc is read only when it is needed.

        Raises:
            FailedPreconditionError: There is no /proc.
        """
        try:
            self.own_namespace: int = os.stat("/proc/self/ns/pid").st_ino
        except FileNotFoundError:
            raise FailedPreconditionError(
                "/proc is not mounted, where processes are looked at: mount -t proc proc /proc"
            ) from None
        # A /proc may be that of a pid namespace around this one: its pids mean nothing here.
        self._proc_is_own = os.readlink("/proc/self") == str(os.getpid())
        self._processes: dict[int, _Process] = {}
        self._commands: dict[int, str] = {}
        self._programs: set[str] | None = None
        self.elsewhere: object = None
        self.runs: object = None
        self._users_of_files: dict[tuple[int, int], set[int]] | None = None

    def is_own(self, namespace: int, moment: float) -> bool:
        """Whether a pid namespace is this one.

        The kernel reuses the number of a namespace that is gone.

        Args:
            namespace: The namespace's number.
            moment: When the namespace had that number, in seconds since the epoch.
        """
        if namespace != self.own_namespace:
            return False
        first = self._process(1)
        return not first.condition or moment >= started(first.start_ticks) - _TICK

    def condition(self, pid: int) -> str:
        """Return the state of `pid`: "running", "stopped", ...; empty if it is not visible."""
        return self._process(pid).condition

    def is_the_one(self, pid: int, start_ticks: int) -> bool:
        """Whether `pid` is still the process that started `start_ticks` after the boot."""
        process = self._process(pid)
        # Allow one tick: the kernel's rounding may differ between time namespaces.
        return bool(process.condition) and abs(process.start_ticks - start_ticks) <= 1

    def command(self, pid: int) -> str:
        """Return the command line of `pid`; empty if it is not visible."""
        if pid not in self._commands:
            self._commands[pid] = _command(pid) if self._proc_is_own else ""
        return self._commands[pid]

    def sees(self, program: str) -> bool:
        """Whether a process named `program` runs here, or may run hidden from this user."""
        if self._programs is None:
            self._programs = _programs()
        return program in self._programs or not others_are_visible()

    def openers(self, path: str) -> list[int]:
        """Return the pids of the other visible processes that keep the file at `path` open.

        Another inspector has each file open for a moment only, so this looks twice.
        """
        if self._users_of_files is None:
            folder = os.path.dirname(path) + "/"
            users = users_of_files(folder)
            if users:
                time.sleep(_MOMENT)
                still = users_of_files(folder)
                users = {file: pids & still.get(file, set()) for file, pids in users.items()}
            self._users_of_files = users
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError:
            return []
        return sorted(self._users_of_files.get((status.st_dev, status.st_ino), ()))

    def _process(self, pid: int) -> _Process:
        if pid not in self._processes:
            self._processes[pid] = _stat(pid) if self._proc_is_own else _HIDDEN
        return self._processes[pid]


def _programs() -> set[str]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", "rb") as comm:
            found.add(comm.read().strip().decode(errors="replace"))
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def started(start_ticks: int) -> float:
    """Return a process's start, by the machine's clock, from field 22 of its stat file."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - _core.boottime_offset_ns() / 1e9
    booted = time.time() - since_boot
    return booted + start_ticks / os.sysconf("SC_CLK_TCK")


def others_are_visible() -> bool:
    """Whether this user may see other users' processes: a /proc mounted with hidepid hides them."""
    return os.access("/proc/1/stat", os.R_OK)


def _stat(pid: int) -> _Process:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            # The command's name, in parentheses, may have parentheses and spaces.
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return _HIDDEN
    tick = 10**9 // os.sysconf("SC_CLK_TCK")  # nanoseconds
    start = int(fields[_START_FIELD])
    if start >= 2**63 // tick:  # before the time namespace's clock began: the kernel's number wraps
        start -= 2**64 // tick
    start -= _core.boottime_offset_ns() // tick
    return _Process(CONDITIONS.get(fields[_CONDITION_FIELD], "?"), start)


def open_files(below: str) -> Iterator[tuple[int, str, str]]:
    """Yield the open files of visible processes: the pid, the link in /proc, and the link's target.

    A damaged or unlinked file cannot tell who uses it. `below` is the prefix of the target's path.
    """
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = f"/proc/{pid}/fd/{fd}"
                    target = os.readlink(link)
                    if target.startswith(below):
                        yield pid, link, target


def users_of_files(below: str) -> dict[tuple[int, int], set[int]]:
    """Return the pids of other processes that have a file open, by its device and inode."""
    found: dict[tuple[int, int], set[int]] = {}
    for pid, link, _ in open_files(below):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            status = os.stat(link)  # does not open the file
            found.setdefault((status.st_dev, status.st_ino), set()).add(pid)
    for users in found.values():
        users.discard(os.getpid())
    return found
