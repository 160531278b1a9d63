"""Rules for proved and for suspected standstills of one segment.

The waits of a segment have a `Need`: the end of a round, gradients, or a take. The processes that
could meet the need may be stopped, gone, idle or unknown: each case has its own message.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from shmacc._base import layout
from shmacc._base.layout import Activity
from shmacc.inspection._findings import command, goes_on, pids
from shmacc.inspection._process_records import AttachedProcess, DepartedProcess
from shmacc.inspection._processes import HALTED
from shmacc.inspection._records import LockState, Stall, StallKind
from shmacc.inspection._stall_facts import (
    LONG_OPERATION,
    Facts,
    applies,
    is_halted,
    lost_at,
    takes,
    waits_for_a_take,
)


class _Words(NamedTuple):
    """Words for messages about processes that could meet a need, but perhaps do not."""

    kind: StallKind
    could: str
    never: str  # for a process that has done nothing yet
    nobody: str
    start: str
    what: str  # what may take long
    costs: str  # what it costs to end a process


_TAKES: Final = _Words(
    StallKind.TAKER_IDLE,
    could="which could take",
    never="which could take",
    nobody="nobody takes: no take has been served yet",
    start="start the process that takes",
    what="rounds",
    costs="loses no gradient",
)
_GRADIENTS: Final = _Words(
    StallKind.APPLIER_IDLE,
    could="which could send more",
    never="which has not applied to it",
    nobody="nobody sends more",
    start="start processes that apply",
    what="batches",
    costs="costs its batch",
)


class Need(NamedTuple):
    """What the waits of a segment need.

    Attributes:
        words: The words for the need.
        able: The living processes that could meet it.
        known: The processes of `able` that are expected to meet it, by roles; empty: unknown.
        which: What messages say about the `known` processes.
        since: When there was progress last.
    """

    words: _Words
    able: list[AttachedProcess]
    known: list[AttachedProcess]
    which: str
    since: float


def need_of(facts: Facts) -> Need | None:
    """Return what the waits need; None: nothing, or the head of the queue can go on by itself."""
    seen, holder, held = facts.seen, facts.seen.round_holder, facts.seen.state["round"]
    if facts.lacks_an_end and holder is not None and held is not None:
        since = max(seen.last_applied, held["since_ns"] / 1e9)
        return Need(_TAKES, [holder], [holder], "which has a round open", since)
    if facts.lacks_gradients:
        which = "which {have} not applied to it" if facts.late else ""
        known = facts.late or facts.appliers
        return Need(_GRADIENTS, facts.could_apply, known, which, seen.last_applied)
    if facts.lacks_a_take:
        since = max([facts.waited_since, *(each.last_took or 0.0 for each in facts.takers)])
        return Need(_TAKES, facts.could_take, facts.takers, "which took before", since)
    return None


# -- proved ----------------------------------------------------------------------------------------


def proved(facts: Facts) -> tuple[Stall, ...]:
    """Return the proved standstills: what blocks all processes, and why waits do not end."""
    found = [*_in_the_way(facts)]
    if not facts.seen.state["finished"]:  # else nobody waits any more
        found.append(_wait(facts))
    return tuple(filter(None, found))


def _in_the_way(facts: Facts) -> Iterator[Stall | None]:
    lock, arrays = facts.seen.lock, facts.seen.config["kind"] in layout.ARRAYS
    nobody_can = f"no process can {'update or copy them' if arrays else 'apply or take'}"
    if lock.held:
        problem = f"pid {lock.pid_label} is {lock.condition} and holds the lock: {nobody_can}"
        yield _if_halted(StallKind.LOCK_HOLDER_STOPPED, problem, [lock])
    held_for = facts.now - (lock.since or facts.now)
    if lock.held and not lock.condition and held_for >= LONG_OPERATION:
        yield Stall(
            StallKind.LOCK_HELD_LONG,
            f"pid {lock.pid_label} has been in an operation with the lock for {held_for:.0f} s: "
            f"{nobody_can}; whether it is stopped cannot be seen from here",
            "look in its pid namespace, or as root; let it go on, or end it",
            None,
        )
    condition, pid = facts.seen.name_holder_condition, str(lock.name_pid)
    if condition in HALTED:
        problem = f"pid {pid} is {condition} and holds the name: no process can attach or remove it"
        yield Stall(StallKind.NAME_HOLDER_STOPPED, problem, *goes_on([pid], condition))


def _wait(facts: Facts) -> Stall | None:
    holder = facts.seen.round_holder
    if holder is not None:
        problem = f"pid {holder.pid_label} has a round open and is {holder.condition}: no process "
        return _if_halted(StallKind.ROUND_HOLDER_STOPPED, f"{problem}can apply or take", [holder])
    if facts.is_reached:
        return _taker_does_not_take(facts)
    if facts.lacks_gradients:
        return _gradients_do_not_come(facts)
    return _nobody_takes(facts) if facts.lacks_a_take else None


def _taker_does_not_take(facts: Facts) -> Stall | None:
    head = facts.head
    assert head is not None  # noqa: S101
    have = "has" if head.num_required == 1 else "have"
    problem = f"{_heads_wait(facts)}, which {have} arrived"
    if facts.seen.state["update"] is not None:
        problem = f"pid {head.pid_label} waits to take, and the round is final"
    condition = facts.taking[0].condition if facts.taking else ""
    stopped = f"{problem}; it is {condition} and does not take them"
    overdue = Stall(
        StallKind.TAKER_OVERDUE,
        f"{problem}; it does not take them",
        "see what it does; its wait can be ended, which consumes nothing",
        cancel(facts),
    )
    found = _if_halted(StallKind.TAKER_STOPPED, stopped, facts.taking)
    return found or (overdue if head.overdue else None)


def _gradients_do_not_come(facts: Facts) -> Stall | None:
    overdue = facts.nobody_applied_for_long()
    # Known appliers that are late are reported, even if others might send a first gradient.
    able = facts.appliers if facts.late else facts.could_apply
    if able:
        if not overdue and all(map(facts.waits_no_more, able)):
            return None
        problem = (
            f"{waits(facts)}, and all processes that could send more are {able[0].condition}: "
            f"{pids(_labels(able))}"
        )
        return _if_halted(StallKind.APPLIERS_STOPPED, problem, able)
    if not overdue or facts.comes:
        return None
    # Without a capacity, only memory can run out.
    no_memory = facts.seen.config["capacity"] is None and any(
        each.activity == Activity.WAITS_FOR_ROOM for each in facts.alive
    )
    nobody, start = "no process that is attached can send more", "start processes that apply"
    if no_memory:
        nobody = (
            "those that could send more wait for room in /dev/shm, of which "
            f"{facts.seen.state['kept_free']} bytes are kept for others"
        )
        start = "let rounds need fewer gradients, or give /dev/shm more memory"
    waiting = f" (waiting for this take: {len(facts.waiting)})" if facts.waiting else ""
    return Stall(
        StallKind.QUORUM_OUT_OF_REACH,
        f"{waits(facts)}, and {nobody}: {len(facts.alive)} alive{waiting}{_who_is_gone(facts)}",
        f"{start}; or end the wait, which consumes nothing",
        cancel(facts),
    )


def _nobody_takes(facts: Facts) -> Stall | None:
    able, lost = facts.could_take, facts.lost_takers
    nobody = f"{waits(facts)}, and nobody takes: "
    if able:
        problem = f"{nobody}{pids(_labels(able))}, which could, {_are(able)} {able[0].condition}"
        also = [each for each in facts.alive if is_halted(each)]
        return _if_halted(StallKind.NOBODY_TAKES, problem, able, also)
    if facts.comes or not facts.nobody_took_for_long():
        return None
    # A new process may fail in the same way.
    mend_first = "mend what it failed with, then " if lost and not lost[-1].died else ""
    return Stall(
        StallKind.NOBODY_TAKES,
        nobody + _why_nobody_takes(facts),
        f"{mend_first}start the process that takes: the gradients that are there wait for it; or "
        "end the processes that wait",
        None,
    )


# -- suspected -------------------------------------------------------------------------------------


def suspected(facts: Facts) -> Stall | None:
    """Return a suspicion: living processes could end the waits, but have not done so for long."""
    need = need_of(facts)
    if need is None or not need.able:
        return None
    suspects = need.known or [each for each in need.able if not applies(each)]
    came = [] if need.known else [each.attached_at for each in suspects]
    if not facts.is_long(max([need.since, *came])):
        return None
    words = need.words
    stopped = [each for each in suspects if is_halted(each)]
    if stopped:
        who = f"{pids(_labels(stopped))}, {words.could}, {_are(stopped)} {stopped[0].condition}"
        return _if_halted(words.kind, f"{waits(facts)}; {who}", stopped)
    if need.known:
        return _known_ones_do_not(facts, need)
    quiet = [each for each in suspects if facts.is_quiet(each)]
    gone = _who_is_gone(facts) if words is _GRADIENTS else _who_never_came(facts)
    see = "see what it does (py-spy dump, its log)"
    if len(quiet) == 1 and not gone:
        stall = _idle(facts, need, quiet, words.never)
        remedy = f"{words.start}; if it is that one, {see}"
        return stall and replace(stall, remedy=remedy, command=None)
    problem = f"{waits(facts)}, and {words.nobody}{gone}"
    return Stall(words.kind, problem, f"{words.start}; if one is attached, {see}", None)


def _known_ones_do_not(facts: Facts, need: Need) -> Stall | None:
    # An applier must idle for long: it may just be back. A taker need not: other threads may call.
    is_idle = facts.is_quiet if need.words is _GRADIENTS else _is_in_no_call
    idle = [each for each in need.known if is_idle(each)]
    if idle:
        return _idle(facts, need, idle, need.which)
    if not facts.lacks_a_take or not all(map(waits_for_a_take, need.known)):
        return None
    lately = [each for each in facts.lost_takers if lost_at(each) > need.since - 1.0]
    why = f"{pids(_labels(need.known))}, which did, wait"  # other threads may take
    return Stall(
        need.words.kind,
        f"{waits(facts)}, and nobody takes: {_why_nobody_takes(facts) if lately else why}",
        "start a process that takes, if none of their threads is about to",
        None,
    )


def _is_in_no_call(process: AttachedProcess) -> bool:
    return process.activity == Activity.IDLE


def _idle(facts: Facts, need: Need, idle: list[AttachedProcess], which: str) -> Stall | None:
    """Return a suspicion about idle processes; None: one of them is busy in another segment."""
    there = sorted({name for each in idle if (name := facts.waits_elsewhere(each))})
    if any(facts.call_elsewhere(each)[0] and not facts.waits_elsewhere(each) for each in idle):
        return None
    # The conditions of the processes (such as sleeping), if /proc shows them.
    conditions = ", ".join(sorted({each.condition for each in idle if each.condition}))
    have, wait = ("has", "waits") if len(idle) == 1 else ("have", "wait")
    which = f", {which.format(have=have)}," if which else ""
    who = f"{waits(facts)}; {pids(_labels(idle))}{which} {_are(idle)} alive"
    who += f" ({conditions})" if conditions else ""
    if there:
        return Stall(
            need.words.kind,
            f"{who}, and {wait} in {', '.join(there)}",
            "see what is waited for there",
            command("shmacc-inspect", "check", *there),
        )
    last = max(each.last_seen for each in idle)
    quiet = facts.is_long(last)
    doing = "been in no call" if quiet else "neither applied nor taken"
    return Stall(
        need.words.kind,
        f"{who}, and {have} {doing} for {facts.now - (last if quiet else need.since):.0f} s",
        f"see what it does, if its {need.words.what} do not take that long (py-spy dump, its log); "
        f'to end it {need.words.costs}, and ends waits that have on_death="raise"',
        None,
    )


# -- words -----------------------------------------------------------------------------------------


def waits(facts: Facts) -> str:
    """Say in words what the calls wait for."""
    if facts.lacks_gradients:
        count = facts.seen.state["count"]
        return f"{_heads_wait(facts)}; {count} {'is' if count == 1 else 'are'} there"
    waiting = facts.waiting
    if not waiting:
        return f"{_heads_wait(facts)}, and a round is open"
    for_what = Counter(each.activity.removeprefix("waits ") for each in waiting)
    if len(waiting) == 1:
        return f"pid {waiting[0].pid_label} waits {next(iter(for_what))}"
    if len(for_what) == 1:
        return f"{len(waiting)} processes wait {next(iter(for_what))}"
    each = ", ".join(f"{number} {what}" for what, number in for_what.items())
    return f"{len(waiting)} processes wait ({each})"


def cancel(facts: Facts) -> str:
    """Return the command that ends the waits."""
    return command("shmacc-inspect", "cancel", facts.name, "--yes")


def _if_halted(
    kind: StallKind,
    problem: str,
    those: Sequence[AttachedProcess | LockState],
    also: list[AttachedProcess] | None = None,
) -> Stall | None:
    """Return a standstill if all of `those` are stopped; the remedy continues `also` or `those`."""
    if not those or any(each.condition not in HALTED for each in those):
        return None
    return Stall(kind, problem, *goes_on(_labels(also or those), those[0].condition))


def _heads_wait(facts: Facts) -> str:
    assert facts.head is not None  # noqa: S101
    gradients = "gradient" if facts.head.num_required == 1 else "gradients"
    return f"pid {facts.head.pid_label} waits for {facts.head.num_required} {gradients}"


def _who_is_gone(facts: Facts) -> str:
    """Say which processes died lately or failed, and why, except processes that only took."""
    step = facts.seen.state["step"]
    news = {event.pid_label for event in facts.seen.events if event.step >= step - 1}
    news |= {each.pid_label for each in facts.seen.departed if not each.died}
    gone = [x for x in facts.lost if x.is_attached or x.pid_label in news]
    gone = [each for each in gone if applies(each) or not takes(each)]
    dead = [each for each in gone if each.died]
    died = f"; {pids(_labels(dead))} {_are(dead)} dead" if dead else ""
    return died + "".join(f"; pid {each.pid_label} {each.fate}" for each in gone if not each.died)


def _why_nobody_takes(facts: Facts) -> str:
    dead = [each for each in facts.lost_takers if each.died]
    said = [f"{pids(_labels(dead))}, which did, {_are(dead)} dead"] if dead else []
    said += [f"pid {x.pid_label}, which did, {x.fate}" for x in facts.lost_takers if not x.died]
    if said:
        return "; ".join(said)
    if facts.seen.state["counters"]["takes"]:
        return "the processes that took have left"
    return f"no take has been served yet{_who_never_came(facts)}"


def _who_never_came(facts: Facts) -> str:
    """Say which processes are gone without having taken or applied: perhaps one was to take."""
    gone = [each for each in facts.lost if not takes(each) and not applies(each)]
    return f"; {pids(_labels(gone))} {_are(gone)} gone" if gone else ""


def _labels(processes: Iterable[AttachedProcess | DepartedProcess | LockState]) -> list[str]:
    return [each.pid_label for each in processes]


def _are(several: Sequence[AttachedProcess | DepartedProcess]) -> str:
    return "is" if len(several) == 1 else "are"
