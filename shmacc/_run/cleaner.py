"""Kills the processes that a run has left behind, and removes the run's names.

This program runs beside the run's own process, so that it can act when that process is killed. Each
run starts it, so it imports little, and nothing of this library. The run's process sends it lines:
``+PID`` when a process group begins, ``-PID`` when the group has ended; and at the end ``remove``,
with further namespaces to clear, or ``keep``, if the names must stay. It answers with the pids that
it has killed.

It notices the death of the run's process by a pidfd, or because its own parent changes; and by the
end of its standard input that this process executes another program. A death may not end the input:
a process that was forked by other code than Python's keeps the other end open.

A process belongs to the run if it is in a child's group, or if it has the run's token. An executed
program has the token in its environment; a forked process has it in the name of an inherited file
in memory. So a process that left its group (setsid, a daemon) is found, too. Processes that are
older than this one are skipped.

A run over hosts has a supervisor on each node. If that is killed, Ray starts another one, to which
the names stay. If Ray itself ends on this node, nobody does, and the names go.
"""

import os
import select
import sys
import time

TYPE_CHECKING = False  # as `typing` has it, which takes longer to import than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "SHMACC_RUN"  # in a child: the tokens of outer runs, then the run's own
MARK = "shmacc run "  # the name of a file in memory, before the token
RECORD = ":%run"  # in the names of a run's record and of its semaphore
_LOOKS = 20  # how often to look for names and processes
_PAUSE = 0.1  # seconds
_PF_KTHREAD = 0x200000  # in a process's flags: it belongs to the kernel
_SIGKILL = 9  # a number, since importing `signal` takes longer than a look for processes


class Job:
    """What to clean up.

    Attributes:
        token: The text that marks the run's processes.
        folder: The folder of the names.
        namespace: The namespace of the names.
        named: Whether the run has a name. If so, names stay when the run's process is killed.
        starter: The process that then starts another one. Once it has ended, the names go. 0: none.
        variables: What the environments of the processes have that the starter started for the run.
    """

    def __init__(
        self,
        token: str,
        folder: str,
        namespace: str,
        named: bool,
        starter: int = 0,
        variables: tuple[str, ...] = (),
    ) -> None:
        self.token, self.folder, self.namespace, self.named = token, folder, namespace, named
        self.starter, self.variables = starter, variables


