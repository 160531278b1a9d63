"""What one look at a segment tells about its waits: who waits, who could end it, and who is gone.

What an idle process will do cannot be seen from outside. But what each process has done is known:
one that took, opened a round or waits to take is a *taker*; one that sent gradients is an
*applier*. Once there are takers, a process that never took is none of them, whatever it calls
(`snapshot`, `save`, `stats`): it is not waited for, and its calls postpone nothing. Nor is a taker
whose successor attached after its last take. With appliers it is the same, but more may come at
any time: a process that did neither may still send its first gradient, unless it was there before
an applier was lost, or has let rounds pass for `LONG_IDLE`.

A process that attached after the last taker (or applier) was lost may replace it: it has
`AT_THE_START` (or `LONG_IDLE`: a first gradient takes longer) to do so. But if it came later than
`REPLACED_WITHIN`, it has to show that it does: else visitors would hide the loss for ever.

The time since when nothing moves counts from what takers and appliers did, and from when those
who wait attached. (It does not count from the start of the waits: a process that waits in short
pieces always has a new one.)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from shmacc._base import layout
from shmacc._base.layout import UNTIL_A_TAKE, Activity
from shmacc.inspection._observation import Observation
from shmacc.inspection._process_records import AttachedProcess, WaitingTake
from shmacc.inspection._processes import HALTED

AT_THE_START = 8.0  # seconds; a standstill must be named within 10
AFTER_TAKES = 5.0
AFTER_GRADIENTS = 5.0
AFTER_A_DEATH = 1.0
LONG_IDLE = 30.0
REPLACED_WITHIN = 30.0
_LONG_OPERATION = 5.0  # a commit takes milliseconds
_FOUND = 1.0  # a death is dated back by this: its finder may be the replacement
_TICK = 0.07  # the unit of `last_took`
_APPLIES = {
    *(Activity.APPLIES, Activity.WAITS_FOR_ROOM),
    *(Activity.WAITS_FOR_HEAD, Activity.WAITS_FOR_ROUND),
}


def waits_for_a_take(process: AttachedProcess) -> bool:
    """Whether the process goes on only when another one has taken."""
    return process.activity in UNTIL_A_TAKE


def is_halted(process: AttachedProcess) -> bool:
    """Whether a process is stopped or traced."""
    return process.condition in HALTED


@dataclass(frozen=True, slots=True)
class Lost:
    """A process that died or failed.

    Attributes:
        label: Its pid, as messages show it.
        fate: What became of it, as the end of a sentence.
        at: When it was last there.
        attached_at: When it attached.
        last_took: When it last took; None: never.
        took: Whether it took, or waited to take.
        applied: Whether it was a worker.
    """

    label: str
    fate: str
    at: float
    attached_at: float
    last_took: float | None
    took: bool
    applied: bool


class Facts:
    """What is known of one segment's waits.

    Attributes:
        name: The segment's system name.
        seen: The look at it.
        now: The time of the look.
        alive: The living processes that are attached.
        head: The living take that is served next; None: none waits.
        waiting: Living processes that wait for a take.
        killed: Whether entries of dead processes are there.
        elsewhere: Returns in which other segment a process is in a call, and in which one.
    """

    def __init__(
        self, name: str, seen: Observation, elsewhere: Callable[..., tuple[str, str] | None]
    ) -> None:
        """Collect the facts."""
        self.name = name
        self.elsewhere = elsewhere
        self.seen = seen
        self.now = time.time()
        self.alive = [each for each in seen.processes if each.alive]
        self.head: WaitingTake | None = next((take for take in seen.queue if take.alive), None)
        self.waiting = [each for each in self.alive if waits_for_a_take(each)]
        self.killed = len(self.alive) < len(seen.processes)
        self._queued = {take.entry for take in seen.queue}

    # -- the round ---------------------------------------------------------------------------------

    @property
    def is_reached(self) -> bool:
        """Whether the head has what it waits for."""
        head, state = self.head, self.seen.state
        return head is not None and (
            state["count"] >= head.num_required or state["update"] is not None
        )

    @property
    def lacks_gradients(self) -> bool:
        """Whether a take waits for gradients."""
        return self.head is not None and not self.is_reached and self.seen.round_holder is None

    @property
    def lacks_a_take(self) -> bool:
        """Whether processes wait for a take, and none waits to take."""
        return bool(self.waiting) and self.head is None and self.seen.round_holder is None

    @property
    def lacks_an_end(self) -> bool:
        """Whether processes wait for the end of an open round."""
        holder = self.seen.round_holder
        return holder is not None and (bool(self.waiting) or self.head is not None)

    # -- who takes ---------------------------------------------------------------------------------

    def took(self, process: AttachedProcess) -> bool:
        """Whether a process has taken, opened a round, or waits to take."""
        return process.took or process.entry in self._queued

    @cached_property
    def lost(self) -> list[Lost]:
        """Processes that died or failed, and left a record."""
        seen = self.seen
        found = [
            Lost(
                each.pid_label,
                "is dead",
                at=each.last_seen,
                attached_at=each.attached_at,
                last_took=each.last_took,
                took=self.took(each),
                applied=self.applies(each),
            )
            for each in seen.processes
            if not each.alive
        ]
        found += [
            Lost(
                each.pid_label,
                each.fate,
                at=(self.now if each.at is None else each.at) - _FOUND,
                attached_at=each.attached_at,
                last_took=each.last_took,
                took=each.took,
                applied=each.applied > 0 or not each.took,
            )
            for each in seen.departed
            if not each.is_attached
        ]
        return found

    @cached_property
    def takers(self) -> list[AttachedProcess]:
        """Living processes that took and were not replaced."""
        return [
            each
            for each in self.alive
            if each.took and not self._is_replaced(each, each.last_took, each.last_seen)
        ]

    @cached_property
    def lost_takers(self) -> list[Lost]:
        """Takers that died or failed, and were not replaced."""
        return [
            each
            for each in self.lost
            if each.took and not self._is_replaced(each, each.last_took, each.at)
        ]

    def _is_replaced(self, one: object, last_took: float | None, last_sign: float) -> bool:
        until = last_sign if last_took is None else last_took
        others: list[AttachedProcess | Lost] = [*self.alive, *self.lost]
        return any(each.took and each.attached_at > until for each in others if each is not one)

    @property
    def gone_unknown(self) -> list[str]:
        """Pids of processes that died or failed, and that neither applied nor took."""
        known = {each.pid for each in (*self.seen.departed, *self.alive)}
        left = [each.label for each in self.lost if not each.applied and not each.took]
        events = [
            str(event["pid"])
            for event in self.seen.events
            if layout.EVENT_NAMES.get(event["kind"]) in {"died", "failed"}
            and event["pid"] not in known
        ]
        return list(dict.fromkeys((*left, *events)))

    @cached_property
    def takers_are_known(self) -> bool:
        """Whether any process took, or waited to take."""
        counters, lost = self.seen.state["counters"], self.lost
        return bool(
            counters["takes"] or self.seen.queue or self.takers or any(each.took for each in lost)
        )

    @cached_property
    def could_take(self) -> list[AttachedProcess]:
        """The living processes that may take next, given that none waits to take."""
        if self.takers:
            return self.takers
        idle = [each for each in self.alive if not waits_for_a_take(each)]
        if not self.takers_are_known:
            return idle
        lost = max((each.at for each in self.lost_takers), default=None)
        since = max(self.seen.last_took, lost or 0.0)
        return [
            each
            for each in idle
            if not each.took
            and not self.applies(each)
            and self._may_replace(each, since, lost, AT_THE_START)
        ]

    def _may_replace(
        self, process: AttachedProcess, since: float, lost: float | None, patience: float
    ) -> bool:
        """Whether a process came after `since`, and still has time to take the lost one's place."""
        came = process.attached_at
        in_time = lost is None or came < lost + REPLACED_WITHIN
        return came > since and in_time and self.now - came < patience

    def nobody_took_for_long(self) -> bool:
        """Whether a take is overdue, given that no living process may take."""
        counters, seen = self.seen.state["counters"], self.seen
        if not self.takers_are_known:
            came = [each.attached_at for each in self.alive]
            since = max(seen.last_applied, *came, *(each.at for each in self.lost))
            return self.now - since >= AT_THE_START
        lost = max((each.at for each in self.lost_takers), default=None)
        last = max(seen.last_took, seen.last_applied) if lost is None else lost
        since = max(last, min(each.attached_at for each in self.waiting))
        return self.now - since >= (AFTER_TAKES if counters["takes"] else AT_THE_START)

    # -- who applies -------------------------------------------------------------------------------

    def applies(self, process: AttachedProcess) -> bool:
        """Whether a process has sent gradients, is sending one, or has named a contributor."""
        sent = process.applied > 0 or process.dropped > 0 or process.activity in _APPLIES
        return sent or process.entry in self.seen.workers

    @cached_property
    def could_apply(self) -> list[AttachedProcess]:
        """The living processes that may send what the head waits for."""
        return [each for each in self.alive if self._may_apply(each)]

    @cached_property
    def late(self) -> list[AttachedProcess]:
        """Of these, the known appliers that have not applied at this step."""
        step = self.seen.state["step"]
        return [
            each
            for each in self.could_apply
            if self.applies(each) and each.last_applied_step != step
        ]

    def _may_apply(self, process: AttachedProcess) -> bool:
        if waits_for_a_take(process):
            return False
        if any(take.entry == process.entry for take in self.seen.queue if take.alive):
            # A process that both takes and applies may do so in two threads, or in turn.
            return process.applied > 0 and not self.killed
        if self.applies(process):
            return True
        if process.took:
            return False
        lost = self._loss_of_appliers
        if lost is not None:
            return self._may_replace(process, lost, lost, LONG_IDLE)
        let_pass = self.seen.last_took > process.attached_at + _TICK
        return not (let_pass and self.now - process.attached_at >= LONG_IDLE)

    @cached_property
    def _loss_of_appliers(self) -> float | None:
        """When the last applier died or failed; None: none did, or nothing was ever taken.

        If no record is left of one (a wait was told of it), every death and failure among the
        events counts.
        """
        if not self.seen.state["counters"]["takes"]:
            return None
        seen = self.seen
        unswept = [
            each.last_seen for each in seen.processes if not each.alive and self.applies(each)
        ]
        if unswept:
            return max(unswept)
        moments = [each.at for each in self.lost if each.applied]
        recorded = {each.pid for each in seen.departed if each.applied or not each.took}
        for event in seen.events:
            kind, at = layout.EVENT_NAMES.get(event["kind"]), event["at_ns"] / 1e9
            if (not recorded or event["pid"] in recorded) and kind in {"failed", "died"}:
                moments.append(at - (_FOUND if kind == "died" else 0.0))
        return max(moments, default=None)

    def waits_no_more(self, process: AttachedProcess) -> bool:
        """Whether a stopped process's wait may be over: it has not applied at this step."""
        return (
            waits_for_a_take(process)
            and is_halted(process)
            and process.last_applied_step != self.seen.state["step"]
        )

    def nobody_applied_for_long(self) -> bool:
        """Whether gradients are overdue, given that no living process may apply."""
        head, seen = self.head, self.seen
        assert head is not None  # noqa: S101
        patience = AFTER_GRADIENTS if seen.state["counters"]["applied"] else AT_THE_START
        since = max(head.since, seen.last_applied)
        if self.now - since >= (AFTER_A_DEATH if self.killed else patience):
            return True
        # A take that is retried with a short timeout never waits for long.
        came = [each.attached_at for each in self.alive if each.entry == head.entry]
        return self.now - max([seen.last_applied, *came]) >= LONG_IDLE

    # -- suspicions --------------------------------------------------------------------------------

    @cached_property
    def waited_since(self) -> float:
        """Since when the first of the waiting processes waits, as far as can be told."""
        return min(
            (
                each.last_seen
                if each.activity == Activity.WAITS_FOR_ROOM
                else max(each.last_applied or 0.0, each.attached_at, self.seen.last_took)
                for each in self.waiting
            ),
            default=self.head.since if self.head else self.now,
        )

    def is_long(self, since: float) -> bool:
        """Whether it is long since then."""
        return self.now - since >= LONG_IDLE

    def is_quiet(self, process: AttachedProcess) -> bool:
        """Whether a process has been in no call for long."""
        return process.activity == Activity.IDLE and self.is_long(process.last_seen)

    def never_did(self, process: AttachedProcess) -> bool:
        """Whether a process has been attached for long, and has neither applied nor taken."""
        did = self.applies(process) or self.took(process)
        return not did and self.is_long(process.attached_at)

    def works_elsewhere(self, process: AttachedProcess) -> bool:
        """Whether a process is in a call in another segment, and does not wait there."""
        call = self.elsewhere(self, process)
        return call is not None and not call[1].startswith("waits")

    def waits_elsewhere(self, process: AttachedProcess) -> str | None:
        """Return the system name of another segment in which a process waits; None: none."""
        call = self.elsewhere(self, process) if process.activity == Activity.IDLE else None
        return call[0] if call and call[1].startswith("waits") else None

    @property
    def lock_is_held_long(self) -> bool:
        """Whether a process has been in an operation with the lock for long."""
        since = self.seen.lock.since
        return since is not None and self.now - since >= _LONG_OPERATION

    def moves_no_more(self) -> bool:
        """Whether nothing was applied or taken for so long that a circle of waits is proved."""
        seen = self.seen
        came = [each.attached_at for each in self.waiting]
        came += [
            each.attached_at for each in self.alive if self.head and each.entry == self.head.entry
        ]
        since = max(seen.last_applied, seen.last_took, min(came, default=0.0))
        return self.now - since >= (
            AFTER_TAKES if seen.state["counters"]["applied"] else AT_THE_START
        )
