"""Finds out why nobody takes, although everybody waits for a take.

A process that waits for the step, for room or for the end of a round goes on only if another one
takes. If all living processes wait so, or are stopped, the job stands still.

Three kinds of processes may still take. One that waits, but took before, may take in another of its
threads. One that does not wait (a chief that computes an update) may take at any time, unless the
processes that took are dead and it is a bystander. And one may be about to come: a chief that is
started again, or the first one, which is still importing. So the state must have lasted for
`_AFTER_TAKES`, or for `AT_THE_START` if there never was a take. The time counts from the last
gradient, the last process that attached, or the last sign of life of one that died. (It does not
count from the start of the waits: a process that waits in short pieces always has a new one.) If
those that could take are stopped, no time has to pass.
"""

import time
from collections import Counter
from collections.abc import Callable

from shmacc._layout import layout
from shmacc.inspection._findings import goes_on, pids
from shmacc.inspection._observation import Observation
from shmacc.inspection._processes import HALTED
from shmacc.inspection._records import AttachedProcess, DepartedProcess, Stall, StallKind

AT_THE_START = 8.0  # seconds; a standstill must be named within 10
_AFTER_TAKES = 5.0
LONG_IDLE = 30.0
_FOUND = 1.0  # seconds that a death is dated back: its finder may be the replacement
_UNTIL_A_TAKE = {
    "waits for the step": "for the step",
    "waits for room": "for room",
    "waits for the end of the round": "for the end of the round",
}


def waits_for_a_take(process: AttachedProcess) -> bool:
    """Whether the process goes on only when another one has taken."""
    return process.activity in _UNTIL_A_TAKE


def nobody_takes(seen: Observation) -> Stall | None:
    """Return the standstill, given that no round is open and no living process waits to take."""
    alive = [each for each in seen.processes if each.alive]
    waiting = [each for each in alive if waits_for_a_take(each)]
    if not waiting:
        return None
    able = _able(seen, alive)
    problem = f"{_wait(waiting)}, and nobody takes"
    if able:
        stopped = [each for each in able if each.condition in HALTED]
        if len(stopped) < len(able):
            return None
        return Stall(
            StallKind.NOBODY_TAKES,
            f"{problem}: {pids(each.pid_label for each in stopped)}, which could, {_are(stopped)} "
            f"{stopped[0].condition}",
            *goes_on(
                [each.pid_label for each in alive if each.condition in HALTED], stopped[0].condition
            ),
        )
    since = max(
        seen.last_applied,
        *(each.attached_at if each.alive else each.last_seen for each in seen.processes),
    )
    if time.time() - since < (_AFTER_TAKES if seen.state["counters"]["takes"] else AT_THE_START):
        return None
    return Stall(
        StallKind.NOBODY_TAKES,
        f"{problem}: {_why(seen)}",
        f"{_mend_first(seen)}start the process that takes: the gradients that are there wait for "
        "it; or end the processes that wait",
        None,
    )


def idle_taker(seen: Observation) -> Stall | None:
    """Return a suspicion: others have waited for long for a process that is alive and in no call.

    They wait for its take, or for the end of its round. It may be computing: nothing is proved.
    """
    alive = [each for each in seen.processes if each.alive]
    waiting = [each for each in alive if waits_for_a_take(each)]
    if not waiting or seen.state["finished"] or any(take.alive for take in seen.queue):
        return None
    able = [seen.round_holder] if seen.round_holder else _able(seen, alive)
    idle = list(filter(is_idle, able))
    if not idle or len(idle) < len(able):
        return None
    since = max(seen.last_applied, *(each.last_seen for each in idle))
    came = max(each.attached_at for each in alive)
    if time.time() - max(since, came) < LONG_IDLE:
        return None
    if seen.round_holder:
        which = "which has a round open"
    elif any(each.took for each in idle):
        which = "which took before"
    else:
        which = "which could take"
    return suspicion(
        StallKind.TAKER_IDLE,
        f"{_wait(waiting)}; {pids(each.pid_label for each in idle)}, {which},",
        idle,
        since,
        "see what it does, if its rounds do not take that long (py-spy dump, its log); to end it "
        'loses no gradient, and ends waits that have on_death="raise"',
    )


def is_idle(process: AttachedProcess) -> bool:
    """Whether a process is in no call, and not halted."""
    return process.activity == "idle" and process.condition not in HALTED


