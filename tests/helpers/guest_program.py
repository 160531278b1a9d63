"""Functions for programs that call `shmacc.run`: `from helpers.guest_program import *`.

`helpers.guest` starts these programs, and passes its settings in environment variables.
"""

import ctypes
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import shmacc

__all__ = [
    "WAY", "daemon", "gone", "has_marked", "mark", "marked", "once", "start", "start_two", "tell",
    "unchanged", "until",
]  # fmt: skip

WAY: Final = os.environ["GUEST_WAY"]  # a start method, or "command" for shmacc-run
_FOLDER: Final = Path(os.environ["GUEST_FOLDER"])
_OPTIONS: Final[dict[str, Any]] = json.loads(os.environ["GUEST_OPTIONS"])
_NAMESPACE: Final = os.environ["GUEST_NAMESPACE"]  # children have another namespace


def _kept_open(path: Path, flags: int) -> int:
    """Open a file and keep it open: later the program may have another user or few descriptors."""
    descriptor = os.open(path, flags)
    with suppress(OSError):  # the limit on descriptors may be below 200
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 200)
        os.close(descriptor)
        return high
    return descriptor


_TOLD: Final = _kept_open(_FOLDER / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_EVENTS: Final = _kept_open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
_GET_CHILD_SUBREAPER: Final = 37
_SIGNALS_OF_LIBC: Final = 3 << 31  # libc catches signals 32 and 33 once there is a thread
_SERVERS: Final = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
_SHM: Final = Path("/dev/shm")  # noqa: S108 - no temporary file
_OTHERS: Final = ("own", "asyncio")  # threads that the program has started itself

_libc: Final = ctypes.CDLL(None)


def tell(**facts: Any) -> None:
    """Tell the test something, in one line of JSON."""
    os.write(_TOLD, json.dumps(facts, default=repr).encode() + b"\n")


def mark(event: str, text: object = "") -> None:
    """Tell the other processes, and the test, that something has happened."""
    draft = f".{event}.{os.getpid()}.{threading.get_ident()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT, dir_fd=_EVENTS)
    os.write(descriptor, str(text).encode())
    os.close(descriptor)
    os.rename(draft, event, src_dir_fd=_EVENTS, dst_dir_fd=_EVENTS)


def has_marked(event: str) -> bool:
    """Say whether an event has happened."""
    return event in os.listdir(_EVENTS)  # noqa: PTH208  a path may be unreadable by now


def marked(event: str) -> str:
    """Wait for an event; return its text."""
    until(lambda: has_marked(event))
    descriptor = os.open(event, os.O_RDONLY, dir_fd=_EVENTS)
    text = os.read(descriptor, 10_000).decode()
    os.close(descriptor)
    return text


def once(event: str) -> bool:
    """Return True to the first caller with this event, and False to all later callers."""
    try:
        os.close(os.open(event, os.O_CREAT | os.O_EXCL, dir_fd=_EVENTS))
    except FileExistsError:
        return False
    return True


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition never came to hold in {os.getpid()}")
        time.sleep(0.002)


def gone(pid: int | str) -> bool:
    """Say whether a process has ended, reaped or not."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def start(chief: Callable[..., Any], worker: Callable[..., Any] | None = None, **more: Any) -> Any:
    """Call `run` with the test's options, or play the role for which `shmacc-run` started us.

    Tell the test the result. If `run` raises, tell its error and raise it on. `said` has the
    error's name, its text, and the first line of each note.
    """
    if WAY == "command":
        if os.environ["SHMACC_ROLE"] == "chief":
            tell(result=chief())
        elif worker is not None:
            worker(int(os.environ["SHMACC_RANK"]))
        return None
    options = {"context": WAY, "workers": 2 if worker else 0} | _OPTIONS | more
    try:
        with unchanged():
            result = shmacc.run(chief, worker, **options)
    except BaseException as error:
        try:
            text = str(error)
        except Exception as in_text:  # noqa: BLE001  a test's exception raises here
            text = f"its text raises {in_text!r}"
        notes = getattr(error, "__notes__", [])
        tell(
            error=type(error).__name__,
            said="\n".join([type(error).__name__, text, *(note.splitlines()[0] for note in notes)]),
            text=text,
            notes=notes,
        )
        raise
    tell(result=result)
    return result


def start_two(role: str) -> None:
    """Start one program in this process's group, and one in a session of its own."""
    for name, apart in (("group", False), ("session", True)):
        program = subprocess.Popen(["sleep", "600"], start_new_session=apart)
        mark(f"{role} {name}", program.pid)
    mark(f"{role} ready", os.getpid())


def daemon(environment: Mapping[str, str]) -> None:
    """Start a daemon by two forks, in its own session; it keeps this process's descriptors open.

    Its pid is marked as "stray", so that the test kills it in the end.
    """
    for descriptor in _numbers("/proc/self/fd"):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFD, 0)
    if os.fork() == 0:
        os.setsid()
        executed, before = os.pipe()
        if (pid := os.fork()) == 0:
            os.execve("/bin/sleep", ["sleep", "600"], environment)  # noqa: S606  closes the pipe
        os.close(before)
        os.read(executed, 1)  # until then it has the run's environment, and would be killed
        mark("stray", pid)
        os._exit(0)
    os.wait()
    marked("stray")


