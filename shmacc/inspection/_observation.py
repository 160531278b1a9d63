"""One look at a segment: its committed state, and the processes that use it.

No lock is taken, so the reads are not of one instant. `steady` tells that there was no commit
meanwhile: then the state, the queue and the processes belong together.

A process has a pid in its own pid namespace, and another in each namespace around it. Its entry has
the pid of its own namespace. If a process asks who holds a record lock, the kernel answers with the
pid in the asker's namespace. So a process's presence lock, which proves that it lives, also tells
its pid here; and the holder of the segment's lock is the living process with the same pid. A
process without a pid here (in another container, or outside this one) is shown with the pid of its
own namespace, and marked.
"""

import math
import time
from dataclasses import dataclass, replace

from shmacc import _core
from shmacc._base import layout
from shmacc._base.names import SegmentName
from shmacc._base.reports import LaneMember, LaneMemberConfig, ObservedState, Participant, Waiter
from shmacc.inspection._posix_names import semaphore_value
from shmacc.inspection._process_records import AttachedProcess, DepartedProcess, Event, WaitingTake
from shmacc.inspection._processes import HALTED, Look, started
from shmacc.inspection._records import LockState

_LOOKS = 5
_FREE = LockState(False, None, False, "", None, tokens=None, in_operation=False, name_pid=None)  # noqa: FBT003


@dataclass(frozen=True, slots=True)
class Observation:
    """What one look at a segment has found.

    Attributes:
        view: The segment.
        config: The segment's configuration.
        state: The committed state; `attached` and `waiting` count living processes only.
        tables: For each lane, the table of each member, then the table of contributors.
        steady: Whether there was no commit meanwhile.
        processes: The attached processes, living or dead.
        identities: By entry, the key of its process, which is the same in all segments.
        departed: Processes that died or failed.
        events: The last 64 events, in order.
        queue: Waiting takes in order.
        lock: The lock.
        name_holder_condition: The condition of the process that holds the name lock.
        round_holder: The living process that has a round open.
        last_used: When a process last attached or began an operation.
        last_applied: When a gradient was last accepted; 0: never.
        last_took: When a process last took; 0: never.
    """

    view: _core.SegmentView
    config: LaneMemberConfig
    state: ObservedState
    tables: list[LaneMember]
    steady: bool
    processes: tuple[AttachedProcess, ...]
    identities: dict[int, tuple[int, int, int]]
    departed: tuple[DepartedProcess, ...]
    events: tuple[Event, ...]
    queue: tuple[WaitingTake, ...]
    lock: LockState
    name_holder_condition: str
    round_holder: AttachedProcess | None
    last_used: float
    last_applied: float
    last_took: float

    @classmethod
    def at(cls, name: SegmentName, view: _core.SegmentView, look: Look) -> "Observation":
        """Look at a segment, a few times if there is a commit meanwhile."""
        for _ in range(_LOOKS - 1):
            seen = cls._once(name, view, look)
            if seen.steady:
                return seen
        return cls._once(name, view, look)

    @classmethod
    def _once(cls, name: SegmentName, view: _core.SegmentView, look: Look) -> "Observation":
        config, generation = view.config(), view.state()["generation"]
        participants = view.participants()
        attached = tuple(attached_process(entry, look) for entry in participants)
        entries = {entry["entry"]: entry for entry in participants}
        queue = _queue(view.waiters(), attached)
        lock = _lock(name, view, attached, look)
        used, applied, took = view.last_used_ns()
        events = _events(view, look)
        now = view.state()
        in_operation = now["in_operation"] or any(
            view.table(lane, 0).state()["in_operation"] for lane in range(1, config["lanes"])
        )
        held = now["round"]
        holder = next(
            (
                process
                for process in attached
                if process.alive
                and held is not None
                and process.entry == held["participant"]
                # Another process may have the entry by now.
                and entries[process.entry]["token"] == held["token"]
            ),
            None,
        )
        state: ObservedState = {
            **now,
            "attached": sum(process.alive for process in attached),
            "waiting": sum(take.alive for take in queue),
            "round_pid": entries[holder.entry]["pid"] if holder else 0,  # in its own namespace
        }
        return cls(
            view=view,
            config=config,
            state=state,
            tables=view.tables(),
            # No lock is held: if nothing was committed meanwhile, all the reads belong together.
            steady=state["generation"] == generation,
            processes=attached,
            identities={number: identity(entry) for number, entry in entries.items()},
            departed=_departed(view, look),
            events=events,
            queue=queue,
            lock=replace(lock, in_operation=in_operation),
            name_holder_condition=look.condition(lock.name_pid) if lock.name_pid else "",
            round_holder=holder,
            last_used=used / 1e9,
            last_applied=applied / 1e9,
            last_took=took / 1e9,
        )


def identity(entry: Participant) -> tuple[int, int, int]:
    """Return a key that identifies a process in all segments."""
    return entry["pid_namespace"], entry["pid"], entry["start_ticks"]