def suspicion(
    kind: StallKind, problem: str, idle: list[AttachedProcess], since: float, remedy: str
) -> Stall:
    """Return a standstill that is not proved: `problem` says who waits for these idle processes."""
    are, have = ("is", "has") if len(idle) == 1 else ("are", "have")
    # The conditions of the processes (such as sleeping), if /proc shows them.
    conditions = ", ".join(sorted({each.condition for each in idle if each.condition}))
    condition = f" ({conditions})" if conditions else ""
    idle_for = f"{time.time() - since:.0f} s"
    problem += f" {are} alive{condition}, and {have} been in no call for {idle_for}"
    return Stall(kind, problem, remedy, None)


def _able(seen: Observation, alive: list[AttachedProcess]) -> list[AttachedProcess]:
    """Return the living processes that may take."""
    loss = _loss_of_takers(seen, alive)
    return [
        each
        for each in alive
        if each.took or not (waits_for_a_take(each) or is_bystander(each, loss))
    ]


def _loss_of_takers(seen: Observation, alive: list[AttachedProcess]) -> float | None:
    """Return when the last taker was lost; None: one may be alive, or there never was one."""
    if any(each.took for each in alive):
        return None
    took = any(each.took for each in seen.departed) or any(each.took for each in seen.processes)
    if not (took or seen.state["counters"]["takes"] or seen.queue):
        return None
    return last_loss(seen, _took(seen), lambda each: each.took)


def last_loss(
    seen: Observation,
    did: Callable[[AttachedProcess], bool],
    had_done: Callable[[DepartedProcess], bool],
) -> float | None:
    """Return when the last process that took (or applied) died or failed; None: none has.

    If there is no record of a departed process that `had_done` so, every death and failure among
    the events counts.
    """
    dead = [each.last_seen for each in seen.processes if not each.alive and did(each)]
    departed = {each.pid: each.at for each in seen.departed if had_done(each)}
    moments = [at - _FOUND for at in departed.values() if at is not None]
    for event in seen.view.events():
        kind, at = layout.EVENT_NAMES.get(event["kind"]), event["at_ns"] / 1e9
        if not departed or event["pid"] in departed:
            if kind == "failed":
                moments.append(at)
            elif kind == "died":
                moments.append(at - _FOUND)
    return max(dead or moments, default=None)


def is_bystander(process: AttachedProcess, death: float | None) -> bool:
    """Whether a process that never took (or applied) was attached before this death.

    What an idle process will do cannot be seen from outside. But if a process that took (or
    applied) has died, an idle one that was attached before is a bystander: the parent that started
    the job, say. One that came later may replace the dead one.
    """
    return death is not None and process.attached_at < death


def _took(seen: Observation) -> Callable[[AttachedProcess], bool]:
    """Return a test for processes that have taken, or wait to take."""
    queued = {take.entry for take in seen.queue}
    return lambda each: each.took or each.entry in queued


def _wait(waiting: list[AttachedProcess]) -> str:
    for_what = Counter(_UNTIL_A_TAKE[each.activity] for each in waiting)
    if len(waiting) == 1:
        return f"pid {waiting[0].pid_label} waits {next(iter(for_what))}"
    if len(for_what) == 1:
        return f"{len(waiting)} processes wait {next(iter(for_what))}"
    each = ", ".join(f"{number} {what}" for what, number in for_what.items())
    return f"{len(waiting)} processes wait ({each})"


def _why(seen: Observation) -> str:
    took = _took(seen)
    dead = [each for each in seen.processes if not each.alive and took(each)]
    if dead:
        return f"{pids(each.pid_label for each in dead)}, which did, {_are(dead)} dead"
    departed = [each for each in seen.departed if each.took and not each.is_attached]
    if departed:
        return "; ".join(f"pid {each.pid_label}, which did, {each.fate}" for each in departed)
    if not seen.state["counters"]["takes"]:
        return "no take has been served yet"
    return "the processes that took have left"


def _mend_first(seen: Observation) -> str:
    """Ask for a repair first if the last taker failed: a new one may fail in the same way."""
    took = [each for each in seen.departed if each.took and not each.is_attached]
    return "mend what it failed with, then " if took and not took[-1].died else ""


def _are(several: list[AttachedProcess]) -> str:
    return "is" if len(several) == 1 else "are"