@contextmanager
def unchanged() -> Iterator[None]:
    """Tell the test what the block has changed: this process's settings, names, processes."""
    before = _surroundings()
    try:
        yield
    finally:
        # A process that was killed may take a moment to end.
        deadline = time.monotonic() + 5.0
        while (changed := _changes(before)) and time.monotonic() < deadline:
            time.sleep(0.002)
        tell(changed=changed)


def _changes(before: dict[str, Any]) -> dict[str, Any]:
    now = _surroundings()
    return {key: (before[key], now[key]) for key in now if before[key] != now[key]}


def _surroundings() -> dict[str, Any]:
    """Return the caller's settings, which `run` must restore or leave alone."""
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/thread-self/status").read_text().splitlines()
    )
    found: dict[str, Any] = {
        **{str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        **{
            name: hex(int(status[name], 16) & ~_SIGNALS_OF_LIBC)
            for name in ("SigIgn", "SigCgt", "SigBlk")
        },
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "processors": sorted(os.sched_getaffinity(0)),
        "group": os.getpgrp(),
        "arguments": list(sys.argv),
        "path": list(sys.path),
        "main": id(sys.modules["__main__"]),
        "children": _processes(lambda pid: _parent(pid) == os.getpid()),
        "in runs": _processes(_is_in_a_run),
        "names": sorted(path.name for path in _SHM.iterdir() if _NAMESPACE in path.name),
        "threads": sorted(
            thread.name for thread in threading.enumerate() if not thread.name.startswith(_OTHERS)
        ),
    }
    reaper = ctypes.c_int()
    _libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(reaper), 0, 0, 0)
    found["reaper"] = reaper.value
    if threading.current_thread() is threading.main_thread():
        found["wakeup"] = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found["wakeup"])
    if WAY == "fork" and sys.exc_info()[0] is None:
        # Other ways start servers, which stay; frames of an exception keep connections open.
        found["descriptors"] = _descriptors()
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        found["foreground"] = os.tcgetpgrp(terminal)
        os.close(terminal)
    return found


def _descriptors() -> list[str]:
    gc.collect()
    found = []
    for number in _numbers("/proc/self/fd"):
        with suppress(OSError):  # the folder's own descriptor is closed by now
            found.append(f"{number} {Path(f'/proc/self/fd/{number}').readlink()}")
    return found


def _processes(wanted: Callable[[int], bool]) -> list[str]:
    """Return the wanted processes, without the servers that multiprocessing starts once."""
    found = []
    for pid in _numbers("/proc"):
        with suppress(OSError, ValueError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if wanted(pid) and not any(server in command for server in _SERVERS):
                found.append(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return found


def _numbers(folder: str) -> list[int]:
    """Return the entries of a folder that are numbers: descriptors or pids."""
    return sorted(int(path.name) for path in Path(folder).iterdir() if path.name.isdigit())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_in_a_run(pid: int) -> bool:
    inside = f"SHMACC_NAMESPACE={_NAMESPACE}.".encode()
    return inside in Path(f"/proc/{pid}/environ").read_bytes() and not gone(pid)