def attached_process(entry: Participant, look: Look) -> AttachedProcess:
    own, ticks, alive = entry["pid"], entry["start_ticks"], entry["alive"]
    same = look.is_own(entry["pid_namespace"], entry["attached_ns"] / 1e9)
    # In this pid namespace, take the pid from the entry: the kernel may name a process that holds a
    # lock only while it reads the file. If the process lives in another namespace, the kernel has
    # just told its pid here. If it is dead, take 0: another process may have its pid by now.
    pid = own if same else entry["pid_here"] if alive else 0
    visible = alive and pid > 0 and (not same or look.is_the_one(pid, ticks))
    applied = entry["applied_ns"] > 0
    return AttachedProcess(
        entry=entry["entry"],
        pid=pid or own,
        pid_is_here=pid > 0,
        alive=alive,
        condition=look.condition(pid) if visible else "",
        command=look.command(pid) if visible else "",
        activity=layout.ACTIVITY_NAMES.get(entry["activity"], "?"),
        started=started(ticks) if same else None,
        attached_at=entry["attached_ns"] / 1e9,
        last_seen=entry["seen_ns"] / 1e9,
        last_applied=entry["applied_ns"] / 1e9 if applied else None,
        last_applied_step=entry["applied_step"] if applied else None,
        applied=entry["applied"],
        dropped=entry["dropped"],
        taken=entry["taken"],
        roles=layout.roles_of(entry["roles"]),
        took=entry["took_ns"] > 0,
        last_took=entry["took_ns"] / 1e9 if entry["took_ns"] else None,
    )


def _departed(view: _core.SegmentView, look: Look) -> tuple[DepartedProcess, ...]:
    found = []
    for each in view.departures():
        at = None if each["at_ns"] is None else each["at_ns"] / 1e9
        found.append(
            DepartedProcess(
                pid=each["pid"],
                pid_is_here=look.is_own(each["pid_namespace"], time.time() if at is None else at),
                died=each["died"],
                reason=each["reason"],
                is_attached=each["attached"],
                applied=each["applied"],
                roles=layout.roles_of(each["roles"]),
                took=each["took_ns"] > 0,
                attached_at=each["attached_ns"] / 1e9,
                last_took=each["took_ns"] / 1e9 if each["took_ns"] else None,
                at=at,
            )
        )
    return tuple(found)


def _events(view: _core.SegmentView, look: Look) -> tuple[Event, ...]:
    return tuple(
        Event(
            serial=event["serial"],
            kind=layout.EVENT_NAMES.get(event["kind"], "?"),
            at=event["at_ns"] / 1e9,
            pid=event["pid"],
            pid_is_here=look.is_own(event["pid_namespace"], event["at_ns"] / 1e9),
            step=event["step"],
            contributor=event["contributor"] if event["contributor"] >= 0 else None,
            roles=layout.roles_of(event["roles"]),
            reason=event["reason"],
        )
        for event in sorted(view.events(), key=lambda event: event["serial"])
    )


def _queue(waiting: list[Waiter], attached: tuple[AttachedProcess, ...]) -> tuple[WaitingTake, ...]:
    by_entry = {process.entry: process for process in attached}
    takes = []
    waiters = sorted(waiting, key=lambda waiter: waiter["ticket"])
    for position, waiter in enumerate(waiters, start=1):
        process = by_entry.get(waiter["participant"])
        takes.append(
            WaitingTake(
                position=position,
                entry=waiter["participant"],
                pid=process.pid if process else None,
                pid_is_here=process is not None and process.pid_is_here,
                num_required=waiter["num_required"],
                since=waiter["since_ns"] / 1e9,
                alive=waiter["alive"],
                overdue=waiter["overdue"],
            )
        )
    return tuple(takes)


def _lock(
    name: SegmentName, view: _core.SegmentView, attached: tuple[AttachedProcess, ...], look: Look
) -> LockState:
    config = view.config()
    states = [view.lock_state(lane) for lane in range(config["lanes"])]
    locks = [_held_by(pid, attached, look) for held, pid in states if held]
    return replace(
        min(locks, key=_blame, default=_FREE),
        tokens=semaphore_value(name.system_name, config["token"]),
        name_pid=view.name_lock_state()[1] or None,
    )


def _held_by(pid: int, attached: tuple[AttachedProcess, ...], look: Look) -> LockState:
    """Return a lane's lock. `pid` is the holder's pid in this namespace; 0: it has none here."""
    owner = _owner(attached, pid)
    # A process that may read the file may hold the lock without being attached.
    return replace(
        _FREE,
        held=True,
        pid=owner.pid if owner else pid or None,
        pid_is_here=owner.pid_is_here if owner else pid > 0,
        condition=owner.condition if owner else look.condition(pid) if pid else "",
        since=owner.last_seen if owner else None,
    )


def _blame(lock: LockState) -> tuple[bool, bool, float]:
    """Return a sort key: the lock that keeps the other locks' owners waiting comes first.

    A take holds the locks of the first lanes while it waits for a lock of a stopped process.
    """
    since = math.inf if lock.since is None else lock.since
    return lock.condition not in HALTED, bool(lock.condition), since


def _owner(attached: tuple[AttachedProcess, ...], pid: int) -> AttachedProcess | None:
    """Return the living process that holds the lock, by its pid here; None: unknown."""
    if pid:
        return next(
            (each for each in attached if each.alive and each.pid_is_here and each.pid == pid), None
        )
    elsewhere = [each for each in attached if each.alive and not each.pid_is_here]
    # Prefer a process that applies or takes: it owns the lock. Other operations need it, too.
    under_it = [each for each in elsewhere if each.activity in layout.UNDER_THE_LOCK]
    candidates = under_it or elsewhere
    return candidates[0] if len(candidates) == 1 else None
