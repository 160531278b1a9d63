"""Rules for standstills that are proved, as `_stalls` says; each looks at one segment."""

from collections.abc import Callable

from shmacc._base import layout
from shmacc._base.layout import Activity
from shmacc.inspection._findings import command, goes_on, pids
from shmacc.inspection._processes import HALTED
from shmacc.inspection._records import Stall, StallKind
from shmacc.inspection._stall_facts import Facts, is_halted
from shmacc.inspection._stall_words import are, heads_wait, labels, waits

Rule = Callable[[Facts], Stall | None]


def proved(facts: Facts) -> tuple[Stall, ...]:
    in_the_way = tuple(filter(None, (rule(facts) for rule in IN_THE_WAY)))
    if facts.seen.state["finished"]:  # nobody waits any more
        return in_the_way
    wait = first(WAITS, facts)
    return in_the_way if wait is None else (*in_the_way, wait)


def first(rules: tuple[Rule, ...], facts: Facts) -> Stall | None:
    return next(filter(None, (rule(facts) for rule in rules)), None)


# -- what is in the way of every process -----------------------------------------------------------


def _lock_holder_stopped(facts: Facts) -> Stall | None:
    lock = facts.seen.lock
    if not lock.held or lock.condition not in HALTED:
        return None
    return Stall(
        StallKind.LOCK_HOLDER_STOPPED,
        f"pid {lock.pid_label} is {lock.condition} and holds the lock: no process can "
        f"{_what_needs_the_lock(facts)}",
        *goes_on([lock.pid_label], lock.condition),
    )


def _lock_held_long(facts: Facts) -> Stall | None:
    lock = facts.seen.lock
    if not lock.held or lock.condition or lock.since is None or not facts.lock_is_held_long:
        return None
    return Stall(
        StallKind.LOCK_HELD_LONG,
        f"pid {lock.pid_label} has been in an operation with the lock for "
        f"{facts.now - lock.since:.0f} s: no process can {_what_needs_the_lock(facts)}; "
        "whether it is stopped cannot be seen from here",
        "look in its pid namespace, or as root; let it go on, or end it",
        None,
    )


def _what_needs_the_lock(facts: Facts) -> str:
    arrays = facts.seen.config["kind"] in layout.ARRAYS
    return "update or copy them" if arrays else "apply or take"


def _name_holder_stopped(facts: Facts) -> Stall | None:
    condition, pid = facts.seen.name_holder_condition, str(facts.seen.lock.name_pid)
    if condition not in HALTED:
        return None
    return Stall(
        StallKind.NAME_HOLDER_STOPPED,
        f"pid {pid} is {condition} and holds the name: no process can attach or remove it",
        *goes_on([pid], condition),
    )


def _round_holder_stopped(facts: Facts) -> Stall | None:
    holder = facts.seen.round_holder
    if holder is None or not is_halted(holder):
        return None
    return Stall(
        StallKind.ROUND_HOLDER_STOPPED,
        f"pid {holder.pid_label} has a round open and is {holder.condition}: no process can "
        "apply or take",
        *goes_on([holder.pid_label], holder.condition),
    )


# -- waits that nobody ends ------------------------------------------------------------------------


def _taker_does_not_take(facts: Facts) -> Stall | None:
    head = facts.head
    if head is None or not facts.is_reached or facts.seen.round_holder is not None:
        return None
    taker = next((each for each in facts.alive if each.entry == head.entry), None)
    have = "has" if head.num_required == 1 else "have"
    problem = f"{heads_wait(facts)}, which {have} arrived"
    if facts.seen.state["update"] is not None:
        problem = f"pid {head.pid_label} waits to take, and the round is final"
    if taker is not None and is_halted(taker):
        return Stall(
            StallKind.TAKER_STOPPED,
            f"{problem}; it is {taker.condition} and does not take them",
            *goes_on([head.pid_label], taker.condition),
        )
    if not head.overdue:
        return None
    return Stall(
        StallKind.TAKER_OVERDUE,
        f"{problem}; it does not take them",
        "see what it does; its wait can be ended, which consumes nothing",
        cancel(facts),
    )


def _appliers_stopped(facts: Facts) -> Stall | None:
    if not facts.lacks_gradients:
        return None
    known = [each for each in facts.could_apply if facts.applies(each)]
    back = [each for each in facts.alive if facts.waits_no_more(each)]
    # Known appliers that are late are missed, whoever else might send a first gradient.
    late = facts.late or any(map(facts.applies, back))
    able = [*known, *back] if late else facts.could_apply or back
    if not known and back and not facts.nobody_applied_for_long():
        return None
    if not able or not all(map(is_halted, able)):
        return None
    return Stall(
        StallKind.APPLIERS_STOPPED,
        f"{waits(facts)}, and all processes that could send more are {able[0].condition}: "
        f"{pids(labels(able))}",
        *goes_on(labels(able), able[0].condition),
    )


