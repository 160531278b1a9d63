"""Finds out why a segment stands still: a list of rules over the facts of one look.

A cause is proved only if nothing but a person, or a new process, can end it: a stopped process that
others wait for, a take whose gradients no attached process can send, a wait for a take that no
attached process makes, or a circle of such waits. The library does not know how many workers there
will be, and a process may be about to attach. So if nobody can go on, that must have lasted for
some seconds (`_stall_facts` says how long, and who counts). If those who could are stopped, no time
has to pass.

`IN_THE_WAY`: each that holds is told. `WAITS`: the first that holds is told. `SUSPICIONS`: the
first that holds is told, if nothing is proved: a process for which others have waited for long is
alive, and may be computing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from shmacc._layout import layout
from shmacc.inspection._elsewhere import Elsewhere
from shmacc.inspection._findings import command, goes_on, pids
from shmacc.inspection._observation import Observation
from shmacc.inspection._processes import HALTED, Look
from shmacc.inspection._records import AttachedProcess, Stall, StallKind
from shmacc.inspection._stall_facts import Facts, are, is_halted, labels, waits_for_a_take

Rule = Callable[[Facts], Stall | None]

_LOOK_AT_IT = "see what it does, if its {} do not take that long (py-spy dump, its log); to end it "
_START_IT = "start the process that takes"
_SEE = "see what it does (py-spy dump, its log)"
_ENDS_WAITS = 'ends waits that have on_death="raise"'


class Verdict(NamedTuple):
    """What is known of a segment's standstill.

    Attributes:
        proved: Why it stands still; empty: no cause is known.
        suspected: What perhaps makes it stand still; None: nothing, or a cause is proved.
    """

    proved: tuple[Stall, ...]
    suspected: Stall | None


def verdict(name: str, seen: Observation, look: Look) -> Verdict:
    """Judge the segment of this system name."""
    if not seen.steady:
        return Verdict((), None)
    elsewhere = Elsewhere.of(look)
    facts = Facts(name, seen, elsewhere.call)
    proved = _proved(facts)
    if proved or seen.state["finished"] or seen.config["kind"] in layout.ARRAYS:
        return Verdict(proved, None)
    chain = _blocked(facts, elsewhere, (name,)) if facts.moves_no_more() else None
    if chain is not None:
        return Verdict((chain,), None)
    return Verdict((), _first(SUSPICIONS, facts))


def _proved(facts: Facts) -> tuple[Stall, ...]:
    in_the_way = tuple(filter(None, (rule(facts) for rule in IN_THE_WAY)))
    if facts.seen.state["finished"]:  # nobody waits any more
        return in_the_way
    wait = _first(WAITS, facts)
    return in_the_way if wait is None else (*in_the_way, wait)


def _first(rules: tuple[Rule, ...], facts: Facts) -> Stall | None:
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
    problem = f"{facts.heads_wait()}, which {have} arrived"
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
        _cancel(facts),
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
        f"{facts.wait()}, and all processes that could send more are {able[0].condition}: "
        f"{pids(labels(able))}",
        *goes_on(labels(able), able[0].condition),
    )


def _quorum_out_of_reach(facts: Facts) -> Stall | None:
    if not facts.lacks_gradients or facts.could_apply or not facts.nobody_applied_for_long():
        return None
    alive, seen = facts.alive, facts.seen
    waiting = len(facts.waiting)
    # Without a capacity, only memory can run out.
    if seen.config["capacity"] is None and any(each.activity == "waits for room" for each in alive):
        return Stall(
            StallKind.QUORUM_OUT_OF_REACH,
            f"{facts.wait()}, and those that could send more wait for room in /dev/shm, of which "
            f"{seen.state['kept_free']} bytes are kept for others: {len(alive)} alive (waiting for "
            f"this take: {waiting})" + _who_is_gone(facts),
            "let rounds need fewer gradients, or give /dev/shm more memory; or end the wait, which "
            "consumes nothing",
            _cancel(facts),
        )
    return Stall(
        StallKind.QUORUM_OUT_OF_REACH,
        f"{facts.wait()}, and no process that is attached can send more: {len(alive)} alive"
        + (f" (waiting for this take: {waiting})" if waiting else "")
        + _who_is_gone(facts),
        "start processes that apply; or end the wait, which consumes nothing",
        _cancel(facts),
    )


def _who_is_gone(facts: Facts) -> str:
    """Say which processes failed, and with what, and which died lately; takers are left out."""
    seen = facts.seen
    failed = [each for each in seen.departed if each.applied > 0 and not each.died]
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
        f"{facts.wait()}, and nobody takes: {pids(labels(able))}, which could, {are(able)} "
        f"{able[0].condition}",
        *goes_on(labels(filter(is_halted, facts.alive)), able[0].condition),
    )


def _nobody_takes(facts: Facts) -> Stall | None:
    if not facts.lacks_a_take or facts.could_take or not facts.nobody_took_for_long():
        return None
    return Stall(
        StallKind.NOBODY_TAKES,
        f"{facts.wait()}, and nobody takes: {_why_nobody_takes(facts)}",
        f"{_mend_first(facts)}start the process that takes: the gradients that are there wait for "
        "it; or end the processes that wait",
        None,
    )


def _why_nobody_takes(facts: Facts) -> str:
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
    return f"no take has been served yet{_who_never_came(facts)}"


def _who_never_came(facts: Facts) -> str:
    """Say which processes are gone that neither took nor applied: one may have been to take."""
    gone = facts.gone_unknown
    return f"; {pids(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else ""


def _mend_first(facts: Facts) -> str:
    """Ask for a repair first if the last taker failed: a new one may fail in the same way."""
    lost = facts.lost_takers
    return "mend what it failed with, then " if lost and lost[-1].fate != "is dead" else ""


# -- waits that perhaps nobody ends ----------------------------------------------------------------


def _holder_idle(facts: Facts) -> Stall | None:
    """Others have waited for long for the end of a round, whose process is in no call."""
    holder, held = facts.seen.round_holder, facts.seen.state["round"]
    if not facts.lacks_an_end or holder is None or held is None or holder.activity != "idle":
        return None
    since = max(facts.seen.last_applied, held["since_ns"] / 1e9)
    if not facts.is_long(since):
        return None
    return _suspicion(facts, StallKind.TAKER_IDLE, [holder], "which has a round open", since)


def _taker_idle(facts: Facts) -> Stall | None:
    """Others have waited for long for a process that took before, and is in no call."""
    if not facts.lacks_a_take or not facts.takers:
        return None
    stopped = list(filter(is_halted, facts.takers))
    since = max(
        facts.waited_since,
        *(each.last_seen if each.last_took is None else each.last_took for each in facts.takers),
    )
    if not facts.is_long(since):
        return None
    if stopped:
        return _stopped(facts, StallKind.TAKER_IDLE, stopped, "which took before")
    if all(map(waits_for_a_take, facts.takers)):  # in one of their threads
        lost = [each for each in facts.lost_takers if each.at > since - 1.0]
        why = _why_nobody_takes(facts) if lost else f"{pids(labels(facts.takers))}, which did, wait"
        return Stall(
            StallKind.TAKER_IDLE,
            f"{facts.wait()}, and nobody takes: {why}",
            "start a process that takes, if none of their threads is about to",
            None,
        )
    if any(each.activity != "idle" for each in facts.takers):
        return None
    return _suspicion(facts, StallKind.TAKER_IDLE, facts.takers, "which took before", since)


def _nobody_took_yet(facts: Facts) -> Stall | None:
    """Others have waited for long, and it is not known who is to take."""
    if not facts.lacks_a_take or facts.takers_are_known:
        return None
    never = [each for each in facts.could_take if not facts.applies(each)]
    came = max((each.attached_at for each in never), default=0.0)
    if not facts.is_long(max(facts.waited_since, came)):
        return None
    stopped, quiet = list(filter(is_halted, never)), list(filter(facts.is_quiet, never))
    if stopped:
        return _stopped(facts, StallKind.TAKER_IDLE, stopped, "which could take")
    gone = _who_never_came(facts)
    if len(quiet) == 1 and not gone:
        since = max(facts.waited_since, quiet[0].last_seen)
        stall = _suspicion(facts, StallKind.TAKER_IDLE, quiet, "which could take", since)
        return stall and replace(
            stall, remedy=f"{_START_IT}; if it is that one, {_SEE}", command=None
        )
    return Stall(
        StallKind.TAKER_IDLE,
        f"{facts.wait()}, and nobody takes: no take has been served yet{gone}",
        f"{_START_IT}; if it is attached, {_SEE}",
        None,
    )


def _applier_idle(facts: Facts) -> Stall | None:
    """Others are in no call, and a take has waited for their gradients for long."""
    if not facts.lacks_gradients or not facts.is_long(facts.seen.last_applied):
        return None
    known = [each for each in facts.could_apply if facts.applies(each)]
    suspects = facts.late or known
    stopped = list(filter(is_halted, suspects))
    if stopped:
        return _stopped(facts, StallKind.APPLIER_IDLE, stopped, "which could send more")
    idle = list(filter(facts.is_quiet, suspects))
    if suspects and not idle:
        return None
    have = "has" if len(idle) == 1 else "have"
    which = f"which {have} not applied to it" if facts.late else ""
    if idle:
        return _suspicion(
            facts, StallKind.APPLIER_IDLE, idle, which, max(each.last_seen for each in idle)
        )
    return _nobody_applies(facts)


def _nobody_applies(facts: Facts) -> Stall | None:
    """As above; all known appliers wait, and who else is to apply is not known."""
    never = facts.could_apply
    came = max((each.attached_at for each in never), default=0.0)
    if not never or not facts.is_long(came):
        return None
    stopped, quiet = list(filter(is_halted, never)), list(filter(facts.is_quiet, never))
    if stopped:
        return _stopped(facts, StallKind.APPLIER_IDLE, stopped, "which could send more")
    gone = _who_is_gone(facts)
    start = "start processes that apply; "
    if len(quiet) == 1 and not gone:
        which, since = "which has not applied to it", quiet[0].last_seen
        stall = _suspicion(facts, StallKind.APPLIER_IDLE, quiet, which, since)
        return stall and replace(stall, remedy=f"{start}if it is one, {_SEE}")
    return Stall(
        StallKind.APPLIER_IDLE,
        f"{facts.wait()}, and nobody sends more{gone}",
        f"{start}if one is attached, {_SEE}",
        None,
    )


def _suspicion(
    facts: Facts, kind: StallKind, idle: list[AttachedProcess], which: str, since: float
) -> Stall | None:
    """Return a standstill that is not proved: others wait for these idle processes.

    None: one of them is in a call in another segment.
    """
    if any(map(facts.works_elsewhere, idle)):
        return None
    there = sorted({name for each in idle if (name := facts.waits_elsewhere(each))})
    # The conditions of the processes (such as sleeping), if /proc shows them.
    conditions = ", ".join(sorted({each.condition for each in idle if each.condition}))
    condition = f" ({conditions})" if conditions else ""
    have = "has" if len(idle) == 1 else "have"
    last = max(each.last_seen for each in idle)
    # A process may look in from another thread.
    doing = "been in no call" if facts.is_long(last) else "neither applied nor taken"
    idle_for = f"{facts.now - (last if facts.is_long(last) else since):.0f} s"
    costs = "costs its batch" if kind is StallKind.APPLIER_IDLE else "loses no gradient"
    what = "batches" if kind is StallKind.APPLIER_IDLE else "rounds"
    who = f"{facts.wait()}; {pids(labels(idle))}{f', {which},' if which else ''} {are(idle)} alive"
    if there:
        return Stall(
            kind,
            f"{who}{condition}, and {'waits' if len(idle) == 1 else 'wait'} in {', '.join(there)}",
            "see what is waited for there",
            command("shmacc-inspect", "check", *there),
        )
    return Stall(
        kind,
        f"{who}{condition}, and {have} {doing} for {idle_for}",
        f"{_LOOK_AT_IT.format(what)}{costs}, and {_ENDS_WAITS}",
        None,
    )


def _stopped(facts: Facts, kind: StallKind, stopped: list[AttachedProcess], which: str) -> Stall:
    """Return a standstill that is not proved, since others could go on: these are stopped."""
    return Stall(
        kind,
        f"{facts.wait()}; {pids(labels(stopped))}, {which}, {are(stopped)} {stopped[0].condition}",
        *goes_on(labels(stopped), stopped[0].condition),
    )


IN_THE_WAY: tuple[Rule, ...] = (_lock_holder_stopped, _lock_held_long, _name_holder_stopped)
WAITS: tuple[Rule, ...] = (
    _round_holder_stopped,
    _taker_does_not_take,
    _appliers_stopped,
    _quorum_out_of_reach,
    _takers_stopped,
    _nobody_takes,
)
SUSPICIONS: tuple[Rule, ...] = (_holder_idle, _taker_idle, _nobody_took_yet, _applier_idle)


# -- waits across segments -------------------------------------------------------------------------


def _blocked(facts: Facts, elsewhere: Elsewhere, path: tuple[str, ...]) -> Stall | None:
    """Return the standstill if all who could end the waits here wait in other segments.

    Args:
        facts: Of the segment.
        elsewhere: The other ones.
        path: The segments from the first one to this one.
    """
    found: Stall | None = None
    for process, there in _needed(facts):
        found = _because(facts, elsewhere, path, process, there) if there else None
        if found is None:
            return None
    return found


def _needed(facts: Facts) -> list[tuple[AttachedProcess, str | None]]:
    """Return who could end the waits, and in which segment each of them waits; None: in none."""
    if facts.lacks_an_end and facts.seen.round_holder:
        needed = [facts.seen.round_holder]
    elif facts.lacks_gradients:
        known = [each for each in facts.could_apply if facts.applies(each)]
        needed = facts.late or known or facts.could_apply
    else:
        needed = facts.could_take if facts.lacks_a_take else []
    waits = [(each, facts.waits_elsewhere(each)) for each in needed if not is_halted(each)]
    if any(there for _, there in waits):  # then a bystander is no reason to hope
        waits = [(each, there) for each, there in waits if there or not facts.never_did(each)]
    return waits


def _because(
    facts: Facts, elsewhere: Elsewhere, path: tuple[str, ...], process: AttachedProcess, there: str
) -> Stall | None:
    begins = f"{facts.wait()}; pid {process.pid_label}, which could end that, waits in {there}"
    if there in path:
        return Stall(
            StallKind.DEADLOCK,
            f"{begins}: each waits for the other",
            "end one of them, and let the program make these calls in another order; a wait that "
            "ends consumes nothing",
            _cancel(facts) if facts.head else None,
        )
    other = elsewhere.facts(there)
    if other is None:
        return None
    proved = _proved(other)
    if proved:
        return Stall(
            StallKind.WAITS_ELSEWHERE,
            f"{begins}, which stands still: {proved[0].problem}",
            proved[0].remedy,
            proved[0].command,
        )
    if not other.moves_no_more():
        return None
    further = _blocked(other, elsewhere, (*path, there))
    if further is None:
        return None
    end = _cancel(facts) if facts.head and further.kind is StallKind.DEADLOCK else further.command
    return replace(further, problem=f"{begins}; there, {further.problem}", command=end)


def _cancel(facts: Facts) -> str:
    return command("shmacc-inspect", "cancel", facts.name, "--yes")
