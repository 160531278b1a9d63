"""Finds the runs (`shmacc.run`) that segments belong to, in one look."""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from shmacc._base import names
from shmacc._base.names import SegmentName
from shmacc._segment import run_records
from shmacc._segment.run_records import LOOP_ENDS, Facts, Role, State
from shmacc.errors import PermissionDeniedError, ShmaccError
from shmacc.inspection._findings import (
    NOTHING,
    RUN_GONE,
    SAME_CALL,
    Finding,
    command,
    goes_on,
    note,
    wrong,
)
from shmacc.inspection._observation import attached_process
from shmacc.inspection._process_records import AttachedProcess, pid_label
from shmacc.inspection._processes import HALTED, Look
from shmacc.inspection._records import Stall
from shmacc.inspection._scopes import namespaces, run_label

_STARTS_FOR = 60.0  # seconds that a process may take from its start until it has attached
_LOOP = 300.0  # seconds; `LOOP_ENDS` ends within these are a crash loop
_AS_ITS_OWNER = "look as its owner, or as root"


class Run:
    """A run, living or dead.

    Attributes:
        name: The record's name.
        namespace: The namespace of the run's children.
        label: The namespace, as RUN in ``RUN/NAME``.
        facts: The part of the record that never changes; None: the record cannot be read.
        roles: The run's processes.
        why: Why its record cannot be read; empty: it can.
        unreadable: Whether this user lacks the right to read the record.
        parent: The process that called `run`; None: it has left the record.
    """

    def __init__(self, name: SegmentName, look: Look, *, held: bool = False) -> None:
        """Read the run's record; `held` says whether this process has the record attached."""
        self.name = name
        self.namespace: str = name.namespace or ""
        self.label: str = run_label(self.namespace)
        self.facts: Facts | None = None
        self.roles: tuple[Role, ...] = ()
        self.parent: AttachedProcess | None = None
        self.why: str = ""
        self.unreadable: bool = False
        try:
            record = run_records.read(name)
        except ShmaccError as error:
            self.why = error.problem or str(error)
            self.unreadable = isinstance(error, PermissionDeniedError)
            return
        self.facts, self.roles = record.facts, record.roles
        holders = [
            attached_process(each, look)
            for each in record.holders
            if not held or each["pid_here"] != os.getpid()
        ]
        holders.sort(key=lambda each: not each.alive)
        self.parent = next(iter(holders), None)

    @property
    def alive(self) -> bool:
        """Whether the process that called `run` lives; True if that is not known."""
        return self.facts is None or (self.parent is not None and self.parent.alive)

    @property
    def stopped(self) -> bool:
        """Whether the process that called `run` is stopped or traced."""
        return self.parent is not None and self.parent.condition in HALTED

    @property
    def state(self) -> str:
        """What the process that called `run` does: "lives", "stopped", "gone", or "unreadable"."""
        if self.facts is None:
            return "unreadable"
        return ("stopped" if self.stopped else "lives") if self.alive else "gone"

    @property
    def named(self) -> bool:
        """Whether the run has a name, and so can go on; True if that is not known."""
        return self.facts is None or self.facts.named

    @property
    def pid(self) -> str:
        """The pid of the process that called `run`, as it is shown."""
        if self.parent is not None:
            return self.parent.pid_label
        return pid_label(self.facts.parent if self.facts else None, is_here=True)

    def remedy(self, stall: Stall) -> Stall:
        """Return this stall of a segment of this living run, with a remedy that fits the run."""
        if (stall.command or "").startswith("kill "):
            return stall
        if self.stopped:
            words, paste = self._goes_on()
            problem = f"{stall.problem}; its run's process, pid {self.pid}, is stopped"
            return replace(stall, problem=problem, remedy=words, command=paste)
        done = [role.role for role in self.roles if role.state is State.FINISHED]
        returned = f" ({', '.join(done)} returned)" if done else ""
        ends = "" if self.named else ", whose names then go"
        return replace(
            stall,
            remedy=f"see what the processes of {self.told()} do{returned}; to cancel a wait ends "
            f"its program, and so the run{ends}",
            command=None,
        )

    def told(self) -> str:
        """Return in words which run it is, and which process called `run`."""
        if self.facts is None:
            return f"its run {self.label}, whose record cannot be read, perhaps"
        return f"its run {self.label}, pid {self.pid},"

    def starting(self, attached: Collection[int]) -> list[Role]:
        """Return the roles whose process may still attach to a segment.

        Args:
            attached: The pids, in their own namespaces, of the living processes that have the
                segment attached.
        """
        lately = time.time() - _STARTS_FOR
        return [
            role
            for role in self.roles
            if role.state is State.DUE
            or (role.state is State.RUNNING and role.at > lately and role.pid not in attached)
        ]

    def loops(self) -> list[Role]:
        """Return the roles whose processes end again and again."""
        return [role for role in self.roles if role.fourth_last_end > time.time() - _LOOP]

    def again(self) -> list[Role]:
        """Return the roles whose process is being started again, or was lately."""
        lately = time.time() - _STARTS_FOR
        return [
            role
            for role in self.roles
            if role.ended
            and (role.state is State.DUE or (role.state is State.RUNNING and role.at > lately))
        ]

    def findings(self, around: Collection["Run"]) -> Iterator[Finding]:
        """Yield what is wrong with the run itself, and what is worth knowing.

        Args:
            around: The run in which this run was started, then the next outer run, and so on.
        """
        subject, facts = self.name.system_name, self.facts
        if facts is None:
            if self.unreadable:
                yield note(subject, "unreadable", self.why, _AS_ITS_OWNER)
            else:
                yield wrong(
                    subject,
                    "damaged",
                    self.why,
                    "end its run, and remove the record",
                    command("shmacc-inspect", "remove", subject, "--force", "--yes"),
                )
            return
        if not self.alive:
            yield self._gone(around)
            return
        if self.parent is not None and self.stopped:
            yield wrong(
                subject,
                "run_stopped",
                f"pid {self.pid}, which called the run {self.label}, is {self.parent.condition}: "
                "it starts no process again, and passes on no signal",
                *self._goes_on(),
            )
        loops = self.loops()
        for role in loops:
            seconds = role.ended - role.fourth_last_end
            yield wrong(
                subject,
                "run_crash_loop",
                f"{role.role} has ended {LOOP_ENDS} times within {seconds:.0f} s; "
                f"{self.told()} has started it again {role.restarts} times",
                "see why it ends (its log; dmesg: out of memory?), and mend that: until then it "
                "ends again",
            )
        for role in self.again():
            if role not in loops and not self.stopped:
                yield note(
                    subject,
                    "started_again",
                    f"{role.role} has ended: its run, pid {self.pid}, starts it again, {role.ends} "
                    f"of {facts.restarts}",
                    NOTHING + "it is started at once the first time, then after up to 5 s",
                )

    def _goes_on(self) -> tuple[str, str | None]:
        words, paste = goes_on([self.pid], self.parent.condition if self.parent else "")
        return "let it go on" if paste else words, paste

    def _gone(self, around: Collection["Run"]) -> Finding:
        problem = f"pid {self.pid}, which called the run {self.label}, is gone"
        for outer in around:
            goes = "lives: a process of it calls this one again, or this one goes with it"
            why = f"{outer.told()} {goes if outer.alive else 'is gone, too: see what to do there'}"
            return note(self.name.system_name, RUN_GONE, problem, NOTHING + why)
        if not self.named:
            return wrong(
                self.name.system_name,
                RUN_GONE,
                f"{problem}: nobody goes on with a run that has no name",
                "remove what is left of it",
                self.clean(),
            )
        words, again = self.same_call()
        if not any(inside(self)):
            words = "nothing of it is left, so the same call begins anew"
        paste = f": `{again}`" if again else ""
        return wrong(
            self.name.system_name,
            RUN_GONE,
            problem,
            f"{words}{paste}; or, if nobody will, remove all of it: `{self.clean()}`",
        )

    def same_call(self) -> tuple[str, str | None]:
        """Return how to go on with this named, dead run: in words, and as a command."""
        words = f"{SAME_CALL} {self.label}, in the environment that it had"
        try:
            own = os.stat(self.name.path, follow_symlinks=False).st_uid == os.geteuid()
        except OSError:
            own = False
        facts = self.facts
        # A command from another user's record must not be offered for running.
        if facts is None or not own or not facts.command or not facts.command.isprintable():
            return words, None
        place = command("cd", facts.folder) if facts.folder else "true"
        around = f"{names.NAMESPACE_VARIABLE}={facts.outer or ''}"
        return words, f"{place} && {around} {facts.command}"

    def clean(self) -> str:
        """Return the command that removes all of this run."""
        return command("shmacc-inspect", "clean", "-n", self.namespace, "--yes")


