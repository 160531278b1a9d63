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

from dataclasses import replace
from typing import NamedTuple

from shmacc._base import layout
from shmacc.inspection._elsewhere import Elsewhere
from shmacc.inspection._observation import Observation
from shmacc.inspection._process_records import AttachedProcess
from shmacc.inspection._processes import Look
from shmacc.inspection._records import Stall, StallKind
from shmacc.inspection._stall_facts import Facts, is_halted
from shmacc.inspection._stall_words import waits
from shmacc.inspection._suspicions import SUSPICIONS
from shmacc.inspection._waits import cancel, first, proved


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
    found = proved(facts)
    if found or seen.state["finished"] or seen.config["kind"] in layout.ARRAYS:
        return Verdict(found, None)
    chain = _blocked(facts, elsewhere, (name,)) if facts.moves_no_more() else None
    if chain is not None:
        return Verdict((chain,), None)
    return Verdict((), first(SUSPICIONS, facts))


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
    calls = [(each, facts.waits_elsewhere(each)) for each in needed if not is_halted(each)]
    if any(there for _, there in calls):  # then a bystander is no reason to hope
        calls = [(each, there) for each, there in calls if there or not facts.never_did(each)]
    return calls


def _because(
    facts: Facts, elsewhere: Elsewhere, path: tuple[str, ...], process: AttachedProcess, there: str
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
    other = elsewhere.facts(there)
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
    further = _blocked(other, elsewhere, (*path, there))
    if further is None:
        return None
    end = cancel(facts) if facts.head and further.kind is StallKind.DEADLOCK else further.command
    return replace(further, problem=f"{begins}; there, {further.problem}", command=end)
