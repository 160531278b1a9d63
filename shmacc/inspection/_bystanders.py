"""Tells bystanders from processes that may take or apply.

What an idle process will do cannot be seen from outside. But if a process that took (or applied)
has died, an idle one that was attached before that death and never took (or applied) is a
bystander: the parent that started the job, say. One that came later may replace the dead one.
"""

from collections.abc import Callable

from shmacc._layout import layout
from shmacc.inspection._observation import Observation
from shmacc.inspection._records import AttachedProcess, DepartedProcess

_FOUND = 1.0  # seconds; a death may be found only by the process that replaces the dead one


def last_loss(
    seen: Observation,
    did: Callable[[AttachedProcess], bool],
    had_done: Callable[[DepartedProcess], bool],
) -> float | None:
    """Return when the last process that took (or applied) died or failed; None: none has.

    Args:
        seen: What a look has found.
        did: Whether a process in the table took (or applied).
        had_done: Whether a departed process took (or applied). If none is on record, every death
            and failure among the events counts.
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
    """Whether a process, which never took (or applied), was attached before this death."""
    return death is not None and process.attached_at < death