def kill_group(number: int) -> None:
    """Kill a process group."""
    try:  # noqa: SIM105  contextlib takes as long to import as all else here
        os.killpg(number, _SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _kill(pid: int) -> bool:
    """Kill a process; return whether it was there."""
    try:
        os.kill(pid, _SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _stat(pid: int | str) -> list[bytes]:
    """Return a process's fields in /proc from the third one, its state."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def started(pid: int | str) -> tuple[str, int]:
    """Return a process's state, and its start in ticks; ("X", 0) if there is no such process."""
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0].decode(), int(fields[19])


def _environment(pid: str) -> list[bytes]:
    """Return the variables with which a process was executed ("NAME=value").

    While the kernel replaces a process's program, the process has neither an environment nor code.
    """
    code = 0
    for _ in range(_LOOKS):
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read()
        fields, before = _stat(pid), code
        flags, code = int(fields[6]), int(fields[23])
        if variables or flags & _PF_KTHREAD or code == before != 0:
            break
        time.sleep(_PAUSE / 10)
    return variables.split(b"\0")


def _processes(belongs: "Callable[[str], bool]", oldest: int = 0) -> "Iterator[int]":
    """Yield the other processes that `belongs` accepts, begun at the tick `oldest` or later.

    If /proc is not of this namespace of pids, yield none: its pids are those of other processes.
    """
    if os.path.realpath("/proc/self") != f"/proc/{os.getpid()}":
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, ticks = started(name)
            if state in "XZ" or ticks < oldest or int(name) == os.getpid() or not belongs(name):
                continue
        except (OSError, ValueError):  # it has ended by now, or is another user's
            continue
        yield int(name)


def kill_marked(token: str) -> list[int]:
    """Kill the processes that have the token; return their pids."""
    oldest = started(os.getpid())[1]
    return [pid for pid in _processes(lambda name: _is_marked(name, token), oldest) if _kill(pid)]


def _is_marked(pid: str, token: str) -> bool:
    # Look at the files first: an execution closes them before it sets the environment.
    mark = f"/memfd:{MARK}"
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:  # closed meanwhile
            continue
        tokens = target.removeprefix(mark).removesuffix(" (deleted)").split("/")
        if target.startswith(mark) and token in tokens:
            return True
    variable = f"{VARIABLE}=".encode()
    return any(
        each.startswith(variable) and token.encode() in each[len(variable) :].split(b"/")
        for each in _environment(pid)
    )


def remove_names(job: Job, inner: list[str]) -> None:
    """Remove the names in the job's namespace, and in the namespaces `inner`.

    If the run is unnamed, also remove names in namespaces that begin with the job's. They belong to
    failed inner runs, with which nobody can go on, since the outer run's namespace was random.

    Remove the runs' records last: until then, nobody can begin a run of the same name.
    """
    for file in sorted(os.listdir(job.folder), key=lambda file: (RECORD in file, file)):
        namespace, colon, _ = file.removeprefix("sem.").removeprefix("shmacc.").partition(":")
        inside = namespace in inner or (not job.named and namespace.startswith(f"{job.namespace}."))
        if colon and (inside or namespace == job.namespace):
            try:  # noqa: SIM105  as above
                os.unlink(f"{job.folder}/{file}")
            except OSError:  # another user's, or a folder
                pass


def end(job: Job) -> list[int]:
    """Kill the marked processes until there are none; return their pids."""
    killed: list[int] = []
    for _ in range(_LOOKS):
        found = kill_marked(job.token)
        killed += found
        if not found:
            break
        time.sleep(_PAUSE / 10)
    return killed


def executed_with(variables: tuple[str, ...]) -> list[int]:
    """Return the other processes that were executed with all these variables ("NAME=value")."""
    wanted = {variable.encode() for variable in variables}
    return list(_processes(lambda name: wanted <= set(_environment(name))))


def _has_names(job: Job) -> bool:
    begin = f"shmacc.{job.namespace}:"
    return any(file.startswith(begin) for file in os.listdir(job.folder))


def _outlive(job: Job, begun: int) -> None:
    """Remove the names once the starter has ended, if there is one; it began at the tick `begun`.

    If another starter has started processes of the run since, these have the names, which stay.
    """
    if not job.starter:
        return
    while started(job.starter)[1] == begun and started(job.starter)[0] not in "XZ":
        if not _has_names(job):  # a later process has removed them
            return
        time.sleep(1.0)
    ended = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    for _ in range(_LOOKS):
        there = executed_with(job.variables)
        if any(started(pid)[1] > ended for pid in there):
            return
        if not there:
            break
        for pid in there:  # else it might make a name again
            _kill(pid)
        time.sleep(_PAUSE)
    remove_names(Job(job.token, job.folder, job.namespace, named=False), [])


def _watching(parent: int) -> tuple[select.poll, float]:
    """Return a poll object for input and the parent's end, and how many seconds to poll at most."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except OSError:  # a kernel without pidfds, or one that refuses them
        return poll, _PAUSE
    return poll, 60.0


def main(parent: int, job: Job) -> None:
    """Serve the process `parent`, which has started this one."""
    groups, told = set[int](), b""
    poll, pause = _watching(parent)
    begun = started(job.starter)[1]
    while os.getppid() == parent:
        if not any(descriptor == 0 for descriptor, _ in poll.poll(1000 * pause)):
            continue
        read = os.read(0, 4096)
        if not read:
            break
        *lines, told = (told + read).split(b"\n")
        for line in lines:
            what, *inner = line.decode().split()
            if what in {"remove", "keep"}:
                killed = end(job)
                if what == "remove":
                    remove_names(job, inner)
                os.write(1, f"{' '.join(map(str, killed))}\n".encode())
                return
            (groups.add if what[0] == "+" else groups.discard)(int(what[1:]))
    # The kernel kills the children with their parent, but not the processes that they have
    # started, nor a child that has changed its user.
    for group in groups:
        kill_group(group)
    for _ in range(_LOOKS):
        end(job)
        if not job.named:
            remove_names(job, [])
        time.sleep(_PAUSE)
    _outlive(job, begun)


if __name__ == "__main__":
    _parent, _token, _folder, _namespace, _kind, _starter, *_variables = sys.argv[1:]
    _more = int(_starter), tuple(_variables)
    # If a script stands for Python, and starts it, this process does not see the end of `parent`,
    # and must not take its own parent for a new one.
    if os.getppid() == int(_parent) or started(_parent)[0] in "XZ":
        main(int(_parent), Job(_token, _folder, _namespace, _kind == "named", *_more))