class Runs:
    """The runs of one look; each is read when it is first asked for.

    Attributes:
        held: The namespace of the run whose record this process has attached.
    """

    held: str | None = None

    def __init__(self, look: Look | None = None) -> None:
        """Read no record before it is asked for; if `look` is None, the first read makes a look."""
        self._look = look
        self._found: dict[str, Run | None] = {}

    @classmethod
    def of(cls, look: Look) -> "Runs":
        """Return the object that all segments of this look share."""
        if look.runs is None:
            look.runs = cls(look)
        assert isinstance(look.runs, cls)  # noqa: S101
        return look.runs

    def at(self, namespace: str | None) -> Run | None:
        """Return the run whose children have this namespace; None: there is no such run."""
        if not namespace:
            return None
        if namespace not in self._found:
            name = names.of_run(namespace)
            there = os.path.lexists(name.path)
            self._found[namespace] = self._read(name) if there else None
        return self._found[namespace]

    def _read(self, name: SegmentName) -> Run:
        self._look = self._look or Look()
        return Run(name, self._look, held=name.namespace == self.held)

    def started_in(self, run: Run) -> Iterator[Run]:
        """Yield the runs that were started inside `run`."""
        for name in run_records.started_in(lambda other: other == run.namespace):
            found = self.at(name.namespace)
            if found is not None:
                yield found

    def around(self, namespace: str | None) -> Iterator[Run]:
        """Yield the run of a namespace, then the run around it, and so on outwards."""
        seen: set[str | None] = set()  # a record that another user has forged may lead in a circle
        while (run := self.at(namespace)) is not None and namespace not in seen:
            seen.add(namespace)
            yield run
            namespace = run.facts.outer if run.facts else None

    def living(self, namespace: str | None) -> Run | None:
        """Return the innermost living run around a namespace; None: there is none."""
        return next((run for run in self.around(namespace) if run.alive), None)

    def outermost(self, namespace: str | None) -> Run | None:
        """Return the outermost run around a namespace; None: there is none."""
        run = None
        for run in self.around(namespace):  # noqa: B007  the last one
            pass
        return run


def list_runs(namespace: str | None = None) -> tuple[Run, ...]:
    """List all runs that have a record, living or dead, by name.

    Args:
        namespace: As in `list_segments`.
    """
    runs, is_inside = Runs(), namespaces(namespace)
    found = (runs.at(name.namespace) for name in run_records.records() if is_inside(name.namespace))
    return tuple(run for run in found if run is not None)


def inside(run: Run) -> Iterator[SegmentName]:
    """Yield the segments of a run and of all runs inside it, but not the runs' records."""
    is_inside = run_records.of_namespaces(run.namespace)
    with contextlib.suppress(FileNotFoundError):
        for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
            name = names.parse_segment_file(file_name)
            if name is not None and is_inside(name.namespace) and not name.is_of_run:
                yield name
