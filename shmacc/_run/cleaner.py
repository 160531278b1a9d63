"""Ends what a run has started and left behind, and removes the run's names.

This is a program: a process beside the run's own, so that it can act when that one is killed. It
imports little, and nothing of the library, since each run starts it. The run's process tells it, a
line each, which process groups there are (``+PID``, ``-PID``), and at the end whether the names go
(``remove``, and in which namespaces besides) or stay (``keep``). Then it answers with the pids that
it has killed.

It sees the death of the run's process by a pidfd, or by its own new parent, not by the end of its
standard input: any process that the program forks inherits the other end of that.

A process belongs to the run if it is in the group of a child, or if it has the run's token: in the
environment with which it was executed; or, if it was forked by a child, in the name of a file in
memory that it inherited. So a process that left its group (setsid, a daemon) is found as well.
Processes that are older than this one are not looked into.

A run over hosts has a supervisor on each node, and names that stay for the next one if it is
killed. Ray starts that, until it ends on this node itself: then the names go.
"""

import os
import select
import sys
import time

VARIABLE = "SHMACC_RUN"  # in a child: the tokens of the outer runs, then the run's own
MARK = "shmacc run "  # the name of a file in memory, before the token
_LOOKS = 20  # for names and processes, after the run's process was killed
_PAUSE = 0.1  # seconds
_SIGKILL = 9  # to import signal takes longer than to look for processes


class Job:
    """What is to be cleaned up.

    Attributes:
        token: The mark of the run's processes.
        folder: Where the names are.
        namespace: The namespace of the names.
        named: Whether the run has a name, so that the names stay if its process is killed.
        starter: The process that starts another one then, and without which they go; 0: none does.
        variables: What processes have in the environment that it has started for the run.
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


def started(pid: int | str) -> tuple[str, int]:
    """Return a process's state and the time of its start in ticks; ("X", 0): there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0].decode(), int(fields[19])


def kill_marked(token: str) -> list[int]:
    """Kill the processes that have the token; return their pids."""
    oldest, killed = started(os.getpid())[1], []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, ticks = started(name)
            if state not in "XZ" and ticks >= oldest and _is_marked(name, token):
                os.kill(int(name), _SIGKILL)
                killed.append(int(name))
        except (OSError, ValueError):  # it has ended by now, or is another user's
            pass
    return killed


def _is_marked(pid: str, token: str) -> bool:
    variable = f"{VARIABLE}=".encode()
    with open(f"/proc/{pid}/environ", "rb") as file:
        for each in file.read().split(b"\0"):
            if each.startswith(variable) and token.encode() in each[len(variable) :].split(b"/"):
                return True
    mark = f"/memfd:{MARK}"
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith(mark) and token in target[len(mark) :].split()[0].split("/"):
            return True
    return False


def remove_names(job: Job, inner: list[str]) -> None:
    """Remove the names in the namespace, and in the namespaces `inner`.

    In those that begin like an unnamed run's, too: since it has a random number, they are of runs
    inside of it that have failed, and nobody can go on with them.
    """
    for file in os.listdir(job.folder):
        namespace, colon, _ = file.removeprefix("sem.").removeprefix("shmacc.").partition(":")
        inside = namespace in inner or (not job.named and namespace.startswith(f"{job.namespace}."))
        if colon and (inside or namespace == job.namespace):
            try:  # noqa: SIM105  as above
                os.unlink(f"{job.folder}/{file}")
            except (FileNotFoundError, PermissionError):  # another user's
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


def _with_variables(job: Job) -> list[int]:
    """Return the processes that have the job's variables in the environment."""
    wanted, found = {variable.encode() for variable in job.variables}, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted <= set(file.read().split(b"\0")):
                    found.append(int(name))
        except OSError:  # it has ended by now, or is another user's
            pass
    return found


def _has_names(job: Job) -> bool:
    begin = f"shmacc.{job.namespace}:"
    return any(file.startswith(begin) for file in os.listdir(job.folder))


def _outlive(job: Job, begun: int) -> None:
    """Remove the names once the starter, which has `begun` then, has ended, if there is one.

    If another one has started something for the run since, that has the names, and they stay.
    """
    if not job.starter:
        return
    while started(job.starter)[1] == begun and started(job.starter)[0] not in "XZ":
        if not _has_names(job):  # a later process has removed them
            return
        time.sleep(1.0)
    ended = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    for _ in range(_LOOKS):
        there = _with_variables(job)
        if any(started(pid)[1] > ended for pid in there):
            return
        if not there:
            break
        for pid in there:  # else it might make a name again
            try:  # noqa: SIM105  as above
                os.kill(pid, _SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_PAUSE)
    remove_names(Job(job.token, job.folder, job.namespace, named=False), [])


def _watching(parent: int) -> tuple[select.poll, float]:
    """Return a poll object for input and the parent's end, and the seconds to poll at most."""
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
    # The kernel kills the children with their parent, but not what they have started, nor a child
    # that has changed its user.
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
    main(int(_parent), Job(_token, _folder, _namespace, _kind == "named", *_more))
