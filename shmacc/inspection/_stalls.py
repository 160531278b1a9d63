"""Finds out why a segment stands still: rules over one look at it and other segments.

A cause is proved only if nothing but a person, or a new process, can end it: a stopped process that
others wait for, a take whose gradients no attached process can send, a wait for a take that no
attached process makes, or a circle of such waits. The library does not know how many workers there
will be, and a process may be about to attach. So if nobody can go on, that must have lasted for
some seconds (`_stall_facts` says how long, and which processes count). If the processes that could
go on are stopped, the cause is proved at once.

If nothing is proved, there may be a suspicion: a process for which others have waited for long is
alive, and may be computing.
"""

from dataclasses import replace
from typing import NamedTuple

from shmacc._base import layout
from shmacc.inspection._observation import Observation
from shmacc.inspection._process_records import AttachedProcess
from shmacc.inspection._processes import Look
from shmacc.inspection._records import Stall, StallKind
from shmacc.inspection._stall_facts import Facts, applies, is_halted, takes
from shmacc.inspection._waits import cancel, need_of, proved, suspected, waits


class Verdict(NamedTuple):
    """What is known of a segment's standstill.

    Attributes:
        proved: Why the segment stands still; empty: no cause is known.
        suspected: What perhaps makes the segment stand still; None: nothing, or a cause is proved.
    """

    proved: tuple[Stall, ...]
    suspected: Stall | None


def verdict(name: str, seen: Observation, look: Look) -> Verdict:
    """Judge the segment of this system name."""
    if not seen.steady:
        return Verdict((), None)
    facts = Facts(name, seen, look)
    found = tuple(map(facts.run.remedy, proved(facts)) if facts.run else proved(facts))
    if found or seen.state["finished"] or seen.config["kind"] in layout.ARRAYS:
        return Verdict(found, None)
    chain = _blocked(facts, (name,)) if facts.moves_no_more() else None
    if chain is not None:
        return Verdict((facts.run.remedy(chain) if facts.run else chain,), None)
    return Verdict((), None if facts.comes else suspected(facts))


# -- waits across segments -------------------------------------------------------------------------


def _blocked(facts: Facts, path: tuple[str, ...]) -> Stall | None:
    """Return the standstill if all processes that could end the waits wait in other segments.

    Args:
        facts: The facts of the segment.
        path: The segments from the first one to this one.
    """
    need, found = need_of(facts), None
    needed = (need.known or need.able) if need else []
    waits_in = [(each, facts.waits_elsewhere(each)) for each in needed if not is_halted(each)]
    if any(there for _, there in waits_in):
        # Do not expect help from a process that attached long ago, and has no role and no wait.
        waits_in = [
            (each, there)
            for each, there in waits_in
            if there or takes(each) or applies(each) or not facts.is_long(each.attached_at)
        ]
    for process, there in waits_in:
        found = _because(facts, path, process, there) if there else None
        if found is None:
            return None
    return found


def _because(
    facts: Facts, path: tuple[str, ...], process: AttachedProcess, there: str
) -> Stall | None:
    begins = f"{waits(facts)}; pid {process.pid_label}, which could end that, waits in {there}"
    if there in path:
        return Stall(
            StallKind.DEADLOCK,
            f"{begins}: each waits for the other",
            "end one of them, and let the program make these calls in another order; a wait that "
            "ends consumes nothing",
            cancel(facts) if facts.head else None,
        )
    other = facts.of_other(there)
    if other is None:
        return None
    found = proved(other)
    if found:
        return Stall(
            StallKind.WAITS_ELSEWHERE,
            f"{begins}, which stands still: {found[0].problem}",
            found[0].remedy,
            found[0].command,
        )
    if not other.moves_no_more():
        return None
    further = _blocked(other, (*path, there))
    if further is None:
        return None
    end = cancel(facts) if facts.head and further.kind is StallKind.DEADLOCK else further.command
    return replace(further, problem=f"{begins}; there, {further.problem}", command=end)
