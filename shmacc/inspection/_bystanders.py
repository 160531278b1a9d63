"""Which processes only keep a segment open: they are not counted on to do what the dead did.

What an idle process will do cannot be seen from outside. But one that was there when a process that
did something (took, applied) was still alive, and has never done the same, is a bystander: the
parent that started the job, say. One that came later may be there in place of the dead one.
"""

from collections.abc import Callable

from shmacc._layout import layout
from shmacc.inspection._observation import Observation
from shmacc.inspection._records import AttachedProcess

_FOUND = (
    1.0  # seconds; a death may be found by the very process that comes in place of the dead one
)


def deaths(seen: Observation) -> list[tuple[int, float]]:
    """Return the pids, and when they were found, of dead processes whose entries are free again."""
    return [
        (event["pid"], event["at_ns"] / 1e9)
        for event in seen.view.events()
        if layout.EVENT_NAMES.get(event["kind"]) == "died"
    ]


def last_death(seen: Observation, did: Callable[[AttachedProcess], bool]) -> float | None:
    """Return when a process that did something died, at the earliest; None if none is known to.

    What those did whose entries are free again is not known: it is taken for the same.
    """
    dead = [each.last_seen for each in seen.processes if not each.alive and did(each)]
    return max(dead or [moment - _FOUND for _, moment in deaths(seen)], default=None)


def is_bystander(process: AttachedProcess, death: float | None) -> bool:
    """Whether a process that has not done the same was there before this death."""
    return death is not None and process.attached_at < death