def _quorum_out_of_reach(facts: Facts) -> Stall | None:
    if not facts.lacks_gradients or facts.could_apply or not facts.nobody_applied_for_long():
        return None
    alive, seen = facts.alive, facts.seen
    waiting = len(facts.waiting)
    # Without a capacity, only memory can run out.
    if seen.config["capacity"] is None and any(
        each.activity == Activity.WAITS_FOR_ROOM for each in alive
    ):
        return Stall(
            StallKind.QUORUM_OUT_OF_REACH,
            f"{waits(facts)}, and those that could send more wait for room in /dev/shm, of which "
            f"{seen.state['kept_free']} bytes are kept for others: {len(alive)} alive (waiting for "
            f"this take: {waiting})" + who_is_gone(facts),
            "let rounds need fewer gradients, or give /dev/shm more memory; or end the wait, which "
            "consumes nothing",
            cancel(facts),
        )
    return Stall(
        StallKind.QUORUM_OUT_OF_REACH,
        f"{waits(facts)}, and no process that is attached can send more: {len(alive)} alive"
        + (f" (waiting for this take: {waiting})" if waiting else "")
        + who_is_gone(facts),
        "start processes that apply; or end the wait, which consumes nothing",
        cancel(facts),
    )


def who_is_gone(facts: Facts) -> str:
    """Say which processes failed, and with what, and which died lately; takers are left out."""
    seen = facts.seen
    worked = [each for each in seen.departed if each.applied > 0 or not each.took]
    failed = [each for each in worked if not each.died]
    takers = {each.pid_label for each in seen.departed if each.took and not each.applied}
    takers |= {each.pid_label for each in seen.processes if each.took and not each.applied}
    left = [each.pid_label for each in seen.processes if not each.alive]
    dead = [label for label in dict.fromkeys((*left, *seen.deaths)) if label not in takers]
    died = f"; {pids(dead)} {'is' if len(dead) == 1 else 'are'} dead" if dead else ""
    return died + "".join(f"; pid {each.pid_label} {each.fate}" for each in failed)


def _takers_stopped(facts: Facts) -> Stall | None:
    if not facts.lacks_a_take or not facts.could_take or not all(map(is_halted, facts.could_take)):
        return None
    able = facts.could_take
    return Stall(
        StallKind.NOBODY_TAKES,
        f"{waits(facts)}, and nobody takes: {pids(labels(able))}, which could, {are(able)} "
        f"{able[0].condition}",
        *goes_on(labels(filter(is_halted, facts.alive)), able[0].condition),
    )


def _nobody_takes(facts: Facts) -> Stall | None:
    if not facts.lacks_a_take or facts.could_take or not facts.nobody_took_for_long():
        return None
    return Stall(
        StallKind.NOBODY_TAKES,
        f"{waits(facts)}, and nobody takes: {why_nobody_takes(facts)}",
        f"{_mend_first(facts)}start the process that takes: the gradients that are there wait for "
        "it; or end the processes that wait",
        None,
    )


def why_nobody_takes(facts: Facts) -> str:
    lost = facts.lost_takers
    dead = [each for each in lost if each.fate == "is dead"]
    failed = [f"pid {each.label}, which did, {each.fate}" for each in lost if each not in dead]
    if dead:
        said = f"{pids(each.label for each in dead)}, which did, {are(dead)} dead"
        return "; ".join([said, *failed])
    if failed:
        return "; ".join(failed)
    if facts.seen.state["counters"]["takes"]:
        return "the processes that took have left"
    return f"no take has been served yet{who_never_came(facts)}"


def who_never_came(facts: Facts) -> str:
    """Say which processes are gone that neither took nor applied: one may have been to take."""
    gone = facts.gone_unknown
    return f"; {pids(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else ""


def _mend_first(facts: Facts) -> str:
    """Ask for a repair first if the last taker failed: a new one may fail in the same way."""
    lost = facts.lost_takers
    return "mend what it failed with, then " if lost and lost[-1].fate != "is dead" else ""


def cancel(facts: Facts) -> str:
    return command("shmacc-inspect", "cancel", facts.name, "--yes")


IN_THE_WAY: tuple[Rule, ...] = (_lock_holder_stopped, _lock_held_long, _name_holder_stopped)
WAITS: tuple[Rule, ...] = (
    _round_holder_stopped,
    _taker_does_not_take,
    _appliers_stopped,
    _quorum_out_of_reach,
    _takers_stopped,
    _nobody_takes,
)
