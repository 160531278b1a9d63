"""Describes a segment in full, except its rows.

It is separate from `_listing`, since a list needs fewer imports and must start sooner.
"""

from dataclasses import dataclass

from shmacc._base import layout, reports
from shmacc._base.layout import Activity
from shmacc._segment.stats import Stats, stats_of
from shmacc.inspection._listing import open_view, regions_of, summary_of
from shmacc.inspection._members import members_of, tables_of
from shmacc.inspection._observation import Observation
from shmacc.inspection._process_records import AttachedProcess, DepartedProcess, Event, WaitingTake
from shmacc.inspection._processes import Look
from shmacc.inspection._records import (
    ArraysUpdate,
    FinalRound,
    LateContributor,
    LockState,
    MemberDescription,
    Pace,
    Region,
    Stall,
    Summary,
)
from shmacc.inspection._scopes import resolve


@dataclass(frozen=True, slots=True)
class LaneLock:
    """The lock of a lane.

    Attributes:
        number: The lane, from 0.
        held: Whether a process holds the lock.
        pid: The holder's pid in this pid namespace; None: no holder, or it has none here.
    """

    number: int
    held: bool
    pid: int | None


@dataclass(frozen=True, slots=True)
class Description:
    """A segment in full, except its rows.

    Attributes:
        summary: As from `list_segments`.
        token: Tells this segment from others that had its name; part of the semaphore's name.
        generation: How many commits there were.
        round_shape: Shape of this round's values (sparse: without the leading dimension); None:
            there are none yet, or it has several members.
        stats: The counters.
        processes: The attached processes, living or dead.
        queue: Waiting takes in order.
        lock: The lock.
        round_holder: The living process that has a round open; None: no round is open.
        final_round: The update that makes the round final; None: the round is not final.
        suspected: As in the summary.
        departed: Processes that died or failed, while they are on record.
        update: An update of parameters that runs, or was interrupted and must be undone; None:
            none.
        regions: The file's regions, added up over all lanes and members.
        members: Its members, and what the open round has accumulated for each.
        lanes: The locks of its lanes.
        contributors: How many named contributors are in the round.
        events: The last 64 events, oldest first.
        index_load: How full the index is, 0 to 1; None: there is no index.
        pace: How the time of rounds was spent, and for whom they waited.
    """

    summary: Summary
    token: int
    generation: int
    round_shape: tuple[int, ...] | None
    stats: Stats
    processes: tuple[AttachedProcess, ...]
    queue: tuple[WaitingTake, ...]
    lock: LockState
    round_holder: AttachedProcess | None
    final_round: FinalRound | None
    suspected: Stall | None
    departed: tuple[DepartedProcess, ...]
    update: ArraysUpdate | None
    regions: tuple[Region, ...]
    members: tuple[MemberDescription, ...]
    lanes: tuple[LaneLock, ...]
    contributors: int
    events: tuple[Event, ...]
    index_load: float | None
    pace: Pace

    @property
    def head(self) -> WaitingTake | None:
        """The living take that is served next; None: no take waits."""
        return next((take for take in self.queue if take.alive), None)


def describe(name: str, look: Look | None = None) -> Description:
    """Describe a segment without reading its rows.

    Args:
        name: The segment.
        look: A look to share with other calls; None: a new one.

    Raises:
        NotFoundError: No segment has that name.
        DataLossError: The segment is damaged, or of another version.
        PermissionDeniedError: This user may not read the segment.
    """
    segment_name = resolve(name)
    with open_view(segment_name) as view:
        look = look or Look()
        seen = Observation.at(segment_name, view, look)
        state = seen.state
        places = state["index_buckets"] * layout.BUCKET_ENTRIES
        # If there are several members, each has its own shape.
        round_shape = state["round_shape"] if len(seen.config["members"]) == 1 else None
        summary = summary_of(segment_name, seen, look)
        return Description(
            summary=summary,
            token=seen.config["token"],
            generation=state["generation"],
            round_shape=None if round_shape is None else tuple(round_shape),
            stats=stats_of(state),
            processes=seen.processes,
            queue=seen.queue,
            lock=seen.lock,
            round_holder=seen.round_holder,
            final_round=_final_round(seen),
            suspected=summary.suspected,
            departed=seen.departed,
            update=_update(seen),
            regions=regions_of(seen),
            members=members_of(segment_name, seen),
            lanes=tuple(
                LaneLock(lane, held, pid or None)
                for lane in range(seen.config["lanes"])
                for held, pid in [view.lock_state(lane)]
            ),
            contributors=sum(
                table["rows"] for table in tables_of(seen, len(seen.config["members"]))
            ),
            events=seen.events,
            # This includes entries that undone operations may have left behind.
            index_load=min(1.0, state["index_filled"] / places) if places else None,
            pace=_pace(view.pace()),
        )


def _pace(seen: reports.Pace) -> Pace:
    late = sorted(seen["late"], key=lambda entry: -entry[2])
    unchecked, steps, most = seen["unchecked"]
    return Pace(
        waiting=seen["waiting_ns"] / 1e9,
        block=seen["block_ns"] / 1e9,
        between=seen["between_ns"] / 1e9,
        late=tuple(
            LateContributor(
                contributor=who if who >= 0 else None,
                pid=None if who >= 0 else -who,
                rounds=rounds,
                seconds=late_ns / 1e9,
            )
            for who, rounds, late_ns in late
        ),
        unchecked=unchecked,
        unchecked_steps=steps,
        most_unchecked_steps=most,
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
    """Return the uncommitted update; the processes' activities tell which process makes it."""
    if layout.KIND_NAMES.get(seen.config["kind"]) != "parameters" or not seen.lock.in_operation:
        return None
    updating = [each for each in seen.processes if each.activity == Activity.UPDATES]
    by = max(updating, key=lambda each: (each.alive, each.last_seen), default=None)
    if by is None:
        return ArraysUpdate(not seen.lock.held, seen.lock.pid, seen.lock.pid_is_here, None)
    return ArraysUpdate(not by.alive, by.pid, by.pid_is_here, by.last_seen)
