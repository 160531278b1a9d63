"""Rules for standstills that are not proved: who could end the wait is alive, or may come."""

from dataclasses import replace

from shmacc._base.layout import Activity
from shmacc.inspection._findings import command, goes_on, pids
from shmacc.inspection._process_records import AttachedProcess
from shmacc.inspection._records import Stall, StallKind
from shmacc.inspection._stall_facts import Facts, is_halted, waits_for_a_take
from shmacc.inspection._stall_words import are, labels, waits
from shmacc.inspection._waits import Rule, who_is_gone, who_never_came, why_nobody_takes

_LOOK_AT_IT = "see what it does, if its {} do not take that long (py-spy dump, its log); to end it "
_START_IT = "start the process that takes"
_SEE = "see what it does (py-spy dump, its log)"
_ENDS_WAITS = 'ends waits that have on_death="raise"'


def _holder_idle(facts: Facts) -> Stall | None:
    """Others have waited for long for the end of a round, whose process is in no call."""
    holder, held = facts.seen.round_holder, facts.seen.state["round"]
    if not facts.lacks_an_end or holder is None or held is None or holder.activity != Activity.IDLE:
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
    since = max(facts.waited_since, *(each.last_took or 0.0 for each in facts.takers))
    if not facts.is_long(since):
        return None
    if stopped:
        return _stopped(facts, StallKind.TAKER_IDLE, stopped, "which took before")
    if all(map(waits_for_a_take, facts.takers)):  # in one of their threads
        lost = [each for each in facts.lost_takers if each.at > since - 1.0]
        why = why_nobody_takes(facts) if lost else f"{pids(labels(facts.takers))}, which did, wait"
        return Stall(
            StallKind.TAKER_IDLE,
            f"{waits(facts)}, and nobody takes: {why}",
            "start a process that takes, if none of their threads is about to",
            None,
        )
    if any(each.activity != Activity.IDLE for each in facts.takers):
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
    gone = who_never_came(facts)
    if len(quiet) == 1 and not gone:
        since = max(facts.waited_since, quiet[0].last_seen)
        stall = _suspicion(facts, StallKind.TAKER_IDLE, quiet, "which could take", since)
        return stall and replace(
            stall, remedy=f"{_START_IT}; if it is that one, {_SEE}", command=None
        )
    return Stall(
        StallKind.TAKER_IDLE,
        f"{waits(facts)}, and nobody takes: no take has been served yet{gone}",
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
    gone = who_is_gone(facts)
    start = "start processes that apply; "
    if len(quiet) == 1 and not gone:
        which, since = "which has not applied to it", quiet[0].last_seen
        stall = _suspicion(facts, StallKind.APPLIER_IDLE, quiet, which, since)
        return stall and replace(stall, remedy=f"{start}if it is one, {_SEE}")
    return Stall(
        StallKind.APPLIER_IDLE,
        f"{waits(facts)}, and nobody sends more{gone}",
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
    who = f"{waits(facts)}; {pids(labels(idle))}{f', {which},' if which else ''} {are(idle)} alive"
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
        f"{waits(facts)}; {pids(labels(stopped))}, {which}, {are(stopped)} {stopped[0].condition}",
        *goes_on(labels(stopped), stopped[0].condition),
    )


SUSPICIONS: tuple[Rule, ...] = (_holder_idle, _taker_idle, _nobody_took_yet, _applier_idle)
