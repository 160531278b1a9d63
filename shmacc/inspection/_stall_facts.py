"""What one look at a segment tells about its waits: who waits, who could end a wait, who is gone.

What an idle process will do cannot be seen from outside. But its entry, and the record of its death
or failure, have its roles (`Role`). A process that has begun to take is a *taker*; a process that
has begun to apply is an *applier*. Once there are takers, nobody else is expected to take: other
processes' calls postpone no verdict. A taker is not expected to take any more if another taker
attached after its last take. The same holds for appliers, but new ones may come at any time: a
process without a role may still send its first gradient, but not if it attached before an applier
was lost, or if it has let rounds pass for `LONG_IDLE`.

A process that attached after the last taker (or applier) was lost may replace it. It has
`AT_THE_START` to take, or `LONG_IDLE` to apply, which takes longer at first. If it came later than
`REPLACED_WITHIN`, it counts only once it takes (or applies): else visitors would hide the loss.

How long nothing moves is counted from the last calls of takers and appliers, and from when waiting
processes attached. It is not counted from the start of a wait, since processes repeat short waits.
"""

import contextlib
import time
from dataclasses import replace
from functools import cached_property

from shmacc._base import names
from shmacc._base.layout import UNTIL_A_TAKE, Activity, Role
from shmacc._segment import removal
from shmacc.errors import ShmaccError
from shmacc.inspection._elsewhere import Elsewhere
from shmacc.inspection._observation import Observation
from shmacc.inspection._process_records import (
    AttachedProcess,
    DepartedProcess,
    WaitingTake,
    pid_label,
)
from shmacc.inspection._processes import HALTED, Look
from shmacc.inspection._runs import Runs

AT_THE_START = 8.0  # seconds; a standstill must be named within 10
AFTER_TAKES = 5.0
AFTER_GRADIENTS = 5.0
AFTER_A_DEATH = 1.0
LONG_IDLE = 30.0
REPLACED_WITHIN = 30.0
LONG_OPERATION = 5.0  # a commit takes milliseconds
_FOUND = 1.0  # seconds by which a death is dated back: its finder may be the replacement


_Process = AttachedProcess | DepartedProcess


def takes(process: _Process) -> bool:
    """Whether a process has ever begun to take."""
    return Role.TAKES in process.roles


def applies(process: _Process) -> bool:
    """Whether a process has ever begun to apply, or has named a contributor."""
    return Role.APPLIES in process.roles


def lost_at(process: DepartedProcess) -> float:
    """Return when a process of `Facts.lost` was last attached; 0: not known."""
    return process.at or 0.0


def is_halted(process: AttachedProcess) -> bool:
    """Whether a process is stopped or traced."""
    return process.condition in HALTED


def waits_for_a_take(process: AttachedProcess) -> bool:
    """Whether the process waits until another process takes."""
    return process.activity in UNTIL_A_TAKE


