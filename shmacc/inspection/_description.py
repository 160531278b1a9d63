"""Describes a segment in full, except its rows.

Apart from `_listing`, since a list needs less and is to be there sooner.
"""

from dataclasses import dataclass

from shmacc._layout import layout
from shmacc._records.stats import Stats, stats_of
from shmacc.inspection._listing import open_view, regions_of, resolve, summary_of
from shmacc.inspection._members import members_of, tables_of
from shmacc.inspection._observation import Observation
from shmacc.inspection._processes import Look
from shmacc.inspection._records import (
    ArraysUpdate,
    AttachedProcess,
    DepartedProcess,
    FinalRound,
    HasPid,
    LockState,
    MemberDescription,
    Region,
    Stall,
    Summary,
    WaitingTake,
)
from shmacc.inspection._standstill import suspected


@dataclass(frozen=True, slots=True)
class LaneState:
    """The lock of a lane.

    Attributes:
        number: The lane, from 0.
        held: Whether a process holds the lock.
        pid: The holder here; 0: none, or it has no pid here.
    """

    number: int
    held: bool
    pid: int


@dataclass(frozen=True, slots=True)
class Event(HasPid):
    """Something that happened.

    Attributes:
        serial: Its number: events are counted from 1.
        kind: "died" (and its place was given to others), "failed", "cancelled", "sealed", or
            "recovered" (what a process had left half done when it died was undone).
        at: Seconds since the epoch.
        pid: The process that did, or to which it happened, as its own pid namespace knows it.
        pid_is_here: Whether that is this pid namespace.
        step: The global step then.
        contributor: Of a process that died: of its last gradient; None: it named none.
        reason: Of a process that failed: the exception, its type and text; else empty.
    """

    serial: int
    kind: str
    at: float
    pid: int
    pid_is_here: bool
    step: int
    contributor: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Description:
    """A segment in full, except its rows.

    Attributes:
        summary: As from `list_segments`.
        token: Identifies this segment among those that had the name; in the semaphore's name.
        generation: How many commits there were.
        round_shape: Shape of this round's values (sparse: without the leading dimension); None:
            there are none yet, or it has several members.
        stats: The counters.
        processes: Those attached, living or dead.
        line: Waiting takes in order.
        lock: The lock.
        round_holder: The living process that has a round open; None: no round is open.
        final_round: What makes the round final; None: it is not.
        suspected: A standstill that is not proved: the process that others wait for is alive.
        departed: Processes that died or failed, as long as that is on record.
        update: Of parameters: an update that runs, or waits to be put back; None: there is none.
        regions: The layout; of all lanes and members together.
        members: What it accumulates, and what the round has of it.
        lanes: The locks of its lanes.
        contributors: How many named contributors are in the round.
        events: What happened lately, the last 64, oldest first.
        index_load: Filled part of the index, 0 to 1; None without one.
    """

    summary: Summary
    token: int
    generation: int
    round_shape: tuple[int, ...] | None
    stats: Stats
    processes: tuple[AttachedProcess, ...]
    line: tuple[WaitingTake, ...]
    lock: LockState
    round_holder: AttachedProcess | None
    final_round: FinalRound | None
    suspected: Stall | None
    departed: tuple[DepartedProcess, ...]
    update: ArraysUpdate | None
    regions: tuple[Region, ...]
    members: tuple[MemberDescription, ...]
    lanes: tuple[LaneState, ...]
    contributors: int
    events: tuple[Event, ...]
    index_load: float | None


def describe(name: str, look: Look | None = None) -> Description:
    """Describe a segment without reading its rows.

    Args:
        name: The segment.
        look: The look that this is a part of; None: one of its own.

    Raises:
        NotFoundError: There is none of that name.
        DataLossError: It is damaged, or of another version.
        PermissionDeniedError: It is not this user's to read.
    """
    segment_name = resolve(name)
    with open_view(segment_name) as view:
        look = look or Look()
        seen = Observation.at(segment_name, view, look)
        state = seen.state
        places = state["index_buckets"] * layout.BUCKET_ENTRIES
        # With several members each has its own shape.
        round_shape = state["round_shape"] if len(seen.config["members"]) == 1 else None
        return Description(
            summary=summary_of(segment_name, seen),
            token=seen.config["token"],
            generation=state["generation"],
            round_shape=None if round_shape is None else tuple(round_shape),
            stats=stats_of(state),
            processes=seen.processes,
            line=seen.line,
            lock=seen.lock,
            round_holder=seen.round_holder,
            final_round=_final_round(seen),
            suspected=None if seen.config["kind"] in layout.ARRAYS else suspected(seen),
            departed=seen.departed,
            update=_update(seen),
            regions=regions_of(seen),
            members=members_of(segment_name, seen),
            lanes=tuple(
                LaneState(lane, *view.lock_state(lane)) for lane in range(seen.config["lanes"])
            ),
            contributors=sum(
                table["rows"] for table in tables_of(seen, len(seen.config["members"]))
            ),
            events=tuple(
                Event(
                    serial=event["serial"],
                    kind=layout.EVENT_NAMES.get(event["kind"], "?"),
                    at=event["at_ns"] / 1e9,
                    pid=event["pid"],
                    pid_is_here=look.is_own(event["pid_namespace"], event["at_ns"] / 1e9),
                    step=event["step"],
                    contributor=event["contributor"] if event["contributor"] >= 0 else None,
                    reason=event["reason"],
                )
                for event in sorted(view.events(), key=lambda event: int(event["serial"]))
            ),
            # Includes every entry that undone operations may have left behind.
            index_load=min(1.0, state["index_filled"] / places) if places else None,
        )


def _final_round(seen: Observation) -> FinalRound | None:
    update = seen.state["update"]
    if update is None:
        return None
    return FinalRound(
        is_in=update["is_in"],
        pid=update["pid"],
        since=update["since_ns"] / 1e9,
        held=seen.round_holder is not None,
    )


def _update(seen: Observation) -> ArraysUpdate | None:
    """Return the update that is not committed. What runs is known by the processes' activities."""
    if layout.KIND_NAMES.get(seen.config["kind"]) != "parameters" or not seen.lock.in_operation:
        return None
    updating = [each for each in seen.processes if each.activity == "updates"]
    by = max(updating, key=lambda each: (each.alive, each.last_seen), default=None)
    if by is None:
        return ArraysUpdate(not seen.lock.held, seen.lock.pid, seen.lock.pid_is_here, None)
    return ArraysUpdate(not by.alive, by.pid, by.pid_is_here, by.last_seen)
