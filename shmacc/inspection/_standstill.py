"""Finds out why a segment stands still.

A cause counts only if nothing but a person, or a new process, can end it: a stopped process that
others wait for, or a take whose gradients no attached process can send.

The second needs care, since the library does not know how many workers there will be. A process
cannot send more if it waits for another's take (`_nobody_takes` handles the reverse case). Nor can
it if its own take waits and no other thread of it applies, which is sure only if it never applied.
Even if no attached process can send more, another one may be about to attach: if each gradient
comes from a process of its own, there is often none for a moment. So the state must have lasted:
for `_AFTER_A_DEATH` if an attached process was killed, else for `_AFTER_GRADIENTS`, or, if there
never was a gradient, for `AT_THE_START`, in which workers may still be importing.
"""

import time
from collections.abc import Iterator

from shmacc._layout import layout
from shmacc.inspection._findings import command, goes_on, pids
from shmacc.inspection._nobody_takes import (
    AT_THE_START,
    LONG_IDLE,
    idle_taker,
    is_bystander,
    is_idle,
    last_loss,
    nobody_takes,
    suspicion,
    waits_for_a_take,
)
from shmacc.inspection._observation import Observation
from shmacc.inspection._processes import HALTED
from shmacc.inspection._records import (
    AttachedProcess,
    DepartedProcess,
    Stall,
    StallKind,
    WaitingTake,
)

_AFTER_A_DEATH = 1.0  # seconds
_AFTER_GRADIENTS = 5.0
_QUIET = 30.0
_LONG = 5.0  # a commit takes milliseconds


def stalls(name: str, seen: Observation) -> tuple[Stall, ...]:
    """Return why the segment of this system name stands still; empty: no cause is known."""
    if not seen.steady:
        return ()
    in_the_way = (*_lock(seen), *_name_lock(seen))
    if seen.state["finished"]:  # nobody waits any more
        return in_the_way
    return (*in_the_way, *_round(seen), *_takes(name, seen))


def suspected(seen: Observation) -> Stall | None:
    """Return a standstill that is not proved: a wait that has been long, but may end."""
    return idle_taker(seen) or _idle_appliers(seen)


def _lock(seen: Observation) -> Iterator[Stall]:
    lock = seen.lock
    if not lock.held:
        return
    if lock.condition in HALTED:
        yield Stall(
            StallKind.LOCK_HOLDER_STOPPED,
            f"pid {lock.pid_label} is {lock.condition} and holds the lock: no process can "
            f"{_what_needs_the_lock(seen)}",
            *goes_on([lock.pid_label], lock.condition),
        )
    elif not lock.condition and lock.since is not None and time.time() - lock.since >= _LONG:
        yield Stall(
            StallKind.LOCK_HELD_LONG,
            f"pid {lock.pid_label} has been in an operation with the lock for "
            f"{time.time() - lock.since:.0f} s: no process can {_what_needs_the_lock(seen)}; "
            "whether it is stopped cannot be seen from here",
            "look in its pid namespace, or as root; let it go on, or end it",
            None,
        )


def _what_needs_the_lock(seen: Observation) -> str:
    return "update or copy them" if seen.config["kind"] in layout.ARRAYS else "apply or take"


def _name_lock(seen: Observation) -> Iterator[Stall]:
    if seen.name_holder_condition in HALTED:
        pid = str(seen.lock.name_pid)
        yield Stall(
            StallKind.NAME_HOLDER_STOPPED,
            f"pid {pid} is {seen.name_holder_condition} and holds the name: no process can attach "
            "or remove it",
            *goes_on([pid], seen.name_holder_condition),
        )


def _round(seen: Observation) -> Iterator[Stall]:
    holder = seen.round_holder
    if holder is not None and holder.condition in HALTED:
        yield Stall(
            StallKind.ROUND_HOLDER_STOPPED,
            f"pid {holder.pid_label} has a round open and is {holder.condition}: no process can "
            "apply or take",
            *goes_on([holder.pid_label], holder.condition),
        )


def _takes(name: str, seen: Observation) -> Iterator[Stall]:
    if seen.round_holder is not None:
        return
    head = next((take for take in seen.queue if take.alive), None)
    if head is None:
        stall = nobody_takes(seen)
        if stall is not None:
            yield stall
    elif seen.state["count"] >= head.num_required or seen.state["update"] is not None:
        yield from _reached(name, seen, head)
    else:
        yield from _not_reached(name, seen, head)


def _reached(name: str, seen: Observation, head: WaitingTake) -> Iterator[Stall]:
    taker = next((each for each in seen.processes if each.entry == head.entry), None)
    have = "has" if head.num_required == 1 else "have"
    problem = f"{_waits(head)}, which {have} arrived"
    if seen.state["update"] is not None:
        problem = f"pid {head.pid_label} waits to take, and the round is final"
    if taker is not None and taker.condition in HALTED:
        yield Stall(
            StallKind.TAKER_STOPPED,
            f"{problem}; it is {taker.condition} and does not take them",
            *goes_on([head.pid_label], taker.condition),
        )
    elif head.overdue:
        yield Stall(
            StallKind.TAKER_OVERDUE,
            f"{problem}; it does not take them",
            "see what it does; its wait can be ended, which consumes nothing",
            _cancel(name),
        )