class Facts:
    """What is known of one segment's waits.

    Attributes:
        name: The segment's system name.
        seen: The look at it.
        now: The time of the look.
        alive: The living processes that are attached.
        head: The living take that is served next; None: no take waits.
        taking: The process of `head`.
        waiting: Living processes that wait for a take.
        killed: Whether there are entries of dead processes.
        run: The living run that the segment belongs to; None: there is none.
        comes: Whether a run is starting a process that may attach.
        is_reached: Whether the head has what it waits for.
        lacks_an_end: Whether processes wait for the end of an open round.
        lacks_gradients: Whether a take waits for gradients.
        lacks_a_take: Whether processes wait for a take, and no process waits to take.
    """

    def __init__(self, name: str, seen: Observation, look: Look) -> None:
        """Collect the facts of one look."""
        parsed, self._look, self._elsewhere = (
            names.parse_segment_file(name),
            look,
            Elsewhere.of(look),
        )
        runs = Runs.of(look).around(parsed.namespace if parsed else None)
        around = [run for run in runs if run.alive]
        self.run = min(around, key=lambda run: not run.stopped, default=None)
        self.name = name
        self.seen = seen
        self.now = time.time()
        self.alive = [each for each in seen.processes if each.alive]
        attached = {seen.identities[each.entry][1] for each in self.alive}
        self.comes = any(run.starting(attached) and not run.stopped for run in around)
        self.head: WaitingTake | None = next((take for take in seen.queue if take.alive), None)
        self.taking = [each for each in self.alive if self.head and each.entry == self.head.entry]
        self.waiting = [each for each in self.alive if waits_for_a_take(each)]
        self.killed = len(self.alive) < len(seen.processes)
        head, held, final = self.head, seen.round_holder is not None, seen.state["update"]
        self.is_reached = head is not None and (
            final is not None or seen.state["count"] >= head.num_required
        )
        self.lacks_an_end = held and bool(self.waiting or head)
        self.lacks_gradients = bool(head) and not self.is_reached and not held
        self.lacks_a_take = bool(self.waiting) and not head and not held

    # -- who is gone -------------------------------------------------------------------------------

    @cached_property
    def lost(self) -> list[DepartedProcess]:
        """Processes that died or failed, as far as recorded, in order of time.

        `at` says when a process was last there; `is_attached`, whether its entry is still there.
        """
        found: dict[str, DepartedProcess] = {}
        for event in self.seen.events:
            if event.kind in {"died", "failed"}:
                died = event.kind == "died"
                at = event.at - _FOUND * died
                found[event.pid_label] = DepartedProcess(
                    *(event.pid, event.pid_is_here, died, event.reason, False),
                    *(0, event.roles, False, at, None),
                    at,
                )
        for gone in self.seen.departed:
            at = (self.now if gone.at is None else gone.at) - _FOUND
            known = found.get(gone.pid_label)
            found[gone.pid_label] = replace(gone, at=known.at if known else at)
        for one in self.seen.processes:
            if one.alive:  # not lost, even if it failed; events may have its own namespace's pid
                own_pid = self.seen.identities[one.entry][1]
                found.pop(one.pid_label, None)
                found.pop(pid_label(own_pid, is_here=False), None)
            else:
                found[one.pid_label] = DepartedProcess(
                    *(one.pid, one.pid_is_here, True, "", True),
                    *(one.applied, one.roles, one.took, one.attached_at, one.last_took),
                    one.last_seen,
                )
        return sorted(found.values(), key=lost_at)

    @cached_property
    def lost_takers(self) -> list[DepartedProcess]:
        """Takers that died or failed, and were not replaced."""
        return [each for each in self.lost if self._is_in_charge(each, lost_at(each))]

    @cached_property
    def loss(self) -> float | None:
        """When the last taker was lost; None: no taker was lost."""
        return max(map(lost_at, self.lost_takers), default=None)

    # -- who takes ---------------------------------------------------------------------------------

    @cached_property
    def takers(self) -> list[AttachedProcess]:
        """Living processes that take and were not replaced."""
        return [each for each in self.alive if self._is_in_charge(each, each.last_seen)]

    def _is_in_charge(self, one: _Process, last_sign: float) -> bool:
        """Whether a process is a taker, and no other taker has attached since its last take."""
        until = last_sign if one.last_took is None else one.last_took
        others: list[_Process] = [*self.alive, *self.lost]
        later = (takes(each) and each.attached_at > until for each in others if each is not one)
        return takes(one) and not any(later)

    @cached_property
    def takers_are_known(self) -> bool:
        """Whether any process has taken, or has begun to."""
        served = bool(self.seen.state["counters"]["takes"])
        return served or any(takes(each) for each in self.alive) or bool(self.lost_takers)

    @cached_property
    def could_take(self) -> list[AttachedProcess]:
        """The living processes that could take next; ask only if no process waits to take."""
        if self.takers:
            return self.takers
        idle = [each for each in self.alive if not waits_for_a_take(each)]
        if not self.takers_are_known:
            return idle
        since = max(self.seen.last_took, self.loss or 0.0)
        return [
            each
            for each in idle
            if not takes(each)
            and not applies(each)
            and self._may_replace(each, since, self.loss, AT_THE_START)
        ]

    def _may_replace(
        self, process: AttachedProcess, since: float, lost: float | None, patience: float
    ) -> bool:
        """Whether a process came after `since`, and still has time to replace a lost process."""
        came = process.attached_at
        in_time = lost is None or came < lost + REPLACED_WITHIN
        return came > since and in_time and self.now - came < patience

    def nobody_took_for_long(self) -> bool:
        """Whether a take is overdue; ask only if no living process could take."""
        seen = self.seen
        last = max(seen.last_took, seen.last_applied) if self.loss is None else self.loss
        if self.takers_are_known:
            last = max(last, min(each.attached_at for each in self.waiting))
        else:
            last = max(last, *(each.attached_at for each in self.alive), *map(lost_at, self.lost))
        patience = AFTER_TAKES if seen.state["counters"]["takes"] else AT_THE_START
        return self.now - last >= patience

    # -- who applies -------------------------------------------------------------------------------

    @cached_property
    def could_apply(self) -> list[AttachedProcess]:
        """The living processes that may send what the head waits for."""
        return [each for each in self.alive if self._may_apply(each)]

    @cached_property
    def appliers(self) -> list[AttachedProcess]:
        """The known appliers among `could_apply`."""
        return list(filter(applies, self.could_apply))

    @cached_property
    def late(self) -> list[AttachedProcess]:
        """The known appliers that have not applied at this step."""
        return [each for each in self.appliers if not self._has_applied(each)]

    def _has_applied(self, process: AttachedProcess) -> bool:
        return process.last_applied_step == self.seen.state["step"]

    def _may_apply(self, process: AttachedProcess) -> bool:
        if waits_for_a_take(process):
            return self.waits_no_more(process)
        if any(take.entry == process.entry for take in self.seen.queue if take.alive):
            # It waits in a take, but if it has ever applied, another thread of it may apply now.
            return applies(process) and not self.killed
        if applies(process) or takes(process):
            return applies(process)
        lost = max((lost_at(each) for each in self.lost if applies(each)), default=None)
        if lost is not None and self.seen.state["counters"]["takes"]:
            return self._may_replace(process, lost, lost, LONG_IDLE)
        let_pass = self.seen.last_took > process.attached_at
        return not (let_pass and self.is_long(process.attached_at))

    def waits_no_more(self, process: AttachedProcess) -> bool:
        """Whether a stopped process may be past its wait: it has not applied at this step yet."""
        return waits_for_a_take(process) and is_halted(process) and not self._has_applied(process)

    def nobody_applied_for_long(self) -> bool:
        """Whether gradients are overdue; ask only if no living process could apply."""
        head, seen = self.head, self.seen
        assert head is not None  # noqa: S101
        patience = AFTER_GRADIENTS if seen.state["counters"]["applied"] else AT_THE_START
        since = max(head.since, seen.last_applied)
        if self.now - since >= (AFTER_A_DEATH if self.killed else patience):
            return True
        # Retries with short timeouts never wait for long: count from when their process attached.
        return self.is_long(max([seen.last_applied, *(each.attached_at for each in self.taking)]))

    # -- how long ----------------------------------------------------------------------------------

    def is_long(self, since: float) -> bool:
        """Whether `since` is so long ago that a standstill is suspected."""
        return self.now - since >= LONG_IDLE

    @property
    def waited_since(self) -> float:
        """When the longest of the waits began, as far as can be seen."""
        return min(
            each.last_seen
            if each.activity == Activity.WAITS_FOR_ROOM
            else max(each.last_applied or 0.0, each.attached_at, self.seen.last_took)
            for each in self.waiting
        )

    def moves_no_more(self) -> bool:
        """Whether nothing was applied or taken for so long that a circle of waits is proved."""
        came = [each.attached_at for each in (*self.waiting, *self.taking)]
        since = max(self.seen.last_applied, self.seen.last_took, min(came, default=0.0))
        applied = self.seen.state["counters"]["applied"]
        return self.now - since >= (AFTER_TAKES if applied else AT_THE_START)

    # -- where else --------------------------------------------------------------------------------

    def is_quiet(self, process: AttachedProcess) -> bool:
        """Whether a process has been in no call for long."""
        return process.activity == Activity.IDLE and self.is_long(process.last_seen)

    def call_elsewhere(self, process: AttachedProcess) -> tuple[str, str]:
        """Return a call of an idle process in another segment: the segment, and the activity."""
        who = self.seen.identities[process.entry]
        call = self._elsewhere.call(self.name, who) if process.activity == Activity.IDLE else None
        return call or ("", "")

    def waits_elsewhere(self, process: AttachedProcess) -> str:
        """Return in which other segment an idle process waits; empty: in none."""
        there, activity = self.call_elsewhere(process)
        return there if activity.startswith("waits") else ""

    def of_other(self, system_name: str) -> "Facts | None":
        """Return the facts of another segment; None: unreadable, or changed meanwhile."""
        known = self._elsewhere.facts
        name = names.parse_segment_file(system_name)
        if system_name not in known and name is not None:
            known[system_name] = None
            with contextlib.suppress(ShmaccError), contextlib.closing(removal.view(name)) as view:
                seen = Observation.at(name, view, self._look)
                if seen.steady:
                    known[system_name] = Facts(system_name, seen, self._look)
        found: Facts | None = known.get(system_name)
        return found
