"""A segment's counters."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from shmacc._base.reports import State


@dataclass(frozen=True, slots=True)
class Stats:
    """A segment's counters at one instant.

    ``applied == taken + discarded + num_accumulated`` at all times.

    Attributes:
        applied: Gradients accepted since the segment was made.
        dropped: Gradients refused, as stale, because of a seal, or after the end.
        repeated: Gradients not added, because their ``contributor`` was in the round already.
        discarded: Gradients accepted, then dropped by ``advance_step``.
        taken: Gradients handed out by takes.
        takes: Takes that returned a result (a partial of nothing included).
        num_accumulated: Gradients waiting to be taken.
        rows: Distinct rows that the pending gradients touch (sparse; dense: 0).
        global_step: The accumulator's step.
        sealed: Whether applies at `global_step` are refused: because a round is open, or its update
            has begun, or after ``take_partial(seal=True)``. (That seal also refuses applies of a
            later step; in the other cases these wait.)
        finished: Whether the accumulator is finished: nothing is accepted or taken any more.
        waiting: Takes of living processes that wait in the queue.
        attached: Living processes that have the segment open.
        recoveries: Operations that a death interrupted, and that were undone.
        applied_bytes: Bytes of the accepted gradients' values, in the type of the sums.
        round_pid: The process that has a round open, as its own pid namespace knows it; None: no
            round is open.
        round_since: When the round was opened, in seconds since the epoch; None: no round is open.
        update: "begun" if an update of parameters by the current round has begun, so that the round
            takes no more gradients, open or not; "in" once the update is in the parameters; None:
            neither.
        update_pid: The process that began the update, or found it in the parameters, as its own pid
            namespace knows it.
        update_since: When the update began, in seconds since the epoch.
    """

    applied: int
    dropped: int
    repeated: int
    discarded: int
    taken: int
    takes: int
    num_accumulated: int
    rows: int
    global_step: int
    sealed: bool
    finished: bool
    waiting: int
    attached: int
    recoveries: int
    applied_bytes: int
    round_pid: int | None
    round_since: float | None
    update: Literal["begun", "in"] | None
    update_pid: int | None
    update_since: float | None

    COUNTERS: ClassVar = (
        "applied", "applied_bytes", "dropped", "repeated", "discarded", "taken", "takes",
        "recoveries",
    )  # fmt: skip
    """The fields that only grow."""


def stats_of(state: State) -> Stats:
    """Return the counters that the extension reports."""
    held = state["round"] if state["round_pid"] else None  # pid 0: its process is dead
    update = state["update"]
    return Stats(
        **state["counters"],
        num_accumulated=state["count"],
        rows=state["all_rows"],
        global_step=state["step"],
        sealed=state["sealed"] or held is not None or update is not None,
        finished=state["finished"],
        waiting=state["waiting"],
        attached=state["attached"],
        round_pid=state["round_pid"] or None,
        round_since=None if held is None else held["since_ns"] / 1e9,
        update=None if update is None else "in" if update["is_in"] else "begun",
        update_pid=None if update is None else update["pid"],
        update_since=None if update is None else update["since_ns"] / 1e9,
    )
