"""Which processes only keep a segment open: they are not counted on to do what the dead did.

What an idle process will do cannot be seen from outside. But one that was there when a process that
did something (took, applied) was still alive, and has never done the same, is a bystander: the
parent that started the job, say. One that came later may be there in place of the dead one.
"""

from collections.abc import Callable

from shmacc._layout import layout
from shmacc.inspection._observation import Observation
from shmacc.inspection._records import AttachedProcess, DepartedProcess

_FOUND = (
    1.0  # seconds; a death may be found by the very process that comes in place of the dead one
)


def last_loss(
    seen: Observation,
    did: Callable[[AttachedProcess], bool],
    had_done: Callable[[DepartedProcess], bool],
) -> float | None:
    """Return when a process that did something died or failed, at the earliest; None: none has.

    Args:
        seen: What a look has found.
        did: Whether an attached process did it, or a dead one whose entry is not free yet.
        had_done: Whether one that is gone did it. Where that is not on record any more, those that
            the events name are taken for such.
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
    """Whether a process that has not done it was attached before this death."""
    return death is not None and process.attached_at < death