def _not_reached(name: str, seen: Observation, head: WaitingTake) -> Iterator[Stall]:
    alive = [each for each in seen.processes if each.alive]
    killed = len(alive) < len(seen.processes)
    able = _able(seen)
    problem = _problem(seen, head)
    if not able and not _has_lasted(seen, head, killed=killed):
        return
    able = able or [each for each in alive if _waits_no_more(each, seen)]
    if able:
        if all(each.condition in HALTED for each in able):
            labels = [each.pid_label for each in able]
            yield Stall(
                StallKind.APPLIERS_STOPPED,
                f"{problem}, and all processes that could send more are {able[0].condition}: "
                f"{pids(labels)}",
                *goes_on(labels, able[0].condition),
            )
        return
    waiting = sum(waits_for_a_take(each) for each in alive)
    # Without a capacity, only memory can run out.
    if seen.config["capacity"] is None and any(each.activity == "waits for room" for each in alive):
        yield Stall(
            StallKind.QUORUM_OUT_OF_REACH,
            f"{problem}, and those that could send more wait for room in /dev/shm, of which "
            f"{seen.state['kept_free']} bytes are kept for others: {len(alive)} alive (waiting for "
            f"this take: {waiting})" + _who_is_gone(seen),
            "let rounds need fewer gradients, or give /dev/shm more memory; or end the wait, which "
            "consumes nothing",
            _cancel(name),
        )
        return
    yield Stall(
        StallKind.QUORUM_OUT_OF_REACH,
        f"{problem}, and no process that is attached can send more: {len(alive)} alive"
        + (f" (waiting for this take: {waiting})" if waiting else "")
        + _who_is_gone(seen),
        "start processes that apply; or end the wait, which consumes nothing",
        _cancel(name),
    )


def _idle_appliers(seen: Observation) -> Stall | None:
    """Return a suspicion: a take has waited for long for processes that are in no call.

    They may be computing, as in `idle_taker`. It names processes that have not applied at this
    step, if there are any, and of these rather those that applied before: a parent that only keeps
    the segment open never will.
    """
    head = next((take for take in seen.queue if take.alive), None)
    if head is None or seen.state["finished"] or seen.round_holder is not None:
        return None
    if seen.state["count"] >= head.num_required or seen.state["update"] is not None:
        return None
    now, able = time.time(), _able(seen)
    if now - seen.last_applied < LONG_IDLE:
        return None
    late = [each for each in able if each.last_applied_step != seen.state["step"]] or able
    late = [each for each in late if each.applied > 0] or late
    idle = [each for each in late if is_idle(each) and now - each.last_seen >= LONG_IDLE]
    if not idle:
        return None
    have = "has" if len(idle) == 1 else "have"
    applied = all(each.last_applied_step == seen.state["step"] for each in idle)
    which = "" if applied else f", which {have} not applied to it,"
    return suspicion(
        StallKind.APPLIER_IDLE,
        f"{_problem(seen, head)}; {pids(each.pid_label for each in idle)}{which}",
        idle,
        max(each.last_seen for each in idle),
        "see what it does, if its batches do not take that long (py-spy dump, its log); to end it "
        'costs its batch, and ends waits that have on_death="raise"',
    )


def _able(seen: Observation) -> list[AttachedProcess]:
    """Return the living processes that may apply."""
    alive = [each for each in seen.processes if each.alive]
    killed = len(alive) < len(seen.processes)
    death = last_loss(seen, _applied, _applied) if seen.state["counters"]["takes"] else None
    return [each for each in alive if _may_apply(each, seen, death, killed=killed)]


def _problem(seen: Observation, head: WaitingTake) -> str:
    count = seen.state["count"]
    return f"{_waits(head)}; {count} {'is' if count == 1 else 'are'} there"


def _applied(process: AttachedProcess | DepartedProcess) -> bool:
    return process.applied > 0


def _waits(head: WaitingTake) -> str:
    gradients = "gradient" if head.num_required == 1 else "gradients"
    return f"pid {head.pid_label} waits for {head.num_required} {gradients}"


def _has_lasted(seen: Observation, head: WaitingTake, *, killed: bool) -> bool:
    """Whether nothing has changed for long enough."""
    now = time.time()
    patience = _AFTER_GRADIENTS if seen.state["counters"]["applied"] else AT_THE_START
    if now - max(head.since, seen.last_applied) >= (_AFTER_A_DEATH if killed else patience):
        return True
    # A take that is retried with a short timeout never waits for long.
    came = [each.attached_at for each in seen.processes if each.alive]
    return now - max([seen.last_applied, *came]) >= _QUIET


def _who_is_gone(seen: Observation) -> str:
    """Say which processes failed, and with what, and which died lately; takers are left out."""
    workers = [each for each in seen.departed if each.applied or not each.took]
    failed = [each for each in workers if not each.died]
    takers = {each.pid_label for each in seen.departed if each.took and not each.applied}
    takers |= {each.pid_label for each in seen.processes if each.took and not each.applied}
    left = [each.pid_label for each in seen.processes if not each.alive]
    dead = [label for label in dict.fromkeys((*left, *seen.deaths)) if label not in takers]
    died = f"; {pids(dead)} {'is' if len(dead) == 1 else 'are'} dead" if dead else ""
    return died + "".join(f"; pid {each.pid_label} {each.fate}" for each in failed)


def _may_apply(
    process: AttachedProcess, seen: Observation, death: float | None, *, killed: bool
) -> bool:
    if waits_for_a_take(process):
        return False
    if any(take.entry == process.entry for take in seen.queue if take.alive):
        # A process that both takes and applies may do so in two threads, or in turn.
        return process.applied > 0 and not killed
    return process.applied > 0 or not is_bystander(process, death)


def _waits_no_more(process: AttachedProcess, seen: Observation) -> bool:
    """Whether a stopped process's wait may be over: it has not applied at this step."""
    return (
        waits_for_a_take(process)
        and process.condition in HALTED
        and process.last_applied_step != seen.state["step"]
    )


def _cancel(name: str) -> str:
    return command("shmacc-inspect", "cancel", name, "--yes")
