"""Records of the processes that use a segment, or did."""

from dataclasses import dataclass


def pid_label(pid: int | None, *, is_here: bool) -> str:
    """Return a pid as messages show it: with a star if it belongs to another pid namespace."""
    if pid is None:
        return "?"
    return str(pid) if is_here else f"{pid}*"


def fate_of(reason: str, *, died: bool) -> str:
    """Return what became of a process, as the end of a sentence: "is dead", "has failed: ..."."""
    return "is dead" if died else f"has failed: {reason or 'why is not known'}"


class HasPid:
    """A record with a pid, of this pid namespace or of another one."""

    __slots__ = ()
    pid: int | None
    pid_is_here: bool

    @property
    def pid_label(self) -> str:
        """The pid as it is shown."""
        return pid_label(self.pid, is_here=self.pid_is_here)


@dataclass(frozen=True, slots=True)
class AttachedProcess(HasPid):
    """A process that has the segment open, or had it when it died.

    Attributes:
        entry: Its place in the segment's list of processes.
        pid: Its pid in this pid namespace, if it has one here; else in its own.
        pid_is_here: Whether `pid` is of this pid namespace.
        alive: Whether it holds its presence lock, which proves that it lives.
        condition: "running", "sleeping", "stopped", ...; empty if it is dead or not visible.
        command: Its command line, if it lives and is visible; else empty.
        activity: What it does: applies, takes, waits for the lock, waits in the queue, waits for
            the head of the queue, waits for the end of the round, waits for room, waits for the
            step, updates, idle.
        started: When the process was started (epoch seconds, like the times below); None: unknown,
            as for a process of another pid namespace.
        attached_at: When it attached.
        last_seen: When it last entered an operation, or came back from a wait.
        last_applied: When its last gradient was accepted; None: never.
        last_applied_step: The global step when its last gradient was accepted; None: never.
        applied: Gradients accepted from it.
        dropped: Gradients from it that were refused.
        taken: Gradients that it took.
        roles: What it has begun to do, ever: applies, takes, updates, looks on (copies what is
            there, or waits for the step), saves.
        took: Whether it has taken, or opened a round.
        last_took: When it last did; None: never.
    """

    entry: int
    pid: int
    pid_is_here: bool
    alive: bool
    condition: str
    command: str
    activity: str
    started: float | None
    attached_at: float
    last_seen: float
    last_applied: float | None
    last_applied_step: int | None
    applied: int
    dropped: int
    taken: int
    roles: tuple[str, ...]
    took: bool
    last_took: float | None


@dataclass(frozen=True, slots=True)
class DepartedProcess(HasPid):
    """A death or failure, still on record, of a worker, or of a process that had taken.

    Attributes:
        pid: Its pid, as its own pid namespace knows it.
        pid_is_here: Whether `pid` is of this pid namespace.
        died: Whether it has died; else it has failed.
        reason: Type and text of the exception that it failed with; empty: unknown, or it died.
        is_attached: Whether it is still attached: it has failed, but goes on.
        applied: Gradients accepted from it.
        roles: What it had begun to do, as in AttachedProcess.
        took: Whether it had taken, or opened a round.
        attached_at: When it attached.
        last_took: When it last took; None: never.
        at: When it was found to be gone, in seconds since the epoch; None: not recorded yet.
    """

    pid: int
    pid_is_here: bool
    died: bool
    reason: str
    is_attached: bool
    applied: int
    roles: tuple[str, ...]
    took: bool
    attached_at: float
    last_took: float | None
    at: float | None

    @property
    def fate(self) -> str:
        """What became of the process, in the words of `fate_of`."""
        return fate_of(self.reason, died=self.died)


@dataclass(frozen=True, slots=True)
class WaitingTake(HasPid):
    """A take that waits.

    Attributes:
        position: 1 for the head of the queue.
        entry: The entry of its process, as in AttachedProcess.
        pid: Its process, as in AttachedProcess; None if unknown.
        pid_is_here: Whether `pid` is of this pid namespace.
        num_required: The number of gradients it waits for.
        since: When it began to wait, in seconds since the epoch.
        alive: Whether its process lives, as the kernel proves.
        overdue: Whether applies have given up waiting for it.
    """

    position: int
    entry: int
    pid: int | None
    pid_is_here: bool
    num_required: int
    since: float
    alive: bool
    overdue: bool


@dataclass(frozen=True, slots=True)
class Event(HasPid):
    """Something that happened.

    Attributes:
        serial: Its number: events are counted from 1.
        kind: "died" (the process's entry was freed), "failed", "cancelled", "sealed", or
            "recovered" (an operation that a death had interrupted was undone).
        at: Seconds since the epoch.
        pid: The process concerned, by its pid in its own pid namespace.
        pid_is_here: Whether `pid` is of this pid namespace.
        step: The global step then.
        contributor: The contributor of a dead process's last gradient; None: it named none.
        roles: What the process had begun to do until then, as in AttachedProcess.
        reason: Type and text of the exception that a process failed with; else empty.
    """

    serial: int
    kind: str
    at: float
    pid: int
    pid_is_here: bool
    step: int
    contributor: int | None
    roles: tuple[str, ...]
    reason: str
